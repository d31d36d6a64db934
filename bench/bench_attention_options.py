"""Attention with rotary positions, and with a bias, against PyTorch around SDPA, eager and compiled.

The peers turn q and k in PyTorch, as timm and Hugging Face do, and give the bias to SDPA as its mask.
"""

import functools

import pytest
import torch
from harness import DTYPE, Case, bench, implementation, values
from shapes import MAIN, SHAPES, Shape, grid

from vitfast import ops, ref
from vitfast.cost import work

CASES = grid("vitfast", "eager", "compile", "max-autotune", compile_at=MAIN)
PREFIX = 1  # tokens that no position turns


def rotary(place, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The attention of `place`, ops or ref, of a packed qkv turned by tables that pairs of columns share."""
    return place.attention(*qkv.unbind(2), rope=(cos, sin), num_prefix=PREFIX)


def biased(place, qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return place.attention(*qkv.unbind(2), bias=bias)


def rotary_case(s: Shape) -> Case:
    def make():
        angles = values(s.tokens - PREFIX, s.head // 2).detach().float()
        return [values(s.batch, s.tokens, 3, s.heads, s.head), angles.cos(), angles.sin()]

    counted = work.attention(s.rows, s.tokens, s.width, DTYPE.itemsize)
    return Case("attention rotary", s.name, functools.partial(rotary, ref), make, 1, counted)


def biased_case(s: Shape) -> Case:
    """A bias that the batch shares and a layer learns."""

    def make():
        return [values(s.batch, s.tokens, 3, s.heads, s.head), values(s.heads, s.tokens, s.tokens)]

    counted = work.biased_attention(s.rows, s.tokens, s.width, s.heads, DTYPE.itemsize)
    return Case("attention bias", s.name, functools.partial(biased, ref), make, 1, counted)


@pytest.mark.parametrize("shape, direction, impl", CASES)
def test_attention_rotary(benchmark, shape, direction, impl):
    function = implementation(impl, functools.partial(rotary, ops), functools.partial(rotary, ref))
    bench(benchmark, rotary_case(SHAPES[shape]), impl, function, direction)


@pytest.mark.parametrize("shape, direction, impl", CASES)
def test_attention_bias(benchmark, shape, direction, impl):
    function = implementation(impl, functools.partial(biased, ops), functools.partial(biased, ref))
    bench(benchmark, biased_case(SHAPES[shape]), impl, function, direction)
