"""Linear layers with epilogues, interpreted, against float64: forward and every gradient (real shapes: on a GPU)."""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vitfast import ops, ref
from vitfast.kernels import mlp as kernels
from vitfast.kernels import tiles
from vitfast.kernels.launch import record
from vitfast.kernels.weight_grad import weight_grad, weight_grad_scaled

# Added to twice PyTorch's own error. fp32: sums in another order. fp16: PyTorch keeps fp32 between product, GELU and residual in places where the
# kernels round what they store, and the other way round: one rounding (2^-11) of values up to about 4.
# bf16: one rounding (2^-8) of the largest value.
TOL = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-3}
DTYPES = list(TOL)
HALVES = DTYPES[1:]
CUBLAS = ("linear_fwd", "input_grad", "weight_grad")  # left to cuBLAS by default: here their kernels must run
PRODUCTS = (*CUBLAS, "linear_gelu_fwd", "linear_residual_fwd", "dgelu_matmul")


@contextlib.contextmanager
def all_triton():
    """Kernels on, in the place of cuBLAS too, with the tiles of 16-bit dtypes and fewer programs: the interpreter's time goes by program."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ops.use_kernels("on"))
        for op in PRODUCTS:
            half = torch.empty(0, dtype=torch.float16)
            choices = [tiles.lookup(op, half, "64x64"), *tiles.rivals(op, half, "64x64")]
            found = next(tile for tile in choices if tile.provider == "triton")
            blocks = dict(found.blocks) | (dict(SPLIT_K=2) if op == "weight_grad" else {})
            stack.enter_context(tiles.override(op, tiles.tile(found.num_warps, found.num_stages, **blocks)))
        stack.enter_context(tiles.override("weight_grad_sum", tiles.tile(BLOCK_N=32, BLOCK_K=128)))
        stack.enter_context(tiles.override("column_sums", tiles.tile(BLOCK_P=16, BLOCK_D=128)))
        yield


@pytest.fixture(autouse=True)
def poisoned():
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


def run(op, values: dict, dtype: torch.dtype, upstream: torch.Tensor, frozen=(), **kwargs) -> dict:
    """Output and gradients of `op` on leaves of one dtype."""
    leaves = {k: None if v is None else v.detach().to(dtype).requires_grad_(k not in frozen) for k, v in values.items()}
    factors = {k: leaves.pop(k) for k in ("layer_scale", "drop_path") if k in leaves}
    out = op(*leaves.values(), **factors, **kwargs)
    out.backward(upstream.to(dtype))
    return {"out": out.detach()} | {
        f"d{k}": v.grad for k, v in (leaves | factors).items() if v is not None and k not in frozen
    }


def compare(op, values: dict, dtype: torch.dtype, upstream: torch.Tensor, frozen=(), **kwargs) -> None:
    """Each result's largest error is at most twice that of PyTorch in the same dtype, plus TOL of the result's scale."""
    values = {k: None if v is None else v.to(dtype).double() for k, v in values.items()}
    upstream = upstream.to(dtype).double()
    plain = getattr(ref, op.__name__)
    truth, torch_own = (run(plain, values, d, upstream, frozen, **kwargs) for d in (torch.float64, dtype))
    with all_triton():
        actual = run(op, values, dtype, upstream, frozen, **kwargs)
    assert actual.keys() == truth.keys()
    for name, expected in truth.items():
        value = actual[name]
        assert value.dtype == dtype and value.shape == expected.shape and value.is_contiguous(), name
        if expected.numel():
            error, own = ((v.double() - expected).abs().max().item() for v in (value, torch_own[name]))
            scale = max(1.0, expected.abs().max().item())
            assert error <= 2 * own + TOL[dtype] * scale, f"{name}: error {error:.3g}, PyTorch's own {own:.3g}"


# (leading shape, K, N): M in 0, 1, 5, 197, 256 around the tiles' edges, K and N multiples of the blocks and not.
SHAPES = [((0,), 64, 64), ((1,), 64, 192), ((1, 5), 200, 64), ((197,), 192, 200), ((2, 128), 64, 192)]


def layer(lead, k, n, bias=True) -> dict:
    return dict(x=rand(*lead, k), weight=rand(n, k, scale=k**-0.5), bias=rand(n) if bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead, k, n", SHAPES)
def test_linear_gelu_matches_ref(dtype, lead, k, n):
    approximate = "tanh" if n == 192 else "none"
    compare(ops.linear_gelu, layer(lead, k, n, bias=k != 64), dtype, rand(*lead, n), approximate=approximate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", ["", "scale", "drop", "scale drop"])
@pytest.mark.parametrize("lead, k, n", [((2, 0), 64, 64), ((3, 5), 200, 64), ((2, 99), 64, 200)])
def test_linear_residual_matches_ref(dtype, factors, lead, k, n):
    values = layer(lead, k, n, bias=factors != "scale") | dict(residual=rand(*lead, n))
    if "scale" in factors:
        values["layer_scale"] = rand(n)
    if "drop" in factors:
        values["drop_path"] = torch.tensor([1.25, 0.0, 1.25], dtype=torch.float64)[: lead[0]]
    compare(ops.linear_residual, values, dtype, rand(*lead, n), frozen=("drop_path",))


def two_layers(lead, k, f, d, bias=True) -> dict:
    fc1, fc2 = layer(lead, k, f, bias), layer((1,), f, d, bias)
    return dict(x=fc1["x"], w1=fc1["weight"], b1=fc1["bias"], w2=fc2["weight"], b2=fc2["bias"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("lead, k, f", [((0,), 64, 64), ((1,), 64, 192), ((1, 5), 72, 200), ((197,), 64, 192)])
def test_mlp_matches_ref(dtype, approximate, lead, k, f):
    compare(ops.mlp, two_layers(lead, k, f, k, bias=f == 192), dtype, rand(*lead, k), approximate=approximate)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(m=st.integers(1, 70), k=st.integers(1, 90), f=st.integers(1, 90), tanh=st.booleans())
def test_random_shapes(dtype, m, k, f, tanh):
    compare(ops.mlp, two_layers((m,), k, f, k), dtype, rand(m, k), approximate="tanh" if tanh else "none")
    compare(ops.linear_residual, layer((m,), k, f) | dict(residual=rand(m, f), layer_scale=rand(f)), dtype, rand(m, f))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("subtiles", [1, 2, 4])
def test_epilogue_in_pieces_is_the_same(subtiles, dtype):
    x, w, b = (t.to(dtype) for t in layer((70,), 40, 150).values())
    small = tiles.tile(BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, GROUP_M=2, SUBTILES=subtiles)
    with tiles.override("linear_gelu_fwd", small), tiles.override("dgelu_matmul", small):
        act, pre = kernels.linear_gelu(x, w, b, "none", True)
        dpre, again, dbias = kernels.dgelu_matmul(x, w.t().contiguous(), pre, "none", True)
    expected = F.linear(x.double(), w.double(), b.double())
    slope = torch.func.vmap(torch.func.vmap(torch.func.grad(F.gelu)))(pre.double())
    truth = (x.double() @ w.double().t()) * slope
    assert torch.equal(again, act)
    for value, exact in ((pre, expected), (act, F.gelu(pre.double())), (dpre, truth)):
        assert (value.double() - exact).abs().max() <= rounded(dtype, exact)
    assert (dbias.double() - truth.sum(0)).abs().max() < 1e-4  # fp32 sums of 70 unrounded values


def rounded(dtype, exact):
    """The error of one rounding to a 16-bit dtype: half an ulp of the largest value, and fp32's own before it."""
    return (torch.finfo(dtype).eps / 2 + 1e-6) * exact.abs().max()


def products(x, w, b, res, tile):
    """Every product with this tile: results by name, and how their launches loaded."""
    with contextlib.ExitStack() as stack:
        for op in PRODUCTS:
            stack.enter_context(tiles.override(op, tile))

        def run():
            act, pre = kernels.linear_gelu(x, w, b, "none", True)
            return dict(
                linear=kernels.linear(x, w, b),
                linear_residual=kernels.linear_residual(x, w, b, res, None, None, 7),
                input_grad=kernels.input_grad(res, w),
                linear_gelu=act,
                dgelu_matmul=kernels.dgelu_matmul(x, w.t().contiguous(), pre, "none", False)[0],
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
    """Large arguments whose square fp32 holds do not make NaN: gelu is 0 or the identity there, its slope 0 or 1."""
    pre = torch.tensor([[-far, -100.0, -20.0, 20.0, 100.0, far]], dtype=dtype)
    for approximate in ("none", "tanh"):
        dpre, dbias = kernels.gelu_bwd(torch.ones_like(pre), pre, approximate, True)
        assert dpre.tolist() == [[0, 0, 0, 1, 1, 1]] and dbias.tolist() == [0, 0, 0, 1, 1, 1]
        act, kept = kernels.linear_gelu(torch.ones(1, 1, dtype=dtype), pre.t().contiguous(), None, approximate, True)
        assert torch.equal(kept, pre) and torch.equal(act, pre.clamp(min=0))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("provider", ["triton", "cublas"])
def test_fp32_residual_over_16_bit_product(provider, dtype):
    """residual_in_fp32: one rounding of each operand, none of the branch (one to 16 bit where cuBLAS computes it)."""
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
    g, x, w, b, scale = (
        rand(m, 72).to(dtype),
        rand(m, 200).to(dtype),
        rand(72, 200).to(dtype),
        rand(72).to(dtype),
        rand(72).float(),
    )
    product = g.double().t() @ x.double()
    for provider in ("triton", "tma", "cublas"):
        tile = tiles.tile(provider=provider, BLOCK_M=32, BLOCK_N=64, BLOCK_K=128, GROUP_N=2, SPLIT_K=splits, SUBTILES=2)
        with (
            tiles.override("weight_grad", tile),
            tiles.override("weight_grad_sum", tiles.tile(BLOCK_N=16, BLOCK_K=128)),
        ):
            plain, exact = weight_grad(g, x), weight_grad(g, x, out_dtype=torch.float32)
            scaled = weight_grad(g, x, layer_scale=scale)
            dweight, dscale = weight_grad_scaled(g, x, w, b, scale, g.float().sum(0))
            _, dscale_alone = weight_grad_scaled(g, x, w, None, scale, None)
        assert plain.dtype == scaled.dtype == dweight.dtype == dtype and exact.dtype == dscale.dtype == torch.float32
        assert (exact.double() - product).abs().max() < 1e-4
        for value, truth, fp32 in (
            (plain, product, 1e-4),
            *((v, scale.double()[:, None] * product, 4e-4) for v in (scaled, dweight)),
        ):
            assert (value.double() - truth).abs().max() <= (fp32 if dtype == torch.float32 else rounded(dtype, truth))
        along = (product * w.double()).sum(1)
        assert (dscale_alone.double() - along).abs().max() < 1e-3  # fp32 sums of 200 products of about 14
        assert (dscale.double() - along - b.double() * g.double().sum(0)).abs().max() < 1e-3


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


def kernel_names(launches) -> list[str]:
    return [launch.kernel.__name__ for launch in launches]


def test_pre_activation_is_written_only_for_backward():
    x, w, b = (t.float() for t in layer((5,), 64, 64).values())
    with all_triton():
        (launch,) = record(lambda: ops.linear_gelu(x, w, b))
        assert launch.arguments["pre_ptr"] is None
        with torch.no_grad():
            (launch,) = record(lambda: ops.linear_gelu(x, w.requires_grad_(), b))
        assert launch.arguments["pre_ptr"] is None
        (launch,) = record(lambda: ops.linear_gelu(x, w, b))
        assert launch.arguments["pre_ptr"].shape == (5, 64)


FROZEN_GELU = {
    ("weight", "bias"): ["gelu_bwd_kernel", "linear_kernel"],
    ("x", "bias"): ["gelu_bwd_kernel", "weight_grad_kernel", "weight_grad_sum_kernel"],
    ("x", "weight"): ["gelu_bwd_kernel", "column_sums_kernel"],
}
FROZEN_RESIDUAL = {
    ("x", "weight", "bias", "layer_scale"): [],
    ("weight", "bias", "layer_scale"): ["scale_rows_kernel", "linear_kernel"],
    ("x", "weight", "layer_scale"): ["scale_rows_kernel", "column_sums_kernel"],
    ("x", "bias", "layer_scale"): ["scale_rows_kernel", "weight_grad_kernel", "weight_grad_sum_kernel"],
    ("x", "weight", "bias"): [
        "scale_rows_kernel",
        "column_sums_kernel",
        "weight_grad_kernel",
        "weight_grad_sum_kernel",
    ],
}
FROZEN_MLP = {
    ("w1", "b1", "w2", "b2"): ["dgelu_matmul_kernel", "linear_kernel"],
    ("x", "w1", "b1", "b2"): ["weight_grad_kernel", "weight_grad_sum_kernel"],
    ("x", "w1", "b1", "w2"): ["scale_rows_kernel", "column_sums_kernel"],
    ("x", "w1", "w2", "b2"): ["dgelu_matmul_kernel", "column_sums_kernel"],
}


@pytest.mark.parametrize(
    "op, frozen, expected",
    [
        *((ops.linear_gelu, *case) for case in FROZEN_GELU.items()),
        *((ops.linear_residual, *case) for case in FROZEN_RESIDUAL.items()),
        *((ops.mlp, *case) for case in FROZEN_MLP.items()),
    ],
    ids=lambda v: v.__name__ if callable(v) else "-".join(v) or "none",
)
def test_frozen_parameters_launch_nothing(op, frozen, expected):
    values = two_layers((6,), 64, 64, 64) if op is ops.mlp else layer((6,), 64, 64)
    if op is ops.linear_residual:
        values |= dict(residual=rand(6, 64), layer_scale=rand(64), drop_path=rand(6))
    leaves = {k: v.float().requires_grad_(k not in frozen and k != "drop_path") for k, v in values.items()}
    factors = {k: leaves.pop(k) for k in ("layer_scale", "drop_path") if k in leaves}
    with all_triton():
        out = op(*leaves.values(), **factors)
        launches = record(lambda: out.backward(torch.randn_like(out)))
    assert kernel_names(launches) == expected
    assert all(v.grad is None for k, v in (leaves | factors).items() if k in frozen)
    for launch in launches:
        if "act_ptr" in launch.arguments:
            assert launch.arguments["act_ptr"] is None  # the activation is rewritten for a weight gradient only


def leaf(t):
    return t.float().requires_grad_()


def test_opcheck():
    x, w, b = (leaf(t) for t in layer((2, 3), 64, 32).values())
    w2, b2, r, scale, drop = leaf(rand(64, 32)), leaf(rand(64)), leaf(rand(2, 3, 32)), leaf(rand(32)), rand(2).float()
    dout, pre, ops_ = rand(2, 3, 32).float(), rand(6, 32).float(), torch.ops.vitfast
    with ops.use_kernels("on"):
        for save in (True, False):
            torch.library.opcheck(
                ops_.linear_gelu, (x, w, b, "none", save), test_utils=("test_schema", "test_faketensor")
            )
        torch.library.opcheck(ops_.linear_gelu, (x, w, b, "tanh", True))
        torch.library.opcheck(ops_.linear_residual, (x, w, b, r, scale, drop))
        torch.library.opcheck(ops_.linear_residual, (x, w, None, r, None, None))
        torch.library.opcheck(ops_.mlp, (x, w, b, w2, b2, "none", True))
        plain = [t.detach() for t in (x, w, b, w2, b2)]
        for mask in (True, False):
            torch.library.opcheck(ops_.linear_gelu_bwd, (dout, *plain[:3], pre, "none", [mask, True, not mask]))
            torch.library.opcheck(
                ops_.linear_residual_bwd, (dout, *plain[:3], scale.detach(), drop, [mask, True, not mask, mask])
            )
            torch.library.opcheck(
                ops_.mlp_bwd, (rand(2, 3, 64).float(), *plain, pre, "none", [mask, True, not mask, True, mask])
            )


def test_compiled_equals_eager():
    """Every parameter is used once: a sum of three gradients may be added up in another order."""
    values = [
        *layer((2, 5), 64, 48).values(),
        *list(two_layers((), 48, 96, 40).values())[1:],
        *list(layer((), 40, 64).values())[1:],
    ]
    factors, upstream = dict(layer_scale=rand(64).float(), drop_path=torch.tensor([0.0, 2.0])), rand(2, 5, 64).float()

    def net(x, w0, b0, w1, b1, w2, b2, w3, b3):
        return ops.linear_residual(ops.mlp(ops.linear_gelu(x, w0, b0), w1, b1, w2, b2), w3, b3, x, **factors)

    results = []
    with ops.use_kernels("on"):
        for function in (net, torch.compile(net, fullgraph=True)):
            leaves = [leaf(v) for v in values]
            out = function(*leaves)
            out.backward(upstream)
            results.append([out.detach(), *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_second_derivative_raises():
    x, w, b = (leaf(t) for t in layer((4,), 64, 64).values())
    calls = (lambda: ops.linear_gelu(x, w, b), lambda: ops.linear_residual(x, w, b, x), lambda: ops.mlp(x, w, b, w, b))
    for call, name in zip(calls, ("linear_gelu", "linear_residual", "mlp")):
        with ops.use_kernels("on"):
            (grad,) = torch.autograd.grad(call().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match=f"{name}: cannot be differentiated twice"):
                torch.autograd.grad(grad.sum(), x)


def test_drop_path_is_a_constant_to_the_kernel():
    x, w = leaf(rand(2, 64)), leaf(rand(64, 64))
    with (
        ops.use_kernels("on"),
        pytest.raises(RuntimeError, match="linear_residual: kernels are switched on, but drop_path"),
    ):
        ops.linear_residual(x, w, None, x, drop_path=leaf(torch.ones(2)))
    assert ops.linear_residual(x, w, None, x, drop_path=leaf(torch.ones(2))).requires_grad


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
