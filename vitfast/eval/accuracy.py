"""Accuracy on a validation set."""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import PIL
import torch
from safetensors import SafetensorError, safe_open
from timm.data import RealLabelsImagenet
from torch import Tensor, nn

from ..data.classes import imagenet_numbers
from ..data.identity import fingerprint, replaced
from ..data.loader import Data, open_data
from ..data.resize import INSTALLED
from ..data.samples import PADDING, counts
from ..data.sources import Source, Subset
from ..errors import InputError
from ..model.baselines import load_any, sizes
from ..model.checkpoint.files import HUB, locate
from ..model.preprocessing import CROP
from ..model.vit import ViT
from ..ops.packed import PackedImages
from ..run.config import Config
from ..run.device import autocast, choose_device
from ..run.distributed import Ranks

logger = logging.getLogger("vitfast")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode; modules that were training are in training mode again at the end."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, on_logits: Callable[[Tensor, Tensor], None] | None = None) -> dict:
    """Mean cross-entropy, top-1 and top-5 accuracy over the validation set, shared by the ranks.

    If images have several classes, it is the sigmoid's cross-entropy, summed over the classes; top-1 accuracy, for
    which the first guess must be one of the classes; and `map`, the `mean_average_precision`. on_logits: called with
    the logits and labels of each batch, in the order of the set. The model is in eval mode meanwhile. Images that
    cannot be read are left out, with a warning. Raises InputError if no image can be read, or more than
    `max_unreadable` cannot.
    """
    names = ["loss", "accuracy"] if data.multi_label else ["loss", "accuracy", "top5"]
    sums, parts = torch.zeros(len(names) + 2, device=data.device, dtype=torch.float64), []

    def score(images: Tensor, labels: Tensor) -> Tensor:
        """The sums over a batch, in the order of `names`, and then the number of images."""
        labels = labels.to(data.device, non_blocking=True)
        logits = logits_of(model, images, data.device, data.dtype)
        read = counts(labels)
        if on_logits:
            on_logits(logits, labels)
        if data.multi_label:
            parts.append(torch.cat([logits, labels], 1))
            loss = nn.functional.binary_cross_entropy_with_logits(logits[read], labels[read], reduction="sum")
            return torch.stack([loss, (labels.gather(1, logits.argmax(1, keepdim=True)) == 1).sum(), read.sum()])
        top = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=PADDING)
        return torch.stack([loss, top[:, 0].sum(), top.sum(), read.sum()])

    with evaluating(model):
        for images, labels, unreadable in data.in_order(data.val):
            sums[:-1] += score(images, labels)
            sums[-1] += data.left_out(unreadable)
    *totals, count, left_out = data.ranks.sum(sums).tolist()
    data.check_left_out(int(left_out), int(count))
    means = {name: total / count for name, total in zip(names, totals)}
    means |= dict(images=int(count), unreadable_images=int(left_out))
    if not data.multi_label:
        return means
    logits, labels = of_all_ranks(torch.cat(parts), data.ranks).chunk(2, 1)
    read = counts(labels)
    return means | dict(map=mean_average_precision(logits[read], labels[read]))


def of_all_ranks(mine: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks, (n, K) of each, on the CPU and in the order in which the ranks take turns."""
    everyone = mine.new_zeros(ranks.world, *mine.shape)
    everyone[ranks.rank] = mine
    return ranks.sum(everyone).transpose(0, 1).flatten(0, 1).cpu()


def logits_of(
    model: Callable[..., Tensor], images: Tensor | list[PackedImages], device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    """The fp32 logits of a batch: images (B, C, H, W), or a list of packed images of many sizes."""
    parts = images if isinstance(images, list) else [images]
    with autocast(device, dtype):  # copies, as a CUDA graph writes all its outputs into the same memory
        return torch.cat([model(x.to(device, non_blocking=True)).to(torch.float32, copy=True) for x in parts])


def check_sizes(model: nn.Module, config: Config) -> None:
    """Raises InputError where the model takes no RGB, or the config asks for sizes that it does not take."""
    name, many = config.weights or config.model, config.sizes or config.drop_tokens
    if (chans := getattr(model, "in_chans", 3)) != 3:
        what = f"images of {chans} channel{'s' * (chans != 1)}"
        raise InputError(f"{name} takes {what}, and data is read as RGB: give weights of 3 channels")
    if many and not isinstance(model, ViT):
        raise InputError(f"{name} takes images of one size: sizes and drop_tokens are for ViTs")
    if many:
        model.check_many_sizes()


def mean_average_precision(scores: Tensor, targets: Tensor) -> float | None:
    """scikit-learn's average precision, averaged over the classes that occur; scores, targets (n, K).

    None where no image has a class, or a score is not finite.
    """
    from sklearn.metrics import average_precision_score

    present = targets.any(0)
    if not present.any() or not scores.isfinite().all():
        return None
    return float(average_precision_score(targets[:, present].numpy(), scores[:, present].numpy()))


def real_labels(data: Data, path: str = "") -> list[list[int]]:
    """ImageNet's reassessed labels of the validation images, in order: any number of classes for each.

    They are from "Are we done with ImageNet?" (Beyer et al., 2020). path: its real.json, one list of classes for each
    image from ILSVRC2012_val_00000001.JPEG on; "" stands for timm's copy. Raises InputError if the file is not of that
    form, or the validation images are not ILSVRC2012's.
    """
    names = [Path(data.val.name(i)).name for i in range(len(data.val))]
    try:
        labels = RealLabelsImagenet(names, path or None, topk=(1,)).real_labels
    except AssertionError:
        have = f"the {len(names)} of {data.config.data}"
        raise InputError(f"--real: {path or 'ImageNet'} has labels for another number of images than {have}") from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--real {path} cannot be read as ImageNet's reassessed labels: {error}") from None
    if not all(isinstance(classes, list) for classes in labels.values()):
        raise InputError(f"--real {path} must hold one list of classes for each image")
    unknown = next((name for name in names if name not in labels), None)
    if unknown:
        known = "ImageNet's names (ILSVRC2012_val_00000001.JPEG)"
        raise InputError(f"--real tells images by {known}, and {data.config.data} has {unknown}")
    return [labels[name] for name in names]


def cut_as_told(config: Config, model: nn.Module) -> Config:
    """The config, in which fields of CROP that it does not set are those of the model's weights."""
    told = {name: getattr(model, name, None) for name in CROP if not getattr(config, name)}
    told = {name: value for name, value in told.items() if value is not None}
    if set(told.values()) - set(CROP.values()):  # these are the defaults
        logger.info("images are cut as the weights say: %s", ", ".join(f"{k}={v}" for k, v in told.items()))
    return dataclasses.replace(config, **told)


def run_record(weights: str) -> dict:
    """The record in the state/ beside the weights of a run on disk, {} where there is none.

    Raises InputError where it is damaged.
    """
    if weights.startswith(HUB):
        return {}
    path = locate(weights).weights.parent / "state" / "state.json"
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["settings"].items()
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); move it away") from None


def run_images(weights: str, part: str) -> list[np.ndarray]:
    """The times of modification and hashes of the images of a run's split; [] where it has none."""
    path, names = locate(weights).weights.parent / "state" / "state.safetensors", ("modified", "hashes")
    with suppress(OSError, SafetensorError), safe_open(path, "np") as file:  # the user may have removed its state
        return [file.get_tensor(f"images.{part}_{name}") for name in names]
    return []


def compare_pillow(weights: str) -> None:
    """Warns where the run that made the weights resized images in the order of another Pillow."""
    theirs = run_record(weights).get("pillow", INSTALLED)
    if theirs != INSTALLED:
        other = f"its run resized images as Pillow {theirs} does, and Pillow {PIL.__version__} is installed"
        remedy = "pip install 'pillow<13'" if INSTALLED == "13" else "pip install 'pillow>=13'"
        said = "%s: %s: at about a third of all sizes some pixels differ (as before: %s)"
        logger.warning(said, weights, other, remedy)


def open_weights(
    config: Config, img_size: int | tuple[int, int] | None = None, split: str | None = None
) -> tuple[nn.Module, Data]:
    """(model, data) to evaluate `config.weights` on `config.data`.

    split: as in `evaluate_weights`, where the classes are the model's; None: the classes are the data's own.
    """
    device = choose_device(config.device)
    model = load_any(config.model, config.weights, img_size).to(device).eval()
    compare_pillow(config.weights)
    check_sizes(model, config)
    known = {}
    if split is not None:
        names, count = tuple(map(str, getattr(model, "class_names", None) or ())), model.num_classes or None
        known = dict(known=names, count=count, measure=partial(measures_share, config, split))
    data = open_data(cut_as_told(config, model), *sizes(model), device, mean=model.mean, **known)
    if split is None:
        said = "fits on the %d images of %s and measures the %d of %s"
        logger.info(said, len(data.train), data.train.where, len(data.val), data.val.where)
    return model, data


def measures_share(config: Config, split: str, share: Subset | None, whole: Source) -> bool:
    """Whether an evaluation measures the share of `whole` that training holds out, and not all.

    It does where the run that made the weights trained on this data, unless `split` says "all" or "val". share: None
    where the data has a validation split, `whole`. What is measured is logged.
    """
    if share is None:
        if split == "all":
            raise InputError(f"--split all: {config.data} has {whole.where} to measure; give --data another folder")
        logger.info("measures the %s images of %s", f"{len(whole):,}", whole.where)
        return False
    record = run_record(config.weights)
    index, theirs = record.get("data", {}), record.get("settings", {}).get("data") or ""

    def is_part(source: Source, part: str) -> bool:
        if not len(source) or f"{part}_sizes" not in index:
            return False
        found, modified = fingerprint(source)
        same = "sizes" in found and all(index.get(f"{part}_{kind}") == value for kind, value in found.items())
        if not same or not (saved := run_images(config.weights, part)):  # the user may have removed them
            return same
        return not len(replaced(source, modified, *saved))

    own, seen = is_part(share, "val"), ""
    if own or is_part(whole, "train"):
        seen = f"; the run of these weights trained on {'the others' if own else 'them'}"
    elif theirs and os.path.realpath(theirs) == os.path.realpath(config.data):
        seen = "; the run of these weights trained on data of this name, which has changed or was another"
    if split == "val" or (own and split != "all"):
        said = "measures the %d images of %s that training holds out%s; --split all measures all %d"
        logger.info(said, len(share), whole.where, seen, len(whole))
        return True
    said = "measures all %d images of %s%s; --split val measures the %d that training holds out"
    logger.info(said, len(whole), whole.where, seen.replace("the others", "most of them"), len(share))
    return False


def evaluate_weights(
    config: Config, img_size: int | tuple[int, int] | None = None, real: str | None = None, split: str = ""
) -> dict:
    """The accuracy of `config.weights` on the validation split of `config.data`.

    Classes are compared by their names where weights and data have names. real: the path for `real_labels`; it adds
    `real_accuracy` over the `real_images` that have such labels. split: what is measured where data has no validation
    split: "all" images, "val" for the share that training holds out, "" for that share if the weights' own run trained
    on this data, else all. Raises InputError if weights and data do not fit.
    """
    model, data = open_weights(config, img_size, split)
    if model.num_classes != len(data.classes):
        have = f"{config.weights} has {model.num_classes} classes and {config.data} has {len(data.classes)}"
        raise InputError(f"{have}; fine-tune it on this data first")
    if not getattr(model, "class_names", None) and data.classes != [str(i) for i in range(len(data.classes))]:
        logger.info("%s names no classes: those of %s go by their numbers", config.weights, config.data)
    if real is None:
        return evaluate(model, data)
    truth, guesses = real_labels(data, real), []
    number = torch.tensor(imagenet_numbers(data.classes), device=data.device)

    def guess(logits: Tensor, labels: Tensor) -> None:
        guesses.extend(torch.where(counts(labels), number[logits.argmax(1)], PADDING).tolist())

    result = evaluate(model, data, guess)
    right = [first in classes for first, classes in zip(guesses, truth) if classes and first != PADDING]
    return result | dict(real_accuracy=sum(right) / max(1, len(right)), real_images=len(right))
