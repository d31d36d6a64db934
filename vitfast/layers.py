"""The modules of the ViT: parameters under timm's names, and calls of the operations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing

from . import ref
from .errors import InputError
from .ops import attention, attention_block, layer_norm, linear_gelu, mlp_block, patch_embed
from .ops.attention import unsupported_reason as head_unsupported
from .positions import relative_attention, relative_probabilities
from .presets import pair
from .submodules import Layout, find_modules, full_name, layout

# The operations check their arguments in Python: for FX (timm's feature extraction) each is one leaf.
_LEAVES = "attention attention_block layer_norm linear_gelu mlp_block patch_embed relative_attention sample_drop_path"
for _leaf in _LEAVES.split():
    torch.fx.wrap(_leaf)


def sample_drop_path(x: Tensor, rate: float) -> Tensor:
    """(B,) factors: 0 with probability `rate`, else 1 / (1 - rate) (Huang et al., 2016)."""
    keep = 1 - rate
    factors = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
    return factors.bernoulli_(keep).div_(keep) if keep > 0 else factors.zero_()


# The parts of a layer, for `acceleration_report`; with each why PyTorch's code runs it, None where an operation does.
Parts = list[tuple[str, str | None]]


class Layer(nn.Module):
    """A layer that runs operations on parameters of its modules. stands_in: of each operation, for which."""

    stands_in: dict[str, Layout] = {}

    @torch.compiler.assume_constant_result  # no guards on each hook: as with PyTorch's own, compile after adding them
    def why_called(self, operation: str) -> str | None:
        """Why those modules must be called (LoRA, a hook, active dropout ...); None where they need not."""
        found = find_modules(self.stands_in[operation], self)
        return found if isinstance(found, str) else None


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last axis, on vitfast's operation; with `in_fp32` in fp32 on PyTorch's."""

    in_fp32 = False

    def operation_parts(self, above: tuple[nn.Module, ...]) -> Parts:
        return [("norm", "an fp32 residual stream" if self.in_fp32 else None)]

    def forward(self, x: Tensor) -> Tensor:
        if self.in_fp32:
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)


class PatchEmbed(Layer):
    """Holds the patch projection (`proj.weight` (D, C, P, Q)) and the sizes it is used at.

    shrink: how much smaller than the image a map is that the projection reads in its place.
    """

    stands_in = {"patch_embed": layout({"proj": nn.Conv2d})}

    def __init__(self, img_size, patch_size, in_chans: int, embed_dim: int, shrink: int = 1):
        super().__init__()
        self.patch_size = pair(patch_size)
        kernel = tuple(side // shrink for side in self.patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel, kernel)
        self.set_input_size(img_size)

    def set_input_size(self, img_size) -> None:
        """Takes a new image size; raises InputError where it is no positive multiple of the patch size."""
        size = pair(img_size)
        for side, patch in zip(size, self.patch_size):
            if side < patch or side % patch:
                p, q = self.patch_size
                near = tuple(max(1, round(s / n)) * n for s, n in zip(size, self.patch_size))
                raise InputError(
                    f"image size {size[0]} x {size[1]} is no multiple of the patch size {p} x {q}; "
                    f"the nearest that fits is {near[0]} x {near[1]}"
                )
        self.img_size = size

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches down and across at the configured image size."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """The grid that an image of this size gives (timm's name)."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """The image's size over the grid's (timm's name)."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def operation_parts(self, above: tuple[nn.Module, ...]) -> Parts:
        return [("patch projection", self.why_called("patch_embed"))]

    def forward(
        self, images: Tensor, prefix: Tensor | None = None, pos_embed: Tensor | None = None, mean=None, std=None
    ) -> Tensor:
        if self.why_called("patch_embed") is not None:
            pixels = _pixels(images, mean, std, weights_dtype(self.proj))
            patches = self.proj(pixels).flatten(2).transpose(1, 2)
            return _with_tokens(patches, [] if prefix is None else [prefix], pos_embed)
        return patch_embed(images, self.proj.weight, self.proj.bias, prefix, pos_embed, mean=mean, std=std)


class Attention(nn.Module):
    """Parameters of multi-head self-attention: `qkv` (3D, D) with rows [q; k; v], `proj` (D, D)."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, proj_bias: bool, proj_drop: float):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def split(self, x: Tensor) -> Tensor:
        """x (B, N, D) -> q, k, v packed as (B, N, 3, H, Dh)."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))

    def probabilities(self, x: Tensor, relative: Tensor | None = None) -> Tensor:
        """The attention matrix (B, H, N, N), fp32 at least. relative: see positions.relative_logits."""
        q, k, _ = self.split(x).unbind(2)
        return ref.attention_probabilities(q, k) if relative is None else relative_probabilities(q, k, relative)

    def forward(self, x: Tensor, relative: Tensor | None = None) -> Tensor:
        qkv = self.split(x)
        o = attention(qkv) if relative is None else relative_attention(qkv, relative)
        return self.proj_drop(self.proj(o.flatten(2)))


class Mlp(Layer):
    """`fc1` (F, D) and `fc2` (D, F). approximate: GELU's, "none" (erf) or "tanh"."""

    stands_in = {"linear_gelu": layout({"fc1": nn.Linear})}

    def __init__(self, dim: int, hidden: int, approximate: str, proj_bias: bool, drop: float):
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(dim, hidden, bias=proj_bias)
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden, dim, bias=proj_bias)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        if self.why_called("linear_gelu") is None:
            h = linear_gelu(x, self.fc1.weight, self.fc1.bias, approximate=self.approximate)
        else:
            h = F.gelu(self.fc1(x), approximate=self.approximate)
        return self.drop2(self.fc2(self.drop1(h)))


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


class PreLogits(nn.Module):
    """The hidden layer of the pre-training head: tanh(fc(x)), (B, D) -> (B, representation_size)."""

    def __init__(self, dim: int, size: int):
        super().__init__()
        self.fc = nn.Linear(dim, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


def _norm_parts(norm: nn.Module) -> Parts:
    return norm.operation_parts(()) if type(norm) is LayerNorm else [("norm", f"it is {full_name(type(norm))}")]


def weights_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's first floating parameter, torch's default without one."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _drops(dropout: nn.Dropout) -> bool:
    """Whether a dropout is active, or may be in what FX traces; compiled code is guarded by it."""
    return dropout.p > 0 and (dropout.training or is_fx_tracing())


@torch.fx.wrap
def _with_tokens(patches: Tensor, prefix: list[Tensor], pos_embed: Tensor | None) -> Tensor:
    return ref.with_prefix_and_positions(patches, prefix, pos_embed)


@torch.fx.wrap
def _pixels(images: Tensor, mean, std, dtype: torch.dtype) -> Tensor:
    return ref.normalize(images, mean, std, dtype) if images.dtype == torch.uint8 else images.to(dtype)


class Block(Layer):
    """One pre-norm encoder layer: (B, N, D) -> (B, N, D).

    Two operations, except where a module in it must be called (dropout that is active, a hook, a layer that LoRA has
    replaced), or where a table of relative positions comes with x: that branch then runs on its modules, the smaller
    operations and PyTorch. `keep`: what the two operations keep for backward, "least" or "all".
    """

    keep = "least"
    stands_in = {
        "attention_block": layout(
            {
                "norm1": LayerNorm,
                "attn": Attention,
                "attn.qkv": nn.Linear,
                "attn.proj": nn.Linear,
                "attn.proj_drop": nn.Dropout,
                "ls1": (LayerScale, nn.Identity),
            }
        ),
        "mlp_block": layout(
            {
                "norm2": LayerNorm,
                "mlp": Mlp,
                "mlp.fc1": nn.Linear,
                "mlp.drop1": nn.Dropout,
                "mlp.fc2": nn.Linear,
                "mlp.drop2": nn.Dropout,
                "ls2": (LayerScale, nn.Identity),
            }
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
        init_values: float | None,
        proj_drop: float,
        drop_path: float,
        approximate: str,
        eps: float,
        residual_in_fp32: bool,
    ):
        super().__init__()
        self.drop_path_rate = drop_path
        self.residual_in_fp32 = residual_in_fp32
        self.norm1 = LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, qkv_bias, proj_bias, proj_drop)
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.norm2 = LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, hidden, approximate, proj_bias, proj_drop)
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.norm1.in_fp32 = self.norm2.in_fp32 = residual_in_fp32

    def _factors(self, x: Tensor, scale: nn.Module) -> dict:
        drop_path = sample_drop_path(x, self.drop_path_rate) if self.training and self.drop_path_rate > 0 else None
        return dict(layer_scale=getattr(scale, "gamma", None), drop_path=drop_path)

    def forward(self, x: Tensor, positions: Tensor | None = None, relative: Tensor | None = None) -> Tensor:
        """positions: (1, N, D), added to x first. relative: (2n-1, Dh), see positions.relative_logits."""
        x = x if positions is None else x + positions.to(x.dtype)
        options = dict(residual_in_fp32=self.residual_in_fp32, keep=self.keep)
        norm, attn, mlp = self.norm1, self.attn, self.mlp
        if relative is not None or self.why_called("attention_block") is not None or _drops(attn.proj_drop):
            x = self._add_branch(
                x, attn(self.branch_input(x, norm), *(() if relative is None else (relative,))), self.ls1
            )
        else:
            weights = (norm.weight, norm.bias, attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias)
            factors = self._factors(x, self.ls1)
            x = attention_block(x, *weights, num_heads=attn.num_heads, eps=norm.eps, **options, **factors)
        norm = self.norm2
        if self.why_called("mlp_block") is not None or _drops(mlp.drop1) or _drops(mlp.drop2):
            return self._add_branch(x, mlp(self.branch_input(x, norm)), self.ls2)
        weights = (norm.weight, norm.bias, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias)
        factors = self._factors(x, self.ls2)
        return mlp_block(x, *weights, eps=norm.eps, approximate=mlp.approximate, **options, **factors)

    def operation_parts(self, above: tuple[nn.Module, ...]) -> Parts:
        """As `forward` runs them. above: the modules that it is in; a ViT among them tells the positions."""
        configs = [getattr(module, "config", None) for module in above]
        relative = any(isinstance(config, dict) and config.get("pos_embed") == "relative" for config in configs)
        first, second = (self.why_called(operation) for operation in ("attention_block", "mlp_block"))
        attn, head = self.attn, None
        if type(attn) is Attention:
            head = head_unsupported(attn.head_dim, attn.head_dim**-0.5)
        attention, mlp = [("attention block", head)], [("MLP block", None)]
        if first or relative:
            own = None if type(attn) is Attention else first
            why = own or ("relative positions" if relative else head)
            rest = ("projection and residual", first or "relative positions")
            attention = [*_norm_parts(self.norm1), ("attention", why), rest]
        if second:
            fc1 = self.mlp.why_called("linear_gelu") if type(self.mlp) is Mlp else second
            mlp = [*_norm_parts(self.norm2), ("linear layer and GELU", fc1), ("projection and residual", second)]
        return attention + mlp

    def attention_map(self, x: Tensor, positions: Tensor | None = None, relative: Tensor | None = None) -> Tensor:
        """The attention matrices (B, H, N, N), in fp32 at least, of `forward` with these arguments."""
        x = x if positions is None else x + positions.to(x.dtype)
        return self.attn.probabilities(self.branch_input(x, self.norm1), relative)

    def branch_input(self, x: Tensor, norm: nn.Module) -> Tensor:
        """norm(x) as the matrix products take it; an fp32 residual stream is normalised in fp32."""
        return norm(x).to(weights_dtype(self.attn)) if self.residual_in_fp32 else norm(x)

    def _add_branch(self, x: Tensor, y: Tensor, scale: nn.Module) -> Tensor:
        """x + drop_path * layer_scale * y, for a branch that runs on the smaller operations."""
        y, factor = scale(y), self._factors(x, scale)["drop_path"]
        return x + (y if factor is None else y * factor[:, None, None]).to(x.dtype)
