"""`vitfast doctor`: what it examines, what it says of wrong kernels, and the processes that it runs."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run_cli
from processes import SERVER
from tool_children import deadly
from triton.backends.nvidia import compiler

from vitfast.kernels import tiles
from vitfast.kernels.attention import launchers as attention
from vitfast.tools import child, doctor


def test_doctor_takes_an_operation_in_all_its_forms_or_a_part_of_names():
    names = lambda *only: list(dict.fromkeys(name for name, _ in doctor.tasks(only)))  # noqa: E731
    assert names("attention") == ["attention", "attention, N = 300"]
    assert names("attention, N = 300", "mlp") == ["attention, N = 300", "mlp", "mlp, quick_gelu"]
    forms = {"attention_block": ("", ", fp32 stream", ", packed", ", one image")}
    forms["mlp_block"] = "", ", one image", ", fp32 stream"
    blocks = [name + form for name, of in forms.items() for form in of] + ["gated_mlp_block"]
    patches = [f"patch_embed{form}" for form in ("", ", uint8", ", fp32 images", ", packed")]
    assert names("_block", "patch") == [*patches, *blocks]
    assert names() == list(doctor.cases(doctor.SMALL_SIZES, doctor.ops)) and len(doctor.tasks()) == 3 * len(names())
    assert doctor.tasks(["layer_norm"], "float16") == [("layer_norm", "float16")]


@pytest.mark.parametrize(
    "given, named",
    [
        (["--only", "mlp", "--only", "nothing"], "no operation has 'nothing' in its name; there are layer_norm;"),
        (["--only", ""], "no operation has '' in its name"),
        (["--jobs", "0"], "--jobs"),
        (["--dtype", "bfloat16"], "ml_dtypes"),
    ],
)
def test_doctor_refuses_what_does_not_exist_here(capsys, monkeypatch, given, named):
    monkeypatch.setattr(doctor.launch, "bfloat16_mended", False)
    monkeypatch.setattr(doctor, "prepare", lambda: None)
    code, out, err = run_cli(capsys, "doctor", *given)
    assert code == 2 and not out and named in err


def test_what_fp32_is_judged_by_is_fp32(monkeypatch):
    """On a GPU PyTorch's convolutions take TF32 unless they are told not to."""
    seen = []

    def embed(*tensors):
        seen.append((doctor.ops.dispatch.current_mode(), torch.backends.cudnn.conv.fp32_precision))
        return doctor.ops.patch_embed(*tensors)

    before = torch.backends.cudnn.conv.fp32_precision
    inputs = doctor.cases(doctor.SMALL_SIZES, doctor.ops)["patch_embed"][1]
    assert doctor.check_operation("patch_embed", embed, inputs, torch.float32, torch.device("cpu"), timed=False).passed
    assert [precision for mode, precision in seen if mode == "off"] == ["ieee"] * 3
    assert torch.backends.cudnn.conv.fp32_precision == before != "ieee"


def test_as_many_processes_as_cpus_and_as_fit_into_the_gpus_free_memory(monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert doctor.most_processes() == 16  # interpreted: whatever GPU there is
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "INTERPRETED", False)
        for gib, wanted in ((3, 1), (23.6, 5), (80, 16)):
            patch.setattr(torch.cuda, "mem_get_info", lambda gib=gib: (int(gib * 2**30), 2**37))
            assert doctor.most_processes() == wanted
    asked = []
    monkeypatch.setattr(doctor, "most_processes", lambda: 2)
    monkeypatch.setattr(doctor, "in_processes", lambda work, todo, jobs: asked.append(jobs) or [])
    run_cli(capsys, "doctor", "--jobs", "9", "--only", "layer_norm")
    assert asked == [2]


def test_on_a_gpu_doctor_names_ptxas_and_what_is_missing(monkeypatch, major=9):
    monkeypatch.delenv("CC", raising=False)
    gpu = SimpleNamespace(name="GPU", major=major, minor=0, total_memory=2**36)
    monkeypatch.setattr(doctor, "INTERPRETED", False)
    monkeypatch.setattr(doctor, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(doctor.cublaslt, "unsupported_reason", lambda *_: None)
    facts = doctor.machine()
    said = subprocess.run([compiler.get_ptxas(10 * major).path, "--version"], capture_output=True, text=True).stdout
    assert f"release {facts['ptxas']}," in said and list(facts)[2:4] == ["triton", "ptxas"]
    assert "launcher" not in facts and facts["cublaslt"] == "built, for linear_residual" and "tiles" not in facts
    gpu.major, gpu.minor = 8, 6
    monkeypatch.setattr(tiles, "generation", lambda _: 89)
    assert doctor.machine()["tiles"].startswith("those of sm_89, as sm_86 has no table of its own")
    monkeypatch.setenv("CC", "no-such-compiler")
    reason = "Triton cannot build any that is not in its cache: CC is 'no-such-compiler', which is not a program"
    assert doctor.machine()["launcher"] == reason


def test_doctor_hands_its_options_to_the_process_with_the_interpreter(monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(doctor.launch, "INTERPRETED", False)
    answer = SimpleNamespace(returncode=7)
    monkeypatch.setattr(subprocess, "run", lambda command, env: commands.append((command, env)) or answer)
    given = "--jobs=3 --only=mlp --only=layer_norm --dtype=float16 --json --untimed --debug".split()
    assert run_cli(capsys, "doctor", *given)[0] == 7
    assert commands[0][0][3:] == ["doctor", *given] and commands[0][1]["TRITON_INTERPRET"] == "1"


def test_doctor_keeps_both_ends_of_a_failure_and_shows_the_first_traceback(monkeypatch, capsys):
    def broken(*args):
        raise ValueError("where it starts" + 400 * " and so on" + " what is wrong")

    monkeypatch.setattr(attention, "attention_fwd", broken)
    code, out, err = run_cli(
        capsys, "doctor", "--only", "attention, N = 300", "--only", "layer_norm", "--debug", "--json"
    )
    rows = {(r["op"], r["dtype"]): r for r in json.loads(out)["results"]}
    bad = rows["attention, N = 300", "float16"]
    assert code == 1 and len(rows) == 6 and rows["layer_norm", "float32"]["passed"]
    assert bad["failure"].startswith("ValueError: where it starts") and bad["failure"].endswith("what is wrong")
    assert len(bad["failure"]) <= 400 and "in broken" in bad["traceback"]
    assert err.count("Traceback") == 1 and "The first failure, attention, N = 300 in bfloat16:" in err
    assert "3 of 6 passed" in err


def test_doctor_says_what_an_interruption_left_out(monkeypatch, capsys):
    def interrupted(task, timed):
        if task[1] == "float32":
            raise KeyboardInterrupt
        return doctor.Result(*task, 0.0, 0.0, True)

    monkeypatch.setattr(doctor, "perform", interrupted)
    code, out, err = run_cli(capsys, "doctor", "--only", "layer_norm", "--json")
    assert (
        code == 130
        and json.loads(out)["not_examined"] == 1
        and "2 of 3 passed, 1 not examined: interrupted in layer_norm in float32" in err
    )


def test_products_of_few_rows_are_kernels_of_ours_in_the_interpreter():
    """By the rule they are cuBLAS's, which would be compared with itself."""
    with tiles.using() as used:
        assert doctor.perform(("linear_residual", "float16")).passed
    assert {config.provider for (op, _, _), config in used.items() if op == "linear_residual_fwd"} == {"triton"}


def test_doctor_says_what_is_of_another_kind(monkeypatch, capsys):
    operation = importlib.import_module("vitfast.ops.layer_norm")  # its function has the same name
    forward = operation.layer_norm_fwd

    def double(*given, **options):
        y, *rest = forward(*given, **options)
        return y.double(), *rest

    monkeypatch.setattr(operation, "layer_norm_fwd", double)
    code, out, _ = run_cli(capsys, "doctor", "--only", "layer_norm", "--dtype", "float16")
    assert code == 1 and "result 0 is float64 (2, 5, 64), PyTorch's float16 (2, 5, 64)" in out


@pytest.mark.slow
def test_without_a_gpu_doctor_interprets_in_processes_of_its_own():
    """Where the environment says nothing of the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "vitfast", "doctor", "--only", "linear_gelu", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "6 of 6 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_process_that_dies_is_a_failed_row_and_one_that_hangs_is_ended(monkeypatch, tmp_path):
    """The others go on, and each task is done once; what a process has started ends with it."""
    monkeypatch.setattr(child.multiprocessing, "get_context", lambda kind: SERVER)
    todo = [(name, "float16") for name in ("exits", "a", "crashes", "b")]
    found = {r.op: r for r in doctor.in_processes(deadly, todo, jobs=2)}
    assert len(found) == 4 and {name for name, r in found.items() if r.passed} == set("ab")
    assert found["exits"].failure == "its process died with exit code 3"
    assert found["crashes"].failure == "its process died by signal 11 (SIGSEGV)"
    begun = time.monotonic()
    hangs = ["sh", "-c", f"echo $$ > {tmp_path / 'pid'}; exec sleep 600"]
    with pytest.raises(child.Lost, match="^took longer than 2 s$"):
        child.Children(doctor.__name__).run(2, subprocess.run, hangs)
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() - begun < 30
