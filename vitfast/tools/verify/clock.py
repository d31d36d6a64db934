"""Readies a GPU for a timed call: cold caches, and a head start that hides Python's launches."""

import time
from collections.abc import Callable

import torch
from torch import Tensor


def flush_buffer(device: torch.device) -> Tensor:
    """The memory that `cold` overwrites and the memory that it reads: each twice the largest L2 there is."""
    return torch.empty(2, 64 * 2**20, dtype=torch.int32, device=device)


def cold(flushed: Tensor, lead: float) -> None:
    """Makes the L2 cache cold, then keeps the device busy for `lead` seconds while Python launches.

    Written memory alone would be written back during the timed call: other memory, which is read, takes its place.
    """
    written, read = flushed
    written.zero_()
    read.sum()
    torch.cuda._sleep(int(2e9 * lead))  # in clock cycles


def head_start(run: Callable[[], object], margin: float) -> float:
    """Seconds that hide Python's launches of `run`, warm already: twice what they take, and a margin."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    return 2 * (time.perf_counter() - begun) + margin
