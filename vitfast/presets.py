"""The sizes of the named models: the ViT paper's, its released code's, its hybrids'."""

from collections.abc import Sequence

from .errors import InputError, unknown

# Units of each stage, by how much smaller the map is than the image: the paper's options (ii) and (i).
BACKBONES = {"r50": {16: (3, 4, 9), 32: (3, 4, 6, 3)}}
ROOT = 64  # channels of a ResNet's root, at width 1

# Table 1 of the paper, and the smaller models of its released code. The number is the patch size.
PRESETS = {
    "Ti/16": dict(patch_size=16, embed_dim=192, depth=12, num_heads=3),
    "S/16": dict(patch_size=16, embed_dim=384, depth=12, num_heads=6),
    "S/32": dict(patch_size=32, embed_dim=384, depth=12, num_heads=6),
    # Figure 4's ViT-b: "ViT-B with all hidden dimensions halved", its 12 heads kept (with 6 it is S/32). After S, whose
    # head count is taken for weights of this width that do not tell theirs.
    "B-half/32": dict(patch_size=32, embed_dim=384, depth=12, num_heads=12),
    "B/16": dict(patch_size=16, embed_dim=768, depth=12, num_heads=12),
    "B/32": dict(patch_size=32, embed_dim=768, depth=12, num_heads=12),
    "L/16": dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16),
    "L/32": dict(patch_size=32, embed_dim=1024, depth=24, num_heads=16),
    "H/14": dict(patch_size=14, embed_dim=1280, depth=32, num_heads=16),
    "Nano/8": dict(patch_size=8, embed_dim=64, depth=4, num_heads=4),  # ours, for the demo and tests: not in the paper
}

# A ResNet-50 under the ViT: the number is the total down-sampling, which for a plain ViT is the patch size.
PRESETS |= {f"R50+{name}": {**PRESETS[name], "backbone": "r50"} for name in ("B/32", "B/16", "L/32", "L/16")}


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """n -> (n, n); a pair stays one."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


def preset(name: str) -> dict:
    """The constructor arguments of a preset; InputError with the nearest names for others."""
    if not isinstance(name, str):
        raise InputError(f"a preset is a name such as 'B/16', got {name!r}")
    if name in PRESETS:
        return dict(PRESETS[name])
    if name.lower().removeprefix("vit-") == "b/32":  # two models of the paper, told apart by their case alone
        both = "B/32 for ViT-B, B-half/32 for the half as wide ViT-b of the paper's Figure 4"
        raise InputError(f"unknown preset {name!r}; write {both}")
    raise unknown("preset", name, PRESETS)


def reduction(layers: Sequence[int]) -> int:
    """How much smaller than the image a ResNet's map is: 4 in its root and first stage, 2 in each other."""
    return 2 ** (len(layers) + 1)


def shorthand(layers: Sequence[int], width: float, patch: int) -> str | dict:
    """A backbone with these stages under such patches: its name, or the dict for hybrid.py."""
    names = (name for name, options in BACKBONES.items() if width == 1 and tuple(layers) == options.get(patch))
    return next(names, dict(layers=list(layers), width=width))
