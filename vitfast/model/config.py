"""Checks of what a ViT is given: constructor arguments, names of classes, images, block numbers."""

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.reference import LEAST_STD, MOST_PIXEL

POOLS = ("token", "avg", "map", "")
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu")  # timm's names
POS_EMBEDS = ("learn", "learn2d", "factorized", "sincos2d", "relative", "none", "")  # see positions.py
ROPES = {"dinov3": 100.0, "cat": 10_000.0}  # timm's names of rotary positions, and their temperatures
POS_EMBED_PLACES = ("stem", "layers", "layers_shared")
CROP_MODES = ("center", "squash", "border")  # timm's
LEAST_CROP = 0.1  # images are resized to 1 / crop_pct of what is cut out
FLOAT32 = 3.4028234e38  # the largest that float32 holds, rounded down
MOST_PARAMETERS = 10**11  # four times the largest ViT there is; what a mistyped size asks for lies far above

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value) -> str:
    """A value in a message: in one line, however long."""
    return " ".join(_repr.repr(value).split())


@dataclass(frozen=True)
class Check:
    """Those values that an argument may have; `convert` makes them Python's own type."""

    text: str  # what was expected
    holds: Callable[[object], bool]
    convert: Callable[[object], object] = lambda value: value

    def __call__(self, value):
        """The value, converted. Raises ValueError that says what was expected."""
        if not self.holds(value):
            raise ValueError(self.text)
        return self.convert(value)


def whole(low: int, high: int) -> Check:
    def holds(value) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and low <= value <= high

    return Check(f"a whole number from {low} to {high}", holds, int)


def number(text: str, holds: Callable[[float], bool]) -> Check:
    """Finite numbers for which `holds`; text: what they are called."""

    def finite(value) -> bool:
        try:
            real = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        except OverflowError:  # a whole number past every float
            real = math.inf
        return math.isfinite(real) and holds(real)

    return Check(text, finite, float)


def one_of(names: Sequence[str]) -> Check:
    return Check(f"one of {', '.join(map(repr, names))}", lambda value: isinstance(value, str) and value in names)


def optional(check: Check) -> Check:
    convert = lambda value: None if value is None else check.convert(value)  # noqa: E731
    return Check(f"None or {check.text}", lambda value: value is None or check.holds(value), convert)


def some(check: Check, lengths: range, text: str) -> Check:
    """Lists or tuples of so many values, as tuples. text: what they are called."""

    def holds(value) -> bool:
        return isinstance(value, (list, tuple)) and len(value) in lengths and all(map(check.holds, value))

    return Check(text, holds, lambda value: tuple(map(check.convert, value)))


def one_or_some(check: Check, lengths: range, text: str) -> Check:
    every = some(check, lengths, text)
    either = lambda value: every if isinstance(value, (list, tuple)) else check  # noqa: E731
    return Check(text, lambda value: either(value).holds(value), lambda value: either(value).convert(value))


def each_channel(check: Check, text: str) -> Check:
    """One value or one for each channel; a tensor's or an array's too."""
    listed = one_or_some(check, range(1, 2**16 + 1), text)
    return Check(text, lambda value: listed.holds(_listed(value)), lambda value: listed.convert(_listed(value)))


def _listed(value):
    """The numbers of a tensor or an array as a list; None of one that is without values, or sparse."""
    try:
        return value.reshape(-1).tolist() if hasattr(value, "reshape") else value
    except (RuntimeError, NotImplementedError):
        return None


flag = Check("True or False", lambda value: isinstance(value, bool))
SIDE = whole(1, 2**16)
SIZE = one_or_some(SIDE, range(2, 3), "a whole number of pixels up to 65536, or two: (height, width)")
ANY = number(f"a number from {-FLOAT32:.1e} to {FLOAT32:.1e}", lambda x: abs(x) <= FLOAT32)
NOT_NEGATIVE = number(f"a number from 0 to {FLOAT32:.1e}", lambda x: 0 <= x <= FLOAT32)
PIXEL = number("", lambda x: abs(x) <= MOST_PIXEL)
SPREAD = number("", lambda x: LEAST_STD <= x <= MOST_PIXEL)
POSITIVE = number("positive", lambda x: x > 0)
RATE = number("a number from 0 to 1", lambda x: 0 <= x <= 1)


_BACKBONE = {
    "layers": some(whole(1, 1000), range(1, 5), ""),
    "width": number("", lambda x: 0 < x <= 16),
    "eps": number("", lambda x: x >= 0),
}
# Types and bounds alone: whether it fits the patches is found out in hybrid.py.
_STAGES = Check(
    "a name, or a dict with layers (the units of one to 4 stages) and, if you like, width (to 16) and eps",
    lambda value: (
        isinstance(value, str)
        or isinstance(value, dict)
        and "layers" in value
        and all(name in _BACKBONE and _BACKBONE[name].holds(part) for name, part in value.items())
    ),
    lambda value: value if isinstance(value, str) else {n: _BACKBONE[n].convert(part) for n, part in value.items()},
)

ARGUMENTS: dict[str, Check] = {
    "img_size": SIZE,
    "patch_size": SIZE,
    "in_chans": whole(1, 2**16),
    "num_classes": whole(0, 2**24),
    "global_pool": one_of(POOLS),
    "embed_dim": whole(1, 2**17),
    "depth": whole(1, 1000),
    "num_heads": whole(1, 2**17),
    "mlp_ratio": number("a positive number up to 65536", lambda x: 0 < x <= 2**16),
    "init_values": optional(NOT_NEGATIVE),
    "pos_embed": one_of(POS_EMBEDS),
    "pos_embed_at": one_of(POS_EMBED_PLACES),
    "reg_tokens": whole(0, 2**16),
    "fc_norm": optional(flag),
    "drop_path_mode": one_of(("mask", "subset")),
    "weight_init": one_of(("", "jax", "jax_nlhb", "moco", "reset", "skip")),
    "head_init_bias": optional(ANY),
    "representation_size": optional(whole(1, 2**17)),
    "act_layer": one_of(ACTIVATIONS),
    "norm_layer": one_of(("layernorm", "rmsnorm")),
    "norm_eps": NOT_NEGATIVE,
    "mean": each_channel(PIXEL, f"one number or one for each channel, from {-MOST_PIXEL:g} to {MOST_PIXEL:g}"),
    "std": each_channel(SPREAD, f"positive, one number or one for each channel, from {LEAST_STD:g} to {MOST_PIXEL:g}"),
    "backbone": optional(_STAGES),
    "rope": optional(one_of(tuple(ROPES))),
    "rope_temperature": optional(number("a number from 1 to 1e9", lambda x: 1 <= x <= 1e9)),
    "ref_feat_shape": optional(some(SIDE, range(2, 3), "two whole numbers of patches: (down, across)")),
    "crop_mode": optional(one_of(CROP_MODES)),
    "crop_pct": optional(number(f"a number from {LEAST_CROP} to 1", lambda x: LEAST_CROP <= x <= 1)),
    **dict.fromkeys(("drop_rate", "pos_drop_rate", "proj_drop_rate", "drop_path_rate"), RATE),
    **dict.fromkeys(("qkv_bias", "proj_bias", "class_token", "no_embed_class", "dynamic_img_size"), flag),
    **dict.fromkeys(("pre_norm", "qk_norm", "swiglu_mlp", "scale_mlp_norm", "residual_in_fp32"), flag),
}


def enforce(check: Check, value, called: str):
    """check(value); raises InputError with the name `called` where it does not pass."""
    try:
        return check(value)
    except ValueError as error:
        raise InputError(f"{called} must be {error}, got {shown(value)}") from None


def read(name: str, value, called: str = ""):
    """The value of one constructor argument, as Python's own type. Raises InputError where it is none.

    called: the name in the message, `ViT: {name}` unless given.
    """
    return enforce(ARGUMENTS[name], value, called or f"ViT: {name}")


def checked(config: dict) -> dict:
    """Constructor arguments as `read` returns them, a mean and std for each channel; others are left out.

    `class_names` stays where there are any. Raises InputError for what no ViT can have, before anything of its size is
    made.
    """
    names, config = config.get("class_names"), {name: read(name, config[name]) for name in ARGUMENTS}
    width, heads, kind, place = (config[name] for name in ("embed_dim", "num_heads", "pos_embed", "pos_embed_at"))
    if width % heads:
        raise InputError(f"ViT: embed_dim must be a multiple of num_heads, got {width} and {heads}")
    if place != "stem" and kind not in ("learn", "learn2d", "factorized"):
        learned = "'learn', 'learn2d' or 'factorized'"
        raise InputError(f"ViT: pos_embed_at={place!r} is for pos_embed={learned}, got pos_embed={kind!r}")
    if kind == "learn2d" and width % 2:
        raise InputError(f"ViT: pos_embed='learn2d' joins two halves, so embed_dim must be even, got {width}")
    if kind == "sincos2d" and (width % 4 or width < 8):
        raise InputError(f"ViT: pos_embed='sincos2d' needs an embed_dim of 8 or more, by 4 divisible, got {width}")
    if config["swiglu_mlp"] and config["act_layer"] not in ("gelu", "silu"):  # timm's default, which says nothing
        raise InputError(f"ViT: swiglu_mlp=True has the activation 'silu', got act_layer={config['act_layer']!r}")
    if config["global_pool"] == "token" and not config["class_token"]:
        raise InputError("ViT: global_pool='token' needs class_token=True; without a class token use global_pool='avg'")
    _check_rope(config)
    if int(width * config["mlp_ratio"]) < 1:
        raise InputError(f"ViT: mlp_ratio must leave the MLP a width, got {config['mlp_ratio']} of {width}")
    for name in ("mean", "std"):
        config[name] = _per_channel(name, config[name], config["in_chans"])
    if (count := _parameters(config)) > MOST_PARAMETERS:
        sizes = ", ".join(f"{name}={config[name]}" for name in ("embed_dim", "depth", "patch_size", "img_size"))
        limit = f"at most {MOST_PARAMETERS:.0e} parameters, these would be {count:.0e}"
        raise InputError(f"ViT: the sizes must leave {limit} ({sizes}, ...)")
    return config if names is None else config | {"class_names": class_names(names, config["num_classes"])}


def _check_rope(config: dict) -> None:
    """Raises InputError for rotary positions that cannot be."""
    if config["rope"] is None:
        for name in ("rope_temperature", "ref_feat_shape"):
            if config[name] is not None:
                raise InputError(f"ViT: {name} is for a rope, got {name}={config[name]!r} with rope=None")
        return
    if (head := config["embed_dim"] // config["num_heads"]) % 4:
        raise InputError(f"ViT: rope={config['rope']!r} needs a head size by 4 divisible, got {head}")
    if config["pos_embed"] == "relative":
        raise InputError(f"ViT: pos_embed='relative' has no rope beside it, got rope={config['rope']!r}")
    if config["ref_feat_shape"] is not None and config["rope"] != "cat":
        raise InputError(f"ViT: ref_feat_shape is for rope='cat', got rope={config['rope']!r}")


def _per_channel(name: str, value: float | tuple[float, ...], chans: int) -> tuple[float, ...]:
    values = value if isinstance(value, tuple) else (value,)
    if len(values) not in (1, chans):
        raise InputError(f"ViT: {name} must be one number or one for each of the {chans} channels, got {len(values)}")
    return values * (chans // len(values))


def _parameters(config: dict) -> int:
    """How many numbers the model holds, but for biases, norms and a hybrid's CNN."""
    width, depth, classes = config["embed_dim"], config["depth"], config["num_classes"]
    (h, w), (p, q) = (2 * (s,) if isinstance(s, int) else s for s in (config["img_size"], config["patch_size"]))
    hidden, pre_logits = int(width * config["mlp_ratio"]), config["representation_size"] or 0
    tables = depth if config["pos_embed_at"] == "layers" or config["pos_embed"] == "relative" else 1
    rows = config["in_chans"] * p * q + config["reg_tokens"] + tables * math.ceil(h / p) * math.ceil(w / q) + pre_logits
    matrices = 3 if config["swiglu_mlp"] else 2
    return width * (rows + depth * (4 * width + matrices * hidden)) + (pre_logits or width) * classes


def class_names(names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """The names of the classes, in the order of the logits. Raises InputError unless each class has one."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputError(f"ViT: class_names must be a list of strings, got {shown(names)}")
    if len(names) != num_classes:
        raise InputError(f"ViT: class_names must name each of the {num_classes} classes, got {len(names)} names")
    return tuple(names)


def checked_images(images: Tensor, chans: int, size: tuple[int, int] | None) -> Tensor:
    """The images; raises ValueError unless they are (B, chans, *size). size None leaves it open."""
    if isinstance(images, (list, tuple)):
        raise TypeError("ViT: images must be one (B, C, H, W) tensor here; a list is for forward and forward_features")
    if not hasattr(images, "dim"):  # of a tensor, or of what FX traces
        got = type(images).__name__
        raise TypeError(f"ViT: images must be a tensor (B, C, H, W) or a list of (C, H, W), got {got}")
    if torch.jit.is_tracing():
        raise NotImplementedError("ViT: torch.jit.trace cannot record it; torch.export.export and `vitfast export` can")
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
