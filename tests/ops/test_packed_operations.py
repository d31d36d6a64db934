"""Operations on packed samples: what they promise besides the kernels' numbers."""

import pytest
import torch
from torch.library import opcheck
from torch.testing import assert_close

from vitfast import ops, packed, ref
from vitfast.kernels import launch

SIZES = [5, 20, 1, 33]
OFFSETS = torch.tensor([0, *SIZES]).cumsum(0).int()
T, H, D = sum(SIZES), 2, 16
MODES = ["off", pytest.param("on", marks=pytest.mark.skipif(not launch.INTERPRETED, reason="needs the interpreter"))]
TOL = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(params=MODES)
def mode(request):
    with ops.use_kernels(request.param):
        yield request.param


def block_weights(width, dtype=torch.float32):
    shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    return [torch.randn(s).mul(0.3).to(dtype).requires_grad_() for s in shapes]


def each_alone(x, weights, drop_path=None, rope=None, **options):
    """The block on each sample by itself, in float64."""
    found, ends = [], OFFSETS.tolist()
    for s, (first, end) in enumerate(zip(ends, ends[1:])):
        own = {} if rope is None else dict(rope=tuple(t[first:end] for t in rope))
        drop = {} if drop_path is None else dict(drop_path=drop_path[s : s + 1])
        found.append(ref.attention_block(x[None, first:end], *weights, num_heads=H, **own, **drop, **options)[0])
    return torch.cat(found)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("rope", [False, True])
def test_attention_block_on_packed_samples(mode, norm, rope):
    width = H * D
    x, weights = torch.randn(T, width, requires_grad=True), block_weights(width)
    if norm == "rms":
        weights[1] = None
    angle = torch.randn(T, D // 2)
    rope = (angle.cos().requires_grad_(), angle.sin().requires_grad_()) if rope else None
    scale, factors = torch.rand(width, requires_grad=True), torch.tensor([0.0, 2.0, 2.0, 2.0])
    leaves = [x, *(w for w in weights if w is not None), scale, *(rope or ())]
    options = dict(num_heads=H, norm=norm, layer_scale=scale, rope=rope, offsets=OFFSETS, longest=max(SIZES))
    y = ops.attention_block(x, *weights, drop_path=factors, **options)
    doubles = {id(t): t.detach().double().requires_grad_() for t in leaves}
    of = lambda t: None if t is None else doubles[id(t)]  # noqa: E731
    double_rope = None if rope is None else tuple(map(of, rope))
    truth = each_alone(of(x), [of(w) for w in weights], factors, double_rope, norm=norm, layer_scale=of(scale))
    dy = torch.randn_like(y)
    grads, exact = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(truth, doubles.values(), dy.double())
    assert_close(y.double(), truth, **TOL)
    for mine, theirs in zip(grads, exact, strict=True):
        assert_close(mine.double(), theirs, atol=2e-5 * max(1, theirs.abs().max().item()), rtol=1e-5)
    by_token = factors[packed.owners(OFFSETS, T)]
    assert torch.equal(ops.attention_block(x, *weights, drop_path=by_token, **options), y)


def test_mlp_blocks_take_tokens_of_any_samples(mode):
    width = 16
    x, drop = torch.randn(T, width, requires_grad=True), torch.rand(T)
    norm, fc1, fc2 = block_weights(width)[:2], (torch.randn(24, width), torch.randn(24)), (torch.randn(width, 24), None)
    y = ops.mlp_block(x, *norm, *fc1, *fc2, drop_path=drop)
    assert_close(y, ops.mlp_block(x[:, None], *norm, *fc1, *fc2, drop_path=drop)[:, 0], **TOL)
    dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert dx.shape == x.shape
    y = ops.gated_mlp_block(x, *norm, *fc1, *fc1, *fc2, drop_path=drop)
    assert_close(y, ops.gated_mlp_block(x[:, None], *norm, *fc1, *fc1, *fc2, drop_path=drop)[:, 0], **TOL)


def test_jagged_tensors_in_and_out(mode):
    qkv = [torch.randn(n, 3, H, D) for n in SIZES]
    jagged = torch.nested.nested_tensor(qkv, layout=torch.jagged, requires_grad=True)
    out = ops.attention(jagged)
    assert out.is_nested and out.layout == torch.jagged and out.shape[2:] == (H, D)
    alone = [ref.attention(*x[None].unbind(2))[0] for x in qkv]
    for mine, theirs in zip(out.unbind(), alone, strict=True):
        assert_close(mine, theirs, **TOL)
    grad = torch.autograd.grad(out.values(), jagged, torch.randn(T, H, D))[0]
    assert grad.is_nested and grad.shape == jagged.shape
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, jagged.offsets()) for x in jagged.values().unbind(1))
    assert_close(ops.attention(q, k, v).values(), out.values(), **TOL)


def test_jagged_tensors_that_do_not_fit():
    one, other = (
        torch.nested.nested_tensor([torch.randn(n, H, D) for n in s], layout=torch.jagged) for s in ((3, 4), (4, 3))
    )
    with pytest.raises(ValueError, match="jagged q, k and v must be alike"):
        ops.attention(one, other, other)
    with pytest.raises(ValueError, match="must be jagged, all of them"):
        ops.attention(one, one.values(), one.values())


def test_autocast_takes_packed_samples(mode):
    q, k, v = (torch.randn(T, H, D) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.attention(q, k, v, offsets=OFFSETS, longest=33)
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), ops.attention(q, k, v, offsets=OFFSETS, longest=33), atol=3e-2, rtol=3e-2)


@pytest.mark.skipif(not launch.INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("rope", [False, True])
def test_opcheck(rope):
    q, k, v = (torch.randn(1, T, H, D, requires_grad=True) for _ in range(3))
    angle = torch.randn(T, D // 2)
    tables = (angle.cos().requires_grad_(), angle.sin().requires_grad_()) if rope else (None, None)
    logits = (*tables, None, None, OFFSETS, True, 0, 33)
    opcheck(torch.ops.vitfast.attention_separate.default, (q, k, v, *logits, 0.2))
    weights = block_weights(H * D)
    x = torch.randn(T, H * D, requires_grad=True)
    factors = (None, torch.rand(T))
    opcheck(torch.ops.vitfast.attention_block_fwd.default, (x, *weights, *factors, *logits, H, 1e-6, "layer", "all"))
    rows, starts = packed.token_rows(OFFSETS, T, 2)
    patches = (
        torch.randn(T, 3, 2, 2),
        torch.randn(8, 3, 2, 2),
        torch.randn(8),
        torch.randn(1, 2, 8),
        torch.randn(T, 8),
    )
    patches = tuple(t.requires_grad_() for t in patches)
    opcheck(torch.ops.vitfast.patch_embed.default, (*patches, rows, starts, [], []))


@pytest.mark.slow(20)
def test_compiled_once_for_all_sizes(mode):
    """Counts and sizes change: after the first change nothing is compiled again."""
    weights, frames = block_weights(H * D), torch._dynamo.utils.counters["stats"]

    def step(x, offsets, longest):
        x = ops.attention_block(x, *weights, num_heads=H, offsets=offsets, longest=longest)
        return ops.mlp_block(x, *weights[:2], *weights[4:6], *weights[4:6])

    torch._dynamo.reset()
    compiled, seen = torch.compile(step, fullgraph=True, backend="aot_eager"), []
    for sizes in ([5, 9], [7, 4, 12], [30, 2, 2, 17, 8], [3] * 9):
        offsets, x = torch.tensor([0, *sizes]).cumsum(0), torch.randn(sum(sizes), H * D, requires_grad=True)
        y, truth = compiled(x, offsets, max(sizes)), step(x, offsets, max(sizes))
        assert_close(y, truth, **TOL)
        dy = torch.randn_like(y)
        for mine, theirs in zip(*(torch.autograd.grad(o, [x, *weights], dy) for o in (y, truth)), strict=True):
            assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        seen.append(frames["unique_graphs"])
    assert seen[1:] == [seen[1]] * 3, seen
    torch._dynamo.reset()


QKV, X = torch.randn(T, 3, H, D), torch.randn(T, H * D)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(offsets=OFFSETS.float()), TypeError, "offsets must be int32 or int64, got torch.float32"),
        (dict(offsets=OFFSETS[None]), ValueError, r"offsets must be \(S \+ 1,\), got \(1, 5\)"),
        (dict(offsets=OFFSETS - 1), ValueError, r"offsets must rise from 0 to the 59 tokens, got \[-1, 4"),
        (dict(offsets=OFFSETS[:-1]), ValueError, "offsets must rise from 0 to the 59 tokens"),
        (dict(offsets=OFFSETS[[0, 2, 1, 3, 4]]), ValueError, "offsets must rise from 0"),
        (dict(offsets=[0, 59]), TypeError, "offsets must be a tensor, got list"),
        (dict(longest=1.5), ValueError, "longest must be None or a whole number"),
        (dict(longest=-1), ValueError, "longest must be None or a whole number"),
        (dict(num_prefix=1), ValueError, "num_prefix is not for packed samples"),
        (dict(key_lengths=torch.tensor([3])), ValueError, "key_lengths is not for packed samples"),
        (dict(bias=torch.zeros(H, T, T)), ValueError, "bias is not for packed samples"),
        (dict(rope=(torch.zeros(4, 8), torch.zeros(4, 8))), ValueError, r"cos and sin must be \(59, 16\)"),
    ],
)
@pytest.mark.parametrize("op", ["attention", "attention_block"])
def test_errors(op, change, error, message):
    given = dict(offsets=OFFSETS, longest=33) | change
    with pytest.raises(error, match=f"{op}: {message}"):
        if op == "attention":
            ops.attention(QKV, **given)
        else:
            ops.attention_block(X, *block_weights(H * D), num_heads=H, **given)


def test_offsets_that_do_not_lie_together(mode):
    """A column of a table: strides of 2."""
    strided = torch.stack([OFFSETS, OFFSETS + 7], 1)[:, 0]
    assert torch.equal(ops.attention(QKV, offsets=strided), ops.attention(QKV, offsets=OFFSETS))
    lengths = torch.tensor([[9, 1], [4, 1]])[:, 0]
    qkv = torch.randn(2, 10, 3, H, D)
    alike = ops.attention(qkv, key_lengths=lengths), ops.attention(qkv, key_lengths=lengths.contiguous())
    assert torch.equal(*alike)


def test_the_longest_sample_is_checked_or_found(mode):
    with pytest.raises(ValueError, match="longest must be at least the tokens of the longest sample, 33, got 32"):
        ops.attention(QKV, offsets=OFFSETS, longest=32)
    assert torch.equal(ops.attention(QKV, offsets=OFFSETS), ops.attention(QKV, offsets=OFFSETS, longest=33))


def test_errors_of_shapes():
    with pytest.raises(ValueError, match=r"attention: qkv must be \(tokens, 3, H, Dh\), got \(1, 59, 3, 2, 16\)"):
        ops.attention(QKV[None], offsets=OFFSETS)
    with pytest.raises(ValueError, match=r"attention: q must be \(tokens, H, Dh\), got \(1, 59, 2, 16\)"):
        ops.attention(*QKV[None].unbind(2), offsets=OFFSETS)
    with pytest.raises(ValueError, match="longest is for packed samples, and there are no offsets"):
        ops.attention(QKV[None], longest=3)
    weights = block_weights(H * D)
    with pytest.raises(ValueError, match=r"x must be \(B, N, D\), or packed with offsets, got \(59, 32\)"):
        ops.attention_block(X, *weights, num_heads=H)
    with pytest.raises(ValueError, match=r"x must be \(tokens, D\) of packed samples, got \(1, 59, 32\)"):
        ops.attention_block(X[None], *weights, num_heads=H, offsets=OFFSETS)
    with pytest.raises(ValueError, match=r"attention_block: drop_path must be \(59,\), got \(3,\)"):
        ops.attention_block(X, *weights, num_heads=H, offsets=OFFSETS, drop_path=torch.ones(3))
    images, weight = torch.randn(T, 3, 4, 4), torch.randn(8, 3, 2, 2)
    with pytest.raises(ValueError, match=r"with offsets images must be \(N, 3, 2, 2\), got \(59, 3, 4, 4\)"):
        ops.patch_embed(images, weight, None, offsets=OFFSETS)
    with pytest.raises(ValueError, match=r"pos_embed must be \(59, 8\), got \(1, 59, 8\)"):
        ops.patch_embed(images[..., :2, :2], weight, None, None, torch.randn(1, T, 8), offsets=OFFSETS)


def test_an_empty_batch(mode):
    none = torch.zeros(1, dtype=torch.int32)
    assert ops.attention(QKV[:0], offsets=none).shape == (0, H, D)
    assert ops.attention_block(X[:0], *block_weights(H * D), num_heads=H, offsets=none).shape == (0, H * D)
