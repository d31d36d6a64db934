"""`vitfast predict`: its inputs, its files and its exit codes."""

import csv
import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
from commands import CLASSES, Terminal, make_folder, picture, run_cli
from frozen import save_tiny

from vitfast import ViT
from vitfast.eval import predict as predictions


@pytest.fixture
def weights(tmp_path):
    return save_tiny(tmp_path / "weights")  # of 10 classes


@pytest.fixture
def go(capsys, weights):
    """Runs the command on the CPU: (exit code, stdout, stderr)."""
    return lambda *args: run_cli(capsys, "predict", *args, "--weights", weights, "--device", "cpu")


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


def test_files_folders_and_lists_in_the_order_given(go, tmp_path, monkeypatch):
    data = make_folder(tmp_path / "data", splits=("x",), count=2)
    picture(7).save(tmp_path / "z.png")
    below = [f"{data}/x/{name}/{i}.png" for name in CLASSES for i in (0, 1)]
    code, out, err = go(tmp_path / "z.png", data, tmp_path / "z.png", "--top-k", 2)
    table = rows(out)
    assert code == 0 and [row[0] for row in table[1:]] == [f"{tmp_path}/z.png", *below, f"{tmp_path}/z.png"], err
    assert table[0] == ["image", "label_1", "probability_1", "label_2", "probability_2"] and "8 images, 0 of" in err
    assert table[1][1::2] == table[-1][1::2]
    listed = "\r\n".join([below[3], "", f"{tmp_path}/gone.png", f'"{below[0]}"']).encode()  # no newline at the end
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(listed)))
    code, out, err = go("-", tmp_path / "z.png", "--json")
    records = json.loads(out)
    wanted = [below[3], f"{tmp_path}/gone.png", below[0], f"{tmp_path}/z.png"]
    assert code == 0 and [r["image"] for r in records] == wanted
    assert "gone.png" in records[1]["error"] and err.count("no answer") == 1 and "4 images, 1 of" in err
    assert [str(p["label"]) for p in records[-1]["predictions"][:2]] == [table[1][1], table[1][3]]
    assert len(records[-1]["predictions"]) == 5  # of 10, the default
    (tmp_path / "list.csv").write_text("id;breed\nz;cat\ndata/x/cat/0.png;eel\n")
    code, out, err = go(tmp_path / "list.csv")
    assert [row[0] for row in rows(out)[1:]] == [f"{tmp_path}/z.png", below[0]] and "2 images, 0 of" in err


def test_a_file_is_whole_or_absent_and_not_replaced_unasked(go, tmp_path, monkeypatch):
    picture(1).save(tmp_path / "a.png")
    target = tmp_path / "new" / "out.json"
    assert go(tmp_path / "a.png", "--output", target, "--top-k", 99)[0] == 0
    assert len(json.loads(target.read_text())[0]["predictions"]) == 10  # all there are
    before = target.read_text()
    code, out, err = go(tmp_path / "a.png", "--output", target)
    assert code == 2 and "--force" in err and not out and target.read_text() == before
    assert go(tmp_path / "a.png", "--output", target, "--force", "--top-k", 1)[0] == 0
    assert len(json.loads(target.read_text())[0]["predictions"]) == 1
    before, function = target.read_text(), predictions.best_classes
    for raised, code in ((KeyboardInterrupt, 130), (OSError(28, "No space left on device"), 1)):
        calls = []

        def cut(*args, raised=raised, calls=calls):
            calls.append(1)
            if len(calls) == 3:
                raise raised
            return function(*args)

        monkeypatch.setattr(predictions, "best_classes", cut)
        inputs = [tmp_path / "a.png"] * 8
        found = go(*inputs, "--output", target, "--force", "--batch-size", 2, "--set", "workers=0")
        assert found[0] == code and len(calls) == 3, found
        assert target.read_text() == before and os.listdir(target.parent) == ["out.json"]


def test_exit_code_says_whether_there_is_any_answer(go, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    picture(1).save(tmp_path / "good.png")
    code, _, err = go(tmp_path / "bad.png", tmp_path / "good.png", "--output", tmp_path / "both.csv")
    assert code == 0 and err.count(f"{tmp_path}/bad.png cannot be read as an image") == 1 and "2 images, 1 of" in err
    assert [len(set(row[1:])) > 1 for row in rows((tmp_path / "both.csv").read_text())] == [True, False, True]
    code, _, err = go(tmp_path / "bad.png", "--output", tmp_path / "none.json")
    assert code == 1 and "Traceback" not in err and "error" in json.loads((tmp_path / "none.json").read_text())[0]


# Arguments in the folder ROOT, and what the error must name.
BAD = [
    ("ROOT/a.png ROOT/nope", "no file or folder ROOT/nope"),
    ("ROOT/a.png --weights=", "no weights given: give a file, a folder or hf-hub:owner/name"),
    ("ROOT/empty", "no images in ROOT/empty"),
    ("-", "the standard input names no image"),
    ("ROOT/a.png ROOT/list.csv", "list.csv, line 2: expected 1 cells, of which number 1 is a path, got ['b', 'c.png']"),
    ("ROOT/a.png --output ROOT/out/found.txt", "found.txt: give a file that ends in .csv or .json"),
    ("ROOT/a.png --json", "found.csv: give a file that ends in .csv or .json, with --json in .json"),
    ("ROOT/a.png --output ROOT/made.csv", "made.csv: give a file"),
    ("ROOT/a.png --weights ROOT/headless", "no classification head"),
]


@pytest.mark.parametrize("args, says", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(capsys, weights, tmp_path, monkeypatch, args, says):
    picture(1).save(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "made.csv").mkdir()
    (tmp_path / "list.csv").write_text("a.png\nb,c.png\n")
    ViT.from_pretrained(weights, num_classes=0).save_pretrained(tmp_path / "headless")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\n\n")))
    usual = ("--weights", weights, "--output", tmp_path / "out" / "found.csv", "--device", "cpu")
    code, out, err = run_cli(capsys, "predict", *usual, *args.replace("ROOT", str(tmp_path)).split())
    lines = [line for line in err.splitlines() if line.startswith("vitfast: error: ")]
    assert code == 2 and len(lines) == 1 and not out and "Traceback" not in err, err
    assert says.replace("ROOT", str(tmp_path)) in err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_bar_is_on_a_terminal_and_warnings_stay_lines(go, tmp_path, monkeypatch):
    picture(1).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_text("no image")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert go(tmp_path / "a.png", tmp_path / "bad.png", "--output", tmp_path / "o.csv")[0] == 0
    assert "2/2" in sys.stderr.getvalue()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_reader_that_leaves_and_names_that_are_no_text(go, tmp_path, monkeypatch, leaves):
    """`| head` ends it quietly; bytes that are no UTF-8 go out as they came in."""
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    picture(1).save(tmp_path / "a.png")
    os.rename(os.fsencode(tmp_path / "a.png"), odd)
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((odd + b"\n") * 30)))  # less than a pipe holds
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    if leaves:
        os.close(reader)
    code, _, err = go("-", "--batch-size", 4, "--set", "workers=0")
    sys.stdout.close()
    assert code == 0 and "Traceback" not in err and "Broken pipe" not in err, err
    if not leaves:
        with os.fdopen(reader, "rb") as file:
            assert [line.startswith(odd + b",") for line in file] == [False] + 30 * [True]
