"""How VTAB's tasks see their images: nothing that changes a class, and the same in training and in the test."""

import json

import numpy as np
import pictures
import pytest
import torch
import yaml
from frozen import run_cli, save_tiny
from PIL import Image

from vitfast.data.transforms import transforms
from vitfast.experiments import vtab
from vitfast.train.recipes import resolve

# By what the classes of each task are; structured ones are places, numbers, distances and directions.
NEVER_FLIPPED = "svhn clevr_count clevr_distance dmlab kitti_distance dsprites_location dsprites_orientation"
NEVER_FLIPPED += " smallnorb_azimuth smallnorb_elevation"


def halves(root, split: str, count: int, seed: int) -> None:
    """Two classes that are each other's mirror images: bright on the left, bright on the right."""
    rng = np.random.default_rng(seed)
    for name, columns in (("left", slice(0, 8)), ("right", slice(8, 16))):
        (root / split / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            pixels[:, columns] += 150
            Image.fromarray(pixels).save(root / split / name / f"{i}.png")


def test_mirror_images_can_be_told_apart(tmp_path, capsys):
    root = tmp_path / "vtab"
    halves(root / "dsprites_orientation", "train", 16, 0)
    halves(root / "dsprites_orientation", "test", 16, 1)
    weights = save_tiny(tmp_path / "w")
    flags = ("--weights", weights, "--root", root, "--output", tmp_path / "out", "--device", "cpu", "--img-size", 16)
    flags += ("--examples", 32, "--batch-size", 16, "--json")
    code, out, err = run_cli(capsys, "vtab", *flags, "--set", "workers=0", "steps=80", "warmup_steps=0", "lr=0.1")
    assert code == 0, err
    (task,) = json.loads(out)["tasks"]
    assert task["accuracy"] == 1.0 and task["unreadable_images"] == 0
    used = yaml.safe_load((tmp_path / "out" / "dsprites_orientation-32" / "config.yaml").read_text())
    assert (used["hflip"], used["crop_scale"], used["crop_mode"]) == (0.0, [1.0, 1.0], "squash")
    assert used["momentum"] == 0.9 and used["name"] == "finetune/vtab"


def test_every_task_is_augmented_only_where_its_classes_allow_it(tmp_path):
    torch.manual_seed(0)
    image = pictures.smooth(2, 90, 160)
    for tasks in vtab.VTAB.values():
        for name in tasks:
            (tmp_path / name).mkdir()
    found = {task.name: task for task in vtab.tasks_in(tmp_path)}
    assert len(found) == 19
    for name, task in found.items():
        config = resolve("finetune", {"recipe": "finetune/vtab"}, task.settings)
        train, evaluate = transforms(config, (48, 48))
        squashed = np.asarray(image.resize((48, 48), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        assert np.array_equal(evaluate(image), squashed), name
        seen = [train(image) for _ in range(12)]
        same = [np.array_equal(pixels, squashed) for pixels in seen]
        mirrored = [np.array_equal(pixels, squashed[..., ::-1]) for pixels in seen]
        if name in NEVER_FLIPPED.split():
            assert all(same), name
        elif name == "patch_camelyon":  # its label is of the middle alone
            assert any(same) and any(mirrored) and all(a or b for a, b in zip(same, mirrored))
        else:
            assert not any(same) and not any(mirrored) and config.hflip == 0.5, name
            assert config.crop_scale == pytest.approx(((6 / 7) ** 2,) * 2)


def test_frozen_features_see_the_whole_image_too(tmp_path):
    (tmp_path / "kitti_distance").mkdir()
    (task,) = vtab.tasks_in(tmp_path)
    config = resolve("eval", task.settings)
    image = pictures.smooth(2, 30, 100)
    squashed = np.asarray(image.resize((48, 48), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(transforms(config, (48, 48))[1](image), squashed)
