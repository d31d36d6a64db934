"""Readies a GPU for a timed call: cold caches, and a head start that hides Python's launches."""

import time
from collections.abc import Callable

import torch
from torch import Tensor


def flush_buffer(device: torch.device) -> Tensor:
    """The memory that `cold` overwrites: twice the largest L2 there is."""
    return torch.empty(256 * 2**20, dtype=torch.int8, device=device)


def cold(flushed: Tensor, lead: float) -> None:
    """Overwrites the L2 cache, then keeps the device busy for `lead` seconds while Python launches."""
    flushed.zero_()
    torch.cuda._sleep(int(2e9 * lead))  # in clock cycles


def head_start(run: Callable[[], object], margin: float) -> float:
    """Seconds that hide Python's launches of `run`, warm already: twice what they take, and a margin."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    return 2 * (time.perf_counter() - begun) + margin
