"""The values that arguments may have, for those who check or annotate them without PyTorch."""

from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]  # timm's names

# The least `std`, and the largest `mean` and `std`, on the 0..1 scale; within them float32 holds the results.
LEAST_STD, MOST_PIXEL = 1e-6, 1e6
