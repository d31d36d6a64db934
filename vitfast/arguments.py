"""Checks of what a ViT is given: constructor arguments, images, block numbers."""

from collections.abc import Sequence

from torch import Tensor

from . import positions
from .errors import InputError
from .ops.patch_embed import channel_values

POOLS = ("token", "avg", "")
ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}  # timm's names -> torch's `approximate`
CHOICES = {
    "global_pool": POOLS,
    "pos_embed": positions.KINDS,
    "pos_embed_at": positions.PLACES,
    "act_layer": ACTIVATIONS,
    "weight_init": ("", "jax", "jax_nlhb", "moco", "reset", "skip"),
}


def check(config: dict) -> None:
    """Raises InputError for constructor arguments that no ViT can have."""
    for name, known in CHOICES.items():
        if config[name] not in known:
            raise InputError(f"ViT: {name} must be one of {', '.join(map(repr, known))}, got {config[name]!r}")
    for name in ("in_chans", "embed_dim", "depth", "num_heads"):
        if config[name] < 1:
            raise InputError(f"ViT: {name} must be at least 1, got {config[name]}")
    width, heads, kind, place = (config[name] for name in ("embed_dim", "num_heads", "pos_embed", "pos_embed_at"))
    if width % heads:
        raise InputError(f"ViT: embed_dim must be a multiple of num_heads, got {width} and {heads}")
    if place != "stem" and kind not in ("learn", "learn2d"):
        raise InputError(f"ViT: pos_embed_at={place!r} is for pos_embed='learn' or 'learn2d', got pos_embed={kind!r}")
    if kind == "learn2d" and width % 2:
        raise InputError(f"ViT: pos_embed='learn2d' joins two halves, so embed_dim must be even, got {width}")
    if config["global_pool"] == "token" and not config["class_token"]:
        raise InputError("ViT: global_pool='token' needs class_token=True; without a class token use global_pool='avg'")


def per_channel(name: str, value: float | Sequence[float] | Tensor, chans: int) -> tuple[float, ...]:
    """A mean or std for each channel, from one number or as many (a tensor's too). Raises InputError."""
    try:
        values = tuple(map(float, channel_values(f"ViT: {name}", () if value is None else value, chans)))
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from None
    if len(values) == 1:
        values *= chans
    if name == "std" and min(values) <= 0:
        raise InputError(f"ViT: std must be positive, got {values}")
    return values


def checked_images(images: Tensor, chans: int, size: tuple[int, int] | None) -> Tensor:
    """The images; raises ValueError unless they are (B, chans, *size). size None leaves it open."""
    if images.dim() != 4 or images.shape[1] != chans or (size is not None and tuple(images.shape[2:]) != size):
        want = "(B, {}, {}, {})".format(chans, *(size or ("H", "W")))
        hint = "set_input_size or dynamic_img_size=True takes other sizes"
        raise ValueError(f"ViT: images must be {want}, got {tuple(images.shape)}; {hint}")
    return images


def block_indices(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Block numbers from timm's: the last n, a list (negative from the end), or None for all."""
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        if not 0 < indices <= depth:
            raise ValueError(f"indices must name 1 to {depth} last blocks, got {indices}")
        return list(range(depth - indices, depth))
    take = [i + depth if i < 0 else i for i in indices]
    if not take or min(take) < 0 or max(take) >= depth:
        raise ValueError(f"indices must lie in 0..{depth - 1} (or negative from the end), got {list(indices)}")
    return take
