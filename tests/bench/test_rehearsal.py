"""A rehearsal of bench/gpu.sh, and of what else waits for a GPU, against stand-ins for what only a GPU has.

The script's logic runs against tests/helpers/stand_in.sh, which does nothing, quickly, or fails as it is told to; all of
`first` runs against tests/helpers/stand_in.py, where the CPU plays torch.cuda; then what ends a worker whose GPU has failed,
and what compute-sanitizer is asked. Nothing here shows that a kernel compiles or is right on a GPU, that a backend of
SDPA takes a case, that a CUDA graph captures, what a GPU that hangs does to SIGKILL, or how long anything takes.
"""

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

import conftest
import pytest
import sanitized

from vitfast import ops
from vitfast.doctor import SMALL_SIZES
from vitfast.kernels.launch import launches_made
from vitfast.verify import cases as cases_of

ROOT = Path(__file__).parents[2]
FIRST = "prepare smoke doctor train attention blocks norm_and_patches accelerate inference".split()
FIRST += ["gpu_tests", "attention_separate"]
HANG = "trap '' INT TERM; setsid sleep 300 & echo $! > $REHEARSAL/orphan; echo hangs; while :; do sleep 1; done"
ILLEGAL = "echo 'RuntimeError: CUDA error: an illegal memory access was encountered'; exit 1"


class Stage:
    """One run of bench/gpu.sh in a copy of its tree, and what came of it."""

    def __init__(self, folder: Path):
        self.folder, self.out, self.besides = folder, folder / "out", []
        for name in ("tree/bench", "tree/vitfast", "tree/kernels", "plan", "home", "tmp"):
            (folder / name).mkdir(parents=True)
        for name in ("gpu.sh", "steps.sh"):
            shutil.copy(ROOT / "bench" / name, folder / "tree" / "bench")
        shutil.copy(ROOT / "tests" / "helpers" / "stand_in.sh", folder / "python")
        (folder / "python").chmod(0o755)
        (folder / "installed").write_text("vitfast is installed\n")
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("VITFAST_", "TRITON_", "XDG_", "PYTEST_"))
        }
        self.environment |= dict(PYTHON=str(folder / "python"), REAL_PYTHON=sys.executable, REHEARSAL=str(folder))
        self.environment |= dict(HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"))

    def plan(self, **steps: str) -> None:
        for name, text in steps.items():
            (self.folder / "plan" / name).write_text(text)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        command = ["bash", str(self.folder / "tree" / "bench" / "gpu.sh"), *arguments]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(command, env=self.environment | environment, **pipes)

    def run(self, stage: str, *options: str, **environment: str) -> int:
        """Its exit code. Whatever happened: OUT has two files, nothing is left in the temporary folder, or running."""
        start = time.monotonic()
        process = self.start(stage, str(self.out), *options, **environment)
        return self.end(process, start)

    def end(self, process: subprocess.Popen, start: float, patience: float = 60) -> int:
        self.text, _ = process.communicate(timeout=patience)
        self.took = time.monotonic() - start
        assert sorted(os.listdir(self.out)) == [*self.besides, "report.md", "results.tar.gz"]
        assert os.listdir(self.folder / "tmp") == []
        for line in (self.folder / "listings").read_text().splitlines():
            assert len(line.split()) <= 8
        assert left_running(self.folder) == []
        with tarfile.open(self.out / "results.tar.gz") as archive:
            self.files = {
                m.name.removeprefix("./"): archive.extractfile(m).read().decode() for m in archive if m.isfile()
            }
        return process.returncode

    @property
    def calls(self) -> dict[str, str]:
        """What each step was asked to do, in order."""
        return dict(line.split("\t") for line in (self.folder / "calls").read_text().splitlines())

    def states(self, stage: str = "first") -> dict[str, str]:
        return {s["name"]: s["state"] for s in json.loads(self.files[f"steps_{stage}.json"])["steps"]}


def left_running(folder: Path) -> list[str]:
    """Processes whose environment has the rehearsal's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"REHEARSAL={folder}\0".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
        except OSError:  # it has ended, or is not ours
            continue
    return found


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_first_goes_through_all_its_steps(stage):
    assert stage.run("first", VITFAST_COMMIT="abc1234") == 0
    assert stage.states() == dict.fromkeys(FIRST, "ok")
    assert list(stage.calls) == FIRST[1:]  # prepare asks no Python for anything
    assert "abc1234" in stage.files["prepare.log"] and "NVIDIA Rehearsal" in stage.files["prepare.log"]
    for name in FIRST:
        assert f"{name}.log" in stage.files
    for name in FIRST[3:-2]:
        assert json.loads(stage.files[f"{name}.json"])["case"] == name
        assert "--case-limit" in stage.calls[name] and "--ends" in stage.calls[name]
    assert json.loads(stage.files["steps_first.json"])["checks"] == {
        "smoke": 0,
        "vitfast doctor": 0,
        "first gpu tests": 0,
    }
    assert stage.text.splitlines()[-1].startswith("TARGETS of ./accelerate.json") and "steps_first.json" in stage.text
    assert "inference.log" in (stage.out / "report.md").read_text()


def test_a_step_that_hangs_costs_its_own_time(stage):
    """It ignores SIGINT and SIGTERM, and has a child in a session of its own; later steps still get their turn.

    The other one ends on SIGINT, as pytest does, with what it has to say.
    """
    tells = "trap 'echo told by SIGINT; exit 1' INT; trap 'exit 1' TERM; sleep 300 & wait"
    stage.plan(train=HANG, attention=tells)
    assert stage.run("first", VITFAST_SECONDS="16") == 1
    states = stage.states()
    assert [states.pop("train"), states.pop("attention")] == ["timed out", "timed out"]
    assert set(states.values()) <= {"ok", "skipped"}
    assert "told by SIGINT" in stage.files["attention.log"]
    assert (
        stage.took < 16
        and "hangs" in stage.files["train.log"]
        and json.loads(stage.files["train.json"])["case"] == "train"
    )
    assert (stage.folder / "orphan").exists()  # and Stage.end saw that it is gone


def test_the_deadline_holds_whatever_hangs(stage):
    """Every step hangs until its limit: what is not reached is recorded as skipped."""
    stage.plan(**dict.fromkeys(FIRST[2:], HANG))
    assert stage.run("first", VITFAST_SECONDS="12") == 1
    states = stage.states()
    assert (
        stage.took < 12
        and states["smoke"] == "ok"
        and states["doctor"] == "timed out"
        and states["gpu_tests"] == "skipped"
    )
    assert list(states) == FIRST and '"code": null' in stage.files["steps_first.json"]


def test_a_process_that_cannot_be_killed_is_given_up(stage):
    """As one that waits for a driver: here the `timeout` that should end it does nothing."""
    (stage.folder / "bin").mkdir()
    fake = stage.folder / "bin" / "timeout"
    fake.write_text(
        f'#!/bin/bash\ncase "$*" in *bench_model*test_train*) {HANG};; esac\nexec {shutil.which("timeout")} "$@"\n'
    )
    fake.chmod(0o755)
    assert stage.run("first", VITFAST_SECONDS="16", PATH=f"{stage.folder / 'bin'}:{os.environ['PATH']}") == 1
    assert stage.took < 16 and stage.states()["train"] == "stuck" and stage.states()["attention"] == "ok"


def test_a_crash_loses_its_own_step_alone(stage):
    """With a result file that was cut off in the middle."""
    stage.plan(
        attention='echo "{\\"benchmarks\\": [{" > "$json"; kill -SEGV $$', blocks='echo "error: bad option"; exit 4'
    )
    assert stage.run("first") == 1
    states = stage.states()
    assert [states.pop(name) for name in ("attention", "blocks")] == ["failed", "failed"] and set(states.values()) == {
        "ok"
    }
    assert stage.files["attention.json"] == '{"benchmarks": [{\n' and json.loads(stage.files["blocks.json"])
    assert re.search(r"failed +attention .*exit code 139", stage.text) and "error: bad option" in stage.text


def test_a_wrong_result_of_ours_leaves_ours_out_of_the_other_models(stage):
    message = "E   harness.WrongResult: vitfast compile bf16 is wrong on B/16 224 B256: error 1.0e-02"
    stage.plan(train=f"echo '{message}'; exit 1")
    assert stage.run("first") == 1
    calls = stage.calls
    assert list(calls) == [name for name in FIRST[1:] if name != "accelerate"]
    assert calls["inference"].count("not vitfast") == 1 and not any(
        "not vitfast" in calls[n] for n in ("attention", "blocks")
    )


def test_a_wrong_result_of_a_peer_does_not(stage):
    stage.plan(train="echo 'E   harness.WrongResult: timm compile bf16 is wrong on B/16 224 B256'; exit 1")
    assert stage.run("first") == 1
    assert list(stage.calls) == FIRST[1:] and "not vitfast" not in stage.calls["inference"]


def test_two_steps_in_a_row_that_break_the_device_end_the_run(stage):
    stage.plan(attention=ILLEGAL, norm_and_patches=ILLEGAL, accelerate=ILLEGAL)  # one alone does not
    assert stage.run("first") == 1
    assert list(stage.states()) == FIRST[: FIRST.index("accelerate") + 1]
    assert "two steps in a row broke the device" in stage.text and "TARGETS" in stage.text.splitlines()[-1]


def test_a_device_that_ours_breaks_leaves_the_peers_their_numbers(stage):
    """Ours runs first in its process, and nothing runs after it: the peers get one of their own."""
    stage.plan(doctor=ILLEGAL, train=ILLEGAL)
    assert stage.run("first") == 1
    names, calls = [name for name in FIRST if name != "accelerate"], stage.calls
    names.insert(names.index("train") + 1, "train_peers")
    assert (
        list(stage.states()) == names and "and not vitfast" in calls["train_peers"] and "timm" in calls["train_peers"]
    )
    assert "not vitfast" in calls["inference"] and "not vitfast" not in calls["attention"]
    stage.plan(train_peers=ILLEGAL)
    assert stage.run("first") == 1
    assert list(stage.states())[-1] == "train_peers" and "two steps in a row" in stage.text


def test_running_out_of_memory_breaks_no_device(stage):
    oom = "echo 'torch.OutOfMemoryError: CUDA out of memory. RuntimeError: CUDA error: out of memory'; exit 1"
    blas = "echo 'RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`'; exit 1"
    stage.plan(train=oom, attention=blas, blocks=blas)
    assert stage.run("first") == 1 and list(stage.states()) == FIRST


def test_no_case_starts_when_its_step_is_nearly_over(stage):
    before = time.time()
    assert stage.run("first") == 0
    ends = {
        name: int(re.search(r"--ends (\d+)", call)[1]) - before
        for name, call in stage.calls.items()
        if "--ends" in call
    }
    assert 225 < ends["train"] < 240 and 75 < ends["attention"] < 90 + stage.took and len(ends) == 7


def test_what_an_earlier_run_left_is_not_taken_for_this_ones(stage):
    assert stage.run("first") == 0 and "train.json" in stage.files
    stage.plan(train='rm "$json"; exit 9', smoke="")
    assert stage.run("first") == 1 and "train.json" not in stage.files and "attention.json" in stage.files
    stage.plan(smoke="exit 1")
    assert stage.run("first") == 1 and "blocks.json" not in stage.files


def test_what_cannot_be_written_or_read_is_said_and_nothing_is_lost(stage):
    stage.out.write_text("a file")
    process = stage.start("ops", str(stage.out))
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and text.count("\n") == 1 and "cannot write into" in text
    stage.out.unlink()
    stage.out.mkdir()
    (stage.out / "results.tar.gz").write_text("no archive")
    stage.besides = ["damaged.tar.gz"]
    assert stage.run("ops") == 1 and "ops_mlp.json" in stage.files
    assert (stage.out / "damaged.tar.gz").read_text() == "no archive"
    report = (stage.out / "report.md").read_text()
    (stage.folder / "no_report").write_text("")
    assert stage.run("ops") == 1 and "the report cannot be written" in stage.text
    assert (stage.out / "report.md").read_text() == report


@pytest.mark.parametrize("seconds", ["abc", "0", "9", ""])
def test_a_deadline_that_is_no_number_is_refused(stage, seconds):
    process = stage.start("ops", str(stage.out), VITFAST_SECONDS=seconds)
    text, _ = process.communicate(timeout=30)
    if seconds:
        assert process.returncode == 2 and "whole number of seconds" in text and not stage.out.exists()
    else:
        assert process.returncode == 0  # as not set


def test_a_check_of_which_no_test_ran_is_not_passed(stage):
    stage.plan(sanitizer="echo '2 skipped in 1.00s'", gpu_tests="echo '3 passed, 1 skipped in 1.00s'")
    assert stage.run("tests") == 0
    found = json.loads(stage.files["steps_tests.json"])
    assert found["checks"] == {"vitfast doctor": 0, "gpu tests": 0}
    assert found["skipped"] == [{"name": "compute-sanitizer", "reason": "no test ran"}]


def test_long_logs_are_shortened(stage):
    stage.plan(attention="head -c 4000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 1")
    assert stage.run("first") == 1
    assert 1_900_000 < len(stage.files["attention.log"]) < 2_100_000 and stage.files["attention.log"].endswith(
        "the end\n"
    )
    assert "the end" in stage.text and max(map(len, stage.text.splitlines())) < 400


def test_when_the_smallest_check_fails_there_is_a_diagnosis_and_the_peers(stage):
    stage.plan(
        smoke="echo 'Traceback: ptxas says what is wrong' >&2; exit 1",
        diagnosis="echo blocking=$CUDA_LAUNCH_BLOCKING >&2",
        train="echo blocking=${CUDA_LAUNCH_BLOCKING:-no}",
    )
    assert stage.run("first") == 1
    calls = stage.calls
    assert list(calls) == ["smoke", "diagnosis", "train", "attention", "inference"]
    assert "blocking=1" in stage.files["diagnosis.log"] and "blocking=no" in stage.files["train.log"]
    assert all("not vitfast" in calls[name] for name in ("train", "attention", "inference"))
    assert "--only" not in calls["diagnosis"] and "--debug" in calls["diagnosis"]
    shown = stage.text[stage.text.index("the smallest check failed") :]
    assert "ptxas says what is wrong" in shown and json.loads(stage.files["steps_first.json"])["checks"]["smoke"] == 1


def test_an_interrupted_run_keeps_what_it_has(stage):
    stage.plan(attention="echo started > $REHEARSAL/started; sleep 300 & sleep 300")
    start = time.monotonic()
    process = stage.start("first", str(stage.out))
    while not (stage.folder / "started").exists():
        assert process.poll() is None and time.monotonic() - start < 30
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert stage.end(process, start) == 130
    states = stage.states()
    assert states["train"] == "ok" and states["attention"] == "interrupted" and "blocks" not in states


def test_stages_add_up_in_one_archive(stage):
    (stage.out).mkdir()
    assert stage.run("first") == 0
    stage.plan(gpu_tests="exit 1", sanitizer="exit 0", ops_mlp="exit 5", tune='echo "{}" > "$VITFAST_TILES"')
    assert stage.run("tests", "-x") == 1
    tests = json.loads(stage.files["steps_tests.json"])
    assert tests["checks"] == {"vitfast doctor": 0, "gpu tests": 1, "compute-sanitizer": 0}
    assert "--dist load" in stage.calls["gpu_tests"] and stage.calls["gpu_tests"].endswith(" -x")
    assert (
        stage.run("ops", "-k", "forward", VITFAST_TILES="") == 0
    )  # pytest's 5: the user's -k left nothing of that file
    names = [f"ops_{name}" for name in ("attention", "layer_norm", "patch_embed", "block", "mlp")]
    assert list(stage.states("ops")) == ["prepare", *names] and "-k forward --bench" in stage.calls["ops_mlp"]
    (stage.folder / "home" / ".cache" / "vitfast").mkdir(parents=True)
    assert stage.run("tune", "--model", "L/16") == 0
    assert int(re.search(r"--seconds (\d+) --model L/16", stage.calls["tune"])[1]) in range(500, 550)
    assert stage.run("models", "-k", "S/16 and train") == 0
    assert stage.run("models", "-k", "L/16") == 0 and "-k L/16 --bench" in stage.calls["models_L_16"]
    assert {"models_S_16_and_train.json", "steps_models_S_16_and_train.json", "steps_models_L_16.json"} <= set(
        stage.files
    )
    assert {"tiles.json", "train.json", "ops_mlp.json", "steps_first.json", "sanitizer.log"} <= set(stage.files)


def test_what_is_missing_is_installed_or_linked_and_the_cache_unpacked(stage):
    (stage.folder / "installed").write_text("vitfast is not installed\n")
    cache = stage.folder / "cache.tar.xz"
    stage.plan(pip="echo no network; exit 1", cache='[ -f "$2" ]')
    assert stage.run("first", VITFAST_CACHE=str(cache)) == 1  # it is not there
    assert stage.states()["prepare"] == "failed" and stage.states()["gpu_tests"] == "ok"
    cache.touch()
    assert stage.run("first", VITFAST_CACHE=str(cache)) == 0
    link = stage.folder / "tree" / "vitfast" / "kernels"
    assert link.is_symlink() and link.resolve() == stage.folder / "tree" / "kernels"
    assert "linked vitfast/kernels" in stage.files["prepare.log"] and stage.calls["cache"].endswith(
        f"bench/cache.py {cache}"
    )
    assert stage.run("ops") == 0  # no archive is no failure
    (stage.folder / "tree" / "bench" / "cache").mkdir()
    (stage.folder / "tree" / "bench" / "cache" / "sm90.tar.xz").touch()
    assert stage.run("train") == 0 and stage.calls["cache"].endswith("bench/cache.py bench/cache/sm90.tar.xz")


@pytest.fixture
def client(tmp_path):
    """A $PYTHON whose children find torch, timm and a GPU's stand-in imported."""
    folder = tmp_path / "server"
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    command = [
        sys.executable,
        str(ROOT / "tests" / "helpers" / "stand_in.py"),
        str(folder / "socket"),
        str(folder / "python"),
    ]
    server = subprocess.Popen(command, env=environment)
    while not os.access(folder / "python", os.X_OK):
        assert server.poll() is None
        time.sleep(0.1)
    yield folder / "python"
    server.kill()
    server.wait()


PLUGINS = "-p stand_in -p no:cacheprovider -p xdist.plugin -p pytest_benchmark.plugin"  # others take a second each time
MAIN = "B/16 224 B256"


def faithful(
    stage: Stage, client: Path, options: str = "", arguments: tuple[str, ...] = ("first",), **environment: str
) -> int:
    """A stage in this very tree, on the stand-in for a GPU."""
    (stage.folder / "listings").touch()
    stage.environment |= dict(
        PYTHON=str(client), PYTEST_ADDOPTS=f"{PLUGINS} {options}", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
    )
    stage.environment |= dict(VITFAST_COMMIT="abc1234", **environment)
    stage.environment.pop("TRITON_INTERPRET", None)
    wanted, *given = arguments
    start, command = time.monotonic(), ["bash", str(ROOT / "bench" / "gpu.sh"), wanted, str(stage.out), *given]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return stage.end(subprocess.Popen(command, env=stage.environment, **pipes), start, patience=400)


def cases(stage: Stage, name: str, state: str = "benchmarks") -> list[str]:
    return [case["name"] for case in json.loads(stage.files[f"{name}.json"])[state]]


def measures_what_it_should(stage: Stage, client: Path) -> None:
    """Every case that the plan names is selected, runs through the branches for a GPU, and stands in the report."""
    assert faithful(stage, client) == 0, stage.text
    settings = ("vitfast compile bf16", "timm compile bf16", "vitfast compile amp", "timm compile amp")
    settings += ("vitfast compile bf16 again",)
    assert cases(stage, "train") == [f"test_train[{MAIN}-{setting}]" for setting in settings]
    accelerated = [f"test_train[{MAIN}-vitfast.accelerate(timm) compile {precision}]" for precision in ("bf16", "amp")]
    assert cases(stage, "accelerate") == accelerated
    inference = {f"test_inference[B/16 224-{s}-{what}]" for s in settings[:2] for what in ("latency", "throughput")}
    assert set(cases(stage, "inference")) == inference
    directions = ("forward", "backward", "both")
    sdpa = ("vitfast", *(f"sdpa {backend}" for backend in ("flash", "cudnn", "efficient", "math")))
    for step, test in (("attention", "test_attention"), ("attention_separate", "test_attention_separate")):
        assert set(cases(stage, step)) == {f"{test}[{MAIN}-{d}-{impl}]" for d in directions for impl in sdpa}
        assert all("flash-attn" in name for name in cases(stage, step, "skipped"))
    impls = ("vitfast", "eager", "compile")
    halves = {
        f"test_{half}[{MAIN}-{d}-{i}]" for half in ("attention_block", "mlp_block") for d in directions for i in impls
    }
    assert set(cases(stage, "blocks")) == halves
    embeds = {(d, i, p) for d in directions for i in (*impls, "compile unfold") for p in ("uint8", "float")}
    wanted = {f"test_add_layer_norm[{MAIN}-{d}-{i}]" for d in directions for i in impls}
    wanted |= {f"test_patch_embed[{MAIN}-{d}-{i}-{p}]" for d, i, p in embeds}
    assert set(cases(stage, "norm_and_patches")) == wanted
    assert not any(
        cases(stage, name, "failed")
        for name in FIRST
        if f"{name}.json" in stage.files and name not in ("smoke", "doctor")
    )
    for case in json.loads(stage.files["train.json"])["benchmarks"]:
        info = case["extra_info"]
        assert (
            info["device"] == "NVIDIA H100 80GB HBM3"
            and info["peak_mib"] > 0
            and set(info["largest_batch"]) == {"24 GiB", "80 GiB"}
        )
    graphs = {c["name"]: c["extra_info"]["cuda_graph"] for c in json.loads(stage.files["inference.json"])["benchmarks"]}
    assert all(used == ("latency" in name) for name, used in graphs.items())
    smoke, doctor = (json.loads(stage.files[f"{name}.json"])["results"] for name in ("smoke", "doctor"))
    assert {r["op"] for r in smoke} == {
        "layer_norm",
        "attention",
        "attention, N = 300",
        "linear_gelu",
        "linear_gelu, tanh",
    }
    assert (
        {r["dtype"] for r in smoke} == {"bfloat16"} and len(doctor) == 36 and all(r["passed"] for r in smoke + doctor)
    )
    assert "36 passed, 2 skipped" in stage.files["gpu_tests.log"]  # 12 operations twice, in B/16's sizes and H/14's
    for what in (
        "of timm bf16 ",
        "throughput ",
        "attention B/16 224 forward ",
        "mlp_block B/16 224 backward ",
        "smoke 100 %",
    ):
        assert what in stage.text[stage.text.index("| what |") :]
    assert "abc1234" in (stage.out / "report.md").read_text()


def survives_faults(stage: Stage, client: Path) -> None:
    """Our MLP half is off by a tenth, and SDPA's efficient backend runs out of memory: nothing else is lost."""
    left_out = "bench/bench_layer_norm.py bench/bench_patch_embed.py tests/kernels/test_gpu.py".split()
    assert (
        faithful(stage, client, " ".join(f"--deselect={name}" for name in left_out), VITFAST_PLANT="wrong memory") == 1
    )
    ours, theirs = [[n for n in cases(stage, "train", s) if "vitfast" in n] for s in ("failed", "benchmarks")]
    assert len(ours) == 3 and theirs == [] and len(cases(stage, "train")) == 2
    assert all("WrongResult: vitfast" in case["reason"] for case in json.loads(stage.files["train.json"])["failed"])
    assert "accelerate" not in stage.states() and all("[B/16 224-timm" in name for name in cases(stage, "inference"))
    assert set(cases(stage, "blocks", "failed")) == {
        f"test_mlp_block[{MAIN}-{d}-vitfast]" for d in ("forward", "backward", "both")
    }
    failed = json.loads(stage.files["attention.json"])["failed"]
    assert len(failed) == 3 and all("sdpa efficient" in c["name"] and "out of memory" in c["reason"] for c in failed)
    assert len(cases(stage, "attention")) == 12 and stage.states()["gpu_tests"] == "failed"  # where -k finds nothing
    wrong = [r for r in json.loads(stage.files["doctor.json"])["results"] if not r["passed"]]
    assert {r["op"] for r in wrong} == {"mlp_block"} and stage.states()["smoke"] == "ok"


def runs_the_other_stages(stage: Stage, client: Path) -> None:
    """`tests`, `ops` and `tune`, one after the other into the same archive; an operation that is off by a tenth fails."""
    alone = ("--ignore-glob=*/test_[!g]*", "-k", "same_bits")  # test_gpu.py: reading all tests takes long
    assert faithful(stage, client, arguments=("tests", *alone)) == 0, stage.text
    found = json.loads(stage.files["steps_tests.json"])
    assert found["checks"] == {"vitfast doctor": 0, "gpu tests": 0}  # nobody has a compute-sanitizer here
    assert "12 passed" in stage.files["gpu_tests.log"] and found["skipped"][0]["name"] == "compute-sanitizer"
    chosen = ("ops", "-k", "B/16 and 224 and B256 and both and not max-autotune")
    assert faithful(stage, client, arguments=chosen, VITFAST_PLANT="wrong") == 1
    files = [f"ops_{name}" for name in ("attention", "layer_norm", "patch_embed", "block", "mlp")]
    assert [len(cases(stage, name)) for name in files] == [10, 6, 8, 5, 9]
    assert cases(stage, "ops_block", "failed") == [f"test_mlp_block[{MAIN}-both-vitfast]"]
    stage.environment.pop("VITFAST_PLANT")
    assert faithful(stage, client, arguments=("tune", "--only", "gelu")) == 0, stage.text
    log, table = stage.files["tune.log"], json.loads(stage.files["tiles.json"])
    assert re.search(r"B/16: \d+ compilations, \d+ results checked, \d+ timings", log) and table["trying"] == []
    assert all(f"{op} " in log for op in ("gelu_bwd", "linear_gelu_fwd", "dgelu_matmul"))
    assert {row["gpu"] for row in table["tiles"]} <= {"NVIDIA H100 80GB HBM3"} and "ops_mlp.json" in stage.files


@pytest.mark.slow(60)
def test_every_stage_on_a_stand_in_for_a_gpu(tmp_path, client):
    """One test, so that there is one server."""
    measures_what_it_should(Stage(tmp_path / "right"), client)
    survives_faults(Stage(tmp_path / "faults"), client)
    runs_the_other_stages(Stage(tmp_path / "others"), client)


BREAKS = """
import sys, types, pytest
broken = []

def synchronize():
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

answers = dict(is_available=lambda: True, synchronize=synchronize, memory_reserved=lambda: 0)
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(**answers))

@pytest.mark.parametrize("n", range(12))
def test_n(n):
    if n == 3:
        broken.append(n)  # which nobody sees before the device is waited for
    synchronize() if n != 3 else None
"""


@pytest.mark.parametrize("workers, passed", [("2", 12), ("0", 4)])
def test_a_broken_device_ends_its_worker_and_spoils_no_other_test(tmp_path, workers, passed):
    (tmp_path / "test_breaks.py").write_text(BREAKS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "200",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-p",
        "device_guard",
        "-n",
        workers,
        "-q",
        "-ra",
        "test_breaks.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and re.search(rf"\b{passed} passed", done.stdout), done.stdout + done.stderr
    assert re.search(r"ERROR test_breaks.py::test_n\[3\] - Failed: the GPU does not answer any more", done.stdout)
    bad = set(re.findall(r"^(?:FAILED|ERROR) test_breaks.py::test_n\[(\d+)\]", done.stdout, re.M))
    assert bad == {"3"}, done.stdout


def test_on_a_gpu_what_must_not_be_missed_comes_first():
    expected = """
        tests/kernels/test_gpu.py::test_the_same_inputs_give_the_same_bits
        tests/kernels/test_gpu.py::test_every_rival_computes_the_same
        tests/kernels/test_gpu.py::test_attention_around_tile_edges
        tests/kernels/test_gpu.py::test_every_operation
        tests/kernels/test_mlp.py::test_real_shapes
        tests/adapters/test_gpu.py::test_dtypes
        tests/model/test_export.py::test_aoti_package
    """.split()
    assert sorted(expected[::-1], key=conftest.urgency) == expected


@pytest.mark.slow(6)
def test_the_sanitizer_is_given_every_kernel_to_watch(capsys):
    """The script runs in the interpreter, tiny, with the shipped tiles and with their rivals."""
    names = list(sanitized.plan())
    assert {name.partition(",")[0] for name in names} == set(
        name.partition(",")[0] for name in cases_of(SMALL_SIZES, ops)
    )
    before = launches_made()
    sanitized.run_all("linear_gelu, tanh")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "linear_gelu, tanh" and launches_made() - before > 3 * len(out) - 3
    assert any("provider='tma'" in line for line in out) and len(out) == len(set(out))


def test_no_kernel_of_ours_is_kept_from_racecheck():
    kernels = re.findall(r"@triton.jit\s+def (\w+)", "".join(p.read_text() for p in (ROOT / "kernels").glob("*.py")))
    assert len(kernels) > 20
    assert [k for k in kernels if k.endswith("_kernel") and any(name in k for name in sanitized.FOREIGN)] == []


@pytest.mark.parametrize("checker", sanitized.CHECKERS)
def test_what_the_sanitizer_is_asked(tmp_path, monkeypatch, checker):
    """By a stand-in that CUDA_HOME leads to: the script runs alone first, then under it."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/bash\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING" "$@" >> {tmp_path}/asked\nexec "${{@: -1}}"\n'
    )
    tool.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(f"#!/bin/bash\necho runs >> {tmp_path}/asked\nexit $(cat {tmp_path}/code)\n")
    script.chmod(0o755)
    monkeypatch.setattr(sanitized, "COMMAND", [str(script)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitized.find() == (shutil.which("compute-sanitizer") or str(tool))
    monkeypatch.setattr(sanitized, "find", lambda: str(tool))
    (tmp_path / "code").write_text("0")
    assert sanitized.check(checker) == (0, "")
    first, asked, last = (tmp_path / "asked").read_text().splitlines()
    assert first == last == "runs" and f"--tool {checker} --error-exitcode 9" in asked and asked.endswith(str(script))
    assert asked.startswith("1 ") == (checker == "memcheck")
    assert ("--kernel-name-exclude kns=gemm,kns=" in asked) == (checker == "racecheck")
    (tmp_path / "code").write_text("3")  # it fails by itself: nothing to watch
    assert sanitized.check(checker)[0] == 3 and (tmp_path / "asked").read_text().count("--tool") == 1
    (tmp_path / "code").write_text("0")
    tool.write_text("#!/bin/bash\necho as far as here\nexec sleep 60\n")
    assert sanitized.check(checker, seconds=0.5) == (None, "as far as here\n")


@pytest.mark.parametrize("arguments, said", [(["first"], "no NVIDIA GPU"), (["frist"], "no stage 'frist'")])
def test_no_gpu_or_no_such_stage_is_one_line_and_exit_code_2(stage, arguments, said):
    (stage.folder / "no_gpu").touch()
    process = stage.start(*arguments, str(stage.out))
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and text.count("\n") == 1 and said in text and not stage.out.exists()


def test_what_is_missing_on_the_way_to_the_gpu_is_said(stage):
    (stage.folder / "no_triton").touch()
    process = stage.start("first", str(stage.out))
    text, _ = process.communicate(timeout=60)
    assert (
        process.returncode == 2 and "cannot use torch and triton: ModuleNotFoundError: No module named 'triton'" in text
    )
