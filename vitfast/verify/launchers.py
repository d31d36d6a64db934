"""Every launcher of kernels/ at a model's shapes, on random inputs, beside the same in plain PyTorch.

The tuner times them one by one, and `make codegen` compiles what they launch. The first of those that share a tile is the plain case of
a training step; the later ones are variants (factors, an fp32 residual stream, tanh, raw pixels) that only compile to other code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ref
from ..kernels import attention, layer_norm, linear, mlp, patch_embed, rows, weight_grad

EPS = 1e-6
MEAN = STD = (0.5, 0.5, 0.5)
SPLITS = 7  # slices of a weight gradient that are added up


# Of a tensor drawn as a view of something wider: how far from its start, and how many elements more from row to row.
LAYOUTS = {"contiguous": (0, 0), "channels-last": (0, 0), "strided": (8, 24), "shifted": (3, 24), "odd": (3, 5)}


@dataclass(frozen=True)
class Sizes:
    """What launchers and operations run at."""

    batch: int
    tokens: int
    width: int
    heads: int
    hidden: int
    image: int
    patch: int


@dataclass
class Draw:
    """Draws inputs: random ones, or on the meta device none but their shapes.

    layout, of LAYOUTS. In "strided" tensors rows begin 16 bytes apart where their width allows it, in "odd" ones
    anywhere; "shifted" ones are strided and begin at an odd address. No two in a row have the same strides.
    "channels-last" images have the channels of a pixel side by side.
    """

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None = None
    layout: str = "contiguous"
    drawn: int = 0

    def _draw(self, shape: tuple[int, ...], fill: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """`fill(a wider shape)` cut down to `shape`."""
        start, gap = LAYOUTS[self.layout]
        if not gap or 0 in shape:
            x = fill(shape)
            return (
                x.contiguous(memory_format=torch.channels_last)
                if self.layout == "channels-last" and x.dim() == 4
                else x
            )
        self.drawn += 1
        gap += 8 * (self.drawn % 3)
        return fill((*shape[:-1], shape[-1] + gap))[..., start : start + shape[-1]]

    def values(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal numbers, in the dtype of the products unless another is given."""
        dtype = dtype or self.dtype
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=self.device)
        normal = lambda s: torch.randn(s, generator=self.generator, device=self.device)  # noqa: E731
        return self._draw(shape, lambda s: (normal(s) * scale).to(dtype))

    def weight(self, *shape: int) -> Tensor:
        """A weight that keeps the size of what it multiplies."""
        return self.values(*shape, scale=(torch.Size(shape).numel() / shape[0]) ** -0.5)

    def workspace(self, *shape: int) -> Tensor:
        """Normal numbers in fp32 as one kernel leaves them to another: contiguous in every layout."""
        return self.values(*shape, dtype=torch.float32).contiguous()

    def factors(self, count: int) -> Tensor:
        """Between 0.5 and 1.5, in fp32."""
        if self.device.type == "meta":
            return torch.empty(count, device=self.device)
        return torch.rand(count, generator=self.generator, device=self.device) + 0.5

    def pixels(self, *shape: int) -> Tensor:
        """Raw uint8."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        kind = dict(dtype=torch.uint8, generator=self.generator, device=self.device)
        return self._draw(shape, lambda s: torch.randint(0, 256, s, **kind))


@dataclass(frozen=True)
class Launcher:
    """`call(*make(draw))` runs kernels; `formula` takes the same inputs, in any dtype. `variant`: a plainer case has the same tile."""

    make: Callable[[Draw], tuple]
    call: Callable
    formula: Callable
    variant: bool = False


def outputs(result) -> list[Tensor]:
    """The tensors of what a launcher or a formula returns, without those that were not asked for."""
    found = result if isinstance(result, tuple) else (result,)
    return [t for t in found if t is not None and t.numel()]


def wide(x: Tensor) -> torch.dtype:
    """fp32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """LayerNorm's mean and rstd of every row."""
    work = x.to(wide(x))
    return work.mean(-1), (work.var(-1, unbiased=False) + EPS).rsqrt()


def gradients(function: Callable, leaves: tuple, upstream: Tensor | tuple) -> tuple[Tensor, ...]:
    """Of every leaf, by autograd."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, upstream)


def _attention_backward(q, k, v, do, scale) -> Tensor:
    """dq, dk and dv, packed (B, N, 3, H, Dh)."""
    return torch.stack(gradients(lambda *t: ref.attention(*t, scale=scale), (q, k, v), do), 2)


def _gelu_backward(dy, pre, approximate="none") -> tuple[Tensor, Tensor]:
    (dpre,) = gradients(lambda p: F.gelu(p, approximate=approximate), (pre,), dy)
    return dpre, dpre.sum(0, dtype=wide(dpre))


def launchers(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher, at these sizes, those that matter most in a training step first."""
    m, d, f, h, head = s.batch * s.tokens, s.width, s.hidden, s.heads, s.width // s.heads
    scale, patches = head**-0.5, (s.image // s.patch) ** 2
    shape = s.batch, s.tokens, d
    found: dict[str, Launcher] = {}

    def add(name: str, make, call, formula, variant: bool = False) -> None:
        found[name] = Launcher(make, call, formula, variant)

    # The MLP's products.
    for approximate, save in (("none", True), ("tanh", False)):
        name = "linear + gelu" + ("" if save else ", tanh, inference")

        def linear_gelu(x, w, b, approximate=approximate, save=save):
            pre = F.linear(x, w, b)
            return F.gelu(pre, approximate=approximate), *((pre,) if save else ())

        def dgelu(g, w2, pre, approximate=approximate):
            dpre, dbias = _gelu_backward(g @ w2, pre, approximate)
            return dpre, F.gelu(pre, approximate=approximate), dbias

        add(
            name,
            lambda t: (t.values(m, d), t.weight(f, d), t.values(f)),
            lambda x, w, b, a=approximate, save=save: mlp.linear_gelu(x, w, b, a, save),
            linear_gelu,
            variant=not save,
        )
        add(
            "dgelu" + ("" if save else ", tanh"),
            lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
            lambda g, w2, pre, a=approximate: mlp.dgelu_matmul(g, w2, pre, a, True),
            dgelu,
            variant=not save,
        )
    layers = {"fc2": (d, f), "fc1": (f, d), "qkv": (3 * d, d), "proj": (d, d)}
    for layer, (out, inner) in layers.items():
        add(
            f"weight gradient, {layer}",
            lambda t, out=out, inner=inner: (t.values(m, out), t.values(m, inner)),
            weight_grad.weight_grad,
            lambda g, x: g.t() @ x,
        )
    for layer in ("fc1", "qkv", "proj"):  # fc2's is dgelu
        out, inner = layers[layer]
        add(
            f"input gradient, {layer}",
            lambda t, out=out, inner=inner: (t.values(m, out), t.weight(out, inner)),
            linear.input_grad,
            lambda g, w: g @ w,
        )
    for layer in ("fc2", "proj"):
        add(
            f"linear + residual, {layer}",
            lambda t, inner=layers[layer][1]: (t.values(m, inner), t.weight(d, inner), t.values(d), t.values(m, d)),
            lambda x, w, b, res: linear.linear_residual(x, w, b, res, None, None, s.tokens),
            lambda x, w, b, res: ref.linear_residual(x, w, b, res),
        )
    add(
        "linear, qkv",
        lambda t: (t.values(m, d), t.weight(3 * d, d), t.values(3 * d)),
        linear.linear,
        lambda x, w, b: F.linear(x, w, b),
    )

    # Attention.
    def qkv_of(t: Draw) -> tuple:
        return t.values(s.batch, s.tokens, 3, h, head).unbind(2)

    def forward(q, k, v):
        logits = torch.einsum("bnhd,bmhd->bhnm", q.to(wide(q)), k.to(wide(k))) * scale
        return ref.attention(q, k, v, scale=scale), logits.logsumexp(-1)

    def for_backward(t: Draw) -> tuple:
        q, k, v = qkv_of(t)
        return q, k, v, *forward(q, k, v), t.values(s.batch, s.tokens, h, head)

    def with_delta(t: Draw) -> tuple:
        q, k, v, o, lse, do = for_backward(t)
        delta = (o.to(wide(o)) * do.to(wide(o))).sum(-1).transpose(1, 2).contiguous()
        return q, k, v, lse, delta, do

    add("attention", qkv_of, lambda q, k, v: attention.attention_fwd(q, k, v, scale), forward)

    def backward(q, k, v, o, lse, do):
        dqkv = _attention_backward(q, k, v, do, scale)
        return dqkv, dqkv.sum((0, 1), dtype=wide(dqkv)).flatten()

    add(
        "attention backward",
        for_backward,
        lambda q, k, v, o, lse, do: attention.attention_bwd(q, k, v, o, lse, do, scale, want_bias_grad=True),
        backward,
    )

    # LayerNorm, and what goes along rows.
    def normed(t: Draw) -> tuple:
        z = t.values(m, d)
        return t.values(m, d), z, t.values(d), t.values(d), *statistics(z)

    def layer_norm_backward(dy, z, w, b, *_):
        return gradients(lambda z, w, b: ref.layer_norm(z, w, b, EPS), (z, w, b), dy)

    def block_norm_backward(dy, z, w, b, mean, rstd, dz):
        dres, dw, db = layer_norm_backward(dy, z, w, b)
        return dres + dz, dw, db, dz.sum(0, dtype=wide(dz)), ref.layer_norm(z, w, b, EPS)

    def add_norm(x, res, w, b, ls=None, drop=None):
        x, res = x.view(shape), res.view(shape)
        y, z = ref.add_layer_norm(x, res, w, b, EPS, layer_scale=ls, drop_path=drop)
        return y.view(m, d), z.view(m, d), *statistics(z.view(m, d))

    def scaled_norm_backward(dy, z, w, b, mean, rstd, dz, branch, ls, drop):
        dres, dw, db, *_ = block_norm_backward(dy, z, w, b, mean, rstd, dz)
        dropped = (dres.view(shape) * drop.view(-1, 1, 1)).view(m, d).to(wide(dres))
        return dres, (dropped * ls).to(dy.dtype), dw, db, (dropped * branch).sum(0)

    add(
        "layer_norm backward in a block",
        lambda t: (*normed(t), t.values(m, d)),
        lambda dy, z, w, b, mean, rstd, dz: layer_norm.layer_norm_bwd(
            dy, z, w, b, mean, rstd, dz=dz, want_dz_sum=True, want_y=True
        ),
        block_norm_backward,
    )
    add(
        "layer_norm",
        lambda t: (t.values(m, d), t.values(d), t.values(d)),
        lambda x, w, b: layer_norm.layer_norm_fwd(x, w, b, EPS),
        lambda x, w, b: (ref.layer_norm(x, w, b, EPS), *statistics(x)),
    )
    add(
        "layer_norm backward",
        normed,
        lambda dy, z, w, b, mean, rstd: layer_norm.layer_norm_bwd(dy, z, w, b, mean, rstd),
        layer_norm_backward,
    )
    add(
        "add + layer_norm",
        lambda t: (t.values(m, d), t.values(m, d), t.values(d), t.values(d)),
        lambda x, res, w, b: layer_norm.add_layer_norm_fwd(x, res, w, b, EPS, None, None, s.tokens),
        add_norm,
    )
    add(
        "add + layer_norm, factors",
        lambda t: (t.values(m, d), t.values(m, d), t.values(d), t.values(d), t.values(d), t.factors(s.batch)),
        lambda x, res, w, b, ls, drop: layer_norm.add_layer_norm_fwd(x, res, w, b, EPS, ls, drop, s.tokens),
        add_norm,
        variant=True,
    )
    factors = dict(rows_per_sample=s.tokens, want_layer_scale=True)
    add(
        "add + layer_norm backward, factors",
        lambda t: (*normed(t), t.values(m, d), t.values(m, d), t.values(d), t.factors(s.batch)),
        lambda dy, z, w, b, mean, rstd, dz, branch, ls, drop: layer_norm.layer_norm_bwd(
            dy, z, w, b, mean, rstd, dz=dz, branch=branch, layer_scale=ls, drop_path=drop, **factors
        ),
        scaled_norm_backward,
    )
    add(
        "sum of rows",
        lambda t: (t.values(m, d),),
        lambda x: rows.scale_rows(x, None, None, s.tokens, want_scaled=False),
        lambda x: x.sum(0, dtype=wide(x)),
    )
    add(
        "scaled rows",
        lambda t: (t.values(m, d), t.factors(s.batch)),
        lambda x, drop: rows.scale_rows(x, None, drop, s.tokens),
        lambda x, drop: _scaled(x, drop, s.tokens),
        variant=True,
    )

    # From images to tokens and back.
    embed = (d, 3, s.patch, s.patch), (d,), (1, 1, d), (1, 1 + patches, d)
    pixels = s.batch, 3, s.image, s.image

    def parameters(t: Draw) -> tuple:
        return t.weight(*embed[0]), *(t.values(*size) for size in embed[1:])

    want = dict(prefix=1, pos_len=1 + patches, want_weight=True, want_bias=True, want_cls=True, want_pos=True)

    def embed_raw(images, *tensors):
        return ref.patch_embed(images, *tensors, mean=MEAN, std=STD)

    def embed_raw_backward(dy, images, *tensors):
        return gradients(lambda *t: embed_raw(images, *t), tensors, dy)

    def embed_backward(dy, images, *tensors):
        return gradients(ref.patch_embed, (images, *tensors), dy)

    add(
        "patch embedding, uint8",
        lambda t: (t.pixels(*pixels), *parameters(t)),
        lambda images, *tensors: patch_embed.patch_embed_fwd(images, *tensors, MEAN, STD),
        embed_raw,
    )
    add(
        "patch embedding, uint8, backward",
        lambda t: (t.values(s.batch, 1 + patches, d), t.pixels(*pixels), *parameters(t)),
        lambda dy, images, w, *_: patch_embed.patch_embed_bwd(dy, images, w, MEAN, STD, want_images=False, **want),
        embed_raw_backward,
    )
    add(
        "patch embedding",
        lambda t: (t.values(*pixels), *parameters(t)),
        lambda images, *tensors: patch_embed.patch_embed_fwd(images, *tensors, None, None),
        ref.patch_embed,
    )
    add(
        "patch embedding backward",
        lambda t: (t.values(s.batch, 1 + patches, d), t.values(*pixels), *parameters(t)),
        lambda dy, images, w, *_: patch_embed.patch_embed_bwd(dy, images, w, None, None, want_images=True, **want),
        embed_backward,
    )

    # What runs where another provider was chosen, and the small kernels that add up.
    add(
        "gelu backward",
        lambda t: (t.values(m, f), t.values(m, f)),
        lambda dy, pre: mlp.gelu_bwd(dy, pre, "none", True),
        _gelu_backward,
    )
    add(
        "attention backward, dq",
        for_backward,
        lambda q, k, v, o, lse, do: attention.attention_bwd_dq(q, k, v, o, lse, do, scale),
        lambda q, k, v, o, lse, do: _attention_backward(q, k, v, do, scale)[:, :, 0],
    )
    add(
        "attention backward, dk and dv",
        with_delta,
        lambda q, k, v, lse, delta, do: attention.attention_bwd_dkdv(q, k, v, lse, delta, do, scale),
        lambda q, k, v, lse, delta, do: _attention_backward(q, k, v, do, scale)[:, :, 1:].unbind(2),
    )
    for layer, (out, inner) in layers.items():
        add(
            f"weight gradient, {layer}, sum",
            lambda t, out=out, inner=inner: (t.workspace(SPLITS, out, inner), t.values(0)),
            lambda part, like: weight_grad.sum_products(part, None, like.dtype),
            lambda part, like: part.sum(0),
        )
    for of, count, width, dtype in (("layer_norm", 396, d, None), ("gelu", -(-m // 128), f, torch.float32)):
        add(
            f"column sums, {of}",
            lambda t, n=count, w=width, k=dtype: (t.workspace(n, w), t.values(0, dtype=k)),
            _column_sums,
            lambda part, like: part.sum(0),
        )

    def scaled_gradient(g, x, w, b, ls, total):
        product = g.t() @ x
        product = product.to(wide(product))
        return (ls[:, None] * product).to(g.dtype), (product * w).sum(1) + b * total

    add(
        "weight gradient, layer scale",
        lambda t: (
            t.values(m, d),
            t.values(m, f),
            t.weight(d, f),
            t.values(d),
            t.values(d),
            t.values(d, dtype=torch.float32),
        ),
        weight_grad.weight_grad_scaled,
        scaled_gradient,
        variant=True,
    )
    add(
        "linear + residual, factors, fp32 stream",
        lambda t: (
            t.values(m, d),
            t.weight(d, d),
            t.values(d),
            t.values(m, d, dtype=torch.float32),
            t.values(d),
            t.factors(s.batch),
        ),
        lambda x, w, b, res, ls, drop: linear.linear_residual(x, w, b, res, ls, drop, s.tokens),
        lambda x, w, b, res, ls, drop: ref.linear_residual(
            x.view(shape), w, b, res.view(shape), layer_scale=ls, drop_path=drop
        ).view(m, d),
        variant=True,
    )
    return found


def _scaled(x: Tensor, drop: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    scaled = x.to(wide(x)) * drop.repeat_interleave(tokens)[:, None]
    return scaled.to(x.dtype), scaled.sum(0)


def _column_sums(part: Tensor, like: Tensor) -> Tensor:
    total = torch.empty(part.shape[1], dtype=torch.float32, device=part.device)
    rows.column_sums([(part, total)], *part.shape, like)
    return total
