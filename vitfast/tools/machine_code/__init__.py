"""Compiles kernels without a GPU and reads their machine code: registers, spills, waits."""
