"""The families of models that `accelerate` knows, as data: a small model of each, and a batch for it.

Nothing is imported until a model is made.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from small_models import WIDTH, small
from torch import nn


class Family(NamedTuple):
    """A family of models.

    make() returns a small model with random weights; batch() returns its arguments for two images. valid: the argument
    that says which tokens of the output count. attention, mlp: how many halves of the small model (a norm, a branch and
    the residual) an operation could compute; why: the reason where others are no operation's.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict]
    valid: str = ""
    attention: int = 2
    mlp: int = 2
    why: str = ""


def timm_model(cls: str = "vision_transformer:VisionTransformer", **options) -> Callable[[], nn.Module]:
    """Makes a small model of timm, "file:class" in timm.models."""
    return partial(small, f"timm.models.{cls}", **options)


def naflexvit(**options) -> Callable[[], nn.Module]:
    """Makes a small NaFlexVit of timm, with options of its configuration."""
    file, options = "timm.models.naflexvit", dict(pos_embed_grid_size=(2, 2), global_pool="avg") | options
    return lambda: small(f"{file}:NaFlexVit", cfg=small(f"{file}:NaFlexVitCfg", **options))


def hugging_face_model(cls: str, **options) -> Callable[[], nn.Module]:
    """Makes a small model of transformers, with options of its configuration."""
    return partial(small, f"transformers:{cls}", **options)


def _qwen(file: str, cls: str, **options) -> Callable[[], nn.Module]:
    return partial(small, f"transformers.models.{file}.modeling_{file}:{cls}", patch_size=4, **options)


def torchvision_model(**options) -> Callable[[], nn.Module]:
    """Makes a small ViT of torchvision."""
    return partial(small, "torchvision.models.vision_transformer:VisionTransformer", **options)


def _encoder(**options) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = small(nn.TransformerEncoderLayer, dropout=0.0, activation="gelu", norm_first=True, **options)
        return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    return make


def _images(name: str = "x", shape: tuple[int, ...] = (3, 16, 16)) -> Callable[[], dict]:
    return lambda: {name: torch.randn(2, *shape)}


def _padded() -> dict:
    """Two images of 4 and 3 patches."""
    grid = torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]] * 2)
    return dict(
        x=torch.randn(2, 4, 192), patch_coord=grid, patch_valid=torch.tensor([[True] * 4, [True] * 3 + [False]])
    )


def _grids() -> dict:
    """Two images of 6 x 4 and 4 x 8 patches, in one row."""
    grids = torch.tensor([[1, 6, 4], [1, 4, 8]])
    return dict(hidden_states=torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4), grid_thw=grids)


def _sizes() -> dict:
    """Two images of 4 and 2 patches."""
    return dict(pixel_values=torch.randn(2, 3, 16, 16), image_sizes=torch.tensor([[16, 16], [8, 16]]))


def _siglip2() -> dict:
    """Two images of 4 and 2 patches."""
    return dict(
        pixel_values=torch.randn(2, 4, 192),
        pixel_attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        spatial_shapes=torch.tensor([[2, 2], [1, 2]]),
    )


_ROPE = dict(use_rot_pos_emb=True, dynamic_img_size=False)
_MAP = dict(global_pool="map")
_AIM = dict(norm_layer="timm.layers:RmsNorm", mlp_layer="timm.layers:SwiGLU", qkv_bias=False, proj_bias=False)
_GIANT = dict(init_values=0.5, mlp_layer="timm.layers:SwiGLUPacked", mlp_ratio=2)
_EVA02 = dict(qkv_fused=False, swiglu_mlp=True, scale_mlp=True)
_DINOV3 = dict(rope_type="dinov3", rope_rotate_half=True, init_values=0.5, num_reg_tokens=2)
_PE = dict(attn_type="rope", use_pre_transformer_norm=True)
_POOLED = dict(class_token=False, global_pool="avg")
_TIMM_SAM = timm_model("vision_transformer_sam:VisionTransformerSAM", use_rel_pos=True, window_size=1)
# Rows: the name, the maker, the batch if it is not one of images, `valid`.
_TIMM = (
    ("ViT", timm_model(init_values=0.5)),
    ("DeiT", timm_model("deit:VisionTransformerDistilled")),
    ("DINOv2 with registers", timm_model(reg_tokens=2, init_values=0.5)),
    ("DINOv2 giant", timm_model(**_GIANT)),
    ("CLIP", timm_model(pre_norm=True, act_layer="quick_gelu")),
    ("SigLIP", timm_model(**_MAP, class_token=False)),
    ("q and k norm", timm_model(qk_norm=True)),
    ("AIMv2", timm_model(**_AIM, **_POOLED)),
    ("EVA", timm_model("eva:Eva")),
    ("EVA-02", timm_model("eva:Eva", **_ROPE, **_EVA02)),
    ("DINOv3", timm_model("eva:Eva", **_ROPE, **_DINOV3)),
    ("Perception Encoder", timm_model("eva:Eva", **_ROPE, **_PE, **_MAP)),
    ("vit_rope_mixed", timm_model("eva:Eva", **_ROPE, rope_type="mixed")),
    ("NaFlexViT, padded", naflexvit(), _padded),
    ("BEiT", timm_model("beit:Beit", use_rel_pos_bias=True, init_values=0.5)),
    ("BEiT, shared positions", timm_model("beit:Beit", use_shared_rel_pos_bias=True)),
    ("vit_relpos", timm_model("vision_transformer_relpos:VisionTransformerRelPos", rel_pos_type="bias")),
    ("SAM", _TIMM_SAM),
)
_YOLOS = dict(image_size=[16, 16], num_detection_tokens=2, use_mid_position_embeddings=False)
_AST = dict(max_length=16, num_mel_bins=16, frequency_stride=8, time_stride=8)
_SAM = dict(window_size=1, global_attn_indexes=[1], output_channels=8)
_VITDET = dict(attn_implementation="eager", mlp_ratio=2, pretrain_image_size=16, use_relative_position_embeddings=True)
_BEIT = dict(use_relative_position_bias=True, drop_path_rate=0.0)
_DATA2VEC = dict(use_shared_relative_position_bias=True, drop_path_rate=0.0)
_INTERNVL = dict(image_size=(16, 16), patch_size=(8, 8), use_qk_norm=True)
_SIGLIP2 = hugging_face_model("Siglip2VisionModel", num_patches=4)
_QWEN2 = _qwen("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", mlp_ratio=2)
_WINDOWED = dict(out_hidden_size=32, window_size=16, fullatt_block_indexes=[1])
_QWEN2_5 = _qwen("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", **_WINDOWED)
_FRAMES = _images("pixel_values", (4, 3, 16, 16))
_OPEN_CLIP, _QUICK_GELU = "open_clip.transformer:VisionTransformer", "open_clip.transformer:QuickGELU"
_DEEPSTACK = dict(out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0])
_TRANSFORMERS = (
    ("ViT", hugging_face_model("ViTModel")),
    ("DeiT", hugging_face_model("DeiTModel")),
    ("MAE", hugging_face_model("ViTMAEModel", mask_ratio=0.0)),
    ("MSN", hugging_face_model("ViTMSNModel")),
    ("I-JEPA", hugging_face_model("IJepaModel")),
    ("AST", hugging_face_model("ASTModel", **_AST), _images("input_values", (16, 16))),
    ("Vivit", hugging_face_model("VivitModel", num_frames=4, tubelet_size=[2, 8, 8]), _FRAMES),
    ("VideoMAE", hugging_face_model("VideoMAEModel", num_frames=4, use_mean_pooling=False), _FRAMES),
    ("DPT", hugging_face_model("DPTModel", is_hybrid=False)),
    ("YOLOS", hugging_face_model("YolosModel", **_YOLOS)),
    ("SigLIP", hugging_face_model("SiglipVisionModel")),
    ("SigLIP 2, padded", _SIGLIP2, _siglip2, "pixel_attention_mask"),
    ("CLIP", hugging_face_model("CLIPVisionModel")),
    ("OWL-ViT", hugging_face_model("OwlViTVisionModel")),
    ("DINOv2", hugging_face_model("Dinov2Model", mlp_ratio=2)),
    ("DINOv2 giant", hugging_face_model("Dinov2Model", mlp_ratio=2, use_swiglu_ffn=True)),
    ("DINOv2 with registers", hugging_face_model("Dinov2WithRegistersModel", mlp_ratio=2)),
    ("DINOv3", hugging_face_model("DINOv3ViTModel")),
    ("DINOv3 H+", hugging_face_model("DINOv3ViTModel", use_gated_mlp=True, hidden_act="silu")),
    ("AIMv2", hugging_face_model("Aimv2VisionModel", use_head=False)),
    ("BEiT", hugging_face_model("BeitModel", **_BEIT)),
    ("Data2Vec", hugging_face_model("Data2VecVisionModel", **_DATA2VEC)),
    ("InternVL", hugging_face_model("InternVLVisionModel", **_INTERNVL)),
    ("Pixtral", hugging_face_model("PixtralVisionModel"), _sizes),
    ("SAM", hugging_face_model("SamVisionModel", **_SAM)),
    ("ViTDet", hugging_face_model("VitDetModel", **_VITDET)),
    ("Qwen2-VL", _QWEN2, _grids),
    ("Qwen2.5-VL", _QWEN2_5, _grids),
    ("Qwen3-VL", _qwen("qwen3_vl", "Qwen3VLVisionModel", **_DEEPSTACK), _grids),
)


QUERY, QK, RELATIVE = "attention of one query", "q and k norm", "relative positions computed from q"
# Halves of families that have others than two of each.
_HALVES = {
    "timm": {"SigLIP": (2, 3, QUERY), "Perception Encoder": (2, 3, QUERY), "q and k norm": (0, 2, QK)},
    "transformers": {"SigLIP": (2, 3, QUERY), "SigLIP 2, padded": (2, 3, QUERY), "InternVL": (0, 2, QK)},
}
_HALVES["timm"]["SAM"] = _HALVES["transformers"]["SAM"] = (0, 2, RELATIVE)
_HALVES["transformers"]["ViTDet"] = (0, 2, RELATIVE)


def _family(library: str, images: Callable[[], dict], name: str, make, batch=None, valid="") -> Family:
    return Family(library, name, make, batch or images, valid, *_HALVES[library].get(name, ()))


FAMILIES = (
    *(_family("timm", _images(), *row) for row in _TIMM),
    *(_family("transformers", _images("pixel_values"), *row) for row in _TRANSFORMERS),
    Family("torchvision", "ViT", torchvision_model(), _images()),
    Family("torch", "nn.TransformerEncoder", _encoder(batch_first=True), lambda: dict(src=torch.randn(2, 5, WIDTH))),
    Family("torch", "nn.TransformerEncoder, tokens first", _encoder(), lambda: dict(src=torch.randn(5, 2, WIDTH))),
    Family("open_clip", "CLIP", partial(small, _OPEN_CLIP, mlp_ratio=2.0), _images()),
    Family("open_clip", "OpenAI's CLIP", partial(small, _OPEN_CLIP, mlp_ratio=2.0, act_layer=_QUICK_GELU), _images()),
)
