"""The families of transformers, by name: descriptions of layers, and where patches and norms are."""

import sys
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from .descriptions import Layer, Mlp
from .hugging_face_layers import (
    AIMV2,
    BEIT,
    BERT,
    CLIP,
    CLIP_BEFORE,
    DATA2VEC,
    DINOV2,
    DINOV2_BERT,
    DINOV2_BERT_GATED,
    DINOV3,
    GATED,
    INTERNVL,
    MLP,
    PIXTRAL,
    QWEN2,
    QWEN2_5,
    QWEN3,
    VIT,
)


def _make(config: str, options: dict, of_layer: dict) -> Callable[[type], nn.Module]:
    """A layer from its configuration's class, which its file has imported."""

    def make(cls: type) -> nn.Module:
        sizes = dict(hidden_size=32, num_attention_heads=2, intermediate_size=32, hidden_act="gelu")
        sizes["attn_implementation"] = "sdpa"
        return cls(getattr(sys.modules[cls.__module__], config)(**{**sizes, **options}), **of_layer)

    return make


class Family(NamedTuple):
    """A family of models: its file in transformers.models, its layer, and a small one's configuration.

    places: the patch projection and the norms outside of the layers, "Class.attribute".
    """

    file: str
    layer: str
    description: Layer
    config: str
    places: str
    options: dict = {}
    of_layer: dict = {}  # arguments of the layer besides its configuration


_WINDOW = dict(
    image_size=16, patch_size=8, layer_scale_init_value=0.5, use_relative_position_bias=True, drop_path_rate=0.0
)
_RATES = dict(drop_path_rate=0.5, mlp_ratio=1)
FAMILIES = (
    Family("vit", "ViTLayer", VIT, "ViTConfig", "ViTPatchEmbeddings.projection ViTModel.layernorm"),
    Family("deit", "DeiTLayer", VIT, "DeiTConfig", "DeiTPatchEmbeddings.projection DeiTModel.layernorm"),
    Family(
        "vit_mae",
        "ViTMAELayer",
        VIT,
        "ViTMAEConfig",
        "ViTMAEPatchEmbeddings.projection ViTMAEModel.layernorm ViTMAEDecoder.decoder_norm",
    ),
    Family("vit_msn", "ViTMSNLayer", VIT, "ViTMSNConfig", "ViTMSNPatchEmbeddings.projection ViTMSNModel.layernorm"),
    Family("ijepa", "IJepaLayer", VIT, "IJepaConfig", "IJepaPatchEmbeddings.projection IJepaModel.layernorm"),
    Family(
        "audio_spectrogram_transformer",
        "ASTLayer",
        VIT,
        "ASTConfig",
        "ASTPatchEmbeddings.projection ASTModel.layernorm ASTMLPHead.layernorm",
    ),
    Family("vivit", "VivitLayer", VIT, "VivitConfig", "VivitTubeletEmbeddings.projection VivitModel.layernorm"),
    Family(
        "videomae",
        "VideoMAELayer",
        BERT,
        "VideoMAEConfig",
        "VideoMAEPatchEmbeddings.projection VideoMAEModel.layernorm VideoMAEDecoder.norm "
        "VideoMAEForVideoClassification.fc_norm",
    ),
    Family("dpt", "DPTViTLayer", BERT, "DPTConfig", "DPTViTPatchEmbeddings.projection DPTModel.layernorm"),
    Family("yolos", "YolosLayer", BERT, "YolosConfig", "YolosPatchEmbeddings.projection YolosModel.layernorm"),
    Family(
        "siglip",
        "SiglipEncoderLayer",
        CLIP,
        "SiglipVisionConfig",
        "SiglipVisionEmbeddings.patch_embedding SiglipVisionModel.post_layernorm SiglipTextModel.final_layer_norm "
        "SiglipVisionTransformer.post_layernorm SiglipTextTransformer.final_layer_norm",
    ),
    Family(
        "siglip2",
        "Siglip2EncoderLayer",
        CLIP,
        "Siglip2VisionConfig",
        "Siglip2VisionEmbeddings.patch_embedding Siglip2VisionModel.post_layernorm Siglip2TextModel.final_layer_norm "
        "Siglip2VisionTransformer.post_layernorm Siglip2TextTransformer.final_layer_norm",
    ),
    Family(
        "clip",
        "CLIPEncoderLayer",
        CLIP,
        "CLIPVisionConfig",
        "CLIPVisionEmbeddings.patch_embedding CLIPVisionModel.pre_layrnorm CLIPVisionModel.post_layernorm "
        "CLIPTextModel.final_layer_norm "
        "CLIPVisionTransformer.pre_layrnorm CLIPVisionTransformer.post_layernorm "
        "CLIPTextTransformer.final_layer_norm",
    ),
    Family(
        "owlvit",
        "OwlViTEncoderLayer",
        CLIP,
        "OwlViTVisionConfig",
        "OwlViTVisionEmbeddings.patch_embedding OwlViTVisionTransformer.pre_layernorm "
        "OwlViTVisionTransformer.post_layernorm OwlViTForObjectDetection.layer_norm",
    ),
    Family(
        "owlv2",
        "Owlv2EncoderLayer",
        CLIP,
        "Owlv2VisionConfig",
        "Owlv2VisionEmbeddings.patch_embedding Owlv2VisionTransformer.pre_layernorm "
        "Owlv2VisionTransformer.post_layernorm Owlv2ForObjectDetection.layer_norm",
    ),
    Family(
        "metaclip_2",
        "MetaClip2EncoderLayer",
        CLIP,
        "MetaClip2VisionConfig",
        "MetaClip2VisionEmbeddings.patch_embedding MetaClip2VisionModel.pre_layrnorm "
        "MetaClip2VisionModel.post_layernorm MetaClip2TextModel.final_layer_norm "
        "MetaClip2VisionTransformer.pre_layrnorm MetaClip2VisionTransformer.post_layernorm "
        "MetaClip2TextTransformer.final_layer_norm",
    ),
    Family(
        "dinov2",
        "Dinov2Layer",
        DINOV2,
        "Dinov2Config",
        "Dinov2PatchEmbeddings.projection Dinov2Model.layernorm Dinov2Backbone.layernorm",
        _RATES,
    ),
    *(
        Family(file, layer, description, config, "", {**_RATES, "use_swiglu_ffn": description.mlp.gate is not None})
        for file, layer, config in (
            ("dinov2", "Dinov2Layer", "Dinov2Config"),
            ("dinov2_with_registers", "Dinov2WithRegistersLayer", "Dinov2WithRegistersConfig"),
        )
        for description in (DINOV2._replace(mlp=GATED), DINOV2_BERT, DINOV2_BERT_GATED)
    ),
    Family(
        "dinov3_vit",
        "DINOv3ViTLayer",
        DINOV3,
        "DINOv3ViTConfig",
        "DINOv3ViTEmbeddings.patch_embeddings DINOv3ViTModel.norm DINOv3ViTBackbone.norm",
        _RATES,
    ),
    Family(
        "dinov3_vit",
        "DINOv3ViTLayer",
        DINOV3._replace(mlp=GATED),
        "DINOv3ViTConfig",
        "",
        {**_RATES, "use_gated_mlp": True},
    ),
    Family(
        "beit",
        "BeitLayer",
        BEIT,
        "BeitConfig",
        "BeitPatchEmbeddings.projection BeitModel.layernorm BeitPooler.layernorm BeitForMaskedImageModeling.layernorm",
        _WINDOW,
        dict(drop_path_rate=0.5),
    ),
    Family(
        "data2vec_vision",
        "Data2VecVisionLayer",
        DATA2VEC,
        "Data2VecVisionConfig",
        "Data2VecVisionPatchEmbeddings.projection Data2VecVisionModel.layernorm Data2VecVisionPooler.layernorm",
        _WINDOW,
        dict(drop_path_rate=0.5, window_size=(2, 2)),
    ),
    Family(
        "aimv2",
        "Aimv2EncoderLayer",
        AIMV2,
        "Aimv2VisionConfig",
        "Aimv2VisionEmbeddings.patch_embed Aimv2VisionEmbeddings.rms_norm Aimv2VisionModel.rms_norm",
    ),
    Family(
        "internvl",
        "InternVLVisionLayer",
        INTERNVL,
        "InternVLVisionConfig",
        "InternVLVisionPatchEmbeddings.projection InternVLVisionModel.layernorm",
        dict(use_qk_norm=True),
    ),
    Family(
        "pixtral",
        "PixtralAttentionLayer",
        PIXTRAL,
        "PixtralVisionConfig",
        "PixtralVisionModel.patch_conv PixtralVisionModel.ln_pre",
    ),
    Family(
        "qwen2_vl",
        "Qwen2VLVisionBlock",
        QWEN2,
        "Qwen2VLVisionConfig",
        "PatchEmbed.proj PatchMerger.ln_q",
        dict(embed_dim=32, num_heads=2, mlp_ratio=1),
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2_5_VLVisionBlock",
        QWEN2_5,
        "Qwen2_5_VLVisionConfig",
        "Qwen2_5_VisionPatchEmbed.proj Qwen2_5_VLPatchMerger.ln_q",
        dict(num_heads=2, hidden_act="silu"),
    ),
    Family(
        "qwen3_vl",
        "Qwen3VLVisionBlock",
        QWEN3,
        "Qwen3VLVisionConfig",
        "Qwen3VLVisionPatchEmbed.proj Qwen3VLVisionPatchMerger.norm",
        dict(num_heads=2),
    ),
    Family(
        "dinov2_with_registers",
        "Dinov2WithRegistersLayer",
        DINOV2,
        "Dinov2WithRegistersConfig",
        "Dinov2WithRegistersPatchEmbeddings.projection Dinov2WithRegistersModel.layernorm "
        "Dinov2WithRegistersBackbone.layernorm",
        _RATES,
    ),
)

_FOLDERS = dict(data2vec_vision="data2vec")


def _file_of(family: str) -> str:
    return f"transformers.models.{_FOLDERS.get(family, family)}.modeling_{family}"


# Layers as transformers before 5.10 builds them, beside those of later versions.
_BEFORE = ((VIT, BERT), (BEIT, DATA2VEC), (CLIP, CLIP_BEFORE))
LAYERS: dict[str, tuple[Layer, ...]] = {}
PLACES: dict[str, tuple[str, ...]] = {}
for _family in FAMILIES:
    _file = _file_of(_family.file)
    _makes = _make(_family.config, _family.options, _family.of_layer)
    _ways = _family.description, *(before for now, before in _BEFORE if now is _family.description)
    _made = (each._replace(make=_makes) for each in _ways)
    LAYERS[f"{_file}.{_family.layer}"] = (*LAYERS.get(f"{_file}.{_family.layer}", ()), *_made)
    for _cls, _name in (place.split(".") for place in _family.places.split()):
        PLACES[f"{_file}.{_cls}"] = (*PLACES.get(f"{_file}.{_cls}", ()), _name)

# Modules that are left themselves, with their norms and their MLP on operations.
_HEAD = "attention of one learned query, for which there is no operation"
_LEFT = (
    ("siglip", "SiglipMultiheadAttentionPoolingHead", _HEAD, ("layernorm", "mlp")),
    ("siglip2", "Siglip2MultiheadAttentionPoolingHead", _HEAD, ("layernorm", "mlp")),
    ("aimv2", "Aimv2AttentionPoolingHead", _HEAD, ()),
    ("sam", "SamVisionLayer", "windows with decomposed relative positions", ("layer_norm1", "layer_norm2", "mlp")),
    ("vitdet", "VitDetLayer", "windows with decomposed relative positions", ("norm1", "norm2", "mlp")),
)
LEFT: dict[str, str] = {}
for _family, _cls, _why, _names in _LEFT:
    LEFT[f"{_file_of(_family)}.{_cls}"] = _why
    PLACES[f"{_file_of(_family)}.{_cls}"] = _names
PLACES[f"{_file_of('sam')}.SamPatchEmbeddings"] = ("projection",)
PLACES[f"{_file_of('vitdet')}.VitDetEmbeddings"] = ("projection",)

MLPS = {
    f"{_file_of('siglip')}.SiglipMLP": (MLP._replace(path=""), _make("SiglipVisionConfig", {}, {})),
    f"{_file_of('siglip2')}.Siglip2MLP": (MLP._replace(path=""), _make("Siglip2VisionConfig", {}, {})),
    f"{_file_of('sam')}.SamMLPBlock": (
        Mlp(path="", fc1="lin1", act="act", fc2="lin2"),
        _make("SamVisionConfig", dict(mlp_dim=32), {}),
    ),
    f"{_file_of('vitdet')}.VitDetMlp": (
        Mlp(path="", idle=("drop",)),
        _make("VitDetConfig", {}, dict(in_features=32, hidden_features=32)),
    ),
}
