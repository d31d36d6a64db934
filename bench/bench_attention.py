"""Packed attention against PyTorch's SDPA with each backend forced, transposes and concatenation included on both sides."""

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, DTYPE, GPU, Case, bench
from shapes import DIRECTIONS, SHAPES
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitfast import ops

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


def sdpa(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def forced(backend: SDPBackend):
    def function(qkv):
        with sdpa_kernel(backend):
            return sdpa(qkv)

    return function


def case_of(s) -> Case:
    def make():
        return [torch.randn(s.batch, s.tokens, 3, s.heads, s.head, device=DEVICE).to(DTYPE)]

    u = s.rows * s.width
    return Case(f"attention {s.name}", sdpa, make, flops=4 * s.batch * s.heads * s.tokens**2 * s.head, traffic=4 * u, traffic_backward=8 * u)


@pytest.mark.parametrize("impl", ["vitfast", *(BACKENDS if GPU else ["sdpa math"])])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(benchmark, shape, direction, impl):
    bench(benchmark, case_of(SHAPES[shape]), impl, ops.attention if impl == "vitfast" else forced(BACKENDS[impl]), direction)
