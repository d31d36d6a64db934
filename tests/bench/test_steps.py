"""bench/steps.sh against a stand-in for Python: deadlines, hangs, interrupts, logs, archives."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from rehearsal import FIRST, HANG, Stage

ROOT = Path(__file__).parents[2]


def every_step_hangs(stage):
    """Until its limit: the deadline holds, and what is not reached is recorded as skipped."""
    stage.plan(**dict.fromkeys(FIRST[2:], HANG))
    yield dict(VITFAST_SECONDS="12")
    states = stage.states()
    assert (
        stage.took < 12
        and states["smoke"] == "ok"
        and states["doctor"] == "timed out"
        and states["gpu_tests"] == "skipped"
    )
    assert list(states) == FIRST and '"code": null' in stage.files["steps_first.json"]


def a_step_hangs(stage):
    """It ignores SIGINT and SIGTERM, with a child in another session; later steps get their turn.

    The other one ends on SIGINT, as pytest does, with what it has to say.
    """
    tells = "trap 'echo told by SIGINT; exit 1' INT; trap 'exit 1' TERM; sleep 300 & wait"
    stage.plan(train=HANG, attention=tells)
    yield dict(VITFAST_SECONDS="16")
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


def a_process_cannot_be_killed(stage):
    """As one that waits for a driver: it is given up. Here the `timeout` that should end it does nothing."""
    (stage.folder / "bin").mkdir()
    fake = stage.folder / "bin" / "timeout"
    fake.write_text(
        f'#!/bin/bash\ncase "$*" in *bench_model*test_train*) {HANG};; esac\nexec {shutil.which("timeout")} "$@"\n'
    )
    fake.chmod(0o755)
    yield dict(VITFAST_SECONDS="16", PATH=f"{stage.folder / 'bin'}:{os.environ['PATH']}")
    assert stage.took < 16 and stage.states()["train"] == "stuck" and stage.states()["attention"] == "ok"


@pytest.mark.slow(13)
def test_what_hangs_costs_its_own_time(tmp_path):
    """Three runs side by side, as all of them wait; the first to end comes first."""
    runs = []
    for run in (every_step_hangs, a_step_hangs, a_process_cannot_be_killed):
        stage = Stage(tmp_path / run.__name__)
        checks = run(stage)
        runs.append((stage, stage.start("first", str(stage.out), **next(checks)), time.monotonic(), checks))
    for stage, process, start, checks in runs:
        assert stage.end(process, start) == 1
        assert next(checks, None) is None


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
    names = [f"ops_{name}" for name in "attention attention_options layer_norm patch_embed block mlp packed".split()]
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
