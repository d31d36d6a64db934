"""`report.py --add` takes what is honest: power limits, old drivers, few CPUs, and GPUs of other kinds.

The archives are made up, apart from what an H200 said; the times of real GPUs are in test_report_add.py.
"""

import json
from pathlib import Path

import gpu_archive
import plausible
import pytest
from gpu_archive import add, fact, fails, members

A100 = dict(
    DEVICE="NVIDIA A100-SXM4-80GB", SIZES="sm_80, 79 GiB, 108 multiprocessors, L2 40 MiB, CUDA 13.0", SHEET=312e12
)
A100["CEILINGS"] = dict(copy=1.75e12, bfloat16=2.6e14, float16=2.6e14, float32=1.9e13)
AD102 = "sm_89, 24 GiB, 128 multiprocessors, L2 72 MiB, CUDA 13.0"
RTX4090 = dict(DEVICE="NVIDIA GeForce RTX 4090", SIZES=AD102, SHEET=165.2e12)
RTX4090["CEILINGS"] = dict(copy=9.2e11, bfloat16=1.7e14, float16=1.7e14, float32=5.5e13)
AD103 = "sm_89, 16 GiB, 76 multiprocessors, L2 64 MiB, CUDA 13.0"
RTX4080 = dict(DEVICE="NVIDIA GeForce RTX 4080", SIZES=AD103, SHEET=None)
RTX4080["CEILINGS"] = dict(copy=6.5e11, bfloat16=1.0e14, float16=1.0e14, float32=4.5e13)


def power_limited(files):
    for sample in files["clocks.json"]["samples"]:
        sample.update({"clocks.sm": 1590.0, "power.draw": 690.0, "reasons": 0x4})


def fields_lost(files):
    """A slice of a GPU, whose driver knows neither its load nor its power."""
    for sample in files["clocks.json"]["samples"]:
        sample.update({"utilization.gpu": None, "power.draw": None, "temperature.gpu": None})
    fact("power.limit", "[N/A]")(files)
    fact("clocks.max.memory", "[N/A]")(files)


def few_cpus(files):
    """Most of the time goes into compiling, and there is none for what comes last; one moment was hot."""
    for number, sample in enumerate(files["clocks.json"]["samples"]):
        sample["utilization.gpu"] = 90.0 if number in (30, 45, 60) else 3.0
    files["clocks.json"]["samples"][45]["reasons"] |= 0x20
    for name in ("inference", "attention_separate", "norm_and_patches"):
        del files[f"{name}.json"]
    for case in files["train.json"]["benchmarks"][2:]:
        entry = dict(name=case["name"], fullname=case["fullname"], reason="out of time")
        files["train.json"]["skipped"].append(entry)
    del files["train.json"]["benchmarks"][2:]
    files["steps_first.json"]["checks"]["first gpu tests"] = 124
    for step in files["steps_first.json"]["steps"][6:]:
        step.update(state="skipped", code=None, seconds=0)


def too_large(files):
    reason = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 592.00 MiB."
    fails("train", *(c["extra_info"]["impl"] for c in files["train.json"]["benchmarks"]), reason=reason)(files)


HONEST = {
    "an H200 at its power limit": ({}, power_limited),
    "a driver that lacks fields": ({}, fields_lost),
    "a machine of few CPUs": ({}, few_cpus),
    "an A100": (A100, power_limited),
    "an RTX 4090": (RTX4090, power_limited),
    "a batch that does not fit": (RTX4080, too_large),
}


@pytest.mark.parametrize("what", HONEST)
def test_what_is_honest_is_added(what, place, tmp_path, capsys, monkeypatch):
    (root, files), (facts, change) = place, HONEST[what]
    for name, value in facts.items():
        monkeypatch.setattr(gpu_archive, name, value)
    files = gpu_archive.good(files["manifest.json"]["commit"])
    change(files)
    gpu_archive.write(tmp_path / "a.tar.gz", members(files))
    assert add(root, tmp_path / "a.tar.gz") == 0, capsys.readouterr().err
    assert "is left out" not in (root / "bench" / "results" / "README.md").read_text()


def test_what_doctor_said_on_a_real_gpu_is_whole_and_right():
    """Its names of operations are nobody's invention: each that is asked for is there."""
    folder = Path(__file__).parents[2] / "bench" / "results" / "h200"
    facts = json.loads((folder / "train.json").read_text())["machine_info"]["vitfast"]
    machine = plausible.check_machine(
        {"train.json": {"machine_info": {"vitfast": facts}}}, facts["device"], facts["commit"]
    )
    plausible.check_doctor(json.loads((folder / "doctor.json").read_text()), "doctor.json", machine, whole=True)
