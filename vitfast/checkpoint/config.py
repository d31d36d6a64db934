"""Constructor arguments out of a checkpoint: its tensors' shapes, its JSON, its format."""

import math
import re

from torch import Tensor

from ..errors import InputError
from ..presets import PRESETS, ROOT, pair, reduction, shorthand
from .files import CheckpointFiles
from .formats import Format

_OURS = ("library", "library_version", "architecture")  # our config.json has these besides constructor arguments
_TANH = ("gelu_tanh", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_ACTIVATIONS = dict.fromkeys(("gelu", "gelu_python"), "gelu") | dict.fromkeys(_TANH, "gelu_tanh")


def infer(state: dict[str, Tensor], form: Format, facts: dict, files: CheckpointFiles, known: dict) -> dict:
    """Constructor arguments of a converted state dict.

    facts: what the conversion saw. known: what the caller says, used only for what nothing else tells (`num_heads`,
    `img_size`). A config.json of ours is taken as it is. Raises InputError where something is left open, naming the
    argument to pass.
    """
    shapes = _from_shapes(state)
    if files.config.get("library") == "vitfast":
        # JSON's lists are tuples again
        return shapes | {k: tuple(v) if isinstance(v, list) else v for k, v in files.config.items() if k not in _OURS}
    try:
        of_timm = {"architecture", "pretrained_cfg"} & files.config.keys()
        told = _from_timm(files.config) if of_timm else _from_hugging_face(files)
        size = told.pop("img_size")
        size = pair(size) if size else None
    except InputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"is not one of timm, Hugging Face or vitfast ({type(error).__name__}: {error})"
        raise InputError(f"config.json {why}; mend or remove it") from error
    config = form.defaults | shapes | facts | {k: v for k, v in told.items() if v is not None}
    config |= _positions(state, config, size, known.get("img_size"))
    config["num_heads"] = config.get("num_heads") or known.get("num_heads") or _preset_heads(config)
    for name in ("mean", "std"):
        if isinstance(config[name], (list, tuple)) and len(config[name]) not in (1, config["in_chans"]):
            config[name] = 0.5  # statistics of three channels say nothing about others
    return config


def _from_shapes(state: dict[str, Tensor]) -> dict:
    """The arguments that follow from the names and shapes of the tensors."""
    dim, chans, *patch = state["patch_embed.proj.weight"].shape
    root, hybrid = state.get("patch_embed.backbone.stem.conv.weight"), {}
    if root is not None:
        chans, layers = root.shape[1], _units(state)
        patch = [side * reduction(layers) for side in patch]
        hybrid = dict(backbone=shorthand(layers, root.shape[0] / ROOT, patch[0]))
    tokens = {name: state[name].shape[1] for name in ("cls_token", "reg_token") if name in state}
    pre_logits, head = state.get("pre_logits.fc.weight"), state.get("head.weight")
    fc_norm = "fc_norm.weight" in state
    return dict(
        embed_dim=dim,
        in_chans=chans,
        patch_size=patch[0] if patch[0] == patch[1] else tuple(patch),
        depth=1 + max(int(m[1]) for k in state if (m := re.match(r"blocks\.(\d+)\.", k))),
        mlp_ratio=_ratio(state["blocks.0.mlp.fc1.weight"].shape[0], dim),
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        proj_bias="blocks.0.attn.proj.bias" in state,
        init_values=1e-5 if "blocks.0.ls1.gamma" in state else None,
        class_token="cls_token" in tokens,
        reg_tokens=tokens.get("reg_token", 0),
        pos_embed="learn" if "pos_embed" in state else "none",
        num_classes=0 if head is None else head.shape[0],
        representation_size=None if pre_logits is None else pre_logits.shape[0],
        global_pool="avg" if fc_norm or "cls_token" not in tokens else "token",
        fc_norm=fc_norm,
        **hybrid,
    )


def _units(state: dict[str, Tensor]) -> list[int]:
    """How many units each stage of a hybrid's ResNet has."""
    pattern = r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\."
    found = {(int(m[1]), int(m[2])) for k in state if (m := re.match(pattern, k))}
    stages = [stage for stage, _ in found]
    return [stages.count(i) for i in range(1 + max(stages, default=0))]


def _from_hugging_face(files: CheckpointFiles) -> dict:
    """The arguments in transformers' config.json and preprocessor_config.json; None where it has none."""
    config, pixels = files.config, files.preprocessor
    plain = pixels.get("do_normalize") is False
    return dict(
        num_heads=config.get("num_attention_heads"),
        norm_eps=config.get("layer_norm_eps"),
        act_layer=_activation(config.get("hidden_act")),
        img_size=config.get("image_size"),
        mean=0.0 if plain else pixels.get("image_mean"),
        std=1.0 if plain else pixels.get("image_std"),
    )


def _from_timm(config: dict) -> dict:
    """The arguments in the config.json of a timm repository (the older, flat ones too)."""
    pretrained, args = config.get("pretrained_cfg", config), config.get("model_args") or {}
    name = config.get("architecture") or pretrained.get("architecture") or ""
    if "_rpn_" in name or "quickgelu" in name:
        raise InputError(f"config.json: {name} has blocks that vitfast does not have yet")
    pool = args.get("global_pool", config.get("global_pool"))
    if pool not in (None, "token", "avg", ""):
        raise InputError(f"config.json: global_pool={pool!r} is not supported; known are 'token', 'avg' and ''")
    size = pretrained.get("input_size") and tuple(pretrained["input_size"][1:])
    return dict(
        num_heads=args.get("num_heads"),
        img_size=args.get("img_size") or size,
        mean=pretrained.get("mean"),
        std=pretrained.get("std"),
        act_layer=_activation(args.get("act_layer")) or ("gelu_tanh" if "siglip" in name else None),
        dynamic_img_size=args.get("dynamic_img_size"),
        global_pool=pool,
    )


def _activation(name: str | None) -> str | None:
    """The ViT's name of an activation, None for None."""
    if name is None:
        return None
    if name not in _ACTIVATIONS:
        raise InputError(f"config.json: activation {name!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _positions(state: dict[str, Tensor], config: dict, told: tuple[int, int] | None, asked) -> dict:
    """img_size and no_embed_class from the length of the position table.

    The grid is that of `told` (config.json's image size) where it fits the table, else square, else that of `asked`.
    Without a table the size is free: `told`, else `asked`, else the constructor's default.
    """
    if "pos_embed" not in state:
        size = told or asked
        return dict(img_size=size) if size else {}
    patch, length = pair(config["patch_size"]), state["pos_embed"].shape[1]
    prefix = int(config["class_token"]) + config["reg_tokens"]
    patches = {False: length - prefix, True: length}  # how many, by no_embed_class
    if "no_embed_class" in config:
        patches = {config["no_embed_class"]: patches[config["no_embed_class"]]}

    def fits(size: tuple[int, int] | None) -> bool | None:
        """The no_embed_class with which the table has this image size, None where it cannot have it."""
        number = size and size[0] // patch[0] * (size[1] // patch[1])
        return next((no_embed for no_embed, n in patches.items() if number == n), None)

    sides = [_square(n) for n in patches.values()]
    squares = [(side * patch[0], side * patch[1]) for side in sides if side]
    for size in (told, *squares, pair(asked) if asked else None):
        no_embed = fits(size)
        if no_embed is not None:
            return dict(img_size=size[0] if size[0] == size[1] else size, no_embed_class=bool(no_embed and prefix))
    table = f"a position table of {length} entries is no square grid"
    raise InputError(f"{table}; pass img_size=(height, width) of the checkpoint")


def _preset_heads(config: dict) -> int:
    """The head count of the preset with this width and depth."""
    dim, depth = config["embed_dim"], config["depth"]
    for made in PRESETS.values():
        if (made["embed_dim"], made["depth"]) == (dim, depth):
            return made["num_heads"]
    no_preset = f"no preset has embed_dim={dim}, depth={depth}"
    raise InputError(f"nothing here says how many heads there are, and {no_preset}; pass num_heads=")


def _ratio(hidden: int, dim: int) -> float:
    """The mlp_ratio with int(dim * ratio) == hidden, whatever the rounding."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)


def _square(n: int) -> int | None:
    """The side of a square grid of n patches, None where n is no square."""
    side = math.isqrt(n) if n > 0 else 0
    return side if side and side * side == n else None
