"""Compiled kernels without a GPU: compiling them, reading their machine code, predicting their time."""

LAUNCH = 3e-6  # seconds from the end of one kernel to the first work of the next (assumed)
