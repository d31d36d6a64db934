"""Every operation on interpreted kernels against float64, and what torch asks of an operation.

The shapes are small: how kernels fare at the edges of their tiles is seen by tests/tools/verify/test_edges.py.
"""

import functools

import operations
import pytest
import torch
from checks import Calls
from layouts import LaidOut
from operations import ACTING, OPERATIONS, results

from vitfast import ops
from vitfast.kernels import launch, tiles
from vitfast.kernels.launch import record, recording
from vitfast.tools.verify import EPS, worst

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels; test_gpu.py runs the real ones")

CPU = torch.device("cpu")
# Before any test runs: the documentation's example registers one of its own.
REGISTERED = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("vitfast::")}
FP16 = pytest.param(torch.float16, marks=pytest.mark.long)
HALVES = [torch.float16, torch.bfloat16]
BLOCKS = ["attention_block", "mlp_block", "gated_mlp_block"]
EVERY = pytest.mark.parametrize("name", OPERATIONS)
# Where each takes seconds, `make test` leaves out the variants ("attention, packed"), and the longest.
QUICK = [pytest.param(n, marks=[pytest.mark.slow] * ("," in n or n == "attention_block")) for n in OPERATIONS]
QUICK = pytest.mark.parametrize("name", QUICK)
FUSED = pytest.mark.parametrize("name", BLOCKS)


def draw(name, dtype=torch.float32, layout="contiguous", seed=0):
    return OPERATIONS[name].draw(LaidOut(dtype, CPU, torch.Generator().manual_seed(seed), layout))


def double(tensors):
    return {name: t if t is None else t.double() for name, t in tensors.items()}


def by(mode, name, **options):
    """The operation in a mode of use_kernels."""

    def run(**tensors):
        with ops.use_kernels(mode):
            return OPERATIONS[name].function(**tensors, **options)

    return run


on, off = functools.partial(by, "on"), functools.partial(by, "off")  # by its kernels; in plain PyTorch


def judged(name, tensors, dtype, **options):
    """Outputs and all gradients by kernels, judged by PyTorch's own error."""
    trained = [key for key in OPERATIONS[name].trained if tensors[key] is not None]
    plain, truth = (results(off(name, **options), given, trained) for given in (tensors, double(tensors)))
    found = results(on(name, **options), tensors, trained)
    for i, (mine, theirs, exact) in enumerate(zip(found, plain, truth, strict=True)):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and mine.is_contiguous()
        error, own = worst([mine], [exact]), worst([theirs], [exact])
        assert error <= 2 * own + EPS[dtype], f"result {i}: error {error:.1e}, PyTorch's own {own:.1e}"
    return found


def close(ours, theirs, tolerance=1e-5):
    for mine, truth in zip(ours, theirs, strict=True):
        size = truth.abs().max().item() if truth.numel() else 0
        torch.testing.assert_close(mine.double(), truth.double(), atol=tolerance * max(1, size), rtol=0)


@EVERY
def test_plain_pytorch_is_the_formula(name):
    """In float64, with every gradient; and without each argument that may be None."""
    operation, tensors = OPERATIONS[name], double(draw(name))
    for left_out in (None, *operation.optional):
        given = tensors | ({left_out: None} if left_out else {})
        trained = [key for key, t in given.items() if t is not None]
        close(results(off(name), given, trained), results(operation.formula, given, trained), 1e-10)


@pytest.mark.quick(1)
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, FP16, torch.bfloat16], ids=str)
def test_kernels_match_float64(name, dtype):
    """Outputs and every gradient; on strided tensors; the same bits twice, and where PyTorch is deterministic."""
    tensors = draw(name, dtype)
    found = judged(name, tensors, dtype)
    if dtype != torch.float32:
        return
    torch.use_deterministic_algorithms(True)
    try:
        again = results(on(name), tensors, OPERATIONS[name].trained)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    strided = {key: torch.stack([t, t], -1)[..., 0] for key, t in tensors.items()}
    close(results(on(name), strided, OPERATIONS[name].trained), found)


@pytest.mark.quick(1)
@QUICK
def test_each_argument_alone(name):
    """Left out, or the only one that is trained: the gradients of float64, and fewer launches for fewer of them."""
    operation, tensors = OPERATIONS[name], draw(name)
    everything = operation.trained
    most, counts = len(record(lambda: results(on(name), tensors, everything))), []
    for key in everything:
        close(results(on(name), tensors, [key]), results(off(name), double(tensors), [key]), 1e-4)
        counts.append(len(record(lambda: results(on(name), tensors, [key]))))  # noqa: B023
    assert max(counts) <= most and (min(counts) < most or len(everything) == 1)
    for key in operation.optional:
        given, trained = tensors | {key: None}, [other for other in everything if other != key]
        close(results(on(name), given, trained), results(off(name), double(given), trained), 1e-4)


# What the kernels' names say of a backward in which only these are trained; products are cuBLAS's.
ALONE = {
    ("layer_norm", "x"): "layer_norm_bwd",
    ("linear_gelu", "x"): "gelu_bwd",
    ("linear_gelu", "weight"): "gelu_bwd",
    ("linear_gelu", "bias"): "gelu_bwd column_sums",
    ("linear_residual", "residual"): "",
    ("linear_residual", "bias"): "scale_rows column_sums",
    ("mlp", "x"): "dgelu_matmul",
    ("mlp", "fc2_weight"): "gelu_bwd",
    ("mlp", "fc2_bias"): "scale_rows column_sums",
    ("mlp", "fc1_bias"): "dgelu_matmul column_sums",
    ("gated_mlp", "x"): "layer_norm_bwd gated_bwd",
    ("gated_mlp", "down_weight"): "layer_norm_fwd",
    ("attention_block", "proj_weight"): "scale_rows scaled_weight_grad",
    ("mlp_block", "fc2_weight"): "scale_rows gelu_bwd scaled_weight_grad",
    ("gated_mlp_block", "down_weight"): "scale_rows layer_norm_fwd scaled_weight_grad",
    ("patch_embed", "images"): "patch_embed_dimages",
    ("patch_embed", "weight"): "patch_embed_dweight patch_embed_dweight_sum",
    ("patch_embed", "pos_embed"): "patch_embed_batch_sum",
}


@pytest.mark.parametrize("name, key", ALONE)
def test_frozen_arguments_cost_nothing(name, key):
    """A backward launches what the trained argument needs, and what it saved is no larger than that needs."""
    leaves = {other: t.requires_grad_(other == key) for other, t in draw(name).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = on(name)(**leaves)
    out = out[0] if isinstance(out, tuple) else out
    launches = record(lambda: out.backward(torch.ones_like(out)))
    assert " ".join(entry.kernel.__name__.removesuffix("_kernel") for entry in launches) == ALONE[name, key]
    assert all((t.grad is not None) == (other == key) for other, t in leaves.items())


# What torch asks of an operation


@pytest.mark.quick(1)
@QUICK
def test_opcheck(name):
    """Every custom operation that an operation calls, with all tensors trained, with some, and with none."""
    tensors, trained = draw(name), OPERATIONS[name].trained
    kept = [dict(keep="all")] if name in BLOCKS else []
    with Calls() as calls:
        for options in ({}, *kept):
            results(on(name, **options), tensors, trained)
        results(on(name), tensors, [key for key in trained if "weight" in key][-1:] or trained[:1])
        with torch.no_grad():
            on(name)(**tensors)
    found = [call for call in calls.found if call[0].namespace == "vitfast"]
    for func, args, *_ in found:
        names = [argument.name for argument in func._schema.arguments]
        utilities = ["test_schema", "test_faketensor"]  # the compiled code's bits are seen below
        if not func.name().endswith(("_bwd", "_backward")):  # those refuse to be differentiated
            trained = lambda key, t: key != "drop_path" and torch.is_tensor(t) and t.is_floating_point()  # noqa: E731
            args = [t.detach().requires_grad_() if trained(key, t) else t for key, t in zip(names, args)]
            utilities.append("test_autograd_registration")
        torch.library.opcheck(func, tuple(args), test_utils=utilities)
    assert found


def test_no_custom_operation_is_left_out():
    """Every one that is registered is called, and so checked by the test above."""
    called = set()
    for name, operation in OPERATIONS.items():
        with Calls() as calls, recording():
            results(on(name), draw(name), operation.trained)
        called.update(func.name() for func, *_ in calls.found if func.namespace == "vitfast")
    assert REGISTERED == called


@pytest.mark.slow
@EVERY
def test_compiled_code_has_the_same_bits(name):
    """With all of its graph in one piece, of any sizes."""
    tensors, trained = draw(name), OPERATIONS[name].trained
    torch._dynamo.reset()
    compiled = torch.compile(OPERATIONS[name].function, fullgraph=True, dynamic=True, backend="aot_eager")
    with ops.use_kernels("on"):
        found = results(compiled, tensors, trained)
    assert all(torch.equal(a, b) for a, b in zip(found, results(on(name), tensors, trained), strict=True))


@pytest.mark.slow
def test_exported_code_is_plain_pytorch():
    """Also where kernels are switched on."""
    for name, operation in OPERATIONS.items():
        tensors = draw(name)

        class Called(torch.nn.Module):
            def forward(self, *tensors):
                return operation.function(**dict(zip(operation.shapes, tensors)))  # noqa: B023

        with ops.use_kernels("on"):
            exported = torch.export.export(Called(), tuple(tensors.values()))
        called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert called and not any("vitfast" in each for each in called), name
        found = exported.module()(*tensors.values())
        close(found if isinstance(found, tuple) else [found], results(off(name), tensors), 1e-6)


# A norm's parameters, factors, tables and what is added to logits stay as they are.
KEPT = ("norm_weight", "norm_bias", "inner_norm_weight", "inner_norm_bias", "layer_scale", "drop_path", "cos", "sin")
KEPT_OF = {"layer_norm": ("weight", "bias"), "rms_norm": ("weight",), "add_layer_norm": ("weight", "bias")}
KEPT_OF |= dict.fromkeys(("attention, apart", "attention_block"), ("bias",))
KEPT_OF |= dict.fromkeys(("patch_embed", "patch_embed, packed"), ("images", "bias", "cls_token", "pos_embed"))


@pytest.mark.quick(2)
@EVERY
@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
def test_autocast_casts_what_products_read(name, mode, dtype):
    """The bits of an operation whose other arguments were cast by hand; gradients in the arguments' own dtypes."""
    run, kept = by(mode, name), KEPT + KEPT_OF.get(name, ())
    tensors = draw(name)
    cast = {key: t if key in kept else t.to(dtype) for key, t in tensors.items()}

    def under_autocast(**tensors):
        with torch.autocast("cpu", dtype):
            return run(**tensors)

    found = results(under_autocast, tensors, OPERATIONS[name].trained)
    by_hand = results(run, cast, OPERATIONS[name].trained)
    for mine, theirs in zip(found, by_hand, strict=True):
        assert torch.equal(mine.to(theirs.dtype), theirs)
    count = len(found) - len(OPERATIONS[name].trained)
    assert all(o.dtype == dtype for o in found[:count]) and all(g.dtype == torch.float32 for g in found[count:])


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name.split(",")[0] != "attention"])
def test_outputs_may_be_changed_in_place(name):
    """As those of torch's modules may, but for attention's: none is a view, whose change autograd would refuse."""

    def first(**tensors):
        out = on(name)(**tensors)
        return out[0] if isinstance(out, tuple) else out

    tensors, trained = draw(name), OPERATIONS[name].trained[:1]
    assert not first(**tensors)._is_view()
    changed = results(lambda **t: first(**t).mul_(2), tensors, trained)
    apart = results(lambda **t: first(**t) * 2, tensors, trained)
    assert all(torch.equal(a, b) for a, b in zip(changed, apart, strict=True))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "packed" not in name])
def test_a_batch_of_none(name):
    tensors = draw(name)
    batched = {"x", "residual", "images", "qkv", "q", "k", "v", "drop_path"}
    tensors |= {key: tensors[key][:0] for key in batched & tensors.keys()}
    trained = [key for key in OPERATIONS[name].trained if key not in ACTING]  # tables and biases nobody reads
    found, wanted = (results(run(name), tensors, trained) for run in (on, off))
    assert [t.shape for t in found] == [t.shape for t in wanted] and not any(t.any() for t in found)


# The fused blocks


@pytest.mark.slow
@FUSED
def test_keeping_all_gives_the_same_bits(name):
    """And writes less: see test_passes.py."""
    for left_out in ("drop_path", None):
        tensors = draw(name, torch.float16) | ({left_out: None} if left_out else {})
        trained = [key for key in OPERATIONS[name].trained if tensors[key] is not None]
        least, everything = (results(on(name, keep=keep), tensors, trained) for keep in ("least", "all"))
        assert all(torch.equal(a, b) for a, b in zip(least, everything, strict=True))


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_slope_may_be_kept_in_place_of_the_pre_activation(dtype, activation):
    """By a choice of the tables: in eager mode and compiled, of all gradients and of some."""
    run, tensors = on("mlp_block", keep="all", activation=activation), draw("mlp_block", dtype)
    plain, trained = run(**tensors), ["x", "fc2_weight"]
    with tiles.using("mlp_kept", tiles.config(provider="slope")):
        found = judged("mlp_block", tensors, dtype, keep="all", activation=activation)
        some = results(run, tensors, trained)
        with Calls() as calls:
            results(run, tensors, trained)
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert all(torch.equal(a, b) for a, b in zip(some, results(compiled, tensors, trained), strict=True))
    assert torch.equal(found[0], plain)
    kept = {args[-1] for func, args, *_ in calls.found if func.name() == "vitfast::mlp_block"}
    assert kept == {"slope"}


@pytest.mark.quick(1)
@FUSED
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_fp32_stream_over_16_bit_parameters(name, dtype):
    tensors = draw(name, dtype)
    tensors |= {key: tensors[key].float() for key in ("x", "norm_weight", "norm_bias")}
    tensors |= dict(x=tensors["x"] * 30, layer_scale=None, drop_path=None)
    found = judged(name, tensors, dtype, residual_in_fp32=True)
    exact = results(off(name), double(tensors))
    assert found[0].dtype == found[1].dtype == torch.float32
    # 16 bit would round a stream of size 100 by 32 eps: what is seen is the branch's own rounding
    assert (found[0] - exact[0]).abs().max() < 20 * torch.finfo(dtype).eps


@pytest.mark.quick(1)
@FUSED
def test_blocks_have_rms_norm(name, monkeypatch):
    """As the formula with RMSNorm in the place of LayerNorm; gated MLPs without their inner norm."""
    monkeypatch.setattr(operations, "norm", lambda x, weight, bias=None: operations.rms(x, weight))
    without = dict.fromkeys({"norm_bias", "inner_norm_weight", "inner_norm_bias"} & set(OPERATIONS[name].shapes))
    tensors = draw(name) | without
    trained = [key for key, t in tensors.items() if t is not None and key != "drop_path"]
    truth = results(OPERATIONS[name].formula, double(tensors), trained)
    for run in (on, off):
        close(results(run(name, norm="rms"), tensors, trained), truth, 1e-4)
