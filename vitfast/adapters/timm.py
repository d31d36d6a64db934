"""timm's layers: those of VisionTransformer (DeiT, CLIP, NaFlexViT ...), Eva, Beit, vit_relpos."""

from functools import partial

import torch
from torch import Tensor, nn

from .masks import packed_tokens, rotary_tables
from .small import small_layer
from .specs import Attention, Known, Layer, Logits, Mlp, mlp_alone

_IDLE = ("attn_drop", "proj_drop")

ATTENTION = Attention(scale="scale", idle=(*_IDLE, "gate"), qk_norms=("q_norm", "k_norm"), inner_norm="norm")
MLP = Mlp(inner_norm="norm", idle=("drop1", "drop2"))
SWIGLU = MLP._replace(fc1="fc1_x", gate="fc1_g")
PACKED_SWIGLU = MLP._replace(gate="first", expects=(("gate_last", (False,)),))

# VisionTransformer's block.
_BLOCK = Layer(
    small_layer,
    attention=ATTENTION,
    mlp=MLP,
    behind=(("ls1", "drop_path1"), ("ls2", "drop_path2")),
    takes=("attn_mask",),
    logits=lambda block, given, x: dict(mask=given.get("attn_mask")),
)
_BLOCKS = (
    _BLOCK,
    _BLOCK._replace(make=partial(small_layer, mlp_layer="timm.layers:SwiGLU"), mlp=SWIGLU),
    _BLOCK._replace(make=partial(small_layer, mlp_layer="timm.layers:SwiGLUPacked"), mlp=PACKED_SWIGLU),
)


def _eva_logits(block: nn.Module, given: dict, x: Tensor) -> Logits:
    """Rotary positions, given as sines joined with cosines, and a mask."""
    rope, options = given.get("rope"), dict(mask=given.get("attn_mask"))
    if rope is None:
        return options
    if rope.dim() == 3 and rope.shape[0] != block.attn.num_heads:
        return "rope is neither (patches, ...) nor (heads, patches, ...) nor (batch, heads, patches, ...)"
    sin, cos = rope.chunk(2, -1)
    layout = "half" if getattr(block.attn, "rotate_half", False) else "interleaved"
    num_prefix = 0 if packed_tokens(options) else block.attn.num_prefix_tokens
    return dict(rope=rotary_tables(cos, sin, x), rope_layout=layout, num_prefix=num_prefix, **options)


# Eva's block: EVA, EVA-02, DINOv3, Perception Encoder, vit_*_rope_*. q, k and v come from a linear layer with separate
# biases, or from three; with attn_type="rope" the layer holds its biases, as in VisionTransformer.
_EVA_ATTENTION = ATTENTION._replace(biases=("q_bias", "k_bias", "v_bias"), expects=(("qkv_bias_separate", (False,)),))
_THREE = ATTENTION._replace(qkv=("q_proj", "k_proj", "v_proj"), expects=(*ATTENTION.expects, ("qkv", (None,))))
_EVA = Layer(
    small_layer,
    attention=_EVA_ATTENTION,
    mlp=MLP,
    behind=(("gamma_1", "drop_path1"), ("gamma_2", "drop_path2")),
    takes=("rope", "attn_mask"),
    logits=_eva_logits,
    example=lambda tokens: dict(rope=torch.randn(tokens - 1, 32)),
)
_INNER_NORM = dict(make=partial(small_layer, swiglu_mlp=True, scale_mlp=True), mlp=SWIGLU)
_EVAS = (
    _EVA,
    _EVA._replace(make=partial(small_layer, qkv_fused=False), attention=_THREE),
    _EVA._replace(make=partial(small_layer, attn_type="rope"), attention=ATTENTION),
    _EVA._replace(make=partial(small_layer, attn_type="rope", qkv_fused=False), attention=_THREE),
    _EVA._replace(**_INNER_NORM),
    _EVA._replace(make=partial(small_layer, swiglu_mlp=True), mlp=PACKED_SWIGLU),
)


def _beit_logits(block: nn.Module, given: dict, x: Tensor) -> Logits:
    """The layer's table of relative positions, or the one of all layers, or both."""
    shared = given.get("shared_rel_pos_bias")
    own = None if block.attn.relative_position_bias_table is None else block.attn._get_rel_pos_bias()
    bias = own if shared is None else shared if own is None else own + shared
    return {} if bias is None else dict(bias=bias)


_BEIT = Layer(
    small_layer,
    attention=_EVA_ATTENTION._replace(idle=_IDLE, qk_norms=None, inner_norm=None),
    mlp=MLP,
    behind=_EVA.behind,
    takes=("shared_rel_pos_bias",),
    logits=_beit_logits,
    extras=("attn.relative_position_bias_table",),
)


def _relpos_logits(block: nn.Module, given: dict, x: Tensor) -> Logits:
    own, shared = block.attn.rel_pos, given.get("shared_rel_pos")
    bias = shared if own is None else own.get_bias()
    return {} if bias is None else dict(bias=bias)


_RELPOS = Layer(
    small_layer,
    attention=ATTENTION._replace(idle=_IDLE, inner_norm=None),
    mlp=MLP,
    behind=_BLOCK.behind,
    takes=("shared_rel_pos",),
    logits=_relpos_logits,
    extras=("attn.rel_pos",),
    example=lambda tokens: dict(shared_rel_pos=torch.randn(1, 2, tokens, tokens)),
)

_MODEL = Known(places=("patch_embed.proj", "norm_pre", "norm", "fc_norm"))
_POST_NORM = Known(places=("norm1", "norm2", "mlp"), left="normalises after each branch")
_SIDE_BY_SIDE = Known(left="attention and MLP run side by side")
_SAM = Known(places=("norm1", "norm2", "mlp"), left="windows with decomposed relative positions")
_ONE_QUERY = "attention of one learned query, for which there is no operation"
_CLASSES = {
    "models.vision_transformer.Block": Known(_BLOCKS),
    "models.vision_transformer.ResPostBlock": _POST_NORM,
    "models.vision_transformer.ParallelScalingBlock": _SIDE_BY_SIDE,
    "models.vision_transformer.DiffParallelScalingBlock": _SIDE_BY_SIDE,
    "models.vision_transformer.ParallelThingsBlock": Known(left="several attentions run side by side"),
    "models.vision_transformer.VisionTransformer": _MODEL,
    "models.vision_transformer_relpos.RelPosBlock": Known((_RELPOS,)),
    "models.vision_transformer_relpos.ResPostRelPosBlock": _POST_NORM,
    "models.vision_transformer_relpos.VisionTransformerRelPos": _MODEL,
    "models.vision_transformer_sam.Block": _SAM,
    "models.vision_transformer_sam.VisionTransformerSAM": Known(places=("patch_embed.proj",)),
    "models.eva.EvaBlock": Known(_EVAS),
    "models.eva.EvaBlockPostNorm": _POST_NORM,
    "models.eva.Eva": _MODEL,
    "models.beit.Block": Known((_BEIT, _BEIT._replace(**_INNER_NORM))),
    "models.beit.Beit": _MODEL,
    "models.naflexvit.NaFlexVit": Known(places=("norm_pre", "norm", "fc_norm")),
    "models.naflexvit.NaFlexEmbeds": Known(places=("proj", "norm")),
    "models.swin_transformer.SwinTransformerBlock": Known(left="windows with a relative position bias"),
    "layers.attention_pool.AttentionPoolLatent": Known(places=("norm", "mlp"), left=_ONE_QUERY),
    "layers.mlp.Mlp": mlp_alone(MLP),
    "layers.mlp.SwiGLU": mlp_alone(SWIGLU),
    "layers.mlp.GluMlp": mlp_alone(PACKED_SWIGLU, act_layer=nn.SiLU, gate_last=False),
}
CLASSES = {f"timm.{name}": known for name, known in _CLASSES.items()}
