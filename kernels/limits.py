"""Limits of the values that kernels take, for those who check them without PyTorch."""

# The least `std`, and the largest `mean` and `std`, on the 0..1 scale; within them float32 holds the results.
LEAST_STD, MOST_PIXEL = 1e-6, 1e6
