"""The families of models that `accelerate` knows, as data: a small model of each, and a batch for it.

Nothing is imported until a model is made.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Family(NamedTuple):
    """A family of models.

    make(): a small one, with random weights. batch(): its arguments, of two images. left: words of the reasons for
    which parts stay the library's, one for each part. valid: the argument that says which tokens of its output count.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict]
    left: tuple[str, ...] = ()
    valid: str = ""

    def counted(self, output: Tensor, batch: dict) -> Tensor:
        """The output, of its tokens (B, N, D) those that are no padding."""
        return output[batch[self.valid].bool()] if self.valid and output.dim() == 3 else output


def _images(name: str = "x", size: int = 16, frames: int = 0) -> Callable[[], dict]:
    shape = (2, frames, 3, size, size) if frames else (2, 3, size, size)
    return lambda: {name: torch.randn(shape)}


def _timm(module: str, cls: str, **options) -> Callable[[], nn.Module]:
    sizes = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)

    def make() -> nn.Module:
        named = {name: _named(value) if ":" in str(value) else value for name, value in options.items()}
        return getattr(importlib.import_module(f"timm.models.{module}"), cls)(**{**sizes, **named})

    return make


def _named(name: str):
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _naflex() -> nn.Module:
    module = importlib.import_module("timm.models.naflexvit")
    sizes = dict(patch_size=8, embed_dim=32, depth=2, num_heads=2, pos_embed_grid_size=(2, 2), global_pool="avg")
    return module.NaFlexVit(module.NaFlexVitCfg(**sizes), num_classes=5)


def _padded() -> dict:
    """Two images of 4 and 3 patches."""
    grid = torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]] * 2)
    return dict(
        x=torch.randn(2, 4, 192), patch_coord=grid, patch_valid=torch.tensor([[True] * 4, [True] * 3 + [False]])
    )


def _hugging_face(model: str, config: str = "", **options) -> Callable[[], nn.Module]:
    sizes = dict(image_size=16, patch_size=8, hidden_size=32, intermediate_size=64, num_attention_heads=2)
    sizes |= dict(num_hidden_layers=2, attn_implementation="sdpa")

    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        name = config or model.removesuffix("Model") + "Config"
        return getattr(library, model)(getattr(library, name)(**{**sizes, **options}))

    return make


def _qwen(file: str, model: str, config: str, **options) -> Callable[[], nn.Module]:
    sizes = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4)

    def make() -> nn.Module:
        library = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
        made = getattr(library, config)(**{**sizes, **options})
        return getattr(library, model)._from_config(made, attn_implementation="sdpa")

    return make


def _grids() -> dict:
    """Two images of 6 x 4 and 4 x 8 patches, in one row."""
    grids = torch.tensor([[1, 6, 4], [1, 4, 8]])
    return dict(hidden_states=torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4), grid_thw=grids)


def _internvl() -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.InternVLVisionConfig(
        image_size=(16, 16),
        patch_size=(8, 8),
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        use_qk_norm=True,
    )
    return library.InternVLVisionModel(config)


def _torchvision() -> nn.Module:
    library = importlib.import_module("torchvision.models.vision_transformer")
    model = library.VisionTransformer(16, 8, 2, 2, 32, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def _encoder(**options) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, "gelu", norm_first=True, **options)
        return nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)

    return make


def _open_clip(act: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = importlib.import_module("open_clip.transformer")
        act_layer = library.QuickGELU if act == "quick_gelu" else nn.GELU
        return library.VisionTransformer(16, 8, 32, 2, 2, 2.0, act_layer=act_layer, output_dim=16)

    return make


def _sizes() -> dict:
    """Two images of 4 and 2 patches."""
    return dict(pixel_values=torch.randn(2, 3, 16, 16), image_sizes=torch.tensor([[16, 16], [8, 16]]))


def _frames() -> dict:
    return dict(pixel_values=torch.randn(2, 4, 3, 16, 16))


def _siglip2() -> dict:
    """Two images of 4 and 2 patches."""
    return dict(
        pixel_values=torch.randn(2, 4, 192),
        pixel_attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        spatial_shapes=torch.tensor([[2, 2], [1, 2]]),
    )


_VIT, _EVA, _PIXELS = "vision_transformer", "eva", _images("pixel_values")
_QUERY, _3D, _WINDOWS = "one learned query", "three dimensions", "windows with decomposed"
_ROPE = dict(use_rot_pos_emb=True, dynamic_img_size=False)
_TIMM = (
    ("ViT", _timm(_VIT, "VisionTransformer", init_values=0.5), _images()),
    ("DeiT", _timm("deit", "VisionTransformerDistilled"), _images()),
    ("DINOv2 with registers", _timm(_VIT, "VisionTransformer", reg_tokens=2, init_values=0.5), _images()),
    (
        "DINOv2 giant",
        _timm(_VIT, "VisionTransformer", init_values=0.5, mlp_layer="timm.layers:SwiGLUPacked", mlp_ratio=2),
        _images(),
    ),
    ("CLIP", _timm(_VIT, "VisionTransformer", pre_norm=True, act_layer="quick_gelu"), _images()),
    ("SigLIP", _timm(_VIT, "VisionTransformer", global_pool="map", class_token=False), _images(), (_QUERY,)),
    ("q and k norm", _timm(_VIT, "VisionTransformer", qk_norm=True), _images()),
    (
        "AIMv2",
        _timm(
            _VIT,
            "VisionTransformer",
            norm_layer="timm.layers:RmsNorm",
            mlp_layer="timm.layers:SwiGLU",
            qkv_bias=False,
            proj_bias=False,
            class_token=False,
            global_pool="avg",
        ),
        _images(),
    ),
    ("EVA", _timm(_EVA, "Eva"), _images()),
    ("EVA-02", _timm(_EVA, "Eva", **_ROPE, qkv_fused=False, swiglu_mlp=True, scale_mlp=True), _images()),
    (
        "DINOv3",
        _timm(_EVA, "Eva", **_ROPE, rope_type="dinov3", rope_rotate_half=True, init_values=0.5, num_reg_tokens=2),
        _images(),
    ),
    (
        "Perception Encoder",
        _timm(_EVA, "Eva", **_ROPE, attn_type="rope", use_pre_transformer_norm=True, global_pool="map"),
        _images(),
        (_QUERY,),
    ),
    ("vit_rope_mixed", _timm(_EVA, "Eva", **_ROPE, rope_type="mixed"), _images()),
    ("NaFlexViT, padded", _naflex, _padded, ("a linear layer of patches",)),
    ("BEiT", _timm("beit", "Beit", use_rel_pos_bias=True, init_values=0.5), _images()),
    ("BEiT, shared positions", _timm("beit", "Beit", use_shared_rel_pos_bias=True), _images()),
    ("vit_relpos", _timm("vision_transformer_relpos", "VisionTransformerRelPos", rel_pos_type="bias"), _images()),
    (
        "SAM",
        _timm("vision_transformer_sam", "VisionTransformerSAM", use_rel_pos=True, window_size=1),
        _images(),
        (_WINDOWS,) * 2,
    ),
)
_TRANSFORMERS = (
    ("ViT", _hugging_face("ViTModel"), _PIXELS),
    ("DeiT", _hugging_face("DeiTModel"), _PIXELS),
    ("MAE", _hugging_face("ViTMAEModel", mask_ratio=0.0), _PIXELS),
    ("MSN", _hugging_face("ViTMSNModel"), _PIXELS),
    ("I-JEPA", _hugging_face("IJepaModel"), _PIXELS),
    (
        "AST",
        _hugging_face("ASTModel", max_length=16, num_mel_bins=16, frequency_stride=8, time_stride=8),
        lambda: dict(input_values=torch.randn(2, 16, 16)),
    ),
    ("Vivit", _hugging_face("VivitModel", num_frames=4, tubelet_size=[2, 8, 8]), _frames, (_3D,)),
    ("VideoMAE", _hugging_face("VideoMAEModel", num_frames=4, use_mean_pooling=False), _frames, (_3D,)),
    ("DPT", _hugging_face("DPTModel", is_hybrid=False), _PIXELS),
    (
        "YOLOS",
        _hugging_face("YolosModel", image_size=[16, 16], num_detection_tokens=2, use_mid_position_embeddings=False),
        _PIXELS,
    ),
    ("SigLIP", _hugging_face("SiglipVisionModel"), _PIXELS, (_QUERY,)),
    (
        "SigLIP 2, padded",
        _hugging_face("Siglip2VisionModel", num_patches=4),
        _siglip2,
        ("a linear layer of patches", _QUERY),
        "pixel_attention_mask",
    ),
    ("CLIP", _hugging_face("CLIPVisionModel"), _PIXELS),
    ("OWL-ViT", _hugging_face("OwlViTVisionModel", "OwlViTVisionConfig"), _PIXELS),
    ("DINOv2", _hugging_face("Dinov2Model", mlp_ratio=2), _PIXELS),
    ("DINOv2 giant", _hugging_face("Dinov2Model", mlp_ratio=2, use_swiglu_ffn=True), _PIXELS),
    ("DINOv2 with registers", _hugging_face("Dinov2WithRegistersModel", mlp_ratio=2), _PIXELS),
    ("DINOv3", _hugging_face("DINOv3ViTModel"), _PIXELS),
    ("DINOv3 H+", _hugging_face("DINOv3ViTModel", use_gated_mlp=True, hidden_act="silu"), _PIXELS),
    ("AIMv2", _hugging_face("Aimv2VisionModel", use_head=False), _PIXELS),
    ("BEiT", _hugging_face("BeitModel", use_relative_position_bias=True, drop_path_rate=0.0), _PIXELS),
    (
        "Data2Vec",
        _hugging_face("Data2VecVisionModel", use_shared_relative_position_bias=True, drop_path_rate=0.0),
        _PIXELS,
    ),
    ("InternVL", _internvl, _PIXELS),
    ("Pixtral", _hugging_face("PixtralVisionModel"), _sizes),
    (
        "SAM",
        _hugging_face("SamVisionModel", mlp_dim=64, window_size=1, global_attn_indexes=[1], output_channels=8),
        _PIXELS,
        (_WINDOWS,) * 2,
    ),
    (
        "ViTDet",
        _hugging_face(
            "VitDetModel",
            attn_implementation="eager",
            mlp_ratio=2,
            pretrain_image_size=16,
            use_relative_position_embeddings=True,
        ),
        _PIXELS,
        (_WINDOWS,) * 2,
    ),
    (
        "Qwen2-VL",
        _qwen("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", embed_dim=32, mlp_ratio=2),
        _grids,
        (_3D,),
    ),
    (
        "Qwen2.5-VL",
        _qwen(
            "qwen2_5_vl",
            "Qwen2_5_VisionTransformerPretrainedModel",
            "Qwen2_5_VLVisionConfig",
            out_hidden_size=32,
            window_size=16,
            fullatt_block_indexes=[1],
        ),
        _grids,
        (_3D,),
    ),
    (
        "Qwen3-VL",
        _qwen(
            "qwen3_vl",
            "Qwen3VLVisionModel",
            "Qwen3VLVisionConfig",
            out_hidden_size=32,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        _grids,
        (_3D,),
    ),
)
_OTHERS = (
    ("torchvision", "ViT", _torchvision, _images()),
    ("torch", "nn.TransformerEncoder", _encoder(batch_first=True), lambda: dict(src=torch.randn(2, 5, 32))),
    ("torch", "nn.TransformerEncoder, tokens first", _encoder(), lambda: dict(src=torch.randn(5, 2, 32))),
    ("open_clip", "CLIP", _open_clip("gelu"), _images()),
    ("open_clip", "OpenAI's CLIP", _open_clip("quick_gelu"), _images()),
)
FAMILIES = tuple(
    Family(*row)
    for row in (
        *(("timm", *row) for row in _TIMM),
        *(("transformers", *row) for row in _TRANSFORMERS),
        *_OTHERS,
    )
)


def families() -> list[Family]:
    """Those whose library is installed."""
    return [family for family in FAMILIES if importlib.util.find_spec(family.library) is not None]
