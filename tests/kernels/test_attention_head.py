"""Attention backward in one program a head: each gradient's error, other images' NaN, descriptors."""

import pytest
import torch

from vitfast import ref
from vitfast.kernels import launch, tiles
from vitfast.kernels.attention import attention_bwd, attention_bwd_separate, attention_class

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels; test_gpu.py runs the real ones")

HALVES = [pytest.param(d, id=str(d)[6:]) for d in (torch.float16, torch.bfloat16)]
EXACT = tiles.tile(4, 1, "head", BLOCK_M=64, BLOCK_N=64, STAGES=2, PER_SM=2, EXACT=1)
WIDE = tiles.tile(8, 1, "head", BLOCK_M=64, BLOCK_N=128, STAGES=2, PER_SM=1, EXACT=0)


def problem(B, N, H, D, dtype, size=1.0):
    """q, k, v (views of one tensor), o, lse, do as a forward leaves them; dq, dk, dv in float64."""
    qkv, do = (torch.randn(B, N, 3, H, D) * size).to(dtype), torch.randn(B, N, H, D).to(dtype)
    exact = [x.double().requires_grad_() for x in qkv.unbind(2)]
    o = ref.attention(*exact, scale=D**-0.5)
    logits = torch.einsum("bnhd,bmhd->bhnm", *exact[:2]) * D**-0.5
    return (*qkv.unbind(2), o.detach().to(dtype), logits.logsumexp(-1).float().detach(), do), torch.autograd.grad(
        o, exact, do.double()
    )


def relative(ours, exact) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def by_pytorch(q, k, v, do):
    """dq, dk, dv as autograd has them in the dtype of q."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(ref.attention(*inputs), inputs, do)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("N, D", [(50, 64), (197, 64), (257, 80), (320, 64), (276, 32)])
@pytest.mark.parametrize("tile", [None, EXACT, WIDE], ids=["shipped", "exact", "wide"])
def test_each_gradient_is_as_exact_as_pytorchs(tile, N, D, dtype):
    """dQ, dK and dV apart: error at most twice PyTorch's own."""
    if tile is WIDE and N not in (197, 257):
        pytest.skip("two lengths show what the other tile does")
    torch.manual_seed(N)
    given, exact = problem(1, N, 2, D, dtype)
    forced = tile or tiles.lookup("attention_bwd", given[0], attention_class(D, N))
    assert forced.provider == "head"
    with tiles.override("attention_bwd", forced):
        dqkv, sums = attention_bwd(*given, D**-0.5, want_bias_grad=True)
    for name, ours, theirs, truth in zip(("dq", "dk", "dv"), dqkv.unbind(2), by_pytorch(*given[:3], given[-1]), exact):
        assert relative(ours, truth) <= 2 * relative(theirs, truth), name
    total = torch.stack([x.sum((0, 1)) for x in exact]).flatten()
    rounding = (
        torch.finfo(dtype).eps * torch.stack([x.norm(dim=(0, 1)) for x in exact]).flatten()
    )  # of N stored numbers, as they add up
    assert ((sums - total).abs() <= 2 * rounding + 1e-5).all()
    assert torch.equal(sums.view(3, 2, D)[1], torch.zeros(2, D))  # rows of dS sum to zero


def backward(q, k, v, do, dtype):
    """(dq, dk, dv), PyTorch's own in `dtype`, and in float64."""
    qkv, do = torch.stack([q, k, v], 2).to(dtype), do.to(dtype)
    exact = [x.double().requires_grad_() for x in qkv.unbind(2)]
    o = ref.attention(*exact)
    lse = torch.einsum("bnhd,bmhd->bhnm", *exact[:2]).mul(q.shape[-1] ** -0.5).logsumexp(-1).float().detach()
    dqkv, _ = attention_bwd(*qkv.unbind(2), o.detach().to(dtype), lse, do, q.shape[-1] ** -0.5)
    return dqkv.unbind(2), by_pytorch(*qkv.unbind(2), do), torch.autograd.grad(o, exact, do.double())


@pytest.mark.parametrize("dtype", HALVES)
def test_what_keys_have_in_common_cancels_in_dq(dtype):
    """Keys share an offset of ten times their spread: dQ of one block of keys is far larger than dQ.

    Values go with the block of keys they are in.
    """
    shape = 1, 197, 2, 64
    part = torch.zeros(1, 197, 1, 1)
    part[:, :64], part[:, 64:128] = 1, -1
    q, k, v = torch.randn(shape) * 0.1, torch.randn(shape) + 10 * torch.randn(1, 1, 2, 64), torch.randn(shape) + part
    for name, ours, theirs, truth in zip(("dq", "dk", "dv"), *backward(q, k, v, torch.ones(shape), dtype)):
        assert relative(ours, truth) <= 2 * relative(theirs, truth), name


def test_a_part_of_dq_may_pass_the_largest_number_of_fp16():
    shape = 1, 197, 1, 64
    q, k, v = torch.randn(shape) * 0.1, torch.randn(shape) * 0.05 + 50, torch.randn(shape) * 0.1
    v[:, :64] += 1
    v[:, 64:128] -= 1
    (dq, *_), _, (exact, *_) = backward(q, k, v, torch.full(shape, 900.0), torch.float16)
    assert dq.isfinite().all() and dq.abs().max() < 3 * exact.abs().max()


@pytest.mark.parametrize("N", [50, 69, 128, 197])
def test_a_neighbours_nan_stays_there(N):
    """Tiles of 64 rows reach past an image of N: what lies there is the next one's."""
    given, exact = problem(3, N, 2, 64, torch.bfloat16)
    broken = [x.clone() for x in given]
    qkv = torch.stack(broken[:3], 2)
    broken[:3] = qkv.unbind(2)
    for x in broken:
        x[1] = float("nan")
    dqkv, _ = attention_bwd(*broken, 0.125)
    clean, _ = attention_bwd(*given, 0.125)
    assert torch.equal(dqkv[[0, 2]], clean[[0, 2]]) and dqkv[1].isnan().all()


def launched(*given):
    """The one launch of a backward."""
    (found,) = launch.record(lambda: attention_bwd(*given, 0.125))
    return found.arguments


def test_descriptors_where_rows_start_at_16_bytes_and_pointers_elsewhere():
    (q, k, v, o, lse, do), exact = problem(2, 69, 2, 64, torch.bfloat16)
    boxes = ("qkv_box", "do_box", "dqkv_box")
    assert all(launched(q, k, v, o, lse, do)[name].block_shape == [1, 1, 64, 64] for name in boxes)
    wide = torch.randn(2, 72, 3, 3, 80).bfloat16()
    wide[:, :69, :, :2, 8:72] = torch.stack([q, k, v], 2)
    inside = wide[:, :69, :, :2, 8:72].unbind(2)
    odd_do = torch.randn(2, 69, 2, 67).bfloat16()[..., :64].copy_(do)
    swapped = torch.stack([k, q, v], 2).unbind(2)
    heads_last = torch.stack([q, k, v], 2).transpose(2, 3).contiguous().transpose(2, 3).unbind(2)  # (B, N, H, 3, Dh)
    for inputs, upstream in (
        (inside, do),  # parts of a wider tensor, but not H heads after each other
        ((q, k, v), odd_do),  # rows 134 bytes apart
        ((swapped[1], swapped[0], v), do),  # k before q
        (heads_last, do),
        ([x.contiguous() for x in (q, k, v)], do),  # three tensors
    ):
        assert all(launched(*inputs, o, lse, upstream)[name] is None for name in boxes)
        dqkv, _ = attention_bwd(*inputs, o, lse, upstream, 0.125)
        assert all(relative(ours, truth) < 6e-3 for ours, truth in zip(dqkv.unbind(2), exact))
    separate = attention_bwd_separate(q, k, v, o, lse, do, 0.125)
    assert all(relative(ours, truth) < 6e-3 for ours, truth in zip(separate, exact))


def test_a_head_of_two_parts_has_two_descriptors():
    (q, k, v, o, lse, do), _ = problem(1, 20, 2, 72, torch.bfloat16)
    found = launched(q, k, v, o, lse, do)
    assert [found[name].block_shape for name in ("qkv_box", "qkv_rest", "dqkv_rest")] == [
        [1, 1, 64, 64],
        [1, 1, 64, 16],
        [1, 1, 64, 16],
    ]
    assert list(found["qkv_rest"].shape) == [1, 6, 20, 72] and found["qkv_rest"].strides == [
        20 * 3 * 144,
        72,
        3 * 144,
        1,
    ]


def test_heads_whose_rows_lie_far_apart_take_64_bit_offsets():
    """Within a head offsets are 32 bits wide unless N rows reach 2^31 elements."""
    N, apart = 9, 2**28
    storage = torch.empty(1, dtype=torch.bfloat16, device="meta")
    near, far = (storage.as_strided((1, N, 3, 1, 64), (0, step, 64, 64, 1)).unbind(2) for step in (192, apart))
    like = torch.empty(1, N, 1, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 1, N, device="meta")
    for inputs, wanted in ((near, False), (far, True)):
        assert launched(*inputs, like, lse, like)["HEAD"].far is wanted
