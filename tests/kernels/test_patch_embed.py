"""The patch embedding's kernels against float64: layouts, dtypes, gradients, frozen parameters."""

import contextlib
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitfast import ops, ref
from vitfast.kernels import patch_embed as forward_module
from vitfast.kernels import patch_embed_bwd as backward_module
from vitfast.kernels import patches, tiles
from vitfast.packed import token_rows

# On top of twice PyTorch's own error. fp32: sums of some hundred products of size 1 in another order. fp16: half a
# rounding step of results up to 8, where PyTorch happens to round well; its gradients are sums over all patches of
# the batch. bf16: one rounding, 2^-8, of results up to 2.
ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 8e-3}
NAMES = ("images", "weight", "bias", "cls_token", "pos_embed")
MEAN, STD = (0.48, 0.45, 0.4, 0.5), (0.22, 0.25, 0.3, 0.5)
OPERATIONS = ("patch_embed_fwd", "patch_embed_dweight", "patch_embed_dimages")
TINY = tiles.tile(4, 1, BLOCK_M=16, BLOCK_D=16, BLOCK_K=16)


@contextlib.contextmanager
def tiny_tiles():
    """Tiles so small that a few patches already need several programs and several steps."""
    with contextlib.ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(
                tiles.override(name, tiles.tile(4, 1, **dict(TINY.blocks), PROGRAMS=8) if "dweight" in name else TINY)
            )
        yield


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN: what a kernel leaves unwritten shows."""
    empty = torch.empty

    def poison(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() and out.device.type != "meta" else out

    for module in (forward_module, backward_module):
        monkeypatch.setattr(module.torch, "empty", poison)


def make_images(layout, batch, chans, height, width, dtype, device="cpu"):
    """(B, C, Hi, Wi) random images lying in memory as `layout` says."""
    rand = functools.partial(torch.randint, 0, 256, dtype=torch.uint8) if dtype == torch.uint8 else torch.randn
    if layout == "sliced":  # a crop of every second image, of more channels than are asked for
        full = rand((2 * batch, chans + 1, height + 3, width + 5)).to(device, dtype)
        return full[::2, 1:, 2:-1, 3:-2]
    if layout == "rgb of rgba":
        return rand((batch, height, width, chans + 1)).to(device, dtype)[..., :chans].permute(0, 3, 1, 2)
    images = rand((batch, chans, height, width)).to(device, dtype)
    return images.contiguous(memory_format=torch.channels_last) if layout == "channels last" else images


def make(
    patch=(4, 8),
    chans=3,
    grid=(2, 3),
    batch=2,
    width=24,
    images=torch.float32,
    dtype=torch.float32,
    layout="nchw",
    prefix=1,
    pos="all",
    bias=True,
    device="cpu",
):
    """The arguments by name; parameters in fp32 next to a weight in `dtype`, as autocast leaves them."""
    p, q = patch
    patches = grid[0] * grid[1]

    def parameter(*shape, dtype=torch.float32):
        return torch.randn(shape).to(device, dtype).requires_grad_()

    pixels = make_images(layout, batch, chans, grid[0] * p, grid[1] * q, images, device)
    return dict(
        images=pixels.requires_grad_(pixels.is_floating_point()),
        weight=(torch.randn(width, chans, p, q) * (chans * p * q) ** -0.5).to(device, dtype).requires_grad_(),
        bias=parameter(width) if bias else None,
        cls_token=parameter(1, prefix, width) if prefix else None,
        pos_embed=None if pos is None else parameter(1, patches + (prefix if pos == "all" else 0), width),
    )


def normalisation(tensors):
    chans = tensors["images"].shape[1]
    reps = -(-chans // len(MEAN))
    return dict(mean=(MEAN * reps)[:chans], std=(STD * reps)[:chans]) if tensors["images"].dtype == torch.uint8 else {}


def run(function, tensors, upstream=None, **options):
    """(output, gradients by name, the upstream gradient)."""
    leaves = {n: t for n, t in tensors.items() if t is not None and t.requires_grad}
    out = function(*(tensors[n] for n in NAMES), **normalisation(tensors), **options)
    upstream = torch.randn_like(out) if upstream is None else upstream
    grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    return out, dict(zip(leaves, grads)), upstream


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
    for name, given_, torchs, true in [
        ("output", out, own, truth),
        *((n, grads[n], own_grads[n], true_grads[n]) for n in grads),
    ]:
        assert given_.shape == true.shape and given_.dtype == torchs.dtype, name
        if given_.numel():
            allowed = 2 * (torchs.double() - true).abs().max() + ATOL[dtype] * max(1, true.abs().max() / 8)
            error = (given_.double() - true).abs().max()
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


F32, F16, BF16, U8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
CASES = {
    "p16 nchw": dict(patch=(16, 16), prefix=1),
    "p16 fp16": dict(patch=(16, 16), images=F16, dtype=F16, pos="patches", grid=(3, 2)),
    "p16 channels last, mixed": dict(patch=(16, 16), layout="channels last", dtype=F16, batch=1),
    "p16 raw channels last": dict(patch=(16, 16), layout="channels last", images=U8, dtype=F16),
    "p16 raw": dict(patch=(16, 16), images=U8, prefix=4, pos="patches"),
    "p14 fp16": dict(patch=(14, 14), images=F16, dtype=F16, prefix=0, batch=3, grid=(1, 2)),
    "p14 channels last": dict(patch=(14, 14), chans=4, layout="channels last", grid=(2, 1)),
    "p14 raw channels last": dict(patch=(14, 14), layout="channels last", images=U8, dtype=F16, prefix=4),
    "p14 raw sliced": dict(patch=(14, 14), chans=1, layout="sliced", images=U8, bias=False, pos=None),
    "sliced": dict(layout="sliced", chans=4, prefix=4),
    "sliced, mixed": dict(layout="sliced", dtype=F16, pos=None, prefix=0, bias=False),
    "fp16 images, fp32 weight": dict(images=F16, chans=1, prefix=0),
    "rgb of rgba": dict(layout="rgb of rgba", images=U8, dtype=F16),
    "six channels raw": dict(chans=6, images=U8, layout="channels last"),
    "one channel": dict(chans=1, layout="channels last", images=U8, prefix=0, pos=None),
    "no image": dict(batch=0, prefix=4),
    "no raw image": dict(batch=0, images=U8, layout="channels last"),
}
for name in [name for name, case in CASES.items() if F16 in case.values()]:  # and all of those in bf16
    in_bf16 = name.replace("fp16", "bf16") if "fp16" in name else f"{name}, bf16"
    CASES[in_bf16] = {key: BF16 if value is F16 else value for key, value in CASES[name].items()}


@pytest.mark.parametrize("case", CASES)
def test_patch_embed_matches_ref(case):
    check(make(**CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_patch_embed_by_cublas_matches_ref(case):
    """Patches written out and multiplied by torch: what the tuner may choose."""
    with contextlib.ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(tiles.override(name, tiles.tile(provider="cublas")))
        check(make(**CASES[case]))


@pytest.mark.parametrize("images", [F32, U8], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "channels last"])
def test_patch_embed_many_programs(layout, images):
    with tiny_tiles():
        check(make(patch=(2, 6), chans=3, grid=(3, 3), batch=4, width=20, layout=layout, images=images, prefix=2))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    patch=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    chans=st.integers(1, 5),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.integers(1, 4),
    width=st.integers(1, 20),
    images=st.sampled_from([F32, F16, BF16, U8]),
    layout=st.sampled_from(["nchw", "channels last", "sliced", "rgb of rgba"]),
    prefix=st.integers(0, 3),
    pos=st.sampled_from([None, "all", "patches"]),
    bias=st.booleans(),
)
def test_patch_embed_random_shapes(dtype, **case):
    with tiny_tiles():
        check(make(dtype=dtype, **case))


def test_patch_embed_strided_parameters_and_upstream():
    tensors = make(layout="channels last")
    with torch.no_grad():
        tensors["weight"] = tensors["weight"].contiguous(memory_format=torch.channels_last).requires_grad_()
        tensors["bias"] = torch.randn(48)[::2].requires_grad_()
        tensors["pos_embed"] = torch.randn(1, 24, 7).transpose(1, 2).requires_grad_()
    check(tensors)
    for upstream in (torch.randn(24).expand(2, 7, 24), torch.randn(2, 24, 7).transpose(1, 2)):
        _, grads, _ = run(on, tensors, upstream)
        _, expected, _ = run(ref.patch_embed, tensors, upstream)
        for name in grads:
            torch.testing.assert_close(grads[name], expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [pytest.param(F16, marks=pytest.mark.long), BF16], ids=str)
def test_patch_embed_channels_further_apart_than_int32(dtype):
    far = 1_100_000_000  # the third begins beyond 2^31
    memory = torch.UntypedStorage(2 * far + 4096)  # which nobody fills: only the touched pages become real
    images = torch.tensor([], dtype=U8).set_(memory).as_strided((2, 3, 8, 16), (128, far, 16, 1))
    images.copy_(make_images("nchw", 2, 3, 8, 16, U8))
    check(make(patch=(4, 8), images=U8, dtype=dtype, prefix=0) | dict(images=images, pos_embed=None))


def launched(monkeypatch, tensors):
    """Names of the kernels that backward launches."""
    names, launch = set(), backward_module.launch
    out = on(*(tensors[n] for n in NAMES), **normalisation(tensors))
    with monkeypatch.context() as patch:
        patch.setattr(
            backward_module,
            "launch",
            lambda kernel, *a, **k: (names.add(k.get("_", kernel.__name__)), launch(kernel, *a, **k)),
        )
        out.backward(torch.randn_like(out))
    return {name.removeprefix("patch_embed_").removesuffix("_kernel") for name in names}


@pytest.mark.parametrize(
    "images, learned, expected",
    [
        (F32, ["weight"], ["dweight", "dweight_sum"]),
        (U8, ["weight"], ["batch_sum", "dweight", "dweight_sum"]),
        (F32, ["images"], ["dimages"]),
        *((U8, [name], ["batch_sum"]) for name in NAMES[2:]),
    ],
    ids=str,
)
def test_patch_embed_frozen_parameters_cost_nothing(monkeypatch, images, learned, expected):
    tensors = make(images=images, patch=(2, 2))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in learned)
    assert sorted(launched(monkeypatch, tensors)) == expected
    assert [name for name in NAMES if tensors[name].grad is not None] == learned
    check(tensors)


def test_patch_embed_keeps_images_only_for_the_weight():
    tensors = make(images=U8, patch=(2, 2))
    tensors["weight"].requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        on(*tensors.values())
    assert all(t.dtype != U8 for t in kept)


@pytest.mark.parametrize("images", [F32, U8], ids=str)
def test_patch_embed_same_bits_twice(images):
    tensors = make(images=images, patch=(2, 2), grid=(3, 3), batch=4)
    with tiny_tiles():
        out, grads, upstream = run(on, tensors)
        again, again_grads, _ = run(on, tensors, upstream)
    assert torch.equal(out, again) and all(torch.equal(grads[n], again_grads[n]) for n in grads)


@pytest.mark.parametrize("images", [F32, U8], ids=str)
def test_patch_embed_opcheck(images):
    tensors = make(images=images, patch=(2, 2), layout="channels last")
    norm = [list(v) for v in normalisation(tensors).values()] or [[], []]
    torch.library.opcheck(torch.ops.vitfast.patch_embed.default, (*tensors.values(), None, None, *norm))
    dtypes, floats = (F32, F32, F32), images == F32
    given_ = [t.detach() for t in (torch.randn(2, 7, 24), tensors["images"], tensors["weight"])]
    tests = ("test_schema", "test_faketensor")  # the others ask for a derivative of the derivative, which is refused
    for needed in ([floats, True, True, True, True], [False, False, True, False, False]):
        torch.library.opcheck(
            torch.ops.vitfast.patch_embed_bwd.default,
            (*given_, None, None, *norm, 1, 7, *dtypes, needed),
            test_utils=tests,
        )


def test_patch_embed_opcheck_of_packed_images():
    """Three images of 4, 0 and 3 patches, with a class token."""
    patches, weight, bias = (torch.randn(s, requires_grad=True) for s in ((7, 3, 2, 2), (24, 3, 2, 2), (24,)))
    cls_token, pos_embed = (torch.randn(s, requires_grad=True) for s in ((1, 1, 24), (7, 24)))
    placed = token_rows(torch.tensor([0, 4, 4, 7]), 7, 1)
    given_ = (patches, weight, bias, cls_token, pos_embed, *placed, [], [])
    torch.library.opcheck(torch.ops.vitfast.patch_embed.default, given_)
    bare = (torch.randn(10, 24), patches.detach(), weight.detach(), *placed, [], [], 1, 7, F32, F32, F32)
    for needed in ([True] * 5, [False, False, True, False, True]):
        torch.library.opcheck(
            torch.ops.vitfast.patch_embed_bwd.default, (*bare, needed), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("images", [F32, U8], ids=str)
def test_patch_embed_compile(images):
    tensors = make(images=images, patch=(2, 2))
    out, grads, upstream = run(on, tensors)
    with ops.use_kernels("on"):
        compiled = torch.compile(ops.patch_embed, fullgraph=True, backend="aot_eager")
        again, again_grads, _ = run(compiled, tensors, upstream)
    assert torch.equal(out, again) and all(torch.equal(grads[n], again_grads[n]) for n in grads)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_patch_embed_autocast_casts_the_weight_alone(dtype):
    tensors = make()
    seen, launch = [], forward_module.launch
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype):
        patch.setattr(forward_module, "launch", lambda kernel, *a, **k: (seen.append(k), launch(kernel, *a, **k)))
        out, grads, _ = run(on, tensors)
    assert out.dtype == dtype and all(g.dtype == F32 for g in grads.values())
    assert seen[-1]["image_ptr"].data_ptr() == tensors["images"].data_ptr()
    assert seen[-1]["pos_ptr"].dtype == F32 and seen[-1]["weight_ptr"].dtype == dtype
    half = tensors | dict(weight=tensors["weight"].detach().to(dtype).requires_grad_())
    assert torch.equal(out, run(on, half)[0])


def test_patch_embed_errors():
    tensors = make(patch=(2, 2))
    out = on(*tensors.values())
    (grad,) = torch.autograd.grad(out, tensors["images"], torch.randn_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="patch_embed: cannot be differentiated twice"):
        grad.sum().backward()
    with pytest.raises(
        RuntimeError, match="patch_embed: kernels are switched on, but no kernel computes in torch.float64"
    ):
        on(*(t.double() for t in tensors.values()))
    with pytest.raises(RuntimeError, match="patch_embed: kernels are switched on, but no kernel reads torch.float64"):
        on(tensors["images"].double(), *list(tensors.values())[1:])


def test_division_by_multiplication_is_exact():
    for divisor in (1, 2, 3, 7, 14, 37, 196, 197, 1369, 65535, 65536, 2**31 - 1):
        magic, shift = patches._magic(divisor)
        assert (2**31 - 1) * magic < 2**63
        last = (2**31 - 1) // divisor * divisor
        for x in (0, divisor - 1, divisor, last - 1, last, 2**31 - 1):
            assert x * magic >> shift == x // divisor


REAL = {
    "B/16": dict(patch=(16, 16), grid=(14, 14), width=768, batch=40),
    "B/16 few": dict(patch=(16, 16), grid=(14, 14), width=768, batch=2),
    "H/14": dict(patch=(14, 14), grid=(37, 37), width=1280, batch=4, prefix=5, pos="patches"),
    "L/16 384": dict(patch=(16, 16), grid=(24, 24), width=1024, batch=9),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "channels last"])
@pytest.mark.parametrize(
    "dtype, images",
    [(torch.bfloat16, F32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, U8), (F16, U8), (F32, F32)],
    ids=str,
)
@pytest.mark.parametrize("model", REAL)
def test_patch_embed_real_shapes(model, dtype, images, layout):
    check(make(**REAL[model], dtype=dtype, images=images, layout=layout, device="cuda"))


@pytest.mark.gpu
def test_patch_embed_beyond_two_to_the_31():
    batch = 2**31 // (3 * 224 * 224) + 100
    images = torch.randint(0, 256, (batch, 3, 224, 224), dtype=U8, device="cuda")
    weight = torch.randn(768, 3, 16, 16, device="cuda", dtype=torch.bfloat16)
    cls_token, pos_embed = torch.randn(1, 1, 768, device="cuda"), torch.randn(1, 197, 768, device="cuda")
    out = on(images, weight, None, cls_token, pos_embed)
    assert torch.equal(out[-64:], on(images[-64:].clone(), weight, None, cls_token, pos_embed))
