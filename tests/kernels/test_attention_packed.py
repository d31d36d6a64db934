"""Attention of packed samples, interpreted, against float64 on each sample alone; its table of tiles."""

import pytest
import torch
from test_attention import ATOL, DTYPES

from vitfast import ops, ref
from vitfast.kernels import attention as kernels
from vitfast.kernels import attention_packed, launch, tiles
from vitfast.kernels.logits import Logits

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels; test_gpu.py runs the real ones")

SIZES = {
    "one": [50],
    "many": [5, 70, 33, 1, 64, 130],
    "of none": [0, 17, 0, 0, 65, 0],
    "whole blocks": [64, 128, 32],
    "single tokens": [1, 1, 1],
}


def offsets_of(sizes, dtype=torch.int32):
    return torch.tensor([0, *sizes]).cumsum(0).to(dtype)


def tables(tokens, D, full, heads=(), dtype=torch.float32):
    angle = torch.randn(*heads, tokens, D if full else D // 2) * 2
    return angle.cos().to(dtype), angle.sin().to(dtype)


def alone(q, k, v, sizes, rope=None, layout="half"):
    """Each sample by itself, in the inputs' dtype."""
    found, first = [], 0
    for size in sizes:
        part = slice(first, first + size)
        own = {} if rope is None else dict(rope=tuple(t[..., part, :] for t in rope), rope_layout=layout)
        if size:
            found.append(ref.attention(*(x[None, part] for x in (q, k, v)), scale=0.2, **own)[0])
        first += size
    return torch.cat(found)


def by_kernels(q, k, v, sizes, rope=None, layout="half"):
    options = dict(offsets=offsets_of(sizes), longest=max(sizes), rope=rope, rope_layout=layout)
    with ops.use_kernels("on"):
        return ops.attention(q, k, v, scale=0.2, **options)


def gradients(function, tensors, do, *arguments):
    """The output and the gradients of q, k and v, and of cos and sin where they are given."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    o = function(*leaves[:3], *arguments[:1], tuple(leaves[3:]) or None, *arguments[1:])
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def compare(tensors, do, sizes, layout="half"):
    """Kernels against float64, judged by PyTorch in the same dtype."""
    exact = gradients(alone, [t.double() for t in tensors], do.double(), sizes, layout)
    theirs = gradients(alone, tensors, do, sizes, layout)
    before = launch.launches_made()
    ours = gradients(by_kernels, tensors, do, sizes, layout)
    assert launch.launches_made() >= before + 6  # three tables, three kernels
    for name, mine, torchs, truth in zip(("o", "dq", "dk", "dv", "dcos", "dsin"), ours, theirs, exact, strict=False):
        assert mine.shape == truth.shape and mine.dtype == torchs.dtype
        allowed = 2 * (torchs - truth).abs().max().item() + ATOL[do.dtype] * max(1.0, truth.abs().max().item())
        assert (error := (mine - truth).abs().max().item()) <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_packed_samples_are_each_on_their_own(sizes, dtype, kernels_on_nan):
    tensors = [torch.randn(sum(sizes), 2, 32).to(dtype) for _ in range(4)]
    compare(tensors[:3], tensors[3], sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout, full, heads", [("half", True, ()), ("interleaved", False, (2,)), ("half", False, ())])
def test_rotary_tables_have_a_row_for_each_token(layout, full, heads, dtype, kernels_on_nan):
    sizes = SIZES["many"]
    q, k, v, do = (torch.randn(sum(sizes), 2, 32).to(dtype) for _ in range(4))
    compare([q, k, v, *tables(sum(sizes), 32, full, heads)], do, sizes, layout)


@pytest.mark.parametrize("D", [16, 24, 40, 72, 80, 96, 128])
def test_head_sizes(D, kernels_on_nan):
    sizes = [3, 34, 0, 20]
    compare([torch.randn(sum(sizes), 1, D) for _ in range(3)], torch.randn(sum(sizes), 1, D), sizes)


def test_strides_and_packed_qkv(kernels_on_nan):
    """Heads that lie apart, q, k and v of one tensor, and offsets in int64, as nested tensors have them."""
    sizes = SIZES["many"]
    T, H, D = sum(sizes), 3, 16
    q, k = torch.randn(H, T, D).transpose(0, 1), torch.randn(T, H, 2 * D)[..., ::2]
    compare([q, k, torch.randn(T, 2 * H, D)[:, ::2]], torch.randn(H, D, T).permute(2, 0, 1), sizes)
    qkv, do = torch.randn(T, 3, H, D, requires_grad=True), torch.randn(T, H, D)
    o = ops.attention(qkv, scale=0.2, offsets=offsets_of(sizes, torch.int64))
    exact = qkv.detach().double().requires_grad_()
    truth = alone(*exact.unbind(1), sizes)
    torch.testing.assert_close(o.double(), truth, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(o, qkv, do)[0], torch.autograd.grad(truth, exact, do.double())[0]
    torch.testing.assert_close(grads[0].double(), grads[1], atol=1e-5, rtol=1e-5)


def test_sums_for_the_qkv_bias_leave_nothing_out(kernels_on_nan):
    """Column sums of dqkv, of programs that are left over too: what they never write would be NaN here."""
    sizes, H, D = [5, 0, 70, 33, 1], 2, 32
    T, logits = sum(sizes), Logits(offsets=offsets_of(sizes), longest=70)
    q, k, v = torch.randn(1, T, 3, H, D).unbind(2)
    o, lse = kernels.attention_fwd(q, k, v, 0.2, logits)
    dqkv, sums = kernels.attention_bwd(q, k, v, o, lse, torch.randn_like(o), 0.2, True, logits)
    torch.testing.assert_close(sums, dqkv.sum((0, 1)).flatten(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("sizes", [*SIZES.values(), [], [0], [3] * 1100, [2000, 1, 2000]], ids=lambda s: str(s)[:20])
@pytest.mark.parametrize("block", [16, 64])
def test_the_table_has_each_tile_once_long_samples_first(sizes, block, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(77))
    offsets = offsets_of(sizes)
    table = attention_packed.tile_table(offsets, sum(sizes), block).tolist()
    blocks = [-(-size // block) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda s: (-blocks[s], s))
    wanted = [[int(offsets[s]), sizes[s], i] for s in order for i in range(blocks[s])]
    assert table[: len(wanted)] == wanted
    assert all(row == [0, 0, 0] for row in table[len(wanted) :])
    assert len(table) == sum(sizes) // block + len(sizes)


def test_same_bits_every_time():
    sizes = SIZES["many"]
    tensors = [torch.randn(sum(sizes), 2, 32) for _ in range(4)]
    runs = [gradients(by_kernels, tensors[:3], tensors[3], sizes) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_a_sample_does_not_depend_on_the_others():
    """Bit for bit: the embedding of an image may not change with its batch."""
    sizes = SIZES["many"]
    q, k, v = (torch.randn(sum(sizes), 2, 32) for _ in range(3))
    together = by_kernels(q, k, v, sizes)
    ends = offsets_of(sizes).tolist()
    for first, end, size in zip(ends, ends[1:], sizes):
        assert torch.equal(together[first:end], by_kernels(*(x[first:end] for x in (q, k, v)), [size]))


@pytest.mark.parametrize("op", ["attention_fwd", "attention_bwd"])
def test_a_tile_of_another_path_is_left_to_the_rules(op):
    """`rows`, `head` and `phases` know one size alone."""
    q = torch.empty(1, 10, 2, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 10])
    for provider in ("rows", "head", "phases"):
        rules = [r.tile for r in tiles.RULES[op] + tiles.CANDIDATES[op] if r.tile.provider == provider]
        for tile in rules[:1]:
            with tiles.override(op, tile):
                assert kernels._lookup(op, q, Logits(offsets=offsets, longest=10)).provider == "tiled"
