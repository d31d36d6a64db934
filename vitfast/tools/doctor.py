"""Checks every operation's kernels against float64, forward and backward, and times them on a GPU."""

import contextlib
import functools
import json
import math
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .. import ops
from ..errors import InputError, both_ends
from ..kernels import launch, tiles
from ..kernels.launch import INTERPRETED, launches_made
from ..kernels.libraries import cublaslt
from ..version import __version__
from . import interpreter
from .child import Children, Lost
from .verify import EPS, cases, exact_fp32, run, worst
from .verify.draw import Draw, Input, Sizes

GPU_SIZES = Sizes.of_preset("B/16", batch=32)
SMALL_SIZES = Sizes(batch=2, tokens=5, width=64, heads=2, hidden=96, image=16, patch=8)


@dataclass
class Result:
    """The worst error of outputs and gradients against float64, PyTorch's own error, and times on a GPU."""

    op: str
    dtype: str
    error: float
    torch_error: float
    passed: bool
    forward_us: float | None = None
    both_us: float | None = None
    gigabytes_per_second: float | None = None
    failure: str = ""
    traceback: str = ""


def check_operation(
    name: str, function: Callable, inputs: list[Input], dtype: torch.dtype, device: torch.device, timed: bool = True
) -> Result:
    """Checks an operation in a dtype: its error may be twice PyTorch's own, or the cost of one rounding."""
    draw = Draw(dtype, device, torch.Generator(device).manual_seed(0))
    tensors = draw.leaves(inputs)
    doubles = [t.detach().double().requires_grad_() if t.requires_grad else t for t in tensors]
    label = str(dtype).removeprefix("torch.")
    try:
        with ops.use_kernels("off"), exact_fp32():
            upstream = [draw.values(*o.shape, dtype=torch.float64) for o in run(function, doubles)]
            truth = run(function, doubles, upstream)
            torchs = run(function, tensors, upstream)
        with ops.use_kernels("on"):
            before, error = launches_made(), 0.0
            for _ in range(1 if INTERPRETED else 3):  # the third call goes by plans (kernels/plans.py)
                ours = run(function, tensors, upstream)
                with torch.no_grad():  # few rows have kernels of their own then
                    evaluated = run(function, tensors)
                error = max(error, worst(ours, truth), worst(evaluated, truth[: len(evaluated)]))
            result = Result(name, label, error, worst(torchs, truth), True)
            if launches_made() == before:
                result.failure = "no kernel ran"
            for i, pair in enumerate(zip(ours, torchs)):
                own, theirs = (f"{str(t.dtype)[6:]} {tuple(t.shape)}" for t in pair)
                if own != theirs:
                    result.failure = f"result {i} is {own}, PyTorch's {theirs}"
            result.passed = not result.failure and result.error <= max(2 * result.torch_error, EPS[dtype])
            if timed and device.type == "cuda":
                _time(result, function, tensors, upstream)
        return result
    except Exception as problem:  # a kernel that does not compile or run is a failed result, not the end of the run
        return failed(name, label, f"{type(problem).__name__}: {problem}", traceback.format_exc())


def failed(name: str, dtype: str, failure: str, where: str = "") -> Result:
    """The Result of an operation that returned nothing; `failure` says why."""
    return Result(name, dtype, float("inf"), float("nan"), False, failure=both_ends(failure), traceback=where)


def _time(result: Result, function: Callable, tensors: list[Tensor], upstream: list[Tensor]) -> None:
    from triton.testing import do_bench

    with torch.no_grad():
        result.forward_us = 1e3 * do_bench(lambda: function(*tensors), return_mode="median")
    result.both_us = 1e3 * do_bench(lambda: run(function, tensors, upstream), return_mode="median")
    moved = sum(t.numel() * t.element_size() for t in (*tensors, *run(function, tensors)))
    result.gigabytes_per_second = moved / result.forward_us / 1e3


PROCESS_BYTES = 4 * 2**30  # GPU memory for a process: CUDA's context, and at most 2 GiB of inputs and float64


def most_processes() -> int:
    """The most processes to run: one for each CPU, if they fit into the GPU's free memory; at least one."""
    cpus = len(os.sched_getaffinity(0))
    return cpus if INTERPRETED else max(1, min(cpus, torch.cuda.mem_get_info()[0] // PROCESS_BYTES))


Task = tuple[str, str]  # an operation and a dtype, by their names


def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU where they are interpreted."""
    if not torch.cuda.is_available() and not INTERPRETED:
        raise RuntimeError("doctor: without a GPU the kernels need TRITON_INTERPRET=1 before vitfast is imported")
    return torch.device("cpu" if INTERPRETED else "cuda")


def prepare() -> None:
    """Readies Triton's interpreter, in a process that interprets kernels."""
    if INTERPRETED:
        interpreter.quicken()
        with contextlib.suppress(ImportError):  # without ml_dtypes there is no bfloat16
            interpreter.mend_bfloat16()


def dtypes(wanted: str = "") -> list[str]:
    """The names of the dtypes that run here, or of the one that is wanted.

    Raises InputError if that is bfloat16 and it cannot run here.
    """
    known = ["bfloat16", "float16", "float32"]
    if INTERPRETED and not launch.bfloat16_mended:
        if wanted == "bfloat16":
            needed = "Triton's interpreter computes it with ml_dtypes: pip install ml_dtypes, or give --dtype float16"
            raise InputError(f"no bfloat16 here, only float16 and float32: {needed}")
        known.remove("bfloat16")
    return [wanted] if wanted else known


def tasks(only: Iterable[str] = (), dtype: str = "") -> list[Task]:
    """The checks to make, in every dtype that runs here or in one.

    only: a name that is an operation's selects it in all its forms ("attention" selects "attention, N = 300" too, but
    not "attention_block"); any other selects each operation whose name contains it. Raises InputError for a name that
    selects nothing.
    """
    operations, chosen = list(cases(SMALL_SIZES, ops)), set()
    for wanted in only:
        found = [name for name in operations if wanted in (name, name.partition(",")[0])]
        found = found or [name for name in operations if wanted in name]
        if not found or not wanted:
            raise InputError(f"no operation has {wanted!r} in its name; there are {'; '.join(operations)}")
        chosen.update(found)
    here = dtypes(dtype)
    return [(name, d) for name in operations if not only or name in chosen for d in here]


def own_products(dtype: torch.dtype) -> contextlib.ExitStack:
    """Lets our kernels compute the products that the rules give to cuBLAS."""
    stack, like, shape = contextlib.ExitStack(), torch.empty(0, dtype=dtype, device=device()), "768x768f"
    for op in ("linear_fwd", "input_grad", "linear_gelu_fwd", "linear_residual_fwd"):
        if tiles.shipped(op, like, shape).provider in ("cublas", "cublaslt"):
            stack.enter_context(tiles.using(op, tiles.shipped(op, like, shape, ("triton",))))
    return stack


def perform(task: Task, timed: bool = False) -> Result:
    """Performs one task; in the interpreter, at small shapes."""
    name, dtype = task[0], getattr(torch, task[1])
    function, inputs = cases(SMALL_SIZES if INTERPRETED else GPU_SIZES, ops)[name]
    with own_products(dtype) if INTERPRETED else contextlib.nullcontext():  # else PyTorch is compared with itself
        return check_operation(name, function, inputs, dtype, device(), timed)


def in_processes(work: Callable[[Task], Result], todo: list[Task], jobs: int) -> Iterator[Result]:
    """Yields results of `work`, each from a process of its own; one that dies is a failed result.

    jobs: how many run at a time.
    """
    children = Children(__name__, jobs)
    try:
        futures = {children.submit(None, _alone, work, task): task for task in todo}
        for future in as_completed(futures):
            try:
                yield future.result()
            except Lost as lost:
                yield failed(*futures[future], f"its process {lost}")
    finally:
        children.close()


def _alone(work: Callable[[Task], Result], task: Task) -> Result:
    """Does the task, in a process of its own."""
    torch.set_num_threads(1)  # there is such a process for each CPU
    prepare()
    return work(task)


def ptxas_version(capability: int) -> str:
    """The version of the ptxas that Triton runs for a compute capability, "12.9", or why there is none."""
    from triton.backends.nvidia import compiler

    try:
        return compiler.get_ptxas(capability).version
    except RuntimeError as error:
        return str(error)


def machine() -> dict[str, str]:
    """Versions, the GPU, anything missing that launching kernels needs, and whether cublaslt is built."""
    import triton

    facts = dict(vitfast=__version__, torch=torch.__version__, triton=triton.__version__)
    here = dict(python=platform.python_version(), cuda=str(torch.version.cuda))
    if INTERPRETED:
        gpu = "not used: small shapes in Triton's interpreter, which shows wrong numbers, not speed"
        missing = "" if launch.bfloat16_mended else "; bfloat16 only with ml_dtypes installed"
        return facts | here | dict(gpu=gpu + missing)
    gpu = torch.cuda.get_device_properties(0)
    facts |= dict(ptxas=ptxas_version(10 * gpu.major + gpu.minor)) | here
    facts["gpu"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    exact, table = 10 * gpu.major + gpu.minor, tiles.generation(device())
    if table and table != exact:
        facts["tiles"] = f"those of sm_{table}, as sm_{exact} has no table of its own; `vitfast tune` may find faster"
    from ..kernels.archives import missing_for_launchers  # it needs Triton

    if missing := missing_for_launchers():
        facts["launcher"] = f"Triton cannot build any that is not in its cache: {missing}"
    like = torch.empty(0, dtype=torch.bfloat16, device=device())
    facts["cublaslt"] = cublaslt.unsupported_reason(like) or "built, for linear_residual"
    return facts


def _as_json(result: Result) -> dict:
    """The result as JSON holds it: null stands for numbers that are not finite."""
    no_number = lambda value: isinstance(value, float) and not math.isfinite(value)  # noqa: E731
    return {key: None if no_number(value) else value for key, value in asdict(result).items()}


def _line(result: Result, width: int) -> str:
    """The result's line in the table."""
    us = lambda t: "" if t is None else f"{t:,.0f} us"  # noqa: E731
    rate = "" if result.gigabytes_per_second is None else f"{result.gigabytes_per_second:,.0f}"
    judgement = f"{result.error:>9.1e} {result.torch_error:>9.1e}  {'ok' if result.passed else 'FAILED':<6}"
    times = f"{us(result.forward_us):>10} {us(result.both_us):>10} {rate:>7}"
    return f"{result.op:<{width}} {result.dtype:<9} {judgement} {times} {result.failure}".rstrip()


def doctor(
    as_json: bool = False,
    only: Iterable[str] = (),
    dtype: str = "",
    jobs: int = 1,
    timed: bool = True,
    debug: bool = False,
) -> int:
    """Checks this machine and prints a table; 0 when everything passed, 1 when not, 130 when interrupted.

    as_json: JSON goes to stdout, the table to stderr. only, dtype: see `tasks`. jobs: how many processes work,
    `most_processes` at most; with more than one nothing is timed. timed: operations are timed on a GPU. debug: the
    whole traceback of the first failure follows the table. Without a GPU the process needs TRITON_INTERPRET=1. Raises
    InputError for a name or a dtype that does not exist here.
    """
    if jobs < 1:
        raise InputError(f"--jobs must be 1 at least, got {jobs}")
    device()
    prepare()
    todo = tasks(only, dtype)
    jobs = min(jobs, len(todo), most_processes())
    work = functools.partial(perform, timed=timed and jobs == 1)
    facts, results, interrupted = machine(), [], False
    show = lambda *lines: print(*lines, sep="\n", file=sys.stderr if as_json else sys.stdout, flush=True)  # noqa: E731
    show(*(f"{key:<8} {value}" for key, value in facts.items()), "")
    width = max(20, *(len(name) for name, _ in todo))
    header = f"{'operation':<{width}} {'dtype':<9} {'error':>9} {'torch':>9}"
    show(f"{header}  {'':<6} {'forward':>10} {'and back':>10} {'GB/s':>7}")
    by_dtype = sorted(todo, key=lambda task: task[1]) if jobs > 1 else todo  # bfloat16, the most used, first
    try:
        for result in in_processes(work, by_dtype, jobs) if jobs > 1 else map(work, todo):
            results.append(result)
            show(_line(result, width))
    except KeyboardInterrupt:
        interrupted = True
    results.sort(key=lambda r: todo.index((r.op, r.dtype)))
    bad, done = [r for r in results if not r.passed], {(r.op, r.dtype) for r in results}
    missed = len(todo) - len(results)
    if debug and bad:
        show("", f"The first failure, {bad[0].op} in {bad[0].dtype}:", bad[0].traceback or bad[0].failure)
    at_work = [f"{name} in {d}" for name, d in by_dtype[: len(results) + jobs] if (name, d) not in done]
    interruption = f", {missed} not examined: interrupted in {', '.join(at_work)}" if missed else ""
    show("", f"{len(results) - len(bad)} of {len(todo)} passed{interruption}")
    if as_json:
        found = dict(machine=facts, results=[_as_json(r) for r in results], not_examined=missed)
        print(json.dumps(found, indent=2, allow_nan=False))
    return 130 if interrupted else 1 if bad else 0
