"""Optimisers with the paper's decay (kernels only); learning rates as functions of the step alone."""

import math

import torch
from timm.optim import Lamb, param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.distributed.tensor import DTensor

from ..run.config import Config


def learning_rate(config: Config, step: int, total: int) -> float:
    """The rate of optimiser step `step` (from 0) of `total`.

    It warms up linearly, then decays to lr_end by a cosine or a line, or stays.
    """
    top = config.lr * (config.batch_size / config.scale_lr if config.scale_lr else 1)
    warmup = max(config.warmup_steps, round(config.warmup_ratio * total))
    if step < warmup:
        return top * (step + 1) / warmup
    if config.lr_decay == "constant":
        return top
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_decay == "cosine" else 1 - progress
    return config.lr_end + (top - config.lr_end) * remaining


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a run: torch's AdamW or SGD, fused, or timm's LAMB.

    Weight decay acts on kernels; not on biases, norms, tokens and positions. Frozen parameters are left out. With
    `layer_decay` a layer has that share of the next layer's rate (`lr_scale` of the groups), by timm's rules.
    """
    spared = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    options = dict(weight_decay=config.weight_decay, no_weight_decay_list=spared)
    if config.layer_decay:
        groups = param_groups_layer_decay(model, **options, layer_decay=config.layer_decay)
    else:  # kernels first
        groups = param_groups_weight_decay(model, **options)[::-1]
    if config.optimizer == "sgd":
        fused = not isinstance(next(model.parameters()), DTensor)  # PyTorch cannot shard the fused step of SGD
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    if config.optimizer == "lamb":
        return Lamb(groups, lr=config.lr, betas=config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
