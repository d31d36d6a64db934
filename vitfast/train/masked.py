"""Masked patch prediction, the self-supervised objective of the ViT paper (4.6, B.1.2).

A share of the patch embeddings is corrupted as BERT does with words: 80 % become a learnable [mask], 10 % the embedding
of another patch, 10 % stay as they are. Prefix tokens and positions are added afterwards (the paper corrupts "patch
embeddings", to which its Eq. 1 adds the positions), so a corrupted patch keeps its position. The output of every
corrupted patch predicts what was there.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.vit import ViT
from ..ops import reference as ref
from .unlabelled import Unlabelled

MASKED, SWAPPED = 0.8, 0.1  # shares of the corrupted patches that become [mask] or another patch; the rest stay
CELLS = {"mean": 1, "downsized": 4}  # a side of the small picture whose colours are predicted


class Corruption(NamedTuple):
    """Which of the N patches of each of B images are corrupted, and how."""

    chosen: Tensor  # (B, K) int64: the corrupted patches, whose outputs are trained
    masked: Tensor  # (B, N) bool: [mask] stands there
    source: Tensor  # (B, N) int64: elsewhere, the patch whose embedding stands there


def corruption(noise: Tensor, share: float) -> Corruption:
    """The Corruption of round(share * N) patches an image, at least one, by `noise` (B, 3, N) in [0, 1).

    The other patch is one of the same image, never the patch itself (the paper does not say from where it is taken).
    """
    pick, what, order = noise.unbind(1)
    patches = noise.shape[-1]
    chosen = pick.argsort(dim=1, stable=True)[:, : max(1, round(share * patches))]
    what = torch.ones_like(what).scatter(1, chosen, what.gather(1, chosen))  # 1 where nothing happens
    # Another patch is the next one in a random circle: none is taken twice, so that no gradient depends on the order
    # of atomic additions.
    circle = order.argsort(dim=1, stable=True)
    other = torch.empty_like(circle).scatter(1, circle, circle.roll(1, 1))
    swapped = (what >= MASKED) & (what < MASKED + SWAPPED)
    return Corruption(chosen, what < MASKED, torch.where(swapped, other, torch.arange(patches, device=noise.device)))


def colour_classes(patches: Tensor, cells: int) -> Tensor:
    """Patches (..., C, P, Q), pixels 0 to 255 -> colours of cells x cells areas, (..., cells^2) int64.

    The mean of each area in 3 bits a channel, the first channel the highest: red * 64 + green * 8 + blue, one of 512.
    """
    means = F.adaptive_avg_pool2d(patches.flatten(0, -4).float(), cells).flatten(2)
    digits = (means / 32).long()
    places = 8 ** torch.arange(digits.shape[1] - 1, -1, -1, device=digits.device)
    return (digits * places[:, None]).sum(1).unflatten(0, patches.shape[:-3])


def _gather_patches(x: Tensor, indices: Tensor) -> Tensor:
    """x (B, N, ...), indices (B, K) -> (B, K, ...)."""
    extra = x.shape[2:]
    return x.gather(1, indices.reshape(*indices.shape, *[1] * len(extra)).expand(-1, -1, *extra))


class MaskedPatches(Unlabelled):
    """A ViT that learns to predict its corrupted patches; `vit` is an ordinary ViT without its head.

    target: "mean" predicts the mean colour of a patch in 3 bits a channel, one of 512 classes; "downsized" the 16
    colours of the patch at 4 x 4; "pixels" the whole patch, normalised, by its mean squared error. share: the share
    of patches that are corrupted. A Config checks both. Only this module has the [mask] and the prediction layer.
    Every parameter takes part in the loss, as DDP requires.
    """

    def __init__(self, vit: ViT, target: str = "mean", share: float = 0.5):
        super().__init__(vit)
        self.target, self.share = target, share
        width, chans, (p, q) = vit.embed_dim, vit.in_chans, vit.patch_embed.patch_size
        outputs = CELLS[target] ** 2 * 8**chans if target in CELLS else chans * p * q
        weight = vit.patch_embed.proj.weight
        self.mask_token = nn.Parameter(torch.empty(1, 1, width, device=weight.device, dtype=weight.dtype))
        self.predict = nn.Linear(width, outputs, device=weight.device, dtype=weight.dtype)
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.predict.weight, std=0.02)
        nn.init.zeros_(self.predict.bias)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are usually not decayed."""
        return {"mask_token"} | super().no_weight_decay()

    def encode(self, images: Tensor, corrupted: Corruption) -> Tensor:
        """uint8 (B, C, H, W) -> normalised outputs (B, N, D) of the corrupted patches and the others."""

        def corrupt(x: Tensor) -> Tensor:
            other = _gather_patches(x, corrupted.source)
            return torch.where(corrupted.masked[..., None], self.mask_token.to(x.dtype), other)

        x = self.vit.forward_features(images, corrupt)
        # Where the norm comes after pooling, no other one has normalised the patches.
        return self.vit.fc_norm(x)[:, self.vit.num_prefix_tokens :]

    def forward(self, images: Tensor, corrupted: Corruption | None = None) -> tuple[Tensor, Tensor]:
        """Raw uint8 images (B, C, H, W) -> (mean loss of the corrupted patches, share with right colours).

        Without a Corruption a new one is drawn from torch's global generator of the images' device. For "pixels" a
        patch is right where the mean of what was predicted has the right 3 bits a channel. Raises TypeError for images
        that are not raw, ValueError for another shape.
        """
        vit = self.vit
        if images.dtype != torch.uint8:
            form = "raw uint8, whose colours are the targets"
            raise TypeError(f"MaskedPatches: images must be {form}, got {images.dtype}")
        expected = (vit.in_chans, *vit.patch_embed.img_size)
        if tuple(images.shape[1:]) != expected:
            shape = ", ".join(map(str, expected))
            raise ValueError(f"MaskedPatches: images must be (B, {shape}), got {tuple(images.shape)}")
        if corrupted is None:
            noise = torch.rand(len(images), 3, vit.patch_embed.num_patches, device=images.device)
            corrupted = corruption(noise, self.share)
        out = self.predict(_gather_patches(self.encode(images, corrupted), corrupted.chosen)).float()
        (h, w), (p, q) = vit.patch_embed.grid_size, vit.patch_embed.patch_size
        patches = images.unflatten(3, (w, q)).unflatten(2, (h, p)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        patches = _gather_patches(patches, corrupted.chosen)  # (B, K, C, P, Q)
        if self.target == "pixels":
            out = out.unflatten(-1, patches.shape[2:])
            loss = F.mse_loss(out, ref.normalize(patches, vit.mean, vit.std, torch.float32))
            mean, std = (torch.tensor(v, device=out.device).reshape(-1, 1, 1) for v in (vit.mean, vit.std))
            raw = ((out.detach() * std + mean) * 255).clamp(0, 255)
            return loss, (colour_classes(raw, 1) == colour_classes(patches, 1)).float().mean()
        classes = colour_classes(patches, CELLS[self.target])
        out = out.unflatten(-1, (classes.shape[-1], -1))
        loss = F.cross_entropy(out.flatten(0, -2), classes.flatten())
        return loss, (out.detach().argmax(-1) == classes).float().mean()
