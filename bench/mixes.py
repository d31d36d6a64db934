"""Batches of images of many sizes, as data: NaViT's resolutions, DINO's crops, documents.

The sizes are drawn once, from a fixed seed, so that every run has the same images. A CPU has small mixes of the same
kind and two layers, and their names say so.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import clock

from vitfast.model.presets import preset
from vitfast.tools.cost import work

PATCH = 16
PREFIX = 1  # the class token
TOKENS = 2**15  # of a batch, at most: padded to the longest image it still fits into 80 GB


@dataclass(frozen=True)
class Mix:
    """A batch of images: (height, width) of each in pixels; patches of PATCH, a class token each.

    layers: of the model, where it is not to have all of its preset's.
    """

    name: str
    model: str
    images: tuple[tuple[int, int], ...]
    layers: int | None = None

    shape = property(lambda self: f"{self.model} {self.name}")
    tokens = property(lambda self: sum(self.lengths))
    longest = property(lambda self: max(self.lengths))
    squares = property(lambda self: sum(n * n for n in self.lengths))  # pairs of a query and a key

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each image."""
        return tuple(PREFIX + (height // PATCH) * (width // PATCH) for height, width in self.images)

    @property
    def sizes(self) -> dict[str, int]:
        """depth, width, heads, head and hidden of the model."""
        found = preset(self.model)
        width, heads, depth = found["embed_dim"], found["num_heads"], self.layers or found["depth"]
        return dict(depth=depth, width=width, heads=heads, head=width // heads, hidden=4 * width)

    @cached_property
    def groups(self) -> dict[tuple[int, int], list[int]]:
        """(height, width) -> the images of that size."""
        found = {}
        for i, size in enumerate(self.images):
            found.setdefault(size, []).append(i)
        return found

    @property
    def uniform(self) -> list[tuple[int, int]]:
        """(images, tokens of each) of the groups."""
        return [(len(images), self.lengths[images[0]]) for images in self.groups.values()]

    def attention_work(self, size: int) -> work.Work:
        """Of one layer; size: bytes of a number."""
        return work.attention(self.tokens, self.squares / self.tokens, self.sizes["width"], size)

    def linear_work(self, size: int, classes: int) -> work.Work:
        """Of all but attention: patch embedding, linear layers, norms, and the head on the class token."""
        s, m = self.sizes, self.tokens
        width, patches = s["width"], m - PREFIX * len(self.images)
        layer = work.layer_norm(m, width, size, True) + work.linear(m, 3 * width, width, size)
        layer += work.linear(m, width, width, size, m * width) + work.mlp_block(m, width, s["hidden"], size)
        stem = work.patch_embed(patches, 3 * PATCH**2, m, width, (patches + 2) * width, size, size)
        return stem + layer * s["depth"] + work.linear(len(self.images), classes, width, size)

    def model_work(self, size: int, classes: int = 1000) -> work.Work:
        return self.linear_work(size, classes) + self.attention_work(size) * self.sizes["depth"]


def draw(least: int, most: int, aspect: float, seed: int) -> Iterator[tuple[int, int]]:
    """Sizes in pixels, multiples of PATCH, without end.

    The side of a square of the same area is uniform from `least` to `most`, height to width log-uniform up to `aspect`
    either way; no side is shorter than `least` or longer than `most`.
    """
    numbers = random.Random(seed)
    clip = lambda side: min(max(PATCH * round(side / PATCH), least), most)  # noqa: E731
    while True:
        side = least + (most - least) * numbers.random()
        root = math.exp((numbers.random() - 0.5) * math.log(aspect))
        yield clip(side * root), clip(side / root)


def filled(least: int, most: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """As many drawn sizes as fit into so many tokens."""
    found = []
    for height, width in draw(least, most, aspect=2.0, seed=0):
        tokens -= PREFIX + (height // PATCH) * (width // PATCH)
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
ON_CPU = (
    Mix("cpu small NaViT 32-96 px", "Ti/16", filled(32, 96, 96), 2),
    Mix("cpu small DINO 2x96 + 8x48 px", "Ti/16", crops(1, 96, 48), 2),
    Mix("cpu small documents 64-192 px", "Ti/16", filled(64, 192, 192), 2),
)
if clock.REHEARSED:
    ON_CPU = tuple(replace(cpu, name=f"rehearsed {gpu.name}") for gpu, cpu in zip(ON_GPU, ON_CPU))
MIXES = {mix.name: mix for mix in (ON_GPU if clock.GPU else ON_CPU)}
