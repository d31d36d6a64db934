"""The report and the targets, worked out by hand from made-up results; damaged files; what is stale."""

import json
from pathlib import Path

import pytest
import report
import targets

ROOT = Path(__file__).parents[2]
CEILINGS = dict(copy=4e12, bfloat16=8e14)


def entry(op: str, impl: str, microseconds: float, direction="forward", shape="B/16 224 B256", **more) -> dict:
    info = dict(op=op, impl=impl, shape=shape, direction=direction, dtype="bfloat16", flops=10**9, bytes=10**7)
    info |= dict(percent_of_floor=5e3 / microseconds, tflops=1e3 / microseconds, peak_mib=2048.0, error=0.015)
    info |= dict(gigabytes_per_second=1e4 / microseconds) | more
    name = f"{op} {impl} {shape} {direction}"
    stats = dict(median=1e-6 * microseconds, iqr=2e-6)
    return dict(name=name, fullname=f"bench/{name}", stats=stats, extra_info=info)


def model(impl: str, speed: float, op="train", shape="B/16 224 B256", **more) -> dict:
    info = dict(precision=impl.replace(" again", "").split()[-1], batch=256, images_per_second=speed, attention="cudnn")
    info |= dict(model_flops=10**12, mfu_ceiling=0.5, mfu_datasheet=0.4) | more
    return entry(op, impl, 256e6 / speed, "both", shape, **info)


def write(folder: Path, name: str, date: str, ceilings=CEILINGS, commit: str = "a", **cases: list[dict]) -> None:
    """A result file of this date, with cases under benchmarks, failed or skipped."""
    content = dict(benchmarks=[], failed=[], skipped=[], datetime=date) | cases
    facts = dict(device="GPU", torch="2.11", commit=commit, datasheet_bf16_flops=989e12, ceilings=ceilings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content | dict(machine_info=dict(vitfast=facts))))


def missing(name: str, reason: str) -> dict:
    return dict(name=name, fullname=f"bench/{name}", reason=reason)


@pytest.fixture
def results(tmp_path) -> Path:
    """Two files of one GPU: attention won forward and lost in both directions, a model lost."""
    ours = [entry("attention", "vitfast", 100), entry("attention", "vitfast", 400, "both")]
    theirs = [entry("attention", "sdpa cudnn", 150), entry("attention", "sdpa cudnn", 200, "both")]
    models = [model("vitfast compile bf16", 4000.0), model("timm compile bf16", 5000.0)]
    failed = [missing("one|two\nthree", "OutOfMemoryError:\n\nno|room <b> [a](b)")]
    folder = tmp_path / "results" / "h200"
    write(folder, "b", "2026-01-01", dict(CEILINGS, copy=4.1e12), benchmarks=ours, failed=failed)
    write(folder, "a", "2026-01-02", benchmarks=[*theirs, *models], skipped=[missing("train max", "out of time")])
    checks, code = {"vitfast doctor": 0, "gpu tests": 3}, dict(code=124, seconds=230.1)
    steps = [dict(name="doctor", state="ok", code=0, seconds=9), dict(name="train", state="timed out", **code)]
    (folder / "steps_first.json").write_text(json.dumps(dict(checks=checks, steps=steps)))
    page = tmp_path / "docs" / "tutorials" / "fast-settings.md"
    for path in (tmp_path / "README.md", tmp_path / "results" / "README.md", page):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    (shipped := tmp_path / "vitfast" / "tools" / "cost").mkdir(parents=True)
    (shipped / "measured.csv").write_text("old\n")
    return tmp_path / "results"


def test_the_report_shows_what_is_lost_and_what_failed_and_knows_when_it_is_stale(results):
    readme = results.parent / "README.md"
    assert report.main(["--check"], results, results.parent) == 1 and report.main([], results, results.parent) == 0
    text = (results / "README.md").read_text()
    for row in (
        "B/16 224 B256 forward | 100 ± 2 | 150 ± 2 | 50 % | 1.50",
        "B/16 224 B256 both | 400 ± 2 | 200 ± 2 | 12 % | 0.50",
        "one\\|two three | failed | OutOfMemoryError: no\\|room &lt;b> [a]\\(b)",
        "train max | skipped | out of time",
        "gpu tests | failed | exit code 3",
        "step train | timed out | exit code 124 after 230.1 s",
    ):
        assert f"| {row} |" in text, row
    assert "copy 4,100 GB/s, bfloat16 800 TFLOP/s (bf16 by the data sheet: 989)" in text and "step doctor" not in text
    assert text.index("| timm compile bf16 | 256 | 5,000 |") < text.index("| vitfast compile bf16 | 256 | 4,000 |")
    assert "| 50.0% | 40.0% | 2.0 | cudnn | 1.5e-02 |" in text
    short = readme.read_text()
    assert short.startswith("before\n") and short.endswith("after\n") and "\nold\n" not in short
    lost = "| bf16 by timm bf16 | ≥ 1.3 | 0.80 | 4,000 images/s of vitfast compile bf16 by 5,000 of timm compile bf16; "
    lost += "without max-autotune |"
    assert lost in text and "| B/16 224 training step, batch 256 | bf16 by timm bf16 | ≥ 1.3 | 1.29 | 0.80 |" in short
    assert "- Peers without a time: max-autotune, " in short and "- GPU, torch 2.11, commits a\n" in short
    assert (
        "|  | gpu tests: exit code | 0 | - | 3 |" in short and "| vitfast doctor: exit code | 0 | - | **0** |" in short
    )
    assert report.main(["--check"], results, results.parent) == 0
    case = results / "h200" / "a.json"
    for path, old, new in ((case, "0.00015", "0.00016"), (readme, "0.80", "1.80")):
        before = path.read_text()
        path.write_text(before.replace(old, new))
        assert report.main(["--check"], results, results.parent) == 1
        path.write_text(before)


def test_the_committed_report_is_up_to_date():
    assert report.main(["--check"]) == 0


def test_a_damaged_file_is_named_and_the_others_count(results):
    folder = results / "h200"
    whole = (folder / "a.json").read_text()
    (folder / "half.json").write_text(whole[:-100])
    (folder / "list.json").write_text("[1, 2]")
    keys = ("op", "peak_mib", "mfu_ceiling", "median", "machine_info")
    for key in keys:
        (folder / f"{key}.json").write_text(whole.replace(f'"{key}"', '"other"'))
    found = report.load(folder)
    assert set(found.damaged) == {f"{name}.json" for name in ("half", *keys)}
    assert "lacks mfu_ceiling" in found.damaged["mfu_ceiling.json"]
    text = report.sections(found)
    assert (
        "- half.json is left out: JSONDecodeError" in text and "attention B/16 224 forward | ≥ 1.3 | **1.50**" in text
    )


def test_facts_and_reasons_that_a_table_needs_are_asked_for_at_once(results):
    """What lacks them is named as damaged, whichever table needs them; and a date may be anything."""
    folder = results / "h200"
    whole = json.loads((folder / "b.json").read_text())
    lacking = {}
    for name in ("device", "ceilings"):
        facts = {key: fact for key, fact in whole["machine_info"]["vitfast"].items() if key != name}
        lacking[name] = whole | dict(machine_info=dict(vitfast=facts))
    for name in ("name", "reason"):
        case = {key: text for key, text in whole["failed"][0].items() if key != name}
        lacking[name] = whole | dict(failed=[case])
    lacking |= dict(machine=whole | dict(machine_info=dict(vitfast=3)), checks=dict(steps=[], checks=[]))
    for name, content in (lacking | dict(number=dict(datetime=3))).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = report.load(folder)
    assert set(found.damaged) == {f"{name}.json" for name in lacking}
    assert "lacks device" in found.damaged["device.json"] and "lacks the reason of" in found.damaged["reason.json"]
    assert "attention B/16 224 forward | ≥ 1.3 | **1.50**" in report.sections(found) and report.overview([found])


def test_the_newest_state_of_a_case_counts_but_a_skip_hides_nothing(tmp_path):
    """By the date in the files: their names are in the opposite order."""
    case = entry("attention", "vitfast", 100)
    wrong = missing(case["name"], "WrongResult: vitfast is wrong")
    kinds = dict(time=dict(benchmarks=[case]), failure=dict(failed=[wrong]), skip=dict(skipped=[wrong]))

    def state(*states: str) -> str:
        folder = tmp_path / "-".join(states)
        for day, kind in enumerate(states):
            write(folder, f"{9 - day}", f"2026-01-0{day + 1}T00:00:00.500000+00:00", **kinds[kind])
        found = report.load(folder)
        assert len(found.measured) + len(found.missing) == 1 and not found.damaged
        return "measured" if found.measured else found.missing[case["fullname"]]["state"]

    assert state("skip") == "skipped"
    for states in (("time", "failure"), ("time", "failure", "skip"), ("failure", "skip"), ("time", "skip", "failure")):
        assert state(*states) == "failed", states
    for states in (("failure", "time"), ("time", "skip"), ("skip", "time"), ("failure", "skip", "time")):
        assert state(*states) == "measured", states


MAX = "(without max-autotune)"
SDPA = "(without sdpa flash, flash-attn 3, flash-attn 4)"


def entries(op: str, times: dict[str, float], *where: str, **more) -> list[dict]:
    return [entry(op, impl, time, *where, **more) for impl, time in times.items()]


def models(speeds: dict[str, float], *where: str, **more) -> list[dict]:
    return [model(impl, speed, *where, **more) for impl, speed in speeds.items()]


B16 = {"vitfast compile bf16": 7000.0, "vitfast compile bf16 again": 6000.0, "vitfast compile amp": 6500.0}
B16 |= {"vitfast.accelerate(timm) compile amp": 5200.0, "timm max-autotune bf16": 3900.0}
B16 |= {"timm compile bf16": 4000.0, "timm compile amp": 4100.0, "torchvision compile bf16": 9000.0}
LATENCY = {"vitfast compile bf16": 500.0, "timm compile bf16": 250.0, "huggingface compile bf16": 200.0}
MEMORY = {"vitfast compile bf16": 1220.0, "timm compile amp": 2000.0, "timm compile bf16": 1900.0}
CURVES = [("vitfast", 0, [1.0, 2.0]), ("vitfast", 1, [3.0, 2.0]), ("timm", 0, [2.0, 2.2]), ("timm", 1, [4.0, 2.8])]
INFERENCE = {"vitfast compile bf16": 6000.0, "timm max-autotune bf16": 4000.0, "timm compile amp": 9000.0}
TARGETS = {  # by target: cases, and what the target says
    # ours counts with the slower of its two runs; amp against amp, by the pair of equal numerics
    "B/16 224 training step": (
        models(B16),
        "bf16 by timm bf16 (6,000 images/s of vitfast compile bf16 again by 4,000 of timm compile bf16) 1.50; "
        "accelerate amp by timm amp (5,200 images/s of vitfast.accelerate(timm) compile amp by 4,100 of timm compile "
        f"amp) 1.27 {MAX} **missed**; share of the peak by the data sheet (vitfast compile bf16 again) 0.40",
    ),
    # ours as CUDA graphs, and the peer without: it is named; where the peer has them too, it is not
    "B/16 224 training step ": (
        models({"vitfast reduce-overhead bf16": 6500.0, "vitfast compile bf16": 6000.0, "timm compile bf16": 5000.0}),
        "bf16 by timm bf16 (6,500 images/s of vitfast reduce-overhead bf16 by 5,000 of timm compile bf16) 1.30 "
        "(without max-autotune, reduce-overhead); share of the peak by the data sheet (vitfast reduce-overhead bf16) "
        "0.40",
    ),
    "B/16 224 training step  ": (
        models({"vitfast reduce-overhead bf16": 6500.0, "timm reduce-overhead bf16": 5000.0}),
        "bf16 by timm bf16 (6,500 images/s of vitfast reduce-overhead bf16 by 5,000 of timm reduce-overhead bf16) 1.30 "
        f"{MAX}; share of the peak by the data sheet (vitfast reduce-overhead bf16) 0.40",
    ),
    "B/16 inference": (
        models(LATENCY, "latency", "B/16 224 B1"),
        "latency of one image by the best peer's (500 images/s of vitfast compile bf16 by 250 of timm compile bf16) "
        f"0.50 {MAX}",
    ),
    # amp is no peer of bf16, whatever its speed
    "B/16 inference ": (
        models(INFERENCE, "throughput", mfu_datasheet=0.5),
        "throughput by the best peer's (6,000 images/s of vitfast compile bf16 by 4,000 of timm max-autotune bf16) "
        "1.50; "
        "share of the peak by the data sheet (vitfast compile bf16) 0.50 **missed**",
    ),
    "peak memory": (
        [model(impl, 4000.0, peak_mib=size) for impl, size in MEMORY.items()],
        "vitfast compile bf16 by timm amp compiled (4,000 images/s) 0.61 **missed**; "
        "vitfast compile bf16 by timm bf16 compiled (4,000 images/s) 0.64",
    ),
    "attention N": (  # at the largest batch: at the other ours would have won by 9
        entries("attention", {"vitfast": 100, "sdpa cudnn": 150, "sdpa math": 300}, bytes=2560)
        + entries("attention", {"vitfast": 1, "sdpa cudnn": 9}, "forward", "B/16 224 B64", bytes=640),
        f"attention B/16 224 forward 1.50 {SDPA}",
    ),
    "residual add": (
        entries("add_layer_norm", dict(vitfast=9), percent_of_floor=93.0)
        + entries("add_layer_norm", dict(vitfast=9), "backward", percent_of_floor=85.0),
        "B/16 224 forward 0.93; B/16 224 backward 0.85 **missed**",
    ),
    "fc1 + GELU": (  # without a time of the compiled peer there is no figure
        entries("mlp_block", dict(vitfast=100, compile=125)) + entries("linear_gelu", dict(vitfast=100, eager=130)),
        f"mlp_block B/16 224 forward 1.25 {MAX}",
    ),
    "loss curves": (  # first window: means 2 and 3, deviations of sqrt(2); second: 2 and 2.5, of 0.3 (0 and 0.42)
        [
            entry("loss curve", f"{of} compile amp", 9, shape="S/16", precision="amp", seed=seed, losses=losses)
            for of, seed, losses in (*CURVES, ("vitfast", 2, [9.0, 9.0]))
        ],
        "S/16 amp, in deviations (2 seeds) 1.67",
    ),
}


def told(folder: Path, target: str) -> str:
    """The rows of a target in one line: "figure (cases) value (without settings) **missed**; ..."."""
    found = []
    for what, of, _, shown, details in targets.target_rows(report.load(folder)):
        if what.startswith(target.strip()):
            cases, _, missing = details.partition("without ")
            cases = f" ({cases.rstrip('; ')})" if cases else ""
            missed = "" if "*" in shown else " **missed**"  # a star: neither
            found.append(
                f"{of}{cases} {shown.strip('*').strip(chr(92))}{f' (without {missing})' * bool(missing)}{missed}"
            )
    return "; ".join(found)


@pytest.mark.parametrize("what", TARGETS)
def test_targets_by_hand(what, tmp_path):
    cases, wanted = TARGETS[what]
    write(tmp_path, "a", "2026-01-01", benchmarks=[case | dict(fullname=str(i)) for i, case in enumerate(cases)])
    assert told(tmp_path, what) == wanted and told(tmp_path, "gpu tests") == ""


def test_the_overview_has_a_row_for_each_figure_and_a_column_for_each_gpu(tmp_path, monkeypatch):
    """What one of them lacks is "-"; what is only predicted has a row too."""
    inference = "B/16 inference"
    monkeypatch.setattr(targets, "predictions", lambda: {(inference, "throughput by the best peer's"): 1.2})
    pair = {"vitfast compile bf16": 1400.0, "timm max-autotune bf16": 1000.0}
    write(tmp_path / "one", "a", "2026-01-01", benchmarks=models(pair))
    write(tmp_path / "two", "a", "2026-01-01", benchmarks=entries("attention", {"vitfast": 100, "sdpa cudnn": 120}))
    rows, without = targets.figure_rows([report.load(tmp_path / "one"), report.load(tmp_path / "two")])
    assert rows == [
        ["B/16 224 training step, batch 256", "bf16 by timm bf16", "≥ 1.3", "-", "**1.40**", "-"],
        ["", "share of the peak by the data sheet", "≥ 0.29", "-", "**0.40**", "-"],
        [inference, "throughput by the best peer's", "≥ 1.3", "1.20", "-", "-"],
        ["attention N = 197, 257, 577, forward and backward", "attention B/16 224 forward", "≥ 1.3", "-", "-", "1.20"],
    ]
    assert without == ["sdpa flash", "flash-attn 3", "flash-attn 4"]
    graphs = {"vitfast reduce-overhead bf16": 1400.0, "timm max-autotune bf16": 1000.0}
    write(tmp_path / "three", "a", "2026-01-01", benchmarks=models(graphs))
    text = report.overview([report.load(tmp_path / "three")])
    assert "| 1.40\\* |" in text and "- \\*: ours ran as CUDA graphs (reduce-overhead), " in text
    assert "- Peers without a time: reduce-overhead\n" in text


def test_a_ratio_is_of_the_cases_of_one_commit(tmp_path):
    """The newest that has both; a case that has failed since has none."""
    speeds = {"vitfast compile bf16": 4000.0, "vitfast.accelerate(timm) compile bf16": 4200.0}
    least = [model("vitfast compile bf16 least memory", 3000.0, peak_mib=1000.0, precision="bf16")]
    least += [model("timm compile bf16", 2000.0, peak_mib=2000.0)]
    older = [*models(speeds), *least, *entries("attention", {"vitfast": 100, "sdpa cudnn": 150})]
    newer = models({"vitfast compile bf16": 5000.0, "timm compile bf16": 4000.0}, peak_mib=4000.0)
    write(tmp_path, "older", "2026-01-01", benchmarks=older)
    write(tmp_path, "newer", "2026-01-02", commit="b", benchmarks=[*newer, entry("attention", "vitfast", 50)])

    assert "5,000 images/s of vitfast compile bf16 by 4,000 of timm compile bf16) 1.25" in told(tmp_path, "B/16 224")
    assert "(timm) compile bf16 by 4,000 of vitfast compile bf16) 1.05" in told(tmp_path, "`vitfast.accelerate")
    assert told(tmp_path, "attention").startswith("attention B/16 224 forward 1.50")
    both = "(5,000 images/s) 1.00 **missed**; vitfast compile bf16 least memory by timm bf16 compiled (3,000 images/s)"
    assert told(tmp_path, "peak memory") == f"vitfast compile bf16 by timm bf16 compiled {both} 0.50"
    failed = missing(older[1]["name"], "WrongResult")
    write(tmp_path, "newest", "2026-01-03", commit="b", failed=[failed])
    assert told(tmp_path, "`vitfast.accelerate") == ""


def test_a_damaged_file_is_no_committed_result(results, capsys):
    """--check reads the form of each: one that is damaged fails, also where the report says so."""
    (results / "h200" / "half.json").write_text("{")
    assert report.main([], results, results.parent) == 0
    assert report.main(["--check"], results, results.parent) == 1
    assert "h200/half.json: JSONDecodeError" in capsys.readouterr().out
