"""The work of each operation, at least: FLOPs and bytes of its kernels, forward and backward.

FLOPs are two per multiply-add of the matrix products; pointwise work counts nothing. The backward of a product is two
products; attention is two products forward and five backward (one computes the scores again), 2.5 times as many.

Bytes: every kernel reads each of its inputs once and writes each of its outputs once. A matrix product, an attention
or a LayerNorm is one kernel, the pointwise work around it (bias, GELU and its derivative, residual) folded in. Not
counted: row statistics (lse, mean, 1/std), under 2 % of the rest. A forward pass that trains also writes what only its
backward reads: the MLP's pre-activation.

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
    """Seconds that the kernels take at least: each what its products or its traffic take, the longer."""
    return sum(max(flops / flops_per_second, moved / bytes_per_second) for flops, moved in kernels)


@dataclass(frozen=True)
class Work:
    """The kernels of a forward that keeps nothing for a backward, of one that does, of the backward."""

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
    """(m, k) x (k, n) -> (m, n); extra: numbers that it reads or writes besides, for what is folded in."""
    return ((2.0 * m * n * k, size * (m * k + k * n + m * n + extra)),)


def moved(numbers: int, size: int) -> Kernels:
    """A kernel that computes no product."""
    return ((0.0, size * numbers),)


def attention(m: int, n: int, d: int, size: int) -> Work:
    """Packed qkv (3 M D) -> o (M D); backward reads qkv, o and do, writes dqkv."""
    forward = ((4.0 * m * n * d, size * 4 * m * d),)
    return Work(forward, forward, ((10.0 * m * n * d, size * 8 * m * d),))


def biased_attention(m: int, n: int, d: int, heads: int, size: int) -> Work:
    """`attention` with a bias (heads, N, N), read both times, and its gradient written."""
    bias = heads * n * n
    forward = ((4.0 * m * n * d, size * (4 * m * d + bias)),)
    return Work(forward, forward, ((10.0 * m * n * d, size * (8 * m * d + 2 * bias)),))


def layer_norm(m: int, d: int, size: int, residual_gradient: bool = False) -> Work:
    """Backward: dy, x -> dx; in a block the residual's gradient too, which it reads and adds."""
    forward = moved(2 * m * d + 2 * d, size)
    return Work(forward, forward, moved((4 if residual_gradient else 3) * m * d + 3 * d, size))


def add_layer_norm(m: int, d: int, size: int) -> Work:
    """Forward: x, residual -> norm, z. Backward: dy, dz, z -> one gradient, which is that of both."""
    forward = moved(4 * m * d + 2 * d, size)
    return Work(forward, forward, moved(4 * m * d + 3 * d, size))


def _linear_backward(m: int, n: int, k: int, size: int, extra: int = 0) -> Kernels:
    """dX = dY W, dW = dY^T X (with db) of Y (m, n) = X W^T; extra: numbers both read beside dY."""
    return product(m, k, n, size, extra) + product(n, k, m, size, extra + n)


def linear(m: int, n: int, k: int, size: int, extra: int = 0) -> Work:
    """Y = X W^T + b; extra: numbers that the forward pass reads besides, such as a residual."""
    forward = product(m, n, k, size, n + extra)
    return Work(forward, forward, _linear_backward(m, n, k, size))


def fc1(m: int, d: int, f: int, size: int) -> Work:
    """gelu(x W1^T + b1); training writes the pre-activation too, from whose gradient the backward starts."""
    return Work(product(m, f, d, size, f), product(m, f, d, size, f + m * f), _linear_backward(m, f, d, size))


def fc2(m: int, d: int, f: int, size: int, residual: bool, keep: str = "least") -> Work:
    """act W2^T + b2 (+ residual).

    Backward: dY W2 reads the pre-activation, writes its gradient and, unless keep is "all", the activation; then dW2.
    """
    forward = product(m, d, f, size, d + (m * d if residual else 0))
    gradient = product(m, f, d, size, (1 if keep == "all" else 2) * m * f)
    return Work(forward, forward, gradient + product(d, f, m, size, d))


def linear_gelu(m: int, d: int, f: int, size: int) -> Work:
    """`fc1` alone: both products of the backward read dy and the pre-activation."""
    alone = fc1(m, d, f, size)
    return Work(alone.forward, alone.training, _linear_backward(m, f, d, size, m * f))


def mlp(m: int, d: int, f: int, size: int) -> Work:
    return fc1(m, d, f, size) + fc2(m, d, f, size, residual=False)


def gated_layers(m: int, d: int, f: int, size: int) -> Work:
    """act(gate(x)) * up(x) as one product; training writes up and gate too. Backward: one dx."""
    two, biases = 2 * f, 2 * f
    forward, training = (product(m, two, d, size, biases + more) for more in (-m * f, m * f))
    return Work(forward, training, _linear_backward(m, two, d, size))


def gated_down(m: int, d: int, f: int, size: int, residual: bool) -> Work:
    """h W^T + b (+ residual). Backward: dY W reads up and gate, writes both gradients and h; then dW."""
    forward = product(m, d, f, size, d + (m * d if residual else 0))
    return Work(forward, forward, product(m, f, d, size, 4 * m * f) + product(d, f, m, size, d))


def latent_attention(batch: int, n: int, d: int, size: int) -> Work:
    """Attention of one query an image on `n` keys and values; its backward computes the scores again."""
    forward = ((4.0 * batch * n * d, float(size * batch * d * (2 * n + 2))),)
    return Work(forward, forward, ((10.0 * batch * n * d, float(size * batch * d * (4 * n + 4))),))


def gated_mlp(m: int, d: int, f: int, size: int) -> Work:
    """Without an inner norm."""
    return gated_layers(m, d, f, size) + gated_down(m, d, f, size, residual=False)


def gated_mlp_block(m: int, d: int, f: int, size: int) -> Work:
    """LayerNorm, the three linear layers and residual."""
    return layer_norm(m, d, size, True) + gated_layers(m, d, f, size) + gated_down(m, d, f, size, residual=True)


def rms_norm(m: int, d: int, size: int, residual_gradient: bool = False) -> Work:
    """As layer_norm, with a weight alone."""
    return Work(*(moved(2 * m * d + d, size),) * 2, moved((4 if residual_gradient else 3) * m * d + 2 * d, size))


def attention_block(m: int, n: int, d: int, size: int) -> Work:
    """LayerNorm, QKV, attention, projection and residual."""
    qkv, projection = linear(m, 3 * d, d, size), linear(m, d, d, size, m * d)
    return layer_norm(m, d, size, True) + qkv + attention(m, n, d, size) + projection


def mlp_block(m: int, d: int, f: int, size: int) -> Work:
    """LayerNorm, both linear layers and residual."""
    return layer_norm(m, d, size, True) + fc1(m, d, f, size) + fc2(m, d, f, size, residual=True)


def patch_embed(patches: int, length: int, m: int, d: int, added: int, size: int, pixel_size: int) -> Work:
    """`patches` of `length` values of `pixel_size` bytes -> tokens (M, D).

    added: numbers of biases and embeddings. Backward: dW, and the gradients of what is added from the same pass over
    dy; images want no gradient.
    """
    each = ((2.0 * patches * d * length, pixel_size * patches * length + size * (m * d + d * length + added)),)
    return Work(each, each, each)


def update(parameters: int, optimizer: str = "adamw", averaged: bool = False, size: int = 4) -> Kernels:
    """Clipping by norm and the update.

    Gradients are read for their norm; p, g, m (and v) are read, p, m (and v) written; then the running average.
    """
    passes = (8 if optimizer == "adamw" else 6) + (3 if averaged else 0)
    return ((0.0, float(size * passes * parameters)),)
