"""`vitfast tune`: the models one after the other, within the time that is given."""

import contextlib
import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import torch

from ..errors import InputError, unknown
from ..kernels import tiles
from ..verify.draw import Sizes
from . import user_table
from .trial import DeviceClock
from .tuner import HANGS, DeviceLost, Tuner

# The batch: its rows fill whole tiles but for the last one, so that what reaches past the end is seen.
MODELS = {
    "S/16": Sizes.of_preset("S/16", batch=240),
    "B/16": Sizes.of_preset("B/16", batch=112),
    "B/16 384": Sizes.of_preset("B/16", batch=48, image=384),
    "L/16": Sizes.of_preset("L/16", batch=80),
    "H/14": Sizes.of_preset("H/14", batch=48),
}
SECONDS = 400  # for each model
GOES_ON = "VITFAST_TUNE_GOES_ON"  # environment: what a process that lost its GPU hands to the one it becomes


def machine() -> tuple:
    """(device, the GPU's name, clock, compiler) of this machine.

    Raises InputError without a GPU, in Triton's interpreter, and where another process tunes this GPU.
    """
    from ..machine_code.compiler import Compiler  # whose import takes half a second

    if not torch.cuda.is_available():
        raise InputError("tuning measures times on a GPU, and there is none here")
    device = torch.device("cuda")
    compiler = Compiler(tiles.capability(device))
    compiler.lock = user_table.only_one(str(torch.cuda.get_device_properties(device).uuid))
    return device, torch.cuda.get_device_name(), DeviceClock(device), compiler


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
    candidates. Raises InputError for what `machine` refuses, for wrong options, and for an `only` that no operation has
    in its name.
    """
    for name in models:
        if name not in MODELS:
            raise unknown("model", name, MODELS)
    for name, value in (("seconds", seconds), ("batch-size", batch_size)):
        if value is not None and not value > 0:
            raise InputError(f"--{name} must be positive, got {value:g}")
    device, gpu, clock, compiler = machine()
    if deterministic:  # which the libraries' own predicate asks for (kernels/attention_libraries.py)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    earlier = json.loads(os.environ.pop(GOES_ON, "{}"))
    done, kept = ({tuple(key) for key in earlier.get(name, [])} for name in ("done", "kept"))
    end = clock.now() + earlier.get("left", seconds or SECONDS * len(models))
    finished, found, tuner = True, bool(done), None

    def go_on() -> None:
        """Becomes a new process that tunes what is left: this one's GPU does not answer any more."""
        compiler.close()
        state = dict(done=[*done], kept=[*kept | tuner.kept], left=max(1.0, end - clock.now()))
        os.environ[GOES_ON] = json.dumps(state)
        command = [sys.executable, "-m", "vitfast", "tune", "--model", *models[models.index(model) :]]
        command += ["--dtype", str(dtype).removeprefix("torch."), *(["--only", only] if only else [])]
        command += [] if batch_size is None else ["--batch-size", str(batch_size)]
        command += ["--deterministic"] if deterministic else []
        sys.stdout.flush()
        os.execv(sys.executable, command)

    def hung() -> None:
        print(f"vitfast: a candidate has not ended after {HANGS} s; it is not tried again", file=sys.stderr, flush=True)
        go_on()

    try:
        for number, model in enumerate(models):
            begun = clock.now()
            sizes = MODELS[model] if batch_size is None else dataclasses.replace(MODELS[model], batch=batch_size)
            tuner = Tuner(dtype, device, gpu, clock, compiler, (end - begun) / (len(models) - number), hung=hung)
            problems = tuner.problems(sizes, only, frozenset(done))
            if not problems and not found:
                raise InputError(f"no operation has {only!r} in its name; there are {', '.join(tiles.RULES)}")
            found = True
            with _bar(len(problems), model) as (bar, say):
                for outcome in tuner.run(problems):
                    if outcome.finished:
                        done.add(outcome.problem.key)
                    finished &= outcome.finished
                    say(str(outcome))
                    bar.update()
                    left = f"at most {max(0.0, tuner.left):.0f} s more"
                    bar.set_postfix_str(f"{len(tuner.kept)} faster, {tuner.timings} timed, {left}")
            finished &= not tuner.unreached
            kept |= tuner.kept
            counts = f"{compiler.compilations} compilations, {tuner.checks} results checked, {tuner.timings} timings"
            print(f"{model}: {counts}, {clock.now() - begun:.0f} s")
    except DeviceLost as error:
        print(f"vitfast: {error}", file=sys.stderr, flush=True)
        go_on()
    finally:
        compiler.close()
        kept |= tuner.kept if tuner else set()
        print(f"{len(kept)} tiles faster than before, kept in {tiles.user_table_path()}", flush=True)
    if not finished:
        print("Not everything was tried: the same command goes on from here.")
    return 0


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
