"""How much work an operation is, at least: FLOPs and bytes of every kernel that it needs, forward and backward.

FLOPs: two per multiply-add of the matrix products; pointwise work counts nothing. The backward of a product is two products; attention
is two products forward and five backward (one recomputes the scores), 2.5 times as many.

Bytes: every kernel reads each of its inputs once and writes each of its outputs once. A matrix product, an attention or a LayerNorm is
one kernel, the pointwise work around it (bias, GELU and its derivative, residual) folded in. Not counted: row statistics (lse, mean,
rstd), under 2 % of the rest. A forward pass that trains also writes what only its backward reads: the MLP's pre-activation.

The floor of an operation is the sum over its kernels of max(FLOPs / matrix rate, bytes / copy rate): kernels follow one another.
vitfast.cost counts whole models for its users by the same rules; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapes import Shape


@dataclass(frozen=True)
class Cost:
    """The (FLOPs, bytes) of the kernels that have to run, one after the other."""

    kernels: tuple[tuple[float, float], ...] = ()

    @property
    def flops(self) -> float:
        return sum(flops for flops, _ in self.kernels)

    @property
    def bytes(self) -> float:
        return sum(moved for _, moved in self.kernels)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.kernels + other.kernels)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.kernels * times)

    def floor(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Seconds that the kernels take at least."""
        return sum(max(flops / flops_per_second, moved / bytes_per_second) for flops, moved in self.kernels)


@dataclass(frozen=True)
class Costs:
    """`forward` keeps nothing for a backward, `training` is the forward that does, `backward` its backward."""

    forward: Cost
    training: Cost
    backward: Cost

    def of(self, direction: str) -> Cost:
        return self.training + self.backward if direction == "both" else getattr(self, direction)

    def __add__(self, other: Costs) -> Costs:
        return Costs(self.forward + other.forward, self.training + other.training, self.backward + other.backward)

    def __mul__(self, times: int) -> Costs:
        return Costs(self.forward * times, self.training * times, self.backward * times)


def product(m: int, n: int, k: int, size: int, extra: float = 0.0) -> Cost:
    """(m, k) x (k, n) -> (m, n) in elements of `size` bytes, `extra` elements more for what is folded in."""
    return Cost(((2.0 * m * n * k, size * (m * k + k * n + m * n + extra)),))


def _moved(elements: float, size: int) -> Cost:
    return Cost(((0.0, elements * size),))


def attention(s: Shape, size: int) -> Costs:
    """Packed qkv (3u) -> o (u); backward reads qkv, o and do, writes dqkv. u = B N D elements."""
    u, matmul = s.rows * s.width, 2.0 * s.batch * s.heads * s.tokens**2 * s.head
    forward = Cost(((2 * matmul, 4.0 * u * size),))
    return Costs(forward, forward, Cost(((5 * matmul, 8.0 * u * size),)))


def layer_norm(s: Shape, size: int, residual_gradient: bool = False) -> Costs:
    """Backward reads dy and x, writes dx; inside a block it also adds the gradient of the residual, which it reads."""
    u, d = s.rows * s.width, s.width
    forward = _moved(2 * u + 2 * d, size)
    return Costs(forward, forward, _moved((4 if residual_gradient else 3) * u + 3 * d, size))


def add_layer_norm(s: Shape, size: int) -> Costs:
    """Forward reads x and residual, writes the norm and z; backward reads dy, dz and z, writes one gradient, which is that of both."""
    u, d = s.rows * s.width, s.width
    forward = _moved(4 * u + 2 * d, size)
    return Costs(forward, forward, _moved(4 * u + 3 * d, size))


def _linear_backward(m: int, n: int, k: int, size: int, extra: float = 0.0) -> Cost:
    """dX = dY W and dW = dY^T X (with db) of Y (m, n) = X (m, k) W^T; `extra`: elements that both read beside dY."""
    return product(m, k, n, size, extra) + product(n, k, m, size, extra + n)


def linear(m: int, n: int, k: int, size: int, extra: float = 0.0) -> Costs:
    """Y = X W^T + b; `extra`: elements that the forward pass reads besides, such as a residual."""
    forward = product(m, n, k, size, n + extra)
    return Costs(forward, forward, _linear_backward(m, n, k, size))


def _fc1(s: Shape, size: int) -> Costs:
    """gelu(x W1^T + b1), of which training writes the pre-activation too; its backward starts from the pre-activation's gradient."""
    m, d, f = s.rows, s.width, s.hidden
    return Costs(product(m, f, d, size, f), product(m, f, d, size, f + m * f), _linear_backward(m, f, d, size))


def _fc2(s: Shape, size: int, residual: bool) -> Costs:
    """act W2^T + b2 (+ residual). Backward: dY W2 reads the pre-activation, writes its gradient and the activation again; then dW2."""
    m, d, f = s.rows, s.width, s.hidden
    forward = product(m, d, f, size, d + (m * d if residual else 0))
    return Costs(forward, forward, product(m, f, d, size, 2 * m * f) + product(d, f, m, size, d))


def linear_gelu(s: Shape, size: int) -> Costs:
    """gelu(x W1^T + b1) alone: both products of the backward read dy and the pre-activation."""
    fc1 = _fc1(s, size)
    return Costs(fc1.forward, fc1.training, _linear_backward(s.rows, s.hidden, s.width, size, s.rows * s.hidden))


def mlp(s: Shape, size: int) -> Costs:
    return _fc1(s, size) + _fc2(s, size, residual=False)


def attention_block(s: Shape, size: int) -> Costs:
    m, d = s.rows, s.width
    return layer_norm(s, size, True) + linear(m, 3 * d, d, size) + attention(s, size) + linear(m, d, d, size, m * d)


def mlp_block(s: Shape, size: int) -> Costs:
    return layer_norm(s, size, True) + _fc1(s, size) + _fc2(s, size, residual=True)


def patch_embed(s: Shape, size: int, pixel_size: int) -> Costs:
    """Images of `pixel_size` bytes a value -> tokens; backward: dW, and dbias, dpos and dcls from the same pass over dy."""
    patches, k, d = s.batch * (s.tokens - 1), 3 * s.patch**2, s.width
    moved = 3.0 * s.batch * s.image**2 * pixel_size + (s.rows * d + d * k + (s.tokens + 2) * d) * size
    each = Cost(((2.0 * patches * d * k, moved),))
    return Costs(each, each, each)


def model(s: Shape, size: int, classes: int = 1000) -> Costs:
    """The whole ViT: patch embedding, every layer, and the head on the class token."""
    return (
        patch_embed(s, size, size)
        + (attention_block(s, size) + mlp_block(s, size)) * s.depth
        + linear(s.batch, classes, s.width, size)
    )


def optimizer(parameters: int, size: int) -> Cost:
    """Clipping by norm and AdamW: the gradients are read for their norm, then p, g, m and v are read, p, m and v written."""
    return _moved(8 * parameters, size)


def model_flops(s: Shape, training: bool) -> float:
    """FLOPs by the convention of MFU (Chowdhery et al., 2022): the matrix products of the forward pass, three times where it trains."""
    return (3 if training else 1) * model(s, 2).forward.flops
