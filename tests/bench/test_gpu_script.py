"""bench/gpu.sh with scripted steps: deadlines, hangs, interrupts, what runs after what failed, archives.

And, in `long`, the real thing on a CPU: `--rehearse`. Nothing here shows that a kernel compiles, that a backend of SDPA
takes a case, that a CUDA graph captures, what a GPU that hangs does to SIGKILL, or how long anything takes.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import bench_ops
import pytest
from questions import QUESTIONS

ROOT = Path(__file__).parents[2]
FIRST = "prepare smoke doctor train attention blocks norm_and_patches inference".split()
HANG = "trap '' INT TERM; setsid sleep 300 & echo $! > $SCRIPTED/orphan; echo hangs; while :; do sleep 1; done"
ILLEGAL = "echo 'RuntimeError: CUDA error: an illegal memory access was encountered'; exit 1"


class Stage:
    """Runs of bench/gpu.sh in a copy of its tree with scripted steps, and what came of the last one."""

    def __init__(self, folder: Path):
        self.folder, self.out, self.script = folder, folder / "out", folder / "tree" / "bench" / "gpu.sh"
        for name in ("tree/bench/results", "tree/vitfast", "tree/kernels/attention", "plan", "home", "tmp"):
            (folder / name).mkdir(parents=True)
        for name in ("gpu.sh", "decide.py", "questions.py", "counted.py", "asking.py"):
            shutil.copy(ROOT / "bench" / name, self.script.parent)
        (folder / "tree" / "kernels" / "attention" / "terms.py").touch()
        shutil.copy(ROOT / "tests" / "helpers" / "stand_in.sh", folder / "python")
        (folder / "python").chmod(0o755)
        (folder / "installed").write_text("vitfast is installed\n")
        outside = ("VITFAST_", "TRITON_", "XDG_", "PYTEST_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(outside)}
        self.environment |= dict(PYTHON=str(folder / "python"), SCRIPTED=str(folder), VITFAST_GLANCE="0.03")
        self.environment |= dict(REAL=sys.executable, VITFAST_COMMIT="abc1234")
        self.environment |= dict(HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"))

    def plan(self, **steps: str) -> None:
        for name, text in steps.items():
            (self.folder / "plan" / name).write_text(text)

    def start(self, stage: str, *options: str, **environment: str) -> subprocess.Popen:
        self.began, command = time.monotonic(), ["bash", self.script, stage, str(self.out), *options]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(command, env=self.environment | environment, **pipes)

    def refused(self, stage: str, **environment: str) -> str:
        """What a call that begins nothing says, in one line."""
        process = self.start(stage, **environment)
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 2 and text.count("\n") == 1 and os.listdir(self.folder / "tmp") == [], text
        return text

    def run(self, stage: str, *options: str, **environment: str) -> int:
        return self.end(self.start(stage, *options, **environment))

    def end(self, process: subprocess.Popen, patience: float = 60) -> int:
        """Its exit code; in any case OUT has two files, and nothing is left in the temporary folder, or running."""
        self.text, _ = process.communicate(timeout=patience)
        self.took = time.monotonic() - self.began
        assert sorted(os.listdir(self.out)) == ["report.md", "results.tar.gz"]
        assert os.listdir(self.folder / "tmp") == [] and self.left_running() == []
        with tarfile.open(self.out / "results.tar.gz") as archive:
            members = [m for m in archive if m.isfile()]
            self.files = {m.name.removeprefix("./"): archive.extractfile(m).read().decode() for m in members}
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

    def states(self, stage: str = "first") -> dict[str, str]:
        return {s["name"]: s["state"] for s in json.loads(self.files[f"steps_{stage}.json"])["steps"]}


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_what_cannot_begin_is_one_line_and_exit_code_2(stage):
    """And nothing that was there is lost."""
    assert "no stage 'frist'" in stage.refused("frist")
    for seconds in ("abc", "0", "9"):
        assert "whole number of seconds" in stage.refused("ops", VITFAST_SECONDS=seconds)
    why = "cannot use torch and triton: ModuleNotFoundError: No module named 'triton'"
    for missing, said in (("no_triton", why), ("no_gpu", "no NVIDIA GPU")):
        (stage.folder / missing).touch()
        assert said in stage.refused("first") and not stage.out.exists()
        (stage.folder / missing).unlink()
    stage.out.write_text("a file")
    assert "cannot write into" in stage.refused("ops")
    stage.out.unlink()
    stage.out.mkdir()
    (stage.out / "results.tar.gz").write_text("no archive")
    assert "results.tar.gz: move it away" in stage.refused("ops")
    assert (stage.out / "results.tar.gz").read_text() == "no archive"
    assert "results.tar.gz: move it away" in stage.refused("all")  # said once, not by each stage


def test_first_goes_through_all_its_steps(stage):
    before = time.time()
    assert stage.run("first", VITFAST_SECONDS="") == 0  # as not set
    assert stage.states() == dict.fromkeys(FIRST, "ok")
    assert list(stage.calls) == FIRST[1:]  # prepare asks no Python for anything
    assert "abc1234" in stage.files["prepare.log"] and "NVIDIA Scripted" in stage.files["prepare.log"]
    assert "--dtype bfloat16 --only layer_norm" in stage.calls["smoke"]
    assert {f"{name}.log" for name in FIRST} <= set(stage.files)
    for name in FIRST[3:]:
        assert json.loads(stage.files[f"{name}.json"])["case"] == name and "--case-limit" in stage.calls[name]
    found = json.loads(stage.files["steps_first.json"])
    assert found["checks"] == {"smoke": 0, "vitfast doctor": 0}
    assert stage.text.splitlines()[-1].startswith("TARGETS of ./attention.json") and "steps_first.json" in stage.text
    assert "inference.log" in (stage.out / "report.md").read_text()
    # no case starts when its step is nearly over
    ends = {n: int(re.search(r"--ends (\d+)", c)[1]) - before for n, c in stage.calls.items() if "--ends" in c}
    assert 225 < ends["train"] < 240 and 75 < ends["attention"] < 90 + stage.took and len(ends) == 5


def test_the_tests_that_it_names_are_there_and_every_operation_is_among_them():
    text = (ROOT / "bench" / "gpu.sh").read_text()
    groups = re.findall(r'ops \w+ \d+ \d+ \d+ "?([a-z0-9_ ]*\w)', text)
    assert set(" ".join(groups).split()) == {name.replace(" ", "_") for name in bench_ops.OPS}
    assert "bench_packed.py::test_attention_packed" in text and "bench_packed.py::test_train_packed" in text


@pytest.mark.slow
def test_what_hangs_costs_its_own_time(tmp_path):
    """Three runs side by side, as all of them wait.

    Every step hangs until its limit: the deadline holds, what is not reached is recorded as skipped. A step ignores
    SIGINT and SIGTERM, with a child in another session: later ones get their turn, and one that ends on SIGINT, as
    pytest does, keeps what it has to say. A process that cannot be killed is given up, here by a `timeout` that does
    not end it.
    """
    deadline, alone, stuck = (Stage(tmp_path / name) for name in ("deadline", "alone", "stuck"))
    deadline.plan(**dict.fromkeys(FIRST[2:], HANG))
    alone.plan(attention=HANG, blocks="trap 'echo told by SIGINT; exit 1' INT; trap 'exit 1' TERM; sleep 300 & wait")
    fake = stuck.folder / "bin" / "timeout"
    fake.parent.mkdir()
    real = shutil.which("timeout")
    fake.write_text(f'#!/bin/bash\ncase "$*" in *"::test_attention -k "*) {HANG};; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    path = f"{fake.parent}:{os.environ['PATH']}"
    runs = [deadline.start("first", VITFAST_SECONDS="12"), alone.start("first", VITFAST_SECONDS="16")]
    runs.append(stuck.start("first", VITFAST_SECONDS="16", PATH=path))
    assert [stage.end(run) for stage, run in zip((deadline, alone, stuck), runs)] == [1, 1, 1]
    states = deadline.states()
    assert list(states) == FIRST and deadline.took < 12 and '"code": null' in deadline.files["steps_first.json"]
    assert (states["smoke"], states["doctor"], states["inference"]) == ("ok", "timed out", "skipped")
    states = alone.states()
    assert [states.pop("attention"), states.pop("blocks")] == ["timed out", "timed out"] and alone.took < 16
    assert set(states.values()) <= {"ok", "skipped"} and (alone.folder / "orphan").exists()
    assert "told by SIGINT" in alone.files["blocks.log"] and "hangs" in alone.files["attention.log"]
    assert stuck.took < 16 and stuck.states()["attention"] == "stuck" and stuck.states()["blocks"] == "ok"


def test_an_interrupted_run_keeps_what_it_has(stage):
    stage.plan(attention="echo started > $SCRIPTED/started; sleep 300 & sleep 300")
    process = stage.start("first")
    while not (stage.folder / "started").exists():
        assert process.poll() is None and time.monotonic() - stage.began < 30
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert stage.end(process) == 130
    states = stage.states()
    assert states["train"] == "ok" and states["attention"] == "interrupted" and "blocks" not in states


def test_an_interrupted_stage_ends_all(stage):
    stage.plan(backend_amp='kill -TERM "$(cut -d" " -f4 "/proc/$PPID/stat")"; sleep 300')  # the script above `timeout`
    assert stage.run("all") == 130, stage.text
    assert stage.states("decide")["backend_amp"] == "interrupted" and "steps_ops.json" not in stage.files


def test_a_step_that_fails_loses_itself_alone(stage):
    """A crash in the middle of a result file, a wrong result of a peer, a lack of memory, a line without an end."""
    stage.plan(
        train="echo 'E   harness.WrongResult: timm compile bf16 is wrong on B/16 224 B256'; exit 1",
        attention='echo "{\\"benchmarks\\": [{" > "$json"; kill -SEGV $$',
        blocks="head -c 4000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 4",
        norm_and_patches="echo 'torch.OutOfMemoryError: RuntimeError: CUDA error: out of memory'; exit 1",
        inference="echo 'RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED'; exit 1",
    )
    assert stage.run("first") == 1
    assert list(stage.calls) == FIRST[1:] and "not vitfast" not in stage.calls["inference"]
    assert [name for name, state in stage.states().items() if state == "failed"] == FIRST[3:]
    assert stage.files["attention.json"] == '{"benchmarks": [{\n' and json.loads(stage.files["blocks.json"])
    assert re.search(r"failed +attention .*exit code 139", stage.text)
    assert "the end" in stage.text and max(map(len, stage.text.splitlines())) < 400
    # what a step left is not taken for the next one's
    stage.plan(train='rm "$json"; exit 9', smoke="exit 1")
    assert stage.run("first") == 1 and "train.json" not in stage.files


def test_what_ours_breaks_leaves_the_peers_their_numbers(stage):
    """A wrong result: no more of our models. A broken device: peers in a new process; twice in a row ends the run."""
    stage.plan(train="echo 'E   harness.WrongResult: vitfast compile bf16 is wrong on B/16'; exit 1")
    assert stage.run("first") == 1
    calls = stage.calls
    assert list(calls) == FIRST[1:]
    assert calls["inference"].count("not vitfast") == 1 and "not vitfast" not in calls["attention"] + calls["blocks"]
    stage.plan(doctor=ILLEGAL, train=ILLEGAL, norm_and_patches=ILLEGAL, inference=ILLEGAL)
    assert stage.run("first") == 1
    assert list(stage.states()) == [*FIRST[:4], "train_peers", *FIRST[4:7], "inference"]
    assert "two steps in a row broke the device" in stage.text and "TARGETS" in stage.text.splitlines()[-1]
    assert "timm" in stage.calls["train_peers"] and "and not vitfast" in stage.calls["train_peers"]


def test_when_the_smallest_check_fails_there_is_a_diagnosis_and_the_peers(stage):
    smoke = "echo 'Traceback: ptxas says what is wrong' >&2; exit 1"
    diagnosis, train = "echo blocking=$CUDA_LAUNCH_BLOCKING >&2", "echo blocking=${CUDA_LAUNCH_BLOCKING:-no}"
    stage.plan(smoke=smoke, diagnosis=diagnosis, train=train)
    assert stage.run("first") == 1
    calls = stage.calls
    assert list(calls) == ["smoke", "diagnosis", "train", "attention", "inference"]
    assert "blocking=1" in stage.files["diagnosis.log"] and "blocking=no" in stage.files["train.log"]
    assert all("not vitfast" in calls[name] for name in ("train", "attention", "inference"))
    assert "--only" not in calls["diagnosis"] and "--debug" in calls["diagnosis"]
    shown = stage.text[stage.text.index("the smallest check failed") :]
    assert "ptxas says what is wrong" in shown and json.loads(stage.files["steps_first.json"])["checks"]["smoke"] == 1


def test_stages_add_up_in_one_archive(stage):
    """What is missing is installed or linked, the cache unpacked."""
    (stage.folder / "installed").write_text("vitfast is not installed\n")
    cache, link = stage.folder / "tree" / "bench" / "cache", stage.folder / "tree" / "vitfast" / "kernels"
    stage.plan(pip="echo no network; exit 1", cache='[ -f "$5" ]')
    assert stage.run("ops", VITFAST_CACHE=str(stage.folder / "gone.tar.xz")) == 1
    assert stage.states("ops")["prepare"] == "failed"
    assert link.is_symlink() and link.resolve() == stage.folder / "tree" / "kernels"
    cache.mkdir()
    (cache / "sm90.tar.xz").touch()
    stage.plan(ops_mlp="exit 5", tune='echo "{}" > "$VITFAST_TILES"')  # pytest's 5: the user's -k left nothing there
    assert stage.run("ops", "-k", "forward") == 0 and stage.calls["cache"].endswith("install bench/cache/sm90.tar.xz")
    assert len(stage.states("ops")) == 9 and "-k forward --bench" in stage.calls["ops_mlp"]
    (stage.folder / "home" / ".cache" / "vitfast").mkdir(parents=True)
    assert stage.run("tune", "--model", "L/16") == 0
    assert int(re.search(r"--seconds (\d+) --model L/16", stage.calls["tune"])[1]) in range(500, 550)
    assert stage.run("models", "-k", "S/16 and train") == 0
    assert "-k S/16 and train --bench" in stage.calls["models_S_16_and_train"]
    wanted = {"models_S_16_and_train.json", "steps_models_S_16_and_train.json", "tiles.json", "ops_mlp.json"}
    assert wanted <= set(stage.files)


def test_a_report_that_cannot_be_written_loses_nothing(stage):
    assert stage.run("models") == 0 and "models.json" in stage.files
    report = (stage.out / "report.md").read_text()
    (stage.folder / "no_report").write_text("")
    assert stage.run("models") == 1 and "the report cannot be written" in stage.text
    assert (stage.out / "report.md").read_text() == report


# ---- decide


ORDER = sorted((q for q in QUESTIONS.values() if not q.needs), key=lambda q: -q.total_worth / q.seconds)


def answer(stage: Stage, name: str) -> dict:
    return json.loads(stage.files[f"answers/{name}.json"])


@pytest.mark.slow
def test_decide_asks_what_is_open_in_order_and_keeps_each_answer(stage):
    """The second run in OUT asks nothing, nor does one whose answers are committed; `--only` asks again."""
    no_test = "echo '1 skipped in 1.00s'"
    stage.plan(racecheck=no_test, one_image='echo "{" > "$json"', resize="echo '=== 1 failed ==='; exit 1")
    assert stage.run("decide") == 1
    names = [name for name in stage.states("decide") if name != "prepare"]
    assert names == ["check", *(question.name for question in ORDER)] and list(stage.calls) == names
    assert stage.calls["check"].endswith("--dtype bfloat16 --only attention --only rope --only bias --only packed")
    assert "--ends" in stage.calls["backend_bf16"] and " -n 1 " in stage.calls["corrected_tests"]
    found = answer(stage, "backend_bf16")
    assert found["gpu"] == "NVIDIA Scripted" and found["commit"] == "abc1234" and found["value"] == 1.0
    assert answer(stage, "resize")["measured"] == "exit code 1: 1 failed"
    assert answer(stage, "resize")["follows"] == QUESTIONS["resize"].follows[1]
    assert answer(stage, "corrected_tests")["follows"] == QUESTIONS["corrected_tests"].follows[0]
    assert "one_image.json is damaged" in answer(stage, "one_image")["measured"]
    assert (answer(stage, "resize")["check"], answer(stage, "resize")["code"]) == ("resize", 1)
    assert answer(stage, "racecheck")["state"] == "skipped" and stage.text.splitlines()[-1].startswith("ANSWERS ./aoti")
    assert (
        stage.text.index("ARCHIVES") < stage.text.index(f"== {ORDER[0].asks}") and "(100 s by estimate)" in stage.text
    )
    (stage.folder / "calls").unlink()
    assert stage.run("decide") == 0 and list(stage.calls) == ["one_image", "racecheck"]  # which had no result
    committed = stage.folder / "tree" / "bench" / "results" / "scripted"
    with tarfile.open(stage.out / "results.tar.gz") as archive:
        archive.extractall(committed)
    shutil.rmtree(stage.out)
    (stage.folder / "calls").unlink()
    assert stage.run("decide", "--only", "norm_backward") == 0 and list(stage.calls) == ["norm_backward"]
    (stage.folder / "tree" / "kernels" / "attention" / "terms.py").write_text("changed")
    (stage.folder / "calls").unlink()
    assert stage.run("decide") == 0
    asked = [
        name for name, q in QUESTIONS.items() if any(f.startswith(("kernels/attention", "kernels/*/")) for f in q.files)
    ]
    assert set(stage.calls) == {"check", "racecheck", *asked} - {name for name in asked if QUESTIONS[name].needs}


@pytest.mark.slow
def test_decide_ends_in_time_whatever_hangs(stage):
    """What does not fit is not begun; what was cut off is asked again, when there is more time for it."""
    stage.plan(backend_bf16=HANG, check="exit 1")
    assert stage.run("decide", VITFAST_SECONDS="30") == 1 and stage.took < 30
    states = stage.states("decide")
    assert states["check"] == "failed" and states["backend_bf16"] == "timed out" and states["backend_amp"] == "ok"
    assert answer(stage, "check")["files"] == {} and answer(stage, "backend_bf16")["state"] == "timed out"
    (stage.folder / "calls").unlink()
    stage.plan(backend_bf16="exit 0", check="exit 0")
    stage.run("decide")
    assert list(stage.calls)[:2] == ["check", "backend_bf16"] and "backend_amp" not in stage.calls
    stage.plan(backend_bf16=ILLEGAL, backend_amp=ILLEGAL)
    shutil.rmtree(stage.out)
    assert stage.run("decide") == 1 and [*stage.states("decide")][-2:] == ["backend_bf16", "backend_amp"]
    assert "two steps in a row broke the device" in stage.text


@pytest.mark.long
@pytest.mark.parametrize("name", ["first", "decide", "ops", "models", "tune"])
def test_a_rehearsal_runs_every_case(stage, name):
    """In this very tree, really: nothing fails, and every name that the plan picks is there."""
    stage.script = ROOT / "bench" / "gpu.sh"
    stage.environment |= dict(PYTHON=sys.executable, VITFAST_SECONDS="3000")
    options = dict(ops=("-k", "B256 and 224 and both or NaViT"), models=("-k", "B/16 and 224 and eager or packed"))
    assert stage.end(stage.start(name, "--rehearse", *options.get(name, ())), 3000) == 0, stage.text
    if name == "first":
        assert list(stage.states()) == FIRST and set(stage.states().values()) == {"ok"}
        found = {n: json.loads(stage.files[f"{n}.json"]) for n in FIRST[3:]}
        wanted = dict(train=6, attention=15, blocks=18, norm_and_patches=33, inference=4)
        assert {n: len(content["benchmarks"]) for n, content in found.items()} == wanted
        assert not any(content["failed"] for content in found.values())
        assert "rehearsed B/16 224 B256" in (stage.out / "report.md").read_text()
    if name == "decide":
        found = {q.name: answer(stage, q.name) for q in ORDER}
        assert all("value" in found[q.name] for q in ORDER if q.has_results and q.name != "kept"), found  # memory
        shares = [case["extra_info"]["waiting"] for case in json.loads(stage.files["embed_files.json"])["benchmarks"]]
        assert shares and all(0 <= share < 1 for share in shares)
