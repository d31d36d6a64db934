"""Accuracy on a validation set."""

from collections.abc import Callable
from pathlib import Path

import torch
from timm.data import RealLabelsImagenet
from torch import Tensor, nn

from ..config import Config
from ..data.loader import Data, open_data
from ..data.samples import PADDING
from ..device import autocast, autocast_dtype, choose_device
from ..errors import InputError
from ..model import ViT


@torch.no_grad()
def validation_means(
    model: nn.Module, data: Data, device: torch.device, names: list[str], score: Callable[[Tensor, Tensor], Tensor]
) -> dict:
    """The named means over the validation set, shared by the ranks, and its number of `images`.

    score: of (images, labels) of a batch the sums, in the order of the names, and the number of images. The model is
    in eval mode meanwhile. Raises InputError where the set is empty.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(len(names) + 1, device=device, dtype=torch.float64)
    for images, labels in data.eval_batches():
        sums += score(images, labels)
    model.train(was_training)
    *totals, count = data.ranks.sum(sums).tolist()
    if not count:
        raise InputError(f"the validation set of {data.config.data!r} is empty")
    return {name: total / count for name, total in zip(names, totals)} | dict(images=int(count))


def evaluate(
    model: nn.Module,
    data: Data,
    device: torch.device,
    dtype: torch.dtype | None,
    on_logits: Callable[[Tensor], None] | None = None,
) -> dict:
    """Mean cross-entropy, top-1 and top-5 accuracy over the validation set, shared by the ranks.

    on_logits: called with the logits of each batch, in the order of the set.
    """

    def score(images: Tensor, labels: Tensor) -> Tensor:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with autocast(device, dtype):
            logits = model(images).float()
        if on_logits:
            on_logits(logits)
        top = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=PADDING)
        return torch.stack([loss, top[:, 0].sum(), top.sum(), (labels != PADDING).sum()])

    return validation_means(model, data, device, ["loss", "accuracy", "top5"], score)


def real_labels(data: Data, path: str = "") -> RealLabelsImagenet:
    """timm's count of right answers by ImageNet's reassessed labels.

    "Are we done with ImageNet?" (Beyer et al., 2020). path: their real.json, one list of classes for each of
    ILSVRC2012_val_00000001.JPEG and on; "" is the copy that timm brings. Raises InputError where the file is none, or
    the validation images are not those.
    """
    names = [Path(data.val.name(i)).name for i in range(len(data.val))] if hasattr(data.val, "name") else []
    try:
        counter = RealLabelsImagenet(names, path or None, topk=(1,))
    except AssertionError:
        have = f"the {len(names)} of {data.config.data}"
        raise InputError(f"--real: {path or 'ImageNet'} has labels for another number of images than {have}") from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--real {path} cannot be read as ImageNet's reassessed labels: {error}") from None
    if not all(isinstance(labels, list) for labels in counter.real_labels.values()):
        raise InputError(f"--real {path} must hold one list of classes for each image")
    unknown = next((name for name in names if name not in counter.real_labels), None)
    if unknown:
        known = "ImageNet's names (ILSVRC2012_val_00000001.JPEG)"
        raise InputError(f"--real tells images by {known}, and {data.config.data} has {unknown}")
    return counter


def open_weights(config: Config, img_size: int | None = None) -> tuple[ViT, Data, torch.device, torch.dtype | None]:
    """(model, data, device, autocast's dtype) to evaluate `config.weights` on `config.data`."""
    device = choose_device(config.device)
    overrides = {} if img_size is None else dict(img_size=img_size)
    model = ViT.from_pretrained(config.weights, **overrides).to(device).eval()
    data = open_data(config, model.patch_embed.img_size, model.patch_embed.patch_size, device)
    return model, data, device, autocast_dtype(config.amp, device)


def evaluate_weights(config: Config, img_size: int | None = None, real: str | None = None) -> dict:
    """Accuracy of `config.weights` on the validation split of `config.data`.

    real: labels for `real_labels`; adds `real_accuracy` over the `real_images` that have any. Raises InputError where
    weights and data do not fit.
    """
    model, data, device, dtype = open_weights(config, img_size)
    if model.num_classes != len(data.classes):
        raise InputError(
            f"{config.weights} has {model.num_classes} classes and {config.data} has {len(data.classes)}; "
            "fine-tune it on this data first"
        )
    if real is None:
        return evaluate(model, data, device, dtype)
    counter = real_labels(data, real)
    result = evaluate(model, data, device, dtype, counter.add_result)
    right = counter.is_correct[1]
    return result | dict(real_accuracy=sum(right) / max(1, len(right)), real_images=len(right))
