"""Accuracy on a validation set."""

import contextlib

import torch
from torch import nn

from ..errors import InputError
from ..model import ViT
from .build import autocast_dtype, choose_device
from .data import Data, open_data
from .recipes import Config


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, device: torch.device, dtype: torch.dtype | None) -> dict:
    """Mean cross-entropy, top-1 and top-5 accuracy over the validation set, one pass."""
    was_training = model.training
    model.eval()
    sums, count = torch.zeros(3, device=device, dtype=torch.float64), 0
    for images, labels in data.eval_batches():
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext():
            logits = model(images).float()
        top = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]
        sums += torch.stack([nn.functional.cross_entropy(logits, labels, reduction="sum"), top[:, 0].sum(), top.sum()])
        count += len(labels)
    model.train(was_training)
    if not count:
        raise InputError(f"the validation set of {data.config.data!r} is empty")
    loss, top1, top5 = (sums / count).tolist()
    return dict(loss=loss, accuracy=top1, top5=top5, images=count)


def evaluate_weights(config: Config, img_size: int | None = None) -> dict:
    """Accuracy of `config.weights` on the validation split of `config.data`. Raises InputError where the two do not fit."""
    device = choose_device(config.device)
    overrides = {} if img_size is None else dict(img_size=img_size)
    model = ViT.from_pretrained(config.weights, **overrides).to(device).eval()
    data = open_data(config, model.patch_embed.img_size, model.patch_embed.patch_size, device)
    if model.num_classes != len(data.classes):
        raise InputError(f"{config.weights} has {model.num_classes} classes and {config.data} has {len(data.classes)}; fine-tune it on this data first")
    return evaluate(model, data, device, autocast_dtype(config, device))
