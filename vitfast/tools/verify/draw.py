"""Sizes and random inputs of launchers and operations, in every layout that callers may hand over."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.presets import preset

# Tensors are drawn as views of wider ones: (how far from the wider row's start, how many elements wider its rows are).
LAYOUTS = {"contiguous": (0, 0), "channels-last": (0, 0), "strided": (8, 24), "shifted": (3, 24), "odd": (3, 5)}

# A random input's kind and shape: "values", "fp32" (values of that dtype), "weight" (scaled by its fan-in), "factor"
# (fp32, no gradient), "uint8".
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
        """The sizes of a plain ViT with a class token."""
        found = preset(name)
        width, patch = found["embed_dim"], found["patch_size"]
        return cls(batch, (image // patch) ** 2 + 1, width, found["num_heads"], 4 * width, image, patch)

    @property
    def rows(self) -> int:
        """The rows of the activations as a matrix."""
        return self.batch * self.tokens

    @property
    def head(self) -> int:
        return self.width // self.heads


@dataclass
class Draw:
    """Draws random inputs; on the meta device they have shapes alone.

    layout: one of LAYOUTS. "strided" rows begin at multiples of 8 elements if their width allows it, "odd" ones
    anywhere; "shifted" tensors are strided and begin at an odd element. Tensors drawn one after the other have
    different strides. "channels-last" images have the channels of a pixel side by side.
    """

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None = None
    layout: str = "contiguous"
    drawn: int = 0

    def _draw(self, shape: tuple[int, ...], fill: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """A tensor of this shape, cut from `fill(a wider shape)` as the layout says."""
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
        """A weight (F, ...), scaled so that its products have numbers of the same size as their input."""
        return self.values(*shape, scale=(torch.Size(shape).numel() / shape[0]) ** -0.5)

    def workspace(self, *shape: int) -> Tensor:
        """Normal numbers in fp32 as one kernel leaves them to another: contiguous in every layout."""
        return self.values(*shape, dtype=torch.float32).contiguous()

    def factors(self, *shape: int) -> Tensor:
        """Random factors between 0.5 and 1.5, in fp32."""
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
        """Offsets (count + 1,) in int32 from 0 to `total`: samples of many sizes, some perhaps empty."""
        ends = (torch.rand(count, generator=self.generator, device=self.device) + 0.05).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends / ends[-1] * total]).round().int()

    def pixels(self, *shape: int) -> Tensor:
        """Raw images in uint8."""
        return self._draw(shape, lambda s: self.integers(256, *s, dtype=torch.uint8))

    def leaves(self, inputs: list[Input]) -> list[Tensor]:
        """Tensors of these kinds and shapes; values and weights require a gradient."""
        kinds = dict(values=self.values, weight=self.weight, uint8=self.pixels, factor=self.factors)
        kinds["fp32"] = functools.partial(self.values, dtype=torch.float32)
        drawn = [(kind, kinds[kind](*shape)) for kind, shape in inputs]
        return [t.requires_grad_(kind in ("values", "fp32", "weight")) for kind, t in drawn]
