"""The Triton kernels and their launchers: tensors in, tensors out.

No autograd, no torch.library, no import of the rest of vitfast.
"""

import torch  # noqa: F401  first: vitfast imports the operations after it, and they the files here
