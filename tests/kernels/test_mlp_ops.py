"""Linear layers with epilogues as operations: frozen parameters, opcheck, compile, errors."""

import pytest
import torch
from mlp_cases import all_triton, layer, rand, two_layers

from vitfast import ops
from vitfast.kernels.launch import record

pytestmark = pytest.mark.usefixtures("poisoned")


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
                ops_.linear_gelu, (x, w, b, "gelu", save), test_utils=("test_schema", "test_faketensor")
            )
        torch.library.opcheck(ops_.linear_gelu, (x, w, b, "gelu_tanh", True))
        torch.library.opcheck(ops_.linear_residual, (x, w, b, r, scale, drop))
        torch.library.opcheck(ops_.linear_residual, (x, w, None, r, None, None))
        torch.library.opcheck(ops_.mlp, (x, w, b, w2, b2, "gelu", True))
        plain = [t.detach() for t in (x, w, b, w2, b2)]
        for mask in (True, False):
            torch.library.opcheck(ops_.linear_gelu_bwd, (dout, *plain[:3], pre, "gelu", [mask, True, not mask]))
            torch.library.opcheck(
                ops_.linear_residual_bwd, (dout, *plain[:3], scale.detach(), drop, [mask, True, not mask, mask])
            )
            torch.library.opcheck(
                ops_.mlp_bwd, (rand(2, 3, 64).float(), *plain, pre, "gelu", [mask, True, not mask, True, mask])
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
