"""timm's config.json: which of its models compute what our ViT does, and with which arguments.

A name of timm stands for arguments that its config.json need not repeat, and some of them leave no trace in the
tensors: rotary positions, the activation, where norms stand. So a name counts where it is listed here; any other is
refused. The tests compare the logits of every name of timm's, listed or not.
"""

import re
from argparse import Namespace

from ..arguments import ARGUMENTS, POOLS, enforce, shown
from ..errors import InputError
from .json_fields import CONFIG, OF_TEXT, activation, dropout_notes, only, read, refuse_unknown, section

# Models that are ours, by their number of heads. Their norms have eps 1e-6, their GELU is exact but for TANH's.
HEADS = {
    2: "test_vit test_vit2",
    3: """
        deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 vit_fast_tiny_patch16_224 vit_fast_tiny_patch16_384
        vit_tiny_patch16_224 vit_tiny_patch16_384
    """,
    4: "vit_wee_patch16_reg1_gap_256",
    5: "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256",
    6: """
        deit3_small_patch16_224 deit3_small_patch16_384 deit_small_distilled_patch16_224 deit_small_patch16_224
        flexivit_small vit_fast_small_patch16_224 vit_fast_small_patch16_384 vit_small_patch14_dinov2
        vit_small_patch14_reg4_dinov2 vit_small_patch16_224 vit_small_patch16_36x1_224 vit_small_patch16_384
        vit_small_patch32_224 vit_small_patch32_384 vit_small_patch8_224 vit_small_r26_s32_224 vit_small_r26_s32_384
    """,
    8: """
        deit3_medium_patch16_224 vit_medium_patch16_gap_240 vit_medium_patch16_gap_256 vit_medium_patch16_gap_384
        vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_256
        vit_mediumd_patch16_reg4_gap_384
    """,
    10: """
        vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256
        vit_betwixt_patch16_reg4_gap_384
    """,
    12: """
        deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224 deit_base_distilled_patch16_384
        deit_base_patch16_224 deit_base_patch16_384 flexivit_base vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2
        vit_base_patch14_reg4_dinov2 vit_base_patch16_224 vit_base_patch16_224_miil vit_base_patch16_384
        vit_base_patch16_reg4_gap_256 vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256
        vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512 vit_base_patch32_224 vit_base_patch32_384
        vit_base_patch32_siglip_gap_256 vit_base_patch8_224 vit_base_r26_s32_224 vit_base_r50_s16_224
        vit_base_r50_s16_384 vit_fast_base_patch16_224 vit_fast_base_patch16_384 vit_fast_base_patch32_224
        vit_fast_base_patch32_384
    """,
    13: "vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384 vit_so150m2_patch16_reg1_gap_448",
    14: """
        vit_base_patch16_plus_240 vit_base_patch32_plus_256 vit_so150m_patch16_reg4_gap_256
        vit_so150m_patch16_reg4_gap_384
    """,
    16: """
        deit3_huge_patch14_224 deit3_large_patch16_224 deit3_large_patch16_384 eva_large_patch14_196
        eva_large_patch14_336 flexivit_large vit_base_patch16_gap_224 vit_fast_huge_patch14_224
        vit_fast_large_patch16_224 vit_fast_large_patch16_384 vit_giant_patch14_224 vit_giant_patch16_gap_224
        vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384 vit_gigantic_patch14_224
        vit_huge_patch14_224 vit_huge_patch14_gap_224 vit_huge_patch16_gap_448 vit_large_patch14_224
        vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2 vit_large_patch16_224
        vit_large_patch16_384 vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384
        vit_large_patch16_siglip_gap_512 vit_large_patch32_224 vit_large_patch32_384 vit_large_r50_s32_224
        vit_large_r50_s32_384 vit_so400m_patch14_reg1_tipsv2 vit_so400m_patch14_siglip_gap_224
        vit_so400m_patch14_siglip_gap_378 vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448
        vit_so400m_patch14_siglip_gap_896 vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384
        vit_so400m_patch16_siglip_gap_512
    """,
}
TANH = """
    vit_base_patch32_siglip_gap_256 vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384
    vit_large_patch16_siglip_gap_512 vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384
    vit_so400m_patch16_siglip_gap_512
""".split()
MODELS = {name: heads for heads, names in HEADS.items() for name in names.split()}
# Those that pool the patches unless told otherwise: besides these all with _gap_ in their name.
AVERAGED = ("eva_large_patch14_196", "eva_large_patch14_336", "test_vit2")

# Why names that the tensors would not give away are not ours.
REASONS = {
    r"_rope_|dinov3|lingbot|eva02": "has rotary positions",
    r"_rpn_": "has its norms after attention and MLP",
    r"quickgelu": "has the quick GELU",
}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh"}
# Arguments of its VisionTransformer that ours has not, with the values that leave its function ours.
FIXED = {
    "qk_norm": (False,),
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
    "pre_norm": (False,),
    "final_norm": (True,),
    "pool_include_prefix": (False,),
    "dynamic_img_pad": (False,),
    "use_naflex": (False,),
    "norm_layer": ("layernorm",),
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
        raise InputError(f"{where}: {pooling}={shown(pool)} is not supported; known are 'token', 'avg' and ''")
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
    found |= {"act_layer": act} if act else {}
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
        act, pool = "gelu_tanh" if name in TANH else "gelu", "avg" if "_gap_" in name or name in AVERAGED else "token"
        return dict(num_heads=MODELS[name], norm_eps=1e-6, act_layer=act, global_pool=pool)
    for pattern, why in REASONS.items():
        if re.search(pattern, name):
            raise InputError(f"timm's {shown(name)} {why}, which vitfast does not have yet")
    other = f"put the name of one that is known in its place (vit_base_patch16_224, with all its {named})"
    raise InputError(f"vitfast does not know that timm's {shown(name)} computes what its ViT does; where so, {other}")


def of_training(content: dict) -> dict:
    """The model that a checkpoint of timm's training script names, as a config.json would; else {}."""
    name, args = content.get("arch"), content.get("args")
    if not isinstance(name, str) or name == "visiontransformer":  # the class, where the script gave no arguments
        return {}
    given = vars(args) if isinstance(args, Namespace) else args if isinstance(args, dict) else {}
    pool, pixels = {"global_pool": given.get("gp")}, {key: given.get(key) for key in ("mean", "std")}
    return dict(architecture=name, model_args=pool | section(given, "model_kwargs", ARGS), pretrained_cfg=pixels)
