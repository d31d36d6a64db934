"""GPU generations: those with configurations of their own, and the one whose configurations another GPU takes."""

import functools

import torch

GENERATIONS = (80, 89, 90, 100, 120)
# Other GPUs -> the generation whose tiles they take: of those with instructions and shared memory that they have too.
# sm_86 has no more shared memory than sm_89, and less than sm_80.
TABLE_OF = {86: 89, 87: 80, 103: 100, 121: 120}
assumed: int | None = None  # the generation that tiles.using(sm=...) assumes whatever the device


def capability(device: torch.device | int) -> int:
    """The compute capability that Triton compiles for, as 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def table_of(exact: int) -> int:
    """The generation whose tiles a GPU of this compute capability takes; 0 if it is older than all."""
    return TABLE_OF.get(exact) or max((sm for sm in GENERATIONS if sm <= exact), default=0)


@functools.cache
def _generation(index: int) -> int:
    return table_of(capability(index))


def generation(device: torch.device) -> int:
    """The one of GENERATIONS whose tiles the device takes, 0 if it is older; without a GPU it is 90."""
    if assumed is not None:
        return assumed
    if device.type != "cuda":
        return 90
    return _generation(torch.cuda.current_device() if device.index is None else device.index)
