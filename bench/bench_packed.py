"""Images of many sizes (the mixes of shapes.py): attention, and training steps, packed and padded.

FLOPs and bytes count what is needed, without padding, for everybody. The truth is float64 on each image alone. What
depends on the sizes alone (offsets) is made once, outside of what is timed, as a model makes it once for all its
layers.

Attention: ops.attention with offsets is compared with peers that take packed tensors too; q, k and v are separate.

A step is forward and backward, with bf16 weights on a GPU and fp32 on a CPU, without an optimiser. It compares our ViT,
packed; timm's NaFlexVit (NaFlex, SigLIP 2), whose patches its own loader pads to the longest image, with a mask of
every pair; and that model accelerated, which leaves padding out. `padded_share` is the padding's share of the tokens.
"""

import functools
from collections.abc import Callable

import machine
import pytest
import torch
from harness import DTYPE, Case, Operation, bench
from peers import FLASH, Peer, Setting, library_function, randomised
from shapes import MIXES, PATCH, Mix, model_work
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vitfast
from vitfast import ViT, ops
from vitfast.ops import reference as ref
from vitfast.tools.cost import work
from vitfast.tools.cost.work import Kernels

# ---- attention


def offsets_of(mix: Mix) -> Tensor:
    """Where the images of a mix begin among its tokens, and the end: (S + 1,) int32."""
    return torch.tensor([0, *mix.lengths], device=machine.DEVICE).cumsum(0).int()


def flash(mix: Mix, name: str) -> Callable:
    """flash-attn's attention on packed images (varlen)."""
    function, offsets, longest = library_function(*FLASH[name], "flash_attn_varlen_func"), offsets_of(mix), mix.longest
    sizes = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
    return functools.partial(function, **sizes)


def torch_varlen(mix: Mix) -> Callable:
    """torch.nn.attention.varlen: cuDNN or FlashAttention-2, as torch picks.

    SDPA on nested tensors, which runs one of the same, is therefore no peer of its own.
    """
    function = library_function("torch", "torch.nn.attention.varlen", "varlen_attn")
    offsets, longest = offsets_of(mix), mix.longest
    return lambda q, k, v: function(q, k, v, offsets, offsets, longest, longest)


# Functions of q, k and v for a mix; those not installed skip their cases.
IMPLEMENTATIONS: dict[str, Callable[[Mix], Callable]] = {
    "vitfast": lambda mix: functools.partial(ops.attention, offsets=offsets_of(mix), longest=mix.longest),
    **{name: functools.partial(flash, name=name) for name in FLASH},
    "torch varlen": torch_varlen,
}


def plain_packed(mix: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention of each image alone; backward computes logits again, as all would not fit."""
    images = zip(*(x[None].split(mix.lengths, 1) for x in (q, k, v)))
    return torch.cat([checkpoint(ref.attention, *image, use_reentrant=False)[0] for image in images])


def case_of(mix: Mix) -> Case:
    """The Case of a mix, its images one after the other."""
    inputs = [("values", (mix.rows, mix.heads, mix.head))] * 3
    needed = work.attention(mix.rows, mix.tokens, mix.width, DTYPE.itemsize)
    return Case("packed attention", mix.name, functools.partial(plain_packed, mix), inputs, 0, needed)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS if machine.GPU else ["vitfast"])  # the others need a GPU
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_packed(benchmark, mix, direction, impl):
    mix = MIXES[mix]
    bench(benchmark, Operation(case_of(mix), impl, IMPLEMENTATIONS[impl](mix), direction))


# ---- training steps


def naflex(mix: Mix) -> nn.Module:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    sizes = dict(patch_size=PATCH, embed_dim=mix.width, depth=mix.depth, num_heads=mix.heads)
    return NaFlexVit(NaFlexVitCfg(**sizes, class_token=True, global_pool="token"), num_classes=1000)


def padded(images: list[Tensor]) -> dict[str, Tensor]:
    """Pads images to the longest one, as timm's loader does."""
    from timm.data.naflex_dataset import NaFlexCollator
    from timm.data.naflex_transforms import Patchify

    samples = [(Patchify(PATCH)(image.cpu()), 0) for image in images]
    found, _ = NaFlexCollator(max(len(sample["patches"]) for sample, _ in samples))(samples)
    kept = {name: found[name].to(machine.DEVICE) for name in ("patches", "patch_coord", "patch_valid")}
    return kept | dict(patches=kept["patches"].to(images[0].dtype))


WAYS = ("vitfast", "timm NaFlexVit", "vitfast.accelerate(NaFlexVit)")


class PackedPeer(Peer):
    """A way to train on a mix; the truth is the plain model's, which sees one image at a time.

    Images are laid out beforehand, as a loader would.
    """

    def build(self) -> None:
        mix, library = self.shape, self.setting.library
        self.more["padded_share"] = mix.padded_tokens if library == "timm NaFlexVit" else 0.0
        self.lay_out = functools.partial(vitfast.pack, patch_size=PATCH) if library == "vitfast" else padded
        self.model, self.backend = self.plain().to(self.setting.stored), None
        if library.startswith("vitfast.accelerate"):
            vitfast.accelerate(self.model)
        images = [torch.randn(3, *size, device=machine.DEVICE).to(self.setting.stored) for size in mix.images]
        by_length = sorted(range(mix.batch), key=mix.lengths.__getitem__)
        self.chosen = sorted({0, by_length[0], by_length[-1], mix.batch - 1})
        self.images, self.compared = self.lay_out(images), [images[i] for i in self.chosen]

    def plain(self) -> nn.Module:
        torch.manual_seed(0)  # the same random weights every time
        mix, ours = self.shape, self.setting.library == "vitfast"
        with machine.DEVICE:
            model = ViT.from_preset(mix.model, depth=mix.depth, dynamic_img_size=True) if ours else naflex(mix)
            return randomised(model).train()

    def few(self, dtype: torch.dtype) -> list:
        images = [image.to(dtype) for image in self.compared]
        return [image[None] if self.setting.library == "vitfast" else self.lay_out([image]) for image in images]

    def named(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradients

    @property
    def work(self) -> Kernels:
        """The kernels of a step, without padding and optimiser."""
        return model_work(self.shape, self.dtype.itemsize).of("both")

    def step(self) -> Callable:
        upstream = torch.randn(self.shape.batch, 1000, dtype=self.dtype, device=machine.DEVICE)

        def step(images):
            self(images).backward(upstream)
            self.model.zero_grad(set_to_none=True)

        return step


@pytest.mark.parametrize("how", ["eager"] if machine.SMALL else ["compile", "eager"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mix", MIXES)
def test_train_packed(benchmark, mix, way, how):
    bench(benchmark, PackedPeer(Setting(way, how, "bf16" if machine.GPU else "fp32"), MIXES[mix], "train packed"))
