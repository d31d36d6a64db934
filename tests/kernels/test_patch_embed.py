"""Patch embedding beyond the grid of tests/tools/verify/test_edges.py: layouts, channels, dtypes of images."""

import contextlib

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import interpreted

from vitfast import ops
from vitfast.kernels import tiles
from vitfast.kernels.launch import record
from vitfast.kernels.patch_embed import patches
from vitfast.ops import reference as ref

# On top of twice PyTorch's own error. fp32: sums of some hundred products of size 1 in another order. fp16: half a
# rounding step of results up to 8, where PyTorch happens to round well; its gradients are sums over all patches of
# the batch. bf16: one rounding, 2^-8, of results up to 2.
ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 8e-3}
NAMES = ("images", "weight", "bias", "cls_token", "pos_embed")
MEAN, STD = (0.48, 0.45, 0.4, 0.5), (0.22, 0.25, 0.3, 0.5)
F32, F16, BF16, U8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8


def make_images(layout, batch, chans, height, width, dtype, device="cpu"):
    """A batch in memory as callers may have it."""

    def rand(*shape):
        raw = torch.randint(0, 256, shape, dtype=U8, device=device)
        return raw if dtype == U8 else torch.randn(shape, device=device).to(dtype)

    if layout == "sliced":
        return rand(batch + 1, chans + 1, height + 3, width + 5)[1:, :-1, 2:-1, 4:-1]
    if layout == "rgb of rgba":
        return rand(batch, height, width, chans + 1)[..., :chans].permute(0, 3, 1, 2)
    images = rand(batch, chans, height, width)
    return images.contiguous(memory_format=torch.channels_last) if layout == "channels last" else images


def make(
    patch=(4, 8), chans=3, grid=(2, 3), batch=2, width=24, images=F32, dtype=F32, layout="nchw", prefix=1, pos="all",
    bias=True, device="cpu",
):  # fmt: skip
    """The arguments by name; parameters in fp32 next to a weight in `dtype`, as autocast leaves them."""
    (p, q), count = patch, grid[0] * grid[1]
    parameter = lambda *shape: torch.randn(shape, device=device).requires_grad_()  # noqa: E731
    pixels = make_images(layout, batch, chans, grid[0] * p, grid[1] * q, images, device)
    weight = torch.randn(width, chans, p, q, device=device) * (chans * p * q) ** -0.5
    return dict(
        images=pixels.requires_grad_(pixels.is_floating_point()),
        weight=weight.to(dtype).requires_grad_(),
        bias=parameter(width) if bias else None,
        cls_token=parameter(1, prefix, width) if prefix else None,
        pos_embed=None if pos is None else parameter(1, count + (prefix if pos == "all" else 0), width),
    )


def run(function, tensors, upstream=None, **options):
    """(output, gradients by name, the upstream gradient)."""
    given = {name: t for name, t in tensors.items() if t is not None and t.requires_grad}
    if tensors["images"].dtype == U8:
        chans = tensors["images"].shape[1]
        options |= dict(mean=(MEAN * 2)[:chans], std=(STD * 2)[:chans])
    out = function(*(tensors[n] for n in NAMES), **options)
    upstream = torch.randn_like(out) if upstream is None else upstream
    return out, dict(zip(given, torch.autograd.grad(out, list(given.values()), upstream.to(out.dtype)))), upstream


def on(*args, **kwargs):
    with ops.use_kernels("on"):
        return ops.patch_embed(*args, **kwargs)


def check(tensors):
    """Output and gradients: error at most twice PyTorch's own in the same dtypes, plus ATOL."""
    dtype = tensors["weight"].dtype
    out, grads, upstream = run(on, tensors)
    own, own_grads, _ = run(ref.patch_embed, tensors, upstream)
    truth, true_grads, _ = run(ref.patch_embed, tensors, upstream, upcast=True)
    assert out.dtype == dtype and out.is_contiguous()
    triples = [("output", out, own, truth), *((n, grads[n], own_grads[n], true_grads[n]) for n in grads)]
    for name, mine, torchs, true in triples:
        assert mine.shape == true.shape and mine.dtype == torchs.dtype, name
        if mine.numel():
            allowed = 2 * (torchs.double() - true).abs().max() + ATOL[dtype] * max(1, true.abs().max() / 8)
            error = (mine.double() - true).abs().max()
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


CASES = {
    "mixed, channels last": dict(patch=(16, 16), layout="channels last", dtype=F16, batch=1),
    "raw, channels last": dict(patch=(14, 14), layout="channels last", images=U8, dtype=BF16, prefix=4),
    "raw, sliced, one channel": dict(patch=(14, 14), chans=1, layout="sliced", images=U8, bias=False, pos=None),
    "four channels": dict(patch=(14, 14), chans=4, layout="channels last", grid=(2, 1)),
    "sliced": dict(layout="sliced", chans=4, prefix=4),
    "sliced, mixed": dict(layout="sliced", dtype=BF16, pos=None, prefix=0, bias=False),
    "fp16 images, fp32 weight": dict(images=F16, chans=1, prefix=0),
    "bf16 images, fp16 weight": dict(images=BF16, dtype=F16, pos="patches"),
    "rgb of rgba": dict(layout="rgb of rgba", images=U8, dtype=F16),
    "six channels, raw": dict(chans=6, images=U8, layout="channels last"),
    "no image": dict(batch=0, prefix=4),
    "no raw image": dict(batch=0, images=U8, layout="channels last"),
}


@pytest.mark.quick(6)
@interpreted
@pytest.mark.parametrize("by", ["triton", "cublas"])
@pytest.mark.parametrize("case", CASES)
def test_images_of_every_kind(case, by):
    """By our kernels in small tiles, several programs of them; by torch, which multiplies patches that were written."""
    small = dict(BLOCK_M=16, BLOCK_D=16, BLOCK_K=64)
    chosen = {name: tiles.config(4, 1, **small) for name in ("patch_embed_fwd", "patch_embed_dimages")}
    chosen["patch_embed_dweight"] = tiles.config(4, 1, **small, PROGRAMS=8)
    with contextlib.ExitStack() as stack:
        for name, config in chosen.items():
            stack.enter_context(tiles.using(name, config if by == "triton" else tiles.config(provider=by)))
        check(make(**CASES[case]))


@interpreted
@pytest.mark.parametrize("dtype", [pytest.param(F16, marks=pytest.mark.long), BF16], ids=str)
def test_channels_further_apart_than_int32(dtype):
    far = 1_100_000_000  # the third begins beyond 2^31
    memory = torch.UntypedStorage(2 * far + 4096)  # which nobody fills: only the touched pages become real
    images = torch.tensor([], dtype=U8).set_(memory).as_strided((2, 3, 8, 16), (128, far, 16, 1))
    images.copy_(make_images("nchw", 2, 3, 8, 16, U8))
    check(make(patch=(4, 8), images=U8, dtype=dtype, prefix=0) | dict(images=images, pos_embed=None))


@interpreted
def test_images_are_read_where_they_lie_under_autocast():
    tensors = make(images=F32)
    with torch.autocast("cpu", BF16), torch.no_grad():
        arguments = record(lambda: on(*tensors.values()))[-1].arguments
    assert arguments["image_ptr"].data_ptr() == tensors["images"].data_ptr()
    assert arguments["pos_ptr"].dtype == F32 and arguments["weight_ptr"].dtype == BF16


@triton.jit
def centred_kernel(bytes_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, patches.centred_bytes(tl.load(bytes_ptr + offs)))


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_bytes_are_centred_exactly(device):
    """In PTX, four at once, and in its plain twin: all of them, in an order of their own, each in every place."""
    for shift in range(4):
        pixels = torch.arange(256, dtype=U8, device=device).flip(0).roll(shift)
        out = torch.full((256,), torch.nan, dtype=F16, device=device)
        centred_kernel[(1,)](pixels, out, BLOCK=256, num_warps=2)
        assert torch.equal(out.double(), pixels.double() - 128)


@pytest.mark.slow
@interpreted
def test_rows_of_a_weight_have_any_size():
    """A power of two times a row of a bf16 weight gives as many times its tokens, though fp16 multiplies raw pixels."""
    tensors = make(images=U8, dtype=BF16, prefix=0, pos=None, bias=False)
    powers = 2.0 ** torch.linspace(-60, 60, 24).round()
    powers[3] = 0
    tokens, *_ = run(on, tensors)
    tensors["weight"].data *= powers[:, None, None, None]
    again, *_ = run(on, tensors)
    assert torch.equal(again, tokens * powers.bfloat16()) and tokens.abs().min() > 0


def test_division_by_multiplication_is_exact():
    for divisor in (1, 2, 3, 7, 14, 37, 196, 197, 1369, 65535, 65536, 2**31 - 1):
        magic, shift = patches._magic(divisor)
        assert (2**31 - 1) * magic < 2**63
        last = (2**31 - 1) // divisor * divisor
        for x in (0, divisor - 1, divisor, last - 1, last, 2**31 - 1):
            assert x * magic >> shift == x // divisor


REAL = {
    "B/16": dict(patch=(16, 16), grid=(14, 14), width=768, batch=40),
    "H/14": dict(patch=(14, 14), grid=(37, 37), width=1280, batch=4, prefix=5, pos="patches"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "channels last"])
@pytest.mark.parametrize("dtype, images", [(BF16, F32), (BF16, BF16), (BF16, U8), (F16, U8), (F32, F32)], ids=str)
@pytest.mark.parametrize("size", REAL)
def test_real_shapes_on_a_gpu(size, dtype, images, layout):
    check(make(**REAL[size], dtype=dtype, images=images, layout=layout, device="cuda"))
