"""`vitfast tune`: tunes the models one after the other, within the time that is given.

For each model, a process of its own uses the GPU and reports each candidate before it runs it. Where it dies, breaks
the GPU's context or takes HANGS seconds for a candidate, that one is refused for good and a new process does the rest.
"""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable
from time import monotonic
from types import SimpleNamespace

import torch

from ...errors import InputError, unknown
from ...kernels import tiles
from ..child import Children, Lost
from ..verify.clock import DeviceClock
from ..verify.draw import Sizes
from . import user_table
from .tuner import Tuner

# Each batch's rows fill whole tiles but for the last one, so that accesses past the end are noticed.
MODELS = {
    "S/16": Sizes.of_preset("S/16", batch=240),
    "B/16": Sizes.of_preset("B/16", batch=112),
    "B/16 384": Sizes.of_preset("B/16", batch=48, image=384),
    "L/16": Sizes.of_preset("L/16", batch=80),
    "H/14": Sizes.of_preset("H/14", batch=48),
}
SECONDS = 400  # for each model
HANGS = 60  # seconds after which a candidate's trial, which takes 0.1 s, is given up with its process


def machine() -> tuple:
    """(device, GPU's name, clock, compiler). Raises InputError in Triton's interpreter."""
    from ..machine_code.compiler import Compiler  # whose import takes half a second

    device = torch.device("cuda")
    return device, torch.cuda.get_device_name(), DeviceClock(device), Compiler(tiles.capability(device))


def gpu_lock():
    """A lock on tuning this GPU. Raises InputError where there is no GPU, or the lock is taken."""
    if not torch.cuda.is_available():
        raise InputError("tuning measures times on a GPU, and there is none here")
    return user_table.only_one(str(torch.cuda.get_device_properties("cuda").uuid))


def work(send: Callable, model: str, settings: SimpleNamespace, done: set[tuple], seconds: float) -> bool:
    """Tunes the problems of a model whose keys are not `done` yet, and prints what comes of it.

    settings: the options of `tune`. seconds: how long it may take. Sends "trying" with an entry of the table or None,
    and "kept" and "done" with a problem's key. Returns whether all was tried. Raises Lost where a candidate has broken
    the GPU's context.
    """

    def trying(entry: dict | None) -> None:
        signal.alarm(HANGS if entry else 0)  # the alarm ends this process
        send("trying", entry)

    device, gpu, clock, compiler = machine()
    begun, sizes, finished = clock.now(), MODELS[model], True
    if settings.batch_size is not None:
        sizes = dataclasses.replace(sizes, batch=settings.batch_size)
    try:
        tuner = Tuner(settings.dtype, device, gpu, clock, compiler, seconds, trying)
        problems = [problem for problem in tuner.problems(sizes, settings.only) if problem.key not in done]
        with _bar(len(problems), model) as (bar, say):
            for problem in tuner.run(problems):
                for key in tuner.kept:
                    send("kept", key)
                if problem.finished:
                    send("done", problem.key)
                finished &= problem.finished
                say(str(problem))
                bar.update()
                left = f"at most {max(0.0, tuner.left):.0f} s more"
                bar.set_postfix_str(f"{len(tuner.kept)} faster, {tuner.timings} timed, {left}")
        counts = f"{compiler.compilations} compilations, {tuner.checks} results checked, {tuner.timings} timings"
        print(f"{model}: {counts}, {clock.now() - begun:.0f} s", flush=True)
        return finished and not tuner.unreached
    finally:
        compiler.close()


def tune(
    models: list[str],
    dtype: torch.dtype,
    only: str = "",
    seconds: float | None = None,
    batch_size: int | None = None,
) -> int:
    """Tunes these models on this GPU and prints what came of it. Returns the exit code.

    seconds: for all models, SECONDS each unless given. Raises InputError for wrong options, without a GPU, in Triton's
    interpreter, and where another process tunes this GPU.
    """
    for name in models:
        if name not in MODELS:
            raise unknown("model", name, MODELS)
    for name, value in (("seconds", seconds), ("batch-size", batch_size)):
        if value is not None and not value > 0:
            raise InputError(f"--{name} must be positive, got {value:g}")
    if not any(only in op for op in tiles.RULES):
        raise InputError(f"no operation has {only!r} in its name; there are {', '.join(tiles.RULES)}")
    settings = SimpleNamespace(dtype=dtype, only=only, batch_size=batch_size)
    end, told, finished = monotonic() + (seconds or SECONDS * len(models)), dict(done=set(), kept=set()), True
    with gpu_lock():
        try:
            for number, model in enumerate(models):
                model_end = monotonic() + (end - monotonic()) / (len(models) - number)
                tried = None
                while tried is None:
                    tried = _in_a_process(told, model, settings, max(1.0, model_end - monotonic()))
                finished &= tried
        finally:
            print(f"{len(told['kept'])} tiles faster than before, kept in {tiles.user_table_path()}", flush=True)
    if not finished:
        print("Not everything was tried: the same command goes on from here.")
    return 0


def _in_a_process(told: dict[str, set], model: str, settings: SimpleNamespace, seconds: float) -> bool | None:
    """Tunes a model in a new process; None where a candidate ended that, which is refused from now on."""
    candidate = None

    def hear(kind: str, value) -> None:
        nonlocal candidate
        if kind == "trying":
            candidate = value
        else:
            told[kind].add(value)

    try:
        return Children(__name__).run(None, work, model, settings, told["done"], seconds, hear=hear)
    except Lost as lost:
        if candidate is None:
            raise RuntimeError(f"vitfast tune {lost}, between two candidates") from None
        reason = f"has not ended after {HANGS} s" if signal.SIGALRM.name in str(lost) else str(lost)
        user_table.refuse(candidate, reason)
        name = f"{candidate['op']} {candidate['shape']}, {tiles.from_record(candidate)}"
        print(f"vitfast: {name} {reason}; it is not tried again", file=sys.stderr, flush=True)
        return None


@contextlib.contextmanager
def _bar(total: int, name: str):
    """A progress bar with the time left, on a terminal that has tqdm, and a print that leaves it whole."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield SimpleNamespace(update=lambda: None, set_postfix_str=lambda text: None), print
        return
    with tqdm(total=total, desc=name, unit="tile", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
        yield bar, lambda text: tqdm.write(text, file=sys.stdout)
