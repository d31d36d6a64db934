"""What goes wrong in a long run: broken and vanished files, a full disk, too little memory, a kill at any step."""

import dataclasses
import errno
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from PIL import Image
from processes import Child, command_line
from runs import pretraining_command
from safetensors.torch import load_file

from vitfast import InputError, ViT
from vitfast.cli import main
from vitfast.train import resume
from vitfast.train.trainer import Trainer, TrainingError, train


def digits(output: Path, **fields):
    return runs.digits(output, **{"steps": 6, **fields})


def photos(root: Path, per_class: int = 12) -> Path:
    """Three classes of noisy JPEGs."""
    rng = np.random.default_rng(0)
    for name in "abc":
        for split in ("train", "val"):
            (root / split / name).mkdir(parents=True)
            for i in range(per_class):
                Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(
                    root / split / name / f"{i:02d}.jpg", quality=90
                )
    return root


def folder_config(data: Path, output: Path, **fields):
    return runs.digits(output, data=str(data), steps=9, batch_size=4, workers=0, **fields)


def test_broken_and_vanished_images_are_counted_and_replaced_up_to_a_limit(tmp_path, caplog):
    data = photos(tmp_path / "data")
    trainer = Trainer(folder_config(data, tmp_path / "run"))
    broken, gone = data / "train" / "a" / "03.jpg", data / "train" / "b" / "05.jpg"
    broken.write_bytes(broken.read_bytes()[:700])  # its header is whole: only decoding finds out
    gone.unlink()
    with caplog.at_level("WARNING"):
        summary = trainer.fit()  # one pass over 36 images
    assert summary["finished"] and summary["unreadable_images"] == 2
    said = [r.message for r in caplog.records if "replaced" in r.message]
    assert len(said) == 2 and any(str(broken) in text for text in said) and any(str(gone) in text for text in said)
    often = dataclasses.replace(folder_config(data, tmp_path / "often", max_unreadable=1), steps=27)
    assert train(often)["unreadable_images"] == 1  # three passes, one broken image
    with pytest.raises(InputError, match=r"1 images could not be read, more than max_unreadable 0; the last: .*03.jpg"):
        train(folder_config(data, tmp_path / "strict", max_unreadable=0))


def test_a_broken_validation_image_is_left_out_up_to_the_same_limit(tmp_path, caplog):
    data = photos(tmp_path / "data", per_class=4)
    path = data / "val" / "c" / "01.jpg"
    path.write_bytes(path.read_bytes()[:700])
    summary = train(folder_config(data, tmp_path / "run", eval_every=3))  # three evaluations
    assert (summary["val_images"], summary["val_unreadable_images"], summary["unreadable_images"]) == (11, 1, 0)
    assert [str(path) in r.message for r in caplog.records if "left out" in r.message] == [True]
    with pytest.raises(InputError, match="1 images of .* could not be read, more than max_unreadable 0.*01.jpg"):
        train(folder_config(data, tmp_path / "strict", max_unreadable=0))


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    train(digits(tmp_path, steps=4))
    kept = load_file(tmp_path / "checkpoints" / "last" / "model.safetensors")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(resume, "write_safetensors", full)
    command = pretraining_command(tmp_path, steps=6)
    assert main(command) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err and "Traceback" not in err
    again = load_file(tmp_path / "checkpoints" / "last" / "model.safetensors")
    assert all(torch.equal(again[k], v) for k, v in kept.items())
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".writing")] == []
    monkeypatch.undo()
    assert main(command) == 0 and resume.read_training_state(tmp_path / "checkpoints" / "last")["step"] == 6


@pytest.mark.parametrize(
    "room, wanted",
    [(9, "=4 fits, 8 at once, with the same result but for random"), (0, "a smaller model, image or batch")],
)
def test_out_of_memory_says_what_fits(tmp_path, monkeypatch, room, wanted):
    forward = ViT.forward

    def limited(self, images):
        if self.training and len(images) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, images)

    monkeypatch.setattr(ViT, "forward", limited)
    with pytest.raises(
        TrainingError, match=f"out of memory in step 1 with 32 images at once.*{wanted}.*no checkpoint yet"
    ):
        train(digits(tmp_path))


def kills(tmp_path: Path, count: int, steps: int) -> None:
    """A run killed `count` times at random moments ends with the weights of one that was left alone, bit for bit."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = dict(batch_size=16, steps=steps, save_every=2, ema_decay=0.9, drop_path=0.1, clip_norm=1.0)
    command = ["pretrain", "--recipe", "digits", "--data", "digits", "--device", "cpu", "--output", str(run), "--set"]

    def step() -> int:
        checkpoint = resume.find_checkpoint(run)
        return resume.read_record(checkpoint)["step"] if checkpoint else 0

    for number in range(count):
        process = Child(command_line, [*command, *(f"{k}={v}" for k, v in settings.items())])
        target = (number + 1) * steps // (count + 1)
        while step() < target and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.Random(number).random() * 0.05)  # anywhere: in a step, while saving, in a rename
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1]
        assert number == 0 or "resumed from step" in said, said
    torch.set_num_threads(1)
    for output in (run, whole):
        train(digits(output, **settings))
    for name in ("model.safetensors", "state/state.safetensors"):
        a, b = (load_file(r / "checkpoints" / "last" / name) for r in (run, whole))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), name


@pytest.mark.slow(7)
def test_killed_twice_and_resumed_bit_for_bit(tmp_path):
    kills(tmp_path, 2, steps=18)


@pytest.mark.long
def test_killed_twenty_times_and_resumed_bit_for_bit(tmp_path):
    kills(tmp_path, 20, steps=84)
