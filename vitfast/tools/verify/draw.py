"""Sizes and random inputs of launchers and operations, in every layout that callers may hand over."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.presets import preset

# Of a tensor drawn as a view of something wider: how far from its start, and how many elements more from row to row.
LAYOUTS = {"contiguous": (0, 0), "channels-last": (0, 0), "strided": (8, 24), "shifted": (3, 24), "odd": (3, 5)}

# A random input's kind and shape: "values", "weight" (scaled by its fan-in), "factor" (fp32, no gradient), "uint8".
Input = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """Sizes that launchers and operations run at."""

    batch: int
    tokens: int
    width: int
    heads: int
    hidden: int
    image: int
    patch: int

    @classmethod
    def of_preset(cls, name: str, batch: int, image: int = 224) -> "Sizes":
        """Those of a plain ViT with a class token."""
        found = preset(name)
        width, patch = found["embed_dim"], found["patch_size"]
        return cls(batch, (image // patch) ** 2 + 1, width, found["num_heads"], 4 * width, image, patch)

    @property
    def rows(self) -> int:
        """Of the activations as a matrix."""
        return self.batch * self.tokens

    @property
    def head(self) -> int:
        return self.width // self.heads


@dataclass
class Draw:
    """Draws inputs: random ones, or on the meta device none but their shapes.

    layout, of LAYOUTS. In "strided" tensors rows begin 16 bytes apart where their width allows it, in "odd" ones
    anywhere; "shifted" ones are strided and begin at an odd address. No two in a row have the same strides.
    "channels-last" images have the channels of a pixel side by side.
    """

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None = None
    layout: str = "contiguous"
    drawn: int = 0

    def _draw(self, shape: tuple[int, ...], fill: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """`fill(a wider shape)` cut down to `shape`."""
        start, gap = LAYOUTS[self.layout]
        if not gap or 0 in shape:
            x, last = fill(shape), self.layout == "channels-last" and len(shape) == 4
            return x.contiguous(memory_format=torch.channels_last) if last else x
        self.drawn += 1
        gap += 8 * (self.drawn % 3)
        return fill((*shape[:-1], shape[-1] + gap))[..., start : start + shape[-1]]

    def values(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal numbers, in the dtype of the products unless another is given."""
        normal = lambda s: torch.randn(s, generator=self.generator, device=self.device)  # noqa: E731
        return self._draw(shape, lambda s: (normal(s) * scale).to(dtype or self.dtype))

    def weight(self, *shape: int) -> Tensor:
        """A weight that keeps the size of what it multiplies."""
        return self.values(*shape, scale=(torch.Size(shape).numel() / shape[0]) ** -0.5)

    def workspace(self, *shape: int) -> Tensor:
        """Normal numbers in fp32 as one kernel leaves them to another: contiguous in every layout."""
        return self.values(*shape, dtype=torch.float32).contiguous()

    def factors(self, *shape: int) -> Tensor:
        """Between 0.5 and 1.5, in fp32."""
        return torch.rand(shape, generator=self.generator, device=self.device) + 0.5

    def integers(self, end: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Whole numbers from 0 to below `end`."""
        return torch.randint(0, end, shape, generator=self.generator, device=self.device, dtype=dtype)

    def lengths(self, count: int, most: int) -> Tensor:
        """Whole numbers from 0 to `most`, the first of them `most`, in int32."""
        drawn = self.integers(most + 1, count)
        drawn[:1] = most
        return drawn

    def offsets(self, count: int, total: int) -> Tensor:
        """(count + 1,) int32 from 0 to `total`: samples of many sizes, some of them perhaps of none."""
        ends = (torch.rand(count, generator=self.generator, device=self.device) + 0.05).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends / ends[-1] * total]).round().int()

    def pixels(self, *shape: int) -> Tensor:
        """Raw uint8."""
        return self._draw(shape, lambda s: self.integers(256, *s, dtype=torch.uint8))

    def leaves(self, inputs: list[Input]) -> list[Tensor]:
        """Tensors of these kinds and shapes, of which values and weights want a gradient."""
        kinds = dict(values=self.values, weight=self.weight, uint8=self.pixels, factor=self.factors)
        drawn = [(kind, kinds[kind](*shape)) for kind, shape in inputs]
        return [t.requires_grad_(kind in ("values", "weight")) for kind, t in drawn]
