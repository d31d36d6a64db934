"""Which question of questions.py is next on this GPU, and what a step answers.

Answers are in FOLDER/answers, where FOLDER is gpu.sh's OUT, and, committed, in bench/results/*/answers: one file for
each question, with the GPU, and a hash of every file that the question speaks of.
"""

import datetime
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from asking import Question, read_answer
from questions import QUESTIONS, QUEUE

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def contents(patterns: Iterable[str]) -> dict[str, str]:
    """The hash of each file that one of these patterns names, by its path."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return {str(path.relative_to(ROOT)): _hash(path) for path in sorted(found)}


def asked(name: str) -> dict[str, str]:
    """The hashes of a question's files and of what it runs, for which an answer holds."""
    what = hashlib.sha256(repr(QUESTIONS[name].run).encode()).hexdigest()[:12]
    return {"what is run": what} | contents(QUESTIONS[name].files)


def changed(answer: dict) -> list[str]:
    """The files that have changed since an answer was given; none if its question is asked no longer."""
    before = answer["files"]
    now = asked(answer["question"]) if answer["question"] in QUESTIONS else before
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def predictions() -> dict[tuple[str, str], float]:
    """(target, figure) of README's table -> the value that the first question about it predicts."""
    return {row: value for question in reversed(QUEUE) for row, value in question.rows.items()}


def read_all(paths: Iterable[Path]) -> Iterator[dict]:
    """The answers in these files; one that is damaged is named and left out."""
    for path in paths:
        try:
            yield read_answer(path)
        except (OSError, ValueError) as error:
            print(f"{path} is left out: {error}", file=sys.stderr)


def answers(gpu: str, folder: Path) -> dict[str, dict]:
    """The answer of each question on this GPU, from the run's folder and the committed ones.

    Of several answers the newest counts that settles it for the current contents of its files, else the newest.
    """
    found = {}
    for answer in read_all((*folder.glob("answers/*.json"), *ROOT.glob("bench/results/*/answers/*.json"))):
        if answer["gpu"] == gpu:
            found.setdefault(answer["question"], []).append(answer)
    rank = lambda answer: (answer["settled"] and not changed(answer), answer["answered"])  # noqa: E731
    return {name: max(each, key=rank) for name, each in found.items()}


def is_open(name: str, known: dict[str, dict]) -> bool:
    """Whether no answer settles a question for the current contents of its files."""
    return name not in known or not known[name]["settled"] or bool(changed(known[name]))


def seconds(question: Question, known: dict[str, dict]) -> int:
    """Seconds that the question took here last time, unless it broke off, or else its estimate."""
    last = known.get(question.name, dict(state="none"))
    return max(1, last["seconds"]) if last["state"] in ("ok", "timed out") else question.seconds


def limit(question: Question, known: dict[str, dict]) -> int:
    """The most seconds that a question may take."""
    return min(150, 10 + 3 * max(question.seconds, seconds(question, known)) // 2)


def hindrance(question: Question, known: dict[str, dict], left: float) -> str:
    """Why a question cannot be asked here and now, or ""."""
    if question.run.kind == "tests" and not (ROOT / "tests").is_dir():
        return "an installed package has no tests"
    took = seconds(question, known)
    return f"it takes {took} s" if took > left else ""


def following(known: dict[str, dict], tried: Iterable[str], left: float, only: list[str]) -> Question | None:
    """The question that is asked next: of the open ones that fit, the one of the most worth per second."""
    found = []
    for question in (q for q in QUEUE if q.name not in tried):
        why = hindrance(question, known, left)
        if why and question.name in only:
            print(f"{question.name} is not asked: {why}", file=sys.stderr)
        if not why and (question.name in only or (not only and is_open(question.name, known))):
            found.append(question)
    return max(found, key=lambda q: q.total_worth / seconds(q, known), default=None)


def announcement(question: Question, known: dict[str, dict]) -> str:
    """A line on what is asked, what is predicted, and how long it takes."""
    last = known.get(question.name, {})
    expected = f"{seconds(question, known)} s" + ("" if last or question.measured else " by estimate")
    return f"{question.asks} Predicted: {question.prediction.text} ({expected})"


def measured(content: dict) -> str:
    """The times of the rivals, or how a command ended."""
    words = [content["said"]] if "rivals" not in content else []
    for name, rival in content.get("rivals", {}).items():
        host = f" (host {rival['host_ms']:.3g})" if "host_ms" in rival else ""
        words.append(f"{name} {rival['ms']:.4g} ms{host}")
    words += [f"{name}: {reason[:160]}" for name, reason in content.get("missing", {}).items()]
    if content.get("compiled"):
        words.append(f"{content['compiled']} kernels of ours were compiled first")
    return "; ".join(words)


def answer(folder: Path, step: dict, machine: str) -> dict:
    """The answer that a step gives, written whole or not at all."""
    name, state = step["name"], step["state"]
    question, content = QUESTIONS[name], read_result(folder, step)
    if question.check and not content["tested"]:
        state = "skipped"
    found = dict(question=name, gpu=gpu_of(machine), machine=machine, state=state, seconds=round(step["seconds"]))
    found |= dict(answered=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    found |= dict(commit=os.environ.get("VITFAST_COMMIT") or "unknown", files=asked(name), asks=question.asks)
    found |= dict(predicted=question.prediction.text, measured=measured(content), rivals=content.get("rivals"))
    found |= dict(settled=False, follows=f"no answer: {state}")
    missing = content.get("missing") or {case["name"]: case["reason"] for case in content.get("failed", [])}
    if state in ("ok", "failed"):
        try:
            if missing:
                raise ValueError(f"{next(iter(missing))} has no time")
            value = question.prediction.reads(content)
            holds = question.prediction.holds(value)
            found |= dict(value=value, holds=holds, follows=question.follows[0 if holds else 1], settled=True)
            found["measured"] += f": {value:.3g}" if question.has_results else ""
            found |= dict(check=question.check, code=step["code"]) if question.check else {}
        except (KeyError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            # what is wrong or breaks stays so until its files change; what had too little time is asked again
            lasting = any(not reason.startswith("TimeoutError") for reason in missing.values())
            found |= dict(follows=f"no answer: {error if missing else repr(error)}", settled=lasting)
    path = folder / "answers" / f"{name}.json"
    # one that settles nothing does not replace one that does
    if found["settled"] or not any(before["settled"] for before in read_all([path] * path.is_file())):
        write(path, found)
    return found


def read_result(folder: Path, step: dict) -> dict:
    """The contents of a step's files: its JSON, exit code, end of the log, and whether a test ran."""
    log, path = (folder / f"{step['name']}.{kind}" for kind in ("log", "json"))
    text = log.read_text(errors="replace") if log.is_file() else ""
    last = next(filter(None, (line.strip(" =") for line in reversed(text.splitlines()))), "")
    content = dict(code=step["code"], said=f"exit code {step['code']}: {last[:160]}")
    # pytest's 5: there is no such test
    only_skipped = step["code"] == 0 and re.search("[0-9] skipped", text) and not re.search("[0-9] passed", text)
    content["tested"] = step["code"] != 5 and not only_skipped
    try:
        content |= json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        content["said"] = f"{path.name} is damaged: {error}"
    return content


def write(path: Path, content: dict) -> None:
    """Writes JSON, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".part").replace(path)


def gpu_of(machine: str) -> str:
    """The kind of GPU, by its name."""
    return machine.partition(", torch ")[0]
