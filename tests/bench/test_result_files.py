"""Result files: the newest state of a case counts, a damaged file is named."""

import json
from pathlib import Path

import pytest
import report
import result_files
from bench_results import entry, model_entry, op_entry, state_file

ROOT = Path(__file__).parents[2]


def test_a_damaged_file_is_named_and_the_others_count(results):
    """Half written, not described, from another program; a stage without any result says so."""
    folder = results / "h200"
    (folder / "half.json").write_text((folder / "a.json").read_text()[:-100])
    (folder / "undated.json").write_text(json.dumps(dict(benchmarks=[], failed=[], skipped=[])))
    undescribed = json.loads((folder / "a.json").read_text())
    undescribed["benchmarks"][0]["extra_info"].pop("op")
    (folder / "undescribed.json").write_text(json.dumps(undescribed))
    (folder / "list.json").write_text("[1, 2]")
    checks = {"doctor": 0, "gpu tests": dict(code=3, reason="worker gw1 crashed"), "sanitizer": None}
    listed = dict(failed=[dict(name="test_x[1]", reason="illegal access")], skipped=["test_y"])
    (folder / "checks.json").write_text(json.dumps(dict(listed, checks=checks)))
    step = dict(name="train", state="timed out", code=124, seconds=230.1)
    steps = dict(
        steps=[dict(step, name="doctor", state="ok", code=0), step, dict(name="tune", state="skipped", code=None)]
    )
    (folder / "steps_first.json").write_text(json.dumps(steps))
    found = report.load(folder)
    assert set(found.damaged) == {"half.json", "undated.json", "undescribed.json"}
    assert found.checks == {"doctor": 0, "gpu tests": 3} and len(found.of("train")) == 2
    text = report.sections(found)
    assert "- half.json is left out: JSONDecodeError" in text and "attention B/16 224 forward 1.50" in text
    for row in ("gpu tests | failed | worker gw1 crashed", "test_x[1] | failed | illegal access", "test_y | skipped |"):
        assert f"| {row}" in text
    assert "| sanitizer | skipped |" in text and "step doctor" not in text
    assert "| step train | timed out | exit code 124 after 230.1 s |" in text and "| step tune | skipped |  |" in text


def test_the_newest_state_of_a_case_counts_but_a_skip_hides_nothing(tmp_path):
    """By the date in the files: their names are in the opposite order."""
    case = op_entry("attention", "vitfast", "forward", 100)
    wrong = dict(name=case["name"], fullname=case["fullname"], params={}, reason="WrongResult: vitfast is wrong")
    skip = wrong | dict(reason="not run: the process ended before")

    def found(*states: str) -> report.Results:
        folder = tmp_path / "-".join(states)
        folder.mkdir()
        for day, state in enumerate(states):
            of = dict(time=dict(benchmarks=[case]), failure=dict(failed=[wrong]), skip=dict(skipped=[skip]))[state]
            state_file(folder, f"{9 - day}", f"2026-01-0{day + 1}T00:00:00.500000+00:00", **of)
        return report.load(folder)

    row = f"| {case['name']} | failed | WrongResult: vitfast is wrong |"
    for states in (("time", "failure"), ("time", "failure", "skip"), ("failure", "skip"), ("time", "skip", "failure")):
        results = found(*states)
        text = report.sections(results)
        assert not results.measured and not results.damaged and "100 ± 2" not in text, states
        assert row in text.partition("Without a time")[2], states
    for states in (("failure", "time"), ("time", "skip"), ("skip", "time"), ("failure", "skip", "time")):
        results = found(*states)
        assert list(results.measured) == [case["fullname"]] and not results.missing and not results.damaged, states
    assert [c["state"] for c in found("skip").missing.values()] == ["skipped"]


def test_dates_with_different_offsets_are_compared_as_moments(tmp_path):
    early, late = (op_entry("attention", "vitfast", "forward", time) for time in (100, 200))
    state_file(tmp_path, "late", "2026-01-01T23:00:00-05:00", benchmarks=[late])
    state_file(tmp_path, "early", "2026-01-02T01:00:00+00:00", benchmarks=[early])
    state_file(tmp_path, "undated", "yesterday", benchmarks=[early])
    results = report.load(tmp_path)
    assert results.measured[late["fullname"]]["stats"]["median"] == pytest.approx(200e-6)
    assert list(results.damaged) == ["undated.json"]


def without(case: dict, path: str, *value) -> dict:
    """The case without extra_info.KEY or stats.KEY, or with another value there."""
    changed = json.loads(json.dumps(case))
    part, key = path.split(".")
    changed[part].pop(key)
    if value:
        changed[part][key] = value[0]
    return changed


def test_a_file_without_a_key_that_is_used_is_named_with_the_key(tmp_path, capsys):
    """Everything else is shown: one odd file does not end the report."""
    good, train = op_entry("attention", "vitfast", "forward", 100), model_entry("vitfast compile bf16", 4000.0)
    inference = [model_entry("timm compile bf16", 4000.0, op) for op in ("throughput", "latency")]
    files = dict(op="train from JPEG files", shape="S/16 224 B256", direction="both", impl="timm")
    files.update(images_per_second=9.0, images_per_second_in_memory=10.0, waiting_for_data=0.1, workers=8)
    files = entry("files", 1.0, **files)
    state_file(tmp_path, "good", "2026-01-01", benchmarks=[good, train, *inference, files])
    odd = [(good, f"stats.{key}") for key in ("median", "iqr")]
    odd += [(good, f"extra_info.{key}") for key in result_files.INFO]
    for case, kinds in ((train, result_files.MODEL_INFO), (files, result_files.FILES_INFO)):
        odd += [(case, f"extra_info.{key}") for key in kinds if key not in ("error", "largest_batch")]
    for number, (case, path) in enumerate(odd):
        state_file(tmp_path, f"odd{number}", "2026-01-02", benchmarks=[without(case, path)])
    values = dict(median=0.0, iqr="2", images_per_second=None, impl="mine", shape="B/16", largest_batch="90")
    for key, value in values.items():
        path = f"{'stats' if key in ('median', 'iqr') else 'extra_info'}.{key}"
        state_file(tmp_path, f"value-{key}", "2026-01-02", benchmarks=[without(train, path, value)])
    for name, curves_ in (("steps", dict(distance="abc")), ("distance", "all"), ("list", [1])):
        if curves_ == "all":
            curves_ = dict(steps=9, runs=1, planned=2, precision="amp", distance="abc")
        (tmp_path / f"curves-{name}.json").write_text(json.dumps(dict(curves=curves_)))
    (tmp_path / "checks.json").write_text(json.dumps(dict(checks={"doctor": 1}, steps=[dict(state="failed")])))
    nothing = dict(datetime="2026-01-02", benchmarks=[], failed=[], skipped=[])
    (tmp_path / "no_machine.json").write_text(json.dumps(nothing))
    results = report.load(tmp_path)
    for number, (_, path) in enumerate(odd):
        assert f"{path} is missing" in results.damaged.pop(f"odd{number}.json"), path
    for key in values:
        assert f".{key} is " in results.damaged.pop(f"value-{key}.json"), key
    expected = {
        "curves-steps.json": "curves.steps is missing",
        "curves-distance.json": "curves.distance is 'abc'",
        "curves-list.json": "curves.steps is missing",
        "checks.json": "steps: name is missing",
        "no_machine.json": "machine_info is missing",
    }
    assert results.damaged == {name: f"ValueError: {why}" for name, why in expected.items()}
    assert not results.checks and not results.curves and len(results.measured) == 5
    assert report.main(["--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "- curves-steps.json is left out: ValueError: curves.steps is missing" in text and "100 ± 2" in text
