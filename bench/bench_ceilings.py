"""Ceilings of the device and its libraries: copies, products, cuBLAS at a training step's shapes.

SDPA's backends are in bench_ops.py, timm under torch.compile in bench_model.py; `bench/gpu.sh ceilings` runs all
three.
"""

import functools

import clock
import machine
import pytest
import torch.nn.functional as F
from clock import cold, lead_of, warm_up
from harness import DTYPE, Case, bench, describe, draw, measure
from shapes import MAIN, WHERE, planned

from vitfast.tools.cost import work

STEPS = planned(*MAIN)
# A pass of a linear layer -> what it computes from x (M, K), W (N, K) and dY (M, N).
PASSES = {
    "forward": lambda x, w, b, dy: F.linear(x, w, b),
    "dX": lambda x, w, b, dy: dy @ w,
    "dW": lambda x, w, b, dy: dy.t() @ x,
}
LAYERS = {"qkv": (1, 3), "proj": (1, 1), "fc1": (1, 4), "fc2": (4, 1)}  # in and out, in units of D


@pytest.mark.parametrize("what", [f"{WHERE}{name}" for name in machine.ceiling_runs()])
def test_ceiling(benchmark, what):
    name = what.removeprefix(WHERE)
    make, flops, moved = machine.ceiling_runs()[name]
    run = make()
    warm_up(run, 10)
    seconds = measure(benchmark, run, functools.partial(cold, lead_of(run)))
    dtype, facts = DTYPE if name == "copy" else name, dict(op="ceiling", shape=what, direction="forward")
    describe(benchmark, "library", ((flops, moved),), seconds, dtype, **facts)


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("shape", STEPS)  # nearest the function: the case's name starts with it
def test_gemm(benchmark, shape, layer, which):
    s, size = STEPS[shape], DTYPE.itemsize
    m, k, n = s.rows, *(s.width * units for units in LAYERS[layer])

    def make():
        listed = ("values", (m, k)), ("weight", (n, k)), ("values", (n,)), ("values", (m, n))
        return [t.detach() for t in draw(listed)]

    sizes = dict(forward=(m, n, k, size, n), dX=(m, k, n, size), dW=(n, k, m, size))
    kernels = work.product(*sizes[which])
    case = Case("gemm", f"{shape} {layer}", PASSES[which], make, 0, work.Work(kernels, kernels, kernels))
    bench(benchmark, case, "cublas" if clock.GPU else "cpu library", PASSES[which], "forward", direction=which)
