"""The results of a GPU, read from the JSON files of a folder.

Two kinds of files: pytest-benchmark's, as conftest.py writes them; and steps_*.json of gpu.sh, {"steps": [{name,
state, code, seconds}]}. answers/ holds those to the questions of questions.py (decide.py). A file that is damaged or
half written, or lacks what a table needs, is named with the reason, and the others count.

Where several files hold a case, its newest state counts, by the files' datetime: a newer failure replaces an older
time. Only a skip ("not run" is one too) says nothing new, so it hides neither an older time nor an older failure.
A ratio is of two cases of one run: of one machine, commit and versions, and both timed in turns (rivals.py) or neither.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from asking import read_answer

LIBRARIES = ("vitfast", "vitfast.accelerate(timm)", "vitfast backend (timm)", "timm", "huggingface", "torchvision")
VITFAST, ACCELERATED, BACKEND, *PEERS = LIBRARIES
WHOLE_MODELS = ("train", "throughput", "latency", "train packed", "train from JPEG files")

# The keys that every case must have, with a time or without, and those that cases of some operations must have besides.
MISSED = ("name", "fullname", "reason")
INFO = "op impl shape direction dtype flops bytes percent_of_floor tflops gigabytes_per_second peak_mib median iqr"
MODEL_INFO = "precision attention batch images_per_second model_flops mfu_ceiling mfu_datasheet"
MORE_INFO = dict.fromkeys(WHOLE_MODELS, MODEL_INFO) | {
    "train from JPEG files": "images_per_second images_per_second_in_memory waiting_for_data workers",
    "loss curve": "precision seed losses",
}


@dataclass
class Results:
    """The cases of one GPU, with and without a time, each by full name.

    A case with a time has what its extra_info has, its name, its median and iqr in seconds, its file and machine.
    """

    name: str
    machines: list[dict] = field(default_factory=list)
    measured: dict[str, dict] = field(default_factory=dict)
    runs: dict[str, dict[str, dict]] = field(default_factory=dict)  # the cases with a time of each run, oldest first
    missing: dict[str, dict] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)  # exit codes
    damaged: dict[str, str] = field(default_factory=dict)  # file name -> what is wrong with it
    answers: list[dict] = field(default_factory=list)  # those to questions of questions.py, oldest first

    def of(self, *ops: str) -> list[dict]:
        return [case for case in self.measured.values() if case["op"] in ops]

    def by_run(self) -> list["Results"]:
        """The results of each run alone, the newest first."""
        return [replace(self, measured=cases) for cases in reversed(self.runs.values())] or [self]

    def grouped(self, key: Callable[[dict], str], *ops: str) -> dict[str, list[dict]]:
        """The cases of these operations, or of all, by a function of a case; in the order of `ops`."""
        groups = {}
        for case in [case for op in ops for case in self.of(op)] if ops else self.measured.values():
            groups.setdefault(key(case), []).append(case)
        return groups


def library(case: dict) -> str:
    """The library whose model a case measures."""
    return next(name for name in reversed(LIBRARIES) if case["impl"].startswith(f"{name} "))


def counted(cases: list[dict]) -> list[dict]:
    """The cases of whole models; of a setting that was measured again, only the slower case."""
    slowest = {}
    for case in sorted(cases, key=lambda case: -case["images_per_second"]):
        slowest[case["impl"].removesuffix(" again"), case["shape"]] = case
    return list(slowest.values())


def _add_steps(results: Results, content: dict, name: str) -> None:
    for check, code in content.get("checks", {}).items():  # as steps were recorded before checks became questions
        results.checks[check] = code
        if code != 0:
            results.missing[f"{name}::{check}"] = dict(name=check, state="failed", reason=f"exit code {code}")
    for step in content["steps"]:
        if step["state"] != "ok":
            reason = f"exit code {step['code']} after {step['seconds']} s"
            results.missing[f"{name}::step {step['name']}"] = dict(step, name=f"step {step['name']}", reason=reason)


def _add_benchmarks(results: Results, content: dict, name: str) -> None:
    """Adds a file of conftest.py, newer than all before.

    Raises, before anything is added, where it lacks something.
    """
    machine = content["machine_info"]["vitfast"]
    failed, skipped = content["failed"], content["skipped"]
    lacking = [key for key in ("device", "ceilings") if key not in machine]
    lacking += [f"the {key} of a case" for key in MISSED if any(key not in case for case in failed + skipped)]
    if lacking:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    cases = {}
    for case in content["benchmarks"]:
        found = case["stats"] | case["extra_info"] | dict(name=case["name"], file=name, machine=machine)
        needed = f"{INFO} {MORE_INFO.get(found['op'], '')}".split()
        if lacking := [key for key in needed if key not in found]:
            raise ValueError(f"{case['fullname']} lacks {', '.join(lacking)}")
        cases[case["fullname"]] = found
    facts = {key: fact for key, fact in machine.items() if key != "ceilings"}
    run = results.runs.setdefault(str(facts | {"in turns": "rivals" in content}), {})
    for name, case in cases.items():
        results.missing.pop(name, None)
        results.measured[name] = run[name] = case
    for case in failed:
        for times in (results.measured, *results.runs.values()):
            times.pop(case["fullname"], None)
        results.missing[case["fullname"]] = dict(case, state="failed")
    for case in skipped:
        if case["fullname"] not in results.measured:
            results.missing.setdefault(case["fullname"], dict(case, state="skipped"))
    if machine not in results.machines:
        results.machines.append(machine)


def load(folder: Path) -> Results:
    """All result files of a folder, oldest first, those without a date (and a case) before the others."""
    results, files = Results(folder.name), []
    for path in sorted(folder.glob("answers/*.json")):
        try:
            results.answers.append(read_answer(path))
        except (OSError, ValueError) as error:
            results.damaged[f"answers/{path.name}"] = f"{type(error).__name__}: {error}"
    results.answers.sort(key=lambda answer: answer["answered"])
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            if isinstance(content, dict):  # other files are not ours
                files.append((str(content.get("datetime", "")), path.name, content))
        except (OSError, ValueError) as error:
            results.damaged[path.name] = f"{type(error).__name__}: {error}"
    for _, name, content in sorted(files, key=lambda file: file[:2]):
        try:
            if "benchmarks" in content:
                _add_benchmarks(results, content, name)
            elif "steps" in content:
                _add_steps(results, content, name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            results.damaged[name] = f"{type(error).__name__}: {error}"
    results.checks |= {answer["check"]: answer["code"] for answer in results.answers if "check" in answer}
    return results
