"""A ViT as transformers has it: ViT, DINOv3, CLIP or SigLIP, as tensors and config.json."""

import torch

from ...errors import InputError
from ..config import ROPES
from ..presets import pair
from . import names
from .hugging_face import ACTIVATIONS, FIELDS
from .names import State, join, rename, split, to_theirs

# Fields of config.json that all families have.
SHARED = "hidden_size num_hidden_layers num_attention_heads layer_norm_eps patch_size num_channels".split()


def family(config: dict) -> str:
    """Which of transformers' models has these arguments, if any has; the writers say what each lacks."""
    if config["rope"] == "dinov3":
        return "dinov3"
    return "clip" if config["pre_norm"] else "siglip" if config["global_pool"] == "map" else "vit"


def converted(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """The tensors and the content of config.json."""
    size, act = pair(config["img_size"]), "silu" if config["swiglu_mlp"] else config["act_layer"]
    content = {name: config[FIELDS[name]] for name in SHARED}
    content |= dict(
        intermediate_size=state["blocks.0.mlp.fc2.weight"].shape[1],
        hidden_act=next(name for name, ours in ACTIVATIONS.items() if ours == act),
        image_size=size[0] if size[0] == size[1] else size,
        dtype=str(state["patch_embed.proj.weight"].dtype).removeprefix("torch."),
    )
    made, more = _FAMILIES[family(config)](split(state, ".attn.qkv.", names.QKV), config, class_names)
    return made, content | more


def _vit(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """ViTForImageClassification, without head ViTModel (no prefix)."""
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
    """DINOv3ViTModel; a bias of keys stays one."""
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
        pos_embed_rescale=None,  # nothing moves in training, as in the ViT
    )
    content |= {f"{name}_bias": bias for name in ("query", "key", "value")}
    gated = split(state, ".mlp.fc1.", names.GATE) if config["swiglu_mlp"] else state
    made = rename(gated, to_theirs((*names.HUGGING_FACE_DINOV3, names.UNGATED)))
    token = state["cls_token"]
    empty = {} if config["reg_tokens"] else {"embeddings.register_tokens": token.new_empty(1, 0, width)}
    return made | {"embeddings.mask_token": torch.zeros_like(token)} | empty, content


def _clip(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """CLIPVisionModelWithProjection, without head CLIPVisionModel."""
    classes = config["num_classes"]
    if classes and state.pop("head.bias").any():
        raise InputError("CLIP's projection has no bias, this head has one; --num-classes 0 leaves it out")
    name = "CLIPVisionModelWithProjection" if classes else "CLIPVisionModel"
    content = dict(architectures=[name], model_type="clip_vision_model")
    content |= dict(projection_dim=classes) if classes else {}
    return _tower(state), content


def _siglip(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """SiglipVisionModel; the MAP head's query, keys and values in one."""
    made = join(_tower(state), ".head.attention.in_proj_", (".head.attention.q.", ".head.attention.kv."))
    return made, dict(architectures=["SiglipVisionModel"], model_type="siglip_vision_model")


def _tower(state: State) -> State:
    """A tower of CLIP or SigLIP, with the prefix of the released files, which every version reads."""
    made = rename(state, to_theirs(names.HUGGING_FACE_TOWER))
    for key in ("embeddings.position_embedding.weight", "embeddings.class_embedding"):
        if key in made:
            made[key] = made[key].flatten(0, -2) if "position" in key else made[key].flatten()
    return {key if key.startswith("visual_") else f"vision_model.{key}": value for key, value in made.items()}


_FAMILIES = {"vit": _vit, "dinov3": _dinov3, "clip": _clip, "siglip": _siglip}
