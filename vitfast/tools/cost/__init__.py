"""The cost of a model before it is run: parameters, FLOPs, memory, and for ViTs floor times.

The floor of an operation is the sum over its kernels, which run one after the other, of max(FLOPs / rate of the matrix
units, bytes / rate of the memory). work.py counts both, for the benchmarks too. One thing is left out: unless keep is
"all", LayerNorm's backward also writes LayerNorm's output again. Crops of each size count with kernels of their own,
which read the weights once more than those of packed crops (under 1 % of the bytes). Of LeJEPA's projector the norms
are left out, and what it keeps for backward.
"""
