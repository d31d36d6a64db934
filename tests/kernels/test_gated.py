"""Gated MLPs, interpreted, against float64: forward and every gradient, alone and in a block; what they launch."""

import pytest
import torch
from mlp_cases import DTYPES, HALVES, all_triton, compare, rand

from vitfast import ops
from vitfast.kernels import gated, tiles
from vitfast.kernels.launch import record
from vitfast.verify import Judge, outputs
from vitfast.verify.draw import Sizes
from vitfast.verify.launchers import launchers

pytestmark = pytest.mark.usefixtures("poisoned")

LAYERS = ("up_weight", "up_bias", "gate_weight", "gate_bias", "down_weight", "down_bias")


def values(lead, d, f, out, bias=True, inner=False) -> dict:
    layers = (
        rand(f, d, scale=d**-0.5),
        rand(f),
        rand(f, d, scale=d**-0.5),
        rand(f),
        rand(out, f, scale=f**-0.5),
        rand(out),
    )
    kept = (t if bias or t.dim() == 2 else None for t in layers)
    norm = dict(inner_norm_weight=rand(f) + 1, inner_norm_bias=rand(f) if bias else None) if inner else {}
    return dict(x=rand(*lead, d)) | dict(zip(LAYERS, kept)) | norm


def block_values(lead, d, f, **options) -> dict:
    found = values(lead, d, f, d, **options)
    return dict(x=found.pop("x"), norm_weight=rand(d) + 1, norm_bias=rand(d)) | found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [False, True], ids=["", "inner norm"])
@pytest.mark.parametrize("lead, d, f", [((0,), 64, 64), ((1, 5), 72, 200), ((70,), 64, 136)], ids=str)
def test_gated_mlp_matches_ref(dtype, inner, lead, d, f):
    activation = "gelu" if inner else "silu"
    compare(
        ops.gated_mlp, values(lead, d, f, 40, bias=f != 136, inner=inner), dtype, rand(*lead, 40), activation=activation
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_every_activation(activation):
    compare(ops.gated_mlp, values((9,), 40, 72, 24), torch.float16, rand(9, 24), activation=activation)


CASES = {
    "plain": {},
    "RMSNorm, inner norm": dict(inner=True),
    "factors": dict(factors=True),
    "factors, inner norm, no biases": dict(factors=True, inner=True, bias=False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gated_mlp_block_matches_ref(case, dtype):
    options = dict(CASES[case])
    factors, norm = options.pop("factors", False), "rms" if "RMS" in case else "layer"
    given = block_values((3, 7), 40, 72, **options)
    if norm == "rms":
        given["norm_bias"] = None
    if factors:
        given |= dict(layer_scale=rand(40), drop_path=torch.tensor([0.0, 1.25, 2.0], dtype=torch.float64))
    for keep in ("least", "all"):
        torch.manual_seed(1)
        upstream = rand(3, 7, 40)
        operation = kept_by(keep)
        compare(operation, given, dtype, upstream, frozen=("drop_path",), norm=norm)


def kept_by(keep):
    """gated_mlp_block with this keep, which its twin does not know."""

    def gated_mlp_block(*tensors, **options):
        return ops.gated_mlp_block(*tensors, keep=keep, **options)

    return gated_mlp_block


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_fp32_stream_over_16_bit_parameters(dtype):
    given = {k: v.float() if k in ("x", "norm_weight", "norm_bias") else v.to(dtype) for k, v in
             block_values((2, 5), 40, 72, inner=True).items()}  # fmt: skip
    given["x"], upstream = given["x"] * 30, torch.randn(2, 5, 40)
    results = []
    for mode, work, options in (("off", torch.float64, {}), ("off", None, {}), ("on", None, {})):
        leaves = {k: v.detach().to(work or v.dtype).requires_grad_() for k, v in given.items()}
        stream = {} if work else dict(residual_in_fp32=True)
        with ops.use_kernels(mode):
            out = ops.gated_mlp_block(**leaves, **stream, **options)
        out.backward(upstream.to(out.dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves.values())])
    for truth, peer, mine in zip(*results, strict=True):
        assert mine.dtype == peer.dtype
        limit = 2 * (peer - truth).abs().max() + (4e-3 if dtype == torch.float16 else 1.6e-2) * truth.abs().max()
        assert (mine - truth).abs().max() <= limit


@pytest.mark.parametrize("packed", [True, False])
def test_weights_are_read_where_they_lie(packed):
    """Halves of one weight, and of one bias, give the same bits as two, and no copy is made of either."""
    d, f = 40, 72
    given = {k: v.float() for k, v in values((9,), d, f, 24).items()}
    up_gate, bias = (
        torch.cat([given["up_weight"], given["gate_weight"]]),
        torch.cat([given["up_bias"], given["gate_bias"]]),
    )
    halves = dict(zip(("up_weight", "gate_weight"), up_gate.chunk(2))) | dict(
        zip(("up_bias", "gate_bias"), bias.chunk(2))
    )
    with all_triton():
        launch = record(lambda: ops.gated_mlp(**given | halves))[0]
        for name in ("up_weight", "gate_weight", "up_bias", "gate_bias"):
            assert launch.arguments[f"{name}_ptr"].data_ptr() == halves[name].data_ptr()
        assert torch.equal(ops.gated_mlp(**given | halves), ops.gated_mlp(**given))
        leaf = up_gate.clone().requires_grad_()
        up, gate = leaf.chunk(2)
        ops.gated_mlp(**given | dict(up_weight=up, gate_weight=gate)).sum().backward()
        apart = [given[name].clone().requires_grad_() for name in ("up_weight", "gate_weight")]
        ops.gated_mlp(**given | dict(up_weight=apart[0], gate_weight=apart[1])).sum().backward()
    assert torch.equal(leaf.grad, torch.cat([t.grad for t in apart]))


def test_dx_is_two_products_and_no_sum():
    """The second adds to the first: by cuBLAS in place, by our kernel as its residual."""
    given = {k: v.float().requires_grad_(k == "x") for k, v in values((9,), 40, 72, 24).items()}
    with all_triton():
        out = ops.gated_mlp(**given)
        launches = record(lambda: out.backward(torch.ones(9, 24)))
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["dgated_matmul_kernel", "linear_kernel", "linear_kernel"]
    assert launches[1].arguments["res_ptr"] is None
    assert launches[2].arguments["res_ptr"] is launches[1].arguments["out_ptr"]
    assert launches[0].arguments["out_ptrs"][2] is None and launches[0].arguments["sum_ptrs"] == (None, None)


@pytest.mark.parametrize("inner", [False, True], ids=["", "inner norm"])
def test_frozen_parameters_cost_nothing(inner):
    """Any choice of trainable tensors has the gradients of all of them, and no fewer launches are made for more."""
    given = {k: v.float() for k, v in block_values((2, 3), 24, 40, inner=inner).items()} | dict(
        layer_scale=torch.rand(24)
    )
    upstream, found, counts = torch.randn(2, 3, 24), {}, {}
    names = list(given)
    choices = [
        names,
        ["x"],
        ["layer_scale"],
        ["up_weight"],
        ["gate_bias"],
        ["down_weight", "down_bias"],
        ["norm_weight"],
    ]
    choices += [["inner_norm_bias"], ["inner_norm_weight", "gate_weight"]] if inner else []
    for chosen in choices:
        for counting in (False, True):
            leaves = {k: v.clone().requires_grad_(k in chosen) for k, v in given.items()}
            with ops.use_kernels("on"):
                run = lambda leaves=leaves: ops.gated_mlp_block(**leaves).backward(upstream)  # noqa: E731
                if counting:
                    counts[tuple(chosen)] = [launch.kernel.__name__ for launch in record(run)]
                else:
                    run()
                    found[tuple(chosen)] = {k: v.grad for k, v in leaves.items()}
    everything = found[tuple(names)]
    assert all(gradient is not None for gradient in everything.values())
    for chosen, gradients in found.items():
        for name, gradient in gradients.items():
            assert (gradient is None) == (name not in chosen), (chosen, name)
            if gradient is not None:
                torch.testing.assert_close(gradient, everything[name], atol=1e-5, rtol=1e-5)
        assert len(counts[chosen]) < len(counts[tuple(names)]) or chosen == tuple(names)
    for kernel in counts[("down_weight", "down_bias")]:
        assert "gated_bwd" not in kernel and "dgated" not in kernel and "layer_norm_bwd" not in kernel


def test_opcheck_compile_and_a_second_derivative():
    block = {k: v.float().requires_grad_() for k, v in block_values((2, 3), 24, 40, inner=True).items()}
    plain = {k: v.float().requires_grad_() for k, v in values((2, 3), 24, 40, 16).items()}
    order = "x up_weight up_bias gate_weight gate_bias inner_norm_weight inner_norm_bias down_weight down_bias".split()
    for save, inner in ((True, False), (True, True), (False, True)):
        tensors = [(block if inner and "inner" in name else plain).get(name) for name in order]
        tensors = [t if save or t is None else t.detach() for t in tensors]
        torch.library.opcheck(torch.ops.vitfast.gated_mlp, (*tensors, "silu", 1e-6, save))
        kept = torch.ops.vitfast.gated_mlp(*(t if t is None else t.detach() for t in tensors), "silu", 1e-6, True)[1:]
        for needs in ([True] * 9, [False, True, False, False, True, False, True, False, True]):
            needs = [need and t is not None for need, t in zip(needs, tensors)]
            given = (
                torch.randn(2, 3, 16),
                *(t if t is None else t.detach() for t in tensors),
                *kept,
                "silu",
                1e-6,
                needs,
            )
            torch.library.opcheck(torch.ops.vitfast.gated_mlp_bwd, given, test_utils=("test_schema", "test_faketensor"))
    names = ["x", "norm_weight", "norm_bias", *order[1:], "layer_scale"]
    tensors = [(block | dict(layer_scale=torch.rand(24))).get(name) for name in names]
    for norm, keep, drop in (("layer", "least", None), ("layer", "all", torch.rand(2)), ("rms", "all", None)):
        given = [None if name == "norm_bias" and norm == "rms" else t for name, t in zip(names, tensors)]
        options = (drop, "gelu", 1e-6, 1e-5, norm)
        torch.library.opcheck(torch.ops.vitfast.gated_mlp_block_fwd, (*given, *options, keep))
        given = [t if t is None else t.detach() for t in given]
        _, mean, rstd, *kept = torch.ops.vitfast.gated_mlp_block_fwd(*given, *options, "all")
        for more in (kept[5:], [None, None]):
            needs = [t is not None for t in given]
            arguments = (torch.randn(2, 3, 24), *given, drop, mean, rstd, *kept[:5], *more, *options[1:], needs)
            utilities = dict(test_utils=("test_schema", "test_faketensor"))
            torch.library.opcheck(torch.ops.vitfast.gated_mlp_block_bwd, arguments, **utilities)
    upstream = torch.randn(2, 3, 24)
    with ops.use_kernels("on"):
        compiled = torch.compile(ops.gated_mlp_block, fullgraph=True, backend="aot_eager")
        ours, eager = (
            torch.autograd.grad(f(**block), block.values(), upstream) for f in (compiled, ops.gated_mlp_block)
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
        for f, given in ((ops.gated_mlp, plain), (ops.gated_mlp_block, block)):
            (dx,) = torch.autograd.grad(f(**given).sum(), given["x"], create_graph=True)
            with pytest.raises(RuntimeError, match=f"^{f.__name__}: cannot be differentiated twice"):
                dx.sum().backward()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "name", ["gated linear", "gated linear, gelu, inference", "dgated", "dgated, gelu", "gated backward"]
)
def test_other_providers_and_descriptors(name, dtype):
    """cuBLAS and PyTorch in place of the kernels; blocks read by the copy engine; epilogues in other pieces."""
    launcher = launchers(Sizes(batch=2, tokens=35, width=40, heads=2, hidden=136, image=16, patch=8))[name]
    judge = Judge(launcher, dtype, torch.device("cpu"))
    op = {"gated linear": "gated_linear_fwd", "dgated": "dgated_matmul"}.get(name.partition(",")[0], "gated_bwd")
    blocks = dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, GROUP_M=2)
    chosen = [tiles.tile(provider="torch")] if op == "gated_bwd" else [tiles.tile(provider="cublas")]
    if op != "gated_bwd":
        chosen += [tiles.tile(4, 2, by, SUBTILES=n, **blocks) for by, n in (("tma", 2), ("triton", 1), ("triton", 4))]
    for tile in chosen:
        with tiles.override(op, tile):
            call = lambda: outputs(launcher.call(*judge.inputs))  # noqa: E731
            judge.judge(call())
            loads = [launch.arguments.get("LOADS") for launch in record(call)]
            assert tile.provider != "tma" or loads[0] == ("nt" if op == "gated_linear_fwd" else "nn")


def test_a_gate_that_descriptors_cannot_take_goes_by_pointers():
    x, up, odd = torch.randn(9, 40), torch.randn(72, 40), torch.randn(72, 41)[:, 1:]
    small = tiles.tile(4, 2, "tma", BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=2, SUBTILES=1)
    with tiles.override("gated_linear_fwd", small):
        for gate, loads in ((up, "nt"), (odd, "masked")):
            call = lambda gate=gate: gated.gated_linear(x, up, None, gate, None, "silu", False)  # noqa: E731
            assert record(call)[0].arguments["LOADS"] == loads
            exact = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
            torch.testing.assert_close(call()[0], exact, atol=1e-4, rtol=1e-4)
