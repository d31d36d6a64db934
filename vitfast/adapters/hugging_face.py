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


def _make(config: str, options: dict | None = None, of_layer: dict | None = None) -> Callable[[type], nn.Module]:
    """A layer from its configuration's class, which its file has imported."""

    def make(cls: type) -> nn.Module:
        sizes = dict(hidden_size=32, num_attention_heads=2, intermediate_size=32, hidden_act="gelu")
        sizes["attn_implementation"] = "sdpa"
        return cls(getattr(sys.modules[cls.__module__], config)(**sizes | (options or {})), **(of_layer or {}))

    return make


class Family(NamedTuple):
    """A family of models: its file in transformers.models, its layers, and a small one's configuration.

    prefix: with which its classes are called, "*" in what follows. layers: a description for each way that any version
    builds a layer. places: the patch projection and the norms outside of the layers, "Class.attribute". options: of the
    configuration; gated: further ones, for a gated MLP. of_layer: arguments of the layer besides its configuration.
    """

    file: str
    prefix: str
    layers: tuple[Layer, ...]
    places: str = "*PatchEmbeddings.projection *Model.layernorm"
    layer: str = "*Layer"
    config: str = "*Config"
    options: dict = {}
    gated: dict = {}
    of_layer: dict = {}

    def named(self, name: str) -> str:
        """The full name of a class."""
        folder = self.file.removesuffix("_vision")
        return f"transformers.models.{folder}.modeling_{self.file}.{name.replace('*', self.prefix)}"


# Beside the layers of later versions those of transformers before 5.10, which had BERT's names.
_VIT, _CLIP, _BEIT = (VIT, BERT), (CLIP, CLIP_BEFORE), (BEIT, DATA2VEC)
_DINOV2 = (DINOV2, DINOV2._replace(mlp=GATED), DINOV2_BERT, DINOV2_BERT_GATED)
_DINOV3 = (DINOV3, DINOV3._replace(mlp=GATED))
_PATCHES = "*PatchEmbeddings.projection *Model.layernorm"
# The model that has the norms was called ...Transformer before transformers 5.8.
_TOWERS = "*VisionEmbeddings.patch_embedding " + " ".join(
    f"*Vision{kind}.pre_layrnorm *Vision{kind}.post_layernorm *Text{kind}.final_layer_norm"
    for kind in ("Model", "Transformer")
)
_OWL = (
    "*VisionEmbeddings.patch_embedding *VisionTransformer.pre_layernorm *VisionTransformer.post_layernorm "
    "*ForObjectDetection.layer_norm"
)
_OF_DINOV2, _OF_DINOV3 = f"{_PATCHES} *Backbone.layernorm", "*Embeddings.patch_embeddings *Model.norm *Backbone.norm"
_OF_AIMV2 = "*VisionEmbeddings.patch_embed *VisionEmbeddings.rms_norm *VisionModel.rms_norm"
_OF_PIXTRAL = "*VisionModel.patch_conv *VisionModel.ln_pre"
_OF_CLIP = "*EncoderLayer", "*VisionConfig"
_HEADS, _SWIGLU = dict(num_heads=2), dict(use_swiglu_ffn=True)
_RATES = dict(drop_path_rate=0.5, mlp_ratio=1)
_WINDOW = dict(
    image_size=16, patch_size=8, layer_scale_init_value=0.5, use_relative_position_bias=True, drop_path_rate=0.0
)
FAMILIES = (
    Family("vit", "ViT", _VIT),
    Family("deit", "DeiT", _VIT),
    Family("vit_mae", "ViTMAE", _VIT, f"{_PATCHES} *Decoder.decoder_norm"),
    Family("vit_msn", "ViTMSN", _VIT),
    Family("ijepa", "IJepa", _VIT),
    Family("audio_spectrogram_transformer", "AST", _VIT, f"{_PATCHES} *MLPHead.layernorm"),
    Family("vivit", "Vivit", _VIT, "*TubeletEmbeddings.projection *Model.layernorm"),
    Family("videomae", "VideoMAE", (BERT,), f"{_PATCHES} *Decoder.norm *ForVideoClassification.fc_norm"),
    Family("dpt", "DPT", (BERT,), "*ViTPatchEmbeddings.projection *Model.layernorm", "*ViTLayer"),
    Family("yolos", "Yolos", (BERT,)),
    Family("siglip", "Siglip", _CLIP, _TOWERS, *_OF_CLIP),
    Family("siglip2", "Siglip2", _CLIP, _TOWERS, *_OF_CLIP),
    Family("clip", "CLIP", _CLIP, _TOWERS, *_OF_CLIP),
    Family("metaclip_2", "MetaClip2", _CLIP, _TOWERS, *_OF_CLIP),
    Family("owlvit", "OwlViT", _CLIP, _OWL, *_OF_CLIP),
    Family("owlv2", "Owlv2", _CLIP, _OWL, *_OF_CLIP),
    Family("dinov2", "Dinov2", _DINOV2, _OF_DINOV2, options=_RATES, gated=_SWIGLU),
    Family("dinov2_with_registers", "Dinov2WithRegisters", _DINOV2, _OF_DINOV2, options=_RATES, gated=_SWIGLU),
    Family("dinov3_vit", "DINOv3ViT", _DINOV3, _OF_DINOV3, options=_RATES, gated=dict(use_gated_mlp=True)),
    Family(
        "beit",
        "Beit",
        _BEIT,
        f"{_PATCHES} *Pooler.layernorm *ForMaskedImageModeling.layernorm",
        options=_WINDOW,
        of_layer=dict(drop_path_rate=0.5),
    ),
    Family(
        "data2vec_vision",
        "Data2VecVision",
        (DATA2VEC,),
        f"{_PATCHES} *Pooler.layernorm",
        options=_WINDOW,
        of_layer=dict(drop_path_rate=0.5, window_size=(2, 2)),
    ),
    Family("aimv2", "Aimv2", (AIMV2,), _OF_AIMV2, *_OF_CLIP),
    Family("internvl", "InternVLVision", (INTERNVL,), options=dict(use_qk_norm=True)),
    Family("pixtral", "Pixtral", (PIXTRAL,), _OF_PIXTRAL, "*AttentionLayer", "*VisionConfig"),
    Family(
        "qwen2_vl",
        "Qwen2VL",
        (QWEN2,),
        "PatchEmbed.proj PatchMerger.ln_q",
        "*VisionBlock",
        "*VisionConfig",
        dict(embed_dim=32, mlp_ratio=1, **_HEADS),
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        (QWEN2_5,),
        "Qwen2_5_VisionPatchEmbed.proj *PatchMerger.ln_q",
        "*VisionBlock",
        "*VisionConfig",
        dict(hidden_act="silu", **_HEADS),
    ),
    Family("qwen3_vl", "Qwen3VLVision", (QWEN3,), "*PatchEmbed.proj *PatchMerger.norm", "*Block", options=_HEADS),
)

LAYERS: dict[str, tuple[Layer, ...]] = {}
PLACES: dict[str, tuple[str, ...]] = {}
for _family in FAMILIES:
    _config = _family.config.replace("*", _family.prefix)
    LAYERS[_family.named(_family.layer)] = tuple(
        layer._replace(
            make=_make(_config, _family.options | (_family.gated if layer.mlp.gate else {}), _family.of_layer)
        )
        for layer in _family.layers
    )
    for _cls, _name in (place.split(".") for place in _family.places.split()):
        PLACES[_family.named(_cls)] = (*PLACES.get(_family.named(_cls), ()), _name)

# Modules that are left themselves, with their norms and their MLP on operations.
_HEAD = "attention of one learned query, for which there is no operation"
_WINDOWS = "windows with decomposed relative positions"
_SIGLIP, _SIGLIP2, _SAM, _VITDET, _AIMV2 = (
    f"transformers.models.{name}.modeling_{name}." for name in ("siglip", "siglip2", "sam", "vitdet", "aimv2")
)
_HEADS_OF_TOWERS = f"{_SIGLIP}SiglipMultiheadAttentionPoolingHead", f"{_SIGLIP2}Siglip2MultiheadAttentionPoolingHead"
LEFT = dict.fromkeys((*_HEADS_OF_TOWERS, f"{_AIMV2}Aimv2AttentionPoolingHead"), _HEAD)
LEFT |= dict.fromkeys((f"{_SAM}SamVisionLayer", f"{_VITDET}VitDetLayer"), _WINDOWS)
PLACES |= dict.fromkeys(_HEADS_OF_TOWERS, ("layernorm", "mlp"))
PLACES |= {
    f"{_SAM}SamVisionLayer": ("layer_norm1", "layer_norm2", "mlp"),
    f"{_SAM}SamPatchEmbeddings": ("projection",),
    f"{_VITDET}VitDetLayer": ("norm1", "norm2", "mlp"),
    f"{_VITDET}VitDetEmbeddings": ("projection",),
}
_SAM_MLP, _VITDET_MLP = Mlp(path="", fc1="lin1", fc2="lin2"), Mlp(path="", idle=("drop",))
MLPS = {
    f"{_SIGLIP}SiglipMLP": (MLP._replace(path=""), _make("SiglipVisionConfig")),
    f"{_SIGLIP2}Siglip2MLP": (MLP._replace(path=""), _make("Siglip2VisionConfig")),
    f"{_SAM}SamMLPBlock": (_SAM_MLP, _make("SamVisionConfig", dict(mlp_dim=32))),
    f"{_VITDET}VitDetMlp": (_VITDET_MLP, _make("VitDetConfig", None, dict(in_features=32, hidden_features=32))),
}
