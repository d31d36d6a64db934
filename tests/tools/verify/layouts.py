"""Random inputs in every layout that callers may hand over."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitfast.tools.verify.draw import Draw

# Tensors are drawn as views of wider ones: (how far from the wider row's start, how many elements wider its rows are).
LAYOUTS = {"contiguous": (0, 0), "channels-last": (0, 0), "strided": (8, 24), "shifted": (3, 24), "odd": (3, 5)}


@dataclass
class LaidOut(Draw):
    """Draws random inputs in a layout.

    layout: one of LAYOUTS. "strided" rows begin at multiples of 8 elements if their width allows it, "odd" ones
    anywhere; "shifted" tensors are strided and begin at an odd element. Tensors drawn one after the other have
    different strides. "channels-last" images have the channels of a pixel side by side.
    """

    layout: str = "contiguous"
    drawn: int = 0

    def _cut(self, shape: tuple[int, ...], draw: Callable[..., Tensor]) -> Tensor:
        """A tensor of this shape, cut from `draw(*a wider shape)` as the layout says."""
        start, gap = LAYOUTS[self.layout]
        if not gap or 0 in shape:
            x, last = draw(*shape), self.layout == "channels-last" and len(shape) == 4
            return x.contiguous(memory_format=torch.channels_last) if last else x
        self.drawn += 1
        gap += 8 * (self.drawn % 3)
        return draw(*shape[:-1], shape[-1] + gap)[..., start : start + shape[-1]]

    def values(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        values = super().values
        return self._cut(shape, lambda *wider: values(*wider, dtype=dtype, scale=scale))

    def workspace(self, *shape: int) -> Tensor:
        """Contiguous in every layout, as a kernel leaves it."""
        return super().workspace(*shape).contiguous()

    def pixels(self, *shape: int) -> Tensor:
        return self._cut(shape, super().pixels)
