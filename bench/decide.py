"""Which question of questions.py comes next on this GPU, and the answers, for the stage `decide` of gpu.sh.

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
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from asking import Question, Rivals
from questions import QUESTIONS, QUEUE

ROOT = Path(__file__).resolve().parents[1]
CHECK = "check"  # the name of the short check of right and wrong
CHECK_SECONDS = 20  # estimated: 10 predicted for four operations in bf16
ANSWERED = ("ok", "failed")  # states of a step that has ended by itself
# The short check of right and wrong that comes first: names for `vitfast doctor --only`, and the files whose change
# asks for them.
FAMILIES = {
    "layer_norm rms_norm": ("kernels/layer_norm/*.py", "kernels/configs/layer_norm.py"),
    "attention rope bias packed": ("kernels/attention/*.py", "kernels/configs/attention.py"),
    "linear mlp": ("kernels/matmul/*.py", "kernels/configs/matmul.py", "kernels/libraries/cublaslt*"),
    "patch_embed": ("kernels/patch_embed/*.py", "kernels/configs/patch_embed.py"),
}
SHARED = ("kernels/rows.py", "kernels/launch.py", "kernels/configs/tiles.py", "vitfast/ops/*.py")  # of all families


@functools.cache
def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def contents(patterns: Iterable[str]) -> dict[str, str]:
    """The hash of each file that one of these patterns names, by its path."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return {str(path.relative_to(ROOT)): _hash(path) for path in sorted(found)}


def asked(question: Question) -> dict[str, str]:
    """What an answer is good for: the contents of the question's files, and what is run."""
    what = hashlib.sha256(repr(question.run).encode()).hexdigest()[:12]
    return {"what is run": what} | contents(question.files)


def checked() -> dict[str, str]:
    """The same for the short check."""
    return contents([pattern for patterns in (*FAMILIES.values(), SHARED) for pattern in patterns])


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The files that are not what they were."""
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def families(files: list[str]) -> list[str]:
    """Names for `vitfast doctor --only` of the operations whose files these are; all where SHARED files are."""
    match = lambda patterns: any(fnmatch.fnmatchcase(file, each) for file in files for each in patterns)  # noqa: E731
    everything = match(SHARED)
    return [name for names, patterns in FAMILIES.items() if everything or match(patterns) for name in names.split()]


def older(answer: dict) -> list[str]:
    """The files that have changed since an answer was given; of a question that has left, none."""
    question = QUESTIONS.get(answer["question"])
    return changed(answer["files"], asked(question)) if question else []


def predictions() -> dict[tuple[str, str], float]:
    """(target, figure) of README's table -> what is predicted of it; of several, the first question's."""
    return {row: value for question in reversed(QUEUE) for row, value in question.rows.items()}


def answers(gpu: str, *folders: Path) -> dict[str, dict]:
    """The newest answer of each question on this GPU, from folders of answers."""
    found = []
    for path in (path for folder in folders for path in folder.glob("*.json")):
        try:
            answer = json.loads(path.read_text())
            found.append((answer["answered"], answer["question"], answer["gpu"], answer))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return {name: answer for _, name, of, answer in sorted(found, key=lambda f: f[:2]) if of == gpu}


def places(folder: Path) -> list[Path]:
    """Where answers are: in the folder of the stage, and those that are committed."""
    return [folder / "answers", *sorted((ROOT / "bench" / "results").glob("*/answers"))]


def is_open(question: Question, known: dict[str, dict]) -> bool:
    """Whether there is no answer for the current contents of the question's files."""
    answer = known.get(question.name)
    return answer is None or answer["state"] not in ANSWERED or answer["files"] != asked(question)


def seconds(question: Question, known: dict[str, dict]) -> int:
    """What the question took here last time, or what is expected."""
    return max(1, known[question.name]["seconds"]) if question.name in known else question.seconds


def following(known: dict[str, dict], tried: Iterable[str], left: float, only: list[str]) -> Question | None:
    """The question that is asked next: of the open ones that fit, the one of the most worth per second."""
    found = [q for q in QUEUE if q.name not in tried and (q.name in only or (not only and is_open(q, known)))]
    found = [q for q in found if seconds(q, known) <= left and not (q.needs and not importlib.util.find_spec(q.needs))]
    return max(found, key=lambda q: q.total_worth / seconds(q, known), default=None)


def steps(folder: Path) -> dict:
    """What gpu.sh has written of this run so far."""
    path = folder / "steps_decide.json"
    return json.loads(path.read_text()) if path.is_file() else dict(steps=[], checks={})


def plan(folder: Path, gpu: str, left: float, only: list[str]) -> list[str]:
    """Lines for gpu.sh: what to say, name, kind, seconds at most, name of the check, arguments; nothing at the end."""
    known, tried = answers(gpu, *places(folder)), [step["name"] for step in steps(folder)["steps"]]
    if CHECK not in tried and not only:
        before = known.get(CHECK, dict(files={}))["files"]
        if names := families(changed(before, checked())):
            arguments = ["--dtype", "bfloat16", *(word for name in names for word in ("--only", name))]
            what = "right or wrong: the operations whose kernels have changed since they were last checked here"
            return [what, CHECK, "doctor", str(4 * CHECK_SECONDS), "", *arguments]
    question = following(known, tried, left, only)
    if question is None:
        return []
    kind, arguments = "rivals", [question.name]
    if not isinstance(question.run, Rivals):
        kind, arguments = question.run.kind, question.run.arguments
    last = known.get(question.name, {})
    expected = f"{seconds(question, known)} s" + ("" if last or question.measured else " by estimate")
    expected += f", of which until all could run {last['ready']:.0f}" if last.get("ready") else ""
    what = f"{question.asks} Predicted: {question.prediction.text} ({expected})"
    return [what, question.name, kind, str(min(150, 10 + 3 * question.seconds // 2)), question.check, *arguments]


def measured(question: Question, content: dict) -> str:
    """The times of the rivals, with power and clock, or how a command ended."""
    if "rivals" not in content:
        return content.get("said", "")
    words = []
    for name, r in content["rivals"].items():
        power = f" at {r['watts']:.0f} W and {r['mhz']:.0f} MHz" if r.get("watts") and r.get("mhz") else ""
        words.append(f"{name} {r['ms']:.4g} ms{power}")
    words += [f"{name}: {reason[:160]}" for name, reason in content["missing"].items()]
    if content.get("compiled"):
        words.append(f"{content['compiled']} kernels of ours were compiled first")
    return "; ".join(words)


def gpu_of(machine: str) -> str:
    """The kind of GPU, by its name."""
    return machine.partition(", torch ")[0]


def answer(folder: Path, machine: str) -> dict:
    """The answer that the last step gives, written whole or not at all."""
    run = steps(folder)
    step = run["steps"][-1]
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    commit = os.environ.get("VITFAST_COMMIT") or _commit()
    found = dict(question=step["name"], gpu=gpu_of(machine), machine=machine, answered=now, commit=commit)
    found |= dict(state=step["state"])
    found["seconds"] = round(step["seconds"])
    if step["name"] == CHECK:
        right = step["state"] == "ok"
        found |= dict(asks="right or wrong", predicted="all right", measured=f"exit code {step['code']}")
        found |= dict(follows="nothing" if right else "the operation that is wrong is mended first")
        return _write(folder, found | dict(files=checked() if right else {}))
    question = QUESTIONS[step["name"]]
    content, path = dict(code=step["code"], said=_said(folder, step)), folder / f"{step['name']}.json"
    try:
        content |= json.loads(path.read_text()) if path.is_file() and question.has_results else {}
    except ValueError as error:
        content["said"] = f"{path.name} is damaged: {error}"
    if question.check and run["checks"].get(question.check) is None:
        found["state"] = "skipped"  # no test ran
    found |= dict(asks=question.asks, predicted=question.prediction.text, measured=measured(question, content))
    found |= dict(files=asked(question), ready=sum(r["ready_s"] for r in content.get("rivals", {}).values()) or None)
    found |= dict(follows=f"no answer: {found['state']}", rivals=content.get("rivals"))
    if found["state"] in ANSWERED:
        try:
            value = question.prediction.reads(content)
            holds = question.prediction.holds(value)
            found |= dict(value=value, holds=holds, follows=question.follows[0 if holds else 1])
            found["measured"] += f": {value:.3g}" if question.has_results else ""
        except (KeyError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            found["follows"] = f"no answer: {type(error).__name__}: {error}"
    return _write(folder, found)


def _write(folder: Path, found: dict) -> dict:
    path = folder / "answers" / f"{found['question']}.json"
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)
    return found


def _said(folder: Path, step: dict) -> str:
    """How a command ended: its exit code and the last line of its log."""
    log = folder / f"{step['name']}.log"
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    last = next((line.strip(" =") for line in reversed(lines) if line.strip()), "")
    return f"exit code {step['code']}: {last[:160]}"


def _commit() -> str:
    try:
        options = dict(capture_output=True, text=True, timeout=20, cwd=ROOT)
        return subprocess.run(["git", "describe", "--always", "--dirty"], **options).stdout.strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def uncovered(archives: list[Path], gpu: str, folder: Path) -> str:
    """Why kernels will be compiled for open questions, or ""; archives: what `codegen.py --queue` has made."""
    from vitfast.kernels import archives as packed

    if not archives:
        return "there is no archive of compiled kernels (bench/cache/*.tar.xz)"
    known = answers(gpu, *places(folder))
    open_ones = {q.name for q in QUEUE if q.compiled_ahead and is_open(q, known)}
    reasons = []
    for path in archives:
        try:
            made = packed.manifest(path)
            reason = packed.refusal(made, _capabilities())
            open_ones -= set(made["models"]) if not reason else set()
        except (OSError, ValueError) as error:
            reason = str(error)
        reasons += [f"{path} is cold: {reason}"] if reason else []
    missing = f"no archive has the kernels of {', '.join(sorted(open_ones))}" if open_ones else ""
    return "; ".join([*reasons, missing] if missing else reasons)


def _capabilities() -> set[int]:
    import torch

    found = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return {10 * major + minor for major, minor in found}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["next", "answer", "archive"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", type=Path, help="archives of compiled kernels")
    parser.add_argument("--machine", required=True, metavar="TEXT")
    parser.add_argument("--left", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=[*QUESTIONS])
    args = parser.parse_args(argv)
    machine = args.machine.partition("\n")[0]
    gpu = gpu_of(machine)
    if args.what == "next":
        print("\n".join(plan(args.folder, gpu, args.left, args.only)))
    elif args.what == "answer":
        print(f"   -> {answer(args.folder, machine)['follows']}")
    else:
        print(
            uncovered(args.files, gpu, args.folder)
            or "the kernels of every open question are compiled, but for GPU tests"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
