"""All of bench/gpu.sh against tests/helpers/stand_in.py, where the CPU plays torch.cuda.

Nothing here shows that a kernel compiles or is right on a GPU, that a backend of SDPA takes a case, that a CUDA graph
captures, what a GPU that hangs does to SIGKILL, or how long anything takes.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import packed_models
import pytest
from rehearsal import FIRST, Stage

ROOT = Path(__file__).parents[2]


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
    """Every case of the plan is selected, runs through the GPU's branches, and is in the report."""
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
        "patch_embed, uint8",
    }
    assert (
        {r["dtype"] for r in smoke} == {"bfloat16"} and len(doctor) == 69 and all(r["passed"] for r in smoke + doctor)
    )
    assert "69 passed, 2 skipped" in stage.files["gpu_tests.log"]  # 23 operations twice, in B/16's sizes and H/14's
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
    """Our MLP block is off by a tenth, SDPA's efficient backend has no memory: nothing else is lost."""
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
    """`tests`, `ops` and `tune` into the same archive; an operation off by a tenth and a lack of memory fail alone."""
    alone = ("--ignore-glob=*/test_[!g]*", "-k", "same_bits")  # test_gpu.py: reading all tests takes long
    assert faithful(stage, client, arguments=("tests", *alone)) == 0, stage.text
    found = json.loads(stage.files["steps_tests.json"])
    assert found["checks"] == {"vitfast doctor": 0, "gpu tests": 0}  # nobody has a compute-sanitizer here
    assert "23 passed" in stage.files["gpu_tests.log"] and found["skipped"][0]["name"] == "compute-sanitizer"
    chosen = ("ops", "-k", "(B/16 and 224 and B256 or NaViT) and both and not max-autotune")
    assert faithful(stage, client, arguments=chosen, VITFAST_PLANT="wrong memory") == 1
    names = "attention attention_options layer_norm patch_embed block mlp packed"
    files = [f"ops_{name}" for name in names.split()]
    assert [len(cases(stage, name)) for name in files] == [8, 6, 9, 8, 8, 12, 6]
    assert cases(stage, "ops_block", "failed") == [f"test_mlp_block[{MAIN}-both-vitfast]"]
    failed = json.loads(stage.files["ops_attention.json"])["failed"]
    assert len(failed) == 2 and all("sdpa efficient" in c["name"] and "out of memory" in c["reason"] for c in failed)
    stage.environment.pop("VITFAST_PLANT")
    assert faithful(stage, client, arguments=("models", "-k", "packed and NaViT")) == 0, stage.text
    ways = [f"{way} {how}" for how in ("compile", "eager") for way in packed_models.WAYS]
    assert cases(stage, "models_packed_and_NaViT") == [f"test_train_packed[NaViT 64-256 px-{way}]" for way in ways]
    assert "| vitfast padded compile |" in stage.files["report.md"]
    assert faithful(stage, client, arguments=("tune", "--only", "gelu")) == 0, stage.text
    log, table = stage.files["tune.log"], json.loads(stage.files["tiles.json"])
    assert re.search(r"B/16: \d+ compilations, \d+ results checked, \d+ timings", log) and table["trying"] == []
    assert all(f"{op} " in log for op in ("gelu_bwd", "linear_gelu_fwd", "dgelu_matmul"))
    assert {row["gpu"] for row in table["tiles"]} <= {"NVIDIA H100 80GB HBM3"} and "ops_mlp.json" in stage.files


@pytest.mark.slow(50)
def test_every_stage_on_a_stand_in_for_a_gpu(tmp_path, client):
    """One test, so that there is one server."""
    measures_what_it_should(Stage(tmp_path / "right"), client)
    runs_the_other_stages(Stage(tmp_path / "others"), client)


@pytest.mark.long
def test_the_first_stage_survives_faults(tmp_path, client):
    survives_faults(Stage(tmp_path / "faults"), client)
