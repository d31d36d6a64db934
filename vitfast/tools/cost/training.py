"""Estimates whether a training step of a model fits on a device, and how long step and training take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ...errors import InputError
from ...model.config import KEEPS, ViTConfig
from ...model.presets import pair
from ...model.sizes import USABLE
from .gpus import Rates
from .measured import closest, rows
from .memory import kept_bytes, state_bytes, weights, working_bytes
from .steps import arguments_of, dropout, flops_per_image, forward_flops, operations, optimizer_step, tokens_of

if TYPE_CHECKING:
    from torch import nn

    from ...model.vit import ViT

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a number

# (training images, classes) of the paper's data sets for pre-training, and of ours.
DATASETS = {
    "imagenet": (1_281_167, 1000),
    "imagenet21k": (14_197_122, 21_843),
    "jft": (303_000_000, 18_291),
    "digits": (1_437, 10),
}


def estimate(
    model: ViT | ViTConfig,
    device: Rates,
    *,
    batch_size: int = 256,
    gpus: int = 1,
    dtype: str = "bf16",
    images: float | None = None,
    optimizer: str = "adamw",
    averaged: bool = False,
    keep: str = "least",
    crops: Sequence[tuple[int, tuple[int, int]]] = (),
    projector: Sequence[int] = (),
) -> dict:
    """The cost of training this model on the device, as JSON holds it: times in seconds, sizes in bytes.

    model: a ViT, maybe on the meta device, or its arguments only. batch_size: the images of an optimiser step over all
    GPUs; if they do not fit into memory, gradients are accumulated. images: how many are seen in the whole training.
    The predicted share of the floors' speed is the `closest` measured one. Every GPU holds the whole state. The time of
    communication, and of the passes that dropout adds, is left out. keep: the tensors that blocks keep for backward;
    "auto" is "all" where that fits without smaller micro-batches. crops: (how many, (height, width))
    of each size of crops that the model takes in place of an image. projector: the widths of LeJEPA's projector, the
    model's first. Raises InputError for numbers out of range, an unknown keep, and crops for a hybrid.
    """
    for name, value in dict(batch_size=batch_size, gpus=gpus, images=images).items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"cost: {name} must be positive, got {value}")
    if keep not in KEEPS:
        raise InputError(f"cost: keep must be one of {', '.join(KEEPS)}, got {keep!r}")
    if isinstance(model, ViTConfig) and model.backbone is not None:  # timm knows what a ResNet holds
        model = _on_meta(model)
    views = _views(model, crops)
    size, on_each = DTYPES[dtype], math.ceil(batch_size / gpus)
    working = sum(working_bytes(view, count, size) for count, view in views)
    row = closest(arguments_of(model), device.gpu, on_each)
    reached = dict(efficiency=row.share, basis=f"as {row.told('reached')}")
    kept_per_image, largest = {}, {}
    for choice in ("least", "all"):
        one, two = (_kept(views, count, size, choice) for count in (1, 2))
        each = kept_per_image[choice] = {kind: two[kind] - one[kind] for kind in one}
        filters = {"standardised filters": sum(one.values()) - sum(each.values())}  # a ResNet's, whatever the batch
        state = state_bytes(model, size, optimizer, averaged, projector) | filters
        room = USABLE * device.memory_bytes - sum(state.values())
        largest[choice] = max(0, int(room / (sum(each.values()) + working)))
    if dropout(model):
        keep = "least"
    elif keep == "auto":
        keep = "all" if largest["all"] >= min(on_each, max(1, largest["least"])) else "least"
    micro_batches = math.ceil(on_each / max(1, min(largest[keep], on_each)))
    micro = math.ceil(on_each / micro_batches)
    flops = _flops(model, sum(n * flops_per_image(view, projector) for n, view in views), images, projector)
    of_each = [operations(view, count * micro, size, keep, projector) for count, view in views]
    table = [sum(others, first).row(device) for first, *others in zip(*of_each)]
    update = optimizer_step(flops["params"], optimizer, averaged).row(device)
    both = sum(row["times"] * (row["forward_floor"] + row["backward_floor"]) for row in table)
    floor = micro_batches * both + update["backward_floor"]
    more = sum(kept_per_image["all"].values()) - sum(kept_per_image["least"].values())
    return dict(
        img_size=list(pair(arguments_of(model).img_size)),
        tokens=sum(count * tokens_of(view) for count, view in views),
        crops=[[count, list(side)] for count, side in crops],
        **flops,
        dtype=dtype,
        device=asdict(device),
        gpus=gpus,
        batch_size=batch_size,
        micro_batch=micro,
        accumulate=micro_batches,
        largest_batch=largest[keep],
        dropout=dropout(model),
        memory=dict(state=state, kept_per_image=kept_per_image[keep], working_per_image=working),
        keep=dict(taken=keep, more_per_image=more, largest_batch=largest),
        operations=[*table, update],
        floor=_pace(floor, batch_size, images, gpus),
        predicted=reached | _pace(floor / row.share, batch_size, images, gpus),
    )


def compare(model: ViTConfig, found: dict, reached: float) -> dict:
    """How a measured speed compares with the floors, and with vitfast and timm on this kind of GPU.

    found: what `estimate` says of the model; reached: images per second of all its GPUs. A library, always compiled,
    that was not measured with this model and this GPU is given the share that its `closest` step reached.
    """
    if not (reached > 0 and math.isfinite(reached)):
        raise InputError(f"cost: reached must be positive, got {reached}")
    gpus, gpu, floor, peers = found["gpus"], found["device"]["gpu"], found["floor"]["images_per_second"], []
    case, other = (gpu, model.embed_dim, model.depth, found["tokens"]), found["crops"] or found["dropout"]
    same = [row for row in rows() if (row.gpu, row.width, row.depth, row.tokens) == case and not other]
    # The floors of another dtype, of a hybrid, or of few images differ from those of the row.
    same = [row for row in same if math.isclose(gpus * row.images_per_second / row.share, floor, rel_tol=0.05)]
    others = [library for library in ("vitfast", "timm") if library not in {row.library for row in same}]
    for row in [*same, *(closest(model, gpu, math.ceil(found["batch_size"] / gpus), name) for name in others)]:
        speed = gpus * row.images_per_second if row in same else row.share * floor
        how = f"reached ({row.machine})" if row in same else "would reach by its share of the floors"
        own = dict(images_per_second=speed, share=reached / speed, measured=row in same)
        peers.append(row._asdict() | own | dict(said=row.told(how)))
    return dict(images_per_second=reached, share_of_floor=reached / floor, peers=peers)


def estimate_baseline(
    model: nn.Module,
    img_size: tuple[int, int],
    *,
    images: float | None = None,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    averaged: bool = False,
) -> dict:
    """The cost of a model that is no ViT of ours: FLOPs by torch's counter, and its fixed memory.

    It has no times, which are known for our kernels only. Arguments and result are like those of `estimate`.
    """
    return dict(
        img_size=list(img_size),
        **_flops(model, forward_flops(model, (3, *img_size)), images),
        dtype=dtype,
        memory=dict(state=state_bytes(model, DTYPES[dtype], optimizer, averaged)),
    )


def _on_meta(config: ViTConfig) -> ViT:
    """The ViT with these arguments, without memory for its weights."""
    import torch

    from ...model.vit import ViT

    with torch.device("meta"):
        return ViT(**config.as_dict())


def _views(model: ViT | ViTConfig, crops: Sequence[tuple[int, tuple[int, int]]]) -> list[tuple[int, ViT | ViTConfig]]:
    """(how many it takes of an image, the model for their size) of the crops, or of the image itself."""
    if crops and arguments_of(model).backbone is not None:
        raise InputError("cost: a hybrid takes images of one size, and so no crops")
    return [(count, replace(arguments_of(model), img_size=side)) for count, side in crops] or [(1, model)]


def _kept(views: list[tuple[int, ViT | ViTConfig]], images: int, size: int, keep: str) -> dict[str, int]:
    """`kept_bytes` of all views of so many images."""
    each = [kept_bytes(view, count * images, size, keep) for count, view in views]
    return {kind: sum(kept[kind] for kept in each) for kind in each[0]}


def _flops(model: nn.Module | ViTConfig, flops: float, images: float | None, projector: Sequence[int] = ()) -> dict:
    """The number of parameters, and the FLOPs for an image and for the whole training."""
    return dict(
        params=sum(weights(model, projector)),
        flops_per_image=flops,
        train_flops_per_image=3 * flops,
        train_flops=None if images is None else 3 * flops * images,
        train_images=images,
    )


def _pace(step: float, batch_size: int, images: float | None, gpus: int) -> dict:
    seconds = None if images is None else images / batch_size * step
    days = None if seconds is None else seconds * gpus / 86_400
    return dict(step_seconds=step, images_per_second=batch_size / step, train_seconds=seconds, gpu_days=days)
