"""`vitfast embed`: shards that are whole, resumed to the same bytes, refused where they are another job's."""

import json
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pictures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from children import limited
from commands import refuses, run_cli
from frozen import tiny
from PIL import Image
from processes import Child, command_line, done, ranks

from vitfast import Embedder
from vitfast.cli import main
from vitfast.errors import InputError
from vitfast.eval.embed import read

COUNT = 23


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Images of many sizes, two of them unreadable; weights; and out/, the vectors that the command made of them."""
    root = tmp_path_factory.mktemp("made")
    (root / "photos" / "more").mkdir(parents=True)
    for i in range(COUNT):
        pictures.smooth(i, 20 + i, 40).save(root / "photos" / ("more" if i % 2 else "") / f"{i:02d}.png")
    (root / "photos" / "05.png").write_bytes(b"no image")
    pictures.truncate(root / "photos" / "10.png")
    tiny(5).save_pretrained(root / "w")
    assert main(arguments(root)) == 0
    return root


@pytest.fixture
def source(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made")


def arguments(source, output="out", *more) -> list[str]:
    given = ["embed", source / "photos", "--weights", source / "w", "--output", source / output]
    return list(map(str, [*given, "--device", "cpu", "--shard-size", 4, "--workers", 0, *more]))


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*"))}


def embedded(capsys, given) -> tuple[int, int, str]:
    """How many images the command kept and embedded, and what it said."""
    code, out, err = run_cli(capsys, *given, "--json")
    assert code == 0, err
    return json.loads(out)["kept"], json.loads(out)["images"], err


def test_files_hold_what_the_embedder_returns(source, capsys):
    code, out, err = run_cli(capsys, *arguments(source, "new"))
    assert code == 0 and "24 images, 2 of them unreadable" in out and out.count("\n") == 1
    assert content(source / "new") == content(source / "out")
    assert err.count("left out: ") == 2 and "05.png cannot be read as an image (of no known format)" in err
    names = sorted(str(p.relative_to(source / "photos")) for p in (source / "photos").rglob("*.png"))
    names = sorted(names, key=lambda name: ("more" if "/" in name else name, name))
    good = [name for name in names if name not in ("05.png", "10.png")]
    ids, vectors = read(source / "out")
    assert ids == good and vectors.dtype == np.float32
    truth = Embedder(source / "w", device="cpu").embed([source / "photos" / name for name in good])
    torch.testing.assert_close(torch.from_numpy(vectors), truth, atol=1e-6, rtol=1e-5)
    shards = [pq.read_table(source / "out" / f"index-{k:05d}.parquet").to_pylist() for k in range(6)]
    for told in ([row["row"] for row in shard if row["row"] is not None] for shard in shards):
        assert told == [*range(len(told))]  # rows of the shard's vectors
    rows = sum(shards, [])
    assert [row["id"] for row in rows] == names
    assert list(rows[0]) == ["id", "row", "height", "width", "error", "bytes", "modified", "content"]
    for row in rows:
        bad = row["id"] in ("05.png", "10.png")
        number = int(row["id"][-6:-4])
        assert (row["row"] is None) == (row["error"] is not None) == bad
        assert bad or (row["height"], row["width"]) == (20 + number, 40)
        file = (source / "photos" / row["id"]).stat()
        assert (row["bytes"], row["modified"]) == (file.st_size, file.st_mtime_ns)
    manifest = json.loads((source / "out" / "manifest.json").read_text())
    assert (manifest["images"], manifest["shards"], manifest["dim"], manifest["dtype"]) == (24, 6, 32, "float32")
    assert manifest["parts"] == [dict(images=24, shards=6)]
    assert manifest["preprocessing"]["size"] == [16, 16] and len(manifest["weights_sha256"]) == 64
    before = content(source / "out")
    assert embedded(capsys, arguments(source))[:2] == (24, 0) and content(source / "out") == before


@pytest.mark.slow
def test_ranks_share_the_work_without_talking(source, capsys):
    outputs = done(ranks(3, command_line, arguments(source, "new")))
    assert [out.count(": 8 images,") for out in outputs] == [1, 1, 1]
    assert content(source / "new") == content(source / "out")


def _slowed(argv: list[str], seconds: float) -> int:
    """The command, slow enough that a kill comes in the middle."""
    from vitfast.eval import embedder

    computed = embedder.Embedder._computed

    def slower(self, batch):
        time.sleep(seconds)
        return computed(self, batch)

    embedder.Embedder._computed = slower
    return command_line(argv)


@pytest.mark.slow
@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.long)])
def test_a_job_that_is_killed_goes_on_to_the_same_bytes(source, capsys, times):
    """At random moments, so many times; then it ends with the bytes of an undisturbed run."""
    draw, kills = random.Random(0), 0
    while kills < times:
        child = Child(_slowed, arguments(source, "new"), 0.03)
        deadline = time.time() + draw.uniform(0, 0.6)
        while time.time() < deadline and child.poll() is None:
            time.sleep(0.005)
        if child.poll() is not None:  # it had ended: take some shards away, as if it had not
            assert child.poll() == 0, child.communicate()
            for path in draw.sample(sorted((source / "new").glob("e*.npy")), 3):
                path.unlink()
            continue
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += 1
    assert run_cli(capsys, *arguments(source, "new"))[0] == 0 and content(source / "new") == content(source / "out")


def test_another_job_in_the_same_folder_is_refused_and_keeps_its_files(source, capsys):
    before = content(source / "out")
    tiny(5, seed=1).save_pretrained(source / "other")
    weights = arguments(source)
    weights[3] = str(source / "other")
    for given, message in (
        (weights, "holds embeddings of other weights; give another --output, or --resume never"),
        (arguments(source, "out", "--normalize"), "holds embeddings with normalize false, not true"),
        (arguments(source, "out", "--no-exif-orientation"), "with exif_orientation true, not false"),
        (arguments(source, "out", "--shard-size", 5), "holds embeddings with shard_size 4, not 5"),
        (arguments(source, "out", "--pool", "avg"), 'with pool null, not "avg"'),
    ):
        refuses(capsys, message, *given)
    assert content(source / "out") == before
    (source / "out" / "embeddings-00003.npy").unlink()
    with pytest.raises(InputError, match="embeddings-00003.npy is missing; run the same command again"):
        read(source / "out")
    assert run_cli(capsys, *weights, "--resume", "never")[0] == 0
    truth = Embedder(source / "other", device="cpu").embed([source / "photos" / "00.png"])
    torch.testing.assert_close(torch.from_numpy(read(source / "out")[1][:1]), truth, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("change", ["one", "all but one", "another folder"])
def test_images_that_are_gone_are_one_line_and_nothing_is_written(source, capsys, change):
    before, files = content(source / "out"), sorted((source / "photos").rglob("*.png"))
    for path in files[-1:] if change == "one" else files[1:]:
        path.unlink()
    for i in range(20):  # new ones, which are more than some shards
        pictures.smooth(i).save(source / "photos" / f"{i:03d}.png")
    if change == "another folder":
        files[0].unlink()
    count = {"one": 1, "all but one": 23, "another folder": 24}[change]
    code, _, err = run_cli(capsys, *arguments(source))
    assert f"{count} images in {source / 'out'} are no longer in the source (" in err and code == 2
    assert "; nothing new was embedded; bring them back, give another --output, or --resume never" in err
    assert content(source / "out") == before


def compare(source, ids, vectors) -> None:
    """The vectors of these images are those that an Embedder makes of the files as they are now."""
    truth = Embedder(source / "w", device="cpu").embed([source / "photos" / name for name in ids])
    torch.testing.assert_close(torch.from_numpy(vectors), truth, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_new_images_become_shards_at_the_end(source, capsys):
    """Between the others, by three processes; then one more, after which the last shard of both is not full."""
    before, ids = content(source / "out"), read(source / "out")[0]
    for name in ("00a.png", "more/10.png", "a/b.png", "zz.png", "12a.png"):
        (source / "photos" / name).parent.mkdir(exist_ok=True)
        pictures.smooth(7, 30, 31).save(source / "photos" / name)
    outputs = done(ranks(3, command_line, arguments(source)))
    assert sum(int(re.search(r": (\d+) images,", out)[1]) for out in outputs) == 5
    found, vectors = read(source / "out")
    assert found == [*ids, "00a.png", "12a.png", "a/b.png", "more/10.png", "zz.png"]
    compare(source, found, vectors)
    after = content(source / "out")
    assert all(after[name] == before[name] for name in before if name != "manifest.json")
    pictures.smooth(8, 30, 31).save(source / "photos" / "0.png")
    assert embedded(capsys, arguments(source))[:2] == (29, 1)
    assert read(source / "out")[0] == [*found, "0.png"]
    manifest = json.loads((source / "out" / "manifest.json").read_text())
    parts = [dict(images=24, shards=6), dict(images=5, shards=2), dict(images=1, shards=1)]
    assert (manifest["parts"], manifest["images"], manifest["shards"]) == (parts, 30, 9)


@pytest.mark.slow
def test_new_images_and_shards_that_are_absent(source, capsys):
    """Each image is there once, and whole shards stay as they are; the last one, of three images, is filled up."""
    (source / "photos" / "00.png").unlink()
    run_cli(capsys, *arguments(source), "--resume", "never")
    for shard in (1, 3, 5):
        (source / "out" / f"embeddings-{shard:05d}.npy").unlink()
    before = content(source / "out")
    for i in range(6):
        pictures.smooth(i, 30, 31).save(source / "photos" / f"0{i}a.png")
    assert sum(out.count(" were there already") for out in done(ranks(2, command_line, arguments(source)))) == 1
    found, vectors = read(source / "out")
    names = {str(path.relative_to(source / "photos")) for path in (source / "photos").rglob("*.png")}
    parts = json.loads((source / "out" / "manifest.json").read_text())["parts"]
    assert parts == [dict(images=24, shards=6), dict(images=5, shards=2)]
    assert len(found) == len(set(found)) == 27 and set(found) == names - {"05.png", "10.png"}
    compare(source, found, vectors)
    kept = [f"{name}-{shard:05d}" for shard in (0, 2, 4) for name in ("embeddings", "index")]
    after = content(source / "out")
    assert all(after[name] == before[name] for name in before if name.partition(".")[0] in kept)


def test_an_image_that_was_replaced_is_embedded_again(source, capsys):
    """By one of equal size, of another size, a broken one by a good one; but not one that is only newer."""
    photos = source / "photos"
    for name in ("02.png", "04.png"):
        Image.fromarray(np.full((20, 20, 3), 50, np.uint8)).save(photos / name, "BMP")
    run_cli(capsys, *arguments(source), "--resume", "never")
    before = content(source / "out")
    pictures.later(photos / "00.png", (photos / "00.png").read_bytes())
    kept, _, err = embedded(capsys, arguments(source))
    assert kept == 24 and "again" not in err and content(source / "out") == before
    pictures.later(photos / "02.png", (photos / "02.png").read_bytes().replace(bytes([50] * 9), bytes([90] * 9)))
    _, images, err = embedded(capsys, arguments(source))
    assert images == 4
    assert "shard 0 is computed again: of its 4 images some were replaced since (02.png)" in err
    compare(source, *read(source / "out"))
    after = content(source / "out")
    assert {name for name in before if after[name] != before[name]} == {"embeddings-00000.npy", "index-00000.parquet"}
    pictures.smooth(3, 50, 60).save(photos / "05.png")
    (photos / "04.png").write_bytes((photos / "06.png").read_bytes())
    embedded(capsys, arguments(source))
    ids, vectors = read(source / "out")
    assert "05.png" in ids and len(ids) == 23
    compare(source, ids, vectors)
    assert embedded(capsys, arguments(source))[:2] == (24, 0)


def test_rows_that_are_new_in_a_parquet_file_are_embedded_alone(source, capsys):
    """The file is another; its images are known by their contents."""
    photos, path = source / "photos", source / "images.parquet"
    files = {name: (photos / name).read_bytes() for name in ("00.png", "02.png", "04.png", "06.png", "08.png")}
    given = arguments(source, "new")
    given[1] = str(path)
    for names, *wanted in ((list(files)[1:], 0, 4), (list(files), 4, 1), (list(files), 5, 0)):
        pq.write_table(pa.table(dict(id=names, image=[files[name] for name in names])), path)
        assert list(embedded(capsys, given)[:2]) == wanted
    ids, vectors = read(source / "new")
    assert ids == [*list(files)[1:], "00.png"]
    compare(source, ids, vectors)
    files["04.png"] = (photos / "12.png").read_bytes()
    (photos / "04.png").write_bytes(files["04.png"])
    pq.write_table(pa.table(dict(id=list(files), image=list(files.values()))), path)
    assert embedded(capsys, given)[1] == 4
    compare(source, *read(source / "new"))


def test_damage_is_one_line(source, capsys):
    out = source / "out"
    vectors = out / "embeddings-00001.npy"
    for other in (np.load(vectors)[:-1], None):
        np.save(vectors, other) if other is not None else vectors.write_bytes(b"")
        with pytest.raises(InputError, match="shard 1 of .* cannot be read .*; remove its two files and run again"):
            read(out)
    with pytest.raises(InputError, match="holds no manifest.json of `vitfast embed`"):
        read(source)
    whole = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(whole[:40])
    refuses(capsys, "manifest.json is damaged, or `vitfast embed` did not write it; move it away", *arguments(source))
    (out / "manifest.json").unlink()
    refuses(capsys, "holds embeddings without manifest.json", *arguments(source))
    (out / "manifest.json").write_text(json.dumps({k: v for k, v in json.loads(whole).items() if k != "shards"}))
    with pytest.raises(InputError, match="holds a job that has not ended; run the same command again"):
        read(out)
    (out / "index-00001.parquet").write_bytes(b"PAR1")
    refuses(capsys, "index-00001.parquet is damaged", *arguments(source))
    (out / "index-00001.parquet").unlink()
    assert run_cli(capsys, *arguments(source))[0] == 0 and len(read(out)[0]) == 22
    given = arguments(source)
    given[5] = str(source / "photos" / "02.png")
    refuses(capsys, "is a file; give a folder", *given)


@pytest.mark.slow
def test_a_rank_that_did_not_start_again_leaves_no_vectors_of_other_weights(source, capsys):
    tiny(5, seed=1).save_pretrained(source / "w")
    first = Child(command_line, arguments(source, "out", "--resume", "never"), RANK="0", WORLD_SIZE="2")
    assert first.communicate() and first.returncode == 0
    with pytest.raises(InputError, match="shard 1 in .* is of another job than manifest.json; run again with --resume"):
        read(source / "out")
    refuses(capsys, "run again with --resume never", *arguments(source))
    assert (
        run_cli(capsys, *arguments(source, "out", "--resume", "never"))[0] == 0 and len(read(source / "out")[0]) == 22
    )


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_no_half_shard(source, capsys):
    """At the manifest, and then at a shard's second file."""
    child = Child(limited, [600, 1000], *[arguments(source, "new")] * 2)
    _, err = child.communicate()
    assert (
        child.returncode == 0 and err.count("vitfast: error: ") == err.lower().count("[errno 27] file too large") == 2
    )
    assert err.count(str(source / "new")) == 2
    assert not list((source / "new").glob("*.npy")) and "Traceback" not in err
    assert run_cli(capsys, *arguments(source, "new"))[0] == 0 and content(source / "new") == content(source / "out")


def test_folders_without_a_readable_image_and_wrong_options(source, capsys):
    (source / "bad").mkdir()
    (source / "bad" / "a.png").write_bytes(b"no image")
    given = arguments(source, "none")
    given[1] = str(source / "bad")
    code, out, _ = run_cli(capsys, *given)
    assert code == 1 and "1 images, 1 of them unreadable" in out and read(source / "none")[1].shape == (0, 32)
    for more, message in (
        (("--column", "x"), "column='x' is for Parquet files"),
        (("--img-size", 16, 16, 16), "--img-size takes one number or two, got 3"),
    ):
        refuses(capsys, message, *arguments(source, "new", *more))
        assert not (source / "new").exists()
    refuses(capsys, "photos is the folder of the images; give another", *arguments(source, "photos"))
    assert os.listdir(source / "bad") == ["a.png"]


def test_a_terminal_shows_the_speed_and_the_share_of_the_time_that_waits(source, capsys, monkeypatch):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    code, _, err = run_cli(capsys, *arguments(source, "new"))
    assert code == 0 and re.search(r"24image \[00:0\d, +[\d.]+image/s, \d+% waiting\]", err), err


@pytest.mark.slow
def test_two_processes_do_not_write_one_output(source, capsys):
    first = Child(_slowed, arguments(source, "new"), 0.5)
    while not (source / "new" / "rank-0.lock").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    time.sleep(0.1)  # until its content is there
    refuses(capsys, f"{source / 'new'} is in use by process {first.pid} on", *arguments(source, "new"))
    assert done([first]) and run_cli(capsys, *arguments(source, "new"))[0] == 0
    assert not list((source / "new").glob("*.lock"))
