"""The operations of a training step of a whole model, with their work, and its FLOPs.

By convention training counts as three times the forward pass. The operations, however, are counted as they run: without
a gradient of the images, and with attention's backward computing the scores again.

A model is a ViT, or its arguments only. For these PyTorch is not imported, which would take longer than all else.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import InputError, both_ends
from ...model.config import ViTConfig
from ...model.sizes import Sizes
from . import work
from .gpus import Rates
from .work import Kernels, Work

if TYPE_CHECKING:
    from torch import nn

    from ...model.vit import ViT


@dataclass(frozen=True)
class Operation:
    """An operation that a step runs `times` times: the kernels of its training forward and its backward."""

    name: str
    times: int
    forward: Kernels
    backward: Kernels

    def row(self, device: Rates) -> dict:
        """One run's FLOPs, bytes and floor in seconds, forward and backward."""
        found = dict(name=self.name, times=self.times)
        for direction, kernels in (("forward", self.forward), ("backward", self.backward)):
            found[f"{direction}_flops"] = work.total_flops(kernels)
            found[f"{direction}_bytes"] = work.total_bytes(kernels)
            floor = work.floor_seconds(kernels, device.flops_per_second, device.bytes_per_second)
            found[f"{direction}_floor"] = floor
        return found

    def __add__(self, other: Operation) -> Operation:
        """The same operation on these images and on others, by kernels for each."""
        return Operation(self.name, self.times, self.forward + other.forward, self.backward + other.backward)


def arguments_of(model: ViT | ViTConfig) -> ViTConfig:
    return model if isinstance(model, ViTConfig) else ViTConfig(**model.config)


def tokens_of(model: ViT | ViTConfig) -> int:
    """The tokens of an image. Raises InputError if blocks run on smaller operations or on PyTorch's."""
    c = arguments_of(model)
    if c.pos_embed == "relative":
        reason = "relative positions run on PyTorch's attention, which is not counted"
        raise InputError(f"cost: {reason}; take other positions")
    for name in ("qk_norm", "scale_mlp_norm"):
        if getattr(c, name) and not (name == "scale_mlp_norm" and c.swiglu_mlp):
            raise InputError(f"cost: {name}=True runs on the smaller operations, which are not counted; leave it out")
    sizes = Sizes(c)
    return sizes.prefix + sizes.patches


def dropout(model: ViT | ViTConfig) -> float:
    """The blocks' dropout; if it is not 0, they run on the smaller operations and `keep` has no effect."""
    return arguments_of(model).proj_drop_rate


def operations(
    model: ViT | ViTConfig, batch: int, size: int = 2, keep: str = "least", projector: Sequence[int] = ()
) -> list[Operation]:
    """The operations of a training step on `batch` images, in order.

    Images are uint8. size: bytes of a number; keep: "least" or "all", which dropout overrules. projector: the
    widths of LeJEPA's projector, the model's first; its norms are left out. For a hybrid, `model` must be the ViT
    itself.
    """
    c, n = arguments_of(model), tokens_of(model)
    sizes, depth, d, m = Sizes(c), c.depth, c.embed_dim, batch * n
    keep, f, patches = "least" if dropout(c) else keep, sizes.block.hidden, batch * sizes.patches
    norm = work.layer_norm if sizes.block.norm_biases else work.rms_norm
    found = []

    def add(name: str, counted: Work, times: int = 1) -> None:
        found.append(Operation(name, times, counted.training, counted.backward))

    if c.backbone is not None:  # the patches are those of a feature map, which needs a gradient too
        stem = model.patch_embed
        found.append(resnet(stem.backbone, batch, (c.in_chans, *stem.img_size), size)[0])
        (kernel,) = work.patch_embed(patches, stem.proj.weight[0].numel(), m, d, n * d, size, size).forward
        found.append(Operation("patch embedding", 1, (kernel,), (kernel, kernel)))
    else:
        add("patch embedding", work.patch_embed(patches, sizes.patch_values, m, d, n * d, size, pixel_size=1))
    if c.pre_norm:
        add("norm before the blocks", norm(m, d, size))
    add("LayerNorm 1", norm(m, d, size, residual_gradient=True), depth)
    add("QKV", work.linear(m, 3 * d, d, size), depth)
    add("attention", work.attention(m, n, d, size), depth)
    add("projection + residual", work.linear(m, d, d, size, m * d), depth)
    add("LayerNorm 2", norm(m, d, size, residual_gradient=True), depth)
    first, second = work.mlp_layers(m, d, f, size, c.swiglu_mlp, residual=True, keep=keep)
    add("up and gate" if c.swiglu_mlp else "fc1 + GELU", first, depth)
    if c.swiglu_mlp and c.scale_mlp_norm:
        add("norm in the MLP", work.layer_norm(m, f, size), depth)
    add("fc2 + residual", second, depth)
    read = batch if c.global_pool else m  # rows that the head reads
    if not sizes.after_pooling:
        add("last LayerNorm", norm(m, d, size))
    if c.global_pool == "map":
        add("MAP head: keys, values", work.linear(patches, 2 * d, d, size))
        add("MAP head: query, projection", work.linear(batch, d, d, size), 2)
        add("MAP head: attention", work.attention(batch, sizes.patches, d, size, keys=patches))
        add("MAP head: LayerNorm", norm(batch, d, size))
        add("MAP head: MLP", work.mlp(batch, d, f, size))
    if c.global_pool == "avg":
        mean = work.moved(m * d + read * d, size)
        add("mean of the patches", Work(mean, mean, mean))
    if sizes.after_pooling:
        add("last LayerNorm", norm(read, d, size))
    if c.representation_size:
        add("hidden layer of the head", work.linear(read, sizes.head_width, d, size))
    if c.num_classes:
        add("head", work.linear(read, c.num_classes, sizes.head_width, size))
    for inputs, outputs in zip(projector, projector[1:]):
        add(f"projector, {inputs} to {outputs}", work.linear(read, outputs, inputs, size))
    return found


def resnet(backbone: nn.Module, batch: int, image: tuple[int, int, int], size: int) -> tuple[Operation, int]:
    """The ResNet of a hybrid as one operation, and the bytes that it keeps for backward, with its input.

    Its kernels are the convolutions, norms and pooling, in the dtype of the products; activations, residual additions
    and the standardisation of weights are taken as folded in. In truth PyTorch runs it, whose autocast computes the
    norms in fp32, so that it moves and keeps more.
    """
    import torch

    forward, backward, kept = [], [], {}

    def count(module, inputs, output):
        x, convolution = inputs[0], isinstance(module, torch.nn.Conv2d)
        flops = 2.0 * output.numel() * module.weight[0].numel() if convolution else 0.0
        moved = size * (x.numel() + output.numel() + (module.weight.numel() if convolution else 0))
        gradients = 2 if forward else 1  # products of a convolution: the images, input of the first, need no gradient
        forward.append((flops, moved))
        norm = (0.0, size * (2 * x.numel() + output.numel()))
        backward.extend([(flops, moved)] * gradients if convolution else [norm])

    def keep(tensor):
        # The tensor is held, since a new storage could get the address of one that has been freed.
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    backbone = copy.deepcopy(backbone).to("meta").train()
    for module in backbone.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.GroupNorm, torch.nn.MaxPool2d)):
            module.register_forward_hook(count)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backbone(torch.empty(batch, *image, device="meta"))
    for parameter in backbone.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    total = sum(t.untyped_storage().nbytes() // 4 * size for t in kept.values())
    return Operation("ResNet", 1, tuple(forward), tuple(backward)), total


def optimizer_step(parameters: int, optimizer: str = "adamw", averaged: bool = False) -> Operation:
    """The Operation of clipping by norm and of the update, in fp32."""
    return Operation("clipping + update", 1, (), work.update(parameters, optimizer, averaged))


def flops_per_image(model: ViT | ViTConfig, projector: Sequence[int] = ()) -> float:
    """FLOPs of the forward pass for one image."""
    return sum(op.times * flops for op in operations(model, 1, projector=projector) for flops, _ in op.forward)


def forward_flops(model: nn.Module, image: tuple[int, int, int]) -> float:
    """FLOPs of any model's forward pass for one image; torch counts where `operations` does not.

    image: (C, H, W). Raises InputError for an image that the model does not take.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from ...model.vit import ViT

    if isinstance(model, ViT):
        with contextlib.suppress(InputError):
            return flops_per_image(model)
    # Gradients stay on, since the counter asks for those of parameters that are a module's arguments. PyTorch's plain
    # attention is chosen because the counter does not know all others everywhere.
    try:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(torch.empty(1, *image, device=next(model.parameters()).device))
    except (AssertionError, RuntimeError, ValueError) as error:
        size = " x ".join(map(str, image[1:]))
        raise InputError(f"the model takes no image of {size} pixels ({both_ends(str(error), 200)})") from None
    return float(counter.get_total_flops())
