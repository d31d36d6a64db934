"""Reads timm's config.json: which models compute what our ViT does, and with which arguments.

The name of a model in timm stands for arguments that config.json need not repeat. Some of them leave no trace in the
tensors: rotary positions, the activation, where the norms are. So only names of the families listed here are accepted;
any other is refused. The tests compare the logits of every model in timm, listed or not.
"""

import math
import re
from argparse import Namespace

from ...errors import InputError
from ..checks import enforce, shown
from ..config import ACTIVATIONS, ARGUMENTS, POOLS, RATE
from .json_fields import CONFIG, OF_TEXT, read_fields, section

_AVERAGE, _MAP, _SILU = dict(global_pool="avg"), dict(global_pool="map"), dict(act_layer="silu")  # gates have SiLU
_TANH, _CLIP = dict(act_layer="gelu_tanh"), dict(norm_eps=1e-5)
_DINOV3 = dict(rope="dinov3", pos_embed="none", norm_eps=1e-5, dynamic_img_size=True)
_CAT = dict(rope="cat", ref_feat_shape=(16, 16))
GATED_NAME = "vit_giant_patch14_dinov2"
PACKED = "vit_giant_patch14_(dinov2|reg4_dinov2|reg1_tipsv2)"  # names whose mlp_ratio counts gate and up
# Patterns of whole names of models that our ViT computes, and the arguments they stand for beside PLAIN and HEADS. The
# numbers are sizes of patches and images, which tensors and config.json tell too; only whether SigLIP's GELU is exact
# or the tanh one depends on them.
PLAIN = dict(norm_eps=1e-6, act_layer="gelu", global_pool="token")
FAMILIES = {
    r"vit_(fast_)?(tiny|small|base|large|huge|giant|gigantic)_patch\d+_\d+": {},
    r"vit_base_patch16_224_miil|vit_small_patch16_36x1_224|vit_base_patch\d+_plus_\d+": {},
    r"vit_(small|base|large)_r\d+_s\d+_\d+|flexivit_(small|base|large)|test_vit": {},
    r"deit_(tiny|small|base)(_distilled)?_patch16_\d+|deit3_(small|medium|base|large|huge)_patch\d+_\d+": {},
    r"vit_(small|base|large)_patch14_(reg4_)?dinov2|vit_(base|large|so400m)_patch14_reg1_tipsv2": {},
    PACKED: _SILU,
    r"vit_(wee|little|mediumd?|betwixt|base|huge|giant|so150m2?)_patch\d+_(reg\d_)?gap_\d+|test_vit[24]": _AVERAGE,
    r"vit_(mediumd?|betwixt|base)_patch16_rope_reg\d_gap_\d+": _AVERAGE | _CAT | dict(pos_embed="none"),
    r"vit_so150m_patch16_reg4_map_256": _MAP,
    r"vit_(xsmall|medium|betwixt|base|large|huge|giant|gigantic)_patch\d+_(plus_)?clip_\d+": _CLIP,
    r"vit_(base|large|huge|gigantic)_patch\d+_clip_quickgelu_\d+": _CLIP | dict(act_layer="quick_gelu"),
    r"vit_(base_patch16|so400m_patch14)_siglip_\d+|vit_large_patch16_siglip_(256|384)": _MAP,
    r"vit_(base_patch16|so400m_patch14)_siglip_gap_\d+|vit_large_patch16_siglip_gap_(256|384)": _AVERAGE,
    r"vit_(base_patch32|(giantopt|so400m)_patch16)_siglip_\d+|vit_large_patch16_siglip_512": _MAP | _TANH,
    r"vit_(base_patch32|(giantopt|so400m)_patch16)_siglip_gap_\d+|vit_large_patch16_siglip_gap_512": _AVERAGE | _TANH,
    r"vit_(tiny|small|base|large)_patch16_dinov3(_qkvb)?": _DINOV3 | _AVERAGE,
    r"vit_(small_plus|huge_plus|7b)_patch16_dinov3(_qkvb)?": _DINOV3 | _AVERAGE | _SILU,
    r"vit_(small|base|large)_patch16_lingbot": _DINOV3,
    r"vit_giant_patch16_lingbot": _DINOV3 | _SILU,
    r"eva_(large|giant)_patch14_\d+": dict(rope=None) | _AVERAGE,
    r"eva_giant_patch14_clip_\d+": dict(rope=None),
    r"eva02_(tiny|small|base|large)_patch14_\d+": _CAT | _AVERAGE | _SILU | dict(pos_embed="learn"),
}
# The number of heads, by the first of these patterns that matches in a name.
HEADS = {
    "^test_vit2?$": 2,
    "_tiny_|^test_vit4$": 3,
    "_wee_|_xsmall_": 4,
    "_little_": 5,
    "_small": 6,
    "_medium": 8,
    "_betwixt_": 10,
    "_so150m2_": 13,
    "_so150m_|_base_.*_plus_": 14,
    "_base_patch16_gap_": 16,
    "_base": 12,
    "_huge_plus_": 20,
    "_giant_.*(dinov2|tipsv2|lingbot)": 24,
    "_7b_": 32,
    "": 16,
}

# Reasons why our ViT cannot compute models with these patterns in their names, although their tensors look the same.
REASONS = {
    "_rope_mixed_": "has learned rotary positions",
    "_rope_|_pe_": "has rotary positions that go by columns, then rows",
    "^eva02_.*_clip_": "has norms inside attention",
    "_rpn_|_enormous_": "has its norms after attention and MLP",
    "_sapiens2": "has a LayerScale after attention alone",
}
# Arguments of timm's VisionTransformer that ours lacks, and the values at which both compute the same.
FIXED = {
    "scale_attn_norm": (False,),
    "final_norm": (True,),
    "pool_include_prefix": (False,),
    "dynamic_img_pad": (False,),
    "use_naflex": (False,),
    "attn_layer": ("", "attn"),
    "fix_init": (False, True),  # it changes only how weights are initialised
}
# The tables for read_fields. FIELDS are the fields of model_args.
FIELDS = {name: name for name in ARGUMENTS} | FIXED | dict.fromkeys(("attn_drop_rate", "patch_drop_rate"), RATE)
FIELDS |= {"act_layer": {name: name for name in ACTIVATIONS} | {"swish": "silu"}}
# PRETRAINED are the fields of a pretrained_cfg and BESIDE those beside it; an older config.json has all of them at its
# top level. transformers adds fields of its own if it wraps a model of timm's. The fields in `_IGNORED` change nothing.
_IGNORED = """
    url file hf_hub_id hf_hub_filename source architecture tag custom_load input_size test_input_size min_input_size
    fixed_input_size test_crop_pct label_offset label_names label_descriptions pool_size test_pool_size
    first_conv classifier license description origin_url paper_name paper_ids notes labels
""".split()
PRETRAINED = dict.fromkeys(_IGNORED)
PRETRAINED |= {name: name for name in ("num_classes", "mean", "std", "crop_pct", "crop_mode", "interpolation")}
_IGNORED = """
    architecture num_features global_pool label_names label_descriptions labels model_args pretrained_cfg architectures
    do_pooling initializer_range transformers_version torch_dtype dtype problem_type id2label label2id num_labels
    _name_or_path return_dict output_hidden_states output_attentions
""".split()
BESIDE = dict.fromkeys([*_IGNORED, *OF_TEXT]) | {"num_classes": "num_classes", "model_type": ("timm_wrapper",)}
ARGS = "the checkpoint's field args"  # errors name this in the place of config.json, see of_training


def constructor_args(config: dict, where: str = CONFIG) -> tuple[dict, list[str]]:
    """Returns the constructor arguments in the config.json of a timm repository, and notes for the log.

    where: CONFIG or ARGS, for the errors. Raises InputError for a model that computes something else than the ViT.
    """
    pooling, named = ("global_pool", "model_args") if where == CONFIG else ("gp", "model_kwargs")
    pretrained = section(config, "pretrained_cfg")
    beside, _ = read_fields(config, BESIDE if pretrained else PRETRAINED | BESIDE, where)
    cfg_args = read_fields(pretrained, PRETRAINED, f"{where}: pretrained_cfg")[0] | beside
    fields = {key: value for key, value in section(config, "model_args", where).items() if value is not None}
    pool = fields.pop("global_pool", config.get("global_pool"))
    if pool is not None and pool not in POOLS:
        raise InputError(f"{where}: {pooling}={shown(pool)} is not supported; known are 'token', 'avg', 'map' and ''")
    model_args, notes = read_fields(fields, FIELDS, f"{where}: {named}")
    name, size = ((pretrained or config).get(field) for field in ("architecture", "input_size"))
    name = config.get("architecture") or name
    if size is not None and not (isinstance(size, list) and len(size) == 3):
        raise InputError(f"{where}: input_size must be [channels, height, width], got {shown(size)}")
    if size:
        cfg_args["input_size"] = enforce(ARGUMENTS["img_size"], size[1:], f"{where}: input_size")
    args = by_name(name, named) | cfg_args | model_args | ({} if pool is None else dict(global_pool=pool))
    if "mlp_ratio" in model_args and re.match(PACKED, name):  # timm's mlp_ratio is that of gate and up together
        args["mlp_ratio"] /= 2
    if "norm_layer" in fields and "norm_eps" not in fields:  # the eps of the name does not hold for another norm
        args["norm_eps"] = 1e-6
    return {k: v for k, v in args.items() if v is not None}, notes


def by_name(name, named: str = "model_args") -> dict:
    """Returns the arguments that a model's name in timm stands for and that its tensors do not show.

    named: the field of the JSON that holds the arguments beside the name, for error messages. Raises InputError for a
    model that is not known to compute what our ViT does, with the reason if it is known.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"config.json: architecture must be a name of timm's, got {shown(name)}")
    name, _, _ = name.partition(".")  # without the tag
    for pattern, stands_for in FAMILIES.items():
        if re.fullmatch(pattern, name):
            heads = next(number for piece, number in HEADS.items() if re.search(piece, name))
            return PLAIN | dict(num_heads=heads) | stands_for
    for pattern, why in REASONS.items():
        if re.search(pattern, name):
            raise InputError(f"timm's {shown(name)} {why}, which vitfast does not have yet")
    other = f"put the name of one that is known in its place (vit_base_patch16_224, with all its {named})"
    raise InputError(f"vitfast does not know if timm's {shown(name)} computes what its ViT does; if so, {other}")


def ratio_of(hidden: int, dim: int) -> float:
    """Returns an mlp_ratio with int(dim * ratio) == hidden, in spite of rounding."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)


def of_training(content: dict) -> dict:
    """Returns the config.json for a checkpoint of timm's training script from its arguments; else {}."""
    name, args = content.get("arch"), content.get("args")
    if not isinstance(name, str) or name == "visiontransformer":  # the class's name, if the script gave no arguments
        return {}
    options = vars(args) if isinstance(args, Namespace) else args if isinstance(args, dict) else {}
    model_args = {"global_pool": options.get("gp")} | section(options, "model_kwargs", ARGS)
    side, pixels = options.get("img_size"), {name: options.get(name) for name in ("mean", "std", "input_size")}
    size = {} if pixels["input_size"] or not side else dict(input_size=[3, side, side])
    return dict(architecture=name, model_args=model_args) | pixels | size
