"""The benchmarks themselves: no time for a wrong result, times that are right, work counted right, nothing that failed dropped, an honest report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import bench_model  # noqa: E402
import costs  # noqa: E402
import curves  # noqa: E402
import machine  # noqa: E402
import peers  # noqa: E402
import photos  # noqa: E402
import report  # noqa: E402
from harness import WrongResult  # noqa: E402
from shapes import Shape  # noqa: E402

TINY = Shape("Ti/16", 32, 2)  # B 2, N 5, D 192, H 3, Dh 64, F 768: 10 rows, u = 1920 elements
NANO = Shape("Nano/8", 16, 2)

# Implementations of 2x, one of them right and slow, the others wrong in ways that a benchmark can miss.
PLANTED = """
import os, time
import costs, pytest, torch
from harness import Case, bench, values


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def taking(seconds):
    def double(x):
        busy(seconds)
        return 2 * x
    return double


def late(x):
    return torch.cat([2 * x[:-1], 2.01 * x[-1:]])


class Backward(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, dy: 2.01 * dy)


def hangs(x):
    time.sleep(60)


def dies(x):
    os._exit(9)


IMPLS = dict(quick=taking(0.02), slow=taking(0.04), last_sample=late, gradient=Backward.apply)
IMPLS |= dict(nan=lambda x: 2 * x / 0, raises=lambda x: x @ x, hangs=hangs, dies=dies)
COST = costs.Cost(((6e6, 5e3),))


@pytest.mark.parametrize("impl", IMPLS)
def test_double(benchmark, impl):
    case = Case("double", "cpu small B9", lambda x: 2 * x, lambda: [values(9, 3)], 1, costs.Costs(COST, COST, COST))
    bench(benchmark, case, impl, IMPLS[impl], "backward" if impl == "gradient" else "forward")
"""


def run_pytest(*arguments, **variables) -> subprocess.CompletedProcess:
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # xdist's worker would switch benchmarks off
    environment = {**outside, "PYTHONPATH": str(ROOT / "bench"), "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-only", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict:
    """The JSON file of a run over the planted implementations, the last of which ends the process."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "bench_planted.py").write_text(PLANTED)
    run = run_pytest(folder / "bench_planted.py", "-p", "conftest", "--case-limit", 8, f"--benchmark-json={folder / 'out.json'}", VITFAST_COMMIT="abc1234")
    assert run.returncode == 9, run.stdout + run.stderr
    return json.loads((folder / "out.json").read_text())


def test_a_wrong_result_gets_no_time(planted):
    reasons = {case["params"]["impl"]: case["reason"] for case in planted["failed"]}
    for impl, direction in (("last_sample", "forward"), ("gradient", "backward"), ("nan", "forward")):
        assert f"{impl} is wrong on double cpu small B9 {direction}" in reasons[impl] and "it gets no time" in reasons[impl]
    assert {case["params"]["impl"] for case in planted["benchmarks"]} == {"quick", "slow"}


def test_twice_as_slow_is_reported_as_twice_as_slow(planted):
    median = {case["params"]["impl"]: case["stats"]["median"] for case in planted["benchmarks"]}
    assert 1.8 < median["slow"] / median["quick"] < 2.2
    assert 0.018 < median["quick"] < 0.022


def test_no_case_is_dropped(planted):
    """Failed, too long, and not run because the process died: all are in the file, with the reason in one line."""
    failed = {case["params"]["impl"]: case for case in planted["failed"]}
    assert set(failed) == {"last_sample", "gradient", "nan", "raises", "hangs"}
    assert failed["raises"]["name"] == "test_double[raises]" and "cannot be multiplied" in failed["raises"]["reason"]
    assert "took longer than 8 s" in failed["hangs"]["reason"] and not any("\n" in case["reason"] for case in failed.values())
    assert [(case["name"], case["reason"]) for case in planted["skipped"]] == [("test_double[dies]", "not run: the process ended before")]


def test_json_schema(planted):
    facts = planted["machine_info"]["vitfast"]
    assert facts["commit"] == "abc1234" and facts["torch"] == torch.__version__.partition("+")[0] and facts["device"] == "cpu"
    ceilings = facts["ceilings"]
    assert set(ceilings) == {"copy", "float32"} and all(rate > 1e8 for rate in ceilings.values())
    for case in planted["benchmarks"]:
        info, median = case["extra_info"], case["stats"]["median"]
        assert (info["impl"], info["device"], info["flops"], info["bytes"]) == (case["params"]["impl"], "cpu", 6_000_000, 5_000)
        assert (info["op"], info["shape"], info["direction"], info["dtype"]) == ("double", "cpu small B9", "forward", "float32")
        floor = max(6e6 / ceilings["float32"], 5e3 / ceilings["copy"])
        assert info["floor_us"] == pytest.approx(1e6 * floor) and info["percent_of_floor"] == pytest.approx(100 * floor / median)
        assert info["tflops"] == pytest.approx(6e-6 / median) and info["gigabytes_per_second"] == pytest.approx(5e-6 / median)
        assert 0 <= info["error"] <= info["error_limit"] < 1e-5 and case["stats"]["iqr"] >= 0 and case["stats"]["rounds"] >= 5


def test_every_case_on_a_cpu_says_so_and_a_spent_budget_is_recorded(tmp_path):
    run = run_pytest("bench", "--budget", -1, f"--benchmark-json={tmp_path / 'out.json'}")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["benchmarks"] and not found["failed"]
    files = {Path(case["fullname"].partition("::")[0]).name for case in found["skipped"]}
    assert files == {path.name for path in (ROOT / "bench").glob("bench_*.py")}
    for case in found["skipped"]:
        assert case["name"].partition("[")[2].startswith("cpu small"), case["name"]
        assert case["reason"].startswith("out of time")


# ---- work


# Elements that move, written out: operands of every product once, results once. W1 and W2 have 147,456, Wqkv 110,592, Wproj 36,864.
FC1, FC2 = 1920 + 147_456 + 7680 + 768, 7680 + 147_456 + 1920 + 192  # forward, biases of F and D included
FC1_BACKWARD = (7680 + 147_456 + 1920) + (7680 + 1920 + 147_456 + 768)  # dX, dW
FC2_BACKWARD = (1920 + 147_456 + 3 * 7680) + (1920 + 7680 + 147_456 + 192)  # dpre: reads pre, writes dpre and act; dW
BY_HAND = {  # op: (flops, elements) of forward, training, backward
    "attention": ((38_400, 4 * 1920), (38_400, 4 * 1920), (96_000, 8 * 1920)),
    "layer_norm": ((0, 2 * 1920 + 384), (0, 2 * 1920 + 384), (0, 3 * 1920 + 576)),
    "add_layer_norm": ((0, 4 * 1920 + 384), (0, 4 * 1920 + 384), (0, 4 * 1920 + 576)),
    "linear_gelu": ((2_949_120, FC1), (2_949_120, FC1 + 7680), (5_898_240, FC1_BACKWARD + 2 * 7680)),
    "mlp": ((5_898_240, FC1 + FC2), (5_898_240, FC1 + FC2 + 7680), (11_796_480, FC1_BACKWARD + FC2_BACKWARD)),
    "mlp_block": (
        (5_898_240, 2 * 1920 + 384 + FC1 + FC2 + 1920),
        (5_898_240, 2 * 1920 + 384 + FC1 + FC2 + 1920 + 7680),
        (11_796_480, 4 * 1920 + 576 + FC1_BACKWARD + FC2_BACKWARD),
    ),
    "attention_block": (
        (2_987_520, 173_568),  # LayerNorm 4,224, qkv 118,848, attention 7,680, proj with its residual 42,816
        (2_987_520, 173_568),
        (5_994_240, 342_336),  # 8,256; 118,272 + 118,848; 15,360; 40,704 + 40,896
    ),
}


@pytest.mark.parametrize("op", BY_HAND)
def test_work_by_hand(op):
    found = getattr(costs, op)(TINY, 2)
    assert [(c.flops, c.bytes / 2) for c in (found.forward, found.training, found.backward)] == list(BY_HAND[op])
    assert found.of("both").flops == found.training.flops + found.backward.flops


def test_work_of_patch_embed_by_hand():
    """8 patches of 768 values; pixels 2 x 3 x 32 x 32 = 6,144; tokens 1,920, weight 147,456, bias, class token and 5 positions 1,344."""
    for size, pixel in ((2, 1), (4, 4)):
        found = costs.patch_embed(TINY, size, pixel)
        assert (found.forward.flops, found.forward.bytes) == (2_359_296, 6_144 * pixel + 150_720 * size)
        assert found.backward == found.forward


def test_the_floor_adds_up_kernels_one_after_the_other():
    cost = costs.Cost(((10.0, 1.0), (1.0, 10.0))) + costs.Cost(((0.0, 4.0),))
    assert cost.floor(flops_per_second=2.0, bytes_per_second=4.0) == 10 / 2 + 10 / 4 + 4 / 4
    b16 = costs.attention_block(Shape("B/16", 224, 256), 2)
    assert b16.forward.floor(790e12, 4.3e12) == pytest.approx(409e-6, rel=0.02)  # kernels' plan: 36 + 226 + 72 + 75 us
    assert b16.backward.floor(790e12, 4.3e12) == pytest.approx(819e-6, rel=0.02)  # 72 + 452 + 144 + 151


def test_model_flops_are_what_torch_counts():
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        model, images = VisionTransformer(), torch.randn(2, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        model(images)
    flops = costs.model_flops(Shape("B/16", 224, 2), training=False)
    assert flops == counter.get_total_flops() == 2 * 35_127_656_448
    assert costs.model_flops(Shape("B/16", 224, 2), training=True) == 3 * flops


def test_a_step_is_counted_as_vitfast_cost_counts_it():
    from vitfast import ViT, cost

    with torch.device("meta"):
        listed = cost.operations(ViT.from_preset("H/14"), 64, size=2, pixel_size=2)
    work = costs.model(Shape("H/14", 224, 64), 2)
    for ours, direction in ((work.training, "forward"), (work.backward, "backward")):
        theirs = [(op.name, op.times, kernel) for op in listed for kernel in getattr(op, direction)]
        assert ours.flops == sum(times * flops for _, times, (flops, _) in theirs)
        # Theirs has the last LayerNorm too, which only the class tokens need; ours reads the class token and the head's few operands.
        assert ours.bytes == pytest.approx(sum(times * moved for name, times, (_, moved) in theirs if name != "last LayerNorm"), rel=1e-4)


def test_datasheet_names_one_device_each():
    assert machine.datasheet_flops("NVIDIA H200") == machine.datasheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert machine.datasheet_flops("NVIDIA A100-SXM4-80GB") == 312e12 and machine.datasheet_flops("NVIDIA L40S") == 362e12
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu"):
        assert machine.datasheet_flops(other) is None


def test_largest_batch_lies_on_the_line():
    """2 GiB at batch 0, 12 GiB at batch 100: a tenth of a GiB an image. 23 usable GiB hold 210, 79 hold 770."""
    assert [bench_model.largest_batch(100, 2 << 30, 12 << 30, gib) for gib in (24, 80, 2)] == [210, 770, 0]


# ---- peers


@pytest.mark.parametrize("library", [name for name in peers.BUILDERS if name != "vitfast"])
def test_peers_compute_the_same_function(library):
    peer = peers.Peer(peers.Setting(library, "eager", "fp32"), NANO, training=True)
    assert peer.check()["error"] < 1e-5


def test_a_peer_that_computes_something_else_gets_no_time(monkeypatch):
    from timm.models.vision_transformer import VisionTransformer

    setting, size = peers.Setting("timm", "eager", "fp32"), dict(img_size=16, patch_size=8, embed_dim=64, depth=4, num_heads=4)
    for training, options in ((False, dict(act_layer="gelu_tanh")), (True, dict(norm_layer=lambda d, **_: torch.nn.LayerNorm(d, eps=1e-3)))):
        monkeypatch.setitem(peers.BUILDERS, "timm", lambda s, options=options: VisionTransformer(**size, **options))
        with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
            peers.Peer(setting, NANO, training).check()
    monkeypatch.setitem(peers.BUILDERS, "timm", lambda s: VisionTransformer(**size))
    peer = peers.Peer(setting, NANO, training=True)
    peer.model.blocks[2].attn.qkv.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult):
        peer.check()


def test_photographs_are_real_and_repeatable(tmp_path):
    from PIL import Image

    one, two = (photos.write(tmp_path / name, 16, (64, 48)) for name in "ab")
    files = sorted(path.relative_to(one) for path in one.rglob("*.jpg"))
    assert len([f for f in files if f.parts[0] == "train"]) == 16 and {f.parts[1] for f in files} == set(photos.sources())
    assert all((one / f).read_bytes() == (two / f).read_bytes() for f in files)
    with Image.open(one / files[0]) as image:
        assert image.format == "JPEG" and image.size == (64, 48) and len(set(image.convert("L").tobytes())) > 50


# ---- report and script


def entry(name: str, median: float, **info) -> dict:
    common = dict(device="GPU", dtype="bfloat16", flops=10**9, bytes=10**7, floor_us=50.0, percent_of_floor=5e-3 / median, peak_mib=2048.0)
    common.update(tflops=1e-3 / median, gigabytes_per_second=1e-2 / median)
    return dict(name=name, fullname=f"bench/{name}", stats=dict(median=median, iqr=2e-6), extra_info=common | info)


def model_entry(impl: str, speed: float) -> dict:
    info = dict(op="train", shape="B/16 224 B256", direction="both", impl=impl, precision="bf16", batch=256, images_per_second=speed, model_flops=10**12)
    info.update(mfu_ceiling=0.5, mfu_datasheet=0.4, attention="cudnn", largest_batch={"24 GiB": 90, "80 GiB": 310})
    return entry(f"train {impl}", 256 / speed, **info)


@pytest.fixture
def results(tmp_path) -> Path:
    """Two files of one GPU: attention won forward and lost in both directions, a case that failed at first and ran later, one that failed."""
    facts = dict(device="GPU", torch="2.11", commit="abc", ceilings=dict(copy=4e12, bfloat16=8e14), datasheet_bf16_flops=989e12)

    def case(impl, direction, median):
        return entry(f"attention {impl} {direction}", median, op="attention", shape="B/16 224 B256", direction=direction, impl=impl)

    def missing(name, reason):
        return dict(name=name, fullname=f"bench/{name}", params={}, reason=reason)

    ours = [case("vitfast", "forward", 100e-6), case("vitfast", "both", 400e-6)]
    theirs = [case("sdpa cudnn", "forward", 150e-6), case("sdpa cudnn", "both", 200e-6), case("sdpa flash", "both", 300e-6)]
    old = dict(
        benchmarks=ours,
        failed=[missing("attention sdpa cudnn both", "OutOfMemoryError: once"), missing("attention sdpa math both", "OutOfMemoryError: no room")],
    )
    new = dict(benchmarks=[*theirs, model_entry("vitfast compile bf16", 4000.0), model_entry("timm compile bf16", 5000.0)], failed=[])
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    for name, date, content in (("a", "2026-01-02", new), ("b", "2026-01-01", old)):
        own = dict(facts, ceilings=facts["ceilings"] | dict(copy=4e12 if name == "a" else 4.1e12))
        whole = dict(content, skipped=[missing("train max", "out of time")], datetime=date, machine_info=dict(vitfast=own))
        (folder / f"{name}.json").write_text(json.dumps(whole))
    return tmp_path / "results"


def test_report_shows_what_is_lost_and_what_failed(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    assert report.main(["--check"], results, readme) == 1
    assert report.main([], results, readme) == 0
    text = (results / "README.md").read_text()
    assert "| B/16 224 B256 forward | 100 ± 2 | 150 ± 2 | - | 50 % | 1.50 |" in text
    assert "| B/16 224 B256 both | 400 ± 2 | 200 ± 2 | 300 ± 2 | 12 % | 0.50 |" in text
    assert "copy 4,000 to 4,100 GB/s, bfloat16 800 TFLOP/s (bf16 by the data sheet: 989)" in text
    assert "| attention sdpa math both | failed | OutOfMemoryError: no room |" in text and "OutOfMemoryError: once" not in text
    assert "| train max | skipped | out of time |" in text
    assert text.index("| timm compile bf16 | 256 | 5,000 |") < text.index("| vitfast compile bf16 | 256 | 4,000 |")
    assert "| 50.0 | 40.0 | 2.0 | 90 / 310 | cudnn |" in text
    speed = readme.read_text()
    assert speed.startswith("before\n") and speed.endswith("after\n") and "old" not in speed
    assert "| train B/16 224 bf16 | 4,000 | - | 5,000 (timm compile bf16) | 0.80 | - |" in speed
    for name in ("roofline-attention", "speed-train", "memory-train"):
        assert (results / "h200" / f"{name}.svg").read_text().count("<path") > 10, name
    assert report.main(["--check"], results, readme) == 0


def test_check_finds_what_is_stale(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.START}{report.END}")
    assert report.main([], results, readme) == 0 and report.main(["--check"], results, readme) == 0

    def stale(change) -> str:
        path, text = change
        before = path.read_text()
        path.write_text(text(before)) if text else path.unlink()
        assert report.main(["--check"], results, readme) == 1
        path.write_text(before)
        return capsys.readouterr().out

    assert "results/README.md is stale" in stale((results / "h200" / "a.json", lambda t: t.replace("0.00015", "0.00016")))
    assert "README.md is stale" in stale((readme, lambda t: t.replace("0.80", "1.80")))
    assert "speed-train.svg is stale" in stale((results / "h200" / "speed-train.svg", None))
    assert report.main(["--check"], results, readme) == 0


def row_of(text: str, what: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {what}"))


def test_targets_stand_beside_what_was_measured(results):
    """Numbers worked out by hand from the planted results; what has no result says so."""
    folder = results / "h200"
    (folder / "checks.json").write_text(json.dumps(dict(checks={"vitfast doctor": 0, "gpu tests": 1})))
    (folder / "curves.json").write_text(json.dumps(dict(curves=dict(steps=1000, distance=0.31))))
    text = report.sections(report.load(folder))
    # attention: 150 / 100 us forward, 200 / 400 us both; forward against its floor of 10 MB at 4 TB/s: 100 / 2.5 us
    measured = row_of(text, "attention N = 197")
    assert "attention B/16 224 forward 1.50; attention B/16 224 both 0.50 **missed**; forward at 197, times its memory floor 40.00 **missed**" in measured
    assert "| of timm bf16 0.80 **missed**; of the data sheet's peak 40 % **missed** |" in row_of(text, "B/16 224 training step")
    assert "vitfast doctor 100 %; gpu tests 0 % **missed**" in row_of(text, "gpu tests")
    assert "distance in seed deviations 0.31 |" in row_of(text, "loss curves")
    assert "of timm bf16 1.00 **missed** |" in row_of(text, "peak memory")
    for what in ("S/16, L/16", "B/16 inference", "residual add", "fc1 + GELU", "patch embedding", "`vitfast.accelerate"):
        assert row_of(text, what).endswith("| not measured yet |"), what


def test_loss_curves_compare_the_same_training(tmp_path):
    """The same weights, images and optimiser: on a CPU in fp32 the curves are one; and the distance is what it says."""
    assert curves.distance([[1.0, 2.0], [3.0, 2.0]], [[2.0, 2.5], [4.0, 2.5]]) == pytest.approx(0.5 / 1e-3)  # no spread there: 1e-3 at least
    assert curves.distance([[1.0], [3.0]], [[2.0], [4.0]]) == pytest.approx(1 / 2**0.5)
    generator = torch.Generator().manual_seed(0)
    images, labels = curves.gratings(generator, 64, 32)
    assert images.shape == (64, 3, 32, 32) and labels.unique().numel() > 30 and 0.9 < images.std() < 1.3
    command = [str(tmp_path), "--model", "Ti/16", "--image", "32", "--batch", "4", "--steps", "3", "--seeds", "1", "--precision", "fp32"]
    assert curves.main(command) == 0
    found = json.loads((tmp_path / "curves.json").read_text())["curves"]
    ours, theirs = (found["losses"][name][0] for name in ("vitfast", "timm"))
    assert ours == pytest.approx(theirs, abs=1e-4) and 4 < ours[0] < 9 and found["machine"]["device"] == machine.name()


def test_without_a_result_the_report_says_so(tmp_path):
    (tmp_path / "results" / "local").mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.START}{report.END}")
    assert report.main([], tmp_path / "results", readme) == 0
    assert all("No GPU result is committed yet" in path.read_text() for path in (readme, tmp_path / "results" / "README.md"))


def test_the_committed_report_is_up_to_date():
    assert report.main(["--check"]) == 0


def test_script_without_a_gpu_is_one_line_and_exit_2(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    run = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", "ops", tmp_path / "out"], env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1 and "no NVIDIA GPU" in run.stderr
    assert not (tmp_path / "out").exists()
    run = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", "op"], env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "no stage 'op'" in run.stderr
