"""timm's config.json: which of its models compute what our ViT does, and with which arguments.

A name of timm stands for arguments that its config.json need not repeat, and some of them leave no trace in the
tensors: rotary positions, the activation, where norms stand. So a name counts where it is listed here; any other is
refused. The tests compare the logits of every name of timm's, listed or not.
"""

import math
import re
from argparse import Namespace

from ...errors import InputError
from ..config import ACTIVATIONS as _ACTIVATIONS
from ..config import ARGUMENTS, POOLS, enforce, shown
from .json_fields import CONFIG, OF_TEXT, activation, dropout_notes, only, read, refuse_unknown, section

# Models that are ours, by their number of heads. What else a name stands for follows.
HEADS = {
    2: "test_vit test_vit2",
    3: """
        deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 eva02_tiny_patch14_224 eva02_tiny_patch14_336
        test_vit4 vit_fast_tiny_patch16_224 vit_fast_tiny_patch16_384 vit_tiny_patch16_224 vit_tiny_patch16_384
        vit_tiny_patch16_dinov3_qkvb
    """,
    4: "vit_wee_patch16_reg1_gap_256 vit_xsmall_patch16_clip_224",
    5: "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256",
    6: """
        deit3_small_patch16_224 deit3_small_patch16_384 deit_small_distilled_patch16_224 deit_small_patch16_224
        eva02_small_patch14_224 eva02_small_patch14_336 flexivit_small vit_fast_small_patch16_224
        vit_fast_small_patch16_384 vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_small_patch16_224
        vit_small_patch16_36x1_224 vit_small_patch16_384 vit_small_patch16_dinov3 vit_small_patch16_dinov3_qkvb
        vit_small_patch16_lingbot vit_small_patch32_224 vit_small_patch32_384 vit_small_patch8_224
        vit_small_plus_patch16_dinov3 vit_small_plus_patch16_dinov3_qkvb vit_small_r26_s32_224 vit_small_r26_s32_384
    """,
    8: """
        deit3_medium_patch16_224 vit_medium_patch16_clip_224 vit_medium_patch16_gap_240 vit_medium_patch16_gap_256
        vit_medium_patch16_gap_384 vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256
        vit_medium_patch16_rope_reg1_gap_256 vit_medium_patch32_clip_224 vit_mediumd_patch16_reg4_gap_256
        vit_mediumd_patch16_reg4_gap_384 vit_mediumd_patch16_rope_reg1_gap_256
    """,
    10: """
        vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256
        vit_betwixt_patch16_reg4_gap_384 vit_betwixt_patch16_rope_reg4_gap_256 vit_betwixt_patch32_clip_224
    """,
    12: """
        deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224
        deit_base_distilled_patch16_384 deit_base_patch16_224 deit_base_patch16_384 eva02_base_patch14_224
        eva02_base_patch14_448 flexivit_base vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2
        vit_base_patch14_reg4_dinov2 vit_base_patch16_224 vit_base_patch16_224_miil vit_base_patch16_384
        vit_base_patch16_clip_224 vit_base_patch16_clip_384 vit_base_patch16_clip_quickgelu_224
        vit_base_patch16_dinov3 vit_base_patch16_dinov3_qkvb vit_base_patch16_lingbot vit_base_patch16_reg4_gap_256
        vit_base_patch16_rope_reg1_gap_256 vit_base_patch16_siglip_224 vit_base_patch16_siglip_256
        vit_base_patch16_siglip_384 vit_base_patch16_siglip_512 vit_base_patch16_siglip_gap_224
        vit_base_patch16_siglip_gap_256 vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512
        vit_base_patch32_224 vit_base_patch32_384 vit_base_patch32_clip_224 vit_base_patch32_clip_256
        vit_base_patch32_clip_384 vit_base_patch32_clip_448 vit_base_patch32_clip_quickgelu_224
        vit_base_patch32_siglip_256 vit_base_patch32_siglip_gap_256 vit_base_patch8_224 vit_base_r26_s32_224
        vit_base_r50_s16_224 vit_base_r50_s16_384 vit_fast_base_patch16_224 vit_fast_base_patch16_384
        vit_fast_base_patch32_224 vit_fast_base_patch32_384
    """,
    13: """
        vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384 vit_so150m2_patch16_reg1_gap_448
    """,
    14: """
        vit_base_patch16_plus_240 vit_base_patch16_plus_clip_240 vit_base_patch32_plus_256
        vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
    """,
    16: """
        deit3_huge_patch14_224 deit3_large_patch16_224 deit3_large_patch16_384 eva02_large_patch14_224
        eva02_large_patch14_448 eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_560
        eva_giant_patch14_clip_224 eva_large_patch14_196 eva_large_patch14_336 flexivit_large
        vit_base_patch16_gap_224 vit_fast_huge_patch14_224 vit_fast_large_patch16_224 vit_fast_large_patch16_384
        vit_giant_patch14_224 vit_giant_patch14_clip_224 vit_giant_patch16_gap_224 vit_giantopt_patch16_siglip_256
        vit_giantopt_patch16_siglip_384 vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384
        vit_gigantic_patch14_224 vit_gigantic_patch14_clip_224 vit_gigantic_patch14_clip_378
        vit_gigantic_patch14_clip_quickgelu_224 vit_huge_patch14_224 vit_huge_patch14_clip_224
        vit_huge_patch14_clip_336 vit_huge_patch14_clip_378 vit_huge_patch14_clip_quickgelu_224
        vit_huge_patch14_clip_quickgelu_378 vit_huge_patch14_gap_224 vit_huge_patch16_gap_448 vit_large_patch14_224
        vit_large_patch14_clip_224 vit_large_patch14_clip_336 vit_large_patch14_clip_quickgelu_224
        vit_large_patch14_clip_quickgelu_336 vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2
        vit_large_patch14_reg4_dinov2 vit_large_patch16_224 vit_large_patch16_384 vit_large_patch16_dinov3
        vit_large_patch16_dinov3_qkvb vit_large_patch16_lingbot vit_large_patch16_siglip_256
        vit_large_patch16_siglip_384 vit_large_patch16_siglip_512 vit_large_patch16_siglip_gap_256
        vit_large_patch16_siglip_gap_384 vit_large_patch16_siglip_gap_512 vit_large_patch32_224
        vit_large_patch32_384 vit_large_r50_s32_224 vit_large_r50_s32_384 vit_so400m_patch14_reg1_tipsv2
        vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
        vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378 vit_so400m_patch14_siglip_gap_384
        vit_so400m_patch14_siglip_gap_448 vit_so400m_patch14_siglip_gap_896 vit_so400m_patch16_siglip_256
        vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512 vit_so400m_patch16_siglip_gap_256
        vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512
    """,
    20: "vit_huge_plus_patch16_dinov3 vit_huge_plus_patch16_dinov3_qkvb",
    24: """
        vit_giant_patch14_dinov2 vit_giant_patch14_reg1_tipsv2 vit_giant_patch14_reg4_dinov2
        vit_giant_patch16_lingbot
    """,
    32: "vit_7b_patch16_dinov3",
}
MODELS = {name: heads for heads, names in HEADS.items() for name in names.split()}
TANH = re.compile(
    "_giantopt_.*_siglip_|_patch32_siglip_|_large_patch16_siglip_(gap_)?512$|_so400m_patch16_siglip_"
)  # of SigLIP's: the others have the exact GELU
AVERAGED = re.compile("_gap_|_dinov3|^eva(?!.*_clip_)|^test_vit[24]$")  # those that pool the patches
MAPPED = re.compile(r"_siglip_\d|_map_")  # those with a MAP head
# What more some names stand for, all of those found in a name. Else norms have eps 1e-6, and the GELU is exact.
GATED_NAME = "vit_giant_patch14_dinov2"
FAMILIES = {
    "_dinov3|_lingbot": dict(rope="dinov3", pos_embed="none", norm_eps=1e-5, dynamic_img_size=True),
    "^eva_": dict(rope=None),
    "^eva02_": dict(rope="cat", ref_feat_shape=(16, 16), pos_embed="learn"),
    r"_rope_reg\d_gap_": dict(rope="cat", ref_feat_shape=(16, 16), pos_embed="none"),
    "^vit_.*_clip_": dict(norm_eps=1e-5),
    "_quickgelu_": dict(act_layer="quick_gelu"),
    "^eva02_|_plus_.*_dinov3|_7b_|_giant_.*(dinov2|tipsv2|lingbot)": dict(act_layer="silu"),  # of the gate
}

PACKED = "_giant_patch14_.*(dinov2|tipsv2)"  # names whose mlp_ratio counts gate and up

# Why names that the tensors would not give away are not ours.
REASONS = {
    "_rope_mixed_": "has learned rotary positions",
    "_rope_|_pe_": "has rotary positions that go by columns, then rows",
    "^eva02_.*_clip_": "has norms inside attention",
    "_rpn_|_enormous_": "has its norms after attention and MLP",
    "_sapiens2": "has a LayerScale after attention alone",
}
ACTIVATIONS = {name: name for name in _ACTIVATIONS} | {"swish": "silu"}
# Arguments of its VisionTransformer that ours has not, with the values that leave its function ours.
FIXED = {
    "scale_attn_norm": (False,),
    "final_norm": (True,),
    "pool_include_prefix": (False,),
    "dynamic_img_pad": (False,),
    "use_naflex": (False,),
    "attn_layer": ("", "attn"),
    "fix_init": (False, True),  # of the start of training alone
}
DROPOUTS = ("attn_drop_rate", "patch_drop_rate")
# Fields of a pretrained_cfg, and beside it; the older config.json has all of them in one place. transformers adds its
# own where it wraps a model of timm's.
PRETRAINED = """
    url file hf_hub_id hf_hub_filename source architecture tag custom_load input_size test_input_size min_input_size
    fixed_input_size interpolation crop_pct test_crop_pct crop_mode mean std num_classes label_offset label_names
    label_descriptions pool_size test_pool_size first_conv classifier license description origin_url paper_name
    paper_ids notes labels
""".split()
BESIDE = """
    architecture num_classes num_features global_pool label_names label_descriptions labels model_args pretrained_cfg
    architectures model_type do_pooling initializer_range transformers_version torch_dtype dtype problem_type
    id2label label2id num_labels _name_or_path return_dict output_hidden_states output_attentions
""".split()
BESIDE += OF_TEXT
ARGS = "the checkpoint's field args"  # in the place of config.json, see of_training


def told(config: dict, where: str = CONFIG) -> tuple[dict, list[str]]:
    """The constructor arguments in the config.json of a timm repository, and notes.

    where: CONFIG or ARGS, for the errors. Raises InputError for a model that computes something else.
    """
    pooling, named = ("global_pool", "model_args") if where == CONFIG else ("gp", "model_kwargs")
    pretrained = section(config, "pretrained_cfg") or config
    refuse_unknown(config, BESIDE if pretrained is not config else {*BESIDE, *PRETRAINED}, "config.json")
    refuse_unknown(pretrained, PRETRAINED if pretrained is not config else config, "config.json: pretrained_cfg")
    name = config.get("architecture") or pretrained.get("architecture")
    args = {key: value for key, value in section(config, "model_args", where).items() if value is not None}
    refuse_unknown(args, {*ARGUMENTS, *FIXED, *DROPOUTS}, f"{where}: {named}")
    only(args, FIXED, where)
    only(config, {"model_type": ("timm_wrapper",)})
    found = by_name(name, named)
    pool = args.pop("global_pool", config.get("global_pool"))
    if pool is not None and pool not in POOLS:
        raise InputError(f"{where}: {pooling}={shown(pool)} is not supported; known are 'token', 'avg', 'map' and ''")
    act = activation(args.pop("act_layer", None), ACTIVATIONS, where)
    size = pretrained.get("input_size")
    if size is not None and not (isinstance(size, list) and len(size) == 3):
        raise InputError(f"{where}: input_size must be [channels, height, width], got {shown(size)}")
    found |= dict(
        input_size=size and enforce(ARGUMENTS["img_size"], size[1:], f"{where}: input_size"),
        num_classes=read(config if "num_classes" in config else pretrained, "num_classes", ARGUMENTS["num_classes"]),
    )
    found |= {} if pool is None else dict(global_pool=pool)
    found |= {key: read(pretrained, key, ARGUMENTS[key], where) for key in ("mean", "std", "crop_mode", "crop_pct")}
    found |= {key: read(args, key, ARGUMENTS[key], where) for key in args if key in ARGUMENTS}
    if found.get("mlp_ratio") and re.search(PACKED, name):  # of gate and up
        found["mlp_ratio"] /= 2
    found |= {"act_layer": act} if act else {}
    found |= {"norm_eps": 1e-6} if "norm_layer" in args and "norm_eps" not in args else {}  # not the name's any more
    return {k: v for k, v in found.items() if v is not None}, dropout_notes(args, DROPOUTS, where)


def by_name(name, named: str = "model_args") -> dict:
    """The arguments that a name of timm's stands for, as far as tensors do not show them.

    named: what the arguments beside it are called. Raises InputError for one that is not known to compute what the ViT
    does, with the reason where it is known.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"config.json: architecture must be a name of timm's, got {shown(name)}")
    name, _, _ = name.partition(".")  # without the tag
    if name in MODELS:
        pool = "map" if MAPPED.search(name) else "avg" if AVERAGED.search(name) else "token"
        found = dict(num_heads=MODELS[name], norm_eps=1e-6, global_pool=pool)
        found["act_layer"] = "gelu_tanh" if TANH.search(name) else "gelu"
        return found | {k: v for family, more in FAMILIES.items() if re.search(family, name) for k, v in more.items()}
    for pattern, why in REASONS.items():
        if re.search(pattern, name):
            raise InputError(f"timm's {shown(name)} {why}, which vitfast does not have yet")
    other = f"put the name of one that is known in its place (vit_base_patch16_224, with all its {named})"
    raise InputError(f"vitfast does not know that timm's {shown(name)} computes what its ViT does; where so, {other}")


def ratio_of(hidden: int, dim: int) -> float:
    """The mlp_ratio with int(dim * ratio) == hidden, whatever the rounding."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)


def of_training(content: dict) -> dict:
    """The model that a checkpoint of timm's training script names, as a config.json would; else {}."""
    name, args = content.get("arch"), content.get("args")
    if not isinstance(name, str) or name == "visiontransformer":  # the class, where the script gave no arguments
        return {}
    given = vars(args) if isinstance(args, Namespace) else args if isinstance(args, dict) else {}
    pool, pixels = {"global_pool": given.get("gp")}, {key: given.get(key) for key in ("mean", "std")}
    return dict(architecture=name, model_args=pool | section(given, "model_kwargs", ARGS), pretrained_cfg=pixels)
