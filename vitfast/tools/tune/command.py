"""`vitfast tune`: the models one after the other, within the time that is given.

A process of its own has the GPU, and says which candidate it is about to run. Where it ends, breaks the GPU's context
or takes HANGS seconds for one, that candidate is refused for good and another process goes on with the rest.
"""

import contextlib
import dataclasses
import multiprocessing
import signal
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch

from ...errors import InputError, unknown
from ...kernels.configs import tiles
from ..verify.draw import Sizes
from . import user_table
from .trial import DeviceClock
from .tuner import DeviceLost, Tuner

# The batch: its rows fill whole tiles but for the last one, so that what reaches past the end is seen.
MODELS = {
    "S/16": Sizes.of_preset("S/16", batch=240),
    "B/16": Sizes.of_preset("B/16", batch=112),
    "B/16 384": Sizes.of_preset("B/16", batch=48, image=384),
    "L/16": Sizes.of_preset("L/16", batch=80),
    "H/14": Sizes.of_preset("H/14", batch=48),
}
SECONDS = 400  # for each model
HANGS = 60  # seconds after which a candidate's trial, which takes a tenth of one, is given up with its process


def machine() -> tuple:
    """(device, GPU's name, clock, compiler). Raises InputError in Triton's interpreter."""
    from ..machine_code.compiler import Compiler  # whose import takes half a second

    device = torch.device("cuda")
    return device, torch.cuda.get_device_name(), DeviceClock(device), Compiler(tiles.capability(device))


def gpu_lock():
    """A lock on tuning this GPU. Raises InputError where there is none, or it is taken."""
    if not torch.cuda.is_available():
        raise InputError("tuning measures times on a GPU, and there is none here")
    return user_table.only_one(str(torch.cuda.get_device_properties("cuda").uuid))


def work(send, settings: SimpleNamespace, done: set[tuple], seconds: float) -> None:
    """Tunes the problems whose keys are not `done` yet, and prints what comes of it.

    settings: the options of `tune`. seconds: how long it may take. Sends ("trying", an entry of the table or None),
    ("kept", key), ("done", key), and ("end", whether all was tried). Raises InputError for an `only` that no
    operation has in its name, DeviceLost where the GPU has to be given up.
    """
    if settings.deterministic:  # which the libraries' own predicate asks for (kernels/libraries/attention.py)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    device, gpu, clock, compiler = machine()
    end, done, finished = clock.now() + seconds, set(done), True
    try:
        for number, model in enumerate(settings.models):
            begun, sizes = clock.now(), MODELS[model]
            if settings.batch_size is not None:
                sizes = dataclasses.replace(sizes, batch=settings.batch_size)
            share = (end - begun) / (len(settings.models) - number)
            tuner = Tuner(settings.dtype, device, gpu, clock, compiler, share, trying=lambda x: send(("trying", x)))
            every = tuner.problems(sizes, settings.only)
            if not every:
                known = ", ".join(tiles.RULES)
                raise InputError(f"no operation has {settings.only!r} in its name; there are {known}")
            problems = [problem for problem in every if problem.key not in done]
            with _bar(len(problems), model) as (bar, say):
                for outcome in tuner.run(problems):
                    for key in tuner.kept:
                        send(("kept", key))
                    if outcome.finished:
                        done.add(outcome.problem.key)
                        send(("done", outcome.problem.key))
                    finished &= outcome.finished
                    say(str(outcome))
                    bar.update()
                    left = f"at most {max(0.0, tuner.left):.0f} s more"
                    bar.set_postfix_str(f"{len(tuner.kept)} faster, {tuner.timings} timed, {left}")
            finished &= not tuner.unreached
            counts = f"{compiler.compilations} compilations, {tuner.checks} results checked, {tuner.timings} timings"
            print(f"{model}: {counts}, {clock.now() - begun:.0f} s", flush=True)
        send(("end", finished))
    finally:
        compiler.close()


def _process(connection: Connection, *arguments) -> None:
    """`work` in a process of its own, which the one that started it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work(connection.send, *arguments)
    except InputError as error:
        connection.send(("error", str(error)))
    except DeviceLost as error:
        connection.send(("lost", str(error)))


def start(*arguments, target=_process) -> tuple[multiprocessing.Process, Connection]:
    """A process that runs `target(connection, *arguments)`, and this end of the connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def tune(
    models: list[str],
    dtype: torch.dtype,
    only: str = "",
    seconds: float | None = None,
    batch_size: int | None = None,
    deterministic: bool = False,
) -> int:
    """Tunes these models on this GPU and prints what came of it. Returns the exit code.

    seconds: for all, SECONDS for each unless given. deterministic: libraries whose backward may add in any order are no
    candidates. Raises InputError for wrong options, without a GPU, in Triton's interpreter, and where another process
    tunes this GPU.
    """
    for name in models:
        if name not in MODELS:
            raise unknown("model", name, MODELS)
    for name, value in (("seconds", seconds), ("batch-size", batch_size)):
        if value is not None and not value > 0:
            raise InputError(f"--{name} must be positive, got {value:g}")
    given = dict(models=models, dtype=dtype, only=only, batch_size=batch_size, deterministic=deterministic)
    settings, end = SimpleNamespace(**given), time.monotonic() + (seconds or SECONDS * len(models))
    told: dict[str, set] = dict(done=set(), kept=set(), end=set())
    with gpu_lock():
        try:
            while not told["end"]:
                process, connection = start(settings, told["done"], max(1.0, end - time.monotonic()))
                try:
                    _follow(process, connection, told)
                finally:
                    process.kill()
        finally:
            print(f"{len(told['kept'])} tiles faster than before, kept in {tiles.user_table_path()}", flush=True)
    if told["end"] != {True}:
        print("Not everything was tried: the same command goes on from here.")
    return 0


def _follow(process, connection: Connection, told: dict[str, set]) -> None:
    """Adds what a worker tells until it ends; refuses the candidate that it was lost with."""
    candidate, kind = None, ""
    while kind != "end":
        try:
            heard = connection.poll(HANGS if candidate else None)
            kind, value = connection.recv() if heard else ("lost", f"has not ended after {HANGS} s")
        except EOFError:
            process.join()
            kind, value = "lost", f"has ended its process with exit code {process.exitcode}"
        if kind == "error":
            raise InputError(value)
        if kind == "lost":
            if candidate is None:
                raise RuntimeError(f"vitfast tune {value}, between two candidates")
            user_table.refuse(candidate, value)
            name = f"{candidate['op']} {candidate['shape']}, {tiles.from_record(candidate)}"
            print(f"vitfast: {name} {value}; it is not tried again", file=sys.stderr, flush=True)
            return
        if kind == "trying":
            candidate = value
        else:
            told[kind].add(value)


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
