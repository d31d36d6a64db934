"""Every command that reads images, on one folder of odd files: nothing is passed over in silence."""

import csv
import io
import json
import os
import re

import numpy as np
import pictures
import pytest
from commands import run_cli
from PIL import Image, features

from vitfast import ViT

CLASSES = ("Cat", "cat", "①", "café", "10", "9", "train")
# Of each class folder: what Pillow opens, whatever its name; what it does not; what is nobody's image.
JPEGS = ("a.jpg", "b.jfif", "c.JPE", "d", "e;f, 'g\".JPG", "line\nbreak.jpg", "h.txt")
OTHERS = {"w.webp": "WEBP", "x.bmp": "BMP", "y.PNG": "PNG", "z.tga": "TGA", "pages.tif": "TIFF", "moves.gif": "GIF"}
NO_IMAGES = {
    "f.heic": b"\0\0\0\x18ftypheic" + bytes(64),
    "notes.md": b"#define a 1\n",
    "more.tar": b"",
    "m.xml": b"<a/>",
}
CLUTTER = ("._a.jpg", ".DS_Store", "Thumbs.db", "@eaDir/a.jpg", "#recycle/b.jpg", "__MACOSX/._c.jpg", "desktop.ini")
READABLE = len(JPEGS) + len(OTHERS) + features.check("avif") + 1
ENTRIES = READABLE + 2  # with an empty file and a link that leads nowhere, which are called like images


def odd_folder(root, seed):
    """One class folder of such files."""
    (root / "inner").mkdir(parents=True)
    for name in CLUTTER:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"\0\5\x16\7" + bytes(100))
    for name, content in NO_IMAGES.items():
        (root / name).write_bytes(content)
    image = pictures.smooth(seed, 20, 24)
    for name in JPEGS:
        image.save(root / name, "JPEG")
    for name, kind in OTHERS.items():
        more = dict(save_all=True, append_images=[image, image]) if kind in ("TIFF", "GIF") else {}
        image.save(root / name, kind, **more)
    if features.check("avif"):
        image.save(root / "e.avif")
    Image.fromarray(np.full((20, 24), 40_000, np.uint16)).save(root / "inner" / "16 bits.png")
    (root / "empty.png").write_bytes(b"")
    (root / "nowhere.jpeg").symlink_to(root / "gone.jpeg")
    os.mkfifo(root / "pipe")


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    root = tmp_path_factory.mktemp("odd")
    for number, name in enumerate(CLASSES):
        odd_folder(root / "data" / "train" / name, number)
        odd_folder(root / "data" / "val" / name, 100 + number)
        odd_folder(root / "test" / name, 200 + number)
    return root


RUN = (
    "--model Nano/8 --img-size 16 --batch-size 8 --device cpu --set workers=0 warmup_steps=0 hidden_head=false".split()
)
TOTAL, GOOD = len(CLASSES) * ENTRIES, len(CLASSES) * READABLE


def check_passed_over(text: str, folders: int) -> None:
    """One line for each folder that is listed; it counts every file that is no image, and no clutter."""
    lines = re.findall(r"passed over: (.*)", text)
    each = len(CLASSES)
    assert len(lines) == folders, lines
    for line in lines:
        for part in (f"{each} .heic (Pillow cannot read them)", f"{each} .md", f"{each} .tar", f"{each} .xml"):
            assert part in line.split(", "), line
        assert f"{2 * each} further pages of TIFF files, whose first is read" in line
        assert f"{each} pipes, sockets or devices" in line
        assert not re.search(r"\.db|DS_Store|\.ini|suffix", line), line


@pytest.mark.slow
def test_every_command_counts_each_image_of_a_folder_of_odd_files(odd, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.chdir(odd)
    caplog.set_level("INFO")

    def run(*command, code=0):
        found, out, err = run_cli(capsys, *command)
        assert found == code, err
        text = caplog.text
        caplog.clear()
        return out if command[0] != "predict" else (out, err), text

    base = tmp_path / "base"
    _, text = run("pretrain", "--data", "data", "--output", base, "--steps", 2, *RUN)
    check_passed_over(text, folders=2)
    summary = json.loads((base / "summary.json").read_text())
    assert (summary["train_images"], summary["val_images"], summary["val_unreadable_images"]) == (
        TOTAL,
        GOOD,
        TOTAL - GOOD,
    )
    weights = base / "checkpoints" / "last"
    order = ["9", "10", "café", "Cat", "cat", "train", "①"]
    assert list(ViT.from_pretrained(weights).class_names) == order  # as people count, then by letters

    more = ("--weights", weights, "--device", "cpu")
    _, text = run("finetune", *more, "--data", "data", "--output", tmp_path / "tuned", "--steps", 1, *RUN[2:])
    check_passed_over(text, folders=2)
    assert json.loads((tmp_path / "tuned" / "summary.json").read_text())["train_images"] == TOTAL

    out, text = run("eval", *more, "--data", "test", "--json", "--set", "workers=0")
    check_passed_over(text, folders=1)
    found = json.loads(out)
    assert (found["images"], found["unreadable_images"]) == (GOOD, TOTAL - GOOD)
    assert f"measures all {TOTAL} images of test; --split val measures the " in text

    out, text = run("fewshot", *more, "--data", "data", "--method", "knn", "--json", "--set", "workers=0")
    check_passed_over(text, folders=2)
    found = json.loads(out)
    assert (found["images"], found["unreadable_images"]) == (GOOD, 2 * (TOTAL - GOOD))

    (out, err), text = run("predict", "test", *more, "--set", "workers=0")
    check_passed_over(text, folders=1)
    rows = list(csv.reader(io.StringIO(out)))[1:]
    assert len(rows) == TOTAL and sum(bool(row[1]) for row in rows) == GOOD
    assert f"{TOTAL} images, {TOTAL - GOOD} of them without an answer" in err

    out, text = run("embed", "test", *more, "--output", tmp_path / "vectors", "--json")
    check_passed_over(text, folders=1)
    found = json.loads(out)
    assert (found["images"], found["unreadable"]) == (TOTAL, TOTAL - GOOD)

    _, text = run("inspect", "--weights", weights, "--data", "test", "--images", TOTAL, "--output", tmp_path / "look")
    check_passed_over(text, folders=1)
    assert json.loads((tmp_path / "look" / "numbers.json").read_text())["images"].startswith(f"{GOOD} of test (")

    (tmp_path / "tasks.yaml").write_text("- {data: data, name: odd}\n")
    tasks = ("--tasks", tmp_path / "tasks.yaml", "--method", "knn", "--examples", TOTAL)
    _, text = run("vtab", *more, *tasks, "--output", tmp_path / "vtab", "--set", "workers=0")
    check_passed_over(text, folders=2)
    (task,) = json.loads((tmp_path / "vtab" / "vtab.json").read_text())["tasks"]
    assert (task["train_images"], task["test_images"], task["unreadable_images"]) == (GOOD, GOOD, 2 * (TOTAL - GOOD))

    runs = ("--data", "data", "--steps", 1, *RUN[2:])
    _, text = run("positions", *runs, "--model", "Nano/8", "--seeds", 1, "--output", tmp_path / "positions")
    assert text.count(f"{TOTAL} images for training") == text.count("passed over") / 2 > 3
