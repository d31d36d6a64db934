"""The cost of a model before it is run: parameters, FLOPs, memory, and for ViTs floor times.

The floor of an operation is the sum over its kernels, which run one after the other, of max(FLOPs / rate of the matrix
units, bytes / rate of the memory). work.py counts both, for the benchmarks too. One thing is left out: unless keep is
"all", LayerNorm's backward also writes LayerNorm's output again.
"""

from .gpus import GIB, GPUS, Rates, datasheet_flops, rates
from .memory import kept_bytes, state_bytes, working_bytes
from .steps import flops_per_image, forward_flops, operations, optimizer_step
from .text import as_text
from .training import DATASETS, estimate, estimate_baseline

__all__ = [
    "DATASETS",
    "GIB",
    "GPUS",
    "Rates",
    "as_text",
    "datasheet_flops",
    "estimate",
    "estimate_baseline",
    "flops_per_image",
    "forward_flops",
    "kept_bytes",
    "operations",
    "optimizer_step",
    "rates",
    "state_bytes",
    "working_bytes",
]
