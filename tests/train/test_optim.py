"""Schedules, parameter groups and objectives."""

import math

import pytest
import torch
import torch.nn.functional as F
from checks import assert_close
from runs import digits
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay

from vitfast import ViT
from vitfast.train.losses import sigmoid_loss, softmax_loss
from vitfast.train.optim import learning_rate, make_optimizer


def test_learning_rate_follows_the_paper():
    config = digits(lr=1.0, warmup_steps=10, lr_decay="cosine")
    rates = [learning_rate(config, step, 110) for step in range(110)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.5) and rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))
    linear = digits(lr=1.0, warmup_steps=10, lr_decay="linear", lr_end=1e-5)
    ends = [learning_rate(linear, step, 110) for step in (60, 110)]
    assert ends == pytest.approx([1e-5 + (1 - 1e-5) * 0.5, 1e-5])
    assert learning_rate(digits(lr=0.3, warmup_steps=0, lr_decay="constant"), 99, 100) == 0.3


def test_only_kernels_decay_and_frozen_parameters_are_left_out():
    options = dict(reg_tokens=2, init_values=0.1, representation_size=64)
    model = ViT.from_preset("Nano/8", img_size=32, num_classes=10, **options)
    model.patch_embed.proj.weight.requires_grad_(False)
    optimizer = make_optimizer(digits(weight_decay=0.3), model)
    names = {id(p): n for n, p in model.named_parameters()}
    decayed, rest = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3 and optimizer.param_groups[1]["weight_decay"] == 0
    frozen = "patch_embed.proj.weight"
    assert decayed == {n for n in names.values() if n.endswith("weight") and "norm" not in n and n != frozen}
    assert {"cls_token", "reg_token", "pos_embed", "blocks.0.ls1.gamma", "head.bias"} <= rest and frozen not in rest


def test_objectives_are_their_formulas():
    logits, labels = torch.randn(6, 5, dtype=torch.float64).float(), torch.randint(0, 5, (6,))
    smooth = torch.full((6, 5), 0.1 / 5).scatter_(1, labels[:, None], 0.9 + 0.1 / 5)
    log_p = logits - torch.logsumexp(logits, 1, keepdim=True)
    assert_close(softmax_loss(logits, labels, 0.1), -(smooth * log_p).sum(1).mean(), atol=1e-6)
    assert_close(softmax_loss(logits, smooth), -(smooth * log_p).sum(1).mean(), atol=1e-6)
    p = 1 / (1 + torch.exp(-logits))
    hard = F.one_hot(labels, 5).float()
    assert_close(sigmoid_loss(logits, labels), -(hard * p.log() + (1 - hard) * (1 - p).log()).sum(1).mean(), atol=1e-5)


def test_the_rate_scales_with_the_batch_only_when_asked():
    assert learning_rate(digits(lr=1.0, warmup_steps=0, batch_size=64), 0, 9) == 1.0
    assert learning_rate(digits(lr=1.0, warmup_steps=0, batch_size=64, scale_lr=256), 0, 9) == 0.25


def test_layer_decay_is_what_timm_does_to_its_own_vit():
    ours = ViT.from_preset("Nano/8", img_size=32, num_classes=10, reg_tokens=2)
    shape = dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=2)
    theirs = VisionTransformer(**shape, num_classes=10, reg_tokens=2)
    found = make_optimizer(digits(layer_decay=0.5, weight_decay=0.1), ours).param_groups
    wanted = param_groups_layer_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay(), layer_decay=0.5)
    rules = []
    for model, groups in ((ours, found), (theirs, wanted)):
        names = {id(p): name for name, p in model.named_parameters()}
        rules.append({names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]})
    assert rules[0] == rules[1] and rules[0]["head.weight"] == (1.0, 0.1)
    assert len({scale for scale, _ in rules[0].values()}) == len(ours.blocks) + 2
