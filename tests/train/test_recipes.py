"""Recipes against the paper's tables, the settings that make them, and the experiments built out of runs."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from checks import assert_close, randomize
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay

from vitfast import InputError, ViT
from vitfast.baselines import baseline
from vitfast.cli import main
from vitfast.data.datasets import labels_of
from vitfast.data.loader import open_data
from vitfast.data.transforms import Erase
from vitfast.experiments import runs as experiments
from vitfast.experiments.runs import scaling, sweep, training_flops
from vitfast.train.optim import learning_rate, make_optimizer
from vitfast.train.recipes import RECIPES, resolve
from vitfast.train.trainer import Trainer, train

CPU = torch.device("cpu")


def digits(output="unused", **fields):
    return resolve(
        "pretrain", {**dict(recipe="digits", data="digits", output=str(output), device="cpu", batch_size=32), **fields}
    )


# Table 3 of arXiv 2010.11929, typed in from the paper: models, data set, epochs, base rate, decay, weight decay, dropout.
TABLE_3 = """
vit-b16 vit-b32 | jft-7ep | 7 | 8e-4 | linear | 0.1 | 0.0
vit-l32 | jft-7ep | 7 | 6e-4 | linear | 0.1 | 0.0
vit-l16 | jft-7ep | 7 | 4e-4 | linear | 0.1 | 0.0
vit-l16 | jft-14ep | 14 | 4e-4 | linear | 0.1 | 0.0
vit-h14 | jft-14ep | 14 | 3e-4 | linear | 0.1 | 0.0
bit-r50x1 bit-r50x2 | jft-7ep | 7 | 1e-3 | linear | 0.1 | 0.0
bit-r101x1 | jft-7ep | 7 | 8e-4 | linear | 0.1 | 0.0
bit-r152x1 bit-r152x2 | jft-7ep | 7 | 6e-4 | linear | 0.1 | 0.0
vit-r50-b16 vit-r50-b32 | jft-7ep | 7 | 8e-4 | linear | 0.1 | 0.0
vit-r50-l32 | jft-7ep | 7 | 2e-4 | linear | 0.1 | 0.0
vit-r50-l16 | jft-7ep | 7 | 4e-4 | linear | 0.1 | 0.0
vit-r50-l16 | jft-14ep | 14 | 4e-4 | linear | 0.1 | 0.0
vit-b16 vit-b32 | imagenet21k | 90 | 1e-3 | linear | 0.03 | 0.1
vit-l16 vit-l32 | imagenet21k | 90 | 1e-3 | linear | 0.03 | 0.1
vit-l16 vit-l32 | imagenet21k-30ep | 30 | 1e-3 | linear | 0.03 | 0.1
vit-b16 vit-b32 vit-l16 vit-l32 | imagenet | 300 | 3e-3 | cosine | 0.3 | 0.1
"""
TABLE_4 = """
imagenet | 20000 | 0.003 0.01 0.03 0.06
cifar100 | 10000 | 0.001 0.003 0.01 0.03
cifar10 | 10000 | 0.001 0.003 0.01 0.03
pets | 500 | 0.001 0.003 0.01 0.03
flowers | 500 | 0.001 0.003 0.01 0.03
vtab | 2500 | 0.01
"""


def test_every_row_of_table_3_and_4_is_a_recipe():
    seen = set()
    for line in TABLE_3.strip().splitlines():
        models, data, epochs, lr, decay, weight_decay, dropout = (part.strip() for part in line.split("|"))
        for model in models.split():
            r = RECIPES[f"{model}/{data}"]
            seen.add(r.name)
            assert (r.epochs, r.lr, r.lr_decay, r.weight_decay, r.dropout) == (
                int(epochs),
                float(lr),
                decay,
                float(weight_decay),
                float(dropout),
            ), r.name
            assert (r.batch_size, r.img_size, r.betas, r.warmup_steps, r.optimizer) == (
                4096,
                224,
                (0.9, 0.999),
                10_000,
                "adamw",
            )
            assert r.clip_norm == (1.0 if data == "imagenet" else None) and r.steps is None
            assert r.name in r.about and r.about.startswith("vitfast pretrain --recipe")
    assert seen == {name for name in RECIPES if name.startswith(("vit-", "bit-"))}
    for line in TABLE_4.strip().splitlines():
        data, steps, rates = (part.strip() for part in line.split("|"))
        r = RECIPES[f"finetune/{data}"]
        assert (r.steps, r.sweep_lr) == (int(steps), tuple(map(float, rates.split()))) and r.lr in r.sweep_lr
        assert (r.optimizer, r.momentum, r.lr_decay, r.batch_size, r.weight_decay, r.clip_norm, r.img_size) == (
            "sgd",
            0.9,
            "cosine",
            512,
            0,
            1.0,
            384,
        )
    held = {
        name: RECIPES[f"finetune/{name}"].sweep_hold_out
        for name in ("pets", "flowers", "cifar10", "cifar100", "imagenet")
    }
    assert held == dict(pets=0.1, flowers=0.1, cifar10=0.02, cifar100=0.02, imagenet=0.01)
    for name in ("finetune/imagenet-512", "finetune/imagenet-518"):
        assert RECIPES[name].ema_decay == 0.9999 and RECIPES[name].img_size == int(name[-3:])


def test_every_recipe_resolves_and_the_command_line_lists_it(capsys):
    for name in RECIPES:
        assert resolve("pretrain", dict(recipe=name)).name == name
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(RECIPES) and all(
        isinstance(row["lr"], float) and isinstance(row["img_size"], int) for row in rows
    )
    assert main(["recipes", "vit-l16/jft-14ep"]) == 0
    assert "87.12 %" in capsys.readouterr().out
    assert main(["recipes", "vit-l16/jft-15ep"]) == 2


def test_the_rate_scales_with_the_batch_only_when_asked():
    assert learning_rate(digits(lr=1.0, warmup_steps=0, batch_size=64), 0, 9) == 1.0
    assert learning_rate(digits(lr=1.0, warmup_steps=0, batch_size=64, scale_lr=256), 0, 9) == 0.25


def test_layer_decay_is_what_timm_does_to_its_own_vit():
    ours = ViT.from_preset("Nano/8", img_size=32, num_classes=10, reg_tokens=2)
    theirs = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=2, num_classes=10, reg_tokens=2
    )
    found = make_optimizer(digits(layer_decay=0.5, weight_decay=0.1), ours).param_groups
    wanted = param_groups_layer_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay(), layer_decay=0.5)
    rules = []
    for model, groups in ((ours, found), (theirs, wanted)):
        names = {id(p): name for name, p in model.named_parameters()}
        rules.append({names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]})
    assert (
        rules[0] == rules[1]
        and rules[0]["head.weight"] == (1.0, 0.1)
        and len({scale for scale, _ in rules[0].values()}) == len(ours.blocks) + 2
    )


def test_erasing_changes_one_rectangle_of_its_share():
    torch.manual_seed(1)
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    changed = 0
    for _ in range(400):
        out = Erase(0.25)(image)
        assert out.dtype == torch.uint8 and not image.any()
        if out.any():
            changed += 1
            rows, columns = out.any(0).any(1).nonzero(), out.any(0).any(0).nonzero()
            area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1) / 1600
            assert 0.01 < area < 0.36 and (out.any(0).sum() / 1600 - area).abs() < 0.02
    assert 70 <= changed <= 130  # 400 x 0.25, four standard deviations


def test_parts_of_a_data_set():
    whole = open_data(digits(), (32, 32), (8, 8), CPU)
    few = open_data(digits(shots=5), (32, 32), (8, 8), CPU)
    assert np.bincount(labels_of(few.train)).tolist() == [5] * 10 and len(few.val) == len(whole.val)
    assert few.train.indices == open_data(digits(shots=5), (32, 32), (8, 8), CPU).train.indices
    assert few.train.indices != open_data(digits(shots=5, seed=1), (32, 32), (8, 8), CPU).train.indices
    held = open_data(digits(hold_out=0.2), (32, 32), (8, 8), CPU)
    assert not set(held.train.indices) & set(held.val.indices) and len(held.train) + len(held.val) == len(whole.train)
    assert min(np.bincount(labels_of(held.val))) >= 27  # a fifth of each class
    assert len(open_data(digits(train_images=700), (32, 32), (8, 8), CPU).train) == 700


def test_masked_pretraining_then_few_labels(tmp_path):
    summary = train(
        digits(tmp_path / "masked", objective="masked", steps=12, hidden_head=False, train_images=700, eval_every=6)
    )
    rows = [r for r in csv.DictReader(open(tmp_path / "masked" / "metrics.csv"))]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) and summary["top5"] is None and summary["val_images"] == 360
    weights = tmp_path / "masked" / "checkpoints" / "last"
    assert not any("mask_token" in key or "predict" in key for key in load_file(weights / "model.safetensors"))
    assert any("mask_token" in key for key in load_file(weights / "state" / "state.safetensors"))
    again = Trainer(
        digits(tmp_path / "masked", objective="masked", steps=14, hidden_head=False, train_images=700, eval_every=6)
    )
    assert again.step == 12 and again.fit()["steps"] == 14
    fine = resolve(
        "finetune",
        dict(data="digits", weights=str(weights), output=str(tmp_path / "fine"), device="cpu", steps=2, shots=5),
    )
    assert train(fine)["train_images"] == 50


def test_a_resnet_trains_in_the_same_loop_and_resumes(tmp_path, monkeypatch):
    config = digits(
        tmp_path / "run", model="timm:test_resnet", steps=4, save_every=2, ema_decay=0.5, eval_every=4, lr=1e-3
    )
    trainer = Trainer(config)
    cut_at(monkeypatch, 3)
    with pytest.raises(KeyError):
        trainer.fit()
    monkeypatch.undo()
    assert train(config)["steps"] == 4
    whole = digits(
        tmp_path / "whole", model="timm:test_resnet", steps=4, save_every=2, ema_decay=0.5, eval_every=4, lr=1e-3
    )
    train(whole)
    a, b = (load_file(tmp_path / run / "checkpoints" / "last" / "model.safetensors") for run in ("run", "whole"))
    assert all(torch.equal(a[k], b[k]) for k in b)
    saved = json.loads((tmp_path / "run" / "checkpoints" / "last" / "config.json").read_text())
    timm.create_model(saved["architecture"], num_classes=saved["num_classes"]).load_state_dict(b)


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


def test_a_sweep_chooses_on_held_out_images_then_trains_on_all(tmp_path, monkeypatch):
    train(digits(tmp_path / "pre", steps=3))
    config = resolve(
        "finetune",
        dict(
            data="digits",
            weights=str(tmp_path / "pre/checkpoints/last"),
            output=str(tmp_path / "fine"),
            device="cpu",
            steps=2,
            sweep_lr="0.001,0.01,0.1",
        ),
    )
    seen = []
    fake = {0.001: 0.5, 0.01: 0.9, 0.1: 0.9}

    def run(config, resume):
        seen.append((config.lr, config.hold_out, Path(config.output).name))
        summary = train(config, resume)
        return {**summary, "accuracy": fake[config.lr]} if config.hold_out else summary

    monkeypatch.setattr(experiments, "train", run)
    summary = sweep(config)
    assert seen == [
        (0.001, 0.1, "lr-0.001"),
        (0.01, 0.1, "lr-0.01"),
        (0.1, 0.1, "lr-0.1"),
        (0.01, 0.0, "fine"),
    ]  # of equals the smaller
    assert summary["train_images"] == 1437
    told = json.loads((tmp_path / "fine" / "sweep.json").read_text())
    assert told["lr"] == 0.01 and [row["held_out_accuracy"] for row in told["tried"]] == [0.5, 0.9, 0.9]
    assert json.loads((tmp_path / "fine" / "sweep" / "lr-0.01" / "summary.json").read_text())["train_images"] < 1300
    with pytest.raises(InputError, match="--resume takes auto or never"):
        sweep(config, "runs/other")


def test_scaling_counts_compute_as_the_paper_does(tmp_path):
    config = resolve("pretrain", dict(recipe="vit-l16/jft-14ep"))
    exaflops = training_flops(config, 1000) * 14 * 303e6 / 1e18
    assert exaflops == pytest.approx(1567, rel=0.03)  # Table 6
    rows = scaling(digits(tmp_path, eval_batch_size=360), ["Nano/8", "timm:test_vit"], [0.05])
    assert [row["model"] for row in rows] == ["Nano/8", "timm:test_vit"] and rows[0]["exaflops"] > 0
    assert (tmp_path / "scaling.png").stat().st_size > 5000 and len(
        list(csv.DictReader(open(tmp_path / "scaling.csv")))
    ) == 2
