"""transformers' ViT, DeiT and DINOv2 (with registers too), and any model built of their layers.

These keep q, k and v apart. Their weights are concatenated at each call (7 MB for a layer of ViT-B in fp32) and autograd splits the gradient: one
matrix product in place of three, and the parameters stay the only copy.
"""

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh
from transformers.models.deit import modeling_deit as deit
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as registers
from transformers.models.vit import modeling_vit as vit

from .. import ops
from ..ops.attention import obstacle as head_obstacle
from .attention_interface import changes
from .halves import Half, Parts, layout, no_drop_path, run

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # without it any hook counts
    _active_collector = None

_IMPLEMENTATIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "vitfast",
)


def _only_captures(module: nn.Module) -> bool:
    """True where all hooks are transformers' own, which stay once output_attentions was asked for, and it is not asked for now."""
    others = (
        module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
    if (
        _active_collector is None
        or others
        or any(h.__module__ != "transformers.utils.output_capturing" for h in module._forward_hooks.values())
    ):
        return False
    return "attentions" not in (_active_collector.get() or ())


def _attention_obstacle(parts: Parts) -> str | None:
    attention, (q, k, v) = parts["attention"], (parts[f"attention.{name}_proj"] for name in "qkv")
    implementation = attention.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS:
        return f"attention is computed by {implementation!r}"
    if attention.is_causal or attention.scaling != attention.head_dim**-0.5:
        return "attention is causal or scaled otherwise"
    if attention.attention_dropout > 0 and attention.training:
        return "attention dropout is active in training"
    if len({layer._parameters["bias"] is None for layer in (q, k, v)}) > 1:
        return "not all of q, k and v have a bias"
    return head_obstacle(attention.head_dim, attention.scaling)


def _approximate(activation: nn.Module) -> str | None:
    """GELU's flavour; None where the module computes it by hand."""
    if type(activation) is GELUActivation:
        return "none" if activation.act is nn.functional.gelu else None
    return "tanh" if getattr(activation.act, "keywords", None) == {"approximate": "tanh"} else None


def _mlp_obstacle(parts: Parts) -> str | None:
    return "mlp.activation_fn is written out in Python" if _approximate(parts["mlp.activation_fn"]) is None else None


def _pack(weights: list) -> list:
    """q, k and v as one layer."""
    norm_weight, norm_bias, q, k, v, q_bias, k_bias, v_bias, *out = weights
    return [
        norm_weight,
        norm_bias,
        torch.cat([q, k, v]),
        None if q_bias is None else torch.cat([q_bias, k_bias, v_bias]),
        *out,
    ]


def _halves(
    attention: type, mlp: type, norms: tuple[str, str], behind: tuple[dict, dict], scales=(None, None), drop_path=None
) -> tuple[Half, Half]:
    """Both halves of a layer. norms: the names of its norms; behind: what else the branches go through; scales, drop_path: as in Half."""
    norm1, norm2 = norms
    affine = [tuple((norm, name) for name in ("weight", "bias")) for norm in norms]
    qkvo = {f"attention.{name}_proj": nn.Linear for name in "qkvo"}
    qkv = tuple((f"attention.{layer}_proj", name) for name in ("weight", "bias") for layer in "qkv")
    out = tuple(("attention.o_proj", name) for name in ("weight", "bias"))
    return (
        Half(
            "attention half",
            ops.attention_block,
            layout({norm1: nn.LayerNorm, "attention": attention, **qkvo, **behind[0]}),
            (*affine[0], *qkv, *out),
            options=lambda parts: dict(num_heads=parts["attention"].num_attention_heads, eps=parts[norm1].eps),
            pack=_pack,
            layer_scale=scales[0],
            drop_path=drop_path or no_drop_path,
            obstacle=_attention_obstacle,
            idle=_only_captures,
        ),
        Half(
            "MLP half",
            ops.mlp_block,
            layout(
                {
                    norm2: nn.LayerNorm,
                    "mlp": mlp,
                    "mlp.fc1": nn.Linear,
                    "mlp.activation_fn": (GELUActivation, GELUTanh),
                    "mlp.fc2": nn.Linear,
                    **behind[1],
                }
            ),
            (*affine[1], *((f"mlp.{layer}", name) for layer in ("fc1", "fc2") for name in ("weight", "bias"))),
            options=lambda parts: dict(eps=parts[norm2].eps, approximate=_approximate(parts["mlp.activation_fn"])),
            layer_scale=scales[1],
            drop_path=drop_path or no_drop_path,
            obstacle=_mlp_obstacle,
        ),
    )


class _ViTForm(nn.Module):
    """The forward of ViT's and DeiT's layers: dropout behind each branch."""

    residual_in_fp32 = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs) -> Tensor:
        x, (attention, mlp) = hidden_states, self.halves
        y = None if attention_mask is not None or changes(kwargs) else run(attention, self, x)
        x = self.dropout(self.attention(self.layernorm_before(x), attention_mask, **kwargs)[0]) + x if y is None else y
        y = run(mlp, self, x)
        return self.dropout(self.mlp(self.layernorm_after(x))) + x if y is None else y


def _vit_halves(attention: type, mlp: type) -> tuple[Half, Half]:
    return _halves(attention, mlp, ("layernorm_before", "layernorm_after"), ({"dropout": nn.Dropout},) * 2)


class ViTLayer(_ViTForm, vit.ViTLayer):
    halves = _vit_halves(vit.ViTAttention, vit.ViTMLP)


class DeiTLayer(_ViTForm, deit.DeiTLayer):
    halves = _vit_halves(deit.DeiTAttention, deit.DeiTMLP)


class _Dinov2Form(nn.Module):
    """The forward of DINOv2's layers: layer scale and drop path behind each branch."""

    residual_in_fp32 = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs) -> Tensor:
        x, (attention, mlp) = hidden_states, self.halves
        y = None if attention_mask is not None or changes(kwargs) else run(attention, self, x)
        x = (
            self.drop_path(self.layer_scale1(self.attention(self.norm1(x), attention_mask, **kwargs)[0])) + x
            if y is None
            else y
        )
        y = run(mlp, self, x)
        return self.drop_path(self.layer_scale2(self.mlp(self.norm2(x)))) + x if y is None else y


def _drop_path(parts: Parts, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """transformers' draws: one uniform number a sample, in the dtype of the branch."""
    module = parts["drop_path"]
    if type(module) is nn.Identity or module.drop_prob == 0 or not module.training:
        return None
    keep = 1 - module.drop_prob
    return (torch.rand(batch, dtype=dtype, device=device) + keep).floor_().div_(keep)


def _dinov2_halves(attention: type, mlp: type, scale: type, drop_path: type) -> tuple[Half, Half]:
    names = "layer_scale1", "layer_scale2"
    behind = tuple({name: scale, "drop_path": (nn.Identity, drop_path)} for name in names)
    return _halves(attention, mlp, ("norm1", "norm2"), behind, tuple((name, "lambda1") for name in names), _drop_path)


class Dinov2Layer(_Dinov2Form, dinov2.Dinov2Layer):
    halves = _dinov2_halves(dinov2.Dinov2Attention, dinov2.Dinov2MLP, dinov2.Dinov2LayerScale, dinov2.Dinov2DropPath)


class Dinov2WithRegistersLayer(_Dinov2Form, registers.Dinov2WithRegistersLayer):
    halves = _dinov2_halves(
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
