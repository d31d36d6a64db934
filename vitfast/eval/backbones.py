"""Models that turn images into vectors: our ViT, timm's and transformers', with their preprocessing."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.eval_transforms import EvalTransform
from ..data.packing import Native
from ..data.resize import FILTERS, INSTALLED, resize
from ..errors import InputError
from ..model import variable_size
from ..model.baselines import sizes as sizes_of
from ..model.preprocessing import CROP
from ..model.presets import pair
from ..model.vit import ViT
from ..ops import reference as ref
from .pixels import at_one_size, library_of, own_sizes, processor_of, timm_pixels

POOLS = ("token", "avg", "map")
MOST_PATCHES = 4096  # the most of an image at its own size; a larger image is made smaller
NAFLEX_PATCHES = 576  # the same for timm's NaFlexViT, as in timm's validation


@dataclass(frozen=True)
class OwnSize:
    """Resizes whole images, each to a size of its own: uint8 (C, H, W) of any sizes -> a list."""

    size_of: Callable[[int, int], tuple[int, int]]  # from that of an image
    resample: str

    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        return resize(images, [self.size_of(*image.shape[-2:]) for image in images], self.resample)


@dataclass(frozen=True)
class Backbone:
    """A model, how its images are prepared, and the function that computes their vectors.

    prepare: uint8 images (3, H, W) of any sizes -> uint8, (B, 3, *size) or, by OwnSize, a list. embed: what `prepare`
    returns -> (B, D). size: (height, width) of the model's own images. prefix: tokens besides the patches. mean, std:
    those of the pixels, for a record of the embeddings.
    """

    model: nn.Module
    prepare: EvalTransform | OwnSize
    embed: Callable[[Tensor | list[Tensor]], Tensor]
    size: tuple[int, int]
    patch: tuple[int, int]  # (1, 1): the model has none
    prefix: int
    mean: Sequence[float]
    std: Sequence[float]

    @property
    def native(self) -> bool:
        """Whether images keep their own aspect."""
        return isinstance(self.prepare, OwnSize)

    @property
    def preprocessing(self) -> dict:
        """A record of how images are prepared."""
        if self.native:
            found = dict(size="native", resample=self.prepare.resample)
        else:
            found = dataclasses.asdict(self.prepare)
        return found | dict(pillow=INSTALLED, mean=tuple(self.mean), std=tuple(self.std))

    @property
    def own_tokens(self) -> int:
        """The tokens of an image of the model's own size."""
        patch = (16, 16) if self.patch == (1, 1) else self.patch
        return self.prefix + math.prod(side // p for side, p in zip(self.size, patch))

    def tokens(self, height: int, width: int) -> int:
        """The tokens of an image of this height and width, once it is prepared."""
        if not self.native:
            return self.own_tokens
        size = self.prepare.size_of(height, width)
        return self.prefix + math.prod(side // p for side, p in zip(size, self.patch))


def backbone(model: nn.Module, pool: str | None, sizes: str | None, processor=None) -> Backbone:
    """The Backbone of a ViT or of a model of timm or transformers.

    pool: how tokens become one vector, one of POOLS; None: as in the model. sizes: "native" keeps each image's own
    size. processor: transformers' image processor, its dict, or a folder that has its JSON. Raises InputError where the
    model cannot do so.
    """
    if pool not in (None, *POOLS):
        raise InputError(f"pool must be one of {', '.join(POOLS)}, or None for the model's own; got {pool!r}")
    if sizes not in (None, "native"):
        raise InputError(f"sizes must be None or 'native', got {sizes!r}")
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper compiles calls, not forward_features
    if (chans := getattr(inner, "in_chans", 3)) != 3:
        raise InputError(f"Embedder: images have 3 channels, and the model takes {chans}")
    library = library_of(inner)
    if library == "vitfast":
        return _vit(inner, pool, sizes, processor)
    if library == "timm":
        return _naflexvit(inner, pool) if hasattr(inner, "_forward_embeds") else _timm(inner, pool, sizes)
    return _transformers(model, pool, sizes, processor)


def _refuse_native(sizes: str | None, what: str) -> None:
    if sizes:
        raise InputError(f"Embedder: {what} takes images of one size; leave sizes out")


# ---- our ViT


def _vit(model: ViT, pool: str | None, sizes: str | None, processor) -> Backbone:
    lacks = {"token": not model.has_class_token, "map": model.attn_pool is None}
    own = model.global_pool or None
    if lacks.get(pool) or (pool or own) is None:
        raise InputError(f"Embedder: the ViT cannot pool by {pool!r}; give pool, one of {', '.join(POOLS)}")

    def embed(images: Tensor | list[Tensor]) -> Tensor:
        many = not isinstance(images, Tensor)  # their tokens stay together, as a CUDA graph can compute them
        tokens = variable_size.encode(model, images) if many else model.forward_features(images)
        if pool in (None, own):
            return model.forward_head(tokens, pre_logits=True)
        return model.fc_norm(model.pool(tokens, pool))

    size, patch = sizes_of(model)
    if sizes is not None:
        model.check_many_sizes()
        prepare = OwnSize(Native(patch, MOST_PATCHES).size_of, model.interpolation or CROP["interpolation"])
    else:
        prepare = at_one_size(model, processor).prepare
    return Backbone(model, prepare, embed, size, patch, model.num_prefix_tokens, model.mean, model.std)


# ---- timm


def _timm(model: nn.Module, pool: str | None, sizes: str | None) -> Backbone:
    _refuse_native(sizes, f"timm's {type(model).__name__}")
    told = at_one_size(model, None)
    patch = pair(getattr(getattr(model, "patch_embed", None), "patch_size", None) or 1)
    prefix = getattr(model, "num_prefix_tokens", 0)
    if pool == "token" and not getattr(model, "has_class_token", prefix):
        raise InputError(f"Embedder: {type(model).__name__} has no class token, so pool cannot be 'token'")

    def embed(images: Tensor) -> Tensor:
        tokens = model.forward_features(ref.normalize(images, told.mean, told.std, _dtype(model)))
        if pool is None:
            return model.forward_head(tokens, pre_logits=True)
        if pool == "map" and getattr(model, "attn_pool", None) is None:
            raise InputError(f"Embedder: {type(model).__name__} has no attention pooling, so pool cannot be 'map'")
        found = model.pool(tokens, pool) if hasattr(model, "pool") else _pooled(tokens, pool, prefix)
        return getattr(model, "fc_norm", nn.Identity())(found)

    return Backbone(model, told.prepare, embed, told.prepare.size, patch, prefix, told.mean, told.std)


def _pooled(tokens: Tensor, pool: str, prefix: int) -> Tensor:
    """(B, T+N, D) -> (B, D) by the first token or the mean of the patches."""
    if tokens.dim() != 3 or pool == "map" or (pool == "token" and not prefix):
        raise InputError(f"Embedder: the model has no tokens that could be pooled by {pool!r}")
    return tokens[:, 0] if pool == "token" else tokens[:, prefix:].mean(1)


def _naflexvit(model: nn.Module, pool: str | None) -> Backbone:
    """timm's NaFlexVit at each image's own aspect, as timm's `ResizeToSequence` sizes it."""
    from timm.data.naflex_transforms import get_image_size_for_seq

    size, crop, mean, std = timm_pixels(model)
    patch, prefix = pair(model.embeds.patch_size), model.num_prefix_tokens

    def size_of(height: int, width: int) -> tuple[int, int]:
        return get_image_size_for_seq((height, width), patch, NAFLEX_PATCHES)[1]

    def embed(images: list[Tensor]) -> Tensor:
        patches, grids, valid = _padded([ref.normalize(x[None], mean, std, _dtype(model))[0] for x in images], patch)
        rows_columns = [torch.cartesian_prod(torch.arange(h), torch.arange(w)).view(-1, 2) for h, w in grids]
        coordinates = nn.utils.rnn.pad_sequence(rows_columns, batch_first=True).to(valid.device)
        found = model.forward_features(patches, patch_coord=coordinates, patch_valid=valid)["patches"]
        if pool is not None:
            return model.fc_norm(model._pool(found, pool, patch_valid=valid))
        return model.forward_head(found, pre_logits=True, patch_valid=valid)

    return Backbone(model, OwnSize(size_of, crop["interpolation"]), embed, size, patch, prefix, mean, std)


def _padded(images: list[Tensor], patch: tuple[int, int]) -> tuple[Tensor, list[tuple[int, int]], Tensor]:
    """Padded patches (B, N, P*Q*C) of images (C, h, w); their grids; (B, N) bool, False for padding."""
    cut = [x.unflatten(2, (-1, patch[1])).unflatten(1, (-1, patch[0])).permute(1, 3, 2, 4, 0) for x in images]
    grids = [(x.shape[0], x.shape[1]) for x in cut]
    patches = nn.utils.rnn.pad_sequence([x.flatten(2).flatten(0, 1) for x in cut], batch_first=True)
    counts = torch.tensor([h * w for h, w in grids], device=patches.device)
    return patches, grids, torch.arange(patches.shape[1], device=patches.device) < counts[:, None]


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


# ---- transformers

_PREFIX = {"cls_token", "class_embedding", "class_token", "distillation_token"}  # parameters: each is one token


def _transformers(model: nn.Module, pool: str | None, sizes: str | None, processor) -> Backbone:
    config = getattr(model.config, "vision_config", model.config)
    patch = pair(getattr(config, "patch_size", None) or 1)
    if config.model_type == "vit_mae" and config.mask_ratio:
        raise InputError(f"Embedder: {type(model).__name__} leaves out patches at random; set config.mask_ratio = 0")
    run = getattr(model, "get_image_features", model)
    if "For" in type(model).__name__:  # a classifier; those of CLIP and SigLIP are their own base_model
        run = getattr(model, "vision_model", model.base_model)
    if own_sizes(config):
        return _siglip2(model, run, pool, processor, patch)
    _refuse_native(sizes, f"transformers' {type(model).__name__}")
    told = at_one_size(model, processor)
    owners = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    prefix = len(owners & _PREFIX) + (getattr(config, "num_register_tokens", 0) or 0)

    def embed(images: Tensor) -> Tensor:
        return _vector(run(pixel_values=ref.normalize(images, told.mean, told.std, _dtype(model))), pool, prefix)

    return Backbone(model, told.prepare, embed, told.prepare.size, patch, prefix, told.mean, told.std)


def _siglip2(model: nn.Module, run, pool: str | None, processor, patch: tuple[int, int]) -> Backbone:
    """SigLIP 2 at each image's own aspect, as its processor sizes it."""
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    told, mean, std = processor_of(model, processor)
    most, kind = told.get("max_num_patches", 256), list(FILTERS)[told.get("resample", 2)]

    def size_of(height: int, width: int) -> tuple[int, int]:
        return get_image_size_for_max_num_patches(height, width, patch[0], most)

    def embed(images: list[Tensor]) -> Tensor:
        patches, grids, valid = _padded([ref.normalize(x[None], mean, std, _dtype(model))[0] for x in images], patch)
        given = dict(pixel_attention_mask=valid.int(), spatial_shapes=torch.tensor(grids, device=patches.device))
        return _vector(run(pixel_values=patches, **given), pool, 0, valid)

    own = size_of(*patch)  # a square image's
    return Backbone(model, OwnSize(size_of, kind), embed, own, patch, 0, mean, std)


def _vector(output, pool: str | None, prefix: int, valid: Tensor | None = None) -> Tensor:
    """The vectors (B, D) in the output of a model of transformers."""
    if isinstance(output, Tensor):
        return output
    tokens, pooled = output.get("last_hidden_state"), output.get("image_embeds")
    pooled = output.get("pooler_output") if pooled is None else pooled
    if pool in (None, "map") and pooled is not None:
        return pooled.flatten(1)  # a CNN's is (B, D, 1, 1)
    if tokens is None:
        raise InputError(f"Embedder: the model returns no last_hidden_state, only {', '.join(output)}")
    if pool == "avg" and valid is not None:
        return (tokens * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    return _pooled(tokens, pool or "token", prefix)
