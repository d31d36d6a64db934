"""A stand-in for Triton, which keeps what reaches its launcher, and something planned that launches."""

from types import SimpleNamespace

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels import launch, plans
from vitfast.ops import operation


def launches_of_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What reaches the launcher of a stand-in for Triton: (kernel, grid and stream, arguments)."""
    found = []

    def compiled(kernel, grid, arguments):
        def run(*given):
            assert given[4:9] == (f"function of {kernel.__name__}", "metadata", None, None, None)
            found.append((kernel.__name__, given[:4], given[9:]))

        run(
            *(*grid, 1, 1)[:3],
            7,
            f"function of {kernel.__name__}",
            "metadata",
            None,
            None,
            None,
            *(arguments[name] for name in kernel.arg_names),
        )
        return SimpleNamespace(run=run, function=f"function of {kernel.__name__}", packed_metadata="metadata")

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(plans, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", compiled)
    monkeypatch.setattr(plans, "_stream", lambda device: 7)
    return found


def function(kernel=None):
    """Something planned that launches on a view and returns a product."""

    def run(x, n):
        y = x[1:].t()
        launch.launch(kernel, (n,), x_ptr=x[1:], box=TensorDescriptor(x, list(x.shape), [16, 1], [2, 16]))
        return torch.mm(x[1:], y)

    return operation.planned(run)


class Kernel:
    """A stand-in for a kernel."""

    __name__, arg_names, pre_run_hooks, cache_key = "kernel", ["x_ptr", "box"], [], ""
