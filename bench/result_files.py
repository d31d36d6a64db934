"""The results of a GPU, read from the files of a folder, each checked before anything of it counts.

A file that is damaged or half written, or that lacks what a table needs, is named with the reason, and the others
count. A file with exit codes has {"checks": {name: code}}, where a dictionary with "code" and "reason" may stand for a
code; beside it there may be lists "failed" and "skipped" of names or {name, reason}, and "steps" of {name, state, code,
seconds} (bench/gpu.sh).

Of a case that several files hold the newest state counts, by the files' datetime: a newer failure takes the place of an
older time. Only a skip ("not run" is one too) says nothing new, so it hides neither an older time nor an older failure.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from targets import LIBRARIES


@dataclass
class Results:
    """The cases of one GPU, with and without a time, each by full name."""

    name: str
    machines: list[dict] = field(default_factory=list)
    measured: dict[str, dict] = field(default_factory=dict)  # each with the "ceilings" of its own file
    missing: dict[str, dict] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)  # exit codes
    damaged: dict[str, str] = field(default_factory=dict)  # file name -> what is wrong with it
    curves: dict = field(default_factory=dict)  # what curves.py wrote

    def of(self, *ops: str) -> list[dict]:
        return [case for case in self.measured.values() if case["extra_info"]["op"] in ops]


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _amount(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _positive(value: object) -> bool:
    return _amount(value) and value > 0


def _maybe(right: Callable) -> Callable:
    return lambda value: value is None or right(value)


def _is(kind: type) -> Callable:
    return lambda value: isinstance(value, kind)


STATS = dict(median=_positive, iqr=_amount)
INFO = {  # of every case
    **dict.fromkeys(("op", "impl", "shape", "direction", "dtype"), _text),
    **dict.fromkeys(("flops", "bytes", "percent_of_floor", "tflops", "gigabytes_per_second"), _amount),
}
MODEL_INFO = {
    "impl": lambda value: _text(value) and value.startswith(tuple(f"{name} " for name in LIBRARIES)),
    "shape": lambda value: _text(value) and " B" in value,
    **dict.fromkeys(("precision", "attention"), _text),
    **dict.fromkeys(("batch", "images_per_second"), _positive),
    **dict.fromkeys(("model_flops", "mfu_ceiling"), _amount),
    **dict.fromkeys(("mfu_datasheet", "peak_mib", "error"), _maybe(_amount)),
    "largest_batch": _maybe(_is(dict)),
}
FILES_INFO = dict(
    images_per_second=_positive, images_per_second_in_memory=_positive, waiting_for_data=_amount, workers=_amount
)
PACKED_INFO = dict(images=_positive, tokens=_positive, padded_share=_maybe(_amount), peak_mib=_maybe(_amount))
MORE_INFO = {"train": MODEL_INFO, "throughput": MODEL_INFO, "latency": MODEL_INFO, "train from JPEG files": FILES_INFO}
MORE_INFO |= {"packed attention": PACKED_INFO, "train packed": PACKED_INFO}
CURVES = dict(steps=_amount, runs=_amount, planned=_amount, precision=_text, distance=_maybe(_amount))


def _need(found: object, kinds: dict[str, Callable], where: str) -> None:
    """Raises ValueError, naming the key, where `found` lacks one of these or holds something unfit."""
    for key, fits in kinds.items():
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"{where}{key} is missing")
        if not fits(found[key]):
            raise ValueError(f"{where}{key} is {found[key]!r}")


def _add_checks(results: Results, content: dict, name: str) -> None:
    """Exit codes, and what failed or was skipped without a time, of a file like checks.json."""
    content = dict(checks={}, steps=[], skipped=[], failed=[]) | content
    _need(content, dict(checks=_is(dict), steps=_is(list), skipped=_is(list), failed=_is(list)), "")
    checks, missing = {}, {}
    for check, code in content["checks"].items():
        entry = code if isinstance(code, dict) else dict(code=code)
        code, reason = entry.get("code"), entry.get("reason", "")
        if isinstance(code, int):
            checks[check] = code
        if code != 0:
            state, why = ("failed", f"exit code {code}") if isinstance(code, int) else ("skipped", str(code or ""))
            missing[f"{name}::{check}"] = dict(name=check, state=state, reason=reason or why)
    for step in content["steps"]:
        _need(step, dict(name=_text, state=_text), "steps: ")
        if step["state"] != "ok":
            reason = "" if step.get("code") is None else f"exit code {step['code']} after {step.get('seconds', '?')} s"
            missing[f"{name}::step {step['name']}"] = dict(step, name=f"step {step['name']}", reason=reason)
    for state in ("skipped", "failed"):
        for entry in content[state]:
            entry = entry if isinstance(entry, dict) else dict(name=str(entry))
            case = dict(name=str(entry.get("name", "?")), state=state, reason=entry.get("reason", ""))
            missing[f"{name}::{entry.get('fullname', case['name'])}"] = case
    results.checks.update(checks)
    results.missing.update(missing)


def _add_benchmarks(results: Results, content: dict) -> None:
    """Adds a file of conftest.py, newer than all before; ValueError where a table lacks something."""
    _need(content, dict(benchmarks=_is(list), failed=_is(list), skipped=_is(list), machine_info=_is(dict)), "")
    machine = content["machine_info"].get("vitfast")
    _need(machine, dict(device=_text, ceilings=_is(dict)), "machine_info.vitfast.")
    ceilings = machine["ceilings"]
    _need(ceilings, dict.fromkeys(ceilings, _maybe(_positive)) | dict(copy=_positive), "ceilings.")
    _need(dict(datasheet_bf16_flops=None) | machine, dict(datasheet_bf16_flops=_maybe(_positive)), "")
    for case in content["benchmarks"]:
        _need(case, dict(name=_text, fullname=_text, stats=_is(dict), extra_info=_is(dict)), "benchmarks: ")
        info = dict(error=None, largest_batch=None) | case["extra_info"]
        _need(case["stats"], STATS, f"{case['name']}: stats.")
        _need(info, INFO | MORE_INFO.get(info.get("op"), {}), f"{case['name']}: extra_info.")
        _need(ceilings, {info["dtype"]: _positive}, f"{case['name']}: ceilings.")
    for case in content["failed"] + content["skipped"]:
        _need(case, dict(name=_text, fullname=_text), "failed or skipped: ")
    for case in content["benchmarks"]:
        results.missing.pop(case["fullname"], None)
        results.measured[case["fullname"]] = dict(case, ceilings=ceilings)
    for case in content["failed"]:
        results.measured.pop(case["fullname"], None)
        results.missing[case["fullname"]] = dict(case, state="failed")
    for case in content["skipped"]:
        before = results.missing.get(case["fullname"], {}).get("state")
        if case["fullname"] not in results.measured and before != "failed":
            results.missing[case["fullname"]] = dict(case, state="skipped")
    if machine not in results.machines:
        results.machines.append(machine)


def _written(content: dict) -> datetime:
    """When a file was written; one without benchmarks comes before all others."""
    if "benchmarks" not in content:
        return datetime.min.replace(tzinfo=timezone.utc)
    found = datetime.fromisoformat(content["datetime"])
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def load(folder: Path) -> Results:
    """All result files of a folder, oldest first.

    One that cannot be used is named in `damaged`, and adds nothing. A case is in `measured` or in `missing`, as the
    newest file has it that measured it or in which it failed. A skip counts where no file has more to say.
    """
    results, files = Results(folder.name), []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            if isinstance(content, dict):
                files.append((_written(content), path.name, content))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            results.damaged[path.name] = f"{type(error).__name__}: {error}"
    for _, name, content in sorted(files, key=lambda file: file[:2]):
        try:
            if "benchmarks" in content:
                _add_benchmarks(results, content)
                continue
            if "curves" in content:
                _need(content["curves"], CURVES, "curves.")
            if "checks" in content or "steps" in content:
                _add_checks(results, content, name)
            results.curves = content.get("curves", results.curves)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            results.damaged[name] = f"{type(error).__name__}: {error}"
    return results


def by_model(results: Results, op: str) -> dict[str, list[dict]]:
    """Model and resolution -> its cases, of any batch: each library has its own best one."""
    groups = {}
    for case in results.of(op):
        groups.setdefault(case["extra_info"]["shape"].rpartition(" B")[0], []).append(case)
    return groups


def plotted(results: Results) -> dict[str, tuple[str, str]]:
    """The plots that this GPU's results give: file name -> (kind, op)."""
    infos = [case["extra_info"] for case in results.measured.values()]
    plots = [("roofline", op) for op in dict.fromkeys(i["op"] for i in infos if "images_per_second" not in i)]
    plots += [(kind, op) for op in ("train", "throughput") if results.of(op) for kind in ("speed", "memory")]
    return {f"{kind}-{op}.svg".replace(" ", "-"): (kind, op) for kind, op in plots}
