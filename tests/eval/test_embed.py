"""`vitfast embed`: shards that are whole, resumed to the same bytes, refused where they are another job's."""

import json
import os
import random
import re
import signal
import time

import numpy as np
import pictures
import pyarrow.parquet as pq
import pytest
import torch
from children import limited
from commands import run_cli
from frozen import tiny
from processes import Child, command_line, done, ranks

from vitfast import Embedder
from vitfast.errors import InputError
from vitfast.eval.embed import read

COUNT = 23


@pytest.fixture
def source(tmp_path):
    """Images of many sizes, two of them unreadable; and weights."""
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for i in range(COUNT):
        pictures.smooth(i, 20 + i, 40).save(tmp_path / "photos" / ("more" if i % 2 else "") / f"{i:02d}.png")
    (tmp_path / "photos" / "05.png").write_bytes(b"no image")
    pictures.truncate(tmp_path / "photos" / "10.png")
    tiny(5).save_pretrained(tmp_path / "w")
    return tmp_path


def arguments(source, output="out", *more) -> list[str]:
    given = ["embed", source / "photos", "--weights", source / "w", "--output", source / output]
    return list(map(str, [*given, "--device", "cpu", "--shard-size", 4, "--workers", 0, *more]))


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*"))}


def test_files_hold_what_the_embedder_returns(source, capsys):
    code, out, err = run_cli(capsys, *arguments(source))
    assert code == 0 and "24 images, 2 of them unreadable" in out and out.count("\n") == 1
    assert err.count("left out: ") == 2 and "05.png cannot be read as an image (of no known format)" in err
    names = sorted(str(p.relative_to(source / "photos")) for p in (source / "photos").rglob("*.png"))
    names = sorted(names, key=lambda name: ("more" if "/" in name else name, name))
    good = [name for name in names if name not in ("05.png", "10.png")]
    ids, vectors = read(source / "out")
    assert ids == good and vectors.dtype == np.float32
    truth = Embedder(source / "w", device="cpu").embed([source / "photos" / name for name in good])
    torch.testing.assert_close(torch.from_numpy(vectors), truth, atol=1e-6, rtol=1e-5)
    rows = [row for k in range(6) for row in pq.read_table(source / "out" / f"index-{k:05d}.parquet").to_pylist()]
    assert [row["id"] for row in rows] == names and set(rows[0]) == {"id", "row", "height", "width", "error"}
    for row in rows:
        bad = row["id"] in ("05.png", "10.png")
        number = int(row["id"][-6:-4])
        assert (row["row"] is None) == (row["error"] is not None) == bad
        assert bad or (row["height"], row["width"]) == (20 + number, 40)
    manifest = json.loads((source / "out" / "manifest.json").read_text())
    assert (manifest["images"], manifest["shards"], manifest["dim"], manifest["dtype"]) == (24, 6, 32, "float32")
    assert manifest["preprocessing"]["size"] == [16, 16] and len(manifest["weights_sha256"]) == 64
    before = content(source / "out")
    code, out, _ = run_cli(capsys, *arguments(source), "--json")
    assert code == 0 and (json.loads(out)["kept"], json.loads(out)["images"]) == (24, 0)
    assert content(source / "out") == before


def test_ranks_share_the_work_without_talking(source, capsys):
    run_cli(capsys, *arguments(source, "alone"))
    outputs = done(ranks(3, command_line, arguments(source)))
    assert [out.count(": 8 images,") for out in outputs] == [1, 1, 1]
    assert content(source / "out") == content(source / "alone")


def _slowed(argv: list[str], seconds: float) -> int:
    """The command, slow enough that a kill comes in the middle."""
    from vitfast.eval import embedder

    computed = embedder.Embedder._computed

    def slower(self, batch):
        time.sleep(seconds)
        return computed(self, batch)

    embedder.Embedder._computed = slower
    return command_line(argv)


@pytest.mark.parametrize("times", [20, pytest.param(100, marks=pytest.mark.long)])
def test_a_job_that_is_killed_goes_on_to_the_same_bytes(source, capsys, times):
    """At random moments, so many times; then it ends with the bytes of an undisturbed run."""
    run_cli(capsys, *arguments(source, "alone"))
    draw = random.Random(0)
    kills = 0
    while kills < times:
        child = Child(_slowed, arguments(source), 0.03)
        deadline = time.time() + draw.uniform(0, 0.6)
        while time.time() < deadline and child.poll() is None:
            time.sleep(0.005)
        if child.poll() is not None:  # it had ended: take some shards away, as if it had not
            assert child.poll() == 0, child.communicate()
            for path in draw.sample(sorted((source / "out").glob("e*.npy")), 3):
                path.unlink()
            continue
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += 1
    code, out, _ = run_cli(capsys, *arguments(source))
    assert code == 0 and content(source / "out") == content(source / "alone")


def test_another_job_in_the_same_folder_is_refused_and_keeps_its_files(source, capsys):
    run_cli(capsys, *arguments(source))
    before = content(source / "out")
    tiny(5, seed=1).save_pretrained(source / "other")
    weights = arguments(source)
    weights[3] = str(source / "other")
    for given, message in (
        (weights, "holds embeddings of other weights; give another --output, or --resume never"),
        (arguments(source, "out", "--normalize"), "holds embeddings with normalize false, not true"),
        (arguments(source, "out", "--shard-size", 5), "holds embeddings with shard_size 4, not 5"),
        (arguments(source, "out", "--pool", "avg"), 'with pool null, not "avg"'),
    ):
        code, _, err = run_cli(capsys, *given)
        assert code == 2 and message in err and err.count("\n") == 1 and content(source / "out") == before
    (source / "out" / "embeddings-00003.npy").unlink()
    with pytest.raises(InputError, match="embeddings-00003.npy is missing; run the same command again"):
        read(source / "out")
    assert run_cli(capsys, *weights, "--resume", "never")[0] == 0
    truth = Embedder(source / "other", device="cpu").embed([source / "photos" / "00.png"])
    torch.testing.assert_close(torch.from_numpy(read(source / "out")[1][:1]), truth, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("change", ["added", "removed", "all removed but one", "resized"])
def test_a_source_that_has_changed_is_one_line(source, capsys, change):
    run_cli(capsys, *arguments(source))
    photos = source / "photos"
    if change == "added":
        pictures.smooth(0).save(photos / "zz.png")
    elif change == "removed":
        (photos / "more" / "21.png").unlink()
    elif change == "resized":
        pictures.smooth(0, 99, 99).save(photos / "02.png")
    else:
        for path in [*photos.glob("*.png"), *(photos / "more").glob("*.png")][1:]:
            path.unlink()
    code, _, err = run_cli(capsys, *arguments(source))
    assert code == 2 and "the source has changed: shard" in err and "--resume never to embed all of them again" in err


def test_damage_is_one_line(source, capsys):
    run_cli(capsys, *arguments(source))
    out = source / "out"
    with pytest.raises(InputError, match="holds no manifest.json of `vitfast embed`"):
        read(source)
    whole = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(whole[:40])
    code, _, err = run_cli(capsys, *arguments(source))
    assert code == 2 and "manifest.json is damaged, or `vitfast embed` did not write it; move it away" in err
    (out / "manifest.json").unlink()
    code, _, err = run_cli(capsys, *arguments(source))
    assert code == 2 and "holds embeddings without manifest.json" in err
    (out / "manifest.json").write_text(json.dumps({k: v for k, v in json.loads(whole).items() if k != "shards"}))
    with pytest.raises(InputError, match="holds a job that has not ended; run the same command again"):
        read(out)
    (out / "index-00001.parquet").write_bytes(b"PAR1")
    code, _, err = run_cli(capsys, *arguments(source))
    assert code == 2 and "index-00001.parquet is damaged" in err
    (out / "index-00001.parquet").unlink()
    assert run_cli(capsys, *arguments(source))[0] == 0 and len(read(out)[0]) == 22
    given = arguments(source)
    given[5] = str(source / "photos" / "02.png")
    code, _, err = run_cli(capsys, *given)
    assert code == 2 and "is a file; give a folder" in err


@pytest.mark.parametrize("damage", [b"", b"fewer"])
def test_a_shard_of_other_vectors_is_not_read(source, capsys, damage):
    run_cli(capsys, *arguments(source))
    path = source / "out" / "embeddings-00001.npy"
    np.save(path, np.load(path)[:-1]) if damage else path.write_bytes(b"")
    with pytest.raises(InputError, match="shard 1 of .* cannot be read .*; remove its two files and run again"):
        read(source / "out")


def test_a_rank_that_did_not_start_again_leaves_no_vectors_of_other_weights(source, capsys):
    run_cli(capsys, *arguments(source))
    tiny(5, seed=1).save_pretrained(source / "w")
    first = Child(command_line, arguments(source, "out", "--resume", "never"), RANK="0", WORLD_SIZE="2")
    assert first.communicate() and first.returncode == 0
    with pytest.raises(InputError, match="shard 1 in .* is of another job than manifest.json; run again with --resume"):
        read(source / "out")
    code, _, err = run_cli(capsys, *arguments(source))
    assert code == 2 and "shard 1 in" in err and "run again with --resume never" in err
    assert (
        run_cli(capsys, *arguments(source, "out", "--resume", "never"))[0] == 0 and len(read(source / "out")[0]) == 22
    )


def test_a_full_disk_is_one_line_and_no_half_shard(source, capsys):
    """At the manifest, and then at a shard's second file."""
    run_cli(capsys, *arguments(source, "alone"))
    child = Child(limited, [600, 1000], *[arguments(source)] * 2)
    _, err = child.communicate()
    assert (
        child.returncode == 0 and err.count("vitfast: error: ") == err.lower().count("[errno 27] file too large") == 2
    )
    assert err.count(str(source / "out")) == 2
    assert not list((source / "out").glob("*.npy")) and "Traceback" not in err
    assert run_cli(capsys, *arguments(source))[0] == 0
    assert content(source / "out") == content(source / "alone")


def test_folders_without_a_readable_image_and_wrong_options(source, capsys):
    (source / "bad").mkdir()
    (source / "bad" / "a.png").write_bytes(b"no image")
    given = arguments(source)
    given[1] = str(source / "bad")
    code, out, _ = run_cli(capsys, *given)
    assert code == 1 and "1 images, 1 of them unreadable" in out and read(source / "out")[1].shape == (0, 32)
    for more, message in (
        (("--shard-size", 0), "--shard-size must be at least 1, got 0"),
        (("--batch-size", 0), "--batch-size must be at least 1, got 0"),
        (("--column", "x"), "column='x' is for Parquet files"),
        (("--img-size", 16, 16, 16), "--img-size takes one number or two, got 3"),
    ):
        code, _, err = run_cli(capsys, *arguments(source, "new", *more))
        assert code == 2 and message in err and not (source / "new").exists()
    code, _, err = run_cli(capsys, *arguments(source, "photos"))
    assert code == 2 and "photos is the folder of the images; give another" in err
    assert os.listdir(source / "bad") == ["a.png"]


def test_a_terminal_shows_the_speed_and_the_share_of_the_time_that_waits(source, capsys, monkeypatch):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    code, _, err = run_cli(capsys, *arguments(source))
    assert code == 0 and re.search(r"24image \[00:0\d, +[\d.]+image/s, \d+% waiting\]", err), err


def test_two_processes_do_not_write_one_output(source, capsys):
    first = Child(_slowed, arguments(source), 0.5)
    while not (source / "out" / "rank-0.lock").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    time.sleep(0.1)  # until its content is there
    code, _, err = run_cli(capsys, *arguments(source))
    assert code == 2 and f"{source / 'out'} is in use by process {first.pid} on" in err and err.count("\n") == 1
    assert done([first]) and run_cli(capsys, *arguments(source))[0] == 0
    assert not list((source / "out").glob("*.lock"))
