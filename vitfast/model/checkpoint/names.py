"""The names of other formats and ours, as pairs that serve reading and writing.

A pair is two pieces of names, theirs and ours. A piece is a whole name, except that more may stand before one that
begins with "." or "/", and after one that ends with ".", "/" or "_". All pairs are applied, in their order.
"""

import re

from torch import Tensor

from ...errors import InputError

State = dict[str, Tensor]
Pairs = tuple[tuple[str, str], ...]
Renames = tuple[tuple[str, str], ...]  # patterns and replacements, all applied, in this order

# transformers 4's names, which `save_pretrained` still writes, without the prefix of the model (`vit.`). q, k and v are
# apart.
HUGGING_FACE: Pairs = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("encoder.layer.", "blocks."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".attention.attention.query.", ".attn.q."),
    (".attention.attention.key.", ".attn.k."),
    (".attention.attention.value.", ".attn.v."),
    (".attention.output.dense.", ".attn.proj."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
    ("layernorm.", "norm."),
    ("classifier.", "head."),
)

TORCHVISION: Pairs = (
    ("class_token", "cls_token"),
    ("conv_proj.", "patch_embed.proj."),
    ("encoder.pos_embedding", "pos_embed"),
    ("encoder.layers.encoder_layer_", "blocks."),
    (".ln_1.", ".norm1."),
    (".ln_2.", ".norm2."),
    (".self_attention.in_proj_", ".attn.qkv."),
    (".self_attention.out_proj.", ".attn.proj."),
    (".mlp.0.", ".mlp.fc1."),
    (".mlp.3.", ".mlp.fc2."),
    ("encoder.ln.", "norm."),
    ("heads.pre_logits.", "pre_logits.fc."),
    ("heads.head.", "head."),
)

# The image tower of CLIP and SigLIP in transformers, without prefix; q, k and v apart, the MAP head's in one on disk.
HUGGING_FACE_TOWER: Pairs = (
    ("visual_projection.", "head."),  # before the MAP head, which is called so there
    ("embeddings.class_embedding", "cls_token"),
    ("embeddings.position_embedding.weight", "pos_embed"),
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("pre_layrnorm.", "norm_pre."),
    ("encoder.layers.", "blocks."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".self_attn.q_proj.", ".attn.q."),
    (".self_attn.k_proj.", ".attn.k."),
    (".self_attn.v_proj.", ".attn.v."),
    (".self_attn.out_proj.", ".attn.proj."),
    ("post_layernorm.", "norm."),
    ("head.probe", "attn_pool.latent"),
    ("head.attention.q.", "attn_pool.q."),
    ("head.attention.kv.", "attn_pool.kv."),
    ("head.attention.out_proj.", "attn_pool.proj."),
    ("head.layernorm.", "attn_pool.norm."),
    ("head.mlp.", "attn_pool.mlp."),
)

# What DINOv2 in memory and DINOv3 share in transformers; the gate and what it gates apart.
HUGGING_FACE_LATER: Pairs = (
    (".layer_scale1.lambda1", ".ls1.gamma"),
    (".layer_scale2.lambda1", ".ls2.gamma"),
    (".mlp.gate_proj.", ".mlp.fc1_g."),
    (".mlp.up_proj.", ".mlp.fc1_x."),
    (".mlp.down_proj.", ".mlp.fc2."),
)

# transformers' DINOv3 on disk.
HUGGING_FACE_DINOV3: Pairs = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.register_tokens", "reg_token"),
    ("embeddings.patch_embeddings.", "patch_embed.proj."),
    ("layer.", "blocks."),
    (".attention.q_bias", ".attn.q_bias"),
    (".attention.v_bias", ".attn.v_bias"),
    (".attention.q_proj.", ".attn.q."),
    (".attention.k_proj.", ".attn.k."),
    (".attention.v_proj.", ".attn.v."),
    (".attention.o_proj.", ".attn.proj."),
    *HUGGING_FACE_LATER,
)

# CLIP in OpenAI's own code and open_clip.
OPENAI: Pairs = (
    ("visual.class_embedding", "cls_token"),
    ("visual.positional_embedding", "pos_embed"),
    ("visual.conv1.", "patch_embed.proj."),
    ("visual.ln_pre.", "norm_pre."),
    ("visual.transformer.resblocks.", "blocks."),
    (".ln_1.", ".norm1."),
    (".ln_2.", ".norm2."),
    (".attn.in_proj_", ".attn.qkv."),
    (".attn.out_proj.", ".attn.proj."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
    ("visual.ln_post.", "norm."),
    ("visual.proj.", "head."),
)

# The paper's own code, against our names with "/" for "."; q, k and v apart.
GOOGLE: Pairs = (
    ("embedding/", "patch_embed/proj/"),
    ("cls", "cls_token"),
    ("Transformer/posembed_input/pos_embedding", "pos_embed"),
    ("Transformer/encoderblock_", "blocks/"),
    ("/LayerNorm_0/", "/norm1/"),
    ("/LayerNorm_2/", "/norm2/"),
    ("/MultiHeadDotProductAttention_1/query/", "/attn/q/"),
    ("/MultiHeadDotProductAttention_1/key/", "/attn/k/"),
    ("/MultiHeadDotProductAttention_1/value/", "/attn/v/"),
    ("/MultiHeadDotProductAttention_1/out/", "/attn/proj/"),
    ("/MlpBlock_3/Dense_0/", "/mlp/fc1/"),
    ("/MlpBlock_3/Dense_1/", "/mlp/fc2/"),
    ("Transformer/encoder_norm/", "norm/"),
    ("pre_logits/", "pre_logits/fc/"),
)
# big_vision counts the modules of a block anew and keeps positions, for patches alone, at the top level: its names and
# the paper's.
BIG_VISION: Pairs = (
    ("pos_embedding", "Transformer/posembed_input/pos_embedding"),
    ("/MultiHeadDotProductAttention_0/", "/MultiHeadDotProductAttention_1/"),
    ("/MlpBlock_0/", "/MlpBlock_3/"),
    ("/LayerNorm_1/", "/LayerNorm_2/"),
)


def to_ours(pairs: Pairs) -> Renames:
    return tuple((_pattern(theirs), ours) for theirs, ours in pairs)


def to_theirs(pairs: Pairs) -> Renames:
    return tuple((_pattern(ours), theirs) for theirs, ours in pairs)


def _pattern(piece: str) -> str:
    return ("" if piece[0] in "./" else "^") + re.escape(piece) + ("" if piece[-1] in "./_" else "$")


def rename(state: State, renames: Renames) -> State:
    """The state dict with every name changed by all of `renames`. Raises InputError where two become one."""
    renamed, sources = {}, {}
    for source, value in state.items():
        key = source
        for pattern, replacement in renames:
            key = re.sub(pattern, replacement, key)
        if key in renamed:
            raise same_tensor(sources[key], source)
        renamed[key], sources[key] = value, source
    return renamed


def same_tensor(first: str, second: str) -> InputError:
    """An InputError for two names of one and the same tensor of the ViT."""
    return InputError(f"{first} and {second} are two names of the same tensor; remove the one that is not the model's")


def split_qkv(state: State) -> State:
    """`blocks.i.attn.qkv` -> `blocks.i.attn.{q,k,v}`."""
    apart: dict[str, Tensor] = {}
    for key, value in state.items():
        names = [key.replace(".qkv.", f".{name}.") for name in "qkv"] if ".attn.qkv." in key else [key]
        apart |= zip(names, value.chunk(3) if len(names) == 3 else (value,))
    return {key: value.contiguous() for key, value in apart.items()}
