"""The Triton kernels and their launchers: tensors in, tensors out.

No autograd, no torch.library, no import of the rest of vitfast.
"""
