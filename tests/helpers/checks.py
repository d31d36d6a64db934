"""Comparisons the tests share."""

from collections.abc import Callable, Collection, Iterable

import pytest
import torch
from same_bits import floats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def randomize(model: nn.Module, std: float = 0.1) -> nn.Module:
    """Random values in every parameter, LayerNorm and tokens included.

    A fresh model hides mix-ups behind its zeros and ones.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randn_like(parameter) * std
                + (1.0 if parameter.dim() == 1 and "norm" in name and "weight" in name else 0.0)
            )
    return model


def assert_close(actual: Tensor, expected: Tensor, atol: float, rtol: float = 0.0, name: str = "") -> None:
    """Values, shapes and dtypes equal within the tolerance; says where the largest error is."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, msg=lambda text: f"{name}: {text}")


def gradients(model: nn.Module, output: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Gradients of every parameter for one upstream gradient."""
    model.zero_grad()
    output.backward(upstream)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def slow_but(quick: Collection, names: Iterable) -> list:
    """Parameters of a test, marked slow but for the quick ones."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


def outputs(call: Callable, inputs, valid: str = "") -> list[Tensor]:
    """All floating tensors that a call gives, of tokens (B, N, D) those that count.

    inputs: by place or by name. valid: the input that says which tokens count.
    """
    torch.manual_seed(1)  # of drop path and dropout
    found = floats(call(**inputs) if isinstance(inputs, dict) else call(*inputs))
    return [t[inputs[valid].bool()] if valid and t.dim() == 3 else t for t in found]


def results(call: Callable, model: nn.Module, inputs, valid: str = "") -> tuple[list[Tensor], dict]:
    """(outputs, gradients of a model's parameters and of inputs for random upstream gradients); call: with its code."""
    named = inputs if isinstance(inputs, dict) else dict(enumerate(inputs))
    leaves = {k: x.detach().clone().requires_grad_() for k, x in named.items() if floats(x)}
    given = {**named, **leaves}
    model.zero_grad()
    outs = [t for t in outputs(call, given if named is inputs else given.values(), valid) if t.requires_grad]
    upstream = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2)).to(t) for t in outs]
    torch.autograd.backward(outs, upstream)
    wanted = {str(k): t for k, t in (*model.named_parameters(), *leaves.items()) if t.requires_grad}
    gradients = {k: t.grad for k, t in wanted.items()}
    model.zero_grad()
    return [t.detach() for t in outs], gradients


def assert_equal(ours: tuple, theirs: tuple, tolerance: float) -> None:
    """Two of `results` are close, gradients relative to their largest number."""
    (outs, given), (expected, wanted) = ours, theirs
    for i, (out, truth) in enumerate(zip(outs, expected, strict=True)):
        assert out.dtype == truth.dtype
        assert_close(out, truth, atol=tolerance, rtol=tolerance, name=f"output {i}")
    assert [k for k, g in given.items() if g is not None] == [k for k, g in wanted.items() if g is not None]
    wanted = {k: g for k, g in wanted.items() if g is not None and g.numel()}
    most = max(g.abs().max().item() for g in wanted.values())
    for name, gradient in wanted.items():
        assert gradient.dtype == given[name].dtype
        scale = max(gradient.abs().max().item(), 1e-3 * most)  # k's bias has a gradient of zero but for rounding
        assert_close(given[name] / scale, gradient / scale, atol=tolerance, name=f"gradient of {name}")


class Calls(TorchDispatchMode):
    """Collects what is called: (operation, arguments, named arguments, result)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args, kwargs, func(*args, **(kwargs or {}))))
        return self.found[-1][-1]
