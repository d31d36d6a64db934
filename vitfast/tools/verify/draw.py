"""Sizes and random inputs of launchers and operations."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.presets import preset

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
    """Draws random inputs; on the meta device they have only shapes."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None = None

    def values(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal numbers, in the dtype of the products unless another is given."""
        normal = torch.randn(shape, generator=self.generator, device=self.device)
        return (normal * scale).to(dtype or self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """A weight (F, ...), scaled so that its products have numbers of the same size as their input."""
        return self.values(*shape, scale=(torch.Size(shape).numel() / shape[0]) ** -0.5)

    def workspace(self, *shape: int) -> Tensor:
        """Normal numbers in fp32 as one kernel leaves them to another."""
        return self.values(*shape, dtype=torch.float32)

    def factors(self, *shape: int) -> Tensor:
        """Random factors between 0.5 and 1.5, in fp32."""
        return torch.rand(shape, generator=self.generator, device=self.device) + 0.5

    def offsets(self, count: int, total: int) -> Tensor:
        """Offsets (count + 1,) in int32 from 0 to `total`: samples of many sizes, some perhaps empty."""
        ends = (torch.rand(count, generator=self.generator, device=self.device) + 0.05).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends / ends[-1] * total]).round().int()

    def pixels(self, *shape: int) -> Tensor:
        """Raw images in uint8."""
        return torch.randint(0, 256, shape, generator=self.generator, device=self.device, dtype=torch.uint8)

    def leaves(self, inputs: list[Input]) -> list[Tensor]:
        """Tensors of these kinds and shapes; values and weights require a gradient."""
        kinds = dict(values=self.values, weight=self.weight, uint8=self.pixels, factor=self.factors)
        kinds["fp32"] = functools.partial(self.values, dtype=torch.float32)
        drawn = [(kind, kinds[kind](*shape)) for kind, shape in inputs]
        return [t.requires_grad_(kind in ("values", "fp32", "weight")) for kind, t in drawn]
