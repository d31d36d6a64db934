"""Kernels compiled without a GPU, and their machine code: registers, spills, waits, instructions."""
