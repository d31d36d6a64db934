"""Infers a ViT's constructor arguments from a checkpoint's tensor shapes, JSON and format."""

import math
import re
from collections.abc import Mapping

from torch import Tensor

from ...errors import InputError
from .. import config as arguments
from ..presets import PRESETS, ROOT, pair, reduction, shorthand
from . import hugging_face, timm
from .files import CheckpointFiles
from .formats import HALF, UNSURE, Checkpoint
from .json_fields import CONFIG, class_names, refuse_unknown

_OURS = ("library", "library_version", "architecture", "class_names")  # our config.json has these besides ARGUMENTS
_TIMM = {"architecture", "pretrained_cfg"}  # timm's config.json has at least one of these
# Arguments that the tensors fix. Two values of an argument agree if its function maps both to the same.
_EXACT = """
    in_chans embed_dim depth num_heads class_token reg_tokens no_embed_class fc_norm representation_size
    swiglu_mlp scale_mlp_norm qk_norm norm_layer pre_norm num_classes
""".split()
FIXED = dict.fromkeys(_EXACT, lambda value: value) | dict.fromkeys(("qkv_bias", "proj_bias", "init_values"), bool)
FIXED |= {"patch_size": pair, "pos_embed": lambda kind: {"sincos2d": "learn", "": "none"}.get(kind, kind)}


def disagreeing(args: Mapping, config: Mapping) -> list[str]:
    """Returns the names in `args` whose values do not fit the tensors of a model with this `config`."""
    canonical = FIXED | {"mlp_ratio": lambda ratio: int(config["embed_dim"] * ratio)}
    names = [name for name in args if name in canonical and not (name == "fc_norm" and args[name] is None)]
    return [name for name in names if canonical[name](args[name]) != canonical[name](config.get(name))]


# The shapes show only a part of these: whether a model has a LayerScale, for example, but not its initial value.
_IN_PART = ("global_pool", "init_values", "pos_embed")


def infer(checkpoint: Checkpoint, files: CheckpointFiles, caller_args: Mapping) -> tuple[dict, list[str]]:
    """Returns the constructor arguments of a checkpoint's model, and notes for the log.

    A note names what had to be assumed, or a field of the JSON that is not taken over. caller_args: the caller's
    constructor arguments, which supply `num_heads` and `img_size` and settle doubts where nothing else does. A
    config.json of vitfast's own is taken as it is. Raises InputError for a model that computes something else than the
    ViT, and for an argument that stays open, which the error names.
    """
    form, shapes = checkpoint.form, _from_shapes(checkpoint.state)
    config, where = (files.config, CONFIG) if files.config else (checkpoint.training, timm.ARGS)
    json_args, notes = read_json(config, where)
    if config.get("library") == "vitfast":
        _check(json_args, shapes)
        return json_args, []
    if form_name := json_args.pop("form", None):
        if form_name != form.name:
            says = f"config.json says model_type {config['model_type']!r}"
            raise InputError(f"{says}, the tensors are those of {form.name}")
        json_args = {name: form.defaults[name] for name in ("act_layer", "norm_eps")} | json_args
    elif config and shapes["fc_norm"] and "fc_norm" not in json_args and json_args["global_pool"] != "avg":
        says = f"{where} says nothing of fc_norm, which the tensors have, with global_pool={json_args['global_pool']!r}"
        raise InputError(f"{says}; put global_pool and fc_norm there, as timm made the model")
    _check_table(checkpoint, json_args, caller_args)
    if not config and (doubt := checkpoint.doubt(caller_args)):
        raise InputError(doubt)
    pixels = _pixels(json_args, hugging_face.statistics(files.preprocessor), shapes["in_chans"], where)
    json_args = {name: value for name, value in json_args.items() if name not in ("mean", "std")} | pixels
    cut, more = hugging_face.crop(files.preprocessor)
    json_args, notes = json_args | cut, notes + more
    sizes = {name: json_args.pop(name) for name in ("img_size", "input_size") if name in json_args}
    _check(json_args, shapes, json_args.pop("hidden", None), where)
    defaults = form.defaults if shapes["in_chans"] == 3 else form.defaults | HALF
    if shapes["pre_norm"] or caller_args.get("rope") == "dinov3":  # CLIP's and DINOv3's eps, if nothing says it
        defaults = defaults | dict(norm_eps=1e-5)
    args = defaults | shapes | checkpoint.facts
    args |= {name: value for name, value in json_args.items() if name not in shapes or name in _IN_PART}
    positions, assumed, remark = _positions(checkpoint, args, sizes, caller_args, where)
    args |= positions
    if args["swiglu_mlp"] and json_args.get("act_layer") not in (None, "silu"):
        raise InputError(f"{where} says act_layer={json_args['act_layer']!r}, and the ViT's gated MLP has only 'silu'")
    args["num_heads"] = args.get("num_heads") or caller_args.get("num_heads") or _preset_heads(args)
    stated = {*checkpoint.facts, *json_args, *caller_args, *(["num_heads"] if "num_heads" in shapes else [])}
    if assumed := assumed + [name for name in form.assumed if name not in stated]:
        values = ", ".join(f"{name}={args[name]!r}" for name in assumed)
        notes.append(f"the weights do not say {values}: assumed{remark}; pass those that differ")
    names, more = class_names(config, shapes["num_classes"])
    return args | ({"class_names": names} if names else {}), notes + more


def read_json(config: dict, where: str = CONFIG) -> tuple[dict, list[str]]:
    """Returns the constructor arguments that a config.json states, and notes for the log.

    For Hugging Face's config.json, the arguments include `form`, the name of its tensors' format. Raises InputError if
    no known library wrote it, or if its model computes something else than the ViT.
    """
    if config.get("library") == "vitfast":
        refuse_unknown(config, {*_OURS, *arguments.ARGUMENTS}, CONFIG, "use the vitfast that wrote it")
        if lacks := next((name for name in arguments.ARGUMENTS if name not in config), None):
            raise InputError(f"config.json lacks {lacks}; copy the folder again")
        args = {name: arguments.read(name, config[name], f"config.json: {name}") for name in arguments.ARGUMENTS}
        return args | {name: config[name] for name in ("class_names",) if config.get(name) is not None}, []
    if _TIMM & config.keys():
        return timm.constructor_args(config, where)
    if "model_type" in config:
        return hugging_face.constructor_args(config)
    if config:
        says = "config.json says neither library (vitfast's), architecture (timm's) nor model_type (Hugging Face's)"
        raise InputError(f"{says}; mend or remove it")
    return {}, []


def _check_table(checkpoint: Checkpoint, json_args: dict, caller_args: Mapping) -> None:
    """Raises InputError if a position table is missing, and nothing says that the model has none."""
    form, absent = checkpoint.form, "there is no position table"
    has_table = checkpoint.facts.get("pos_embed") or any(name in checkpoint.state for name in _TABLES)
    rotary = json_args.get("rope") and json_args.get("pos_embed") == "none"
    if has_table or rotary or form.defaults.get("rope") or caller_args.get("rope"):
        return
    if form.name not in UNSURE:
        raise InputError(f"{absent}, and a {form.name} always has one; export it again")
    if json_args.get("pos_embed") in ("none", "") or caller_args.get("pos_embed") in ("none", ""):
        return
    if json_args:
        raise InputError(f"{absent}; export it again, or pass pos_embed='none' for a model without")
    advice = "pass rope='dinov3' for DINOv3; where there are none, pass pos_embed='none'"
    raise InputError(f"{absent}, as in models with rotary positions: {advice}")


def _pixels(json_args: dict, preprocessor: dict, chans: int, where: str) -> dict:
    """Returns `mean` and `std` if the JSON has them; preprocessor_config.json wins over config.json.

    Three values for a model that does not have three channels are defaults of the library that wrote them, and are
    left out. Raises InputError for any other number of values than 1 or one for each channel.
    """
    pixels = {}
    for name in ("mean", "std"):
        value, field = json_args.get(name), f"{where}: {name}"
        if preprocessor[name] is not None:
            value, field = preprocessor[name], f"preprocessor_config.json: image_{name}"
        count = len(value) if isinstance(value, tuple) else 1
        if count not in (1, 3, chans):
            raise InputError(f"{field} must be one number or one for each of the {chans} channels, got {count}")
        pixels |= {name: value} if value is not None and count in (1, chans) else {}
    return pixels


def _check(json_args: dict, shapes: dict, hidden: int | None = None, where: str = CONFIG) -> None:
    """Raises InputError where the JSON and the tensors disagree.

    hidden: the width of the MLP, None where the JSON does not say it.
    """
    says = [f"{k}={json_args[k]}, the tensors {k}={shapes[k]}" for k in disagreeing(json_args, shapes) if k in shapes]
    ours = int(shapes["embed_dim"] * shapes["mlp_ratio"])
    says += [f"intermediate_size={hidden}, the tensors {ours}"] if hidden not in (None, ours) else []
    if says:
        raise InputError(f"{where} says {says[0]}; one of the two is of another model")


# The tensors that are position tables, and the `pos_embed` of a model that has one.
_TABLES = {"pos_embed": "learn", "pos_embed_x": "learn2d", "pos_embed_rel": "relative"}


def _from_shapes(state: dict[str, Tensor]) -> dict:
    """Returns the constructor arguments that follow from the names and shapes of the tensors."""
    dim, chans, *patch = state["patch_embed.proj.weight"].shape
    root, hybrid = state.get("patch_embed.backbone.stem.conv.weight"), {}
    if root is not None:
        unit = re.compile(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.")
        units = {match.groups() for match in map(unit.match, state) if match}
        stages = [int(stage) for stage, _ in units]
        chans, layers = root.shape[1], [stages.count(i) for i in range(1 + max(stages, default=0))]
        patch = [side * reduction(layers) for side in patch]
        hybrid = dict(backbone=shorthand(layers, root.shape[0] / ROOT, patch[0]))
    kind = next((kind for name, kind in _TABLES.items() if name in state), "none")
    if kind == "learn2d" and state["pos_embed_x"].shape[-1] == dim:  # both tables have the whole width and are added
        kind = "factorized"
    tokens = {name: state[name].shape[1] for name in ("cls_token", "reg_token") if name in state}
    pre_logits, head = state.get("pre_logits.fc.weight"), state.get("head.weight")
    fc_norm = "fc_norm.weight" in state
    pooled = "avg" if fc_norm or "cls_token" not in tokens else "token"
    rows, hidden = len(state["blocks.0.mlp.fc1.weight"]), state["blocks.0.mlp.fc2.weight"].shape[1]
    head_widths = [state[name].shape[-1] for name in ("pos_embed_rel", "blocks.0.attn.q_norm.weight") if name in state]
    heads = {"num_heads": dim // head_widths[0]} if head_widths and head_widths[0] < dim else {}
    return dict(
        embed_dim=dim,
        in_chans=chans,
        patch_size=patch[0] if patch[0] == patch[1] else tuple(patch),
        depth=1 + max(int(m[1]) for k in state if (m := re.match(r"blocks\.(\d+)\.", k))),
        mlp_ratio=timm.ratio_of(hidden, dim),
        swiglu_mlp=rows == 2 * hidden,
        scale_mlp_norm="blocks.0.mlp.norm.weight" in state,
        qk_norm="blocks.0.attn.q_norm.weight" in state,
        norm_layer="layernorm" if "blocks.0.norm1.bias" in state else "rmsnorm",
        pre_norm="norm_pre.weight" in state,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        proj_bias="blocks.0.attn.proj.bias" in state,
        init_values=1e-5 if "blocks.0.ls1.gamma" in state else None,
        class_token="cls_token" in tokens,
        reg_tokens=tokens.get("reg_token", 0),
        pos_embed=kind,
        num_classes=0 if head is None else head.shape[0],
        representation_size=None if pre_logits is None else pre_logits.shape[0],
        global_pool="map" if "attn_pool.latent" in state else pooled,
        fc_norm=fc_norm,
        **hybrid,
        **heads,
    )


def _positions(
    checkpoint: Checkpoint, config: dict, json_sizes: dict, caller_args: Mapping, where: str
) -> tuple[dict, list[str], str]:
    """Returns the tables' `img_size` and `no_embed_class`, which of them are assumed, and a remark.

    The entries of a table may belong to the prefix tokens and an (h, w) grid of patches, or to the patches alone
    (`no_embed_class`): each is a reading of the table. The reading that fits the size in config.json is taken; else the
    one that fits the caller's `img_size` exactly; else that of a square grid. The remark names the readings that were
    rejected although they fit. json_sizes: `img_size` of the model or `input_size` of its images, if config.json has
    them. Raises InputError where no reading fits, or more than one.
    """
    sizes = (json_sizes.get("img_size"), json_sizes.get("input_size"), caller_args.get("img_size"))
    model_size, input_size, caller_size = (pair(size) if size else None for size in sizes)
    (p, q), size = pair(config["patch_size"]), model_size or input_size
    kind = next((name for name in _TABLES if name in checkpoint.state), None)
    if kind is None:
        return dict(img_size=size or caller_size or 224), [] if size or caller_size else ["img_size"], ""
    length, prefix = checkpoint.state[kind].shape[1], int(config["class_token"]) + config["reg_tokens"]
    if kind == "pos_embed_x":
        return dict(img_size=(checkpoint.state["pos_embed_y"].shape[1] * p, length * q)), [], ""
    patches = {False: length - prefix, True: length}  # their number, by no_embed_class
    if kind == "pos_embed_rel" or not prefix:
        patches, prefix = {False: length if kind == "pos_embed" else (length + 1) // 2}, 0
    no_embed_class = caller_args.get("no_embed_class", None if checkpoint.form.name == "timm" else False)  # None: open
    no_embed_class = config.get("no_embed_class", no_embed_class)
    patches = {alone: n for alone, n in patches.items() if no_embed_class in (None, alone) or not prefix}

    def fit(size: tuple[int, int] | None) -> list[tuple[int, int, bool]]:
        grid = (size[0] // p, size[1] // q) if size else ()
        return [(*grid, alone) for alone, n in patches.items() if grid and n == math.prod(grid)]

    def either(readings: list[tuple[int, int, bool]]) -> str:
        text = "{} x {} + {} (img_size=({}, {}), no_embed_class={})"
        return " or ".join(text.format(h, w, prefix * (not a), h * p, w * q, a) for h, w, a in readings)

    by_json = fit(size)
    by_caller = [] if by_json or model_size else fit(caller_size)
    near = [(*grid, alone) for alone, n in patches.items() if (grid := _nearest_square(n))]
    squares = [(h, w, alone) for h, w, alone in near if h == w]
    usual = [(h, w, alone) for h, w, alone in squares if not alone]
    fits = by_json or by_caller + (usual if by_caller and by_caller[0][2] else []) or (squares if usual else near)
    table = f"a position table of {length} entries is"
    if model_size and not by_json:
        raise InputError(f"{where} says images of {model_size[0]} x {model_size[1]}, and {table} not theirs")
    if len(fits) != 1 or not (by_json or by_caller or fits[0][0] == fits[0][1]):
        says = f"{either(fits)}; pass those" if len(fits) > 1 else "no square grid; pass img_size=(height, width)"
        raise InputError(f"{table} {says} of the checkpoint (vitfast convert has --img-size)")
    ((h, w, alone),) = fits
    img_size = h * p, w * q
    if by_json and not caller_size and img_size != size:
        cut = f"patches of {p} x {q} leave the last rows of images of {size[0]} x {size[1]} out"
        raise InputError(f"{cut}; cut the images yourself and pass img_size=({h * p}, {w * q})")
    sure = by_json or (by_caller and {*near} <= {*fits})
    assumed = [] if sure else ["img_size", "no_embed_class"] if prefix and no_embed_class is None else ["img_size"]
    rivals = [reading for reading in near if reading not in fits]
    remark = f" (the position table may also be {either(rivals)})" if assumed and rivals else ""
    return dict(img_size=img_size[0] if img_size[0] == img_size[1] else img_size, no_embed_class=alone), assumed, remark


def _nearest_square(count: int) -> tuple[int, int] | None:
    """Returns the grid (h, w) of so many patches nearest to a square; None if its w exceeds 4 h."""
    h = next((h for h in range(math.isqrt(max(0, count)), 0, -1) if count % h == 0), 0)
    return (h, count // h) if h and count <= 4 * h * h else None


def _preset_heads(config: dict) -> int:
    """Returns the heads of the preset of this width and depth, if possible of this family and patch."""
    dim, depth, unstated = config["embed_dim"], config["depth"], "the weights do not say how many heads there are"
    kinds = ("rope", "swiglu_mlp", "pre_norm"), ("patch_size",)
    matches = {
        name: [all(fields.get(field) == (config.get(field) or None) for field in kind) for kind in kinds]
        for name, fields in PRESETS.items()
        if (fields["embed_dim"], fields["depth"]) == (dim, depth)
    }
    if not matches:
        raise InputError(f"{unstated}, and no preset has embed_dim={dim}, depth={depth}; pass num_heads=")
    best = max(matches.values())
    heads = {PRESETS[name]["num_heads"]: name for name, likeness in matches.items() if likeness == best}
    if len(heads) > 1 and best[1]:
        both = " or ".join(f"num_heads={count} ({name})" for count, name in heads.items())
        raise InputError(f"{unstated}; pass {both} (vitfast convert has --num-heads)")
    return next(iter(heads))
