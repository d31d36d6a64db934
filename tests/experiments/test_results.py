"""Result files: the same command replaces its own; anything else is refused before the work begins, and stays."""

import json
import os
import shutil

import pytest
from commands import run_cli
from frozen import save_tiny
from runs import content

from vitfast import InputError
from vitfast.eval.inspect import report
from vitfast.experiments import runs as experiments
from vitfast.experiments import vtab
from vitfast.run import results
from vitfast.run.results import Results


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("weights"))


RUN = "--data digits --device cpu --batch-size 32 --steps 1"
COMMANDS = {
    "vtab": ("vtab --tasks TASKS --weights WEIGHTS --method knn", "vtab.csv vtab.txt vtab.json"),
    "scaling": (f"scaling {RUN} --models Nano/8 --lengths 1", "scaling.csv scaling.json scaling.png"),
    "positions": (f"positions {RUN}", "positions.csv positions.json positions.md"),
    "sweep": (f"finetune {RUN} --weights WEIGHTS --sweep", "sweep.json"),
    "runs": (f"finetune {RUN} --weights WEIGHTS --runs 2", "runs.json"),
    "demo": ("demo --device cpu", "metrics.csv summary.json report.html"),
    "inspect": ("inspect --data digits --weights WEIGHTS", "report.html numbers.json rollout.png"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_somebody_else_is_refused_before_the_work(weights, tmp_path, capsys, monkeypatch, command):
    def begun(*_, **__):
        pytest.fail("the work began")

    for module, name in ((experiments, "train"), (vtab, "evaluate_frozen"), (report, "examine")):
        monkeypatch.setattr(module, name, begun)
    (tmp_path / "tasks.yaml").write_text("- digits")
    places = dict(WEIGHTS=weights, TASKS=tmp_path / "tasks.yaml")
    words, names = COMMANDS[command]
    for name in names.split():
        output = tmp_path / name
        output.mkdir()
        (output / name).write_text("mine")
        code, _, err = run_cli(capsys, *(places.get(word, word) for word in words.split()), "--output", output)
        assert code == 2 and err.startswith(f"vitfast: error: {output / name} is damaged, or vitfast {command} did not")
        assert err.count("\n") == 1 and content(output) == {name: b"mine"}


@pytest.mark.slow
def test_the_same_command_replaces_its_results_and_no_other_does(weights, tmp_path, capsys, caplog):
    output, tasks = tmp_path / "out", tmp_path / "tasks.yaml"
    tasks.write_text("- digits")
    command = ("vtab", "--tasks", tasks, "--weights", weights, "--method", "knn", "--device", "cpu", "--output", output)
    assert run_cli(capsys, *command, "--examples", 20)[0] == 0
    first = content(output)
    assert run_cli(capsys, *command, "--examples", 20)[0] == 0 and content(output) == first
    for flags, change in (
        (("--examples", 30), "examples: 20 there, 30 now"),
        (("--examples", 30, "--set", "crop_pct=0.9"), "tasks.digits.crop_pct: unset there, 0.9 now"),
    ):
        before = content(output)
        code, _, _ = run_cli(capsys, *command, *flags)
        assert code == 0 and f"{output} has results of other settings ({change}), which are kept" in caplog.text
        after = content(output)
        for name in ("vtab.csv", "vtab.txt", "vtab.json"):
            assert before[name] in [text for other, text in after.items() if other.startswith(f"{name}.")]
            assert after[name] != before[name] or name == "vtab.txt"
    shutil.rmtree(output)
    assert run_cli(capsys, *command, "--examples", 20)[0] == 0 and content(output) == first
    (output / "vtab.txt").write_text("a table that somebody made of it")
    code, _, err = run_cli(capsys, *command, "--examples", 20)
    assert code == 2 and f"{output}/vtab.txt is damaged, or vitfast vtab did not write it; move it away" in err
    (output / "vtab.txt").rename(output / "mine.txt")
    assert run_cli(capsys, *command, "--examples", 20)[0] == 0
    assert content(output) == first | {"mine.txt": b"a table that somebody made of it"}


def test_a_kill_between_the_two_files_is_no_damage(tmp_path, monkeypatch):
    Results(tmp_path, "sweep", {}, ["a"]).write("a", "one")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(results, "write_atomically", lambda *_: {}["killed"])
        Results(tmp_path, "sweep", {}, ["a"]).write("a", "two")
    for text in ("three", "four"):
        Results(tmp_path, "sweep", {}, ["a"]).write("a", text)
        assert (tmp_path / "a").read_text() == text


def test_what_comes_into_the_way_meanwhile_gets_another_name(tmp_path, caplog):
    begun = Results(tmp_path / "new", "sweep", {}, ["a"])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a").write_text("mine")
    begun.write("a", "result")
    assert (tmp_path / "new" / "a").read_text() == "result" and (tmp_path / "new" / "a.1").read_text() == "mine"
    assert "it was renamed to a.1" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": {}, "files": []}', "\0"])
def test_a_damaged_origin_is_named(tmp_path, text):
    (tmp_path / "sweep.origin.json").write_text(text)
    with pytest.raises(InputError, match="sweep.origin.json is damaged, or vitfast sweep did not write it"):
        Results(tmp_path, "sweep", {}, ["a"])
    os.remove(tmp_path / "sweep.origin.json")
    (tmp_path / "a").write_text(json.dumps({}))
    with pytest.raises(InputError, match="a is damaged, or vitfast sweep did not write it"):
        Results(tmp_path, "sweep", {}, ["a"])
