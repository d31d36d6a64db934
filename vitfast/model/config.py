"""The arguments of a ViT, each with meaning and values; checks of sizes. No PyTorch."""

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from itertools import zip_longest
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from ..errors import LEAST_STD, MOST_PIXEL, Activation, InputError
from .checks import Check, each_channel, enforce, flag, number, one_of, one_or_some, only, optional, some, whole

Keep = Literal["auto", "all", "least"]  # see activation_memory.py
Pool = Literal["token", "avg", "map", ""]
PosEmbed = Literal["learn", "learn2d", "factorized", "sincos2d", "relative", "none", ""]  # see positions.py
PosEmbedPlace = Literal["stem", "layers", "layers_shared"]
Resample = Literal["bicubic_antialias", "bicubic", "bilinear_antialias"]  # the filters of F.interpolate
Rope = Literal["dinov3", "cat"]  # timm's
CropMode = Literal["center", "squash", "border"]  # timm's
Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # Pillow's, by its numbers
WeightInit = Literal["", "jax", "jax_nlhb", "moco", "reset", "skip"]  # timm's
NormLayer = Literal["layernorm", "rmsnorm"]  # timm's
DropPathMode = Literal["mask", "subset"]
KEEPS, POOLS, ACTIVATIONS, INTERPOLATIONS = map(get_args, (Keep, Pool, Activation, Interpolation))
ROPES = {"dinov3": 100.0, "cat": 10_000.0}  # the temperatures of rotary positions
LEAST_CROP = 0.1  # images are resized to 1 / crop_pct of what is cut out
FLOAT32 = 3.4028234e38  # the largest that float32 holds, rounded down

SIDE = whole(1, 2**16)
SIZE = one_or_some(SIDE, range(2, 3), "a whole number of pixels up to 65536, or two: (height, width)")
ANY = number(f"a number from {-FLOAT32:.1e} to {FLOAT32:.1e}", lambda x: abs(x) <= FLOAT32)
NOT_NEGATIVE = number(f"a number from 0 to {FLOAT32:.1e}", lambda x: 0 <= x <= FLOAT32)
PIXEL = number("", lambda x: abs(x) <= MOST_PIXEL)
SPREAD = number("", lambda x: LEAST_STD <= x <= MOST_PIXEL)
POSITIVE = number("positive", lambda x: x > 0)
RATE = number("a number from 0 to 1", lambda x: 0 <= x <= 1)


def _strings(value: Sequence[str]) -> tuple[str, ...]:
    names = only(value, isinstance(value, Sequence) and not isinstance(value, str))
    return tuple(only(name, isinstance(name, str)) for name in names)


CLASS_NAMES = Check("a list of strings", _strings)
_BACKBONE = {
    "layers": some(whole(1, 1000), range(1, 5), ""),
    "width": number("", lambda x: 0 < x <= 16),
    "eps": number("", lambda x: x >= 0),
}


def _stages(value: str | dict) -> str | dict:
    """A hybrid's backbone, its types and bounds checked; hybrid.py checks whether it fits the patches."""
    if isinstance(value, str):
        return value
    only(value, isinstance(value, dict) and "layers" in value and value.keys() <= _BACKBONE.keys())
    return {name: _BACKBONE[name](part) for name, part in value.items()}


STAGES = Check(
    "a name, or a dict with layers (the units of one to 4 stages) and, if you like, width (to 16) and eps", _stages
)


def argument(default, text: str, check: Check | None = None) -> Any:
    """A field of ViTConfig: its default, what it means, and its values where its type leaves them open."""
    return field(default=default, metadata=dict(text=text, check=check))


@dataclass(frozen=True)
class ViTConfig:
    """The arguments of a ViT, in timm's names. Raises InputError for values that no ViT can have."""

    img_size: int | tuple[int, int] = argument(224, "pixels of the images, or (height, width)", SIZE)
    patch_size: int | tuple[int, int] = argument(16, "pixels of a patch, or (height, width)", SIZE)
    in_chans: int = argument(3, "channels of the images, C", whole(1, 2**16))
    num_classes: int = argument(1000, "outputs of the head; 0 for no head", whole(0, 2**24))
    global_pool: Pool = argument(
        "token",
        'what the head sees: "token", the class token; "avg", the mean of the patches, normalised after pooling unless'
        ' `fc_norm` says otherwise; "map", attention of one learned query and an MLP; "", every token',
    )
    embed_dim: int = argument(768, "the width D of a token", whole(1, 2**17))
    depth: int = argument(12, "encoder layers", whole(1, 1000))
    num_heads: int = argument(12, "heads H of the attention, which divide D", whole(1, 2**17))
    mlp_ratio: float = argument(
        4.0, "the MLP's hidden width over D", number("a positive number up to 65536", lambda x: 0 < x <= 2**16)
    )
    qkv_bias: bool = argument(True, "a bias of queries, keys and values")
    proj_bias: bool = argument(True, "biases of the other linear layers of a block")
    init_values: float | None = argument(None, "LayerScale's start value; None for none", NOT_NEGATIVE)
    class_token: bool = argument(True, "a learned token before the patches")
    pos_embed: PosEmbed = argument(
        "learn",
        'positions: "learn" (1-D), "learn2d" (tables of columns and rows, joined; patches only), "factorized" (both'
        ' added, as in NaViT), "relative" (1-D, in each layer\'s attention, which PyTorch computes), "sincos2d" (fixed)'
        ' or "none"',
    )
    no_embed_class: bool = argument(False, "positions are for patches only")
    reg_tokens: int = argument(0, "register tokens, between the class token and the patches", whole(0, 2**16))
    fc_norm: bool | None = argument(None, 'the last norm comes after pooling; None: only with "avg"')
    dynamic_img_size: bool = argument(False, "take images of any size that the patch divides")
    drop_rate: float = argument(0.0, "dropout before the head", RATE)
    pos_drop_rate: float = argument(0.0, "dropout of the embedded tokens, one of the two kinds in the paper", RATE)
    proj_drop_rate: float = argument(0.0, "dropout after the linear layers of a block, the paper's other kind", RATE)
    drop_path_rate: float = argument(
        0.0, "stochastic depth in the last block; it rises linearly from 0 in the first", RATE
    )
    weight_init: WeightInit = argument("", "timm's mode of initialisation")
    head_init_bias: float | None = argument(None, "the head's bias at the start; None: by weight_init", ANY)
    representation_size: int | None = argument(
        None, "width of the tanh layer of the pre-training head; None for none", whole(1, 2**17)
    )
    act_layer: Activation = argument("gelu", 'the MLP\'s activation; "gelu" is the one with erf')
    norm_eps: float = argument(1e-6, "epsilon of the norms", NOT_NEGATIVE)
    mean: float | Sequence[float] = argument(
        0.5,
        "the mean of raw uint8 images, on the 0..1 scale",
        each_channel(PIXEL, f"one number or one for each channel, from {-MOST_PIXEL:g} to {MOST_PIXEL:g}"),
    )
    std: float | Sequence[float] = argument(
        0.5,
        "the standard deviation of raw uint8 images, on the 0..1 scale",
        each_channel(SPREAD, f"positive, one number or one for each channel, from {LEAST_STD:g} to {MOST_PIXEL:g}"),
    )
    residual_in_fp32: bool = argument(False, "keep the residual stream in fp32 when the matrix products run in 16 bits")
    pos_embed_at: PosEmbedPlace = argument(
        "stem",
        'where learned positions are added: "stem" (once), "layers" (before each layer, with a table for each) or'
        ' "layers_shared" (before each layer, with one table); dropout follows only the first',
    )
    backbone: str | dict | None = argument(
        None, 'the CNN of a hybrid, "r50" or what `hybrid.HybridEmbed` says; None for a ViT', STAGES
    )
    crop_mode: CropMode | None = argument(None, "how evaluations cut images, in timm's words; None if unknown")
    crop_pct: float | None = argument(
        None,
        "the share of a side that evaluations keep; None if unknown",
        number(f"a number from {LEAST_CROP} to 1", lambda x: LEAST_CROP <= x <= 1),
    )
    interpolation: Interpolation | None = argument(
        None, "the filter of Pillow with which evaluations resize; None if unknown"
    )
    keep: Keep = argument("auto", "what blocks keep for backward, see `set_keep`; not in `config`")
    class_names: Sequence[str] | None = argument(
        None, "names of the classes, in the order of the logits; None if unknown", CLASS_NAMES
    )
    norm_layer: NormLayer = argument("layernorm", "the class of the norms")
    drop_path_mode: DropPathMode = argument(
        "mask",
        'stochastic depth: "mask" computes all images and drops some; "subset" computes only those that are kept, a'
        " fixed share (DINOv2)",
    )
    pre_norm: bool = argument(False, "a norm before the blocks, and no bias in the patch projection (CLIP)")
    qk_norm: bool = argument(False, "norms of q and k, over each head")
    swiglu_mlp: bool = argument(
        False, "MLPs are gated by SiLU; gate and up are each mlp_ratio * D wide; act_layer then acts only in a MAP head"
    )
    scale_mlp_norm: bool = argument(False, "a norm before the MLP's last layer (EVA-02)")
    rope: Rope | None = argument(
        None,
        'rotary positions of the patches, with or without `pos_embed`: "dinov3" (coordinates from -1 to 1 at any image'
        ' size; pairs are halves of a head) or "cat" (EVA: coordinates count patches; pairs are neighbouring columns)',
    )
    rope_temperature: float | None = argument(
        None,
        "the base of the rotary periods; None: 100 for dinov3 and 10,000 for cat",
        number("a number from 1 to 1e9", lambda x: 1 <= x <= 1e9),
    )
    ref_feat_shape: tuple[int, int] | None = argument(
        None,
        'for rope="cat": the grid of patches (down, across) to which coordinates are scaled; (16, 16) in EVA-02; None:'
        " the grid of the image",
        some(SIDE, range(2, 3), "two whole numbers of patches: (down, across)"),
    )
    pos_resample: Resample = argument(
        "bicubic_antialias",
        'how positions are resampled for another grid: "bicubic_antialias" as timm does, "bicubic" as transformers does'
        ' (ViT, DeiT, DINOv2 without registers, CLIP, SigLIP), "bilinear_antialias" as SigLIP 2 does',
    )

    def __post_init__(self):
        for name, check in CHECKS.items():
            object.__setattr__(self, name, enforce(check, getattr(self, name), f"ViT: {name}"))
        for name in ("mean", "std"):
            value, chans = getattr(self, name), self.in_chans
            value = value if isinstance(value, tuple) else (value,)
            if len(value) not in (1, chans):
                wanted = f"one number or one for each of the {chans} channels"
                raise InputError(f"ViT: {name} must be {wanted}, got {len(value)}")
            object.__setattr__(self, name, value * (chans // len(value)))
        self._check_together()
        if self.class_names is not None:
            object.__setattr__(self, "class_names", class_names(self.class_names, self.num_classes))

    def _check_together(self) -> None:
        """Raises InputError for arguments that do not go together, before anything is allocated."""
        width, heads, kind = self.embed_dim, self.num_heads, self.pos_embed
        if width % heads:
            raise InputError(f"ViT: embed_dim must be a multiple of num_heads, got {width} and {heads}")
        if self.pos_embed_at != "stem" and kind not in ("learn", "learn2d", "factorized"):
            place = f"pos_embed_at={self.pos_embed_at!r} is for pos_embed='learn', 'learn2d' or 'factorized'"
            raise InputError(f"ViT: {place}, got pos_embed={kind!r}")
        if kind == "learn2d" and width % 2:
            raise InputError(f"ViT: pos_embed='learn2d' joins two halves, so embed_dim must be even, got {width}")
        if kind == "sincos2d" and (width % 4 or width < 8):
            raise InputError(f"ViT: pos_embed='sincos2d' needs an embed_dim of 8 or more, by 4 divisible, got {width}")
        if self.swiglu_mlp and self.act_layer not in ("gelu", "silu"):  # "gelu" is timm's default and says nothing
            raise InputError(f"ViT: swiglu_mlp=True has the activation 'silu', got act_layer={self.act_layer!r}")
        if self.global_pool == "token" and not self.class_token:
            without = "without a class token use global_pool='avg'"
            raise InputError(f"ViT: global_pool='token' needs class_token=True; {without}")
        self._check_rope()
        if int(width * self.mlp_ratio) < 1:
            raise InputError(f"ViT: mlp_ratio must leave the MLP a width, got {self.mlp_ratio} of {width}")

    def _check_rope(self) -> None:
        """Raises InputError for rotary positions that no ViT can have."""
        if self.rope is None:
            for name in ("rope_temperature", "ref_feat_shape"):
                if getattr(self, name) is not None:
                    raise InputError(f"ViT: {name} is for a rope, got {name}={getattr(self, name)!r} with rope=None")
            return
        if (head := self.embed_dim // self.num_heads) % 4:
            raise InputError(f"ViT: rope={self.rope!r} needs a head size by 4 divisible, got {head}")
        if self.pos_embed == "relative":
            raise InputError(f"ViT: pos_embed='relative' has no rope beside it, got rope={self.rope!r}")
        if self.ref_feat_shape is not None and self.rope != "cat":
            raise InputError(f"ViT: ref_feat_shape is for rope='cat', got rope={self.rope!r}")

    @classmethod
    def of(cls, variables: dict) -> "ViTConfig":
        """Makes one of a constructor's local variables."""
        return cls(**{f.name: variables[f.name] for f in fields(cls)})

    def as_dict(self) -> dict:
        """The arguments as `ViT.config` has them: without `keep`, and with class_names only if there are any."""
        names = {} if self.class_names is None else {"class_names": self.class_names}
        return {name: getattr(self, name) for name in ARGUMENTS} | names

    @staticmethod
    def documentation() -> str:
        """A table of the arguments: name, type, default, and meaning with the range of values."""
        lines = [_row("argument", "type", "default", "meaning"), ""]
        for f in fields(ViTConfig):
            check = check_of(f).text
            type_says_it = "True or False" in check or "one of" in check or "a list of" in check
            limits = re.sub("^(None or )?(a (whole )?number from )?", "", check)
            meaning = f.metadata["text"] if type_says_it else f"{f.metadata['text']} ({limits})"
            lines.append(_row(f.name, type_name(f.type), repr(f.default), meaning))
        return "\n".join(lines)


def type_name(annotation) -> str:
    """An annotation as it is written in code; for a Literal, its choices."""
    if isinstance(annotation, type) and not get_args(annotation):
        return "None" if annotation is type(None) else annotation.__name__
    if get_origin(annotation) is Literal:
        return " | ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(type_name, get_args(annotation)))
    return f"{get_origin(annotation).__name__}[{', '.join(map(type_name, get_args(annotation)))}]"


def _row(*cells: str) -> str:
    """A row of a table whose cells are as many lines high as they need."""
    columns = [textwrap.wrap(cell, width, break_long_words=False) for cell, width in zip(cells, (19, 22, 19, 55))]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join("{:<20}{:<24}{:<21}{}".format(*row).rstrip() for row in rows)


P = ParamSpec("P")
Class = TypeVar("Class", bound=type)


def with_arguments_of(config: Callable[P, object]) -> Callable[[Callable], Callable[Concatenate[Any, P], None]]:
    """Gives a constructor the types of the arguments of `config`, which it lists too."""

    def decorate(constructor):
        constructor.__annotations__ = config.__init__.__annotations__
        return constructor

    return decorate


def documented(model: Class) -> Class:
    """Puts a table of the arguments after the first line of a class's documentation."""
    if model.__doc__:  # python -OO strips it
        summary, text = model.__doc__.split("\n", 1)
        model.__doc__ = f"{summary}\n\n{ViTConfig.documentation()}\n{inspect.cleandoc(text)}\n"
    return model


ViTConfig.__init__.__qualname__ = "ViT.__init__"  # the name in Python's error for a wrong call


def check_of(argument: Field) -> Check:
    """The values that a field of ViTConfig may have."""
    kinds = get_args(argument.type) if get_origin(argument.type) in (Union, types.UnionType) else (argument.type,)
    check = argument.metadata["check"] or (flag if bool in kinds else one_of(kinds[0]))
    return optional(check) if type(None) in kinds else check


# The values that each argument may have. `keep` is not in a model's file, and class_names are checked by themselves.
CHECKS = {f.name: check_of(f) for f in fields(ViTConfig) if f.name != "class_names"}
ARGUMENTS = {name: check for name, check in CHECKS.items() if name != "keep"}


def read(name: str, value, called: str = ""):
    """The value of one constructor argument, as Python's own type. Raises InputError for a wrong value.

    called: the name in the message, by default `ViT: {name}`.
    """
    return enforce(CHECKS[name], value, called or f"ViT: {name}")


def checked(config: dict) -> dict:
    """Constructor arguments in Python's own types. Raises InputError for values that no ViT can have."""
    return ViTConfig(**config).as_dict()


def class_names(names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """The names of the classes, in the order of the logits. Raises InputError unless each class has one."""
    names = enforce(CLASS_NAMES, names, "ViT: class_names")
    if len(names) != num_classes:
        raise InputError(f"ViT: class_names must name each of the {num_classes} classes, got {len(names)} names")
    return names


def grid_size(img_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Patches down and across. Raises InputError where the image's size is no multiple of the patch size."""
    (height, width), (p, q) = img_size, patch_size
    if height < p or width < q or height % p or width % q:
        wrong = f"image size {height} x {width} is no multiple of the patch size {p} x {q}"
        near = f"{max(1, round(height / p)) * p} x {max(1, round(width / q)) * q}"
        raise InputError(f"{wrong}; the nearest that fits is {near}")
    return height // p, width // q


def channels_hint(channels: int, chans: int, batched: bool = True) -> str:
    """How to turn images of `channels` channels, (B, C, H, W) or one (C, H, W), into images of `chans`."""
    images, before, kept = ("images", ":, ", "-1, ") if batched else ("image", "", "")
    if channels == 1:
        return f"repeat the grey channel with {images}.expand({kept}{chans}, -1, -1)"
    if channels == chans + 1:
        return f"leave out the last one (alpha) with {images}[{before}:{chans}]"
    if channels == 2:
        return f"of grey and alpha repeat the first, {images}[{before}:1].expand({kept}{chans}, -1, -1)"
    if (channels, chans) == (3, 1):
        return f"make them grey with torchvision.transforms.functional.rgb_to_grayscale({images})"
    return f"choose {chans} of them" if channels > chans else f"give it images of {chans}"


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
