"""The parts of the loop: schedules, parameter groups, objectives, the stream of samples, settings."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import assert_close

from vitfast import InputError, ViT
from vitfast.data.loader import open_data
from vitfast.data.samples import Samples, StreamSampler
from vitfast.train.losses import sigmoid_loss, softmax_loss
from vitfast.train.optim import learning_rate, make_optimizer
from vitfast.train.recipes import RECIPES, Config, resolve

CPU = torch.device("cpu")


def digits(**fields) -> Config:
    return resolve("pretrain", dict(recipe="digits", data="digits", output="unused", **fields))


def test_learning_rate_follows_the_paper():
    config = digits(lr=1.0, warmup_steps=10, lr_decay="cosine")
    rates = [learning_rate(config, step, 110) for step in range(110)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.5) and rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))
    linear = digits(lr=1.0, warmup_steps=10, lr_decay="linear", lr_end=1e-5)
    assert learning_rate(linear, 60, 110) == pytest.approx(1e-5 + (1 - 1e-5) * 0.5) and learning_rate(
        linear, 110, 110
    ) == pytest.approx(1e-5)
    assert learning_rate(digits(lr=0.3, warmup_steps=0, lr_decay="constant"), 99, 100) == 0.3


def test_cosine_without_warm_up_equals_torchs_scheduler():
    config = digits(lr=0.7, warmup_steps=0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25)
    for step in range(25):
        assert learning_rate(config, step, 25) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_only_kernels_decay_and_frozen_parameters_are_left_out():
    model = ViT.from_preset(
        "Nano/8", img_size=32, num_classes=10, reg_tokens=2, init_values=0.1, representation_size=64
    )
    model.patch_embed.proj.weight.requires_grad_(False)
    optimizer = make_optimizer(digits(weight_decay=0.3), model)
    names = {id(p): n for n, p in model.named_parameters()}
    decayed, rest = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3 and optimizer.param_groups[1]["weight_decay"] == 0
    assert decayed == {
        n for n in names.values() if n.endswith("weight") and "norm" not in n and n != "patch_embed.proj.weight"
    }
    assert {
        "cls_token",
        "reg_token",
        "pos_embed",
        "blocks.0.ls1.gamma",
        "head.bias",
    } <= rest and "patch_embed.proj.weight" not in decayed | rest


def test_objectives_are_their_formulas():
    logits, labels = torch.randn(6, 5, dtype=torch.float64).float(), torch.randint(0, 5, (6,))
    smooth = torch.full((6, 5), 0.1 / 5).scatter_(1, labels[:, None], 0.9 + 0.1 / 5)
    log_p = logits - torch.logsumexp(logits, 1, keepdim=True)
    assert_close(softmax_loss(logits, labels, 0.1), -(smooth * log_p).sum(1).mean(), atol=1e-6)
    assert_close(softmax_loss(logits, smooth), -(smooth * log_p).sum(1).mean(), atol=1e-6)
    p = 1 / (1 + torch.exp(-logits))
    hard = F.one_hot(labels, 5).float()
    assert_close(sigmoid_loss(logits, labels), -(hard * p.log() + (1 - hard) * (1 - p).log()).sum(1).mean(), atol=1e-5)


def test_stream_covers_each_epoch_once_and_starts_anywhere():
    whole = list(StreamSampler(10, 4, seed=3, start=0, stop=10))
    assert all(len(batch) == 4 for batch in whole)
    flat = [key for batch in whole for key in batch]
    for epoch in range(4):
        indices = [i for e, i in flat if e == epoch]
        assert sorted(indices) == list(range(10))
    assert [i for e, i in flat if e == 0] != [i for e, i in flat if e == 1]
    assert list(StreamSampler(10, 4, seed=3, start=7, stop=10)) == whole[7:]
    assert list(StreamSampler(10, 4, seed=4, start=0, stop=10)) != whole
    assert len(next(iter(StreamSampler(3, 8, 0, 0, 1)))) == 8  # a batch may be larger than the data


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    config = digits()
    data = open_data(config, (32, 32), (8, 8), CPU)
    samples = Samples(data.train, data.train_transform, 5)
    torch.manual_seed(0)
    first = samples[1, 7][0]
    torch.manual_seed(9)
    np.random.seed(9)
    assert np.array_equal(samples[1, 7][0], first) and not np.array_equal(samples[2, 7][0], first)
    assert first.dtype == np.uint8 and first.shape == (3, 32, 32)
    alone = list(data.train_batches(3, 5))
    import dataclasses

    with_workers = list(dataclasses.replace(data, workers=2).train_batches(3, 5))
    for (a, la, _), (b, lb, _) in zip(alone, with_workers):
        assert torch.equal(a, b) and torch.equal(la, lb)


def test_digits_split_is_fixed_and_disjoint():
    from sklearn.datasets import load_digits

    data = open_data(digits(seed=4), (32, 32), (8, 8), CPU)
    train, test = set(data.train.indices), set(data.val.indices)
    assert not train & test and len(train | test) == 1797 and len(test) == 360
    assert np.array_equal(
        data.val.pixels[5], (load_digits().images[data.val.indices[5]] * (255 / 16)).round().astype(np.uint8)
    )
    assert set(open_data(digits(seed=5), (32, 32), (8, 8), CPU).val.indices) == test
    images, labels = next(iter(data.eval_batches()))
    assert images.dtype == torch.uint8 and len(labels) == 256 and set(labels.tolist()) == set(range(10))


def test_settings_layer_over_each_other():
    config = resolve(
        "pretrain",
        dict(recipe="digits", data="digits", lr=0.1, seed=3),
        dict(lr=0.2),
        {"betas": "0.8,0.99", "clip_norm": "none", "compile": "no"},
    )
    assert (config.lr, config.seed, config.betas, config.clip_norm, config.compile) == (
        0.2,
        3,
        (0.8, 0.99),
        None,
        False,
    )
    assert config.model == "Nano/8" and config.task == "pretrain"
    assert resolve("pretrain", dict(recipe="digits", steps=5)).epochs is None
    assert resolve("pretrain", dict(recipe="finetune/cifar10", epochs=2)).steps is None
    assert (
        resolve("finetune", dict(data="digits")).name == "finetune/digits"
        and resolve("pretrain", dict(data="x")).name == "vit-b16/imagenet"
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(recipe="digit"), "unknown recipe 'digit'; did you mean digits"),
        (dict(recipe="digits", learning_rate="1"), "unknown setting 'learning_rate'"),
        (dict(recipe="digits", lr="fast"), "lr must be float, got 'fast'"),
        (dict(recipe="digits", batch_size="2.5"), "batch_size must be int, got '2.5'"),
        (dict(recipe="digits", betas="0.9"), "betas must be numbers"),
        (dict(recipe="digits", compile="perhaps"), "compile must be bool"),
        (dict(recipe="digits", lr=-1), "lr must be positive"),
        (dict(recipe="digits", steps=0), "steps must be positive"),
        (dict(recipe="digits", optimizer="lion"), "optimizer must be one of adamw, sgd"),
        (dict(recipe="digits", dropout=1.5), r"dropout must lie in \[0, 1\)"),
        (
            dict(recipe="digits", objective="masked", mixup=0.5),
            "masked patch prediction takes its targets from the images",
        ),
        (dict(recipe="digits", epochs="none"), "the run has no length"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(fields, message):
    with pytest.raises(InputError, match=message):
        resolve("pretrain", fields)


def test_recipes_are_frozen_and_complete():
    for name, recipe in RECIPES.items():
        assert recipe.name == name and (recipe.epochs or recipe.steps)
        with pytest.raises(AttributeError):
            recipe.lr = 1.0
