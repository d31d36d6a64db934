"""Layers of torchvision, open_clip, OpenAI's CLIP, PyTorch itself, Meta's DINOv2 and DINOv3."""

from functools import partial

import torch
from torch import Tensor, nn

from .masks import rotary_tables
from .small import small_layer
from .specs import Attention, Known, Layer, Logits, Mlp

# nn.MultiheadAttention holds q, k and v packed.
MULTIHEAD = Attention(
    qkv="in_proj_weight",
    proj="out_proj",
    dropout="dropout",
    expects=(("bias_k", (None,)), ("add_zero_attn", (False,)), ("_qkv_same_embed_dim", (True,))),
)


def _torchvision_attention(block: nn.Module, x: Tensor, given: dict) -> Tensor:
    h = block.ln_1(x)
    return x + block.dropout(block.self_attention(h, h, h, need_weights=False)[0])


_TORCHVISION = Layer(
    small_layer,
    norms=("ln_1", "ln_2"),
    attention=MULTIHEAD._replace(path="self_attention"),
    mlp=Mlp(fc1="0", act="1", fc2="3", idle=("2", "4")),
    behind=(("dropout",), ()),
    attention_half=_torchvision_attention,
)


def _encoder_layer_mask(layer: nn.Module, given: dict, x: Tensor) -> Logits:
    """nn.TransformerEncoderLayer's masks, in which True hides a key."""
    masks = given.get("src_mask"), given.get("src_key_padding_mask")
    if masks == (None, None):
        return {}
    if any(mask is not None and mask.dim() != 2 for mask in masks):
        return "the mask is not one for all images and heads"
    seen = [None if m is None else ~m if m.dtype == torch.bool else m for m in masks]
    own, padding = seen[0], None if seen[1] is None else seen[1][:, None, None, :]
    if own is None or padding is None:
        return dict(mask=padding if own is None else own)
    if own.dtype != padding.dtype:
        return "the masks differ in dtype"
    return dict(mask=own & padding if own.dtype == torch.bool else own + padding)


def _encoder_layer_attention(layer: nn.Module, x: Tensor, given: dict) -> Tensor:
    masks = given.get("src_mask"), given.get("src_key_padding_mask")
    return x + layer._sa_block(layer.norm1(x), *masks, is_causal=given.get("is_causal", False))


_ENCODER_LAYER = Layer(
    small_layer,
    attention=MULTIHEAD._replace(path="self_attn"),
    tokens_first=lambda layer: not layer.self_attn.batch_first,
    mlp=Mlp(path="", fc1="linear1", act="activation", fc2="linear2", idle=("dropout",)),
    behind=(("dropout1",), ("dropout2",)),
    takes=("src_mask", "src_key_padding_mask"),
    logits=_encoder_layer_mask,
    unsupported=lambda layer: None if layer.norm_first else "normalises after each branch (norm_first=False)",
    attention_half=_encoder_layer_attention,
    mlp_half=lambda layer, x: x + layer._ff_block(layer.norm2(x)),
)


def _open_clip_mask(block: nn.Module, given: dict, x: Tensor) -> Logits:
    """open_clip's mask, one for all images and heads, which is added to the logits."""
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() != 2:
        return "the mask is not one for all images and heads"
    # open_clip casts a mask to the tokens' dtype, so that even a boolean one is added
    return dict(mask=None if mask is None else mask.to(x.dtype))


_OPEN_CLIP = Layer(
    small_layer,
    norms=("ln_1", "ln_2"),
    attention=MULTIHEAD,
    mlp=Mlp(fc1="c_fc", act="gelu", fc2="c_proj"),
    behind=(("ls_1",), ("ls_2",)),
    takes=("attn_mask",),
    logits=_open_clip_mask,
    tokens_first=lambda block: not block.attn.batch_first,
    attention_half=lambda block, x, given: x + block.ls_1(block.attention(q_x=block.ln_1(x), **given)),
)

_OPENAI_CLIP = _OPEN_CLIP._replace(
    behind=((), ()),
    takes=(),
    logits=lambda block, given, x: dict(mask=block.attn_mask),
    attention_half=lambda block, x, given: x + block.attention(block.ln_1(x)),
)

_DINOV2 = Layer(
    partial(small_layer, drop_path=0.1),
    attention=Attention(scale="scale", idle=("attn_drop", "proj_drop")),
    mlp=Mlp(idle=("drop",)),
    behind=(("ls1", "drop_path1"), ("ls2", "drop_path1")),  # its code uses the first for both
    extras=("drop_path2",),
    unsupported=lambda block: (
        "drops images of the batch in training" if block.training and block.sample_drop_ratio > 0.1 else None
    ),
)


def _dinov3(cls: type, **options) -> nn.Module:
    """A small layer of DINOv3's own code; as with its weights, the bias of the keys is masked."""
    block = small_layer(cls, drop_path=0.0, mask_k_bias=True, **options)
    block.attn.qkv.bias_mask.fill_(1.0)[32:64] = 0.0  # bias_mask starts as NaN
    return block


def _gated_dinov3(cls: type) -> nn.Module:
    return _dinov3(cls, ffn_layer=f"{cls.__module__.rpartition('.')[0]}.ffn_layers:SwiGLUFFN")


def _dinov3_logits(block: nn.Module, given: dict, x: Tensor) -> Logits:
    """The (sin, cos) of the patches; both columns of a pair have one angle."""
    rope = given.get("rope_or_rope_list")
    if rope is None:
        return {}
    sin, cos = (table[..., : table.shape[-1] // 2] for table in rope)
    return dict(rope=rotary_tables(cos, sin, x), num_prefix=x.shape[1] - cos.shape[-2])


_DINOV3 = Layer(
    _dinov3,
    attention=Attention(bias_mask="bias_mask", scale="scale", idle=("attn_drop", "proj_drop")),
    mlp=Mlp(idle=("drop",)),
    behind=(("ls1",), ("ls2",)),
    takes=("rope_or_rope_list",),
    logits=_dinov3_logits,
    unsupported=lambda block: (
        "drops images of the batch in training" if block.training and block.sample_drop_ratio > 0 else None
    ),
    attention_half=lambda block, x, given: (
        x + block.ls1(block.attn(block.norm1(x), rope=given.get("rope_or_rope_list")))
    ),
    example=lambda tokens: dict(rope_or_rope_list=tuple(torch.randn(2, tokens - 1, 8).repeat(1, 1, 2))),
)
_SWIGLU_FFN = Mlp(fc1="w2", gate="w1", fc2="w3", act=None, activation="silu")
_DINOV3S = (_DINOV3, _DINOV3._replace(make=_gated_dinov3, mlp=_SWIGLU_FFN))

_OPENAI_MODEL, _FINAL = Known(places=("conv1", "ln_pre", "ln_post")), Known(places=("ln_final",))
CLASSES = {
    "torchvision.models.vision_transformer.EncoderBlock": Known((_TORCHVISION,)),
    "torchvision.models.vision_transformer.VisionTransformer": Known(places=("conv_proj",)),
    "torchvision.models.vision_transformer.Encoder": Known(places=("ln",)),
    "torch.nn.modules.transformer.TransformerEncoderLayer": Known((_ENCODER_LAYER,)),
    "torch.nn.modules.transformer.TransformerEncoder": Known(places=("norm",)),
    "open_clip.transformer.ResidualAttentionBlock": Known((_OPEN_CLIP,)),
    "open_clip.transformer.VisionTransformer": _OPENAI_MODEL,
    "open_clip.transformer.TextTransformer": _FINAL,
    "open_clip.model.CLIP": _FINAL,
    "clip.model.ResidualAttentionBlock": Known((_OPENAI_CLIP,)),
    "clip.model.VisionTransformer": _OPENAI_MODEL,
    "clip.model.CLIP": _FINAL,
    "dinov2.layers.block.Block": Known((_DINOV2,)),
    "dinov2.layers.block.NestedTensorBlock": Known((_DINOV2,)),
    "dinov2.models.vision_transformer.DinoVisionTransformer": Known(places=("patch_embed.proj", "norm")),
    "dinov3.layers.block.SelfAttentionBlock": Known(_DINOV3S),
    "dinov3.models.vision_transformer.DinoVisionTransformer": Known(
        places=("patch_embed.proj", "norm", "cls_norm", "local_cls_norm")
    ),
}
