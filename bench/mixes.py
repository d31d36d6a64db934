"""Batches of images of many sizes, as data: NaViT's resolutions, DINO's crops, documents.

The sizes are drawn once, from a fixed seed, so that every run has the same images. A CPU has a small mix of the first
kind and two layers, whose name says so; where it rehearses a GPU's plan, under the names of all.
"""

import math
import random
from dataclasses import dataclass, replace
from functools import cached_property

import clock
from shapes import WHERE

from vitfast.model.presets import preset
from vitfast.tools.verify.draw import Sizes

PATCH = 16
TOKENS = 2**15  # of a batch, at most: padded to the longest image it still fits into 80 GB


@dataclass(frozen=True)
class Mix:
    """A batch of images: (height, width) of each in pixels; patches of PATCH, a class token each.

    layers: of the model, where it is not to have all of its preset's. It has what shapes.model_work counts with, by the
    names of a Shape; `tokens` is how many keys a query has on average.
    """

    name: str
    model: str
    images: tuple[tuple[int, int], ...]
    layers: int | None = None

    shape = property(lambda self: f"{self.model} {self.name}")
    batch = property(lambda self: len(self.images))
    rows = property(lambda self: sum(self.lengths))
    tokens = property(lambda self: sum(n * n for n in self.lengths) / self.rows)
    longest = property(lambda self: max(self.lengths))
    depth = property(lambda self: self.layers or preset(self.model)["depth"])

    def __getattr__(self, name: str):
        """patch, width, heads, head and hidden."""
        return getattr(Sizes.of_preset(self.model, self.batch), name)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each image."""
        return tuple(1 + (height // PATCH) * (width // PATCH) for height, width in self.images)

    @property
    def padded_tokens(self) -> float:
        """The share of the tokens that are padding where every image has as many as the longest."""
        return 1 - self.rows / (self.batch * self.longest)


def filled(least: int, most: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """As many random (height, width), multiples of PATCH, as fit into so many tokens.

    The side of a square of the same area is uniform from `least` to `most`, height to width log-uniform up to 2 either
    way; no side is shorter than `least` or longer than `most`.
    """
    numbers, found = random.Random(0), []
    clip = lambda side: min(max(PATCH * round(side / PATCH), least), most)  # noqa: E731
    while True:
        side = least + (most - least) * numbers.random()
        root = math.exp((numbers.random() - 0.5) * math.log(2))
        height, width = clip(side * root), clip(side / root)
        tokens -= 1 + (height // PATCH) * (width // PATCH)
        if tokens < 0:
            return tuple(found)
        found.append((height, width))


def crops(images: int, large: int, small: int) -> tuple[tuple[int, int], ...]:
    """DINO's crops of each image (Caron et al., 2021): two large ones and eight small ones."""
    return (((large, large),) * 2 + ((small, small),) * 8) * images


ON_GPU = (
    # NaViT (Dehghani et al., 2023): resolutions drawn anew for every image, aspects kept
    Mix("NaViT 64-256 px", "B/16", filled(64, 256, TOKENS)),
    Mix("DINO 2x224 + 8x96 px", "B/16", crops(64, 224, 96)),
    Mix("documents 224-1024 px", "B/16", filled(224, 1024, TOKENS)),
)
SMALL = Mix(f"{WHERE}NaViT 32-96 px", "Ti/16", filled(32, 96, 96), layers=2)
REHEARSED = [replace(SMALL, name=f"{WHERE}{mix.name}") for mix in ON_GPU]
MIXES = {mix.name: mix for mix in (ON_GPU if clock.GPU else [SMALL] if clock.SMALL else REHEARSED)}
