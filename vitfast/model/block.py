"""One pre-norm encoder layer of the ViT: two operations, or its modules one by one."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import attention_block, gated_mlp_block, mlp_block
from ..ops.attention import unsupported_reason as head_unsupported
from ..ops.fusable import full_name, layout
from ..ops.packed import TokenLayout
from ..ops.reference import owners
from .layers import OF_NORMS, Attention, GluMlp, Layer, LayerNorm, LayerScale, Mlp, Parts, drops, weights_dtype

for _leaf in "attention_block draw_subset gated_mlp_block mlp_block sample_drop_path".split():  # to FX, as in layers.py
    torch.fx.wrap(_leaf)


def sample_drop_path(x: Tensor, rate: float) -> Tensor:
    """(B,) factors: 0 with probability `rate`, else 1 / (1 - rate) (Huang et al., 2016)."""
    keep = 1 - rate
    factors = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
    return factors.bernoulli_(keep).div_(keep) if keep > 0 else factors.zero_()


class Subset(NamedTuple):
    """The samples that a branch runs on, the others being dropped (Oquab et al., 2023, DINOv2's code)."""

    rows: Tensor  # of x: samples of (B, N, D), tokens of (tokens, D)
    factors: Tensor  # one for each row: samples / samples kept
    layout: TokenLayout | None = None  # of the tokens that are kept


def _kept(count: int, rate: float) -> int:
    """Of `count` samples those that are kept: at least one, none at rate 1."""
    return max(1, int(count * (1 - rate))) if rate < 1 else 0


def draw_subset(x: Tensor, rate: float) -> Subset:
    """Random samples of x (B, N, D)."""
    kept = _kept(x.shape[0], rate)
    rows = torch.randperm(x.shape[0], device=x.device)[:kept]
    return Subset(rows, torch.full((kept,), x.shape[0] / max(1, kept), device=x.device))


def subset_of_packed(sizes: Tensor, layout: TokenLayout, rate: float) -> Subset:
    """Random samples of packed ones, without waiting for the device.

    sizes: tokens of each sample, (S,), on the CPU.
    """
    kept = torch.randperm(len(sizes))[: _kept(len(sizes), rate)].sort().values
    sizes, device = sizes[kept], layout.offsets.device
    tokens, offsets = int(sizes.sum()), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    offsets, kept = (t.to(device, non_blocking=True) for t in (offsets.to(layout.offsets.dtype), kept))
    owner = owners(offsets, tokens)
    rows = torch.arange(tokens, device=device) + (layout.offsets[kept] - offsets[:-1])[owner]
    factors = torch.full((tokens,), len(layout.offsets[1:]) / max(1, len(kept)), device=device)
    return Subset(rows, factors, TokenLayout(offsets, layout.longest))


def _norm_parts(norm: nn.Module) -> Parts:
    return norm.operation_parts(()) if type(norm) in OF_NORMS else [("norm", f"it is {full_name(type(norm))}")]


_NORMS = tuple(OF_NORMS)
_SCALES = (LayerScale, nn.Identity)


class Block(Layer):
    """One pre-norm encoder layer: (B, N, D) -> (B, N, D).

    Two operations, except where a module in it must be called (dropout that is active, a hook, a layer that LoRA has
    replaced, norms of q and k), or where a table of relative positions comes with x: that branch then runs on its
    modules, the smaller operations and PyTorch. `keep`: what the two operations keep for backward, "least" or "all".

    norm: makes a norm of some width. activation: of the MLP; "swiglu" for a gated one. drop_path_mode: "mask" computes
    the branches of all samples and drops some of them, "subset" computes those of a fixed number of samples alone.
    """

    keep, drop_path_mode = "least", "mask"
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
        drop_path_mode: str = "mask",
    ):
        super().__init__()
        self.drop_path_rate, self.drop_path_mode = drop_path, drop_path_mode
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

    def _drop_path(self, x: Tensor, layout: TokenLayout | None) -> Tensor | None:
        """A factor for each sample of x (B, N, D), or for each packed token; None without drop path."""
        if not self.training or self.drop_path_rate == 0:
            return None
        if layout is None:
            return sample_drop_path(x, self.drop_path_rate)
        return sample_drop_path(layout.offsets[1:], self.drop_path_rate)[owners(layout.offsets, len(x))]

    def _add(self, run: Callable, x: Tensor, rope: dict | None, layout: TokenLayout | None, subset: Subset | None):
        """x after a branch: run(x, drop path, rope, layout), on a subset where that is the mode."""
        if self.drop_path_mode != "subset" or not self.training or self.drop_path_rate == 0:
            return run(x, self._drop_path(x, layout), rope, layout)
        rows, factors, layout = draw_subset(x, self.drop_path_rate) if subset is None else subset
        if rope is not None and layout is not None:
            rope = rope | dict(rope=tuple(table.index_select(0, rows) for table in rope["rope"]))
        return x.index_copy(0, rows, run(x.index_select(0, rows), factors, rope, layout))

    def _options(self, norm: nn.Module) -> dict:
        kept = dict(residual_in_fp32=self.residual_in_fp32, keep=self.keep)
        return dict(eps=norm.eps, norm=OF_NORMS[type(norm)], **kept)

    @property
    def _mlp_operation(self) -> str:
        return "gated_mlp_block" if type(self.mlp) is GluMlp else "mlp_block"

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        relative: Tensor | None = None,
        rope: dict | None = None,
        layout: TokenLayout | None = None,
        subsets: tuple[Subset, Subset] | None = None,
    ) -> Tensor:
        """positions: (1, N, D), added to x first. relative: (2n-1, Dh), see positions.relative_logits.

        rope: the arguments of ops.attention for rotary positions. layout: of packed samples, x (tokens, D); with it
        `subsets`, drawn beforehand for drop_path_mode "subset".
        """
        x = x if positions is None else x + positions.to(x.dtype)
        first, second = (None, None) if subsets is None else subsets
        x = self._add(partial(self._attend, relative), x, rope, layout, first)
        return self._add(self._transform, x, None, layout, second)

    def _attend(
        self,
        relative: Tensor | None,
        x: Tensor,
        drop_path: Tensor | None,
        rope: dict | None,
        layout: TokenLayout | None,
    ) -> Tensor:
        """x and its attention branch."""
        norm, attn = self.norm1, self.attn
        options = (rope or {}) | ({} if layout is None else layout.options)
        if relative is not None or self.why_called("attention_block") is not None or drops(attn.proj_drop):
            given = ({} if relative is None else dict(relative=relative)) | (dict(options=options) if options else {})
            return self._add_branch(x, attn(self.branch_input(x, norm), **given), self.ls1, drop_path)
        weights = (norm.weight, norm.bias, attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias)
        options |= self._options(norm) | dict(layer_scale=getattr(self.ls1, "gamma", None), drop_path=drop_path)
        return attention_block(x, *weights, num_heads=attn.num_heads, **options)

    def _transform(
        self, x: Tensor, drop_path: Tensor | None, rope: dict | None = None, layout: TokenLayout | None = None
    ) -> Tensor:
        """x and its MLP branch, which sees each token alone."""
        norm, mlp = self.norm2, self.mlp
        if self.why_called(self._mlp_operation) is not None or drops(mlp.drop1) or drops(mlp.drop2):
            return self._add_branch(x, mlp(self.branch_input(x, norm)), self.ls2, drop_path)
        options = self._options(norm) | dict(layer_scale=getattr(self.ls2, "gamma", None), drop_path=drop_path)
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

    def _add_branch(self, x: Tensor, y: Tensor, scale: nn.Module, drop_path: Tensor | None) -> Tensor:
        """x + drop_path * layer_scale * y, for a branch that runs on the smaller operations."""
        y = scale(y)
        return x + (y if drop_path is None else y * drop_path.view(-1, *[1] * (y.dim() - 1))).to(x.dtype)
