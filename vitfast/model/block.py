"""One pre-norm encoder layer of the ViT: two operations, or its modules one by one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..ops.fusable import ExpectedModules, expected_modules, full_name
from ..ops.reference import owners
from .config import ViTConfig
from .drop_path import Subset, draw_subset, sample_drop_path
from .layers import OF_NORMS, Attention, Entries, GluMlp, Layer, LayerScale, Mlp, weights_dtype
from .positions import RelativeAttention

for _leaf in ("draw_subset", "sample_drop_path"):  # leaves to FX, as in layers.py
    torch.fx.wrap(_leaf)

_LAYERS = (Attention, RelativeAttention, Mlp, GluMlp)


def _branch_of(norm: str, name: str, layers: tuple[type[Attention | Mlp], ...], scale: str) -> ExpectedModules:
    """The modules of a branch whose parameters one operation reads; layers: the classes of its layer."""
    inside = {f"{name}.{path}": types for path, types in layers[0].inside.items()}
    return expected_modules({norm: tuple(OF_NORMS), name: layers} | inside | {scale: (LayerScale, nn.Identity)})


class Block(Layer):
    """One pre-norm encoder layer: (B, N, D) -> (B, N, D).

    It runs as two operations. If a module in a branch must be called (active dropout, a hook, a layer that LoRA has
    replaced, norms of q and k), or if positions are relative, that branch runs on its modules, the smaller operations
    and PyTorch instead. `keep`: what the two operations keep for backward, "least" or "all".

    drop_path_mode: "mask" computes the branches of all samples and drops some of them, "subset" computes those of a
    fixed number of samples alone.
    """

    keep, drop_path_mode = "least", "mask"
    fused_modules = {
        "attention_block": _branch_of("norm1", "attn", (Attention, RelativeAttention), "ls1"),
        "mlp_block": _branch_of("norm2", "mlp", (Mlp,), "ls2"),
        "gated_mlp_block": _branch_of("norm2", "mlp", (GluMlp,), "ls2"),
    }

    def __init__(self, config: ViTConfig, norm: Callable[[int], nn.Module], drop_path: float):
        """config: a ViT's arguments. norm: makes a norm of some width. drop_path: this block's rate."""
        super().__init__()
        c, width = config, config.embed_dim
        self.drop_path_rate, self.drop_path_mode = drop_path, c.drop_path_mode
        self.residual_in_fp32 = c.residual_in_fp32
        self.norm1 = norm(width)
        biases, rate = (c.qkv_bias, c.proj_bias), c.proj_drop_rate
        attention = RelativeAttention if c.pos_embed == "relative" else Attention
        self.attn = attention(width, c.num_heads, *biases, rate, norm if c.qk_norm else None)
        self.ls1 = LayerScale(width, c.init_values) if c.init_values else nn.Identity()
        self.norm2 = norm(width)
        mlp, activation = (GluMlp, "silu") if c.swiglu_mlp else (Mlp, c.act_layer)
        hidden, inner_norm = int(width * c.mlp_ratio), norm if c.scale_mlp_norm else None
        self.mlp = mlp(width, hidden, activation, c.proj_bias, rate, inner_norm)
        self.ls2 = LayerScale(width, c.init_values) if c.init_values else nn.Identity()
        self.norm1.in_fp32 = self.norm2.in_fp32 = c.residual_in_fp32

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        options: dict | None = None,
        subsets: tuple[Subset | None, Subset | None] = (None, None),
    ) -> Tensor:
        """x (B, N, D) -> (B, N, D). positions: (1, N, D), for packed tokens (tokens, D); added to x first.

        options: those of Attention, with `offsets` and `longest` for packed tokens x (tokens, D). subsets: the packed
        samples of either branch, which are drawn beforehand for drop_path_mode "subset".
        """
        x = x if positions is None else x + positions.to(x.dtype)
        for branch, subset in enumerate(subsets):
            x = self._add_sampled(branch, x, options or {}, subset)
        return x

    def _add_sampled(self, branch: int, x: Tensor, options: dict, subset: Subset | None) -> Tensor:
        """x plus branch 0 (attention) or 1 (MLP), dropped for some samples or computed on a subset of them."""
        rate, offsets = self.drop_path_rate if self.training else 0, options.get("offsets")
        if rate == 0:
            return self._add(branch, x, None, options)
        if self.drop_path_mode == "mask":
            factors = sample_drop_path(x if offsets is None else offsets[1:], rate)
            return self._add(branch, x, factors if offsets is None else factors[owners(offsets, len(x))], options)
        rows, factors, layout = draw_subset(x, rate) if subset is None else subset
        if layout is not None:
            options = options | layout._asdict()
            if "rope" in options:
                options["rope"] = tuple(table.index_select(0, rows) for table in options["rope"])
        return x.index_copy(0, rows, self._add(branch, x.index_select(0, rows), factors, options))

    def _branch(self, branch: int) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The norm, the layer and the scale of branch 0 (attention) or 1 (MLP)."""
        return (self.norm2, self.mlp, self.ls2) if branch else (self.norm1, self.attn, self.ls1)

    def _unfused_reason(self, branch: int) -> str | None:
        """Why a branch runs on its modules and the smaller operations; None where one operation runs it."""
        layer = self.mlp if branch else self.attn
        operation = layer.operation if type(layer) in _LAYERS else ("attention_block", "mlp_block")[branch]
        return self.fallback_reason(operation) or layer.unfused_reason

    def _add(self, branch: int, x: Tensor, drop_path: Tensor | None, options: dict) -> Tensor:
        """x + drop_path * scale(layer(norm(x))); drop_path: a factor for each sample, or each packed token."""
        norm, layer, scale = self._branch(branch)
        options = {} if branch else options  # an MLP sees each token alone
        if self._unfused_reason(branch) is None and not layer.dropout_active():
            options = options | dict(eps=norm.eps, norm=OF_NORMS[type(norm)], layer_scale=getattr(scale, "gamma", None))
            options |= dict(drop_path=drop_path, residual_in_fp32=self.residual_in_fp32, keep=self.keep)
            return layer.block(x, norm.weight, norm.bias, **options)
        y = scale(layer(self.branch_input(x, norm), **options))
        return x + (y if drop_path is None else y * drop_path.view(-1, *[1] * (y.dim() - 1))).to(x.dtype)

    def branch_input(self, x: Tensor, norm: nn.Module) -> Tensor:
        """norm(x) in the dtype of the matrix products; an fp32 residual stream is normalised in fp32."""
        return norm(x).to(weights_dtype(self.attn)) if self.residual_in_fp32 else norm(x)

    def report_entries(self) -> Entries:
        """The parts of both branches as `forward` runs them."""
        entries = []
        for branch in (0, 1):
            norm, layer, _ = self._branch(branch)
            why, known = self._unfused_reason(branch), type(layer) in _LAYERS
            fused, alone = (layer if known else (Attention, Mlp)[branch]).parts
            inside = layer.unsupported_reason() if known else why
            if why is None:
                entries.append((fused, inside))
                continue
            of_norm = [("norm", f"it is {full_name(type(norm))}")]
            entries += norm.report_entries() if type(norm) in OF_NORMS else of_norm
            entries += [(alone, inside), ("projection and residual", why)]
        return entries

    def attention_map(self, x: Tensor, positions: Tensor | None = None, options: dict | None = None, *_) -> Tensor:
        """The attention matrices (B, H, N, N), in fp32 at least, of `forward` with these arguments."""
        x = x if positions is None else x + positions.to(x.dtype)
        return self.attn.probabilities(self.branch_input(x, self.norm1), **(options or {}))
