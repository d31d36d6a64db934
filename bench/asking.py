"""The form of a question to a GPU (questions.py), and how a result file answers it."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROW = 0.3  # ms: what a row of README's table is worth


@dataclass(frozen=True)
class Rivals:
    """Settings or implementations that rivals.py times in turns.

    what: "train", "throughput" or "latency" of whole models, whose names are settings of bench_model; or a row of
    bench_ops and a direction, as in "attention forward", whose names are its implementations. shape: "B/16 224 B256";
    throughput takes its own batch. "NAME | OPERATION=PROVIDER" is a variant, which no table shows, and so is "NAME |
    pdl=off", without programmatic dependent launch.
    """

    what: str
    shape: str
    names: tuple[str, ...]

    kind = "rivals"

    @property
    def operation(self) -> tuple[str, str] | None:
        """The row of bench_ops and the direction; None for whole models."""
        op, _, direction = self.what.rpartition(" ")
        return (op, direction) if op else None

    def case(self, name: str) -> dict[str, str]:
        """The names that pytest gives to the case which times the same as this rival."""
        module, test, where = "bench_model", self.what, f"{self.shape}-{name}"
        if self.operation:
            module, (test, direction) = "bench_ops", self.operation
            where = f"{self.shape}-{direction}-{name}"
        elif test == "throughput":
            where = f"{self.shape.rpartition(' ')[0]}-{name}"
        name = f"test_{test.replace(' ', '_')}[{where}]"
        return dict(name=name, fullname=f"bench/{module}.py::{name}")


@dataclass(frozen=True)
class Command:
    """Another command of a question: pytest ("bench", "tests") with arguments, or "doctor"."""

    kind: str
    arguments: tuple[str, ...] = ()


# Reads the number that decides from the content of a result file, or from {"code": exit code} where there is none.
Reading = Callable[[dict], float]


@dataclass(frozen=True)
class Prediction:
    """An expectation in words, the number that decides, and the least or the most that it should be."""

    text: str
    reads: Reading
    least: float = -math.inf
    most: float = math.inf

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True)
class Question:
    """A question to a GPU.

    follows: what changes where the prediction holds, and where it does not. seconds: how long all of it takes, 120 at
    most, an estimate unless `measured`. files: patterns of the files whose code it is about. worth: the ms of a step of
    B/16 that depend on it. rows: (target, figure) of README's table -> the value that is predicted.
    """

    name: str
    asks: str
    run: Rivals | Command
    prediction: Prediction
    follows: tuple[str, str]
    seconds: int
    files: tuple[str, ...]
    worth: float = 0.0
    rows: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    measured: bool = False

    # whether what runs writes a result file, and what README's first row calls the exit code of what writes none
    has_results = property(lambda self: self.run.kind in ("rivals", "bench"))
    check = property(lambda self: "" if self.has_results else self.name.replace("_", " "))
    # in ms of a step of B/16, with the rows of README's table
    total_worth = property(lambda self: self.worth + ROW * (len(self.rows) + bool(self.check)))


def faster(ours: str, theirs: str = "", by: str = "ms") -> Reading:
    """How many times as fast `ours` is as `theirs`, or as the best of all others, by the time `by`."""

    def reads(content: dict) -> float:
        times = {name: rival[by] for name, rival in content["rivals"].items() if name != ours}
        return (times[theirs] if theirs else min(times.values())) / content["rivals"][ours][by]

    return reads


def peaks(ours: str, theirs: str) -> Reading:
    """The peak memory of one rival divided by that of another."""

    def reads(content: dict) -> float:
        first, second = (content["rivals"][name]["peak_mib"] for name in (ours, theirs))
        if not (first and second):
            raise ValueError("no peak memory is known here")
        return first / second

    return reads


def info(key: str, factor: float = 1.0) -> Reading:
    """A number in the extra_info of the first case, which is ours where others are beside it."""
    return lambda content: factor * content["benchmarks"][0]["extra_info"][key]


def pair(content: dict) -> float:
    """The images per second of vitfast's case divided by those of timm's."""
    cases = [case["extra_info"] for case in content["benchmarks"]]
    speed = {case["impl"].split()[0]: case["images_per_second"] for case in cases}
    return speed["vitfast"] / speed["timm"]


def curves(content: dict) -> float:
    """The largest difference of two libraries' losses in a window of steps."""
    ours, theirs = (case["extra_info"]["losses"] for case in content["benchmarks"])
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def exit_code(content: dict) -> float:
    """The exit code of pytest or doctor, 0 or 1. Raises ValueError for others, which answer nothing."""
    if content["code"] not in (0, 1):
        raise ValueError(f"exit code {content['code']}")
    return content["code"]


# ---- answers

FORM = dict(question=str, asks=str, gpu=str, answered=str, commit=str, state=str, seconds=int, files=dict)
FORM |= dict(settled=bool, predicted=str, measured=str, follows=str)


def read_answer(path: Path) -> dict:
    """An answer that decide.py has written. Raises ValueError where it is damaged."""
    answer = json.loads(path.read_text())
    if not isinstance(answer, dict):
        raise ValueError("it is no answer")
    if wrong := [key for key, kind in FORM.items() if not isinstance(answer.get(key), kind)]:
        raise ValueError(f"it lacks {', '.join(wrong)}")
    return answer
