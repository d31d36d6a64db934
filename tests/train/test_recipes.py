"""Recipes against the paper's tables, and the settings that make them."""

import re
from pathlib import Path

import pytest
import shards
import torch
from commands import CLASSES, make_folder, picture, run_cli, works

from vitfast import InputError, ViT
from vitfast.cli import main
from vitfast.data.datasets import open_sources
from vitfast.train import recipes
from vitfast.train.recipes import RECIPES, resolve
from vitfast.train.setup import new_model, set_up

# Tables 3 and 6 of arXiv 2010.11929, typed in from the paper. On JFT-300M: epochs, base rate; accuracy after
# fine-tuning on ImageNet and on CIFAR-100, exaFLOPs. The two ResNets of 14 epochs are Table 6's, at the rate of
# Table 3's R152x{1,2}.
ON_JFT = """
vit-b32 | 7 | 8e-4 | 80.73 | 90.49 | 55
vit-b16 | 7 | 8e-4 | 84.15 | 91.87 | 224
vit-l32 | 7 | 6e-4 | 84.37 | 92.52 | 196
vit-l16 | 7 | 4e-4 | 86.30 | 93.46 | 783
vit-l16 | 14 | 4e-4 | 87.12 | 94.04 | 1567
vit-h14 | 14 | 3e-4 | 88.08 | 94.71 | 4262
bit-r50x1 | 7 | 1e-3 | 77.54 | 86.07 | 50
bit-r50x2 | 7 | 1e-3 | 82.12 | 89.20 | 199
bit-r101x1 | 7 | 8e-4 | 80.67 | 89.17 | 96
bit-r152x1 | 7 | 6e-4 | 81.88 | 90.22 | 141
bit-r152x2 | 7 | 6e-4 | 84.97 | 92.05 | 563
bit-r152x2 | 14 | 6e-4 | 85.56 | 91.92 | 1126
bit-r200x3 | 14 | 6e-4 | 87.22 | 93.53 | 3306
vit-r50-b32 | 7 | 8e-4 | 84.90 | 92.24 | 106
vit-r50-b16 | 7 | 8e-4 | 85.58 | 92.63 | 274
vit-r50-l32 | 7 | 2e-4 | 85.68 | 92.93 | 246
vit-r50-l16 | 7 | 4e-4 | 86.60 | 93.64 | 859
vit-r50-l16 | 14 | 4e-4 | 87.12 | 93.89 | 1668
"""
# Models, data set, epochs, base rate, decay, weight decay, dropout, norm of clipped gradients.
ON_IMAGENET = """
vit-b16 vit-b32 vit-l16 vit-l32 | imagenet21k | 90 | 1e-3 | linear | 0.03 | 0.1 | None
vit-l16 vit-l32 | imagenet21k-30ep | 30 | 1e-3 | linear | 0.03 | 0.1 | None
vit-b16 vit-b32 vit-l16 vit-l32 | imagenet | 300 | 3e-3 | cosine | 0.3 | 0.1 | 1.0
"""
TABLE_4 = """
imagenet | 20000 | 0.003 0.01 0.03 0.06
cifar100 | 10000 | 0.001 0.003 0.01 0.03
cifar10 | 10000 | 0.001 0.003 0.01 0.03
pets | 500 | 0.001 0.003 0.01 0.03
flowers | 500 | 0.001 0.003 0.01 0.03
vtab | 2500 | 0.01
"""


def rows_of(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.split("|")] for line in table.strip().splitlines()]


def assert_is(name: str, **wanted) -> None:
    """The recipe has these fields."""
    assert {field: getattr(RECIPES[name], field) for field in wanted} == wanted, name


def test_masked_pre_training_is_b_1_2_with_the_weight_decay_of_4_1():
    paper = dict(model="B/16", objective="masked", mask_target="mean", mask_share=0.5, steps=1_000_000, epochs=None)
    paper |= dict(batch_size=4096, lr=2e-4, lr_decay="cosine", lr_end=0.0, warmup_steps=10_000, img_size=224)
    paper |= dict(optimizer="adamw", betas=(0.9, 0.999), weight_decay=0.1, dropout=0.0, clip_norm=None)
    assert_is("masked-b16/jft", **paper, hidden_head=False)
    assert "names no weight decay" in RECIPES["masked-b16/jft"].about


def test_recipes_of_released_flax_code_take_its_gelu():
    """flax's nn.gelu is the tanh approximation; PyTorch's is exact; a ResNet has none."""
    tanh = {name for name, recipe in RECIPES.items() if recipe.act_layer == "gelu_tanh"}
    assert tanh == {name for name in RECIPES if name.startswith(("vit-", "masked-", "plain-"))}
    for name, activation in (("vit-b32/jft-7ep", "gelu_tanh"), ("deit3-b16/imagenet", "gelu")):
        with torch.device("meta"):
            model = new_model(resolve("pretrain", dict(recipe=name)), 10)
        assert model.config["act_layer"] == activation


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_fine_tuning_takes_the_activation_of_the_weights(tmp_path, activation):
    sizes = dict(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    ViT(**sizes, num_classes=10, act_layer=activation).save_pretrained(tmp_path)
    for recipe in ("finetune/cifar10", "vit-b32/jft-7ep", "deit3-b16/imagenet"):
        fields = dict(recipe=recipe, weights=str(tmp_path), data="digits", img_size=16, device="cpu")
        model, _ = set_up(resolve("pretrain", fields), torch.device("cpu"))
        assert model.config["act_layer"] == activation


def test_a_resnets_head_starts_at_its_recipes_bias():
    with torch.device("meta"):
        sketch = new_model(resolve("pretrain", dict(recipe="bit-r50x1/jft-7ep")), 10)
    assert type(sketch).__name__ == "ResNetV2"
    fields = dict(recipe="bit-r50x1/jft-7ep", model="timm:test_resnet", img_size=32)
    assert new_model(resolve("pretrain", fields), 10).get_classifier().bias.tolist() == [-10.0] * 10


def test_every_row_of_the_papers_tables_is_a_recipe_that_tells_it():
    seen = set()
    common = dict(batch_size=4096, img_size=224, betas=(0.9, 0.999), warmup_steps=10_000, optimizer="adamw", steps=None)
    same = ["linear", "0.1", "0", "None"]
    on_jft = [[model, f"jft-{epochs}ep", epochs, lr, *same, *told] for model, epochs, lr, *told in rows_of(ON_JFT)]
    for models, data, epochs, lr, decay, weight_decay, dropout, clip_norm, *told in on_jft + rows_of(ON_IMAGENET):
        row = dict(epochs=int(epochs), lr=float(lr), lr_decay=decay, weight_decay=float(weight_decay))
        row |= dict(dropout=float(dropout), clip_norm=None if clip_norm == "None" else float(clip_norm))
        for name in (f"{model}/{data}" for model in models.split()):
            seen.add(name)
            assert_is(name, **common, **row)
            about = RECIPES[name].about
            assert about.startswith(f"vitfast pretrain --recipe {name} ")
            for imagenet, cifar100, exaflops in [told] if told else []:
                said = f"{float(imagenet)} % on ImageNet, {float(cifar100)} % on CIFAR-100; {exaflops} exaFLOPs"
                assert said in about, name
    assert seen == {name for name in RECIPES if name.startswith(("vit-", "bit-"))}
    assert "Table 3 has no such row" in RECIPES["bit-r200x3/jft-14ep"].about
    common = dict(optimizer="sgd", momentum=0.9, lr_decay="cosine", batch_size=512, weight_decay=0, clip_norm=1.0)
    for data, steps, rates in rows_of(TABLE_4):
        rates = tuple(map(float, rates.split()))
        assert_is(f"finetune/{data}", **common, img_size=384, steps=int(steps), sweep_lr=rates)
        assert RECIPES[f"finetune/{data}"].lr in rates
    for data, share in dict(pets=0.1, flowers=0.1, cifar10=0.02, cifar100=0.02, imagenet=0.01).items():
        assert_is(f"finetune/{data}", sweep_hold_out=share)
    for size in (512, 518):
        assert_is(f"finetune/imagenet-{size}", ema_decay=0.9999, ema_warmup=False, img_size=size)


def test_every_recipe_resolves_and_the_command_line_lists_it(capsys):
    for name in RECIPES:
        assert resolve("pretrain", dict(recipe=name)).name == name == RECIPES[name].name
    assert main(["recipes", "vit-l16/jft-14ep"]) == 0
    assert "87.12 %" in capsys.readouterr().out
    assert main(["recipes", "vit-l16/jft-15ep"]) == 2


def test_settings_layer_over_each_other():
    text = dict(betas="0.8,0.99", clip_norm="none", compile="no")
    config = resolve("pretrain", dict(recipe="digits", data="digits", lr=0.1, seed=3), dict(lr=0.2), text)
    assert (config.lr, config.seed, config.betas, config.model) == (0.2, 3, (0.8, 0.99), "Nano/8")
    assert config.clip_norm is None and config.compile is False and config.task == "pretrain"
    assert resolve("pretrain", dict(recipe="digits", steps=5)).epochs is None
    assert resolve("pretrain", dict(recipe="digits", steps="none")).epochs == 44
    last = resolve("pretrain", dict(recipe="digits", steps=7, epochs=None), dict(epochs=2))
    assert (last.steps, last.epochs) == (None, 2.0)
    assert resolve("pretrain", dict(recipe="finetune/cifar10", epochs=2)).steps is None
    assert resolve("finetune", dict(data="digits")).name == "finetune/digits"
    assert resolve("pretrain", dict(data="x")).name == "vit-b16/imagenet"
    assert resolve("finetune", dict(data="photos")).name == "finetune/small"
    assert resolve("finetune", dict(data="torch/cifar10")).name == "finetune/small"
    assert resolve("finetune", dict(data="torch/imagenet")).name == "finetune/imagenet"
    assert resolve("finetune", dict(data="torch/imagenet", train_images="1000")).name == "finetune/small"
    assert resolve("finetune", dict(data="torch/imagenet"), dict(shots=10)).name == "finetune/small"
    assert resolve("finetune", dict(data="torch/imagenet", recipe="finetune/pets")).name == "finetune/pets"


def sources(root: Path) -> dict[str, str]:
    """SPECs of 12 training images each."""
    datasets = pytest.importorskip("datasets")
    make_folder(root / "split", count=4)
    make_folder(root / "whole", splits=("",), count=4)
    (root / "listed" / "train").mkdir(parents=True)
    lines = [f"../../split/train/{name}/{i}.png,{name}" for name in CLASSES for i in range(4)]
    (root / "listed" / "train" / "labels.csv").write_text("\n".join(["path,label", *lines]))
    shards.shards(root / "wds", shards.files(12))
    columns = dict(image=[picture(i) for i in range(12)], label=[i % 3 for i in range(12)])
    (root / "parquet").mkdir()
    for split in ("train", "validation"):
        found = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
        found.to_parquet(root / "parquet" / f"{split}-0.parquet")
    named = {"wds": f"wds/{root}/wds", "hfds": f"hfds/{root}/parquet"}
    return {name: str(root / name) for name in ("split", "whole", "listed")} | named


@pytest.mark.slow
def test_a_fine_tuning_takes_its_recipe_by_the_number_of_images_of_any_source(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "vitfast")
    small, large = RECIPES["finetune/small"], RECIPES["finetune/imagenet"]
    assert small.epochs * recipes.FEW == large.steps * large.batch_size  # as many images are seen
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, spec in sources(tmp_path).items():
        for few, told, wanted in ((12, "12 images", small), (11, "(more than 11|12) images", large)):
            monkeypatch.setattr(recipes, "FEW", few)
            caplog.clear()
            assert resolve("finetune", dict(data=spec)).name == wanted.name, (name, few)
            said = [each.getMessage() for each in caplog.records if each.name == "vitfast"]
            assert len(said) == 1 and re.match(f"recipe {wanted.name}: {told} .finetune/small up to {few},", said[0])
        assert resolve("finetune", dict(data=spec, train_images=11)).name == small.name
        assert len(open_sources(spec, "", (8, 8), (1, 1), resolve("finetune", dict(data=spec)))[0]) == 12


@pytest.mark.slow
def test_a_run_keeps_the_recipe_with_which_it_began(tmp_path, monkeypatch, capsys):
    data = make_folder(tmp_path / "data", count=2)
    ViT.from_preset("Nano/8", img_size=16, num_classes=3).save_pretrained(tmp_path / "w")
    flags = ["--weights", tmp_path / "w", "--data", data, "--img-size", 16, "--steps", 2, "--batch-size", 6]
    for name, more in dict(one=(), many=("--runs", 2), rates=("--sweep",)).items():
        command = ["finetune", *flags, "--output", tmp_path / name, *more, "--set", "workers=0", "sweep_hold_out=0.5"]
        monkeypatch.setattr(recipes, "FEW", 5)  # of 6
        works(capsys, *command)
        monkeypatch.undo()
        assert "name: finetune/imagenet" in run_cli(capsys, *command, "--print-config")[1]
        assert run_cli(capsys, *command)[0] == 0
        assert "name: finetune/pets" in run_cli(capsys, *command, "--recipe", "finetune/pets", "--print-config")[1]
        other = make_folder(tmp_path / f"of_{name}", count=2)
        assert "name: finetune/small" in run_cli(capsys, *command, "--data", other, "--print-config")[1]


OUTSIDE = dict(lr=-1, seed=-1, random_erasing=-0.1, ema_decay=2, weight_decay=-1, workers=-1, steps=0, log_every=0)
OUTSIDE |= dict(eval_batch_size=0, epochs="inf", batch_size="2.5")


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(recipe="digit"), "unknown recipe 'digit'; did you mean digits"),
        (dict(lr="fast"), "lr must be a finite number, got 'fast'"),
        (dict(betas="0.9"), "betas must be numbers"),
        (dict(compile="perhaps"), "compile must be true or false"),
        (dict(betas="2,3"), "betas must lie in"),
        (dict(auto_augment="rand-x9"), "auto_augment must be a policy of timm"),
        (dict(crop_scale="1,0.1"), "crop_scale must be two numbers, the smaller first"),
        (dict(batch_size=10**10), "batch_size must be positive, and at most 1,000,000,000"),
        (dict(model=["B/16"]), "model must be text"),
        (dict(data="a\0b"), "data must be text"),
        ({"recipe": "digits", 5: 1}, "unknown setting '5'"),
        (dict(recipe=["digits"]), "unknown recipe"),
        (dict(optimizer="lion"), "optimizer must be one of adamw, sgd"),
        (dict(dropout=1.5), r"dropout must lie in \[0, 1\)"),
        *((dict([each]), f"{each[0]} must ") for each in OUTSIDE.items()),
        (dict(objective="masked", mixup=0.5), "masked patch prediction takes its targets from the im"),
        (dict(epochs="none"), "the run has no length"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(fields, message):
    """A kind of error each; tests/cli/test_errors.py draws values for every field."""
    with pytest.raises(InputError, match=message):
        resolve("pretrain", dict(recipe="digits") | fields)
