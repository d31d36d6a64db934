"""The sizes of the named models: those of the paper and its code, its hybrids, and later ViTs."""

from collections.abc import Sequence

from ..errors import InputError, unknown

# Units of each stage, by how many times smaller than the image the map is: the paper's options (ii) and (i).
BACKBONES = {"r50": {16: (3, 4, 9), 32: (3, 4, 6, 3)}}
ROOT = 64  # channels of a ResNet's root, at width 1

# Table 1 of the paper, and the smaller models of its released code. The number is the patch size.
PRESETS = {
    "Ti/16": dict(patch_size=16, embed_dim=192, depth=12, num_heads=3),
    "S/16": dict(patch_size=16, embed_dim=384, depth=12, num_heads=6),
    "S/8": dict(patch_size=8, embed_dim=384, depth=12, num_heads=6),
    "S/32": dict(patch_size=32, embed_dim=384, depth=12, num_heads=6),
    # Figure 4's ViT-b: "ViT-B with all hidden dimensions halved" and its 12 heads kept (with 6 it is S/32). It comes
    # after S, because weights of this width that do not tell their head count get that of the first preset.
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

# Later image models, as their papers and code have them. Images have 224 pixels unless told otherwise.
_TOKEN = dict(class_token=True, global_pool="token")
_DINOV3 = dict(rope="dinov3", pos_embed="none", reg_tokens=4, init_values=1e-5, norm_eps=1e-5, dynamic_img_size=True)
_DINOV3 |= dict(act_layer="gelu", **_TOKEN)
_GATED = dict(swiglu_mlp=True, act_layer="silu")
_SIGLIP = dict(class_token=False, global_pool="map", act_layer="gelu_tanh", pos_embed="learn")
_CLIP = dict(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5, pos_embed="learn", **_TOKEN)
_EVA02 = dict(rope="cat", ref_feat_shape=(16, 16), pos_embed="learn", mlp_ratio=4 * 2 / 3, **_GATED)
_EVA02 |= dict(class_token=True, global_pool="avg")
_SO400M = dict(embed_dim=1152, depth=27, num_heads=16, mlp_ratio=3.7362)  # 4304 wide
PRESETS |= {
    "DINOv3-S/16": PRESETS["S/16"] | _DINOV3,
    "DINOv3-S+/16": PRESETS["S/16"] | _DINOV3 | _GATED,
    "DINOv3-B/16": PRESETS["B/16"] | _DINOV3,
    "DINOv3-L/16": PRESETS["L/16"] | _DINOV3,
    "DINOv3-H+/16": dict(patch_size=16, embed_dim=1280, depth=32, num_heads=20) | _DINOV3 | _GATED,
    "DINOv3-7B/16": dict(patch_size=16, embed_dim=4096, depth=40, num_heads=32, mlp_ratio=2.0, qkv_bias=False)
    | _DINOV3
    | _GATED,
    "SigLIP2-B/16": PRESETS["B/16"] | _SIGLIP,
    "SigLIP2-L/16": PRESETS["L/16"] | _SIGLIP,
    "SigLIP2-So400m/14": _SO400M | _SIGLIP | dict(patch_size=14),
    "SigLIP2-So400m/16": _SO400M | _SIGLIP | dict(patch_size=16),
    "CLIP-B/32": PRESETS["B/32"] | _CLIP,
    "CLIP-B/16": PRESETS["B/16"] | _CLIP,
    "CLIP-L/14": PRESETS["L/16"] | _CLIP | dict(patch_size=14),
    "EVA02-Ti/14": PRESETS["Ti/16"] | _EVA02 | dict(patch_size=14),
    "EVA02-S/14": PRESETS["S/16"] | _EVA02 | dict(patch_size=14),
    "EVA02-B/14": PRESETS["B/16"] | _EVA02 | dict(patch_size=14, scale_mlp_norm=True),
    "EVA02-L/14": PRESETS["L/16"] | _EVA02 | dict(patch_size=14, scale_mlp_norm=True),
}

# BiT ResNets of the scaling study: units per stage, width factor.
RESNETS = {
    "R50x1": ((3, 4, 6, 3), 1),
    "R50x2": ((3, 4, 6, 3), 2),
    "R101x1": ((3, 4, 23, 3), 1),
    "R152x1": ((3, 8, 36, 3), 1),
    "R152x2": ((3, 8, 36, 3), 2),
    "R200x3": ((3, 24, 36, 3), 3),
}
TIMM = "timm:"


def is_baseline(name: str) -> bool:
    """Whether a model's name is not one of our ViTs: a BiT ResNet, or timm:NAME."""
    return name in RESNETS or name.startswith(TIMM)


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """n -> (n, n); a pair stays one."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


def preset(name: str) -> dict:
    """The constructor arguments of a preset. Raises InputError, with the nearest names, for other names."""
    if not isinstance(name, str):
        raise InputError(f"a preset is a name such as 'B/16', got {name!r}")
    if name in PRESETS:
        return dict(PRESETS[name])
    if name.lower().removeprefix("vit-") == "b/32":  # two models of the paper, told apart by their case alone
        both = "B/32 for ViT-B, B-half/32 for the half as wide ViT-b of the paper's Figure 4"
        raise InputError(f"unknown preset {name!r}; write {both}")
    raise unknown("preset", name, PRESETS)


def reduction(layers: Sequence[int]) -> int:
    """How many times smaller than the image a ResNet's map is: 4 times by root and stage 1, then 2 each."""
    return 2 ** (len(layers) + 1)


def shorthand(layers: Sequence[int], width: float, patch: int) -> str | dict:
    """A backbone with these stages under patches of this size: its name, or the dict for hybrid.py."""
    names = (name for name, options in BACKBONES.items() if width == 1 and tuple(layers) == options.get(patch))
    return next(names, dict(layers=list(layers), width=width))
