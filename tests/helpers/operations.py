"""Every operation beside its formula in plain PyTorch, and the tensors that it takes: one list for all their tests."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfast import ops
from vitfast.tools.verify.draw import Draw

B, N, D, H, HIDDEN = 2, 5, 48, 3, 40
OFFSETS = torch.tensor([0, 2, 2, N])  # of packed samples: two tokens, none, three


class Operation(NamedTuple):
    """`function` and `formula` take these tensors by name."""

    function: Callable
    formula: Callable
    shapes: dict[str, tuple[int, ...]]

    @property
    def optional(self) -> list[str]:
        """What may be None while all else is given."""
        known = ("layer_scale", "drop_path", "cls_token", "pos_embed")
        return [name for name in self.shapes if name.endswith("bias") or name in known]

    @property
    def trained(self) -> list[str]:
        """What may have a gradient in a kernel."""
        return [name for name in self.shapes if name != "drop_path"]

    def draw(self, t: Draw) -> dict[str, Tensor]:
        """Random tensors, weights scaled so that products keep the size of what goes in."""
        drawn = {}
        for name, shape in self.shapes.items():
            matrix = t.weight if "weight" in name and len(shape) > 1 else t.values
            drawn[name] = (t.factors if name == "drop_path" else matrix)(*shape)
        return drawn


def norm(x, weight=None, bias=None, eps=1e-6):
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms(x, weight=None, eps=1e-6):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def added(x, branch, layer_scale=None, drop_path=None):
    branch = branch if layer_scale is None else branch * layer_scale
    return x + (branch if drop_path is None else branch * drop_path.view(-1, *[1] * (x.dim() - 1)))


def add_norm(x, residual, weight, bias=None, layer_scale=None, drop_path=None):
    z = added(residual, x, layer_scale, drop_path)
    return norm(z, weight, bias), z


def turn(x, cos, sin):
    """x (..., N, H, Dh) rotated by tables (T, Dh) that hold for its last T tokens."""
    still, x = x[..., : x.shape[-3] - len(cos), :, :], x[..., x.shape[-3] - len(cos) :, :, :]
    first, second = x.chunk(2, -1)
    return torch.cat([still, x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]], -3)


def attend(q, k, v, cos=None, sin=None, bias=None):
    if cos is not None:
        q, k = turn(q, cos, sin), turn(k, cos, sin)
    logits = torch.einsum("...nhd,...mhd->...hnm", q, k) / q.shape[-1] ** 0.5
    weights = (logits if bias is None else logits + bias).exp()
    return torch.einsum("...hnm,...mhd->...nhd", weights / weights.sum(-1, keepdim=True), v)


def attend_packed(qkv, cos=None, sin=None):
    found = []
    for first, end in zip(OFFSETS, OFFSETS[1:]):
        tables = () if cos is None else (cos[first:end], sin[first:end])
        found.append(attend(*qkv[first:end].unbind(1), *tables))
    return torch.cat(found)


def attention_block(x, norm_weight, qkv_weight, proj_weight, norm_bias=None, qkv_bias=None, proj_bias=None, **more):
    factors = {name: more.pop(name, None) for name in ("layer_scale", "drop_path")}
    qkv = F.linear(norm(x, norm_weight, norm_bias), qkv_weight, qkv_bias).unflatten(-1, (3, H, -1))
    o = attend(*qkv.unbind(-3), **more) if x.dim() == 3 else attend_packed(qkv, **more)
    return added(x, F.linear(o.flatten(-2), proj_weight, proj_bias), **factors)


def mlp(x, fc1_weight, fc2_weight, fc1_bias=None, fc2_bias=None):
    return F.linear(gelu(F.linear(x, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)


def gated(x, up_weight, gate_weight, down_weight, **more):
    gate = F.linear(x, gate_weight, more.get("gate_bias"))
    h = gate * torch.sigmoid(gate) * F.linear(x, up_weight, more.get("up_bias"))
    if more.get("inner_norm_weight") is not None:
        h = norm(h, more["inner_norm_weight"], more.get("inner_norm_bias"))
    return F.linear(h, down_weight, more.get("down_bias"))


def mlp_half(branch, x, norm_weight, norm_bias=None, layer_scale=None, drop_path=None, **layers):
    return added(x, branch(norm(x, norm_weight, norm_bias), **layers), layer_scale, drop_path)


def embed(images, weight, bias=None, cls_token=None, pos_embed=None):
    p, q = weight.shape[2:]
    patches = images.unfold(2, p, p).unfold(3, q, q).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    x = F.linear(patches, weight.flatten(1), bias)
    x = x if cls_token is None else torch.cat([cls_token.expand(len(x), -1, -1), x], 1)
    if pos_embed is None:
        return x
    return x + F.pad(pos_embed, (0, 0, x.shape[1] - pos_embed.shape[1], 0))


def embed_packed(images, weight, bias=None, cls_token=None, pos_embed=None):
    x = F.linear(images.flatten(1), weight.flatten(1), bias)
    x = x if pos_embed is None else x + pos_embed
    parts = [x[first:end] for first, end in zip(OFFSETS, OFFSETS[1:])]
    return torch.cat(parts if cls_token is None else [torch.cat([cls_token[0], part]) for part in parts])


def with_rope(function, *tensors, cos=None, sin=None, **more):
    return function(*tensors, **more, rope=None if cos is None else (cos, sin))


def qkv_apart(q, k, v, **more):
    return with_rope(ops.attention, q, k, v, **more)


qkv_together = functools.partial(with_rope, ops.attention)
block_with_rope = functools.partial(with_rope, ops.attention_block, num_heads=H)


PACKED = dict(offsets=OFFSETS, longest=3)
LINEAR = {"x": (B, N, D), "weight": (HIDDEN, D), "bias": (HIDDEN,)}
FACTORS = {"layer_scale": (D,), "drop_path": (B,)}
BLOCK = {"x": (B, N, D), "norm_weight": (D,), "norm_bias": (D,), **FACTORS}
QKV = {"qkv_weight": (3 * D, D), "qkv_bias": (3 * D,), "proj_weight": (D, D), "proj_bias": (D,)}
FC = {"fc1_weight": (HIDDEN, D), "fc1_bias": (HIDDEN,), "fc2_weight": (D, HIDDEN), "fc2_bias": (D,)}
GATED = {"up_weight": (HIDDEN, D), "up_bias": (HIDDEN,), "gate_weight": (HIDDEN, D), "gate_bias": (HIDDEN,)}
GATED |= {"inner_norm_weight": (HIDDEN,), "inner_norm_bias": (HIDDEN,)}
GATED |= {"down_weight": (D, HIDDEN), "down_bias": (D,)}
ACTING = {"cos": (N - 1, D // H), "sin": (N - 1, D // H), "bias": (1, H, N, N)}
TABLES = {"cos": (N, D // H), "sin": (N, D // H)}
ADDED = {"x": (B, N, D), "residual": (B, N, D), "weight": (D,), "bias": (D,), **FACTORS}
WEIGHT, PREFIX = {"weight": (D, 3, 4, 2), "bias": (D,)}, {"cls_token": (1, 2, D)}
CUT = {"images": (N, 3, 4, 2), **WEIGHT, **PREFIX, "pos_embed": (N, D)}


def _(function: Callable, formula: Callable, shapes: dict, **options) -> Operation:
    return Operation(functools.partial(function, **options), formula, shapes)


@torch.enable_grad()
def results(function: Callable, tensors: dict[str, Tensor | None], trained=()) -> list[Tensor]:
    """The outputs, and the gradients of `trained` for upstream ones that every dtype holds exactly."""
    leaves = {name: None if t is None else t.detach().requires_grad_(name in trained) for name, t in tensors.items()}
    found = function(**leaves)
    found = list(found) if isinstance(found, tuple) else [found]
    used = [o for o in found if o.requires_grad]
    draw = torch.Generator().manual_seed(1)
    upstream = [torch.randint(-8, 9, o.shape, generator=draw).to(o.dtype) / 4 for o in used]
    grads = torch.autograd.grad(used, [leaves[name] for name in trained], upstream) if trained else ()
    return [*(o.detach() for o in found), *grads]


OPERATIONS = {
    "layer_norm": _(ops.layer_norm, norm, {"x": (B, N, D), "weight": (D,), "bias": (D,)}),
    "rms_norm": _(ops.rms_norm, rms, {"x": (B, N, D), "weight": (D,)}),
    "add_layer_norm": _(ops.add_layer_norm, add_norm, ADDED),
    "attention": _(ops.attention, lambda qkv: attend(*qkv.unbind(2)), {"qkv": (B, N, 3, H, 16)}),
    "attention, apart": _(qkv_apart, attend, dict.fromkeys("qkv", (B, N, H, 16)) | ACTING, num_prefix=1),
    "attention, packed": _(qkv_together, attend_packed, {"qkv": (N, 3, H, 16), **TABLES}, **PACKED),
    "linear_gelu": _(ops.linear_gelu, lambda x, weight, bias=None: gelu(F.linear(x, weight, bias)), LINEAR),
    "norm_linear": _(
        ops.norm_linear,
        lambda x, norm_weight, weight, norm_bias=None, bias=None: F.linear(
            norm(x, norm_weight, norm_bias), weight, bias
        ),
        {"x": (B, N, D), "norm_weight": (D,), "norm_bias": (D,), "weight": (HIDDEN, D), "bias": (HIDDEN,)},
    ),
    "linear_residual": _(
        ops.linear_residual,
        lambda x, weight, residual, bias=None, **factors: added(residual, F.linear(x, weight, bias), **factors),
        {"x": (B, N, HIDDEN), "weight": (D, HIDDEN), "bias": (D,), "residual": (B, N, D), **FACTORS},
    ),
    "mlp": _(ops.mlp, mlp, {"x": (B, N, D), **FC}),
    "gated_mlp": _(ops.gated_mlp, gated, {"x": (B, N, D), **GATED}),
    "attention_block": _(block_with_rope, attention_block, {**BLOCK, **QKV, **ACTING}, num_prefix=1),
    "attention_block, packed": _(
        block_with_rope, attention_block, {**BLOCK, "x": (N, D), "drop_path": (N,), **QKV, **TABLES}, **PACKED
    ),
    "mlp_block": _(ops.mlp_block, functools.partial(mlp_half, mlp), {**BLOCK, **FC}),
    "gated_mlp_block": _(ops.gated_mlp_block, functools.partial(mlp_half, gated), {**BLOCK, **GATED}),
    "patch_embed": _(ops.patch_embed, embed, {"images": (B, 3, 8, 6), **WEIGHT, **PREFIX, "pos_embed": (1, 6, D)}),
    "patch_embed, packed": _(ops.patch_embed, embed_packed, CUT, offsets=OFFSETS),
}
