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


def _modules_of_half(norm: str, name: str, layers: tuple[type[Attention | Mlp], ...], scale: str) -> ExpectedModules:
    """The modules of a half whose parameters one operation reads; layers: classes of its layer."""
    inside = {f"{name}.{path}": types for path, types in layers[0].inside.items()}
    return expected_modules({norm: tuple(OF_NORMS), name: layers} | inside | {scale: (LayerScale, nn.Identity)})


class Block(Layer):
    """One pre-norm encoder layer: (B, N, D) -> (B, N, D).

    Each of its two halves, attention and MLP, is one operation. If a module in a half must be called (active dropout, a
    hook, a layer that LoRA has replaced, norms of q and k), or if positions are relative, that half runs on its
    modules, the smaller operations and PyTorch instead. `keep`: what operations keep for backward, "least" or "all".

    drop_path_mode: "mask" computes the halves for all samples and drops some of the results, "subset" computes them
    only for a fixed number of samples.
    """

    keep, drop_path_mode = "least", "mask"
    fused_modules = {
        "attention_block": _modules_of_half("norm1", "attn", (Attention, RelativeAttention), "ls1"),
        "mlp_block": _modules_of_half("norm2", "mlp", (Mlp,), "ls2"),
        "gated_mlp_block": _modules_of_half("norm2", "mlp", (GluMlp,), "ls2"),
    }

    def __init__(self, config: ViTConfig, norm: Callable[[int], nn.Module], drop_path: float):
        """config: a ViT's arguments. norm: makes a norm of some width. drop_path: this block's rate."""
        super().__init__()
        c, width, rate = config, config.embed_dim, config.proj_drop_rate
        self.drop_path_rate, self.drop_path_mode = drop_path, c.drop_path_mode
        self.residual_in_fp32 = c.residual_in_fp32
        self.norm1 = norm(width)
        attention = RelativeAttention if c.pos_embed == "relative" else Attention
        self.attn = attention(width, c.num_heads, c.qkv_bias, c.proj_bias, rate, norm if c.qk_norm else None)
        self.ls1 = LayerScale(width, c.init_values) if c.init_values else nn.Identity()
        self.norm2 = norm(width)
        mlp, activation = (GluMlp, "silu") if c.swiglu_mlp else (Mlp, c.act_layer)
        hidden, inner_norm = int(width * c.mlp_ratio), norm if c.scale_mlp_norm else None
        self.mlp = mlp(width, hidden, activation, c.proj_bias, rate, inner_norm)
        self.ls2 = LayerScale(width, c.init_values) if c.init_values else nn.Identity()
        self.norm1.in_fp32 = self.norm2.in_fp32 = c.residual_in_fp32

    def forward(
        self, x: Tensor, positions: Tensor | None = None, options: dict | None = None, subsets: tuple = (None, None)
    ) -> Tensor:
        """x (B, N, D) -> (B, N, D). positions: (1, N, D), for packed tokens (tokens, D); added to x first.

        options: those of Attention, with `offsets` and `longest` for packed tokens x (tokens, D). subsets: the packed
        samples of either half, which are drawn beforehand for drop_path_mode "subset".
        """
        x = x if positions is None else x + positions.to(x.dtype)
        x = self._drop_path(self._attention_half, x, options or {}, subsets[0])
        return self._drop_path(self._mlp_half, x, options or {}, subsets[1])

    def _attention_half(self, x: Tensor, drop_path: Tensor | None, options: dict) -> Tensor:
        """x + drop_path * ls1(attn(norm1(x))); drop_path: a factor for each sample, or each packed token."""
        if self._unfused_reason(self.attn, Attention) is None and not self.attn.dropout_active():
            options = options | self._fused_options(self.norm1, self.ls1, drop_path)
            return self.attn.block(x, self.norm1.weight, self.norm1.bias, **options)
        return _add(x, self.ls1(self.attn(self.branch_input(x, self.norm1), **options)), drop_path)

    def _mlp_half(self, x: Tensor, drop_path: Tensor | None, _options: dict | None = None) -> Tensor:
        """x + drop_path * ls2(mlp(norm2(x))); options are for attention, since an MLP sees each token alone."""
        if self._unfused_reason(self.mlp, Mlp) is None and not self.mlp.dropout_active():
            options = self._fused_options(self.norm2, self.ls2, drop_path)
            return self.mlp.block(x, self.norm2.weight, self.norm2.bias, **options)
        return _add(x, self.ls2(self.mlp(self.branch_input(x, self.norm2))), drop_path)

    def _drop_path(self, half: Callable, x: Tensor, options: dict, subset: Subset | None) -> Tensor:
        """Runs a half with stochastic depth: it is dropped for some samples, or runs on a subset of them."""
        rate, offsets = self.drop_path_rate if self.training else 0, options.get("offsets")
        if rate == 0:
            return half(x, None, options)
        if self.drop_path_mode == "mask":
            factors = sample_drop_path(x if offsets is None else offsets[1:], rate)
            return half(x, factors if offsets is None else factors[owners(offsets, len(x))], options)
        rows, factors, layout = draw_subset(x, rate) if subset is None else subset
        if layout is not None:
            options = options | layout._asdict()
            if "rope" in options:
                options["rope"] = tuple(table.index_select(0, rows) for table in options["rope"])
        return x.index_copy(0, rows, half(x.index_select(0, rows), factors, options))

    def _unfused_reason(self, layer: nn.Module, usual: type[Attention | Mlp]) -> str | None:
        """Why the half of this layer, usually a `usual`, runs on its modules; None where one operation does."""
        operation = (layer if type(layer) in _LAYERS else usual).operation
        return self.fallback_reason(operation) or layer.unfused_reason

    def _fused_options(self, norm: nn.Module, scale: nn.Module, drop_path: Tensor | None) -> dict:
        """The keyword arguments that both operations take."""
        options = dict(eps=norm.eps, norm=OF_NORMS[type(norm)], layer_scale=getattr(scale, "gamma", None))
        return options | dict(drop_path=drop_path, residual_in_fp32=self.residual_in_fp32, keep=self.keep)

    def branch_input(self, x: Tensor, norm: nn.Module) -> Tensor:
        """norm(x) in the dtype of the matrix products; an fp32 residual stream is normalised in fp32."""
        return norm(x).to(weights_dtype(self.attn)) if self.residual_in_fp32 else norm(x)

    def report_entries(self) -> Entries:
        """Returns the parts of both halves as `forward` runs them."""
        attention = self._entries_of_half(self.norm1, self.attn, Attention)
        return attention + self._entries_of_half(self.norm2, self.mlp, Mlp)

    def _entries_of_half(self, norm: nn.Module, layer: nn.Module, usual: type[Attention | Mlp]) -> Entries:
        unfused, standard = self._unfused_reason(layer, usual), type(layer) in _LAYERS
        fused_part, layer_part = (layer if standard else usual).parts
        unsupported = layer.unsupported_reason() if standard else unfused
        if unfused is None:
            return [(fused_part, unsupported)]
        entries = norm.report_entries() if type(norm) in OF_NORMS else [("norm", f"it is {full_name(type(norm))}")]
        return [*entries, (layer_part, unsupported), ("projection and residual", unfused)]

    def attention_map(self, x: Tensor, positions: Tensor | None = None, options: dict | None = None, *_) -> Tensor:
        """The attention matrices (B, H, N, N), in fp32 at least, of `forward` with these arguments."""
        x = x if positions is None else x + positions.to(x.dtype)
        return self.attn.probabilities(self.branch_input(x, self.norm1), **(options or {}))


def _add(x: Tensor, y: Tensor, drop_path: Tensor | None) -> Tensor:
    """x + drop_path * y, in the dtype of x."""
    return x + (y if drop_path is None else y * drop_path.view(-1, *[1] * (y.dim() - 1))).to(x.dtype)
