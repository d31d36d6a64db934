"""Reads transformers' JSON of models that compute what our ViT does; writes a ViT's repository."""

import math
import re

import torch

from ...errors import InputError
from .. import config as arguments
from ..checks import enforce, flag, shown, whole
from ..config import POSITIVE, RATE, ROPES
from ..presets import pair
from . import names
from .json_fields import CONFIG, OF_TEXT, read, read_fields, refuse_unknown, section
from .names import State, join, rename, split, to_theirs

# transformers' defaults for fields that are left out, where they differ from those of the tensors' format.
_DEFAULTS, _DINOV3 = dict(num_attention_heads=12, image_size=224), dict(num_attention_heads=6, rope_theta=100.0)
_SIGLIP2 = dict(num_channels=3, patch_size=16, num_patches=256)
CLASSES = ("Model", "ForImageClassification", "ForImageClassificationWithTeacher", "ForMaskedImageModeling")
_TOWERS = ("Model", "VisionModel", "VisionModelWithProjection", "ForImageClassification")
# For each model_type, the classes that are accepted and the format of their tensors.
MODELS = {
    "vit": ([f"ViT{name}" for name in CLASSES], "Hugging Face ViT"),
    "deit": ([f"DeiT{name}" for name in CLASSES], "Hugging Face DeiT"),
    "dinov2": ([f"Dinov2{name}" for name in CLASSES], "Hugging Face DINOv2"),
    "dinov2_with_registers": ([f"Dinov2WithRegisters{name}" for name in CLASSES], "Hugging Face DINOv2"),
    "dinov3_vit": (["DINOv3ViTModel"], "Hugging Face DINOv3"),
    "clip_vision_model": ([f"CLIP{name}" for name in _TOWERS[1:3]], "Hugging Face CLIP"),
    "clip": ([f"CLIP{name}" for name in _TOWERS[:3]], "Hugging Face CLIP"),
    "siglip_vision_model": (["SiglipVisionModel"], "Hugging Face SigLIP"),
    "siglip": ([f"Siglip{name}" for name in _TOWERS], "Hugging Face SigLIP"),
    "siglip2_vision_model": (["Siglip2VisionModel"], "Hugging Face SigLIP"),
    "siglip2": ([f"Siglip2{name}" for name in _TOWERS[:2]], "Hugging Face SigLIP"),
}
# The model_types with a text tower too, and their fields beside the configuration of the image tower.
WHOLE = ("clip", "siglip", "siglip2")
BESIDE = "text_config vision_config text_config_dict vision_config_dict projection_dim logit_scale_init_value".split()

_TANH = ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast")  # the first is the one that is written
ACTIVATIONS = dict.fromkeys(("gelu", "gelu_python"), "gelu") | dict.fromkeys(_TANH, "gelu_tanh")
ACTIVATIONS |= {"quick_gelu": "quick_gelu", "silu": "silu", "swish": "silu"}
AUGMENTED = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")  # they change rotary positions in training
# Fields without an entry in FIELDS: code below reads them, or the tensors show them, or they change neither tokens nor
# logits. The last are fields of a pooler, a decoder and mask tokens, which the ViT leaves out with a warning; of
# Dinov2Backbone, which is refused; of the start of training; of every model; and of Facebook's own code
# (interpolate_*), which transformers never reads.
OTHERS = """
    intermediate_size mlp_ratio num_patches
    query_bias key_bias value_bias mlp_bias vision_use_head projection_dim initializer_factor
    pooler_act pooler_output_size encoder_stride use_mask_token
    apply_layernorm reshape_hidden_states out_features out_indices stage_names _out_features _out_indices
    initializer_range layerscale_value gradient_checkpointing
    architectures model_type transformers_version _name_or_path _commit_hash torch_dtype dtype id2label label2id
    num_labels _num_labels problem_type finetuning_task task_specific_params return_dict use_return_dict
    output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss use_cache tie_word_embeddings
    chunk_size_feed_forward cross_attention_hidden_size attn_implementation _attn_implementation
    _attn_implementation_internal _attn_implementation_autoset
    interpolate_antialias interpolate_offset
""".split()
OTHERS += OF_TEXT
# Tables for read_fields: the fields of every configuration, and with them those of a ViT.
GENERAL = dict.fromkeys(OTHERS) | {
    "pruned_heads": ({},),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
FIELDS = GENERAL | {
    "hidden_size": "embed_dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "layer_norm_eps": "norm_eps",
    "image_size": "img_size",
    "patch_size": "patch_size",
    "num_channels": "in_chans",
    "qkv_bias": "qkv_bias",
    "num_register_tokens": "reg_tokens",
    "drop_path_rate": "drop_path_rate",
    "rope_theta": "rope_temperature",
    "use_gated_mlp": "swiglu_mlp",
    "use_swiglu_ffn": "swiglu_mlp",
    "proj_bias": "proj_bias",
    "hidden_act": ACTIVATIONS,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout"), RATE),
    **dict.fromkeys(AUGMENTED),
}


def constructor_args(config: dict) -> tuple[dict, list[str]]:
    """Returns the constructor arguments that config.json states, and notes for the log.

    Among the arguments is `form`, the name of the tensors' format. Raises InputError for a model_type or architecture
    that is not this ViT, and for fields with which a model computes something else.
    """
    kind, names, where = config["model_type"], config.get("architectures"), CONFIG
    if not isinstance(kind, str) or kind not in MODELS:
        raise InputError(f"config.json: model_type {shown(kind)} is not this ViT; known are {', '.join(MODELS)}")
    if names is not None and not isinstance(names, list):
        raise InputError(f"config.json: architectures must be a list of names, got {shown(names)}")
    classes, form = MODELS[kind]
    if odd := [name for name in names or () if name not in classes]:
        usual = ", ".join(classes[:2])
        raise InputError(f"config.json: architecture {shown(odd[0])} is not this ViT; known are {usual}")
    if kind in WHOLE:
        refuse_unknown(config, {*BESIDE, *GENERAL}, where)
        config = section(config, "vision_config_dict") or section(config, "vision_config")  # the former wins
        where = "config.json: vision_config"
    defaults = _DEFAULTS | (_DINOV3 if kind == "dinov3_vit" else _SIGLIP2 if "siglip2" in kind else {})
    config = defaults | {key: value for key, value in config.items() if value is not None}
    args, notes = read_fields(config, FIELDS, where)
    checks = arguments.ARGUMENTS
    args["hidden"] = read(config, "intermediate_size", checks["embed_dim"], where)
    if args["hidden"] is None and kind.startswith("dinov2"):
        args["mlp_ratio"] = read(config, "mlp_ratio", checks["mlp_ratio"])
        if args.get("swiglu_mlp"):  # DINOv2's gated MLP has its own width and activation
            args |= dict(act_layer="silu", mlp_ratio=None)
    if "siglip2" in kind:  # the size at which its positions are not resized
        count = enforce(arguments.SIDE, config["num_patches"], f"{where}: num_patches")
        side = math.isqrt(count)
        if side * side != count:
            raise InputError(f"{where}: num_patches must be a square, as SigLIP 2's grid is, got {count}")
        args["img_size"] = tuple(side * patch for patch in pair(args["patch_size"]))
    fields = [f"{field}={config[field]}" for field in AUGMENTED if config.get(field) is not None]
    notes += [f"{field} is not taken over, the ViT changes no positions in training" for field in fields]
    return {k: v for k, v in args.items() if v is not None} | dict(form=form), notes


def statistics(pixels: dict) -> dict:
    """Returns `mean` and `std` on the 0..1 scale from preprocessor_config.json, None where it has none."""
    file = "preprocessor_config.json"
    mean, std = (read(pixels, f"image_{name}", arguments.ARGUMENTS[name], file) for name in ("mean", "std"))
    if read(pixels, "do_normalize", flag, file) is False:
        mean, std = 0.0, 1.0
    rescale = read(pixels, "do_rescale", flag, file) is not False
    factor = read(pixels, "rescale_factor", POSITIVE, file) if rescale else 1.0
    scale = 1.0 if factor is None or abs(factor * 255 - 1) < 1e-6 else factor * 255  # 255 is rescaled to this

    def divided(value):
        return tuple(map(divided, value)) if isinstance(value, tuple) else value and value / scale

    return dict(mean=divided(mean), std=divided(std))


_SQUARE = dict(height=224, width=224)
_BY_EDGE = dict(size=dict(shortest_edge=224), crop_size=_SQUARE, do_center_crop=True)
# transformers' processors that resize by Pillow and change the shape in no other way, and their classes' defaults.
PROCESSORS = {
    "ViT": dict(size=_SQUARE, resample=2),
    "DeiT": dict(size=dict(height=256, width=256), crop_size=_SQUARE, do_center_crop=True),
    "Beit": dict(size=_SQUARE),
    "Bit": _BY_EDGE,
    "CLIP": _BY_EDGE,
    "ChineseCLIP": _BY_EDGE,
    "Blip": dict(size=dict(height=384, width=384)),
    "Pvt": dict(size=_SQUARE),
    "Segformer": dict(size=dict(height=512, width=512), resample=2),
    "Siglip": dict(size=_SQUARE),
}


def crop(pixels: dict) -> tuple[dict, list[str]]:
    """Returns crop_mode, crop_pct and interpolation of preprocessor_config.json, {} for none; and notes."""
    file = "preprocessor_config.json"
    if read(pixels, "do_resize", flag, file) is False or "size" not in pixels:
        return {}, []
    (mode, size), cut = size_field(pixels, "size"), image_size(pixels)
    if size and cut:
        share = cut[0] / size[0]
        if int(cut[0] / share) < size[0]:  # rounding must not lose a pixel
            share = math.nextafter(share, 0)
        alike = cut[0] == cut[1] if mode == "center" else int(cut[1] / share) == size[1]
        if alike and arguments.LEAST_CROP <= share <= 1:
            number = read(pixels, "resample", whole(0, len(arguments.INTERPOLATIONS) - 1), file)
            number = _defaults(pixels).get("resample", 3) if number is None else number
            return dict(crop_mode=mode, crop_pct=share, interpolation=arguments.INTERPOLATIONS[number]), []
    said = ", ".join(f"{name}={shown(pixels[name])}" for name in ("size", "crop_size") if name in pixels)
    note = f"{file}: how images are resized and cut is not taken over ({said or 'no size'})"
    return {}, [f"{note}; set crop_mode, crop_pct"]


def image_size(pixels: dict) -> tuple[int, int] | None:
    """Returns (height, width) of the images that a processor makes, None where its JSON does not say it."""
    cuts = read(pixels, "do_center_crop", flag, "preprocessor_config.json")
    if _defaults(pixels).get("do_center_crop", False) if cuts is None else cuts:
        return size_field(pixels, "crop_size")[1]
    return size_field(pixels, "size")[1]


def processor_class(pixels: dict) -> str:
    """Returns a processor's class without its endings; older files call it a feature extractor."""
    kind = str(pixels.get("image_processor_type") or pixels.get("feature_extractor_type"))
    return re.sub(r"(ImageProcessor|FeatureExtractor)(Pil|Fast)?$", "", kind)


def _defaults(pixels: dict) -> dict:
    """Returns the default fields of a processor's class; DINOv3's, which uses torchvision, has the ViT's."""
    return PROCESSORS.get(processor_class(pixels).removeprefix("DINOv3"), {})


def size_field(pixels: dict, field: str) -> tuple[str, tuple[int, int] | None]:
    """Returns the crop mode and (height, width) in `size` or `crop_size`; None for an unknown size."""
    value = pixels.get(field)
    if isinstance(value, (list, tuple)) and len(value) == 2:
        value = dict(height=value[0], width=value[1])
    elif not isinstance(value, dict):  # one number is the shortest edge if the class's default is one
        by_edge = field == "size" and "shortest_edge" in _defaults(pixels).get("size", {})
        value = dict(shortest_edge=value) if by_edge else dict(height=value, width=value)
    edge = value.get("shortest_edge")
    mode, sides = ("center", (edge, edge)) if edge else ("squash", (value.get("height"), value.get("width")))
    try:
        return mode, arguments.ARGUMENTS["img_size"](sides)
    except ValueError:
        return mode, None


# ---- written

# The fields of config.json that all families have and that hold an argument as it is.
SHARED = "hidden_size num_hidden_layers num_attention_heads layer_norm_eps patch_size num_channels".split()


def family(config: dict) -> str:
    """Returns the transformers family that a ViT is written as; `writers.lacks` says what it lacks."""
    if config["rope"] == "dinov3":
        return "dinov3"
    return "clip" if config["pre_norm"] else "siglip" if config["global_pool"] == "map" else "vit"


def to_repository(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """Returns the tensors and JSON files of a repository that transformers' from_pretrained reads."""
    size, act = pair(config["img_size"]), "silu" if config["swiglu_mlp"] else config["act_layer"]
    content = {name: config[FIELDS[name]] for name in SHARED}
    content |= dict(
        intermediate_size=state["blocks.0.mlp.fc2.weight"].shape[1],
        hidden_act=next(name for name, ours in ACTIVATIONS.items() if ours == act),
        image_size=size[0] if size[0] == size[1] else size,
        dtype=str(state["patch_embed.proj.weight"].dtype).removeprefix("torch."),
    )
    state, more = _FAMILIES[family(config)](split(state, ".attn.qkv.", names.QKV), config, class_names)
    return state, {"config.json": content | more, "preprocessor_config.json": _processor(config)}


def _processor(config: dict) -> dict:
    """Returns the content of preprocessor_config.json.

    transformers cannot pad images, nor keep their aspect ratio for a model whose images are not square, so in these
    cases it squashes them.
    """
    size, crop_pct = pair(config["img_size"]), config["crop_pct"] or 1.0
    height, width = (int(side / crop_pct) for side in size)
    by_edge = config["crop_mode"] in (None, "center") and size[0] == size[1]
    edges = dict(shortest_edge=height) if by_edge else dict(height=height, width=width)
    cuts = by_edge or crop_pct != 1
    cut = dict(do_center_crop=True, crop_size=dict(height=size[0], width=size[1])) if cuts else {}
    return dict(
        image_processor_type="BitImageProcessor" if cuts else "ViTImageProcessor",
        do_resize=True,
        size=edges,
        **cut,
        resample=arguments.INTERPOLATIONS.index(config["interpolation"] or "bicubic"),
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=config["mean"],
        image_std=config["std"],
    )


def _vit(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """Converts to ViTForImageClassification or, without a head, to ViTModel, whose names have no prefix."""
    classes = config["num_classes"]
    name = "ViTForImageClassification" if classes else "ViTModel"
    content = dict(architectures=[name], model_type="vit", qkv_bias=config["qkv_bias"])
    state = rename(state, to_theirs(names.HUGGING_FACE))
    if classes:
        labels = dict(enumerate(class_names or [f"LABEL_{i}" for i in range(classes)]))
        content |= dict(id2label=labels, label2id={name: i for i, name in labels.items()})
        state = {key if key.startswith("classifier.") else f"vit.{key}": value for key, value in state.items()}
    return state, content


def _dinov3(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """Converts to DINOv3ViTModel; keys keep their bias, which transformers' default leaves out."""
    width, bias = config["embed_dim"], config["qkv_bias"]
    content = dict(
        architectures=["DINOv3ViTModel"],
        model_type="dinov3_vit",
        use_gated_mlp=config["swiglu_mlp"],
        num_register_tokens=config["reg_tokens"],
        rope_theta=config["rope_temperature"] or ROPES["dinov3"],
        mlp_bias=config["proj_bias"],
        proj_bias=config["proj_bias"],
        layerscale_value=config["init_values"],
        pos_embed_rescale=None,  # as in the ViT, training changes no positions
    )
    content |= {f"{name}_bias": bias for name in ("query", "key", "value")}
    gated = split(state, ".mlp.fc1.", names.GATE) if config["swiglu_mlp"] else state
    renamed = rename(gated, to_theirs((*names.HUGGING_FACE_DINOV3, names.UNGATED)))
    token = state["cls_token"]
    empty = {} if config["reg_tokens"] else {"embeddings.register_tokens": token.new_empty(1, 0, width)}
    return renamed | {"embeddings.mask_token": torch.zeros_like(token)} | empty, content


def _clip(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """Converts to CLIPVisionModelWithProjection or, without a head, to CLIPVisionModel."""
    classes = config["num_classes"]
    if classes and state.pop("head.bias").any():
        raise InputError("CLIP's projection has no bias, this head has one; --num-classes 0 leaves it out")
    name = "CLIPVisionModelWithProjection" if classes else "CLIPVisionModel"
    projection = dict(projection_dim=classes) if classes else {}
    return _tower(state), dict(architectures=[name], model_type="clip_vision_model", **projection)


def _siglip(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """Converts to SiglipVisionModel, whose MAP head has q, k and v in one tensor."""
    state = join(_tower(state), ".head.attention.in_proj_", (".head.attention.q.", ".head.attention.kv."))
    return state, dict(architectures=["SiglipVisionModel"], model_type="siglip_vision_model")


def _tower(state: State) -> State:
    """Renames a tower of CLIP or SigLIP, with the released files' prefix, which every version reads."""
    tower = rename(state, to_theirs(names.HUGGING_FACE_TOWER))
    for key in ("embeddings.position_embedding.weight", "embeddings.class_embedding"):
        if key in tower:
            tower[key] = tower[key].flatten(0, -2) if "position" in key else tower[key].flatten()
    return {key if key.startswith("visual_") else f"vision_model.{key}": value for key, value in tower.items()}


_FAMILIES = {"vit": _vit, "dinov3": _dinov3, "clip": _clip, "siglip": _siglip}
