"""The least work of each operation: FLOPs and bytes of its kernels, forward and backward.

Each multiply-add of the matrix products counts as two FLOPs, pointwise work as none. The backward of a product is two
products; attention is two products forward and five backward (one computes the scores again), 2.5 times as many.

Bytes: every kernel reads each of its inputs once and writes each of its outputs once. A matrix product, an attention
or a LayerNorm is one kernel with the pointwise work around it (bias, GELU and its derivative, residual) folded in. Row
statistics (lse, mean, 1/std) are not counted; they are under 2 % of the rest. A training forward also writes what only
its backward reads: the MLP's pre-activation.

Sizes: M rows (tokens of the whole batch), N tokens of an image, D width, F MLP width; size: bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

Kernels = tuple[tuple[float, float], ...]  # (FLOPs, bytes) of kernels that run one after the other


def total_flops(kernels: Kernels) -> float:
    return sum(flops for flops, _ in kernels)


def total_bytes(kernels: Kernels) -> float:
    return sum(moved for _, moved in kernels)


def floor_seconds(kernels: Kernels, flops_per_second: float, bytes_per_second: float) -> float:
    """The least seconds of the kernels: for each, the longer of its products' and its traffic's time."""
    return sum(max(flops / flops_per_second, moved / bytes_per_second) for flops, moved in kernels)


@dataclass(frozen=True)
class Work:
    """The kernels of a forward without a backward, of a training forward, and of a backward."""

    forward: Kernels
    training: Kernels
    backward: Kernels

    def of(self, direction: str) -> Kernels:
        return self.training + self.backward if direction == "both" else getattr(self, direction)

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, self.training + other.training, self.backward + other.backward)

    def __mul__(self, times: int) -> Work:
        return Work(self.forward * times, self.training * times, self.backward * times)


def product(m: int, n: int, k: int, size: int, extra: int = 0) -> Kernels:
    """(m, k) x (k, n) -> (m, n); extra: how many more numbers it moves, for the work that is folded in."""
    return ((2.0 * m * n * k, size * (m * k + k * n + m * n + extra)),)


def moved(numbers: int, size: int) -> Kernels:
    """A kernel without a product, which moves this many numbers."""
    return ((0.0, size * numbers),)


def attention(m: int, n: int, d: int, size: int, keys: int = 0, bias: int = 0) -> Work:
    """q (M, D), k and v (M, D), or (keys, D) -> o (M, D).

    Backward reads these and do, and writes dq, dk and dv.

    n: how many keys a query sees. bias: how many numbers a bias has; both passes read it, and backward writes dbias.
    """
    moved = 2 * (m + (keys or m)) * d
    forward = ((4.0 * m * n * d, size * (moved + bias)),)
    return Work(forward, forward, ((10.0 * m * n * d, size * 2 * (moved + bias)),))


def biased_attention(m: int, n: int, d: int, heads: int, size: int) -> Work:
    """`attention` with a bias (heads, N, N)."""
    return attention(m, n, d, size, bias=heads * n * n)


def layer_norm(m: int, d: int, size: int, residual_gradient: bool = False, vectors: int = 2) -> Work:
    """x -> y; backward: dy, x -> dx.

    residual_gradient: backward also reads and adds the residual's, as in a block. vectors: 2 for a weight and a bias.
    """
    forward = moved(2 * m * d + vectors * d, size)
    return Work(forward, forward, moved((4 if residual_gradient else 3) * m * d + (vectors + 1) * d, size))


def rms_norm(m: int, d: int, size: int, residual_gradient: bool = False) -> Work:
    return layer_norm(m, d, size, residual_gradient, vectors=1)


def add_layer_norm(m: int, d: int, size: int) -> Work:
    """x, residual -> y, z; backward: dy, dz, z -> one gradient, which x and the residual share."""
    forward = moved(4 * m * d + 2 * d, size)
    return Work(forward, forward, moved(4 * m * d + 3 * d, size))


def linear(m: int, n: int, k: int, size: int, extra: int = 0, kept: int = 0, dx: int = 0, dw: int = 0) -> Work:
    """Y = X W^T + b, Y (m, n). Backward: dX = dY W, dW = dY^T X, and db in the same kernel.

    The other arguments count numbers that move in addition, for work that is folded in. extra: in every forward, such
    as a residual. kept: only in a training forward. dx and dw: in the two products of the backward.
    """
    forward, training = (product(m, n, k, size, n + extra + more) for more in (0, kept))
    return Work(forward, training, product(m, k, n, size, dx) + product(n, k, m, size, dw + n))


def linear_gelu(m: int, d: int, f: int, size: int) -> Work:
    """gelu(x W^T + b); training writes the pre-activation too, which both products of the backward read."""
    return linear(m, f, d, size, kept=m * f, dx=m * f, dw=m * f)


def mlp_layers(
    m: int, d: int, f: int, size: int, gated: bool = False, residual: bool = False, keep: str = "least"
) -> tuple[Work, Work]:
    """The layers before and after the activation, into both of which its work is folded.

    fc1: act(x W1^T + b1); training writes the pre-activation too, from whose gradient the backward starts. If gated, it
    is one product of twice the width, act(gate(x)) * up(x), with two pre-activations.
    fc2: h W2^T + b2 (+ residual). Backward: dY W2 reads the pre-activations and writes their gradients and, unless keep
    is "all", h; then comes dW2. If gated, h is counted as written whatever keep says.
    """
    first = linear(m, 2 * f, d, size, -m * f, kept=2 * m * f) if gated else linear(m, f, d, size, kept=m * f)
    again = 4 if gated else 1 if keep == "all" else 2
    return first, linear(m, d, f, size, m * d if residual else 0, dx=again * m * f)


def mlp(m: int, d: int, f: int, size: int, gated: bool = False, residual: bool = False) -> Work:
    first, second = mlp_layers(m, d, f, size, gated, residual)
    return first + second


def gated_mlp(m: int, d: int, f: int, size: int) -> Work:
    """A gated MLP without an inner norm."""
    return mlp(m, d, f, size, gated=True)


def attention_block(m: int, n: int, d: int, size: int) -> Work:
    """LayerNorm, QKV, attention, projection and residual."""
    qkv, projection = linear(m, 3 * d, d, size), linear(m, d, d, size, m * d)
    return layer_norm(m, d, size, True) + qkv + attention(m, n, d, size) + projection


def mlp_block(m: int, d: int, f: int, size: int, gated: bool = False) -> Work:
    """LayerNorm, both linear layers and residual."""
    return layer_norm(m, d, size, True) + mlp(m, d, f, size, gated, residual=True)


def gated_mlp_block(m: int, d: int, f: int, size: int) -> Work:
    return mlp_block(m, d, f, size, gated=True)


def patch_embed(patches: int, length: int, m: int, d: int, added: int, size: int, pixel_size: int) -> Work:
    """`patches` of `length` values of `pixel_size` bytes -> tokens (M, D).

    added: how many numbers biases and embeddings have. Backward makes dW and, in the same pass over dy, the gradients
    of biases and embeddings; images need no gradient.
    """
    each = ((2.0 * patches * d * length, pixel_size * patches * length + size * (m * d + d * length + added)),)
    return Work(each, each, each)


def update(parameters: int, optimizer: str = "adamw", averaged: bool = False, size: int = 4) -> Kernels:
    """The kernels of clipping by norm and of the update.

    Gradients are read for their norm; p, g, m (and v) are read, p, m (and v) written; an average takes 3 passes more.
    """
    passes = (8 if optimizer == "adamw" else 6) + (3 if averaged else 0)
    return ((0.0, float(size * passes * parameters)),)
