"""Finds the fastest tiles on the GPU at hand: `vitfast tune`. It never runs by itself.

Every tile that a training step uses at a model's sizes is one problem. Its candidates are the table's tile, those of
our other kernels and cuBLAS, and their neighbours, for as long as that gets faster (tuner.py). Each is compiled in a
process of its own while others are timed (machine_code/compiler.py), compared with float64 at the size that is timed,
and timed from cold caches (verify/clock.py). One that is faster, and still is when both are tried once more, goes into
the user's table (user_table.py) at once, so that an interrupted run keeps it, and the next run goes on from there.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from threading import Timer
from time import monotonic

import torch

from ...errors import InputError, unknown
from ...kernels import tiles
from ..verify.clock import DeviceClock
from ..verify.draw import Sizes
from . import user_table
from .tuner import KEPT, Problem, Tuner

# Each batch's rows fill whole tiles but for the last one, so that accesses past the end are noticed.
MODELS = {
    "S/16": Sizes.of_preset("S/16", batch=240),
    "B/16": Sizes.of_preset("B/16", batch=112),
    "B/16 384": Sizes.of_preset("B/16", batch=48, image=384),
    "L/16": Sizes.of_preset("L/16", batch=80),
    "H/14": Sizes.of_preset("H/14", batch=48),
}
OPERATIONS = """attention_fwd attention_bwd attention_bwd_dq attention_bwd_dkdv attention_bwd_bias rope_bwd
    layer_norm_fwd layer_norm_bwd scale_rows column_sums linear_fwd input_grad linear_gelu_fwd linear_residual_fwd
    norm_linear_fwd split_linear_fwd mlp_kept dgelu_matmul gelu_bwd gated_linear_fwd dgated_matmul gated_bwd
    scaled_weight_grad
    patch_embed_fwd patch_embed_dweight patch_embed_dimages""".split()
SECONDS = 400  # by default, for each model
HANGS = 60  # seconds past a problem's time after which a kernel is taken to hang


@contextlib.contextmanager
def machine(dtype: torch.dtype) -> Iterator[Tuner]:
    """Yields this GPU's only tuner, under a lock. Raises InputError without a GPU or in the interpreter."""
    if not torch.cuda.is_available():
        raise InputError("tuning measures times on a GPU, and there is none here")
    from ..machine_code.compiler import Compiler  # its import takes half a second

    device = torch.device("cuda")
    name = f"tuning-{torch.cuda.get_device_properties(device).uuid}.lock"
    alone = user_table.lock(name, "another vitfast tune runs on this GPU: each would spoil the other's times")
    with alone, contextlib.closing(Compiler(tiles.capability(device))) as compiler:
        yield Tuner(dtype, device, torch.cuda.get_device_name(device), DeviceClock(device), compiler)


def tune(models: list[str], dtype: torch.dtype, only: list[str], seconds: float | None, batch_size: int | None) -> None:
    """Tunes these models on this GPU and prints what came of it.

    only: the operations whose name contains one of these, or all. seconds: for all models together; None: SECONDS each.
    Raises InputError for wrong options, a damaged table, and what keeps `machine` from tuning.
    """
    end = monotonic() + (seconds or SECONDS * len(models))
    for name in models:
        if name not in MODELS:
            raise unknown("model", name, MODELS)
    for name, value in (("seconds", seconds), ("batch-size", batch_size)):
        if value is not None and not value > 0:
            raise InputError(f"--{name} must be positive, got {value:g}")
    for name in only:
        if not any(name in op for op in OPERATIONS):
            raise unknown("operation", name, OPERATIONS)
    sizes = [dataclasses.replace(MODELS[name], batch=batch_size or MODELS[name].batch) for name in models]
    with machine(dtype) as tuner:
        user_table.read()  # a damaged table is an error now, before anything is timed
        problems = [p for p in tuner.problems(sizes) if any(name in p.op for name in only or [""])]
        try:
            for number, problem in enumerate(problems):
                _settle(tuner, problem, len(problems) - number, end)
        finally:
            faster = sum(problem.best != problem.start for problem in problems)
            print(f"{faster} tiles faster than before, kept in {tiles.user_table.path()}", flush=True)
        if any(problem.note for problem in problems):
            print("Not everything was tried: the same command goes on from here.")


def _settle(tuner: Tuner, problem: Problem, count: int, end: float) -> None:
    """Settles a problem, the first of `count`, in its share of the time that is left."""
    left = max(0.0, end - monotonic())
    print(f"{problem}: {count} tiles to choose in at most {left:.0f} s", flush=True)
    watch = Timer(left / count + HANGS, _end, [f"a kernel of {problem} hangs; {KEPT}"])
    watch.start()
    try:
        tuner.settle(problem, left / count)
    finally:
        watch.cancel()
    reason = next((f", such as: {text}" for text in problem.failures.values()), "")
    print(f"    {len(problem.times)} candidates, {len(problem.failures)} of them refused{reason}", flush=True)
    if problem.note:
        print(f"    {problem.note}", flush=True)


def _end(text: str) -> None:
    """Ends the process with an error line, since no exception ends a kernel that hangs."""
    print(f"vitfast: error: {text}", file=sys.stderr, flush=True)
    os._exit(1)
