"""The plan of bench/gpu.sh against a stand-in for Python: what runs after what failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import FIRST, ILLEGAL

ROOT = Path(__file__).parents[2]


def test_script_without_a_gpu_is_one_line_and_exit_2(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", ROOT / "bench" / "gpu.sh", "ops", tmp_path / "out"], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1 and "no NVIDIA GPU" in run.stderr
    assert not (tmp_path / "out").exists()
    run = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", "op"], env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "no stage 'op'" in run.stderr


def test_first_goes_through_all_its_steps(stage):
    assert stage.run("first", VITFAST_COMMIT="abc1234") == 0
    assert stage.states() == dict.fromkeys(FIRST, "ok")
    assert list(stage.calls) == FIRST[1:]  # prepare asks no Python for anything
    assert "abc1234" in stage.files["prepare.log"] and "NVIDIA Rehearsal" in stage.files["prepare.log"]
    assert "--only patch_embed, uint8 --dtype bfloat16" in stage.calls["smoke"]
    assert " -n 1 " in stage.calls["gpu_tests"]  # there is memory for one, as stand_in.sh tells
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
