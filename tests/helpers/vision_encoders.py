"""Vision encoders as data: the small models behind the page of families.

Nothing is imported until a model is made. A library of another version may lack some of them.
"""

from collections.abc import Callable
from functools import partial

import torch
from handwritten import STYLES, HandwrittenViT
from small_models import imported
from torch import nn
from vision_families import FAMILIES, QK, QUERY, RELATIVE, Family

Batch = Callable[[], dict]


# Sizes of a small model by the names that configurations have for them.
_NAMES = {
    32: "hidden_size embed_dim width d_model hidden_dim image_size img_size out_hidden_size projection_dim "
    "text_hidden_size output_dim",
    2: "num_hidden_layers depth num_layers num_attention_heads num_heads num_key_value_heads mlp_ratio",
    64: "intermediate_size mlp_dim ffn_dim",
    8: "patch_size",
    0: "hidden_dropout_prob attention_probs_dropout_prob attention_dropout dropout hidden_dropout drop_path_rate",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}


def small_config(config: type, options: dict):
    """A configuration of transformers with small sizes, each of its default's type."""
    default, sizes = config(), {}
    for name in _SIZES.keys() - getattr(config, "attribute_map", {}).keys():
        kind = type(getattr(default, name, None))
        if kind in (int, float):
            sizes[name] = kind(_SIZES[name])
        elif kind in (tuple, list) and name in ("image_size", "img_size", "patch_size"):
            sizes[name] = kind([_SIZES[name]] * 2)
    return config(**sizes | options)


def _hf(path: str, batch: Batch | None = None, halves=(2, 2), why: str = "", **options) -> Family:
    """A model of transformers, "file:class" of transformers.models."""
    folder, _, name = path.partition(":")
    folder, _, file = folder.partition("/")

    def make() -> nn.Module:
        cls = imported(f"transformers.models.{folder}.modeling_{file or folder}:{name}")
        attention = "sdpa" if cls._supports_sdpa else "eager"
        return cls._from_config(small_config(cls.config_class, options), attn_implementation=attention)

    return Family("transformers", name, make, batch or _pixels(), "", *halves, why)


def _timm(name: str, halves=(2, 2), why: str = "", size: int = 32, **options) -> Family:
    """A model of timm for images of a size; an option of None is not given."""

    def make() -> nn.Module:
        sizes = dict(img_size=size, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5) | options
        return imported("timm:create_model")(name, **{key: value for key, value in sizes.items() if value is not None})

    return Family("timm", name, make, lambda: dict(x=torch.randn(2, 3, size, size)), "", *halves, why)


def _stages(name: str, halves: tuple, why: str = "", size: int = 32, **options) -> Family:
    """A model of timm with stages, which has its own names for their sizes."""
    own = dict.fromkeys(("patch_size", "embed_dim", "depth", "num_heads"))
    return _timm(name, halves, why, size, **own | options)


def _pixels(*shape: int, name: str = "pixel_values", **more) -> Batch:
    """Random images, or numbers of another shape; more: values of other arguments."""
    return lambda: {name: torch.randn(shape or (2, 3, 32, 32))} | {key: value() for key, value in more.items()}


def _grids(*columns: int, name: str = "hidden_states") -> Batch:
    """Two images of 6 x 4 and 4 x 8 patches, in one row of patches."""
    return _pixels(56, *columns, name=name, grid_thw=lambda: torch.tensor([[1, 6, 4], [1, 4, 8]]))


_POST, _INNER = "a norm behind the branch", "a norm between attention and projection"
_WINDOWS, _REDUCED = "windows", "keys and values reduced by a convolution"
_MIXED = "heads are mixed by a layer"
_GRID = lambda: torch.tensor([[1, 6, 4], [1, 4, 8]])  # noqa: E731
_PACKED = {
    _grids(384): """
cohere_compass:CohereCompassVisionModel exaone4_5:Exaone4_5_VisionModel glm4v:Glm4vVisionModel
glm4v_moe:Glm4vMoeVisionModel qwen2_5_omni:Qwen2_5OmniVisionEncoder
qwen3_5:Qwen3_5VisionModel qwen3_5_moe:Qwen3_5MoeVisionModel qwen4_exp:Qwen4ExpVisionModel
""",
    _grids(192): "ernie4_5_vl_moe:Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    _grids(192, name="pixel_values"): """
cosmos3_edge:Cosmos3EdgeVisionModel glm_image:GlmImageVisionModel hunyuan_vl:HunYuanVLVisionTransformer
hy_v4_vl:HYV4VLVisionModel
""",
    _grids(384, name="pixel_values"): """
minimax_m3_vl:MiniMaxM3VLVisionModel muse_glimmer:MuseGlimmerVisionModel muse_spark:MuseSparkVisionModel
""",
    _grids(3, 8, 8, name="pixel_values"): "kimi_k25:Kimi_K25VisionModel",
    _pixels(56, 192, grid_thw=_GRID, merge_sizes=lambda: torch.tensor([2, 2])): "video_llama_3:VideoLlama3VisionModel",
    _pixels(1, 56, 3, 8, 8, grid_thw=_GRID): "paddleocr_vl:PaddleOCRVisionModel",
    _pixels(56, 16, 16, 3, image_grid_thw=_GRID): "inkling2:Inkling2VisionModel",
    _pixels(1, 3, 8, 448, target_sizes=lambda: _GRID()[:, 1:]): "minicpmv4_6:MiniCPMV4_6VisionModel",
}
_PLAIN = """
altclip:AltCLIPVisionModel blip:BlipVisionModel blip_2:Blip2VisionModel chinese_clip:ChineseCLIPVisionModel
clipseg:CLIPSegVisionModel dinov3_vit:DINOv3ViTBackbone flava:FlavaImageModel git:GitVisionModel
granite_docling:GraniteDoclingVisionModel idefics2:Idefics2VisionTransformer idefics3:Idefics3VisionTransformer
instructblip:InstructBlipVisionModel instructblipvideo:InstructBlipVideoVisionModel janus:JanusVisionModel
kosmos2:Kosmos2VisionModel metaclip_2:MetaClip2VisionModel mgp_str:MgpstrModel mlcd:MLCDVisionModel
ovis2:Ovis2VisionModel owlv2:Owlv2VisionModel pixio:PixioModel qianfan_ocr:QianfanOCRVisionModel radio:RadioModel
rf_detr:RfDetrDinov2Backbone smolvlm:SmolVLMVisionTransformer step3p7:Step3p7VisionModel tipsv2:Tipsv2VisionModel
vitpose_backbone:VitPoseBackbone
"""
_FRAMES, _VIDEO = _pixels(2, 4, 3, 32, 32), _pixels(2, 4, 3, 32, 32, name="pixel_values_videos")
_FLAT = _pixels(flattened_patches=lambda: torch.rand(2, 16, 194), name="flattened_patches")
_MASKED = _pixels(patch_attention_mask=lambda: torch.tensor([[[True] * 4] * 3 + [[False] * 4], [[True] * 4] * 4]))
_ONE = lambda *shape: lambda: torch.ones(2, *shape).long()  # noqa: E731
_TILES = _pixels(2, 1, 4, 3, 32, 32, aspect_ratio_ids=_ONE(1), aspect_ratio_mask=_ONE(1, 4))
_PLACES = _pixels(2, 16, 192, pixel_position_ids=lambda: torch.cartesian_prod(*[torch.arange(4)] * 2).expand(2, 16, 2))
_PROMPTS = {name: lambda: torch.randn(2, 3, 32, 32) for name in ("prompt_pixel_values", "prompt_masks")}
_OUTPUTS = dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32)
_PREDICTOR = dict(pred_hidden_size=32, pred_num_hidden_layers=2, pred_num_attention_heads=2)
_DECODER = dict(decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=2)
_SWIN = dict(embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=2, patch_size=4)
_DENSE = dict(mlp_layer_types=["dense"] * 2, adapter_in_dim=32)
_TUBES = dict(tubelet_size=[1, 8, 8], num_spatial_layers=2, num_temporal_layers=2)
_HIDDEN, _STACK = dict(hidden_sizes=[32] * 4), dict(deepstack_visual_indexes=[0])
_CROSS = dict(num_global_layers=1, attention_heads=2, vision_output_dim=64, intermediate_layers_indices=[0])
_TRANSFORMERS = (
    *map(_hf, _PLAIN.split()),
    _hf("phi4_multimodal:Phi4MultimodalVisionModel", _MASKED, (2, 3)),
    _hf("sam3:Sam3ViTModel", global_attn_indexes=[0, 1]),
    _hf("vilt:ViltModel", _pixels(input_ids=_ONE(5))),
    _hf("bridgetower:BridgeTowerVisionModel", _pixels(name="image"), hidden_size=64),
    _hf("vjepa2:VJEPA2Model", _VIDEO, (4, 4), crop_size=32, frames_per_clip=4, **_PREDICTOR),
    _hf("vit_mae:ViTMAEForPreTraining", None, (4, 4), decoder_intermediate_size=64, **_DECODER),
    _hf("x_clip:XCLIPVisionModel", _pixels(4, 3, 32, 32), (4, 2), num_frames=2, mit_hidden_size=32),
    _hf("mobilevit:MobileViTModel", None, (9, 9), **_HIDDEN),
    _hf("llama4:Llama4VisionModel", intermediate_size=128, **_OUTPUTS),
    _hf("mllama:MllamaVisionModel", _TILES, (3, 3), **_CROSS),
    _hf("molmo2:Molmo2VisionModel", _pixels(2, 16, 192), image_size=[32, 32]),
    _hf("kosmos2_5:Kosmos2_5VisionModel", _FLAT, patch_embed_hidden_size=192),
    _hf("pix2struct:Pix2StructVisionModel", _FLAT, patch_embed_hidden_size=192, d_ff=64, d_kv=16),
    _hf("sapiens2:Sapiens2Backbone", None, (0, 2), QK),
    _hf("groupvit:GroupViTVisionModel", None, (3, 7), "tokens are assigned to groups", depths=[1, 1, 1]),
    _hf("timesformer:TimesformerModel", _FRAMES, (0, 2), "time and space are attended in turn", num_frames=4),
    _hf("gemma4:Gemma4VisionModel", _PLACES, (0, 0), _POST),
    _hf("videoprism:VideoPrismVisionModel", _VIDEO, (0, 4), "logits capped by tanh", num_frames=4, **_TUBES),
    _hf("sam_hq:SamHQVisionModel", None, (0, 2), RELATIVE),
    _hf("got_ocr2:GotOcr2VisionEncoder", None, (0, 2), RELATIVE),
    _hf("slanext:SLANeXtVisionEncoder", None, (0, 2), RELATIVE),
    _hf("seggpt:SegGptModel", _pixels(**_PROMPTS), (0, 2), RELATIVE, image_size=[64, 32]),
    _hf("swin:SwinModel", None, (0, 4), _WINDOWS, **_SWIN),
    _hf("swinv2:Swinv2Model", None, (0, 0), f"{_WINDOWS}, {_POST}", **_SWIN),
    _hf("hiera:HieraModel", None, (1, 4), _WINDOWS, depths=[1, 1, 1, 1]),
    _hf("pvt:PvtModel", None, (2, 8), _REDUCED, num_attention_heads=[1, 2, 2, 2], **_HIDDEN),
    _hf("segformer:SegformerModel", None, (2, 0), _REDUCED, **_HIDDEN),
    *(_hf(path, batch) for batch, paths in _PACKED.items() for path in paths.split()),
    _hf("glm_ocr:GlmOcrVisionModel", _grids(384), (0, 2), QK),
    _hf("qwen3_omni_moe:Qwen3OmniMoeVisionEncoder", _grids(384), **_STACK),
    _hf("qwen3_vl_moe:Qwen3VLMoeVisionModel", _grids(384), **_STACK),
    _hf("dots3_note:Dots3NoteVisionModel", _grids(192, name="pixel_values"), (0, 2), QK, **_DENSE),
    _hf("glm5_next:Glm5NextVisionModel", _grids(384), (0, 0), f"{QK}, clamped MLPs"),
)

_TWO, _FOUR = dict(depths=(1, 1), num_heads=(1, 2)), dict(depths=(1,) * 4, num_heads=(1, 2, 2, 2))
_SAME = """
vit_base_patch16_clip_224 vit_base_patch32_clip_quickgelu_224 vit_small_patch16_rope_224
vit_small_patch16_rope_mixed_224 vit_small_patch16_rope_ape_224 vit_base_patch16_rope_reg1_gap_256
vit_srelpos_small_patch16_224 deit3_small_patch16_224 beitv2_base_patch16_224 eva_giant_patch14_224
eva02_tiny_patch14_224 eva02_base_patch14_224 vit_small_patch16_dinov3 vit_huge_plus_patch16_dinov3
vit_7b_patch16_dinov3 vit_pe_lang_large_patch14_448 vit_pe_spatial_tiny_patch16_512 vit_giant_patch14_dinov2
flexivit_small vit_so150m_patch16_reg4_gap_256 vit_so150m2_patch16_reg1_gap_256 vit_betwixt_patch16_reg1_gap_256
vit_intern300m_patch14_448 vit_base_patch14_reg1_tipsv2 vit_base_patch16_radio_v3 vit_base_patch16_lingbot
vit_little_patch16_reg1_gap_256 deepseek_vit_412m qwen3_vit_88m
"""
_TIMM = (
    *map(_timm, _SAME.split()),
    _timm("vit_base_patch16_siglip_224", (2, 3), QUERY),
    _timm("vit_pe_core_tiny_patch16_384", (2, 3), QUERY),
    _timm("naflexvit_base_patch16_par_gap", img_size=None),
    _timm("naflexvit_base_patch16_siglip", (2, 3), QUERY, img_size=None),
    _timm("vit_tiny_r_s16_p8_224", patch_size=None),
    _timm("vit_base_patch16_rpn_224", (0, 0), _POST),
    _timm("vit_relpos_small_patch16_rpn_224", (0, 0), _POST),
    _timm("eva02_enormous_patch14_clip_224", (0, 0), _POST),
    _timm("beit3_base_patch16_224", (0, 0), f"{_INNER}, and in the MLP"),
    _timm("vit_small_patch16_18x2_224", (0, 0), "branches side by side"),
    _timm("vit_base_patch16_xp_224", (0, 0), f"{QK}, one norm for attention and MLP"),
    _timm("vit_pwee_patch16_reg1_gap_256", (0, 0), f"{QK}, one norm for attention and MLP"),
    _timm("vit_dlittle_patch16_reg1_gap_256", (0, 2), "the difference of two attentions"),
    _timm("gemma4_vit_167m", (0, 0), f"{_POST}, clamped layers"),
    _timm("samvit_base_patch16", (0, 2), RELATIVE),
    _timm("cait_xxs24_224", (0, 3), f"{_MIXED}, {QUERY}", depth_token_only=1),
    _timm("xcit_nano_12_p16_224", (0, 2), f"attention of channels, {QUERY}"),
    _timm("convit_tiny", (0, 2), "attention by positions is mixed in"),
    _stages("crossvit_9_240", (6, 6), QUERY, 240, embed_dim=(32, 32), depth=((1, 1, 0),) * 3),
    _stages("volo_d1_224", (14, 20), f"outlook attention, {QUERY}", 64, mlp_ratio=2.0),
    _stages("vitamin_small_224", (14, 0), "two norms in front of the MLP"),
    _stages("swin_tiny_patch4_window7_224", (0, 2), _WINDOWS, embed_dim=16, depths=(1, 1), num_heads=(1, 2)),
    _stages("davit_tiny", (0, 4), f"{_WINDOWS}, attention of channels", img_size=None, embed_dims=(16, 32), **_TWO),
    _stages("hiera_tiny_224", (0, 2), _WINDOWS, 64, embed_dim=16, stages=(1, 1), q_pool=1),
    _stages("tiny_vit_5m_224", (0, 3), _WINDOWS, img_size=None, embed_dims=(16, 32, 32, 32), **_FOUR),
    _stages("twins_svt_small", (0, 4), f"{_WINDOWS}, {_REDUCED}", embed_dims=(32,) * 4, **_FOUR),
    _stages("pvt_v2_b0", (1, 0), f"{_REDUCED}, and in the MLP", img_size=None, embed_dims=(32,) * 4, **_FOUR),
    _stages("mobilevit_xxs", (9, 9), img_size=None),
    _stages("pit_ti_224", (3, 3), size=64, base_dims=(16,) * 3, depth=(1,) * 3, heads=(1,) * 3),
    _stages("mvitv2_tiny", (0, 10), f"{_REDUCED}, {RELATIVE}", 64),
    _timm("tnt_s_legacy_patch16_224", (4, 4), num_heads=None, num_heads_inner=2, num_heads_outer=2, inner_dim=16),
)


ENCODERS = (
    *FAMILIES,
    *_TIMM,
    *_TRANSFORMERS,
    *(Family("torch", name, partial(HandwrittenViT, style), _pixels(name="x")) for name, style in STYLES.items()),
)
