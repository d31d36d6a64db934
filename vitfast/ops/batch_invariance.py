"""Batch invariance: an image's output has the same bits alone, in any batch and in any packed mix.

Three things make it so. Our launchers choose configurations by width, head size and dtype alone and never call a
library, and samples of one size use the attention of packed ones. A ViT packs every batch. And PyTorch's operations
that models call beside ours are replaced by fixed algorithms (_fixed.py).
"""

import os
import threading

import torch

from ..errors import InputError
from ..kernels.tiles import BATCH_INVARIANT
from . import _fixed

VARIABLE = "VITFAST_BATCH_INVARIANT"
_lock = threading.Lock()
_threads = 0  # how many threads have switched the mode on for themselves


def _switch(value: bool | None) -> None:
    """Sets the mode of this thread; None takes that of the environment."""
    global _threads
    with _lock:
        before = BATCH_INVARIANT.current()
        BATCH_INVARIANT.set(value)
        _threads += BATCH_INVARIANT.current() - before
        if BATCH_INVARIANT.start or _threads > 0:
            _fixed.install()
        else:
            _fixed.remove()


class batch_invariant:
    """Gives an image's output the same bits alone, in any batch and in any packed mix, if True.

    It is a context manager or a setter and acts on one thread, as use_kernels does. Other threads begin with the mode
    in the environment variable VITFAST_BATCH_INVARIANT: 1, or 0, the default.

    It is for models in eval() and for forward passes: gradients are right, but sum over the batch. On one machine and
    with one number of threads, it holds for a ViT (images of one size, lists, packed images, uint8 or floats) and for
    `accelerate`d models, in fp32, fp16 and bf16, on our kernels and on plain PyTorch.

    In this mode, neither the configurations of kernels nor the order of sums over keys, channels or tokens depend on
    the number of rows, images or sizes. PyTorch's matrix products, convolutions, attention, norms, activations, sums
    and means run in blocks of a fixed number of rows, or sample by sample. `vitfast tune`'s table is not read. Code
    that torch.compile has compiled, in any thread, runs in eager mode meanwhile. Captured CUDA graphs do not change.

    The mode does not cover models that normalise over the batch or pad images with tokens that count, products whose
    columns are images, `out=`, and operations other than those above. If a model pads a batch to its longest image, an
    image alone must be padded as well, unless `accelerate` removes the padding (NaFlexVit, SigLIP 2).

    Raises TypeError if the argument is no bool, and RuntimeError in code that is being compiled.
    """

    def __init__(self, enabled: bool):
        if not isinstance(enabled, bool):
            raise TypeError(f"batch_invariant: it takes True or False, got {enabled!r}")
        if torch.compiler.is_compiling():
            raise RuntimeError("batch_invariant: compiled code cannot switch it; call it outside")
        self.enabled, self._before = enabled, BATCH_INVARIANT.set_here()
        _switch(enabled)

    def __enter__(self):
        _switch(self.enabled)
        return self

    def __exit__(self, *_):
        _switch(self._before)


_start = os.environ.get(VARIABLE) or "0"
if _start not in ("0", "1"):
    raise InputError(f"{VARIABLE}: must be 0 or 1, got {_start!r} in the environment")
BATCH_INVARIANT.start = _start == "1"
if BATCH_INVARIANT.start:
    _fixed.install()
