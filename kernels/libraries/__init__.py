"""Other people's kernels as candidates: cuBLASLt, PyTorch, attention libraries."""
