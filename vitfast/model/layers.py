"""The modules of the ViT: parameters under timm's names, and calls of the operations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from ..ops import attention, attention_block, gated_mlp, gated_mlp_block, layer_norm, linear_gelu, mlp_block, rms_norm
from ..ops import reference as ref
from ..ops.attention import head_unsupported
from ..ops.dispatch import constant_when_compiled
from ..ops.fusable import ExpectedModules, expected_modules, fallback_reason

# The operations check their arguments in Python: for FX (timm's feature extraction) each is one leaf.
for _leaf in "attention attention_block gated_mlp gated_mlp_block layer_norm linear_gelu mlp_block rms_norm".split():
    torch.fx.wrap(_leaf)

# For `acceleration_report`: each part of a layer, and why PyTorch's code runs it (None where an operation does).
Entries = list[tuple[str, str | None]]


class Layer(nn.Module):
    """A layer whose operations read its modules' parameters; `fused_modules` lists them by operation."""

    fused_modules: dict[str, ExpectedModules] = {}

    @constant_when_compiled  # no guards on each hook: as with PyTorch's own, compile after adding them
    def fallback_reason(self, operation: str) -> str | None:
        """Why the modules must be called (LoRA, a hook, active dropout ...); None where they need not."""
        return fallback_reason(self.fused_modules[operation], self)


class Norm:
    """A norm over the last axis by vitfast's operation; by PyTorch's where `in_fp32` says that x is fp32."""

    in_fp32 = False

    def report_entries(self) -> Entries:
        return [("norm", "an fp32 residual stream" if self.in_fp32 else None)]


class LayerNorm(Norm, nn.LayerNorm):
    """nn.LayerNorm over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        if self.in_fp32:
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)


class RmsNorm(Norm, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich, 2019)."""

    bias = None

    def forward(self, x: Tensor) -> Tensor:
        if self.in_fp32:
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        return rms_norm(x, self.weight, self.eps)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RmsNorm}  # timm's names
OF_NORMS = {LayerNorm: "layer", RmsNorm: "rms"}  # the names in the operations


class Attention(nn.Module):
    """Parameters of multi-head self-attention: `qkv` (3D, D) with rows [q; k; v], `proj` (D, D).

    head_norm: a function of Dh that makes `q_norm` and `k_norm` (Dh,), the norms over each head of q and of k, or None.
    """

    # The types of its modules with which one operation runs the whole half of a block; why none does.
    inside = dict(qkv=nn.Linear, q_norm=nn.Identity, k_norm=nn.Identity, proj=nn.Linear, proj_drop=nn.Dropout)
    operation, parts, unfused_reason = "attention_block", ("attention block", "attention"), None

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool, proj_bias: bool, proj_drop: float, head_norm: Callable | None
    ):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm, self.k_norm = (head_norm(self.head_dim) if head_norm else nn.Identity() for _ in range(2))
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def split(self, x: Tensor) -> Tensor:
        """x (B, N, D) -> q, k, v packed as (B, N, 3, H, Dh); (tokens, D) -> (tokens, 3, H, Dh)."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each (B, N, H, Dh); q and k are normalised where the layer has norms for them."""
        q, k, v = self.split(x).unbind(-3)
        return self.q_norm(q), self.k_norm(k), v

    def probabilities(self, x: Tensor, **options) -> Tensor:
        """The attention matrix (B, H, N, N), fp32 at least, of `forward` with these arguments."""
        q, k, _ = self.heads(x)
        return ref.attention_probabilities(q, k, **options)

    def unsupported_reason(self) -> str | None:
        """Why PyTorch's code computes the attention; None where an operation does."""
        return head_unsupported(self.head_dim, self.head_dim**-0.5)

    def dropout_active(self) -> bool:
        return drops(self.proj_drop)

    def block(self, x: Tensor, *norm: Tensor | None, **options) -> Tensor:
        """The whole attention half, residual included, in one operation; norm: the norm's weight and bias."""
        weights = (self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias)
        return attention_block(x, *norm, *weights, num_heads=self.num_heads, **options)

    def attend(self, x: Tensor, **options) -> Tensor:
        """x (B, N, D) -> (B, N, H, Dh). options: keyword arguments of ops.attention."""
        if type(self.q_norm) is nn.Identity and type(self.k_norm) is nn.Identity:
            return attention(self.split(x), **options)
        return attention(*self.heads(x), **options)

    def forward(self, x: Tensor, **options) -> Tensor:
        return self.proj_drop(self.proj(self.attend(x, **options).flatten(-2)))


def drops(dropout: nn.Dropout) -> bool:
    """Whether a dropout is active, or may be in a graph of FX; torch.compile guards its code by it."""
    return dropout.p > 0 and (dropout.training or is_fx_symbolic_tracing())


class Mlp(Layer):
    """fc2(norm(activation(fc1(x)))), `fc1` (F, D), `fc2` (D, F). activation: a name of ref.ACTIVATIONS.

    inner_norm: a function of F that makes the norm (F,) before `fc2`; with None there is no such norm.
    """

    fused_modules = {"linear_gelu": expected_modules({"fc1": nn.Linear})}
    inside = dict(fc1=nn.Linear, drop1=nn.Dropout, norm=nn.Identity, fc2=nn.Linear, drop2=nn.Dropout)
    operation, parts, unfused_reason = "mlp_block", ("MLP block", "linear layer and GELU"), None
    gates = 0  # `fc1` has F rows, and F more for each gate

    def __init__(
        self, dim: int, hidden: int, activation: str, proj_bias: bool, drop: float, inner_norm: Callable | None = None
    ):
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(dim, (1 + self.gates) * hidden, bias=proj_bias)
        self.drop1 = nn.Dropout(drop)
        self.norm = inner_norm(hidden) if inner_norm else nn.Identity()
        self.fc2 = nn.Linear(hidden, dim, bias=proj_bias)
        self.drop2 = nn.Dropout(drop)

    def unsupported_reason(self) -> str | None:
        """Why PyTorch's code computes the layer; None where an operation does."""
        return self.fallback_reason(*self.fused_modules)

    def dropout_active(self) -> bool:
        return drops(self.drop1) or drops(self.drop2)

    def block(self, x: Tensor, *norm: Tensor | None, **options) -> Tensor:
        """The whole MLP half, residual included, in one operation; norm: the norm's weight and bias."""
        weights = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return mlp_block(x, *norm, *weights, activation=self.activation, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.fallback_reason("linear_gelu") is None:
            h = linear_gelu(x, self.fc1.weight, self.fc1.bias, activation=self.activation)
        else:
            h = ref.ACTIVATIONS[self.activation](self.fc1(x))
        return self.drop2(self.fc2(self.norm(self.drop1(h))))


class GluMlp(Mlp):
    """SwiGLU (Shazeer, 2020): fc2(norm(silu(gate) * up)); `fc1` (2F, D) with rows [gate; up]."""

    inside = Mlp.inside | {"norm": (nn.Identity, LayerNorm)}
    fused_modules = {"gated_mlp": expected_modules({name: types for name, types in inside.items() if name != "drop2"})}
    operation, parts = "gated_mlp_block", ("gated MLP block", "gated MLP")
    gates, activation = 1, "silu"

    def weights(self) -> tuple[tuple, dict]:
        """The weights and biases of up, gate and down, as the operations take them, and their options."""
        gate, up = self.fc1.weight.chunk(2)
        gate_bias, up_bias = (None, None) if self.fc1.bias is None else self.fc1.bias.chunk(2)
        options = dict(activation=self.activation)
        if type(self.norm) is LayerNorm:
            options |= dict(inner_norm_weight=self.norm.weight, inner_norm_bias=self.norm.bias, inner_eps=self.norm.eps)
        return (up, up_bias, gate, gate_bias, self.fc2.weight, self.fc2.bias), options

    def block(self, x: Tensor, *norm: Tensor | None, **options) -> Tensor:
        weights, inner = self.weights()
        return gated_mlp_block(x, *norm, *weights, **inner, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.fallback_reason("gated_mlp") is None and not drops(self.drop1):
            weights, options = self.weights()
            return self.drop2(gated_mlp(x, *weights, **options))
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.drop2(self.fc2(self.norm(self.drop1(ref.ACTIVATIONS[self.activation](gate) * up))))


class LayerScale(nn.Module):
    """`gamma` (D,), a learned factor per channel on a residual branch (Touvron et al., 2021)."""

    def __init__(self, dim: int, init_values: float):
        super().__init__()
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def weights_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's first floating parameter, torch's default without one."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
