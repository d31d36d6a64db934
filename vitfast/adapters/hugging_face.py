"""transformers: a description for each way that it builds a layer, and its families by name."""

import sys
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.fusable import own_forward
from .masks import may_wait, rotary_tables
from .small import small_layer
from .specs import Attention, Known, Layer, Logits, Mlp, mlp_alone

# Keyword arguments that reach a layer and change nothing in it.
HARMLESS = ("output_hidden_states", "return_dict", "num_items_in_batch")
_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "vitfast", *(f"flash_attention_{n}" for n in (2, 3, 4)))
_EXPECTS = (("config._attn_implementation", _IMPLEMENTATIONS), ("is_causal", (False, None)))


def only_captures(module: nn.Module, keys: tuple[str, ...] = ("attentions",)) -> bool:
    """Whether all hooks are transformers' own, for outputs that are not asked for now."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None or own_forward(module):
        return False
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if any(hook.__module__ != "transformers.utils.output_capturing" for hook in module._forward_hooks.values()):
        return False
    return not set(keys) & set(capturing._active_collector.get() or ())


def _rotary(layer: nn.Module, given: dict, x: Tensor) -> Logits:
    """DINOv3's cosines and sines, each (patches, head size), and the mask."""
    if given.get("position_embeddings") is None:
        return "the call has no position_embeddings"
    cos, sin = given["position_embeddings"]
    if cos.dim() != 2:
        return "position_embeddings are not (patches, head size)"
    rope = rotary_tables(cos, sin, x)
    return dict(rope=rope, num_prefix=x.shape[1] - cos.shape[0], mask=given.get("attention_mask"))


def _packed(offsets, longest, rope: tuple[Tensor, Tensor], x: Tensor) -> Logits:
    """Rotary positions of all tokens, and where each image or window begins."""
    if type(offsets) is not Tensor or offsets.dtype not in (torch.int32, torch.int64):
        return "the offsets of its images are no tensor of whole numbers"
    if offsets.device != x.device:
        return "the offsets of its images are on another device"
    longest = longest if isinstance(longest, (int, torch.SymInt)) else _longest(offsets)
    return dict(rope=rope, offsets=offsets, longest=longest)


_counted = WeakTensorKeyDictionary()  # (version, longest) by offsets: all layers get the same tensor


def _longest(offsets: Tensor) -> int | None:
    """The tokens of the longest image, for which the host waits for a GPU once; None if it must not wait."""
    if not may_wait(offsets):
        return None
    version = None if offsets.is_inference() else offsets._version  # a write into offsets changes it
    found = _counted.get(offsets)
    if found is None or version is None or found[0] != version:
        found = _counted[offsets] = version, int(offsets.diff().max()) if len(offsets) > 1 else 0
    return found[1]


def _qwen_logits(layer: nn.Module, given: dict, x: Tensor) -> Logits:
    if given.get("position_embeddings") is None:
        return "the call has no position_embeddings"
    rope = rotary_tables(*given["position_embeddings"], x)
    return _packed(given.get("cu_seqlens"), given.get("max_seqlen"), rope, x)


def _pixtral_logits(layer: nn.Module, given: dict, x: Tensor) -> Logits:
    """Rotary positions, with the offsets that flash attention gets or a mask that separates the images."""
    options, offsets = _rotary(layer, given, x), given.get("cu_seq_lens_q")
    if isinstance(options, str):
        return options
    if offsets is None:
        flash = "flash" in layer.attention.config._attn_implementation and given.get("attention_mask") is None
        return "the call has neither a mask nor offsets of its images" if flash else options
    if given.get("cu_seq_lens_k") is not offsets or len(x) != 1:
        return "the offsets are not of one row of images"
    return _packed(offsets, given.get("max_length_q"), options["rope"], x)


def _own_bias(table: nn.Module, patch_size: int, given: dict, x: Tensor) -> Tensor:
    """The bias of a table of relative positions for the image of a call."""
    grid = tuple(side // patch_size for side in given["resolution"])
    return table(grid, given.get("interpolate_pos_encoding", False), dim_size=x.shape[1])


def _beit_bias(layer: nn.Module, given: dict, x: Tensor) -> Tensor | None:
    """The sum of BEiT's relative position bias and the mask, as the layer's forward adds them, or None."""
    table, mask = layer.relative_position_bias, given.get("attention_mask")
    if table is None:
        return mask
    bias = _own_bias(table, layer.patch_size, given, x)
    return bias if mask is None else bias + mask


def _beit_logits(layer: nn.Module, given: dict, x: Tensor) -> Logits:
    return {"mask" if layer.relative_position_bias is None else "bias": _beit_bias(layer, given, x)}


def _data2vec_logits(layer: nn.Module, given: dict, x: Tensor) -> Logits:
    """The layer's table of relative positions and the one of all layers."""
    attention, bias = layer.attention.attention, given.get("relative_position_bias")
    if attention.has_relative_position_bias:
        own = _own_bias(attention.relative_position_bias, attention.config.patch_size, given, x)
        bias = own if bias is None else own + bias
    return {} if bias is None else dict(bias=bias)


def _data2vec_mlp(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer.output(layer.intermediate(layer.layernorm_after(x)))
    y = y if layer.lambda_2 is None else layer.lambda_2 * y
    return layer.drop_path(y) + x


def _beit_attention(layer: nn.Module, x: Tensor, given: dict) -> Tensor:
    others = given.keys() - {"attention_mask", "interpolate_pos_encoding", "resolution"}
    given = {name: given[name] for name in others} | dict(attention_mask=_beit_bias(layer, given, x))
    y = layer.lambda_1 * layer.dropout(layer.attention(layer.layernorm_before(x), **given)[0])
    return layer.drop_path(y) + x


def gated(layer: Layer, **options) -> Layer:
    """The description with a gated MLP in place of its own, for configurations that ask for one."""
    mlp = layer.mlp._replace(**dict(fc1="up_proj", gate="gate_proj", act="act_fn", fc2="down_proj") | options)
    return layer._replace(make=partial(small_layer, use_swiglu_ffn=True, use_gated_mlp=True), mlp=mlp)


# For layers that are called with nothing but tokens.
_TOKENS_ALONE = dict(takes=(), logits=lambda layer, given, x: {}, example=lambda tokens: {})
ATTENTION = Attention(
    path="attention",
    qkv=("q_proj", "k_proj", "v_proj"),
    proj="o_proj",
    heads="num_attention_heads",
    scale="scaling",
    dropout="attention_dropout",
    expects=_EXPECTS,
)
MLP = Mlp(act="activation_fn")
LAYER = Layer(
    small_layer,
    attention=ATTENTION,
    mlp=MLP,
    takes=("attention_mask",),
    logits=lambda layer, given, x: dict(mask=given.get("attention_mask")),
    harmless=HARMLESS,
    idle_hooks=only_captures,
    example=lambda tokens: dict(attention_mask=torch.arange(tokens) < torch.tensor([3, tokens])[:, None, None, None]),
)
VIT = LAYER._replace(norms=("layernorm_before", "layernorm_after"), behind=(("dropout",), ("dropout",)))
DINOV2 = LAYER._replace(behind=(("layer_scale1", "drop_path"), ("layer_scale2", "drop_path")))
CLIP = LAYER._replace(
    norms=("layer_norm1", "layer_norm2"),
    attention=ATTENTION._replace(
        path="self_attn", proj="out_proj", heads="num_heads", scale="scale", dropout="dropout"
    ),
)
# Layers with BERT's names of modules; the module `output` adds the residual itself.
BERT = LAYER._replace(
    norms=("layernorm_before", "layernorm_after"),
    attention=ATTENTION._replace(
        qkv=("attention.query", "attention.key", "attention.value"),
        proj="output.dense",
        heads="attention.num_attention_heads",
        scale="attention.scaling",
        dropout="attention.dropout_prob",
        idle=("output.dropout",),
        expects=tuple((f"attention.{name}", values) for name, values in _EXPECTS),
    ),
    mlp=Mlp(
        path="",
        fc1="intermediate.dense",
        act="intermediate.intermediate_act_fn",
        fc2="output.dense",
        idle=("output.dropout",),
    ),
    **_TOKENS_ALONE,
    mlp_half=lambda layer, x: layer.output(layer.intermediate(layer.layernorm_after(x)), x),
)
# The last two are DINOv2 of transformers before 5.20 or so.
_BEFORE = DINOV2._replace(attention=BERT.attention, mlp=Mlp(act="activation"), **_TOKENS_ALONE)
_GATED_BEFORE = dict(fc1="weights_in", gate="first", act=None, activation="silu", fc2="weights_out")
DINOV2S = (DINOV2, gated(DINOV2), _BEFORE, gated(_BEFORE, **_GATED_BEFORE))
# DINOv3: rotary positions of the patches, biases as the configuration has them.
DINOV3 = DINOV2._replace(
    attention=ATTENTION._replace(heads="num_heads", dropout="dropout"),
    mlp=Mlp(fc1="up_proj", act="act_fn", fc2="down_proj"),
    takes=("attention_mask", "position_embeddings"),
    logits=_rotary,
    example=lambda tokens: dict(position_embeddings=tuple(torch.randn(2, tokens - 1, 16))),
)
BEIT = VIT._replace(
    behind=(("dropout", "lambda_1", "drop_path"), ("dropout", "lambda_2", "drop_path")),
    takes=("attention_mask", "interpolate_pos_encoding", "resolution"),
    logits=_beit_logits,
    extras=("relative_position_bias",),
    attention_half=_beit_attention,
    example=lambda tokens: dict(resolution=(16, 16)),
)
DATA2VEC = BERT._replace(
    attention=BERT.attention._replace(
        scale=None,
        dropout="attention.config.attention_probs_dropout_prob",
        idle=("output.dropout", "attention.dropout"),
        expects=(),
    ),
    behind=(("lambda_1", "drop_path"), ("lambda_2", "drop_path")),
    takes=("relative_position_bias", "interpolate_pos_encoding", "resolution"),
    logits=_data2vec_logits,
    extras=("attention.attention.relative_position_bias",),
    mlp_half=_data2vec_mlp,
    example=lambda tokens: dict(resolution=(16, 16), relative_position_bias=torch.randn(1, 2, tokens, tokens)),
)
AIMV2 = CLIP._replace(norms=("rms_norm1", "rms_norm2"), attention=CLIP.attention._replace(path="attention"))
AIMV2 = gated(AIMV2, path="ffn")
INTERNVL = VIT._replace(
    attention=ATTENTION._replace(
        heads="num_heads",
        proj="projection_layer",
        scale="scale",
        idle=("projection_dropout",),
        qk_norms=("q_norm", "k_norm"),
        norms_over_heads=True,
    ),
    behind=(("lambda_1",), ("dropout", "lambda_2")),
    **_TOKENS_ALONE,
)
# These lay all images of a batch in one row. Qwen says in each call where they begin, Pixtral only to flash attention;
# for others it writes a mask of all pairs of tokens. In an accelerated model they get offsets (packed_models.py).
PIXTRAL = LAYER._replace(
    norms=("attention_norm", "ffn_norm"),
    attention=DINOV3.attention,
    harmless=(*HARMLESS, "position_ids"),
    takes=(*DINOV3.takes, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    logits=_pixtral_logits,
    example=lambda tokens: dict(
        position_embeddings=tuple(torch.randn(2, tokens, 16)), attention_mask=torch.randn(1, 1, tokens, tokens)
    ),
)
PIXTRAL = gated(PIXTRAL, path="feed_forward")
QWEN2 = LAYER._replace(
    attention=Attention(heads="num_heads", scale="scaling", dropout="attention_dropout", expects=ATTENTION.expects),
    mlp=Mlp(act="act"),
    takes=("cu_seqlens", "max_seqlen", "position_embeddings"),
    logits=_qwen_logits,
    packed=True,
    example=lambda tokens: dict(
        cu_seqlens=torch.tensor([0, 2, tokens], dtype=torch.int32),
        position_embeddings=tuple(torch.randn(2, tokens, 16)),
    ),
)
QWEN2_5 = gated(QWEN2)
QWEN3 = QWEN2._replace(mlp=Mlp(fc1="linear_fc1", act="act_fn", fc2="linear_fc2"))

# Families whose layers are built alike: the end of the layer's name, a description for each way in which one is built,
# and for each family its file in transformers.models and the beginning of the names of its classes.
FAMILIES = (
    ("Layer", (VIT,), "vit.ViT deit.DeiT vit_mae.ViTMAE vit_msn.ViTMSN ijepa.IJepa vivit.Vivit"),
    ("Layer", (VIT,), "audio_spectrogram_transformer.AST"),
    ("Layer", (BERT,), "videomae.VideoMAE yolos.Yolos"),
    ("ViTLayer", (BERT,), "dpt.DPT"),
    ("EncoderLayer", (CLIP,), "siglip.Siglip siglip2.Siglip2 clip.CLIP metaclip_2.MetaClip2 owlvit.OwlViT owlv2.Owlv2"),
    ("Layer", DINOV2S, "dinov2.Dinov2 dinov2_with_registers.Dinov2WithRegisters"),
    ("Layer", (DINOV3, gated(DINOV3)), "dinov3_vit.DINOv3ViT"),
    ("Layer", (BEIT,), "beit.Beit"),
    ("Layer", (DATA2VEC,), "data2vec_vision.Data2VecVision"),
    ("EncoderLayer", (AIMV2,), "aimv2.Aimv2"),
    ("Layer", (INTERNVL,), "internvl.InternVLVision"),
    ("AttentionLayer", (PIXTRAL,), "pixtral.Pixtral"),
    ("VisionBlock", (QWEN2,), "qwen2_vl.Qwen2VL"),
    ("VisionBlock", (QWEN2_5,), "qwen2_5_vl.Qwen2_5_VL"),
    ("Block", (QWEN3,), "qwen3_vl.Qwen3VLVision"),
)
# Where patch projections and norms are in any of these families, by the end of the class's name.
PLACES = {
    "PatchEmbeddings": ("projection",),
    "ViTPatchEmbeddings": ("projection",),
    "TubeletEmbeddings": ("projection",),
    "VisionEmbeddings": ("patch_embedding", "patch_embed", "rms_norm"),
    "Model": ("layernorm", "norm"),
    "Backbone": ("layernorm", "norm"),
    "VisionModel": ("patch_conv", "ln_pre", "pre_layrnorm", "post_layernorm", "rms_norm"),
    "VisionTransformer": ("pre_layernorm", "post_layernorm"),
    "TextModel": ("final_layer_norm",),
    "Decoder": ("decoder_norm", "norm"),
    "MLPHead": ("layernorm",),
    "Pooler": ("layernorm",),
    "ForMaskedImageModeling": ("layernorm",),
    "ForVideoClassification": ("fc_norm",),
    "ForObjectDetection": ("layer_norm",),
}


_HEAD = "attention of one learned query, for which there is no operation"
_WINDOWS = "windows with decomposed relative positions"
_POOLING = Known(places=("layernorm", "mlp"), left=_HEAD)
_CLASSES = {}
for _layer, _layers, _names in FAMILIES:
    for _name in _names.split():
        _CLASSES |= {_name + end: Known(places=places) for end, places in PLACES.items()}
        _CLASSES[_name + _layer] = Known(_layers)
_CLASSES |= {
    "dinov3_vit.DINOv3ViTEmbeddings": Known(places=("patch_embeddings",)),
    "qwen2_vl.PatchEmbed": Known(places=("proj",)),
    "qwen2_vl.PatchMerger": Known(places=("ln_q",)),
    "qwen2_5_vl.Qwen2_5_VisionPatchEmbed": Known(places=("proj",)),
    "qwen2_5_vl.Qwen2_5_VLPatchMerger": Known(places=("ln_q",)),
    "qwen3_vl.Qwen3VLVisionPatchEmbed": Known(places=("proj",)),
    "qwen3_vl.Qwen3VLVisionPatchMerger": Known(places=("norm",)),
    "siglip.SiglipMultiheadAttentionPoolingHead": _POOLING,
    "siglip2.Siglip2MultiheadAttentionPoolingHead": _POOLING,
    "aimv2.Aimv2AttentionPoolingHead": Known(left=_HEAD),
    "sam.SamVisionLayer": Known(places=("layer_norm1", "layer_norm2", "mlp"), left=_WINDOWS),
    "sam.SamPatchEmbeddings": Known(places=("projection",)),
    "vitdet.VitDetLayer": Known(places=("norm1", "norm2", "mlp"), left=_WINDOWS),
    "vitdet.VitDetEmbeddings": Known(places=("projection",)),
    "siglip.SiglipMLP": mlp_alone(MLP),
    "siglip2.Siglip2MLP": mlp_alone(MLP),
    "sam.SamMLPBlock": mlp_alone(Mlp(fc1="lin1", fc2="lin2"), mlp_ratio=1.0),
    "vitdet.VitDetMlp": mlp_alone(Mlp(idle=("drop",))),
}
# "vit.ViTLayer" -> "transformers.models.vit.modeling_vit.ViTLayer"
_IN_FILES = [(*name.split("."), known) for name, known in _CLASSES.items()]
CLASSES = {
    f"transformers.models.{file.removesuffix('_vision')}.modeling_{file}.{cls}": known for file, cls, known in _IN_FILES
}
