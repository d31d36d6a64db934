"""The next question of questions.py on this GPU, and the answers, for gpu.sh's stage `decide`.

    python bench/decide.py next FOLDER --machine TEXT --left SECONDS [--only NAME...]
    python bench/decide.py answer FOLDER --machine TEXT
    python bench/decide.py archive FOLDER [ARCHIVE...] --machine TEXT

FOLDER is where the stage keeps its files; answers are in FOLDER/answers and, committed, in bench/results/*/answers: one
file for each question, with the GPU, and a hash of every file that the question speaks of. `answer` writes that of the
last step in FOLDER/steps_decide.json. `archive` says which open questions no archive of compiled kernels covers.
--machine: the GPU, then versions, as in "NVIDIA H200, torch 2.11.0".
"""

import argparse
import datetime
import fnmatch
import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from asking import Question, Rivals, read_answer
from questions import QUESTIONS, QUEUE

ROOT = Path(__file__).resolve().parents[1]
# The short check of right and wrong that comes first: names for `vitfast doctor --only`, and the files whose change
# asks for them; SHARED asks for all.
CHECK, CHECK_SECONDS = "check", 80
FAMILIES = {
    "layer_norm rms_norm": ("kernels/layer_norm/*.py"),
    "attention rope bias packed": ("kernels/attention/*.py"),
    "linear mlp": ("kernels/matmul/*.py", "kernels/libraries/cublaslt*"),
    "patch_embed": ("kernels/patch_embed/*.py"),
}
SHARED = ("kernels/rows.py", "kernels/launch.py", "kernels/tiles.py", "vitfast/ops/*.py")


@functools.cache
def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def contents(patterns: Iterable[str]) -> dict[str, str]:
    """The hash of each file that one of these patterns names, by its path."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return {str(path.relative_to(ROOT)): _hash(path) for path in sorted(found)}


def asked(name: str) -> dict[str, str]:
    """The contents of the question's files, and what is run: an answer is good for these."""
    if name == CHECK:
        return contents(pattern for patterns in (*FAMILIES.values(), SHARED) for pattern in patterns)
    what = hashlib.sha256(repr(QUESTIONS[name].run).encode()).hexdigest()[:12]
    return {"what is run": what} | contents(QUESTIONS[name].files)


def changed(answer: dict) -> list[str]:
    """The files that are not what they were when the answer was given; of a question that has left, none."""
    name, before = answer["question"], answer["files"]
    now = asked(name) if name == CHECK or name in QUESTIONS else before
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def families(files: list[str]) -> list[str]:
    """Names for `vitfast doctor --only` of the operations whose files these are."""
    match = lambda patterns: any(fnmatch.fnmatchcase(file, each) for file in files for each in patterns)  # noqa: E731
    return [name for names, of in FAMILIES.items() if match((*of, *SHARED)) for name in names.split()]


def predictions() -> dict[tuple[str, str], float]:
    """(target, figure) of README's table -> what is predicted of it; of several, the first question's."""
    return {row: value for question in reversed(QUEUE) for row, value in question.rows.items()}


def read_all(paths: Iterable[Path]) -> Iterator[dict]:
    """The answers in these files; one that is damaged is named and left out."""
    for path in paths:
        try:
            yield read_answer(path)
        except (OSError, ValueError) as error:
            print(f"{path} is left out: {error}", file=sys.stderr)


def answers(gpu: str, folder: Path) -> dict[str, dict]:
    """The answer of each question on this GPU, from the stage's folder and the committed ones.

    It is the newest that settles the question for the current contents of its files, else the newest.
    """
    found = {}
    for answer in read_all((*folder.glob("answers/*.json"), *ROOT.glob("bench/results/*/answers/*.json"))):
        if answer["gpu"] == gpu:
            found.setdefault(answer["question"], []).append(answer)
    rank = lambda answer: (answer["settled"] and not changed(answer), answer["answered"])  # noqa: E731
    return {name: max(each, key=rank) for name, each in found.items()}


def is_open(name: str, known: dict[str, dict]) -> bool:
    """Whether no answer settles it for the current contents of the question's files."""
    return name not in known or not known[name]["settled"] or bool(changed(known[name]))


def seconds(question: Question, known: dict[str, dict]) -> int:
    """Seconds that the question took here last time, unless it broke off, or else its estimate."""
    last = known.get(question.name, dict(state="none"))
    return max(1, last["seconds"]) if last["state"] in ("ok", "timed out") else question.seconds


def following(known: dict[str, dict], tried: Iterable[str], left: float, only: list[str]) -> Question | None:
    """The question that is asked next: of the open ones that fit, the one of the most worth per second."""
    found = []
    for question in (q for q in QUEUE if q.name not in tried):
        why = f"{question.needs} is not installed" * (
            bool(question.needs) and not importlib.util.find_spec(question.needs)
        )
        why = why or f"it takes {seconds(question, known)} s" * (seconds(question, known) > left)
        if why and question.name in only:
            print(f"{question.name} is not asked: {why}", file=sys.stderr)
        if not why and (question.name in only or (not only and is_open(question.name, known))):
            found.append(question)
    return max(found, key=lambda q: q.total_worth / seconds(q, known), default=None)


def steps(folder: Path) -> dict:
    """The steps of this run so far, as gpu.sh has written them."""
    path = folder / "steps_decide.json"
    return json.loads(path.read_text()) if path.is_file() else dict(steps=[], checks={})


def plan(folder: Path, gpu: str, left: float, only: list[str]) -> list[str]:
    """The lines that tell gpu.sh what to run next; none at the end.

    They are a sentence to print, the name, the kind, the most seconds, the name of the check, and the arguments.
    """
    known, tried = answers(gpu, folder), [step["name"] for step in steps(folder)["steps"]]
    if others := {answer["gpu"] for answer in read_all(folder.glob("answers/*.json"))} - {gpu}:
        sys.exit(f"OUT holds answers of {', '.join(others)}: give another folder for {gpu}")
    if CHECK not in tried and not only:
        if names := families(changed(known.get(CHECK, dict(question=CHECK, files={})))):
            arguments = ["--dtype", "bfloat16", *(word for name in names for word in ("--only", name))]
            what = "right or wrong: the operations whose kernels have changed since they were last checked here"
            return [what, CHECK, "doctor", str(CHECK_SECONDS), "", *arguments]
    question = following(known, tried, left, only)
    if question is None:
        return []
    kind, arguments = "rivals", [question.name]
    if not isinstance(question.run, Rivals):
        kind, arguments = question.run.kind, question.run.arguments
    last = known.get(question.name, {})
    expected = f"{seconds(question, known)} s" + ("" if last or question.measured else " by estimate")
    expected += f", of which {last['ready']:.0f} until all could run" if last.get("ready") else ""
    limit = min(150, 10 + 3 * max(question.seconds, seconds(question, known)) // 2)
    what = f"{question.asks} Predicted: {question.prediction.text} ({expected})"
    return [what, question.name, kind, str(limit), question.check, *arguments]


def measured(content: dict) -> str:
    """The times of the rivals, with power and clock, or how a command ended."""
    words = [content["said"]] if "rivals" not in content else []
    for name, rival in content.get("rivals", {}).items():
        power = " at {watts:.0f} W and {mhz:.0f} MHz".format(**rival) if rival.get("watts") and rival.get("mhz") else ""
        words.append(f"{name} {rival['ms']:.4g} ms{power}")
    words += [f"{name}: {reason[:160]}" for name, reason in content.get("missing", {}).items()]
    if content.get("compiled"):
        words.append(f"{content['compiled']} kernels of ours were compiled first")
    return "; ".join(words)


def answer(folder: Path, machine: str) -> dict:
    """The answer that the last step gives, written whole or not at all."""
    run = steps(folder)
    step, question = run["steps"][-1], QUESTIONS.get(run["steps"][-1]["name"])
    found = dict(question=step["name"], gpu=gpu_of(machine), machine=machine, state=step["state"])
    found |= dict(answered=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    found |= dict(seconds=round(step["seconds"]), commit=os.environ.get("VITFAST_COMMIT") or "unknown")
    content = dict(code=step["code"], said=_said(folder, step))
    if question is None:  # the short check
        right = step["state"] == "ok"
        found |= dict(asks="right or wrong", predicted="all right", measured=content["said"], settled=right)
        found |= dict(files=asked(CHECK) if right else {}, follows="nothing" if right else "it is mended first")
        return _write(folder, found)
    path = folder / f"{step['name']}.json"
    try:
        content |= json.loads(path.read_text()) if path.is_file() and question.has_results else {}
    except ValueError as error:
        content["said"] = f"{path.name} is damaged: {error}"
    if question.check and run["checks"].get(question.check) is None:
        found["state"] = "skipped"  # no test ran
    ready = sum(rival["ready_s"] for rival in content.get("rivals", {}).values()) or None
    found |= dict(asks=question.asks, predicted=question.prediction.text, measured=measured(content))
    found |= dict(files=asked(step["name"]), ready=ready, rivals=content.get("rivals"), settled=False)
    found |= dict(follows=f"no answer: {found['state']}")
    missing = content.get("missing") or {case["name"]: case["reason"] for case in content.get("failed", [])}
    if found["state"] in ("ok", "failed"):
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
    return _write(folder, found)


def _write(folder: Path, found: dict) -> dict:
    """Keeps an answer, unless it settles nothing and the one that is there does."""
    path = folder / "answers" / f"{found['question']}.json"
    if not found["settled"] and any(answer["settled"] for answer in read_all([path] * path.is_file())):
        return found
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".part").replace(path)
    return found


def _said(folder: Path, step: dict) -> str:
    """How a command ended: its exit code and the last line of its log."""
    log = folder / f"{step['name']}.log"
    lines = [line.strip(" =") for line in log.read_text(errors="replace").split("\n")] if log.is_file() else []
    return f"exit code {step['code']}: {next(filter(None, reversed(lines)), '')[:160]}"


def gpu_of(machine: str) -> str:
    """The kind of GPU, by its name."""
    return machine.partition(", torch ")[0]


def covered(name: str) -> str:
    """The name of a question in an archive's manifest: with what is run, which may change."""
    return f"{name}@{asked(name)['what is run']}"


def uncovered(files: list[Path], gpu: str, folder: Path) -> str:
    """Why kernels will be compiled for open questions, or ""; files: archives of archive.py."""
    import torch

    from vitfast.kernels import archives

    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    gpus, known, reasons = {10 * major + minor for major, minor in capabilities}, answers(gpu, folder), []
    missing = {covered(q.name) for q in QUEUE if q.compiled_ahead and is_open(q.name, known)}
    for path in files:
        try:
            made = archives.manifest(path)
            reason = archives.refusal(made, gpus)
        except (OSError, ValueError) as error:
            reason = str(error)
        if reason:
            reasons.append(f"{path} is cold: {reason}")
        else:
            missing -= set(made["models"])
    if len(reasons) == len(files):
        return "; ".join(reasons or ["there is no archive of compiled kernels"]) + ": Triton compiles all that is asked"
    return "; ".join(
        [*reasons, f"no archive has the kernels of {', '.join(sorted(name.partition('@')[0] for name in missing))}"]
        if missing
        else reasons
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["next", "answer", "archive"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", type=Path, help="archives of compiled kernels")
    parser.add_argument("--machine", required=True, metavar="TEXT")
    parser.add_argument("--left", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.only if name not in QUESTIONS]:
        sys.exit(f"bench/questions.py has no question {', '.join(unknown)}")
    machine = next((line for line in args.machine.split("\n") if ", torch " in line), args.machine)  # not a warning
    if args.what == "next":
        print("\n".join(plan(args.folder, gpu_of(machine), args.left, args.only)))
    elif args.what == "answer":
        print(f"   -> {answer(args.folder, machine)['follows']}")
    else:
        compiled = "the kernels of every open question are compiled, but for GPU tests"
        print(uncovered(args.files, gpu_of(machine), args.folder) or compiled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
