"""The values that arguments of several rooms may have; it needs no PyTorch."""

from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]  # timm's names

# The least `std`, and the largest `mean` and `std`, on the 0..1 scale; within them float32 holds the results.
LEAST_STD, MOST_PIXEL = 1e-6, 1e6
