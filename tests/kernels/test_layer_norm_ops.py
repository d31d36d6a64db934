"""LayerNorm as operations: frozen arguments, opcheck, compile, autocast, and what they refuse."""

import pytest
import torch
from layer_norm_cases import DEVICE, HALVES, NAMES, check, compare, inputs, rand, run, upstream_of

from vitfast import ops, ref
from vitfast.kernels.launch import recording

pytestmark = pytest.mark.usefixtures("kernels_on_nan", "few_sums")


FROZEN = [
    ("weight", "bias"),
    ("bias",),
    ("weight",),
    ("x",),
    ("residual",),
    ("layer_scale",),
    ("x", "residual"),
    ("x", "residual", "layer_scale"),
    NAMES,
]


@pytest.mark.parametrize("factors", [True, False], ids=["factors", "plain"])
@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_frozen_arguments_match_ref(frozen, factors):
    shape = (2, 4, 48)
    check(
        inputs(shape, torch.float32, layer_scale=factors, drop_path=factors),
        upstream_of(shape, torch.float32),
        torch.float32,
        frozen,
    )
    if not factors:
        check(inputs(shape, torch.float32, residual=False), upstream_of(shape, torch.float32), torch.float32, frozen)


def written(frozen, residual):
    """How many kernels backward launches, and what the first is asked to write."""
    given = inputs((2, 4, 48), torch.float32, residual=residual, layer_scale=residual)
    leaves = {name: None if t is None else t.requires_grad_(name not in frozen) for name, t in given.items()}
    if residual:
        y, _ = ops.add_layer_norm(*(leaves[n] for n in NAMES[:4]), layer_scale=leaves["layer_scale"])
    else:
        y = ops.layer_norm(leaves["x"], leaves["weight"], leaves["bias"])
    with recording() as launches:
        y.backward(torch.ones_like(y))
    names = dict(out_ptrs=("dres", "dx", "y"), ws_ptrs=("dweight", "dbias", "dlayer_scale", "dz_sum"))
    return len(launches), {
        n
        for tuple_, of in names.items()
        for n, t in zip(of, launches[0].arguments[tuple_], strict=True)
        if t is not None
    }


def test_frozen_arguments_cost_nothing():
    assert written((), False) == (2, {"dres", "dweight", "dbias"})
    assert written(("weight", "bias"), False) == (1, {"dres"})
    assert written(("bias",), False) == (2, {"dres", "dweight"})
    assert written(("x",), False) == (2, {"dweight", "dbias"})
    assert written((), True) == (2, {"dres", "dx", "dweight", "dbias", "dlayer_scale"})
    assert written(("weight", "bias", "layer_scale"), True) == (1, {"dres", "dx"})
    assert written(("x", "residual", "weight", "bias"), True) == (2, {"dlayer_scale"})


def test_layer_scale_alone_keeps_the_branch():
    given = {
        name: None if t is None else t.requires_grad_()
        for name, t in inputs((2, 4, 48), torch.float32, layer_scale=True).items()
    }
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.add_layer_norm(*(given[n] for n in NAMES[:4]), layer_scale=given["layer_scale"].detach())
        assert not any(t is given["x"] or (t.shape == given["x"].shape and torch.equal(t, given["x"])) for t in kept)
        ops.add_layer_norm(*(given[n] for n in NAMES[:4]), layer_scale=given["layer_scale"])
        assert any(t.shape == given["x"].shape and torch.equal(t, given["x"]) for t in kept)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(used):
    given = inputs((2, 5, 48), torch.float32, layer_scale=True, drop_path=True)
    g = rand(2, 5, 48)

    def grads(module, double=False):
        leaves = {n: (t.double() if double else t).detach().requires_grad_(n in NAMES) for n, t in given.items()}
        out = module.add_layer_norm(
            *(leaves[n] for n in NAMES[:4]), layer_scale=leaves["layer_scale"], drop_path=leaves["drop_path"]
        )
        out[used].backward(g.to(out[used].dtype))
        return {n: leaves[n].grad for n in NAMES}

    actual, pytorch, truth = grads(ops), grads(ref), grads(ref, True)
    for name, value in list(pytorch.items()):  # what nobody used has no gradient, or zeros
        if value is None:
            assert actual[name] is None or not actual[name].any()
            for grads_ in (actual, pytorch, truth):
                grads_.pop(name)
    compare(actual, pytorch, truth, torch.float32)


def test_opcheck():
    x, r, w, b, ls = (t.requires_grad_() for t in (rand(2, 3, 24), rand(2, 3, 24), rand(24), rand(24), rand(24)))
    dp, mean, rstd = torch.tensor([0.0, 2.0], device=DEVICE), rand(6), rand(6).abs()
    check_op = torch.library.opcheck
    check_op(torch.ops.vitfast.layer_norm, (x, w, b, 1e-6))
    check_op(torch.ops.vitfast.layer_norm, (x, None, None, 1e-6))
    check_op(torch.ops.vitfast.add_layer_norm, (x, r, w, b, 1e-6, ls, dp))
    check_op(torch.ops.vitfast.add_layer_norm, (x, r, w, None, 1e-6, None, None))
    d = [t.detach() for t in (x, r, w, b, ls)]
    check_op(torch.ops.vitfast.layer_norm_backward, (d[0], d[1], d[2], d[3], mean, rstd, [True, True, True]))
    check_op(torch.ops.vitfast.layer_norm_backward, (d[0], d[1], d[2], d[3], mean, rstd, [True, False, False]))
    check_op(
        torch.ops.vitfast.add_layer_norm_backward,
        (d[0], d[1], d[0], mean, rstd, d[1], d[2], d[3], d[4], dp, [True] * 5),
    )
    check_op(
        torch.ops.vitfast.add_layer_norm_backward,
        (d[0], None, d[0], mean, rstd, None, d[2], d[3], None, None, [False, True, True, False, False]),
    )


def test_compile_equals_eager():
    given, upstream = (
        inputs((2, 5, 48), torch.float32, layer_scale=True, drop_path=True),
        upstream_of((2, 5, 48), torch.float32),
    )

    class Compiled:
        layer_norm = staticmethod(torch.compile(ops.layer_norm, fullgraph=True))
        add_layer_norm = staticmethod(torch.compile(ops.add_layer_norm, fullgraph=True))

    for case in (
        given,
        dict(given, residual=None, layer_scale=None, drop_path=None),
        dict(given, layer_scale=None, drop_path=None),
    ):
        eager, compiled = run(ops, case, upstream), run(Compiled, case, upstream)
        assert eager.keys() == compiled.keys() and all(torch.equal(eager[name], compiled[name]) for name in eager)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_returns_gradients_in_the_parameters_dtype(dtype):
    x, w, b = rand(2, 3, 32).requires_grad_(), rand(32).requires_grad_(), rand(32).requires_grad_()
    with torch.autocast(DEVICE, dtype):
        y = ops.layer_norm(x, w, b)
    y.backward(rand(2, 3, 32, dtype=dtype))
    assert y.dtype == dtype
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32


def test_twice_differentiated_says_so():
    x, w = rand(3, 24).requires_grad_(), rand(24).requires_grad_()
    for op, out in (
        ("layer_norm", ops.layer_norm(x, w, None)),
        ("add_layer_norm", ops.add_layer_norm(x, x, w, None)[0]),
    ):
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        with pytest.raises(RuntimeError, match=f"{op}: cannot be differentiated twice"):
            g.sum().backward()


def test_what_no_kernel_covers_says_so():
    with pytest.raises(RuntimeError, match="layer_norm: kernels are switched on, but width above 8192"):
        ops.layer_norm(rand(1, 8200), None, None)
    with pytest.raises(RuntimeError, match="add_layer_norm: kernels are switched on, but drop_path needs a gradient"):
        ops.add_layer_norm(
            rand(1, 8), rand(1, 8), None, None, drop_path=torch.ones(1, device=DEVICE, requires_grad=True)
        )
    with pytest.raises(RuntimeError, match="no kernel computes in torch.float64"):
        ops.layer_norm(rand(1, 8).double(), None, None)
