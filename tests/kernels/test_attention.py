"""The attention kernels, interpreted, against float64, and what the operation promises.

Every path and head size, odd lengths, strides, peaked rows.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import interpreter

from vitfast import ops, ref
from vitfast.kernels import attention as kernels
from vitfast.kernels import launch, tiles
from vitfast.kernels.attention import HEAD_SIZES, attention_bwd, attention_bwd_separate, attention_fwd
from vitfast.kernels.logits import PLAIN, Logits

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels; test_gpu.py runs the real ones")

# Added to twice PyTorch's own error: a result of size ~4 rounded once (fp16: 2^-11 * 4 / 2), or summed in another
# order (fp32). bf16: one of size 1/2, as averages of 50 values and more are; PyTorch's own error covers larger ones.
ATOL = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 2e-3}
DTYPES = [pytest.param(d, id=str(d)[6:]) for d in ATOL]
HALVES = DTYPES[1:]

WHOLE = {
    "attention_fwd": tiles.tile(4, 1, "rows", BLOCK_M=64),
    "attention_bwd": tiles.tile(4, 1, "head", BLOCK_M=32, BLOCK_N=32, STAGES=1, PER_SM=1, EXACT=0),
}
TILED = {
    "attention_fwd": tiles.tile(4, 1, "tiled", BLOCK_M=64, BLOCK_N=64),
    "attention_bwd": tiles.tile(provider="tiled"),
    "attention_bwd_dq": tiles.tile(4, 1, BLOCK_M=64, BLOCK_N=32),
    "attention_bwd_dkdv": tiles.tile(4, 1, BLOCK_M=32, BLOCK_N=64),
}
PHASES = TILED | {"attention_bwd": tiles.tile(4, 1, "phases", BLOCK_M1=64, BLOCK_N1=32, BLOCK_M2=32, BLOCK_N2=64)}
PATHS = {"whole": WHOLE, "tiled": TILED, "phases": PHASES}


@contextlib.contextmanager
def path(name):
    with contextlib.ExitStack() as stack:
        for op, tile in PATHS[name].items():
            stack.enter_context(tiles.override(op, tile))
        yield


@pytest.fixture(params=PATHS)
def each_path(request):
    with path(request.param):
        yield request.param


@pytest.fixture
def poison(monkeypatch):
    """Memory that a kernel leaves unwritten is NaN."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, _allocate=allocate, **kwargs: _allocate(*args, **kwargs).fill_(float("nan"))
        )


def run(function, qkv, do, scale=None):
    """Output and gradient of packed attention."""
    qkv = qkv.detach().requires_grad_()
    o = function(qkv, scale)
    o.backward(do)
    return o.detach(), qkv.grad


def by_kernels(qkv, scale=None):
    with ops.use_kernels("on"):
        return ops.attention(qkv, scale=scale)


def by_ref(qkv, scale=None):
    return ref.attention(*qkv.unbind(2), scale=scale)


def compare(qkv, do, scale=None, judge=by_ref):
    """Kernels against float64, judged by PyTorch in the same dtype."""
    truth = run(by_ref, qkv.double(), do.double(), scale)
    torchs = run(judge, qkv, do, scale)
    for name, ours, theirs, exact in zip(("o", "dqkv"), run(by_kernels, qkv, do, scale), torchs, truth):
        assert (ours.is_contiguous() or name != "o") and ours.dtype == qkv.dtype and ours.shape == exact.shape
        error, allowed = (
            (ours - exact).abs().max().item(),
            2 * (theirs - exact).abs().max().item() + ATOL[qkv.dtype],
        )
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"  # a NaN fails too


def random(B, N, H, D, dtype=torch.float32):
    return torch.randn(B, N, 3, H, D).to(dtype), torch.randn(B, N, H, D).to(dtype)


@pytest.mark.parametrize(
    "N, dtype, D",
    [*pairs([1, 5, 50, 196, 197, 257], list(ATOL), [64, 80]), *((577, dtype, 64) for dtype in ATOL)],
)
def test_attention_matches_ref_at_every_length(N, dtype, D, poison):
    compare(*random(2 if N < 100 else 1, N, 3 if N < 100 else 1, D, dtype))


@pytest.mark.parametrize("D, dtype, name", pairs(HEAD_SIZES, list(ATOL), list(PATHS)))
def test_attention_matches_ref_at_every_head_size(D, dtype, name, poison):
    with path(name):
        compare(*random(1, 37, 2, D, dtype))


@pytest.mark.parametrize("N, D", [(1, 16), (64, 32), (145, 72), (197, 64), (250, 24), (256, 128)])
def test_all_paths_agree(N, D):
    qkv, do = random(1, N, 1, D)
    results = []
    for name in PATHS:
        with path(name):
            o, lse = attention_fwd(*qkv.unbind(2), 0.2)
            results.append((o, lse, *attention_bwd(*qkv.unbind(2), o, lse, do, 0.2, True)))
    for first, *others in zip(*results):
        atol = 4e-5 if first.dim() == 1 else 2e-5  # sums over N: by identity, or one by one
        for other in others:
            torch.testing.assert_close(first, other, atol=atol, rtol=1e-5)


def test_lse_is_the_logarithm_of_the_sum(each_path):
    qkv, _ = random(2, 70, 2, 32)
    q, k, v = qkv.unbind(2)
    _, lse = attention_fwd(q, k, v, 0.7)
    logits = torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double()) * 0.7
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), atol=1e-5, rtol=1e-6)


def test_weights_of_a_row_sum_to_one(each_path):
    qkv, _ = random(1, 101, 2, 40)
    qkv[:, :, 2] = 1
    torch.testing.assert_close(by_kernels(qkv), torch.ones(1, 101, 2, 40), atol=1e-6, rtol=0)


def test_permuted_tokens_give_permuted_outputs_and_gradients(each_path):
    qkv, do = random(1, 83, 1, 32)
    order = torch.randperm(83)
    o, grad = run(by_kernels, qkv, do)
    o_permuted, grad_permuted = run(by_kernels, qkv[:, order], do[:, order])
    torch.testing.assert_close(o_permuted, o[:, order], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grad_permuted, grad[:, order], atol=1e-5, rtol=1e-5)


@pytest.fixture
def dots_rounded_once(monkeypatch):
    """Dots in one order of sums, so that backward finds forward's logits again, as on a GPU.

    The order of the interpreter's BLAS depends on the size of the block.
    """

    def create_dot(self, a, b, d, *_):
        return interpreter.TensorHandle(
            (a.data.astype(float) @ b.data.astype(float) + d.data).astype(d.data.dtype), d.dtype.scalar
        )

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def by_flash(qkv, scale=None):
    """PyTorch's own flash attention: like ours it computes the backward's weights from lse."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), scale=scale).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30.0, 0.0, -1.0], ids=["peaked", "flat", "far below zero"])
def test_peaked_and_flat_rows(size, dtype, each_path, poison, dots_rounded_once):
    """Logits of +-3e4, all equal, and all near -1e4 (where a padded key's logit of 0 would win)."""
    qkv, do = random(1, 75, 1, 64, dtype)
    if size < 0:
        qkv[:, :, 0], qkv[:, :, 1] = 13, -12
        qkv[:, :, :2, :, 0] += torch.randn(1, 75, 2, 1).to(dtype) * 0.1  # bf16's next number after 13 is 13 + 1/16
    else:
        qkv[:, :, :2] *= size
    with contextlib.ExitStack() as stack:
        if (each_path, dtype, size) == ("whole", torch.float32, 30.0):
            # One program a head is for 16 bits: in fp32 an accumulator that starts at -lse / scale costs digits of
            # such logits.
            stack.enter_context(tiles.override("attention_bwd", TILED["attention_bwd"]))
        compare(qkv, do, scale=1.0, judge=by_flash)


@pytest.mark.parametrize("D, largest", [(64, 1e4), (64, 3e4), (72, 3e4)])
def test_logits_of_ten_thousands(D, largest, each_path):
    """Every key is there twice: of weights near a half 16 bits lose next to nothing, an inexact exponent shows."""
    qkv, do = random(1, 100, 2, D)
    q, k = (qkv[:, :, i] for i in (0, 1))
    k.copy_(k[:, torch.arange(100) // 2 * 2].clone())
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / D**0.5
    qkv[:, :, :2] *= (largest / logits.abs().max()) ** 0.5
    qkv, do = qkv.half(), do.half()
    (o, grads), (theirs, their_grads), (exact, truth) = (
        run(function, x, upstream)
        for function, x, upstream in ((by_kernels, qkv, do), (by_ref, qkv, do), (by_ref, qkv.double(), do.double()))
    )
    results = dict(o=(o, theirs, exact))
    results |= {name: [g[:, :, i] for g in (grads, their_grads, truth)] for i, name in enumerate(("dq", "dk", "dv"))}
    for name, (ours, theirs, exact) in results.items():
        error, pytorchs = ((x.double() - exact).norm() / exact.norm() for x in (ours, theirs))
        assert error <= 1.25 * pytorchs, f"{name}: error {error:.1e}, PyTorch's {pytorchs:.1e}"


def test_padded_tokens_reach_nothing(each_path):
    """Rows past N hold infinities: no gradient may see them."""
    buffer, do = random(1, 80, 1, 32)
    buffer[:, 69:], do[:, 69:] = float("inf"), float("inf")
    compare(buffer[:, :69], do[:, :69])


@pytest.mark.parametrize("D", [32, 72])
def test_strided_qkv(D, each_path, poison):
    B, N, H = 2, 21, 2
    wide, do = torch.randn(B, N + 3, 3, H + 1, D + 8), torch.randn(B, H, N, D).transpose(1, 2)
    compare(wide[:, 2:-1, :, 1:, 8:], do)
    compare(torch.randn(N, B, 3, H, D).transpose(0, 1), do)
    compare(torch.randn(B, N, H, 3, D).transpose(2, 3), do)
    compare(torch.randn(B, N, 3, H, D + 3)[..., 3:], do)  # rows that start anywhere: no 16-byte loads
    compare(
        torch.randn(B, N, 3, D, H).transpose(3, 4), torch.randn(B, N, D, H).transpose(2, 3)
    )  # no unit last stride: copied
    compare(torch.randn(B, N, 3, H, D), torch.randn(B, 1, 1, D).expand(B, N, H, D))


def test_separate_tensors_of_different_strides(each_path, poison):
    B, N, H, D = 2, 40, 2, 48
    q, k, v = torch.randn(B, N, H, D), torch.randn(B, H, N, D).transpose(1, 2), torch.randn(B, N, 3, H, D)[:, :, 1]
    do = torch.randn(B, N, H, D)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with ops.use_kernels("on"):
        o = ops.attention(*inputs)
    grads = torch.autograd.grad(o, inputs, do)
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = ref.attention(*exact_inputs)
    exact_grads = torch.autograd.grad(exact, exact_inputs, do.double())
    for ours, truth in zip((o, *grads), (exact, *exact_grads)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)
    o, lse = attention_fwd(q, k, v, D**-0.5)
    assert all(g.is_contiguous() for g in attention_bwd_separate(q, k, v, o, lse, do, D**-0.5))


@pytest.mark.parametrize("name, D, dtype", pairs(list(PATHS), [32, 80], list(ATOL)[1:]))
def test_bias_gradient_is_the_column_sums(name, D, dtype, poison):
    qkv, do = random(2, 70, 2, D, dtype)
    q, k, v = qkv.unbind(2)
    with path(name):
        o, lse = attention_fwd(q, k, v, D**-0.5)
        dqkv, dbias = attention_bwd(q, k, v, o, lse, do, D**-0.5, want_bias_grad=True)
        same, none = attention_bwd(q, k, v, o, lse, do, D**-0.5)
    assert none is None and torch.equal(same, dqkv)
    _, exact = run(by_ref, qkv.double(), do.double())
    assert dbias.shape == (3 * 2 * D,) and dbias.dtype == torch.float32
    sums = exact.sum((0, 1)).flatten()
    from_rounded = (dqkv.double().sum((0, 1)).flatten() - sums).abs().max()
    assert (dbias - sums).abs().max() <= 2 * from_rounded + 1e-3


def test_empty_batch(each_path, poison):
    qkv, do = random(0, 7, 2, 32)
    o, grad = run(by_kernels, qkv, do)
    assert o.shape == do.shape and grad.shape == qkv.shape
    q, k, v = qkv.unbind(2)
    _, dbias = attention_bwd(q, k, v, o, torch.empty(0, 2, 7), do, 1.0, want_bias_grad=True)
    assert torch.equal(dbias, torch.zeros(3 * 2 * 32))


@pytest.mark.parametrize("dtype", HALVES)
def test_same_bits_twice_and_however_queries_are_spread(dtype, each_path, monkeypatch):
    qkv, do = random(2, 150, 1, 32, dtype)
    first = run(by_kernels, qkv, do)
    monkeypatch.setattr(kernels, "MANY_HEADS", 1)
    for a, b in zip(first, run(by_kernels, qkv, do)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_opcheck(packed):
    qkv, do = random(2, 9, 2, 16)
    inputs = [qkv] if packed else list(qkv.unbind(2))
    name = "attention_packed" if packed else "attention_separate"
    forward, backward = getattr(torch.ops.vitfast, name).default, getattr(torch.ops.vitfast, name + "_backward").default
    cos, sin, bias = torch.rand(2, 8, 16), torch.rand(2, 8, 16), torch.randn(2, 9, 9)
    acting = Logits(cos, sin, bias, torch.tensor([9, 4]), interleaved=True, num_prefix=1)
    many = Logits(torch.rand(18, 16), torch.rand(18, 16), offsets=torch.tensor([0, 11, 18]), longest=11)
    for logits, wanted in ((PLAIN, (False, False)), (acting, (True, True)), (many, (True, False))):
        if logits is many:
            qkv, do = random(1, 18, 2, 16)
            inputs = [qkv] if packed else list(qkv.unbind(2))
        o, lse = forward(*inputs, *logits, 0.25)
        torch.library.opcheck(backward, (*inputs, *logits, o, lse, do, 0.25, *wanted))
        fresh = lambda x: x if x is None else x.detach().clone().requires_grad_(x.is_floating_point())  # noqa: E731
        given = [fresh(x) for x in (*inputs, *logits[:4])]
        torch.library.opcheck(forward, (*given, *logits[4:], 0.25))


def test_compiled_equals_eager():
    qkv, do = random(2, 21, 2, 32)
    compiled = torch.compile(by_kernels, fullgraph=True)
    for a, b in zip(run(by_kernels, qkv, do), run(compiled, qkv, do)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_computes_in_its_dtype(dtype):
    qkv = torch.randn(1, 9, 3, 1, 32, requires_grad=True)
    with torch.autocast("cpu", dtype):
        o = by_kernels(qkv)
    assert o.dtype == dtype
    o.backward(torch.randn_like(o))
    assert qkv.grad.dtype == torch.float32


def test_without_gradients_only_the_forward_runs():
    qkv, _ = random(1, 9, 1, 32)
    with torch.no_grad():
        assert by_kernels(qkv.requires_grad_()).grad_fn is None
    q, k, v = qkv.detach().unbind(2)
    assert len(launch.record(lambda: attention_fwd(q, k, v, 0.2))) == 1


def test_what_no_kernel_covers_is_named():
    with pytest.raises(
        RuntimeError, match="attention: kernels are switched on, but head size 20 is not one of 16, 24, ..., 128"
    ):
        by_kernels(torch.randn(1, 3, 3, 1, 20))
    with pytest.raises(RuntimeError, match="scale -1.0 is not positive"):
        by_kernels(torch.randn(1, 3, 3, 1, 16), scale=-1.0)


def test_second_differentiation_raises():
    qkv = torch.randn(1, 5, 3, 1, 16, requires_grad=True)
    o = by_kernels(qkv)
    (grad,) = torch.autograd.grad(o, qkv, torch.randn_like(o, requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="attention: cannot be differentiated twice"):
        grad.sum().backward()


@given(st.integers(1, 256))
def test_key_blocks_cover_the_keys_with_little_waste(n):
    parts = [size for size in kernels.key_blocks(n).values() if size]
    assert all(size >= 16 and size & (size - 1) == 0 for size in parts)
    assert sum(parts[:-1]) < n <= sum(parts) <= max(16, 1 << (n - 1).bit_length())


def test_head_chunks_and_last_blocks():
    parts = {
        24: (32, 0),
        40: (32, 16),
        48: (32, 16),
        56: (64, 0),
        64: (64, 0),
        72: (64, 16),
        80: (64, 16),
        88: (64, 32),
        96: (64, 32),
        104: (128, 0),
    }
    assert {d: kernels.head_chunks(d) for d in parts} == parts
    assert [kernels.last_block(n, 64) for n in (64, 257, 577, 1370, 63)] == [0, 16, 16, 32, 64]
    assert [sum(kernels.key_blocks(n).values()) for n in (50, 145, 197, 256)] == [64, 160, 208, 256]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(1, 2),
    st.integers(1, 150),
    st.integers(1, 2),
    st.sampled_from(HEAD_SIZES),
    st.sampled_from(list(ATOL)),
    st.sampled_from(list(PATHS)),
)
def test_random_shapes(B, N, H, D, dtype, name):
    torch.manual_seed(N)
    with path(name):
        compare(*random(B, N, H, D, dtype))
