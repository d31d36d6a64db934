"""What the device and its libraries reach before any kernel of ours: copies, matrix products, and cuBLAS at the shapes of a training step.

SDPA's backends are in bench_attention.py, timm under torch.compile in bench_model.py; `bench/gpu.sh ceilings` runs all three.
"""

import functools

import clock
import costs
import machine
import pytest
import torch.nn.functional as F
from clock import cold, lead_of, warm_up
from harness import DTYPE, Case, bench, describe, measure, values, weight
from shapes import CPU_SHAPE, WHERE, Shape

STEPS = {
    s.name: s
    for s in ((Shape("B/16", 224, 256), Shape("L/16", 224, 128), Shape("H/14", 224, 64)) if clock.GPU else (CPU_SHAPE,))
}
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
    cost = costs.Cost(((flops, moved),))
    describe(
        benchmark,
        "library",
        cost,
        seconds,
        DTYPE if name == "copy" else name,
        op="ceiling",
        shape=what,
        direction="forward",
    )


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("shape", STEPS)  # nearest the function: the case's name starts with it
def test_gemm(benchmark, shape, layer, which):
    s = STEPS[shape]
    m, k, n = s.rows, *(s.width * units for units in LAYERS[layer])

    def make():
        return [t.detach() for t in (values(m, k), weight(n, k), values(n), values(m, n))]

    size = values(1).element_size()
    cost = dict(
        forward=costs.product(m, n, k, size, n), dX=costs.product(m, k, n, size), dW=costs.product(n, k, m, size)
    )[which]
    case = Case("gemm", f"{shape} {layer}", PASSES[which], make, 0, costs.Costs(cost, cost, cost))
    bench(benchmark, case, "cublas" if clock.GPU else "cpu library", PASSES[which], "forward", direction=which)
