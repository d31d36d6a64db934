"""Operations on packed samples: what they promise besides the kernels' numbers."""

import pytest
import torch
from attention_cases import MODES, interpreted
from torch.testing import assert_close

from vitfast import ops
from vitfast.ops import reference as ref

SIZES = [5, 20, 1, 33]
OFFSETS = torch.tensor([0, *SIZES]).cumsum(0).int()
T, H, D = sum(SIZES), 2, 16
TOL = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(params=MODES)
def mode(request):
    with ops.use_kernels(request.param):
        yield request.param


def block_weights(width):
    shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    return [torch.randn(s).mul(0.3).requires_grad_() for s in shapes]


QKV, X, WEIGHTS = torch.randn(T, 3, H, D), torch.randn(T, H * D), block_weights(H * D)


def test_drop_path_of_each_sample_or_of_each_token(mode):
    """A packed batch computes what each of its samples does alone."""
    factors, ends = torch.tensor([0.0, 2.0, 2.0, 2.0]), OFFSETS.tolist()
    options = dict(num_heads=H, offsets=OFFSETS, longest=max(SIZES))
    y = ops.attention_block(X, *WEIGHTS, drop_path=factors, **options)
    for s, (first, end) in enumerate(zip(ends, ends[1:])):
        one = ref.attention_block(X[None, first:end], *WEIGHTS, num_heads=H, drop_path=factors[s : s + 1])[0]
        assert_close(y[first:end], one, **TOL)
    assert torch.equal(ops.attention_block(X, *WEIGHTS, drop_path=factors[ref.owners(OFFSETS, T)], **options), y)


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


@interpreted
@pytest.mark.slow
def test_compiled_once_for_all_sizes():
    """Counts and sizes change: after the first change nothing is compiled again."""
    weights, frames = WEIGHTS, torch._dynamo.utils.counters["stats"]

    def step(x, offsets, longest):
        x = ops.attention_block(x, *weights, num_heads=H, cu_seqlens=offsets, longest=longest, save_policy="all")
        return ops.mlp_block(x, *weights[:2], *weights[4:6], *weights[4:6])

    torch._dynamo.reset()
    compiled, seen = torch.compile(step, fullgraph=True, backend="aot_eager"), []
    for sizes in ([5, 9], [7, 4, 12], [3] * 9):
        offsets, x = torch.tensor([0, *sizes]).cumsum(0), torch.randn(sum(sizes), H * D, requires_grad=True)
        with ops.use_kernels("on"):
            y, truth = compiled(x, offsets, max(sizes)), step(x, offsets, max(sizes))
        assert_close(y, truth, **TOL)
        dy = torch.randn_like(y)
        for mine, theirs in zip(*(torch.autograd.grad(o, [x, *weights], dy) for o in (y, truth)), strict=True):
            assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        seen.append(frames["unique_graphs"])
    assert seen[1] == seen[2], seen
    torch._dynamo.reset()


def test_what_offsets_and_longest_may_be(mode):
    """A column of a table, with strides of 2; in int64; no longest; no sample at all."""
    strided = torch.stack([OFFSETS, OFFSETS + 7], 1)[:, 0]
    plain = ops.attention(QKV, offsets=OFFSETS, longest=max(SIZES))
    for offsets in (strided, OFFSETS, OFFSETS.long()):
        assert torch.equal(ops.attention(QKV, offsets=offsets), plain)
    assert torch.equal(ops.attention(QKV, cu_seqlens=OFFSETS, max_seqlen=max(SIZES)), plain)
    with pytest.raises(TypeError, match="attention: offsets and cu_seqlens are two names of one argument"):
        ops.attention(QKV, offsets=OFFSETS, cu_seqlens=OFFSETS)
    lengths, qkv = torch.tensor([[9, 1], [4, 1]])[:, 0], torch.randn(2, 10, 3, H, D)
    assert torch.equal(*(ops.attention(qkv, key_lengths=of) for of in (lengths, lengths.contiguous())))
    none = torch.zeros(1, dtype=torch.int32)
    assert ops.attention(QKV[:0], offsets=none).shape == (0, H, D)
    assert ops.attention_block(X[:0], *WEIGHTS, num_heads=H, offsets=none).shape == (0, H * D)
