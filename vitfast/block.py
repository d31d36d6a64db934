"""One pre-norm encoder layer of the ViT: two operations, or its modules one by one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layers import (
    OF_NORMS,
    Attention,
    GluMlp,
    Layer,
    LayerNorm,
    LayerScale,
    Mlp,
    Parts,
    drops,
    weights_dtype,
)
from .ops import attention_block, gated_mlp_block, mlp_block
from .ops.attention import unsupported_reason as head_unsupported
from .submodules import full_name, layout

for _leaf in "attention_block gated_mlp_block mlp_block sample_drop_path".split():  # to FX, as in layers.py
    torch.fx.wrap(_leaf)


def sample_drop_path(x: Tensor, rate: float) -> Tensor:
    """(B,) factors: 0 with probability `rate`, else 1 / (1 - rate) (Huang et al., 2016)."""
    keep = 1 - rate
    factors = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
    return factors.bernoulli_(keep).div_(keep) if keep > 0 else factors.zero_()


def _norm_parts(norm: nn.Module) -> Parts:
    return norm.operation_parts(()) if type(norm) in OF_NORMS else [("norm", f"it is {full_name(type(norm))}")]


_NORMS = tuple(OF_NORMS)
_SCALES = (LayerScale, nn.Identity)


class Block(Layer):
    """One pre-norm encoder layer: (B, N, D) -> (B, N, D).

    Two operations, except where a module in it must be called (dropout that is active, a hook, a layer that LoRA has
    replaced, norms of q and k), or where a table of relative positions comes with x: that branch then runs on its
    modules, the smaller operations and PyTorch. `keep`: what the two operations keep for backward, "least" or "all".

    norm: makes a norm of some width. activation: of the MLP; "swiglu" for a gated one.
    """

    keep = "least"
    stands_in = {
        "attention_block": layout(
            {"norm1": _NORMS, "attn": Attention, "attn.qkv": nn.Linear, "attn.q_norm": nn.Identity}
            | {"attn.k_norm": nn.Identity, "attn.proj": nn.Linear, "attn.proj_drop": nn.Dropout, "ls1": _SCALES}
        ),
        "mlp_block": layout(
            {"norm2": _NORMS, "mlp": Mlp, "mlp.fc1": nn.Linear, "mlp.drop1": nn.Dropout, "mlp.norm": nn.Identity}
            | {"mlp.fc2": nn.Linear, "mlp.drop2": nn.Dropout, "ls2": _SCALES}
        ),
        "gated_mlp_block": layout(
            {"norm2": _NORMS, "mlp": GluMlp, "mlp.fc1": nn.Linear, "mlp.drop1": nn.Dropout}
            | {"mlp.norm": (nn.Identity, LayerNorm), "mlp.fc2": nn.Linear, "mlp.drop2": nn.Dropout, "ls2": _SCALES}
        ),
    }

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int,
        *,
        qkv_bias: bool,
        proj_bias: bool,
        qk_norm: bool,
        init_values: float | None,
        proj_drop: float,
        drop_path: float,
        activation: str,
        norm: Callable[[int], nn.Module],
        inner_norm: bool,
        residual_in_fp32: bool,
    ):
        super().__init__()
        self.drop_path_rate = drop_path
        self.residual_in_fp32 = residual_in_fp32
        self.norm1 = norm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias, proj_bias, proj_drop, norm if qk_norm else None)
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.norm2 = norm(dim)
        last = (proj_bias, proj_drop, norm if inner_norm else None)
        gated = activation == "swiglu"
        self.mlp = GluMlp(dim, hidden, *last) if gated else Mlp(dim, hidden, activation, *last)
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.norm1.in_fp32 = self.norm2.in_fp32 = residual_in_fp32

    def _factors(self, x: Tensor, scale: nn.Module) -> dict:
        drop_path = sample_drop_path(x, self.drop_path_rate) if self.training and self.drop_path_rate > 0 else None
        return dict(layer_scale=getattr(scale, "gamma", None), drop_path=drop_path)

    def _options(self, norm: nn.Module) -> dict:
        kept = dict(residual_in_fp32=self.residual_in_fp32, keep=self.keep)
        return dict(eps=norm.eps, norm=OF_NORMS[type(norm)], **kept)

    @property
    def _mlp_operation(self) -> str:
        return "gated_mlp_block" if type(self.mlp) is GluMlp else "mlp_block"

    def forward(
        self, x: Tensor, positions: Tensor | None = None, relative: Tensor | None = None, rope: dict | None = None
    ) -> Tensor:
        """positions: (1, N, D), added to x first. relative: (2n-1, Dh), see positions.relative_logits.

        rope: the arguments of ops.attention for rotary positions.
        """
        x = x if positions is None else x + positions.to(x.dtype)
        norm, attn, mlp = self.norm1, self.attn, self.mlp
        if relative is not None or self.why_called("attention_block") is not None or drops(attn.proj_drop):
            given = {name: value for name, value in (("relative", relative), ("rope", rope)) if value is not None}
            x = self._add_branch(x, attn(self.branch_input(x, norm), **given), self.ls1)
        else:
            weights = (norm.weight, norm.bias, attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias)
            options = self._options(norm) | self._factors(x, self.ls1) | (rope or {})
            x = attention_block(x, *weights, num_heads=attn.num_heads, **options)
        norm = self.norm2
        if self.why_called(self._mlp_operation) is not None or drops(mlp.drop1) or drops(mlp.drop2):
            return self._add_branch(x, mlp(self.branch_input(x, norm)), self.ls2)
        options = self._options(norm) | self._factors(x, self.ls2)
        if type(mlp) is GluMlp:
            weights, inner = mlp.weights()
            return gated_mlp_block(x, norm.weight, norm.bias, *weights, **inner, **options)
        weights = (norm.weight, norm.bias, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias)
        return mlp_block(x, *weights, activation=mlp.activation, **options)

    def operation_parts(self, above: tuple[nn.Module, ...]) -> Parts:
        """As `forward` runs them. above: the modules that it is in; a ViT among them tells the positions."""
        configs = [getattr(module, "config", None) for module in above]
        relative = any(isinstance(config, dict) and config.get("pos_embed") == "relative" for config in configs)
        first, second = (self.why_called(operation) for operation in ("attention_block", self._mlp_operation))
        attn, head = self.attn, None
        if type(attn) is Attention:
            head = head_unsupported(attn.head_dim, attn.head_dim**-0.5)
        gated = type(self.mlp) is GluMlp
        attention, mlp = [("attention block", head)], [("gated MLP block" if gated else "MLP block", None)]
        if first or relative:
            own = None if type(attn) is Attention else first
            why = own or ("relative positions" if relative else head)
            rest = ("projection and residual", first or "relative positions")
            attention = [*_norm_parts(self.norm1), ("attention", why), rest]
        if second:
            layer, operation = ("gated MLP", "gated_mlp") if gated else ("linear layer and GELU", "linear_gelu")
            inside = self.mlp.why_called(operation) if type(self.mlp) in (Mlp, GluMlp) else second
            mlp = [*_norm_parts(self.norm2), (layer, inside), ("projection and residual", second)]
        return attention + mlp

    def attention_map(
        self, x: Tensor, positions: Tensor | None = None, relative: Tensor | None = None, rope: dict | None = None
    ) -> Tensor:
        """The attention matrices (B, H, N, N), in fp32 at least, of `forward` with these arguments."""
        x = x if positions is None else x + positions.to(x.dtype)
        return self.attn.probabilities(self.branch_input(x, self.norm1), relative, rope)

    def branch_input(self, x: Tensor, norm: nn.Module) -> Tensor:
        """norm(x) as the matrix products take it; an fp32 residual stream is normalised in fp32."""
        return norm(x).to(weights_dtype(self.attn)) if self.residual_in_fp32 else norm(x)

    def _add_branch(self, x: Tensor, y: Tensor, scale: nn.Module) -> Tensor:
        """x + drop_path * layer_scale * y, for a branch that runs on the smaller operations."""
        y, factor = scale(y), self._factors(x, scale)["drop_path"]
        return x + (y if factor is None else y * factor[:, None, None]).to(x.dtype)
