"""Constructor arguments out of a checkpoint: its tensors' shapes, its JSON, its format."""

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
_TIMM = {"architecture", "pretrained_cfg"}  # timm's has one of these
# Arguments that the tensors fix. Two values mean the same if these functions of them are equal.
_EXACT = """
    in_chans embed_dim depth num_heads class_token reg_tokens no_embed_class fc_norm representation_size
    swiglu_mlp scale_mlp_norm qk_norm norm_layer pre_norm num_classes
""".split()
FIXED = dict.fromkeys(_EXACT, lambda value: value) | dict.fromkeys(("qkv_bias", "proj_bias", "init_values"), bool)
FIXED |= {"patch_size": pair, "pos_embed": lambda kind: {"sincos2d": "learn", "": "none"}.get(kind, kind)}


def disagreeing(told: Mapping, config: Mapping) -> list[str]:
    """The arguments in `told` that the tensors of a model with this configuration fix to something else."""
    same = FIXED | {"mlp_ratio": lambda ratio: int(config["embed_dim"] * ratio)}
    asked = [name for name in told if name in same and not (name == "fc_norm" and told[name] is None)]
    return [name for name in asked if same[name](told[name]) != same[name](config.get(name))]


_IN_PART = ("global_pool", "init_values", "pos_embed")  # the shapes show only a part of these


def infer(made: Checkpoint, files: CheckpointFiles, known: Mapping) -> tuple[dict, list[str]]:
    """Constructor arguments of converted tensors, and a line for each thing assumed or not taken over.

    known: the caller's arguments, which fill in `num_heads` and `img_size` or settle doubts that nothing else settles.
    A config.json of ours is taken as it is. Raises InputError for a model that computes something else than the ViT,
    and for an argument that remains open, which it names.
    """
    shapes = _from_shapes(made.state)
    config, where = (files.config, CONFIG) if files.config else (made.training, timm.ARGS)
    told, notes = read_json(config, where)
    if config.get("library") == "vitfast":
        _check(told, shapes)
        return told, []
    if form := told.pop("form", None):
        if form != made.form.name:
            says = f"config.json says model_type {config['model_type']!r}"
            raise InputError(f"{says}, the tensors are those of {made.form.name}")
        left_out = {name: made.form.defaults[name] for name in ("act_layer", "norm_eps")}
        told = left_out | told
    elif config and "fc_norm.weight" in made.state and "fc_norm" not in told and told["global_pool"] != "avg":
        says = f"{where} says nothing of fc_norm, which the tensors have, with global_pool={told['global_pool']!r}"
        raise InputError(f"{says}; put global_pool and fc_norm there, as timm made the model")
    _check_table(made, told, known)
    if not config and (doubt := made.doubt(known)):
        raise InputError(doubt)
    pixels = _pixels(told, hugging_face.statistics(files.preprocessor), shapes["in_chans"], where)
    told = {name: value for name, value in told.items() if name not in ("mean", "std")} | pixels
    cut, more = hugging_face.crop(files.preprocessor)
    told, notes = told | cut, notes + more
    sizes = {name: told.pop(name) for name in ("img_size", "input_size") if name in told}
    _check(told, shapes, told.pop("hidden", None), where)
    defaults = made.form.defaults if shapes["in_chans"] == 3 else made.form.defaults | HALF
    if shapes["pre_norm"] or known.get("rope") == "dinov3":  # CLIP's and DINOv3's eps, if nothing says it
        defaults = defaults | dict(norm_eps=1e-5)
    result = defaults | shapes | made.facts | {k: v for k, v in told.items() if k not in shapes or k in _IN_PART}
    positions, guessed, rivals = _positions(made, result, sizes, known, where)
    result |= positions
    if result["swiglu_mlp"] and told.get("act_layer") not in (None, "silu"):
        raise InputError(f"{where} says act_layer={told['act_layer']!r}, and the ViT's gated MLP has only 'silu'")
    result["num_heads"] = result.get("num_heads") or known.get("num_heads") or _preset_heads(result)
    said = {*made.facts, *told, *known, *(["num_heads"] if "num_heads" in shapes else [])}
    unsaid = guessed + [name for name in made.form.unsaid if name not in said]
    if assumed := [f"{name}={result[name]!r}" for name in unsaid]:
        notes.append(f"the weights do not say {', '.join(assumed)}: assumed{rivals}; pass those that differ")
    names, more = class_names(config, shapes["num_classes"])
    return result | ({"class_names": names} if names else {}), notes + more


def read_json(config: dict, where: str = CONFIG) -> tuple[dict, list[str]]:
    """The constructor arguments in a config.json, and notes.

    From Hugging Face's config.json, the arguments include the `form` of the tensors. Raises InputError for one of an
    unknown library, or of a model that computes something else.
    """
    if config.get("library") == "vitfast":
        refuse_unknown(config, {*_OURS, *arguments.ARGUMENTS}, CONFIG, "use the vitfast that wrote it")
        if lacks := next((name for name in arguments.ARGUMENTS if name not in config), None):
            raise InputError(f"config.json lacks {lacks}; copy the folder again")
        told = {name: arguments.read(name, config[name], f"config.json: {name}") for name in arguments.ARGUMENTS}
        return told | {name: config[name] for name in ("class_names",) if config.get(name) is not None}, []
    if _TIMM & config.keys():
        return timm.told(config, where)
    if "model_type" in config:
        return hugging_face.told(config)
    if config:
        says = "config.json says neither library (vitfast's), architecture (timm's) nor model_type (Hugging Face's)"
        raise InputError(f"{says}; mend or remove it")
    return {}, []


def _check_table(made: Checkpoint, told: dict, known: Mapping) -> None:
    """Raises InputError where there is no position table, and nobody says that the model has none."""
    if made.facts.get("pos_embed") or any(name in made.state for name in _TABLES):
        return
    if made.form.defaults.get("rope") or known.get("rope") or (told.get("rope") and told["pos_embed"] == "none"):
        return
    absent = "there is no position table"
    if made.form.name not in UNSURE:
        raise InputError(f"{absent}, and a {made.form.name} always has one; export it again")
    if told.get("pos_embed") in ("none", "") or known.get("pos_embed") in ("none", ""):
        return
    if told:
        raise InputError(f"{absent}; export it again, or pass pos_embed='none' for a model without")
    advice = "pass rope='dinov3' for DINOv3; where there are none, pass pos_embed='none'"
    raise InputError(f"{absent}, as in models with rotary positions: {advice}")


def _pixels(told: dict, preprocessor: dict, chans: int, where: str) -> dict:
    """`mean` and `std` as far as the JSON says them; those of preprocessor_config.json win.

    Three values for a model of other than three channels are a library's defaults and are left out. Raises InputError
    for any other number of values than 1 or one for each channel.
    """
    found = {}
    for name in ("mean", "std"):
        value, field = told.get(name), f"{where}: {name}"
        if preprocessor[name] is not None:
            value, field = preprocessor[name], f"preprocessor_config.json: image_{name}"
        count = len(value) if isinstance(value, tuple) else 1
        if count not in (1, 3, chans):
            raise InputError(f"{field} must be one number or one for each of the {chans} channels, got {count}")
        found |= {name: value} if value is not None and count in (1, chans) else {}
    return found


def _check(told: dict, shapes: dict, hidden: int | None = None, where: str = CONFIG) -> None:
    """Raises InputError where the JSON and the tensors disagree.

    hidden: the width of the MLP, None where the JSON does not say it.
    """
    says = [f"{k}={told[k]}, the tensors {k}={shapes[k]}" for k in disagreeing(told, shapes) if k in shapes]
    ours = int(shapes["embed_dim"] * shapes["mlp_ratio"])
    says += [f"intermediate_size={hidden}, the tensors {ours}"] if hidden not in (None, ours) else []
    if says:
        raise InputError(f"{where} says {says[0]}; one of the two is of another model")


_TABLES = {"pos_embed": "learn", "pos_embed_x": "learn2d", "pos_embed_rel": "relative"}


def _from_shapes(state: dict[str, Tensor]) -> dict:
    """The arguments that follow from the names and shapes of the tensors."""
    dim, chans, *patch = state["patch_embed.proj.weight"].shape
    root, hybrid = state.get("patch_embed.backbone.stem.conv.weight"), {}
    if root is not None:
        unit = re.compile(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.")
        units = {found.groups() for found in map(unit.match, state) if found}
        stages = [int(stage) for stage, _ in units]
        chans, layers = root.shape[1], [stages.count(i) for i in range(1 + max(stages, default=0))]
        patch = [side * reduction(layers) for side in patch]
        hybrid = dict(backbone=shorthand(layers, root.shape[0] / ROOT, patch[0]))
    kind = next((kind for name, kind in _TABLES.items() if name in state), "none")
    if kind == "learn2d" and state["pos_embed_x"].shape[-1] == dim:  # tables of the whole width, which are added
        kind = "factorized"
    tokens = {name: state[name].shape[1] for name in ("cls_token", "reg_token") if name in state}
    pre_logits, head = state.get("pre_logits.fc.weight"), state.get("head.weight")
    fc_norm = "fc_norm.weight" in state
    pooled = "avg" if fc_norm or "cls_token" not in tokens else "token"
    fc1, hidden = (state[f"blocks.0.mlp.{name}.weight"] for name in ("fc1", "fc2"))
    rows, hidden = fc1.shape[0], hidden.shape[1]
    of_a_head = [state[name].shape[-1] for name in ("pos_embed_rel", "blocks.0.attn.q_norm.weight") if name in state]
    heads = {"num_heads": dim // of_a_head[0]} if of_a_head and of_a_head[0] < dim else {}
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


def _positions(made: Checkpoint, config: dict, told: dict, known: Mapping, where: str) -> tuple[dict, list[str], str]:
    """img_size and no_embed_class of the position tables, the names of those assumed, and other readings.

    told: `img_size` of the model or `input_size` of its images, if config.json has them. A reading of a table is a grid
    (h, w) after a position for each prefix token, or alone (no_embed_class): config.json's; else that of the caller's
    img_size, where it fits exactly; else a square. Raises InputError where none fits, or a second one too.
    """
    sizes = (told.get("img_size"), told.get("input_size"), known.get("img_size"))
    own, meant, asked = (pair(size) if size else None for size in sizes)
    (p, q), size = pair(config["patch_size"]), own or meant
    kind = next((name for name in _TABLES if name in made.state), None)
    if kind is None:
        return dict(img_size=size or asked or 224), [] if size or asked else ["img_size"], ""
    length, prefix = made.state[kind].shape[1], int(config["class_token"]) + config["reg_tokens"]
    if kind == "pos_embed_x":
        return dict(img_size=(made.state["pos_embed_y"].shape[1] * p, length * q)), [], ""
    patches = {False: length - prefix, True: length}  # their number, by no_embed_class
    if kind == "pos_embed_rel" or not prefix:
        patches, prefix = {False: length if kind == "pos_embed" else (length + 1) // 2}, 0
    only = config.get("no_embed_class", known.get("no_embed_class", None if made.form.name == "timm" else False))
    patches = {alone: n for alone, n in patches.items() if only in (None, alone) or not prefix}

    def fit(size: tuple[int, int] | None) -> list[tuple[int, int, bool]]:
        grid = (size[0] // p, size[1] // q) if size else ()
        return [(*grid, alone) for alone, n in patches.items() if grid and n == math.prod(grid)]

    def either(readings: list[tuple[int, int, bool]]) -> str:
        said = "{} x {} + {} (img_size=({}, {}), no_embed_class={})"
        return " or ".join(said.format(h, w, prefix * (not a), h * p, w * q, a) for h, w, a in readings)

    by_json = fit(size)
    by_caller = [] if by_json or own else fit(asked)
    near = [(*grid, alone) for alone, n in patches.items() if (grid := _nearest_square(n))]
    squares = [one for one in near if one[0] == one[1]]
    usual = [one for one in squares if not one[2]]
    fits = by_json or by_caller + (usual if by_caller and by_caller[0][2] else []) or (squares if usual else near)
    table = f"a position table of {length} entries is"
    if own and not by_json:
        raise InputError(f"{where} says images of {own[0]} x {own[1]}, and {table} not theirs")
    if len(fits) != 1 or not (by_json or by_caller or fits[0][0] == fits[0][1]):
        says = f"{either(fits)}; pass those" if len(fits) > 1 else "no square grid; pass img_size=(height, width)"
        raise InputError(f"{table} {says} of the checkpoint (vitfast convert has --img-size)")
    ((h, w, alone),) = fits
    if by_json and not asked and (h * p, w * q) != size:
        cut = f"patches of {p} x {q} leave the last rows of images of {size[0]} x {size[1]} out"
        raise InputError(f"{cut}; cut the images yourself and pass img_size=({h * p}, {w * q})")
    sure = by_json or (by_caller and {*near} <= {*fits})
    names = [] if sure else ["img_size", "no_embed_class"] if prefix and only is None else ["img_size"]
    rivals = [one for one in near if one not in fits]
    told = f" (the position table may also be {either(rivals)})" if names and rivals else ""
    return dict(img_size=h * p if h * p == w * q else (h * p, w * q), no_embed_class=alone), names, told


def _nearest_square(patches: int) -> tuple[int, int] | None:
    """The grid (h, w) of this many patches that is nearest to a square; None beyond 1 to 4."""
    h = next((h for h in range(math.isqrt(max(0, patches)), 0, -1) if patches % h == 0), 0)
    return (h, patches // h) if h and patches <= 4 * h * h else None


def _preset_heads(config: dict) -> int:
    """The head count of the preset with this width and depth, of this family and patch size if there is."""
    dim, depth, unsaid = config["embed_dim"], config["depth"], "the weights do not say how many heads there are"
    kinds = ("rope", "swiglu_mlp", "pre_norm"), ("patch_size",)
    alike = {
        name: [all(made.get(field) == (config.get(field) or None) for field in kind) for kind in kinds]
        for name, made in PRESETS.items()
        if (made["embed_dim"], made["depth"]) == (dim, depth)
    }
    if not alike:
        raise InputError(f"{unsaid}, and no preset has embed_dim={dim}, depth={depth}; pass num_heads=")
    best = max(alike.values())
    heads = {PRESETS[name]["num_heads"]: name for name, likeness in alike.items() if likeness == best}
    if len(heads) > 1 and best[1]:
        both = " or ".join(f"num_heads={count} ({name})" for count, name in heads.items())
        raise InputError(f"{unsaid}; pass {both} (vitfast convert has --num-heads)")
    return next(iter(heads))
