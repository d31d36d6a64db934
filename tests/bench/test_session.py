"""bench/gpu.sh with scripted steps: the order of questions, deadlines, hangs, interrupts, what runs after what failed.

And, in `long`, the real thing on a CPU: `--rehearse`. Nothing here shows that a kernel compiles, that a backend of SDPA
takes a case, that a CUDA graph captures, what a GPU that hangs does to SIGKILL, or how long anything takes.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import session
from questions import QUESTIONS

ROOT = Path(__file__).parents[2]
HANG = "trap '' INT TERM; setsid sleep 300 & echo $! > $SCRIPTED/orphan; echo hangs; while :; do sleep 1; done"
ILLEGAL = "echo 'RuntimeError: CUDA error: an illegal memory access was encountered'; exit 1"
ORDER = sorted(QUESTIONS.values(), key=lambda q: -q.total_worth / q.seconds)
FIRST, SECOND, THIRD = (question.name for question in ORDER[:3])


class Stage:
    """Runs of bench/gpu.sh in a copy of its tree with scripted steps, and what came of the last one."""

    def __init__(self, folder: Path):
        self.folder, self.out, self.script = folder, folder / "out", folder / "tree" / "bench" / "gpu.sh"
        for name in ("tree/bench/results", "tree/kernels/attention", "plan", "tmp"):
            (folder / name).mkdir(parents=True)
        for path in (*(ROOT / "bench").glob("*.py"), ROOT / "bench" / "gpu.sh"):
            shutil.copy(path, self.script.parent)
        (folder / "tree" / "tests").symlink_to(ROOT / "tests")
        (folder / "tree" / "kernels" / "attention" / "terms.py").touch()
        shutil.copy(ROOT / "tests" / "helpers" / "stand_in.sh", folder / "python")
        (folder / "python").chmod(0o755)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("VITFAST_", "PYTEST_"))}
        self.environment |= dict(PYTHON=str(folder / "python"), SCRIPTED=str(folder), REAL=sys.executable)
        self.environment |= dict(VITFAST_COMMIT="abc1234", TMPDIR=str(folder / "tmp"))

    def plan(self, **steps: str) -> None:
        for name, text in steps.items():
            (self.folder / "plan" / name).write_text(text)

    def start(self, stage: str, *options: str, **environment: str) -> subprocess.Popen:
        (self.folder / "calls").write_text("")
        self.began, command = time.monotonic(), ["bash", self.script, stage, str(self.out), *options]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(command, env=self.environment | environment, **pipes)

    def run(self, stage: str, *options: str, **environment: str) -> int:
        return self.end(self.start(stage, *options, **environment))

    def end(self, process: subprocess.Popen, patience: float = 120) -> int:
        """Its exit code; in any case nothing is left in the temporary folder, or running."""
        self.text, _ = process.communicate(timeout=patience)
        self.took = time.monotonic() - self.began
        assert os.listdir(self.folder / "tmp") == [] and self.left_running() == []
        return process.returncode

    def left_running(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if f"SCRIPTED={self.folder}\0".encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_text())
        return found

    @property
    def calls(self) -> dict[str, str]:
        """The arguments of each step's call, in order."""
        return dict(line.split("\t") for line in (self.folder / "calls").read_text().splitlines())

    def states(self) -> dict[str, str]:
        return {s["name"]: s["state"] for s in json.loads((self.out / "steps_decide.json").read_text())["steps"]}

    def answer(self, name: str) -> dict:
        return json.loads((self.out / "answers" / f"{name}.json").read_text())


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_what_cannot_begin_is_refused_with_exit_code_2(stage):
    """And nothing that was there is lost."""
    assert stage.run("all") == 2 and "invalid choice: 'all'" in stage.text
    assert stage.run("decide", "--only", "nothing") == 2 and "invalid choice: 'nothing'" in stage.text
    assert stage.run("decide", VITFAST_SECONDS="9") == 2 and "whole number of seconds" in stage.text
    why = "cannot use torch and triton: ModuleNotFoundError: No module named 'triton'"
    for missing, said in (("no_triton", why), ("no_gpu", "no NVIDIA GPU")):
        (stage.folder / missing).touch()
        assert stage.run("decide") == 2 and said in stage.text and not stage.out.exists()
        (stage.folder / missing).unlink()
    stage.out.write_text("a file")
    assert stage.run("decide") == 2 and "cannot write into" in stage.text and stage.out.read_text() == "a file"


@pytest.mark.slow
def test_decide_asks_what_is_open_in_order_and_keeps_each_answer(stage):
    """The second run in OUT asks nothing, nor does one whose answers are committed; `--only` asks again."""
    no_test = "echo '1 skipped in 1.00s'"
    stage.plan(racecheck=no_test, one_image='echo "{" > "$json"', memcheck="echo '=== 1 failed ==='; exit 1")
    assert stage.run("decide") == 1
    names = [question.name for question in ORDER]
    assert list(stage.states()) == names and list(stage.calls) == names
    assert "--ends" in stage.calls[FIRST] and " -n 1 " in stage.calls["memcheck"]
    assert "--case-limit" in stage.calls["from_files"]
    found = stage.answer(FIRST)
    assert found["gpu"] == "NVIDIA Scripted" and found["commit"] == "abc1234" and found["value"] == 1.0
    failed = stage.answer("memcheck")
    assert failed["measured"] == "exit code 1: 1 failed" and (failed["check"], failed["code"]) == ("memcheck", 1)
    assert failed["follows"] == QUESTIONS["memcheck"].follows[1]
    assert "one_image.json is damaged" in stage.answer("one_image")["measured"]
    assert stage.answer("racecheck")["state"] == "skipped" and "(100 s by estimate)" in stage.text
    shown = f"| {ORDER[0].asks} | {ORDER[0].prediction.text} |"
    text = (stage.out / "report.md").read_text()
    assert shown in stage.text and shown in text and "steps_decide.json is left out" not in text
    assert stage.run("decide") == 0 and list(stage.calls) == ["one_image", "racecheck"]  # which had no result
    shutil.copytree(stage.out, stage.folder / "tree" / "bench" / "results" / "scripted")
    shutil.rmtree(stage.out)
    assert stage.run("decide", "--only", "norm_backward") == 0 and list(stage.calls) == ["norm_backward"]
    (stage.folder / "tree" / "kernels" / "attention" / "terms.py").write_text("changed")
    stage.plan(memcheck="exit 0")
    assert stage.run("decide") == 0
    of_attention = ("kernels/attention", "kernels/*/")
    asked = {name for name, q in QUESTIONS.items() if any(file.startswith(of_attention) for file in q.files)}
    assert set(stage.calls) == {"racecheck", *asked}


@pytest.mark.slow
def test_a_stage_ends_in_time_whatever_hangs_and_keeps_what_it_has(stage):
    """A step ignores SIGINT, with a child in another session: both are killed, and a later question is asked."""
    stage.plan(**{FIRST: HANG})
    assert stage.run("decide", VITFAST_SECONDS="40") == 1 and stage.took < 40 and (stage.folder / "orphan").exists()
    states = stage.states()
    assert states.pop(FIRST) == "timed out" and "ok" in states.values() and "hangs" in stage.text
    assert stage.answer(FIRST)["follows"] == "no answer: timed out"
    stage.plan(**{FIRST: "echo started > $SCRIPTED/started; sleep 300 & sleep 300"})
    process = stage.start("decide", "--only", FIRST)
    while not (stage.folder / "started").exists():
        assert process.poll() is None and time.monotonic() - stage.began < 30
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert stage.end(process) == 130 and stage.states() == {FIRST: "interrupted"}


@pytest.mark.slow
def test_what_not_even_sigkill_ends_is_given_up(tmp_path, monkeypatch):
    running = session.Session(tmp_path, tmp_path, 10)
    monkeypatch.setattr(session.os, "killpg", lambda group, number: None)
    state, code, taken = running.limited(["sleep", "300"], tmp_path / "log", 0.1)  # killed by its environment at last
    assert (state, code) == ("stuck", 124) and 3 < taken < 30


@pytest.mark.slow
def test_a_step_that_fails_loses_itself_alone_and_a_broken_device_ends_the_run(stage):
    long_line = "head -c 400000 /dev/zero | tr '\\0' x; echo; echo the end; exit 4"
    stage.plan(**{FIRST: 'echo "{\\"rivals\\": [{" > "$json"; kill -SEGV $$', SECOND: long_line})
    stage.plan(**{THIRD: ILLEGAL, ORDER[3].name: ILLEGAL})
    assert stage.run("decide") == 1
    assert list(stage.states().values()) == ["failed"] * 4 and "two steps in a row broke the device" in stage.text
    assert f"failed       {FIRST:18}" in stage.text and "exit code 139" in stage.text
    assert "the end" in stage.text and max(map(len, stage.text.splitlines())) < 700
    # what a step left is not taken for the next one's
    stage.plan(**{FIRST: 'rm -f "$json"; exit 9'})
    assert stage.run("decide", "--only", FIRST) == 1 and not (stage.out / f"{FIRST}.json").exists()
    (stage.out / "report.md").unlink()
    (stage.out / "report.md").mkdir()
    stage.plan(**{SECOND: "exit 0"})
    assert stage.run("decide", "--only", SECOND) == 1 and "the report cannot be written" in stage.text
    assert stage.states() == {SECOND: "ok"}


@pytest.mark.slow
def test_kernels_that_were_compiled_ahead_are_installed_first(stage):
    cache = stage.folder / "tree" / "bench" / "cache"
    cache.mkdir()
    (cache / "sm90.tar.xz").touch()
    assert stage.run("decide", "--only", FIRST) == 0 and list(stage.calls) == ["cache", FIRST]
    assert stage.calls["cache"].endswith("kernels install bench/cache/sm90.tar.xz")


@pytest.mark.long
def test_a_rehearsal_asks_every_question(stage):
    """In this very tree, really: nothing fails, and every name that the plan picks is there."""
    stage.script = ROOT / "bench" / "gpu.sh"
    stage.environment |= dict(PYTHON=sys.executable, VITFAST_SECONDS="6000")
    assert stage.end(stage.start("decide", "--rehearse"), 6000) == 0, stage.text
    having = [question.name for question in ORDER if question.has_results and question.name != "kept"]  # memory
    assert all("value" in stage.answer(name) for name in having), stage.text
    content = json.loads((stage.out / "embed_files.json").read_text())
    shares = [case["extra_info"]["waiting"] for case in content["benchmarks"]]
    assert shares and all(0 <= share < 1 for share in shares)
