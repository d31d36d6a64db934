"""The questions to a GPU: each runs something that exists, and its answer counts as long as its files stay the same."""

import json
import os
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import asking
import bench_ops
import decide
import machine
import pytest
import report
import rivals
import targets
import torch
from asking import Prediction, Question, Rivals, faster
from questions import QUESTIONS, QUEUE

from vitfast.model.presets import preset
from vitfast.ops import reference as ref

ROOT = Path(__file__).parents[2]
REHEARSED = os.environ | dict(VITFAST_REHEARSE="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT / "bench"))
PAIR = Question(
    "pair",
    "Is a faster?",
    Rivals("train", "B/16 224 B256", ("a", "b")),
    Prediction("1.2 times", faster("a"), least=1.1),
    ("a ships", "a leaves"),
    50,
    ("kernels/*.py", "vitfast/ops.py"),
    worth=1.0,
)


def answered(folder: Path, content: dict | None, state: str = "ok", code: int = 0) -> dict:
    """What decide.py makes of a step that asked PAIR."""
    if content is not None:
        (folder / "pair.json").write_text(json.dumps(content))
    step = dict(name="pair", state=state, code=code, seconds=31.4)
    decide.answer(folder, step, "NVIDIA X, torch 2.11.0, triton 3.6.0")
    return json.loads((folder / "answers" / "pair.json").read_text())


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with two files of PAIR and one of another, and the only question PAIR."""
    for name in ("kernels/a.py", "vitfast/ops.py", "vitfast/other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(decide, "ROOT", tmp_path)
    monkeypatch.setattr(decide, "QUEUE", (PAIR,))
    monkeypatch.setattr(decide, "QUESTIONS", {"pair": PAIR})
    yield tmp_path
    decide._hash.cache_clear()


def times(**milliseconds: float) -> dict:
    found = {name: dict(ms=ms, ready_s=20.5) for name, ms in milliseconds.items()}
    return dict(rivals=found, missing={}, compiled=0)


def test_an_answer_counts_on_its_gpu_while_its_files_stay_the_same(place):
    found = answered(place, times(a=10.0, b=13.0))
    assert found["measured"] == "a 10 ms; b 13 ms: 1.3"
    assert (found["holds"], found["follows"], found["seconds"]) == (True, "a ships", 31)
    assert set(found["files"]) == {"what is run", "kernels/a.py", "vitfast/ops.py"}

    def ask(gpu: str = "NVIDIA X") -> bool:
        decide._hash.cache_clear()
        return decide.following(decide.answers(gpu, place), [], 100, []) is not None

    assert not ask() and ask("NVIDIA Y")
    (place / "vitfast" / "other.py").write_text("changed")
    assert not ask() and decide.changed(found) == []
    (place / "kernels" / "new.py").write_text("new")
    assert ask() and decide.changed(found) == ["kernels/new.py"]
    known = decide.answers("NVIDIA X", place)
    said = decide.announcement(PAIR, known)
    assert said.endswith("Predicted: 1.2 times (31 s)")
    assert decide.limit(PAIR, known) == 85
    for text in ("{", "[]", json.dumps(found | dict(seconds="3")), json.dumps(found | dict(files=None))):
        (place / "answers" / "damaged.json").write_text(text)
        assert decide.answers("NVIDIA X", place) == known


def test_outcomes_by_hand(place):
    """One that loses, a rival that failed, what was cut off, what wrote no file.

    What tells nothing is asked again, with more time, and hides no answer that is there.
    """
    assert answered(place, times(a=13.0, b=13.0))["follows"] == "a leaves"
    alone = times(a=13.0) | dict(missing={"b": "WrongResult: b is wrong"}, compiled=3)
    (place / "answers" / "pair.json").unlink()
    found = answered(place, alone, "failed", 1)
    assert found["follows"] == "no answer: b has no time" and "value" not in found
    assert found["measured"].endswith("b: WrongResult: b is wrong; 3 kernels of ours were compiled first")
    assert decide.following(decide.answers("NVIDIA X", place), [], 100, []) is None  # until a file changes
    found = answered(place, times(a=10.0, b=13.0), "timed out", 124)
    assert found["follows"] == "no answer: b has no time"  # still: it was wrong
    (place / "answers" / "pair.json").unlink()
    late = times(a=13.0) | dict(missing={"b": "TimeoutError: too little time was left to begin"})
    assert not answered(place, late, "failed", 1)["settled"]
    found = answered(place, times(a=10.0, b=13.0), "timed out", 124)
    assert found["follows"] == "no answer: timed out" and decide.is_open("pair", {"pair": found})
    (place / "pair.json").unlink()
    assert answered(place, None)["follows"] == "no answer: KeyError('rivals')"
    assert decide.limit(PAIR, dict(pair=dict(found, seconds=90))) == 145  # of 90 s, not of the estimate


def test_what_fits_and_is_worth_most_comes_first():
    """What was measured replaces the estimate."""
    first = decide.following({}, [], 600, [])
    assert (
        first.name == "backend_train_bf16" and decide.following({}, [first.name], 600, []).name == "backend_train_amp"
    )
    worth = [q.total_worth / q.seconds for q in QUEUE]
    assert decide.following({}, [], 29, []) is None and decide.following({}, [], 30, []).seconds <= 30
    slow = dict(question=first.name, state="timed out", seconds=150, files={}, settled=False)
    assert decide.following({first.name: slow}, [], 600, []).name == "backend_train_amp"
    assert min(worth) > 0


def test_an_installed_package_is_asked_for_no_tests(place):
    asked = [q for q in QUEUE if not decide.hindrance(q, {}, 600)]
    assert "tests" not in {q.run.kind for q in asked} and {q.check for q in asked} == {"", "vitfast doctor"}


def test_every_question_says_what_follows_and_of_which_files():
    having = [report.load(ROOT / "bench" / "results" / "h200"), report.Results("none")]
    figures = {(what, figure.of) for results in having for what, figure in targets.figures(results)}
    assert len(QUESTIONS) == len(QUEUE) > 30
    for q in QUEUE:
        if isinstance(q.run, Rivals):
            model, image, _ = q.run.shape.split(" ")
            assert int(image) % preset(model)["patch_size"] == 0, q.name
        assert q.seconds <= 120 and q.total_worth > 0 and all(q.follows) and q.prediction.text, q.name
        assert q.rows.keys() <= figures, q.name
        for pattern in q.files:
            assert any(path.is_file() for path in ROOT.glob(pattern)), (q.name, pattern)


def test_every_gpu_test_is_in_a_question():
    named = {word for q in QUEUE if q.name.startswith("gpu_tests") for word in q.run.arguments}
    having = {path for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()}
    assert {str(path.relative_to(ROOT)) for path in having} - {"tests/bench/test_decide.py"} <= named


NAMED = """
import asking, bench_model, bench_ops, pytest, questions, shapes, sys
for q in questions.QUEUE:
    if isinstance(q.run, asking.Rivals):
        shapes.shape_of(q.run.shape)
        known = bench_ops.OPS[q.run.operation[0]].impls if q.run.operation else bench_model.SETTINGS
        unknown = [name for name in q.run.names if name.split(" | ")[0] not in known]
    elif q.run.kind != "doctor":
        marked = ["-m", "gpu"] if q.run.kind == "tests" else []
        unknown = pytest.main(["-q", "--collect-only", *q.run.arguments, *marked])  # 5: there is no such test
    if unknown:
        sys.exit(f"{q.name}: {unknown}")
"""


@pytest.mark.slow
def test_every_question_names_something_that_runs():
    """Settings and implementations that exist, and tests that pytest finds, by a GPU's names."""
    run = subprocess.run([sys.executable, "-c", NAMED], env=REHEARSED, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-1000:]


COUNTED = """
import archive
from vitfast.tools.machine_code import compiler
found = archive.queue(90)
print(len({compiler.key_of(launch, 90) for launch in found}), *sorted({launch.kernel.__name__ for launch in found}))
"""


@pytest.mark.slow
def test_the_archive_has_what_a_step_launches_and_is_made_in_minutes():
    """301 compilations took 126 s on two cores; 500 would take 210 of the 240 s that they may."""
    environment = REHEARSED | dict(TRITON_INTERPRET="")
    run = subprocess.run([sys.executable, "-c", COUNTED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    count, *kernels = run.stdout.split()
    wanted = "_attention_bwd_resident_kernel dgelu_matmul_kernel layer_norm_bwd_kernel patch_embed_dweight_kernel"
    assert 200 < int(count) < 500 and set(wanted.split()) <= set(kernels)


PARTS = 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_rivals_take_turns_in_a_rehearsal(part, tmp_path):
    """Every question that has rivals, at a toy's size: all are right, have times of two turns, and tables read them."""
    having = [q for q in QUEUE if isinstance(q.run, Rivals)][part::PARTS]
    each = "import rivals, sys\ncodes = [rivals.main([name, '--folder', sys.argv[1]]) for name in sys.argv[2:]]"
    command = [sys.executable, "-c", f"{each}\nsys.exit(max(codes))", str(tmp_path), *(q.name for q in having)]
    run = subprocess.run(command, env=REHEARSED, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    for q in having:
        content = json.loads((tmp_path / f"{q.name}.json").read_text())
        assert list(content["rivals"]) == list(q.run.names) and content["missing"] == {}
        for rival in content["rivals"].values():
            assert len(rival["turns"]) == 2 and min(rival["turns"]) > 0 and rival["error_after"] <= rival["error_limit"]
        if "kept" != q.name:  # memory is a GPU's
            assert q.prediction.reads(content) > 0
    found = report.load(tmp_path)
    shown = [name for q in having for name in q.run.names if " | " not in name]
    assert not found.damaged and {case["impl"] for case in found.measured.values()} == set(shown)


class Tires:
    """The right LayerNorm until it has been called often."""

    calls = 0

    def __call__(self, x, weight, bias):
        self.calls += 1
        return ref.layer_norm(x, weight, bias) * (1.01 if self.calls > 40 else 1)


def slow(x, weight, bias):
    end = time.process_time() + 0.004
    while time.process_time() < end:
        pass
    return ref.layer_norm(x, weight, bias)


def test_the_driver_is_asked_for_the_gpu_that_torch_uses(tmp_path, monkeypatch):
    """It is found by its PCI address."""
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/bash\n[ "${@: -1}" = 00000001:3b:00.0 ] && echo "[N/A], 1755 MHz"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = types.SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: place)
    assert machine.ask_driver("power.limit", "clocks.sm") == {"power.limit": "[N/A]", "clocks.sm": "1755 MHz"}


@pytest.mark.slow
def test_a_rival_that_is_wrong_before_or_after_has_no_time(tmp_path, monkeypatch):
    wrong = lambda x, weight, bias: 1.01 * ref.layer_norm(x, weight, bias)  # noqa: E731
    functions = dict(quick=ref.layer_norm, slow=slow, wrong=wrong, tires=Tires(), raises=lambda x: x)
    monkeypatch.setattr(bench_ops, "function_of", lambda op, shape, name: functions[name])
    monkeypatch.setitem(bench_ops.OPS, "layer_norm", replace(bench_ops.OPS["layer_norm"], impls=tuple(functions)))
    run = rivals.Run(Rivals("layer_norm forward", "B/16 224 B256", tuple(functions)), tmp_path / "x.json")
    assert not run.all()
    content = json.loads((tmp_path / "x.json").read_text())
    assert set(content["rivals"]) == {"quick", "slow"} and 3 < content["rivals"]["slow"]["ms"] < 100
    assert faster("quick", "slow")(content) > 2 and len(content["benchmarks"]) == 2
    assert content["missing"]["wrong"].startswith("WrongResult: wrong is wrong on layer_norm")
    assert "after timing" in content["missing"]["tires"] and content["missing"]["raises"].startswith("TypeError")
    assert [case["name"] for case in content["failed"]] == [
        f"test_layer_norm[B/16 224 B256-forward-{name}]" for name in ("wrong", "raises", "tires")
    ]

    def interrupted(rival):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # what was not compared after timing is no case of the tables
        patch.setattr(rivals.Rival, "compare_again", interrupted)
        cut = rivals.Run(Rivals(run.of.what, run.of.shape, ("quick",)), tmp_path / "cut.json")
        with pytest.raises(KeyboardInterrupt):
            cut.all()
    content = json.loads((tmp_path / "cut.json").read_text())
    assert content["benchmarks"] == [] and content["rivals"]["quick"]["ms"] > 0
    late = rivals.Run(run.of, tmp_path / "late.json")
    assert not late.all(time.time() + 1)
    assert set(late.missing) == set(functions) and "too little time" in late.missing["quick"][1]


@pytest.mark.slow
def test_a_name_that_is_no_implementation_has_no_time(tmp_path):
    run = rivals.Run(Rivals("layer_norm forward", "B/16 224 B256", ("vitfsat", "eager")), tmp_path / "x.json")
    assert not run.all() and "no implementation 'vitfsat', only vitfast, eager" in run.missing["vitfsat"][1]


BATCHES = """
import bench_model, peers, rivals, sys, torch
from asking import Rivals
seen = []

def traced(graph, inputs):
    seen.extend(str(x.shape[0]) for x in inputs if x.dim() == 4 and x.shape[2] == 16)  # the images
    return graph

bench_model.best_batch = lambda library, shape: dict(timm=5).get(library, 3)
peers.compiled = lambda model, how, **options: torch.compile(model, backend=traced)
rivals.QUESTIONS["two"] = rivals.QUESTIONS["norm_backward"].__class__(
    *("two", "", Rivals("throughput", "B/16 224 B256", ("timm compile bf16", "vitfast.accelerate(timm) compile bf16"))),
    *(None, ("", ""), 1, ()),
)
assert rivals.main(["two", "--folder", sys.argv[1]]) == 0
assert sorted(seen) == ["3", "5"], seen
"""


@pytest.mark.slow
def test_no_rival_is_compiled_for_any_batch_because_another_has_one(tmp_path):
    command = [sys.executable, "-c", BATCHES, str(tmp_path)]
    run = subprocess.run(command, env=REHEARSED, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_readings_of_result_files_by_hand():
    cases = [dict(impl="vitfast", images_per_second=30.0, losses=[1.0, 2.0]), dict(impl="timm", images_per_second=20.0)]
    cases[1]["losses"] = [1.1, 2.3]
    content = dict(benchmarks=[dict(extra_info=case) for case in cases], code=3)
    assert asking.pair(content) == 1.5 and asking.exit_code(dict(code=1)) == 1
    with pytest.raises(ValueError, match="exit code 3"):
        asking.exit_code(content)
    assert asking.curves(content) == pytest.approx(0.3) and asking.info("images_per_second", 0.1)(content) == 3.0
    three = dict(rivals={name: dict(ms=ms, peak_mib=10 * ms) for name, ms in (("a", 2.0), ("b", 3.0), ("c", 8.0))})
    assert (asking.faster("a")(three), asking.faster("a", "c")(three), asking.peaks("b", "a")(three)) == (1.5, 4.0, 1.5)
    assert asking.faster("b", "c", "peak_mib")(three) == pytest.approx(8 / 3)
    with pytest.raises(ValueError, match="no peak memory is known here"):  # as on a CPU
        asking.peaks("a", "b")(dict(rivals=dict(a=dict(peak_mib=None), b=dict(peak_mib=None))))
    between = Prediction("", asking.exit_code, least=1, most=2)
    assert [between.holds(value) for value in (0, 1, 2, 3)] == [False, True, True, False]


def test_the_report_shows_answers_and_says_which_are_older_than_their_files(place, tmp_path, capsys, monkeypatch):
    results = tmp_path / "results"
    for folder in (results / "x", tmp_path / "docs" / "tutorials", tmp_path / "vitfast" / "tools" / "cost"):
        folder.mkdir(parents=True)
    for path in (tmp_path / "README.md", results / "README.md", tmp_path / "docs" / "tutorials" / "fast-settings.md"):
        path.write_text(f"{report.START}\n{report.END}\n")
    answered(results / "x", times(a=10.0, b=13.0))
    (results / "x" / "pair.json").unlink()
    assert report.main([], results, tmp_path) == 0
    row = "| Is a faster? | 1.2 times | a 10 ms; b 13 ms: 1.3 | a ships |"
    assert row in (results / "README.md").read_text()
    assert report.main(["--check"], results, tmp_path) == 0 and "older" not in capsys.readouterr().out
    (place / "kernels" / "a.py").write_text("changed")
    decide._hash.cache_clear()
    assert report.main(["--check"], results, tmp_path) == 0
    assert "x: the answer to pair is older than kernels/a.py\n" in capsys.readouterr().out
    path = results / "x" / "answers" / "pair.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(check="racecheck", code=0)))
    assert report.load(results / "x").checks["racecheck"] == 0  # whatever a later run has checked


def test_what_is_predicted_stands_in_the_table_of_figures():
    rows, _ = targets.figure_rows([report.load(ROOT / "bench" / "results" / "h200")])
    found = {(row[1], row[2]): row[3:] for row in rows}
    assert found["amp by timm amp", "≥ 1.3"] == ["1.15", "-"]
    assert found["latency of one image by the best peer's", "≤ 0.8"] == ["0.55", "1.55"]
