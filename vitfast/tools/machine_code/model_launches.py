"""Records what a model launches on a GPU, by meta tensors: without a GPU, memory or compilation."""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import nn

from ... import ops
from ...kernels.launch import Launch, record
from ...kernels.resize import passes
from ...model.layers import LayerScale, Norm
from ...model.vit import ViT
from ...ops import dispatch
from ...ops.operation import Registered

META = torch.device("meta")
BATCHES = tuple(2**i for i in range(11))  # kernels know no batch, but the choice of tiles does


@contextlib.contextmanager
def launching_on_meta() -> Iterator[None]:
    """Lets operations on meta tensors run their launchers, as on a GPU, in place of their fakes."""
    registered, reason = Registered.all.values(), dispatch.unsupported_reason
    fakes = [each.fake for each in registered]
    for each in registered:
        each.fake = each.run
    dispatch.unsupported_reason = lambda x, unsupported: unsupported
    try:
        with ops.use_kernels("on"):
            yield
    finally:
        dispatch.unsupported_reason = reason
        for each, fake in zip(registered, fakes):
            each.fake = fake


def model(preset: str, image: int, train: bool, amp: bool, **changes) -> ViT:
    """A preset in bf16 on meta. amp: the parameters that autocast leaves in fp32 are in fp32."""
    with META:
        vit = ViT.from_preset(preset, img_size=image, **changes).bfloat16().train(train)
    if amp:
        norms = [each for each in vit.modules() if isinstance(each, (Norm, nn.LayerNorm, LayerScale))]
        kept = [*nn.ModuleList(norms).parameters(), vit.cls_token, vit.reg_token, vit.pos_embed]
        for parameter in (*kept, vit.patch_embed.proj.bias):
            if parameter is not None:
                parameter.data = parameter.data.float()
    return vit


def step(vit: ViT, batch: int, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The launches of a training step, or of an inference if the model is in eval mode.

    dtype: that of the images. The launches of each choice of what blocks keep for backward are included.
    """
    images = torch.empty(batch, vit.in_chans, *vit.patch_embed.img_size, dtype=dtype, device=META)

    def run():
        with torch.set_grad_enabled(vit.training):
            logits = vit(images)
            if vit.training:
                logits.backward(torch.empty_like(logits))

    found = []
    for keep in ("least", "all") if vit.training else ("least",):
        vit.set_keep(keep)
        found += record(run)
    return found


def model_launches(preset: str, image: int) -> Iterable[Launch]:
    """All that training, inference and embedding with a preset launch in bf16, at any batch.

    Images are floats or raw uint8. Three blocks stand for all, since blocks are alike. It needs `launching_on_meta` and
    `tiles.using(sm=...)` around it.
    """
    for train in (False, True):
        for amp in (False, True):
            vit = model(preset, image, train, amp, depth=3)
            for batch in BATCHES:
                for dtype in (torch.bfloat16, torch.float32, torch.uint8):
                    yield from step(vit, batch, dtype)
    yield from resize().values()


def resize() -> dict[str, Launch]:
    """Name -> what the two passes of a resize launch, whatever the sizes."""
    x, count = torch.empty(3 * 375 * 500, dtype=torch.uint8, device=META), np.zeros(224, np.int32)
    source = passes.Source(0, 375 * 500, 500, 3, 224, 224, count, count[None])
    rows, columns = (record(partial(passes.resize_pass, x, [source], vertical))[0] for vertical in (False, True))
    return {"resize, rows": rows, "resize, columns": columns}
