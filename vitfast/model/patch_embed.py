"""The patch projection, and how patches, prefix tokens and positions become the tokens of an image."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..ops import packed, patch_embed
from ..ops import reference as ref
from ..ops.fusable import expected_modules
from .config import channels_hint, grid_size
from .layers import Entries, Layer, weights_dtype
from .presets import pair

torch.fx.wrap("patch_embed")  # FX treats it as a leaf, as in layers.py


def checked_images(images: Tensor, chans: int, size: tuple[int, int] | None) -> Tensor:
    """Returns the images. Raises ValueError unless they are (B, chans, *size); size=None allows any."""
    if isinstance(images, (list, tuple)):
        raise TypeError("ViT: images must be one (B, C, H, W) tensor here; a list is for forward and forward_features")
    if not hasattr(images, "dim"):  # tensors have it, and so have the proxies that FX traces with
        got = f"{type(images).__name__}; vitfast.transform(model) makes (C, H, W) of a PIL image, a path or an array"
        raise TypeError(f"ViT: images must be a tensor (B, C, H, W) or a list of (C, H, W), got {got}")
    if torch.jit.is_tracing():
        raise NotImplementedError("ViT: torch.jit.trace cannot record it; torch.export.export and `vitfast export` can")
    if images.dim() != 4 or images.shape[1] != chans or (size is not None and tuple(images.shape[2:]) != size):
        want = "(B, {}, {}, {})".format(chans, *(size or ("H", "W")))
        raise ValueError(f"ViT: images must be {want}, got {tuple(images.shape)}; {_shape_hint(images, chans)}")
    return images


def _shape_hint(images: Tensor, chans: int) -> str:
    """Advice where images are not (B, chans, H, W), or of another size."""
    shape = tuple(images.shape)
    if len(shape) == 3 and shape[0] == chans:
        return "one image is a batch as images[None]"
    if len(shape) != 4:
        return "a batch has these four axes"
    if shape[1] == chans:
        return "set_input_size or dynamic_img_size=True takes other sizes"
    if shape[3] == chans:
        return "channels come before height and width: images.permute(0, 3, 1, 2)"
    have = f"images have {shape[1]} channel{'s' * (shape[1] != 1)}, the model takes {chans}"
    return f"{have}: {channels_hint(shape[1], chans)}, or make the model with in_chans={shape[1]}"


# Not in the modules themselves, which are copied and saved.
_caches: WeakKeyDictionary["PatchEmbed", dict] = WeakKeyDictionary()


class PatchEmbed(Layer):
    """Holds the patch projection (`proj.weight` (D, C, P, Q)) and the sizes it is used at.

    shrink: a hybrid's projection reads a feature map in place of the image, whose sides are this many times smaller.
    """

    fused_modules = {"patch_embed": expected_modules({"proj": nn.Conv2d})}

    def __init__(self, img_size, patch_size, in_chans: int, embed_dim: int, shrink: int = 1, bias: bool = True):
        super().__init__()
        self.patch_size = pair(patch_size)
        kernel = tuple(side // shrink for side in self.patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel, kernel, bias=bias)
        self.set_input_size(img_size)

    def train(self, mode: bool = True) -> "PatchEmbed":
        _caches.pop(self, None)  # training may change weights in ways that ops.patch_embed does not notice
        return super().train(mode)

    def set_input_size(self, img_size) -> None:
        """Takes a new image size; raises InputError where it is no positive multiple of the patch size."""
        grid_size(pair(img_size), self.patch_size)
        self.img_size = pair(img_size)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Patches down and across in an image of this size (timm's name)."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches down and across at the configured image size."""
        return self.dynamic_feat_size(self.img_size)

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """The image's size over the grid's (timm's name)."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def report_entries(self) -> Entries:
        return [("patch projection", self.fallback_reason("patch_embed"))]

    def forward(
        self,
        images: Tensor,
        prefix: Tensor | None = None,
        pos_embed: Tensor | None = None,
        mean=None,
        std=None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Images -> tokens. offsets: those of images of many sizes, cut into patches; see ops.patch_embed."""
        if self.fallback_reason("patch_embed") is not None:
            patches = self.proj(pixels(images, mean, std, weights_dtype(self.proj))).flatten(2).transpose(1, 2)
            return with_tokens(patches, prefix, pos_embed, offsets)
        weights, cache = (self.proj.weight, self.proj.bias), None
        if not self.training and not torch.compiler.is_compiling():
            cache = _caches.setdefault(self, {})
        return patch_embed(images, *weights, prefix, pos_embed, mean=mean, std=std, offsets=offsets, cache=cache)


@torch.fx.wrap
def with_tokens(
    patches: Tensor, prefix: Tensor | None, pos_embed: Tensor | None, offsets: Tensor | None = None
) -> Tensor:
    """Patch embeddings (B, N, D), or packed (N, 1, D), -> tokens, as ops.patch_embed puts them together."""
    if offsets is None:
        return ref.with_prefix_and_positions(patches, prefix, pos_embed)
    rows = packed.token_rows(offsets, len(patches), 0 if prefix is None else prefix.shape[1])
    return ref.packed_tokens(patches[:, 0], prefix, pos_embed, *rows)


@torch.fx.wrap
def pixels(images: Tensor, mean, std, dtype: torch.dtype) -> Tensor:
    """Images in `dtype`; raw uint8 ones are normalised."""
    return ref.normalize(images, mean, std, dtype) if images.dtype == torch.uint8 else images.to(dtype)
