"""Tables of other formats' names and ours, for reading and writing, and functions to apply them.

A pair holds a piece of a name in the other format, and the piece that replaces it in ours. A piece matches only a whole
name, except that any text may precede a piece that begins with "." or "/", and follow one that ends with ".", "/" or
"_". All pairs of a table are applied, in order.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InputError

State = dict[str, Tensor]
Pairs = tuple[tuple[str, str], ...]
Renames = tuple[tuple[str, str], ...]  # regular expressions and their replacements, all applied, in this order

# transformers 4's names, which `save_pretrained` still writes, without the prefix of the model (`vit.`). q, k and v are
# separate tensors.
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

# The image tower of CLIP and SigLIP in transformers, without its prefix. q, k and v are separate tensors, except that
# those of the MAP head are one tensor on disk, which towers.prepare_tower splits.
HUGGING_FACE_TOWER: Pairs = (
    ("visual_projection.", "head."),  # before the MAP head, whose names in transformers begin with `head.` too
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

# transformers' DINOv3 on disk; its other models have many of these names in memory. Gate and up are separate tensors.
HUGGING_FACE_DINOV3: Pairs = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.register_tokens", "reg_token"),
    ("embeddings.patch_embeddings.", "patch_embed.proj."),
    ("layer.", "blocks."),
    (".attention.q_proj.", ".attn.q."),
    (".attention.k_proj.", ".attn.k."),
    (".attention.v_proj.", ".attn.v."),
    (".attention.o_proj.", ".attn.proj."),
    (".layer_scale1.lambda1", ".ls1.gamma"),
    (".layer_scale2.lambda1", ".ls2.gamma"),
    (".mlp.gate_proj.", ".mlp.fc1_g."),
    (".mlp.up_proj.", ".mlp.fc1_x."),
    (".mlp.down_proj.", ".mlp.fc2."),
)

UNGATED = (".mlp.up_proj.", ".mlp.fc1.")  # in a DINOv3 whose MLPs have no gate

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

# The paper's own code; our names have "/" for "." here. q, k and v are separate tensors.
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
# big_vision's names, and the paper's in the place of ours. big_vision numbers the modules of a block from 0 for each
# class, and keeps positions, which are for patches alone, at the top level.
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
    """Changes every name by all of `renames`. Raises InputError where two names become the same."""
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
    """Returns an InputError for two names in a file that mean the same tensor of the ViT."""
    return InputError(f"{first} and {second} are two names of the same tensor; remove the one that is not the model's")


QKV = (".attn.q.", ".attn.k.", ".attn.v.")  # the rows of .attn.qkv. are theirs, in this order
GATE = (".mlp.fc1_g.", ".mlp.fc1_x.")  # the rows of a gated .mlp.fc1.: first the gate, then what it gates


def join(state: State, whole: str, parts: Sequence[str]) -> State:
    """Concatenates the rows of tensors whose names differ only in `parts`, wherever all parts exist.

    The name of the new tensor has `whole` in place of the part. Raises InputError if a tensor of that name exists.
    """
    joined = dict(state)
    for key in state:
        names = [key.replace(parts[0], part) for part in parts]
        if parts[0] in key and all(name in state for name in names):
            if (name := key.replace(parts[0], whole)) in state:
                raise same_tensor(key, name)
            joined[name] = torch.cat([joined.pop(part) for part in names])
    return joined


def split(state: State, whole: str, parts: dict[str, int] | Sequence[str]) -> State:
    """Splits the rows of tensors with `whole` in the name into one for each of `parts`; undoes `join`.

    parts: the pieces of names for parts that get equally many rows, or {piece: how many shares of the rows it gets}.
    """
    shares, separate = parts if isinstance(parts, dict) else dict.fromkeys(parts, 1), {}
    for key, value in state.items():
        if whole not in key:
            separate[key] = value
            continue
        rows = value.shape[0] // sum(shares.values())
        pieces = value.split([rows * share for share in shares.values()])
        separate |= {key.replace(whole, part): piece.contiguous() for part, piece in zip(shares, pieces)}
    return separate
