"""Every operation under torch.func, forward-mode and second differentiation, against formulas in plain PyTorch."""

import re
from functools import partial

import operations
import pytest
import torch
from attention_cases import interpreted
from torch import func
from torch.autograd import forward_ad

from vitfast import ops
from vitfast.tools.verify.draw import Draw

OPERATIONS = {name: operation for name, operation in operations.OPERATIONS.items() if "packed" not in name}


def scalar(f):
    def loss(*tensors):
        out = f(*tensors)
        out = out if isinstance(out, torch.Tensor) else torch.cat(out, -1)
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sin().sum()

    return loss


def each(f, tensors):
    """Every tensor as an argument, with a sample axis in front: two samples, the second another."""
    return tuple(torch.stack([t, t.flip(-1)]) for t in tensors)


def dual(f, tensors):
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(t, t.cos()) for t in tensors))
        outs = [out] if isinstance(out, torch.Tensor) else out
        return [forward_ad.unpack_dual(o).tangent for o in outs]


def everything(tensors):
    return tuple(range(len(tensors)))


TRANSFORMS = {
    "grad": lambda f, t: func.grad(scalar(f), everything(t))(*t),
    "vmap": lambda f, t: func.vmap(f)(*each(f, t)),
    "vmap of grad": lambda f, t: func.vmap(func.grad(scalar(f), everything(t)))(*each(f, t)),
    "grad of vmap": lambda f, t: func.grad(lambda *t: func.vmap(scalar(f))(*t).sum(), everything(t))(*each(f, t)),
    "jvp": lambda f, t: func.jvp(f, t, tuple(tensor.cos() for tensor in t)),
    "jacrev": lambda f, t: func.jacrev(lambda x: scalar(f)(x, *t[1:]))(t[0]),
    "jacfwd": lambda f, t: func.jacfwd(lambda x: scalar(f)(x, *t[1:]))(t[0]),
    "grad of grad": lambda f, t: func.grad(lambda *t: func.grad(scalar(f))(*t).square().sum(), everything(t))(*t),
    "dual numbers": dual,
}


def by_place(name, function):
    """A function of named tensors as one of all but drop_path, in their order."""
    shapes, trained = OPERATIONS[name].shapes, OPERATIONS[name].trained
    return lambda *tensors: function(**dict.fromkeys(shapes) | dict(zip(trained, tensors)))


def tensors_for(name, dtype):
    draw = Draw(torch.float64, torch.device("cpu"), torch.Generator().manual_seed(0))
    drawn = OPERATIONS[name].draw(draw)
    return tuple(drawn[key].to(dtype) / 2 for key in OPERATIONS[name].trained)


@pytest.mark.quick(45)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_plain_pytorch_takes_every_transform(name, transform):
    operation, formula = (by_place(name, f) for f in OPERATIONS[name][:2])
    tensors = tensors_for(name, torch.float64)
    expected = TRANSFORMS[transform](formula, tensors)
    torch.testing.assert_close(TRANSFORMS[transform](operation, tensors), expected, atol=1e-9, rtol=1e-9)


@interpreted
@pytest.mark.parametrize("name, transform", [(name, "jvp") for name in OPERATIONS] + [("mlp", t) for t in TRANSFORMS])
def test_kernels_refuse_every_transform(name, transform):
    """Silence was worst: the tangents of jvp and jacfwd were zero."""
    message = rf"{name.split(',')[0]}: kernels are switched on, but no kernel runs under torch.func's transforms"
    with ops.use_kernels("on"), pytest.raises(RuntimeError, match=message):
        TRANSFORMS[transform](by_place(name, OPERATIONS[name].function), tensors_for(name, torch.float32))


@pytest.mark.slow
@interpreted
def test_compiled_kernels_have_no_false_tangents():
    torch._dynamo.reset()
    tensors = tensors_for("layer_norm", torch.float32)
    run = torch.compile(lambda *t: dual(ops.layer_norm, t), backend="eager")
    with ops.use_kernels("on"), pytest.raises(RuntimeError, match="no kernel runs under torch.func's transforms"):
        run(*tensors)


MATH = partial(torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend.MATH)
ADVICE = (
    "a forward in use_kernels('off') inside torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH) runs"
)


@pytest.mark.quick(3)
@interpreted
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_advice_on_a_second_derivative_works(name):
    operation, formula = (by_place(name, f) for f in OPERATIONS[name][:2])

    def twice(f, dtype):
        tensors = [t.requires_grad_() for t in tensors_for(name, dtype)]
        first = torch.autograd.grad(scalar(f)(*tensors), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    says = re.escape(f"{name.split(',')[0]}: cannot be differentiated twice; {ADVICE}")
    with ops.use_kernels("on"), pytest.raises(RuntimeError, match=says):
        twice(operation, torch.float32)
    with ops.use_kernels("off"), MATH():
        torch.testing.assert_close(twice(operation, torch.float64), twice(formula, torch.float64), atol=1e-9, rtol=1e-9)
