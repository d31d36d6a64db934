"""transformers' ViT, DeiT and DINOv2 (with registers too), and any model built of their layers.

These keep q, k and v apart. Their weights are concatenated at each call (7 MB for a layer of ViT-B in fp32) and
autograd splits the gradient: one matrix product in place of three, and the parameters stay the only copy.
"""

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh
from transformers.models.deit import modeling_deit as deit
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as registers
from transformers.models.vit import modeling_vit as vit

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from ..submodules import Modules, layout
from .attention_interface import HARMLESS
from .fused_blocks import FusedBlock, asked, run, weights_and_biases

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # without it any hook counts
    _active_collector = None

_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "vitfast", *(f"flash_attention_{n}" for n in (2, 3, 4)))


def _only_captures(module: nn.Module) -> bool:
    """Whether all hooks are transformers' own, for attentions that are not asked for now."""
    if _active_collector is None or "forward" in module.__dict__:
        return False
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if any(hook.__module__ != "transformers.utils.output_capturing" for hook in module._forward_hooks.values()):
        return False
    return "attentions" not in (_active_collector.get() or ())


def _attention_unsupported(modules: Modules) -> str | None:
    attention, (q, k, v) = modules["attention"], (modules[f"attention.{name}_proj"] for name in "qkv")
    implementation = attention.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS:
        return f"attention is computed by {implementation!r}"
    if attention.is_causal or attention.scaling != attention.head_dim**-0.5:
        return "attention is causal or scaled otherwise"
    if attention.attention_dropout > 0 and attention.training:
        return "attention dropout is active in training"
    if len({layer._parameters["bias"] is None for layer in (q, k, v)}) > 1:
        return "not all of q, k and v have a bias"
    return head_unsupported(attention.head_dim, attention.scaling)


def _approximate(activation: nn.Module) -> str | None:
    """The GELU variant, or None."""
    if type(activation) is GELUActivation:
        return "none" if activation.act is nn.functional.gelu else None
    return "tanh" if getattr(activation.act, "keywords", None) == {"approximate": "tanh"} else None


def _mlp_unsupported(modules: Modules) -> str | None:
    return "mlp.activation_fn is written out in Python" if _approximate(modules["mlp.activation_fn"]) is None else None


def _pack(weights: list) -> list:
    """q, k and v as one layer."""
    *norm, q, k, v, q_bias, k_bias, v_bias, proj_weight, proj_bias = weights
    bias = None if q_bias is None else torch.cat([q_bias, k_bias, v_bias])
    return [*norm, torch.cat([q, k, v]), bias, proj_weight, proj_bias]


def _fused_blocks(
    attention: type, mlp: type, norms: tuple[str, str], behind: tuple[dict, dict], scales=(None, None), **drop_path
) -> tuple[FusedBlock, FusedBlock]:
    """Both fused blocks of a layer. behind: what else the branches go through."""
    norm1, norm2 = norms
    qkvo = {f"attention.{name}_proj": nn.Linear for name in "qkvo"}
    qkv = tuple((f"attention.{layer}_proj", name) for name in ("weight", "bias") for layer in "qkv")
    fc1_to_fc2 = {"mlp.fc1": nn.Linear, "mlp.activation_fn": (GELUActivation, GELUTanh), "mlp.fc2": nn.Linear}
    return (
        FusedBlock(
            "attention block",
            ops.attention_block,
            layout({norm1: nn.LayerNorm, "attention": attention, **qkvo, **behind[0]}),
            (*weights_and_biases(norm1), *qkv, *weights_and_biases("attention.o_proj")),
            options=lambda modules: dict(num_heads=modules["attention"].num_attention_heads, eps=modules[norm1].eps),
            pack=_pack,
            layer_scale=scales[0],
            unsupported_reason=_attention_unsupported,
            idle_hooks=_only_captures,
            **drop_path,
        ),
        FusedBlock(
            "MLP block",
            ops.mlp_block,
            layout({norm2: nn.LayerNorm, "mlp": mlp, **fc1_to_fc2, **behind[1]}),
            weights_and_biases(norm2, "mlp.fc1", "mlp.fc2"),
            options=lambda modules: dict(
                eps=modules[norm2].eps, approximate=_approximate(modules["mlp.activation_fn"])
            ),
            layer_scale=scales[1],
            unsupported_reason=_mlp_unsupported,
            **drop_path,
        ),
    )


class _ViTForward(nn.Module):
    """The forward of ViT's and DeiT's layers: dropout behind each branch."""

    residual_in_fp32 = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs) -> Tensor:
        x, (attention, mlp) = hidden_states, self.fused_blocks
        y = run(attention, self, x, asked(dict(attention_mask=attention_mask, **kwargs), HARMLESS))
        x = self.dropout(self.attention(self.layernorm_before(x), attention_mask, **kwargs)[0]) + x if y is None else y
        y = run(mlp, self, x)
        return self.dropout(self.mlp(self.layernorm_after(x))) + x if y is None else y


def _vit_blocks(attention: type, mlp: type) -> tuple[FusedBlock, FusedBlock]:
    return _fused_blocks(attention, mlp, ("layernorm_before", "layernorm_after"), ({"dropout": nn.Dropout},) * 2)


class ViTLayer(_ViTForward, vit.ViTLayer):
    fused_blocks = _vit_blocks(vit.ViTAttention, vit.ViTMLP)


class DeiTLayer(_ViTForward, deit.DeiTLayer):
    fused_blocks = _vit_blocks(deit.DeiTAttention, deit.DeiTMLP)


class _Dinov2Forward(nn.Module):
    """The forward of DINOv2's layers: layer scale and drop path behind each branch."""

    residual_in_fp32 = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs) -> Tensor:
        x, (attention, mlp) = hidden_states, self.fused_blocks
        y = run(attention, self, x, asked(dict(attention_mask=attention_mask, **kwargs), HARMLESS))
        if y is None:
            y = self.drop_path(self.layer_scale1(self.attention(self.norm1(x), attention_mask, **kwargs)[0])) + x
        x = y
        y = run(mlp, self, x)
        return self.drop_path(self.layer_scale2(self.mlp(self.norm2(x)))) + x if y is None else y


def _drop_path(modules: Modules, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """transformers' draws: one uniform number a sample, in the dtype of the branch."""
    module = modules["drop_path"]
    if type(module) is nn.Identity or module.drop_prob == 0 or not module.training:
        return None
    keep = 1 - module.drop_prob
    return (torch.rand(batch, dtype=dtype, device=device) + keep).floor_().div_(keep)


def _dinov2_blocks(attention: type, mlp: type, scale: type, drop_path: type) -> tuple[FusedBlock, FusedBlock]:
    names = "layer_scale1", "layer_scale2"
    behind = tuple({name: scale, "drop_path": (nn.Identity, drop_path)} for name in names)
    scales = tuple((name, "lambda1") for name in names)
    return _fused_blocks(attention, mlp, ("norm1", "norm2"), behind, scales, drop_path=_drop_path)


class Dinov2Layer(_Dinov2Forward, dinov2.Dinov2Layer):
    fused_blocks = _dinov2_blocks(
        dinov2.Dinov2Attention, dinov2.Dinov2MLP, dinov2.Dinov2LayerScale, dinov2.Dinov2DropPath
    )


class Dinov2WithRegistersLayer(_Dinov2Forward, registers.Dinov2WithRegistersLayer):
    fused_blocks = _dinov2_blocks(
        registers.Dinov2WithRegistersAttention,
        registers.Dinov2WithRegistersMLP,
        registers.Dinov2WithRegistersLayerScale,
        registers.Dinov2WithRegistersDropPath,
    )


_SMALL = dict(hidden_size=16, num_attention_heads=1, attn_implementation="sdpa")
BLOCKS = {
    ViTLayer: lambda: vit.ViTLayer(vit.ViTConfig(**_SMALL, intermediate_size=16)),
    DeiTLayer: lambda: deit.DeiTLayer(deit.DeiTConfig(**_SMALL, intermediate_size=16)),
    Dinov2Layer: lambda: dinov2.Dinov2Layer(dinov2.Dinov2Config(**_SMALL, mlp_ratio=1)),
    Dinov2WithRegistersLayer: lambda: registers.Dinov2WithRegistersLayer(
        registers.Dinov2WithRegistersConfig(**_SMALL, mlp_ratio=1)
    ),
}
LEAVES = ()
PLACES = {
    **{c: ("projection",) for c in (vit.ViTPatchEmbeddings, deit.DeiTPatchEmbeddings, dinov2.Dinov2PatchEmbeddings)},
    registers.Dinov2WithRegistersPatchEmbeddings: ("projection",),
    **{c: ("layernorm",) for c in (vit.ViTModel, deit.DeiTModel, dinov2.Dinov2Model, dinov2.Dinov2Backbone)},
    **{c: ("layernorm",) for c in (registers.Dinov2WithRegistersModel, registers.Dinov2WithRegistersBackbone)},
}
LEFT = {}
