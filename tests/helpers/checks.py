"""Comparisons the tests share."""

import torch
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


class Calls(TorchDispatchMode):
    """Collects what is called: (operation, arguments, named arguments, result)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args, kwargs, func(*args, **(kwargs or {}))))
        return self.found[-1][-1]
