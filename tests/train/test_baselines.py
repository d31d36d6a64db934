"""Baselines: BiT ResNets and timm's models in the same loop."""

import json

import pytest
import timm
import torch
from checks import assert_close, randomize
from commands import run_cli
from runs import cut_at, digits, same, weights

from vitfast import InputError
from vitfast.model.baselines import baseline
from vitfast.train.trainer import train


def test_a_resnet_trains_in_the_same_loop_and_resumes(tmp_path, monkeypatch):
    settings = dict(model="timm:test_resnet", steps=4, save_every=2, ema_decay=0.5, eval_every=4, lr=1e-3)
    config = digits(tmp_path / "run", **settings)
    cut_at(monkeypatch, 3)
    with pytest.raises(KeyError):
        train(config)
    monkeypatch.undo()
    assert train(config)["steps"] == 4
    train(digits(tmp_path / "whole", **settings))
    tensors = weights(tmp_path / "whole")
    assert same(weights(tmp_path / "run"), tensors)
    saved = json.loads((tmp_path / "run" / "checkpoints" / "last" / "config.json").read_text())
    timm.create_model(saved["architecture"], num_classes=saved["num_classes"]).load_state_dict(tensors)


@pytest.mark.parametrize("name", ["R50x1", "timm:test_resnet"])
def test_masked_patch_prediction_of_a_baseline_is_refused_before_anything_is_written(tmp_path, capsys, name):
    settings = ("--recipe", "digits", "--data", "digits", "--device", "cpu", "--set", "objective=masked")
    code, _, err = run_cli(capsys, "pretrain", "--model", name, "--output", tmp_path / "run", *settings)
    said = f"objective=masked trains vitfast's ViTs only; take softmax or sigmoid for {name}"
    assert code == 2 and err == f"vitfast: error: {said}\n"
    assert not (tmp_path / "run").exists()


def test_baselines_take_raw_images_and_are_timms():
    with torch.device("meta"):
        for name, theirs in (("R50x1", "resnetv2_50x1_bit"), ("R152x2", "resnetv2_152x2_bit")):
            ours, known = baseline(name, 21843), timm.create_model(theirs, num_classes=21843)
            assert {k: v.shape for k, v in ours.state_dict().items()} == {
                k: v.shape for k, v in known.state_dict().items()
            }
    model = randomize(baseline("timm:test_resnet", 5)).eval()
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (model.mean, model.std))
    assert_close(model(raw), model((raw / 255 - mean) / std), atol=1e-4, rtol=1e-4)
    with pytest.raises(InputError, match="timm cannot build 'resnett'"):
        baseline("timm:resnett", 5)
    with torch.device("meta"):
        fixed = baseline("timm:vit_tiny_patch16_224", 5, (32, 64), drop_path_rate=0.1)
    assert fixed.pos_embed.shape[1] == 1 + 2 * 4 and fixed.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)
