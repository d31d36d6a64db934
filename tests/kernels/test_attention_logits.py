"""Attention's kernels with rotary positions, a bias and lengths of keys, interpreted, against float64."""

import contextlib

import pytest
import torch
from test_attention import ATOL, DTYPES, HALVES, PATHS, path

from vitfast import ops, ref
from vitfast.kernels import attention as kernels
from vitfast.kernels import launch, tiles
from vitfast.kernels.logits import Logits

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels; test_gpu.py runs the real ones")

LAYOUTS = ("half", "interleaved")


def case(B, N, H, D, dtype, prefix=0, lead=None, full=True, bias=None, lengths=None, tables=torch.float32):
    """qkv, do and the tensors that act on the logits. lead: the first axes of cos and sin; bias: of the bias."""
    acting = {}
    if lead is not None:  # angles of each column its own: no rotation, which the operation does not ask for
        angle = torch.randn(*lead, N - prefix, D if full else D // 2) * 2
        acting |= dict(cos=angle.cos().to(tables), sin=angle.sin().to(tables))
    if bias is not None:
        acting["bias"] = torch.randn(*bias, H, N, N).to(dtype)
    if lengths is not None:
        acting["key_lengths"] = torch.tensor(lengths)
    return torch.randn(B, N, 3, H, D).to(dtype), torch.randn(B, N, H, D).to(dtype), acting


def run(function, qkv, do, acting, layout, prefix):
    """The output and the gradients of qkv and of what acts on the logits."""
    leaves = [qkv, *(t for t in acting.values() if t.is_floating_point())]
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    given = dict(zip(acting, leaves[1:])) | {k: t for k, t in acting.items() if not t.is_floating_point()}
    rope = (given.pop("cos"), given.pop("sin")) if "cos" in given else None
    o = function(leaves[0], rope=rope, rope_layout=layout, num_prefix=prefix, **given)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def by_kernels(qkv, **options):
    with ops.use_kernels("on"):
        return ops.attention(qkv, scale=0.2, **options)


def by_ref(qkv, **options):
    return ref.attention(*qkv.unbind(2), scale=0.2, **options)


def compare(qkv, do, acting, layout="half", prefix=0):
    """Kernels against float64, judged by PyTorch in the same dtype."""
    double = {name: t.double() if t.is_floating_point() else t for name, t in acting.items()}
    exact = run(by_ref, qkv.double(), do.double(), double, layout, prefix)
    theirs = run(by_ref, qkv, do, acting, layout, prefix)
    before = launch.launches_made()
    ours = run(by_kernels, qkv, do, acting, layout, prefix)
    assert launch.launches_made() > before
    for name, mine, torchs, truth in zip(("o", "dqkv", *acting), ours, theirs, exact, strict=False):
        assert mine.shape == truth.shape and mine.dtype == torchs.dtype
        if not truth.numel():
            continue
        size = max(1.0, truth.abs().max().item())
        allowed = 2 * (torchs - truth).abs().max().item() + ATOL[qkv.dtype] * size
        error = (mine - truth).abs().max().item()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"  # a NaN fails too


@pytest.fixture(params=["tiled", "phases"])
def each_path(request):
    with path(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout, N, D, prefix, lead, full",
    [
        ("half", 50, 64, 1, (), True),
        ("interleaved", 70, 64, 5, (2,), True),
        ("half", 37, 32, 0, (2, 1), False),
        ("interleaved", 37, 16, 3, (2, 2), False),
        ("half", 21, 72, 1, (1, 2), True),  # halves of 36 columns in chunks of 64
        ("interleaved", 21, 24, 21, (), True),  # no token turns
        ("half", 1, 128, 0, (), False),
    ],
)
def test_rope_matches_ref(layout, N, D, prefix, lead, full, dtype, kernels_on_nan):
    compare(*case(2, N, 2, D, dtype, prefix, lead, full), layout, prefix)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("N", [65, 128])
def test_rope_on_each_path(layout, N, each_path, kernels_on_nan):
    compare(*case(1, N, 2, 32, torch.float32, 2, (), True), layout, 2)


@pytest.mark.parametrize("D", [40, 56, 80, 88, 96, 104, 120])
def test_rope_at_every_head_size(D, kernels_on_nan):
    for layout in LAYOUTS:
        compare(*case(1, 18, 1, D, torch.float32, 1, (), True), layout, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, N, D", [((), 50, 64), ((1,), 37, 24), ((2,), 70, 32), ((2,), 1, 16)])
def test_bias_matches_ref(shape, N, D, dtype, each_path, kernels_on_nan):
    compare(*case(2, N, 2, D, dtype, bias=shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, lengths", [(70, (70, 33, 1)), (64, (64, 0, 63)), (50, (7, 100, -3))])
def test_key_lengths_match_ref(N, lengths, dtype, each_path, kernels_on_nan):
    compare(*case(3, N, 2, 32, dtype, lengths=lengths))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_at_once(layout, dtype, each_path, kernels_on_nan):
    compare(*case(2, 70, 2, 16, dtype, 3, (2,), True, (), (70, 41), tables=dtype), layout, 3)


def test_hidden_keys_may_hold_anything(each_path):
    """Padding is often uninitialised: NaN there must not spread, nor come back as a gradient."""
    qkv, do, acting = case(2, 70, 2, 32, torch.float32, lengths=(70, 20))
    qkv[1, 20:, 1:] = float("nan")
    out, dqkv, *_ = run(by_kernels, qkv, do, acting, "half", 0)
    clean = qkv.nan_to_num()
    for ours, theirs in zip((out, dqkv), run(by_ref, clean.double(), do.double(), acting, "half", 0)):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_minus_infinity_in_a_bias_hides_keys(each_path, kernels_on_nan):
    """Whole blocks of keys, whole rows: those queries give zeros, and take none."""
    qkv, do, acting = case(1, 130, 2, 16, torch.float32, bias=())
    bias = acting["bias"]
    bias[0, :, :64] = float("-inf")  # the first blocks of keys
    bias[1, 5] = float("-inf")  # one query
    bias[:, :, 129] = float("-inf")
    out, dqkv, dbias = run(by_kernels, qkv, do, acting, "half", 0)
    truth = run(by_ref, qkv.double(), do.double(), {"bias": bias.double()}, "half", 0)
    assert not out[0, 5, 1].any() and not dqkv[0, 129, 1:].any()
    for ours, theirs in zip((out, dqkv, dbias), truth):
        torch.testing.assert_close(ours.double(), theirs.nan_to_num(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_of_least_numbers(dtype, each_path, kernels_on_nan):
    """As libraries write masks: padding's queries see nothing, so they see all keys alike; and come to no account."""
    qkv, do, _ = case(1, 70, 2, 16, dtype)
    bias = torch.zeros(1, 2, 70, 70)
    bias[..., 60:] = bias[..., 60:, :] = torch.finfo(torch.float32).min
    do[:, 60:] = 0
    compare(qkv, do, {"bias": bias})
    out, *_ = run(by_kernels, qkv, do, {"bias": bias}, "half", 0)
    alike = qkv[:, :, 2].double().mean(1, keepdim=True)
    torch.testing.assert_close(out[:, 60:].double(), alike.expand(1, 10, 2, 16), atol=ATOL[dtype], rtol=0)


def test_a_mask_of_stride_zero_is_read_where_it_lies(each_path):
    qkv, do, _ = case(2, 70, 2, 16, torch.float32)
    mask = torch.zeros(2, 1, 1, 70).masked_fill(torch.rand(2, 1, 1, 70) < 0.3, float("-inf"))
    mask[..., 0] = 0
    expanded = mask.expand(2, 2, 70, 70)
    with ops.use_kernels("on"):
        ours = ops.attention(qkv, bias=expanded)
    torch.testing.assert_close(ours, ref.attention(*qkv.unbind(2), bias=expanded), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_tables_and_bias(transposed, kernels_on_nan):
    """cos and sin of unlike strides, a bias with its keys outside."""
    qkv, do, acting = case(2, 21, 2, 16, torch.float32, 1, (2,), True, ())
    if transposed:
        acting["cos"] = acting["cos"].transpose(-1, -2).contiguous().transpose(-1, -2)
        acting["bias"] = acting["bias"].transpose(-1, -2)
    else:
        wide = torch.randn(2, 20, 40)
        wide[..., 8:24] = acting["sin"]
        acting["sin"] = wide[..., 8:24]
    compare(qkv, do, acting, "half", 1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_separate_tensors_and_frozen_ones(compiled, kernels_on_nan):
    """Gradients of what asks for them, and of nothing else, in compiled code too."""
    qkv, do, acting = case(2, 21, 2, 16, torch.float32, 1, (2,), True, ())
    q, k, v = (t.contiguous() for t in qkv.unbind(2))
    logits = Logits(*acting.values(), num_prefix=1)

    def attend(q, k, v, cos, sin, bias):
        return ops.attention(q, k, v, rope=(cos, sin), num_prefix=1, bias=bias)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    tensors = [q, k, v, *acting.values()]
    for wanted in ([0], [1, 3], [2, 5], [4], [5], list(range(6))):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        grads = torch.autograd.grad(run(*leaves), [leaves[i] for i in wanted], do)
        doubles = [t.double().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        out = ref.attention(*doubles[:3], **logits._replace(cos=doubles[3], sin=doubles[4], bias=doubles[5]).options)
        for ours, theirs in zip(grads, torch.autograd.grad(out, [doubles[i] for i in wanted], do.double())):
            torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def test_libraries_and_the_head_kernel_stand_back():
    """A tile that names a provider without rotary positions is passed over, not run."""
    qkv, do, acting = case(1, 70, 2, 32, torch.float16, 1, (), True)
    with contextlib.ExitStack() as stack:
        for op, tile in PATHS["whole"].items():
            stack.enter_context(tiles.override(op, tile))
        launches = launch.record(lambda: run(by_kernels, qkv, do, acting, "half", 1))
    names = [found.kernel.__name__ for found in launches]
    assert names[0] == "_attention_fwd_short_kernel" and "_attention_bwd_head_kernel" not in names
    for suffix in ("b", "k", "rbk"):
        assert kernels.attention_class(64, 201, suffix) == f"d64n256{suffix}"


@pytest.mark.parametrize("width, heads, layer_scale", [(32, 2, True)])
@pytest.mark.parametrize("frozen", [False, True])
def test_attention_block_with_everything(width, heads, layer_scale, frozen, kernels_on_nan):
    """The block's own gradients, the bias of qkv among them, beside those of what acts on the logits."""
    B, N, head = 2, 21, width // heads
    x, dout = torch.randn(B, N, width), torch.randn(B, N, width)
    layers = [torch.randn(width), torch.randn(width), torch.randn(3 * width, width) * 0.2, torch.randn(3 * width)]
    layers += [torch.randn(width, width) * 0.2, torch.randn(width)]
    acting = [torch.randn(heads, N - 1, head), torch.randn(heads, N - 1, head), torch.randn(1, heads, N, N)]
    scale, lengths = torch.randn(width), torch.tensor([21, 9])

    def block(x, *tensors):
        *layers, cos, sin, bias, scale = tensors
        rope = dict(rope=(cos, sin), rope_layout="interleaved", num_prefix=1)
        options = dict(num_heads=heads, layer_scale=scale, bias=bias, key_lengths=lengths, **rope)
        return ops.attention_block(x, *layers, **options)

    tensors = [x, *layers, *acting, scale]
    wanted = [i for i in range(len(tensors)) if not frozen or i in (4, 8)]
    leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    ours = torch.autograd.grad(block(*leaves), [leaves[i] for i in wanted], dout)
    doubles = [t.double().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    with ops.use_kernels("off"):
        theirs = torch.autograd.grad(block(*doubles), [doubles[i] for i in wanted], dout.double())
    for i, mine, truth in zip(wanted, ours, theirs):
        torch.testing.assert_close(mine.double(), truth, atol=2e-4, rtol=1e-4, msg=lambda text, i=i: f"{i}: {text}")


def test_autocast_keeps_tables_and_bias_as_they_are(kernels_on_nan):
    qkv, _, acting = case(1, 21, 2, 16, torch.float32, 1, (), True, ())
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.attention(qkv, rope=(acting["cos"], acting["sin"]), num_prefix=1, bias=acting["bias"])
    assert out.dtype == torch.bfloat16
    exact = ref.attention(*qkv.unbind(2), rope=(acting["cos"], acting["sin"]), num_prefix=1, bias=acting["bias"])
    torch.testing.assert_close(out.float(), exact, atol=4e-2, rtol=4e-2)
