"""The cost of a model before it is run: parameters, FLOPs, memory, and for ViTs floor times.

The floor of an operation is the sum over its kernels, which run one after the other, of max(FLOPs / rate of the matrix
units, bytes / rate of the memory). work.py counts both, for the benchmarks too. One thing is left out: unless keep is
"all", LayerNorm's backward also writes LayerNorm's output again.
"""
