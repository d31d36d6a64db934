"""The targets, worked out by hand from made-up results."""

import json
import subprocess
import sys
from pathlib import Path

import report
import targets
from bench_results import model_entry, op_entry, planted_results, text_of

ROOT = Path(__file__).parents[2]


def row_of(text: str, what: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {what}"))


def test_targets_stand_beside_what_was_measured(results):
    """Numbers worked out by hand from the planted results; what has no result says so."""
    folder = results / "h200"
    (folder / "checks.json").write_text(json.dumps(dict(checks={"vitfast doctor": 0, "gpu tests": 1})))
    (folder / "curves.json").write_text(
        json.dumps(dict(curves=dict(steps=1000, distance=0.31, runs=4, planned=6, precision="amp")))
    )
    text = report.sections(report.load(folder))
    # attention: 150 / 100 us forward; nothing was measured of the backward alone, nor of flash forward
    measured = row_of(text, "attention N = 197")
    assert measured.endswith("| attention B/16 224 forward 1.50 (without sdpa flash, flash-attn 3, flash-attn 4) |")
    without = "(without max-autotune, max-autotune all)"
    wanted = f"| bf16 of timm bf16 0.80 {without} **missed**; of the data sheet's peak 40 % |"
    assert wanted in row_of(text, "B/16 224 training step")
    assert "vitfast doctor 100 %; gpu tests 0 % **missed**" in row_of(text, "gpu tests")
    assert "| amp, 1000 steps, 4 of 6 runs, largest distance in seed deviations 0.31 |" in row_of(text, "loss curves")
    assert "| bf16 of timm bf16 compiled 1.00 **missed** |" in row_of(text, "peak memory")
    for what in (
        "S/16, L/16",
        "B/16 inference",
        "residual add",
        "fc1 + GELU",
        "patch embedding",
        "`vitfast.accelerate",
    ):
        assert row_of(text, what).endswith("| not measured yet |"), what


def test_headlines_compare_equal_precision_and_the_slower_of_two(results):
    """amp against amp, by the pair of equal numerics; ours counts with the slower of its two runs."""
    speeds = {
        "vitfast compile bf16": 7000.0,
        "vitfast compile bf16 again": 6000.0,
        "vitfast compile amp": 6500.0,
        "vitfast.accelerate(timm) compile amp": 5200.0,
        "vitfast.accelerate(timm) compile bf16": 5960.0,
        "timm compile bf16": 4000.0,
        "timm max-autotune bf16": 3900.0,
        "timm max-autotune all bf16": 3950.0,
        "timm compile amp": 4000.0,
        "timm max-autotune amp": 4100.0,
    }
    found = planted_results(*(model_entry(impl, speed) for impl, speed in speeds.items()))
    figures = list(map(str, targets.training_step(found)))
    assert figures[0] == "bf16 of timm bf16 1.50 (stretch)"  # 6000 / 4000
    assert figures[1] == "accelerate amp of timm amp 1.27 (without max-autotune all) **missed**"  # 5200 / 4100
    assert list(map(str, targets.accelerated(found))) == ["bf16 of our own ViT 0.99", "amp of our own ViT 0.80"]
    assert list(targets.other_models(found)) == list(targets.inference(found)) == []
    row = "| train B/16 224 bf16 | 6,000 | 5,960 | 4,000 (timm compile bf16) | 1.50 | 1.49 |"
    assert row in report.speed_table(found)
    both = report.model_table(found.of("train"), "train")
    assert "| vitfast compile bf16 |" in both and "| vitfast compile bf16 again |" in both
    assert both.splitlines()[2].endswith("| error |") and "| cudnn | 1.5e-02 |" in both


def test_targets_of_other_models_by_hand():
    """The fastest of all peers counts, 4,000 of Hugging Face, each model against its own peers."""
    speeds = {"vitfast compile bf16": 6200.0, "timm compile bf16": 3000.0, "huggingface compile bf16": 4000.0}
    cases = [model_entry(impl, speed, shape="S/16 224 B512") for impl, speed in speeds.items()]
    cases += [model_entry("torchvision compile bf16", 9000.0, shape="L/16 224 B128")]
    cases += [model_entry("vitfast.accelerate(timm) compile amp", 1200.0, shape="H/14 224 B64")]
    cases += [model_entry("timm compile amp", 1000.0, shape="H/14 224 B64")]
    without = "(without max-autotune, max-autotune all)"
    assert text_of(targets.other_models(planted_results(*cases))) == [
        f"S/16 224 bf16 1.55 {without} (stretch)",
        f"H/14 224 accelerate amp 1.20 {without} **missed**",
    ]


def test_targets_of_inference_by_hand():
    """Throughput 1,500 / 1,000 images/s; half the latency, of which 0.8 is the bound.

    One image in 1/500 s against 1/250 s.
    """

    def cases(ours: float) -> list[dict]:
        throughput = [("vitfast", 1500.0, "throughput", 256), ("timm", 1000.0, "throughput", 128)]
        both = [*throughput, ("vitfast", ours, "latency", 1), ("timm", 250.0, "latency", 1)]
        return [model_entry(f"{of} compile bf16", speed, op, f"B/16 224 B{batch}") for of, speed, op, batch in both]

    without = "(without max-autotune, max-autotune all)"
    throughput = f"throughput 1.50 {without}"
    assert text_of(targets.inference(planted_results(*cases(500.0)))) == [
        throughput,
        f"latency of one image 0.50 {without}",
    ]
    assert text_of(targets.inference(planted_results(*cases(200.0)))) == [
        throughput,
        f"latency of one image 1.25 {without} **missed**",
    ]


def test_targets_of_memory_by_hand():
    """1,220 MiB of 2,000 (amp, at most 0.6) is missed, of 1,900 (bf16, at most 0.65) is met."""
    sizes = {"vitfast compile bf16": 1220.0, "timm compile amp": 2000.0, "timm compile bf16": 1900.0}
    sizes |= {"timm eager amp": 100.0, "timm max-autotune bf16": 100.0}  # do not count: not compiled as ours is
    cases = [model_entry(impl, 9000.0 if size == 100.0 else 4000.0, peak_mib=size) for impl, size in sizes.items()]
    assert text_of(targets.memory(planted_results(*cases))) == [
        "bf16 of timm amp compiled 0.61 **missed**",
        "bf16 of timm bf16 compiled 0.64",
    ]


def test_operations_are_compared_at_the_largest_batch():
    """Smaller ones, of which each shape has some, do not count: there ours would have won by 9."""
    cases = []
    for shape, work, ours, theirs in (
        ("B/16 224 B1", 10, 1, 9),
        ("B/16 224 B256", 2560, 100, 150),
        ("B/16 224 B64", 640, 1, 9),
        ("H/14 224 B64", 99999, 100, 110),
    ):
        for impl, duration in (("vitfast", ours), ("sdpa cudnn", theirs), ("sdpa math", 2 * theirs)):
            cases.append(op_entry("attention", impl, "forward", duration, shape, bytes=work))
    without = "(without sdpa flash, flash-attn 3, flash-attn 4)"
    assert text_of(targets.attention(planted_results(*cases))) == [
        f"attention B/16 224 forward 1.50 {without}",
        f"attention H/14 224 forward 1.10 {without} **missed**",
    ]


def test_a_share_of_the_copy_rate_is_of_the_ceiling_in_the_file_of_the_case(results):
    """3,720 GB/s: 93 % where this run's copy reached 4,000 GB/s, whatever a newer file of another op has."""
    folder = results / "h200"
    content = json.loads((folder / "b.json").read_text())
    content["machine_info"]["vitfast"]["ceilings"]["copy"] = 4e12
    case = op_entry("add_layer_norm", "vitfast", "forward", 100, gigabytes_per_second=3720.0)
    lost = op_entry("add_layer_norm", "vitfast", "backward", 100, gigabytes_per_second=3400.0)
    (folder / "b.json").write_text(json.dumps(content | dict(benchmarks=[case, lost])))
    newer = json.loads((folder / "a.json").read_text())
    newer["machine_info"]["vitfast"]["ceilings"]["copy"] = 3.8e12
    (folder / "a.json").write_text(json.dumps(newer))
    found = report.load(folder)
    assert found.machines[-1]["ceilings"]["copy"] == 3.8e12
    figures = text_of(targets.layer_norm(found))
    assert figures == ["B/16 224 forward 93 %", "B/16 224 backward 85 % **missed**"]


def test_targets_of_the_mlp_checks_and_curves_by_hand():
    cases = [op_entry("mlp_block", impl, "backward", time) for impl, time in (("vitfast", 100), ("compile", 125))]
    cases += [op_entry("mlp_block", how, "backward", 121) for how in targets.AUTOTUNED]
    found = planted_results(*cases)
    assert text_of(targets.mlp(found)) == ["mlp_block B/16 224 backward 1.21"]
    found.checks.update({"gpu tests": 0, "vitfast doctor": 2})
    assert text_of(targets.checks(found)) == ["gpu tests 100 %", "vitfast doctor 0 % **missed**"]
    for distance, end in ((1.9, "1.90"), (2.1, "2.10 **missed**")):
        found.curves = dict(steps=50, distance=distance, runs=6, planned=6, precision="bf16")
        assert text_of(targets.loss_curves(found)) == [f"bf16, 50 steps, largest distance in seed deviations {end}"]


def test_a_ratio_names_the_peers_that_have_no_time():
    """There is none for the MLP before its compiled peer has a time; peers of the patch embedding unfold."""
    ours = [op_entry("linear_gelu", "vitfast", direction, 100) for direction in ("forward", "backward")]
    eager = [op_entry("linear_gelu", "eager", direction, 110) for direction in ("forward", "backward")]
    found = planted_results(*ours, *eager, op_entry("linear_gelu", "compile", "forward", 130))
    assert list(map(str, targets.mlp(found))) == [
        "linear_gelu B/16 224 forward 1.10 (without max-autotune, max-autotune all) **missed**"
    ]
    cases = [op_entry("patch_embed uint8", impl, "forward", time) for impl, time in (("vitfast", 50), ("compile", 400))]
    cases += [op_entry("patch_embed uint8", impl, "forward", 300) for impl in ("max-autotune", "max-autotune all")]
    assert list(map(str, targets.patch_embedding(planted_results(*cases)))) == [
        "patch_embed uint8 B/16 224 forward 6.00 (without compile unfold)"
    ]
    cases.append(op_entry("patch_embed uint8", "compile unfold", "forward", 100))
    assert list(map(str, targets.patch_embedding(planted_results(*cases)))) == [
        "patch_embed uint8 B/16 224 forward 2.00 **missed**"
    ]
    peers = [op_entry("attention separate", impl, "backward", 250) for impl in targets.SDPA_AND_FLASH]
    found = planted_results(op_entry("attention separate", "vitfast", "backward", 100), *peers)
    assert list(map(str, targets.attention(found))) == ["attention separate B/16 224 backward 2.50 (stretch)"]


def test_a_target_that_cannot_be_computed_says_so_and_the_others_are_shown():
    found = planted_results(op_entry("mlp_block", "vitfast", "forward", 100))
    found.curves, found.checks = dict(distance=1.0), {"gpu tests": 0}
    rows = {what: figures for what, _, figures in targets.target_rows(found)}
    assert rows["loss curves, ours against timm"] == "cannot be computed: KeyError: 'steps'"
    assert rows["gpu tests, `vitfast doctor`, compute-sanitizer"] == "gpu tests 100 %"
    assert len(rows) == len(targets.TARGETS)


def test_the_targets_alone_are_printed_without_torch(results, tmp_path):
    script = "import sys, report; code = report.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"

    def printed(folder: Path) -> str:
        command = [sys.executable, "-c", script, "--folder", str(folder), "--targets"]
        run = subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    lines = printed(results / "h200").splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [what for what, _, _ in targets.TARGETS]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "cut.json").write_text('{"benchmarks": [')
    assert printed(tmp_path / "empty").splitlines()[0] == "no result in empty"
