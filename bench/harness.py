"""Measures an operation on random inputs from cold caches, if it is right, against measured ceilings.

`bench` (1) compares the implementation at full size with float64, forward and, where it is timed, backward: no time for
a wrong result; (2) warms up and takes the peak memory of one call; (3) times calls over several sets of random inputs,
the L2 cache overwritten before each; (4) compares again with the same truth: what was timed still computes it. Every
entry of the JSON file that pytest-benchmark writes has, in `extra_info`: impl, device, dtype, op, shape, direction,
flops, bytes (vitfast/tools/cost/work.py), floor_us and percent_of_floor (against the ceilings), tflops,
gigabytes_per_second, error, error_after and error_limit (relative, by norm) and peak_mib.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import machine
import pytest
import torch
from machine import cold, lead_of, peak_bytes, warm_up
from torch import Tensor

from vitfast import ops
from vitfast.tools.cost.work import Kernels, Work, floor_seconds, total_bytes, total_flops
from vitfast.tools.verify import ATOL, errors, run
from vitfast.tools.verify.draw import Draw, Input

DTYPE = torch.bfloat16 if machine.GPU else torch.float32  # the dtype of operations
CHECKED = 4  # samples of a batch that are compared with float64
SETS = 3


class WrongResult(AssertionError):
    """An implementation does not compute what it should; it gets no time."""


@dataclass(frozen=True)
class Case:
    """An operation at a shape.

    formula: the operation in eager PyTorch. inputs: their kinds and shapes; the first `batched` have the batch as their
    first axis, as every output has. With batched = 0 there is no such axis, and the whole result is compared.
    """

    op: str
    shape: str
    formula: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: list[Input]
    batched: int
    work: Work

    def draw(self) -> list[Tensor]:
        """Random inputs on the device; values and weights require a gradient."""
        return Draw(DTYPE, machine.DEVICE).leaves(self.inputs)


def compiled(function: Callable, how: str, **options) -> Callable:
    """The function under torch.compile, whose earlier code each case drops at its end (conftest.py).

    how: "compile" or "max-autotune", without torch's CUDA graphs, as these copy every input first; with them
    "reduce-overhead" or "max-autotune-graphs"; "tensorrt" is Torch-TensorRT's; "eager" for backend="vitfast", whose
    graph then runs as it is. options: torch.compile's. Skips the case where Torch-TensorRT cannot be imported.
    """
    if machine.REHEARSED or how == "eager":  # traced, nothing generated
        inner = dict(options={"inner": "eager"}) if options.get("backend") == "vitfast" else dict(backend="eager")
        return torch.compile(function, **options, **inner)
    if how == "tensorrt":
        pytest.importorskip("torch_tensorrt", exc_type=ImportError)
        return torch.compile(function, backend="tensorrt", dynamic=False, options=dict(use_explicit_typing=True))
    mode = {"max-autotune": "max-autotune-no-cudagraphs", "max-autotune-graphs": "max-autotune"}.get(how, how)
    return torch.compile(function, mode=None if mode == "compile" else mode, **options)


def checked_samples(batch: int) -> Tensor:
    """Indices of the samples that are compared, first and last among them."""
    return torch.linspace(0, batch - 1, min(batch, CHECKED), device=machine.DEVICE).round().long()


def judge(impl: str, what: str, error: float, own: float, dtype: torch.dtype) -> dict:
    """{error, error_limit}; raises WrongResult beyond the limit.

    The limit is twice `own`, the error of eager PyTorch in the same dtype, plus rounding.
    """
    limit = 2 * own + ATOL[dtype]
    if not error <= limit:
        why = f"error {error:.1e} against float64, limit {limit:.1e}"
        raise WrongResult(f"{impl} is wrong on {what}: {why}; it gets no time")
    return dict(error=error, error_limit=limit)


def _leaves(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Leaves with the same values, the floating ones in `dtype`."""
    kinds = [(dtype or t.dtype) if t.is_floating_point() else t.dtype for t in tensors]
    return [t.detach().to(kind).requires_grad_(t.requires_grad) for t, kind in zip(tensors, kinds)]


def worst_row(results: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error of any row (of the first axis): none hides among the others."""
    return max(errors(result, of)[0] for result, of in zip(results, truth, strict=True))


def measure(
    benchmark,
    run: Callable,
    setup: Callable | None = None,
    calls: int = 1,
    rounds: int = machine.ROUNDS,
    timer: Callable | None = None,
) -> float:
    """Has pytest-benchmark time `run`, which makes `calls` calls; returns the median of seconds a call.

    timer: another clock than ours.
    """
    benchmark._timer = timer or machine.clock(calls)
    benchmark.pedantic(run, setup=setup, rounds=rounds)
    return benchmark.stats.stats.median if benchmark.stats else float("nan")


def description(
    impl: str, kernels: Kernels, seconds: float, dtype: torch.dtype, peak: int | None = None, **more
) -> dict:
    """The facts that every case has, whatever it measures. dtype: whose ceiling counts."""
    dtype, top = str(dtype).removeprefix("torch."), machine.ceilings()
    floor, flops, moved = floor_seconds(kernels, top[dtype], top["copy"]), total_flops(kernels), total_bytes(kernels)
    facts = dict(impl=impl, device=machine.name(), dtype=dtype, flops=int(flops), bytes=int(moved))
    facts |= dict(floor_us=1e6 * floor, percent_of_floor=100 * floor / seconds)
    facts |= dict(tflops=flops / seconds / 1e12, gigabytes_per_second=moved / seconds / 1e9)
    return facts | dict(peak_mib=None if peak is None else peak / 2**20) | more


class Timed:
    """An operation or a model (peers.py), which is compared with float64 before it is timed and after.

    A subclass has impl ("vitfast..." is ours), work, dtype, group and `more`, its own facts; `compare`, which gives
    {error, error_limit} or raises WrongResult, with `when` in it; `ready`, which warms up after the first comparison;
    and `call`, which is timed with what `prepare` returns, `calls` times in a round.
    """

    peak: int | None = None
    calls, rounds = 1, machine.ROUNDS

    def context(self) -> contextlib.AbstractContextManager:
        """A context to time and compare in: a case of ours that no kernel covers fails, with no fallback."""
        return ops.use_kernels("on" if machine.GPU and self.impl.startswith("vitfast") else "auto")

    def judge(self, after: bool = False) -> None:
        """Compares and keeps the errors."""
        found = self.compare(" after timing" * after)
        self.errors = self.errors | dict(error_after=found["error"]) if after else found

    def setup(self) -> tuple:
        """The beginning of a case of pytest-benchmark."""
        return self.prepare()

    def facts(self, seconds: float) -> dict:
        """The description, if a call takes so many seconds."""
        return description(self.impl, self.work, seconds, self.dtype, self.peak, **self.errors, **self.more)


class Operation(Timed):
    """An implementation of a case: "forward", "backward" (the forward is not timed) or "both".

    The implementation runs on the whole batch. Some samples are compared; the upstream gradient is zero for all others,
    so that the gradients of the parameters are those of these samples alone, however large the batch is. The truth is
    made once and kept for the comparison after timing.
    """

    dtype = DTYPE

    def __init__(self, case: Case, impl: str, function: Callable, direction: str, **more):
        self.case, self.impl, self.function, self.direction = case, impl, function, direction
        self.more = dict(op=case.op, shape=case.shape, direction=direction) | more
        self.group, self.work, self.lead = f"{case.op} {case.shape} {direction}", case.work.of(direction), None
        torch.manual_seed(0)
        self.tensors, self.upstream, few = case.draw(), None, None
        batch = self.tensors[0].shape[0]
        self.chosen = checked_samples(batch) if case.batched else slice(None)
        plain = _leaves([t[self.chosen] if i < case.batched else t for i, t in enumerate(self.tensors)])
        with torch.set_grad_enabled(direction != "forward"), ops.use_kernels("off"):
            doubles = _leaves(plain, torch.float64)
            outputs = run(case.formula, doubles)
            if direction != "forward":
                few = [torch.randn_like(o) for o in outputs]
                sizes = [(batch, *u.shape[1:]) if case.batched else u.shape for u in few]
                self.upstream = [torch.zeros(size, dtype=DTYPE, device=machine.DEVICE) for size in sizes]
                for whole, u in zip(self.upstream, few):
                    whole[self.chosen] = u.to(DTYPE)
            self.truth = [t.detach() for t in run(case.formula, doubles, few)]
            self.own = worst_row([t.detach() for t in run(case.formula, plain, few)], self.truth)
        # Results with the batch as their first axis come first.
        self.batched = len(outputs) + sum(t.requires_grad for t in self.tensors[: case.batched]) if case.batched else 0

    def compare(self, when: str) -> dict:
        with torch.set_grad_enabled(self.direction != "forward"):
            result = run(self.function, self.tensors, self.upstream)
        compared = [(r[self.chosen] if i < self.batched else r).detach() for i, r in enumerate(result)]
        what = f"{self.case.op} {self.case.shape} {self.direction}{when}"
        return judge(self.impl, what, worst_row(compared, self.truth), self.own, DTYPE)

    def ready(self, seconds: float) -> None:
        before, sets = torch.cuda.memory_allocated(), [self.draw()]
        whole = lambda: self.call(*self.started(*sets[0]))  # noqa: E731
        warm_up(whole, seconds=seconds)
        self.peak = peak_bytes(whole, before)
        sets += [self.draw() for _ in range(SETS - 1)]
        self.next = itertools.cycle(sets).__next__

    def draw(self) -> tuple[list[Tensor], list[Tensor]]:
        """Random inputs and upstream gradients of a call."""
        tensors = self.case.draw()
        outputs = [] if self.direction == "forward" else run(self.function, tensors)
        return tensors, [torch.randn_like(o) for o in outputs]

    def started(self, tensors: list[Tensor], upstream: list[Tensor]) -> tuple:
        """The arguments of `call`, with the outputs of the forward, which is not timed, for a backward."""
        outputs = self.function(*tensors) if self.direction == "backward" else None
        return tensors, [t for t in tensors if t.requires_grad], upstream, outputs

    def prepare(self) -> tuple:
        return self.started(*self.next())

    def setup(self) -> tuple:
        if self.lead is None:
            self.lead = lead_of(functools.partial(self.call, *self.prepare()))
        prepared = self.prepare()
        cold(self.lead)
        return prepared

    def call(self, tensors: list[Tensor], leaves: list[Tensor], upstream: list[Tensor], outputs: object) -> None:
        if self.direction == "forward":
            with torch.no_grad():
                self.function(*tensors)
        else:
            torch.autograd.grad(self.function(*tensors) if outputs is None else outputs, leaves, upstream)


def bench(benchmark, timed: Timed) -> None:
    """Checks, times and checks again."""
    benchmark.group = timed.group
    with timed.context():
        timed.judge()
        timed.ready(machine.WARM_SECONDS)

        def run(*prepared):
            for _ in range(timed.calls):
                timed.call(*prepared)

        seconds = measure(benchmark, run, lambda: (timed.setup(), {}), timed.calls, timed.rounds)
        timed.judge(after=True)
    benchmark.extra_info.update(timed.facts(seconds))
