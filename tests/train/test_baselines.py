"""Baselines: BiT ResNets and timm's models, read as timm reads them, in the loop and the commands that ViTs have."""

import json

import numpy as np
import pytest
import timm
import torch
from checks import assert_close, randomize
from commands import refuses, run_cli
from frozen import evaluation
from runs import digits, finetuning, weights
from timm.models import save_for_hf

from vitfast import InputError, ViT
from vitfast.data.datasets import Subset
from vitfast.data.loader import open_data
from vitfast.eval.fewshot import features, few_shot
from vitfast.model import baselines
from vitfast.train.setup import set_up
from vitfast.train.trainer import train

CPU = torch.device("cpu")


@pytest.fixture
def tiny_resnet(monkeypatch):
    """R50x1 is a BiT ResNet with a unit in each of two stages."""
    monkeypatch.setitem(baselines.RESNETS, "R50x1", ((1, 1), 1))


def raw(count: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)


def google_names(model) -> dict[str, np.ndarray]:
    """A BiT ResNet's weights as Google's npz has them, by the names that BiT's code gives its layers."""
    found = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        array = tensor.detach().numpy()
        found[f"resnet/{name}"] = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array

    put("root_block/standardized_conv2d/kernel", model.stem.conv.weight)
    put("head/conv2d/kernel", model.head.fc.weight)
    put("head/conv2d/bias", model.head.fc.bias)
    norms = {"group_norm/": model.norm}
    for i, stage in enumerate(model.stages, 1):
        for j, unit in enumerate(stage.blocks, 1):
            place = f"block{i}/unit{j:02d}/"
            put(f"{place}a/proj/standardized_conv2d/kernel", unit.downsample.conv.weight)
            for letter, k in zip("abc", (1, 2, 3)):
                put(f"{place}{letter}/standardized_conv2d/kernel", getattr(unit, f"conv{k}").weight)
                norms[f"{place}{letter}/group_norm/"] = getattr(unit, f"norm{k}")
    for name, norm in norms.items():
        put(f"{name}gamma", norm.weight)
        put(f"{name}beta", norm.bias)
    return found


@pytest.mark.slow
def test_baselines_take_raw_images_and_are_timms():
    with torch.device("meta"):
        for name, theirs in (("R50x1", "resnetv2_50x1_bit"), ("R152x2", "resnetv2_152x2_bit")):
            models = baselines.baseline(name, 21843), timm.create_model(theirs, num_classes=21843)
            ours, known = ({k: v.shape for k, v in model.state_dict().items()} for model in models)
            assert ours == known
        fixed = baselines.baseline("timm:vit_tiny_patch16_224", 5, (32, 64), drop_path_rate=0.1)
    assert fixed.pos_embed.shape[1] == 1 + 2 * 4 and fixed.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)
    model, images = randomize(baselines.baseline("timm:test_resnet", 5)).eval(), raw()
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (model.mean, model.std))
    assert_close(model(images), model((images / 255 - mean) / std), atol=1e-4, rtol=1e-4)
    with pytest.raises(InputError, match="timm cannot build 'resnett'"):
        baselines.baseline("timm:resnett", 5)
    assert baselines.baseline("timm:test_resnet", 5, (64, 32)).training
    with pytest.raises(InputError, match="timm's MlpMixer takes no images of 32 x 32 pixels"):
        baselines.baseline("timm:mixer_s32_224", 5, (32, 32))


@pytest.mark.slow
def test_released_bit_weights_are_read_as_timm_reads_them(tmp_path):
    """The folder that timm's hub has; features too, which few-shot evaluation learns from."""
    theirs = randomize(timm.create_model("resnetv2_50x1_bit.goog_in21k", num_classes=10), std=0.05).eval()
    save_for_hf(theirs, tmp_path, safe_serialization=True)
    data = open_data(evaluation(tmp_path), (224, 224), (1, 1), CPU)
    some = Subset(data.val, [0, 1, 2])
    images = next(iter(data.in_order(some)))[0]
    pixels = (images / 255 - 0.5) / 0.5
    ours = baselines.load_any("B/16", tmp_path).eval()
    assert baselines.baseline_of("B/16", tmp_path) == "R50x1" and baselines.sizes(ours) == ((224, 224), (1, 1))
    with torch.no_grad():
        assert_close(ours(images), theirs(pixels), atol=1e-4, rtol=1e-4)
        expected = theirs.forward_head(theirs.forward_features(pixels), pre_logits=True)
    assert_close(features(ours, data, some).x, expected, atol=1e-4, rtol=1e-4)
    for name in ("R101x1", "timm:test_resnet"):
        with pytest.raises(InputError, match=f"no weights of {name}: missing"):
            baselines.load_any(name, tmp_path)
    ViT.from_preset("Nano/8", img_size=32).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="unexpected|missing"):
        baselines.load_any("timm:resnetv2_50x1_bit", tmp_path)


def test_bare_files_are_read_where_the_model_is_named(tmp_path, tiny_resnet):
    theirs = randomize(baselines.baseline("R50x1", 7), std=0.05).eval()
    np.savez(tmp_path / "bit.npz", **google_names(theirs))
    torch.save(theirs.state_dict(), tmp_path / "bit.pth")
    images = raw()
    for file in ("bit.npz", "bit.pth"):
        ours = baselines.load_any("R50x1", tmp_path / file).eval()
        assert ours.num_classes == 7 and torch.equal(ours(images), theirs(images)), file
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(InputError, match="other.npz: no weights of R50x1"):
        baselines.load_any("R50x1", tmp_path / "other.npz")
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="model.safetensors: not a whole .safetensors file"):
        baselines.load_any("R50x1", tmp_path / "model.safetensors")


@pytest.mark.parametrize("change", [dict(pretrained_cfg=[1]), dict(num_classes="ten"), dict(model_args=dict(colour=1))])
def test_a_wrong_config_is_one_line(tmp_path, tiny_resnet, change):
    baselines.baseline("R50x1", 7).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InputError, match="no weights of R50x1, or no config.json of timm's") as error:
        baselines.load_any("B/16", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_timm_reads_a_run_and_fine_tuning_starts_from_its_body_with_a_zero_head(tmp_path):
    train(digits(tmp_path / "pre", model="timm:test_resnet", steps=1, lr=1e-3, train_images=32))
    before = weights(tmp_path / "pre")
    saved = json.loads((tmp_path / "pre" / "checkpoints" / "last" / "config.json").read_text())
    timm.create_model(saved["architecture"], num_classes=saved["num_classes"]).load_state_dict(before)
    network, data = set_up(finetuning(tmp_path / "pre", tmp_path / "fine", img_size=40), CPU)
    body = network.state_dict()
    head = {name for name in body if not torch.equal(body[name], before[name])}
    parameters = {id(p): name for name, p in network.named_parameters()}
    assert head == {parameters[id(p)] for p in network.get_classifier().parameters()}
    assert not any(body[name].any() for name in head) and data.img_size == (40, 40)


@pytest.mark.slow
def test_the_commands_take_a_baselines_run(tmp_path, capsys, tiny_resnet):
    train(digits(tmp_path / "pre", model="R50x1", steps=2, lr=1e-3))
    kept = tmp_path / "pre" / "checkpoints" / "last"
    common = ("--weights", kept, "--data", "digits", "--device", "cpu")
    code, out, _ = run_cli(capsys, "eval", *common, "--json")
    summary = json.loads((tmp_path / "pre" / "summary.json").read_text())
    assert code == 0 and json.loads(out)["accuracy"] == summary["accuracy"]
    told = few_shot(evaluation(kept), shots=[5], seeds=2)["results"]
    code, out, _ = run_cli(capsys, "fewshot", *common, "--shots", 5, "--seeds", 2, "--json")
    assert code == 0 and json.loads(out)["results"] == told and told[0]["accuracy"] > 0.3
    finetune = ("finetune", *common, "--img-size", 32, "--steps", 1, "--batch-size", 8)
    code, out, err = run_cli(capsys, *finetune, "--model", "R50x1", "--output", tmp_path / "fine")
    assert code == 0 and "accuracy" in out, err
    for flags, message in (
        (["--model", "R101x1"], "no weights of R101x1"),
        (["--weights", tmp_path / "nowhere"], "nowhere: no such file or folder"),
    ):
        refuses(capsys, message, *finetune, *flags, "--output", tmp_path / "no")
        assert not (tmp_path / "no").exists()
