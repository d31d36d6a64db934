"""The report shows what is lost and what failed, and is up to date."""

from pathlib import Path

import report
from bench_results import op_entry, state_file

ROOT = Path(__file__).parents[2]


def test_report_shows_what_is_lost_and_what_failed(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    assert report.main(["--check"], results, readme) == 1
    assert report.main([], results, readme) == 0
    text = (results / "README.md").read_text()
    assert "| B/16 224 B256 forward | 100 ± 2 | 150 ± 2 | - | 50 % | 1.50 |" in text
    assert "| B/16 224 B256 both | 400 ± 2 | 200 ± 2 | 300 ± 2 | 12 % | 0.50 |" in text
    assert "copy 4,000 to 4,100 GB/s, bfloat16 800 TFLOP/s (bf16 by the data sheet: 989)" in text
    assert (
        "| attention sdpa math both | failed | OutOfMemoryError: no room |" in text
        and "OutOfMemoryError: once" not in text
    )
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

    assert "results/README.md is stale" in stale(
        (results / "h200" / "a.json", lambda t: t.replace("0.00015", "0.00016"))
    )
    assert "README.md is stale" in stale((readme, lambda t: t.replace("0.80", "1.80")))
    assert "speed-train.svg is stale" in stale((results / "h200" / "speed-train.svg", None))
    assert report.main(["--check"], results, readme) == 0


def test_a_gpu_of_damaged_files_alone_is_named_in_the_report(tmp_path):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "cut.json").write_text('{"benchmarks": [')
    text = report.documents(tmp_path, tmp_path / "README.md")[tmp_path / "README.md"]
    assert "## h200" in text and "no result in h200\n- cut.json is left out: JSONDecodeError" in text


def test_names_and_reasons_cannot_break_a_table(tmp_path):
    case = op_entry("attention", "a|b\nc", "forward", 100)
    bad = dict(name="one|two\nthree", fullname="x", reason="first|\n\nsecond")
    state_file(tmp_path, "a", "2026-01-01", benchmarks=[case], failed=[bad])
    (tmp_path / "a|b.json").write_text("{")
    text = report.sections(report.load(tmp_path))
    assert "| one\\|two three | failed | first\\| second |" in text
    assert "| shape | a\\|b c | % floor |" in text and "- a\\|b.json is left out" in text


def test_a_folder_that_does_not_exist_is_one_line_and_exit_2(tmp_path, capsys):
    for more in ([], ["--targets"]):
        assert report.main(["--folder", str(tmp_path / "nowhere"), *more]) == 2
        out, error = capsys.readouterr()
        assert out == "" and error == f"bench/report.py: there is no folder {tmp_path / 'nowhere'}\n"


def test_without_a_result_the_report_says_so(tmp_path):
    (tmp_path / "results" / "local").mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.START}{report.END}")
    assert report.main([], tmp_path / "results", readme) == 0
    assert all(
        "No GPU result is committed yet" in path.read_text() for path in (readme, tmp_path / "results" / "README.md")
    )


def test_the_committed_report_is_up_to_date():
    assert report.main(["--check"]) == 0
