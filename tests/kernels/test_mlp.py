"""Linear layers with epilogues, interpreted, against float64: forward and every gradient."""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlp_cases import DTYPES, HALVES, PRODUCTS, all_triton, compare, layer, rand, run, two_layers
from pairs import pairs
from torch.nn import functional as F

from vitfast import ops, ref
from vitfast.kernels import mlp as kernels
from vitfast.kernels import tiles
from vitfast.kernels.launch import record
from vitfast.kernels.weight_grad import weight_grad, weight_grad_scaled

pytestmark = pytest.mark.usefixtures("poisoned")


# (leading shape, K, N): M in 0, 1, 5, 197, 256 around the tiles' edges, K and N multiples of the blocks and not.
SHAPES = [((0,), 64, 64), ((1,), 64, 192), ((1, 5), 200, 64), ((197,), 192, 200), ((2, 128), 64, 192)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead, k, n", SHAPES)
def test_linear_gelu_matches_ref(dtype, lead, k, n):
    activation = "gelu_tanh" if n == 192 else "gelu"
    compare(ops.linear_gelu, layer(lead, k, n, bias=k != 64), dtype, rand(*lead, n), activation=activation)


FACTORS = ["none", "scale", "drop", "scale drop"]


@pytest.mark.parametrize(
    "factors, shape, dtype", pairs(FACTORS, [((2, 0), 64, 64), ((3, 5), 200, 64), ((2, 99), 64, 200)], DTYPES)
)
def test_linear_residual_matches_ref(factors, shape, dtype):
    lead, k, n = shape
    values = layer(lead, k, n, bias=factors != "scale") | dict(residual=rand(*lead, n))
    if "scale" in factors:
        values["layer_scale"] = rand(n)
    if "drop" in factors:
        values["drop_path"] = torch.tensor([1.25, 0.0, 1.25], dtype=torch.float64)[: lead[0]]
    compare(ops.linear_residual, values, dtype, rand(*lead, n), frozen=("drop_path",))


@pytest.mark.parametrize(
    "shape, dtype, activation",
    pairs([((0,), 64, 64), ((1,), 64, 192), ((1, 5), 72, 200), ((197,), 64, 192)], DTYPES, ["gelu", "gelu_tanh"]),
)
def test_mlp_matches_ref(shape, dtype, activation):
    lead, k, f = shape
    compare(ops.mlp, two_layers(lead, k, f, k, bias=f == 192), dtype, rand(*lead, k), activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["quick_gelu", "silu"])
def test_other_activations_match_ref(dtype, activation):
    compare(ops.linear_gelu, layer((5,), 72, 136), dtype, rand(5, 136), activation=activation)
    compare(ops.mlp, two_layers((70,), 72, 200, 40), dtype, rand(70, 40), activation=activation)
    norm = dict(norm_weight=rand(40), norm_bias=rand(40))
    values = dict(x=rand(2, 7, 40)) | norm | dict(list(two_layers((1,), 40, 72, 40).items())[1:])
    compare(ops.mlp_block, values, dtype, rand(2, 7, 40), activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(m=st.integers(1, 70), k=st.integers(1, 90), f=st.integers(1, 90), tanh=st.booleans())
def test_random_shapes(dtype, m, k, f, tanh):
    compare(ops.mlp, two_layers((m,), k, f, k), dtype, rand(m, k), activation="gelu_tanh" if tanh else "gelu")
    compare(ops.linear_residual, layer((m,), k, f) | dict(residual=rand(m, f), layer_scale=rand(f)), dtype, rand(m, f))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("subtiles", [1, 2, 4])
def test_epilogue_in_pieces_is_the_same(subtiles, dtype):
    x, w, b = (t.to(dtype) for t in layer((70,), 40, 150).values())
    small = tiles.tile(BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, GROUP_M=2, SUBTILES=subtiles)
    with tiles.override("linear_gelu_fwd", small), tiles.override("dgelu_matmul", small):
        act, pre = kernels.linear_gelu(x, w, b, "gelu", True)
        dpre, again, dbias = kernels.dgelu_matmul(x, w.t().contiguous(), pre, "gelu", True)
    expected = F.linear(x.double(), w.double(), b.double())
    slope = torch.func.vmap(torch.func.vmap(torch.func.grad(F.gelu)))(pre.double())
    truth = (x.double() @ w.double().t()) * slope
    assert torch.equal(again, act)
    for value, exact in ((pre, expected), (act, F.gelu(pre.double())), (dpre, truth)):
        assert (value.double() - exact).abs().max() <= rounded(dtype, exact)
    assert (dbias.double() - truth.sum(0)).abs().max() < 1e-4  # fp32 sums of 70 unrounded values


def rounded(dtype, exact):
    """One rounding to a 16-bit dtype: half an ulp of the largest value, and fp32's own error before it."""
    return (torch.finfo(dtype).eps / 2 + 1e-6) * exact.abs().max()


def products(x, w, b, res, tile):
    """Every product with this tile: results by name, and how their launches loaded."""
    with contextlib.ExitStack() as stack:
        for op in PRODUCTS:
            stack.enter_context(tiles.override(op, tile))

        def run():
            act, pre = kernels.linear_gelu(x, w, b, "gelu", True)
            return dict(
                linear=kernels.linear(x, w, b),
                linear_residual=kernels.linear_residual(x, w, b, res, None, None, 7),
                input_grad=kernels.input_grad(res, w),
                linear_gelu=act,
                dgelu_matmul=kernels.dgelu_matmul(x, w.t().contiguous(), pre, "gelu", False)[0],
            )

        return run(), [launch.arguments["LOADS"] for launch in record(run)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_descriptors_read_the_same(dtype):
    """Tiles that reach past every edge; and pointers, where rows do not start at multiples of 16 bytes."""
    x, w, b, res = rand(70, 40).to(dtype), rand(152, 40).to(dtype), rand(152).to(dtype), rand(70, 152).to(dtype)
    blocks = dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, GROUP_M=2, SUBTILES=2)
    by_pointers, loads = products(x, w, b, res, tiles.tile(**blocks))
    assert set(loads) == {"masked"}
    by_descriptors, loads = products(x, w, b, res, tiles.tile(provider="tma", **blocks))
    assert loads == ["nt", "nt", "nt", "nn", "nn"]
    assert all(torch.equal(by_descriptors[name], value) for name, value in by_pointers.items())
    odd = torch.zeros(70, 41, dtype=dtype)[:, 1:]
    odd.copy_(x)
    by_descriptors, loads = products(odd, w, b, res, tiles.tile(provider="tma", **blocks))
    assert loads == ["masked", "masked", "masked", "nn", "masked"]
    assert all(torch.equal(by_descriptors[name], value) for name, value in by_pointers.items())


@pytest.mark.parametrize("dtype, far", [(torch.float16, 6e4), (torch.bfloat16, 1e19)])
def test_gelu_far_from_zero(dtype, far):
    """Far from zero, where fp32 holds the square, gelu is 0 or the identity, its slope 0 or 1, never NaN."""
    pre = torch.tensor([[-far, -100.0, -20.0, 20.0, 100.0, far]], dtype=dtype)
    for activation in ("gelu", "gelu_tanh"):
        dpre, dbias = kernels.gelu_bwd(torch.ones_like(pre), pre, activation, True)
        assert dpre.tolist() == [[0, 0, 0, 1, 1, 1]] and dbias.tolist() == [0, 0, 0, 1, 1, 1]
        act, kept = kernels.linear_gelu(torch.ones(1, 1, dtype=dtype), pre.t().contiguous(), None, activation, True)
        assert torch.equal(kept, pre) and torch.equal(act, pre.clamp(min=0))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("provider", ["triton", "cublas"])
def test_fp32_residual_over_16_bit_product(provider, dtype):
    """residual_in_fp32 rounds operands once and not the branch (cuBLAS: once to 16 bit)."""
    values = layer((3, 67), 64, 200)
    x, w, b = (v.to(dtype) for v in values.values())
    residual, scale, drop = torch.randn(201, 200) * 100, torch.randn(200), torch.tensor([1.25, 0.0, 1.25])
    tile = dataclasses.replace(tiles.lookup("linear_residual_fwd", x, "64x200"), provider=provider)
    with tiles.override("linear_residual_fwd", tile):
        out = kernels.linear_residual(x.view(-1, 64), w, b, residual, scale, drop, 67)
    factors = scale.double() * drop.double().repeat_interleave(67)[:, None]
    branch = factors * F.linear(x.view(-1, 64).double(), w.double(), b.double())
    assert out.dtype == torch.float32
    error = (out.double() - residual.double() - branch).abs().max()
    assert error < 1e-4 + (0 if provider == "triton" else rounded(dtype, branch))
    assert torch.equal(out[67:134], residual[67:134])


@pytest.mark.parametrize(
    "dtype, splits, m",
    [
        *((torch.float32, *case) for case in [(1, 197), (3, 1)]),
        *((dtype, *case) for dtype in HALVES for case in [(3, 197), (3, 0), (1, 1)]),
    ],
)
def test_weight_grad(dtype, splits, m):
    g, x, w = rand(m, 72).to(dtype), rand(m, 200).to(dtype), rand(72, 200).to(dtype)
    scale = rand(72).float()
    product = g.double().t() @ x.double()
    for provider in ("triton", "tma", "cublas"):
        tile = tiles.tile(provider=provider, BLOCK_M=32, BLOCK_N=64, BLOCK_K=128, GROUP_N=2, SPLIT_K=splits, SUBTILES=2)
        with (
            tiles.override("weight_grad", tile),
            tiles.override("weight_grad_sum", tiles.tile(BLOCK_N=16, BLOCK_K=128)),
        ):
            plain, exact = weight_grad(g, x), weight_grad(g, x, out_dtype=torch.float32)
            scaled = weight_grad(g, x, layer_scale=scale)
            dweight, dscale = weight_grad_scaled(g, x, w, scale)
        assert plain.dtype == scaled.dtype == dweight.dtype == dtype and exact.dtype == dscale.dtype == torch.float32
        assert (exact.double() - product).abs().max() < 1e-4
        for value, truth, fp32 in (
            (plain, product, 1e-4),
            *((v, scale.double()[:, None] * product, 4e-4) for v in (scaled, dweight)),
        ):
            assert (value.double() - truth).abs().max() <= (fp32 if dtype == torch.float32 else rounded(dtype, truth))
        along = (product * w.double()).sum(1)
        assert (dscale.double() - along).abs().max() < 1e-3  # fp32 sums of 200 products of about 14


def test_cublas_in_the_place_of_every_kernel_agrees():
    values, upstream = two_layers((37,), 64, 96, 64), rand(37, 64)
    with all_triton():
        expected = run(ops.mlp, values, torch.float32, upstream)
        with contextlib.ExitStack() as stack:
            for op in PRODUCTS:
                stack.enter_context(tiles.override(op, tiles.tile(provider="cublas")))
            actual = run(ops.mlp, values, torch.float32, upstream)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", HALVES)
def test_same_bits_twice(dtype):
    values, upstream = two_layers((130,), 64, 96, 64), rand(130, 64)
    with all_triton():
        first, second = (run(ops.mlp, values, dtype, upstream) for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_strided_inputs_and_gradients():
    x, w, b = rand(6, 64, 2).float(), rand(2 * 48, 128, scale=0.1).float(), rand(96).float()
    cases = dict(
        rows=(x.transpose(1, 2), w[::2, :64], b[::2]),  # last stride 2, weight rows 256 apart, bias with a stride
        sliced=(rand(6, 2, 128).float()[..., 32:96], w[:48, 64:], b[:48]),
        expanded=(rand(1, 1, 64).float().expand(6, 2, 64), w[:48, :64].t().contiguous().t(), None),
    )
    upstream = rand(1, 2, 48).float().expand(6, 2, 48)
    for name, tensors in cases.items():
        with all_triton():
            actual = [t if t is None else t.detach().requires_grad_() for t in tensors]
            out = ops.linear_gelu(*actual)
            out.backward(upstream)
            residual = ops.linear_residual(*actual, tensors[0][..., :48], drop_path=torch.ones(12)[::2])
        plain = [t if t is None else t.detach().requires_grad_() for t in tensors]
        expected = ref.linear_gelu(*plain)
        expected.backward(upstream)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0, msg=name)
        torch.testing.assert_close(
            residual, ref.linear_residual(*plain, tensors[0][..., :48]), atol=1e-5, rtol=0, msg=name
        )
        for a, e in zip(actual, plain):
            if e is not None:
                torch.testing.assert_close(a.grad, e.grad, atol=1e-4, rtol=0, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens, width", [(197, 768), (50, 1024), (257, 1280)])
def test_real_shapes_on_gpu(dtype, tokens, width):
    torch.manual_seed(1)
    x, drop = torch.randn(8, tokens, width), torch.tensor([0.0, 1.25] * 4)
    parameters = [
        torch.randn(4 * width, width) * width**-0.5,
        torch.randn(4 * width),
        torch.randn(width, 4 * width) * 0.5 * width**-0.5,
        torch.randn(width),
    ]
    upstream = torch.randn(8, tokens, width)

    def results(kind, mode):
        leaves = [t.to("cuda", dtype).to(kind).requires_grad_() for t in (x, *parameters)]
        with ops.use_kernels(mode):
            h = ops.linear_gelu(*leaves[:3])
            out = ops.linear_residual(h, *leaves[3:], leaves[0], drop_path=drop.cuda()) + ops.mlp(*leaves)
        out.backward(upstream.to("cuda", kind))
        return [out.detach(), *(t.grad for t in leaves)]

    truth, own = results(torch.float64, "off"), results(dtype, "off")
    for context in (contextlib.nullcontext, all_triton):
        with context():
            actual = results(dtype, "on")
        for value, reference, expected in zip(actual, own, truth):
            error, baseline = ((v.double() - expected).abs().max().item() for v in (value, reference))
            assert error <= 2 * baseline + 1e-5 * expected.abs().max().item()
