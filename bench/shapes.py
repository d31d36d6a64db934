"""The shapes of the models, batches of images of many sizes, and what runs at which of them.

A CPU has one small shape, a toy's, and one small mix, whose names say so; where it rehearses a GPU's plan, these run
under the names of all.
"""

import itertools
import math
import random
from dataclasses import dataclass, replace
from functools import cached_property

import machine

from vitfast.model.presets import preset
from vitfast.tools.cost import work
from vitfast.tools.verify.draw import Sizes

WHERE = "" if machine.GPU else "rehearsed " if machine.REHEARSED else "cpu small "


@dataclass(frozen=True)
class Shape:
    """A preset at a resolution and batch, with its Sizes and a name."""

    model: str
    image: int
    batch: int
    label: str = ""

    sizes = property(lambda self: Sizes.of_preset(self.model, self.batch, self.image))
    depth = property(lambda self: preset(self.model)["depth"])
    name = property(lambda self: f"{WHERE}{self.label or f'{self.model} {self.image} B{self.batch}'}")

    def __getattr__(self, name: str):
        """patch, tokens, width, heads, head, hidden, rows: read at each use, as a test may shrink presets."""
        return getattr(self.sizes, name)


TOY = "Nano/8 16 B2"
FOCUS = "B/16 224 B256"  # the shape at which everything runs
MAIN = (FOCUS, "S/16 224 B512", "B/16 384 B64", "L/16 224 B128", "H/14 224 B64")
MORE = ("B/16 224 B32", "Ti/16 224 B512", "L/16 512 B16", "H/14 518 B8")


def here(*names: str) -> list[str]:
    """A GPU's shapes as they are named here; on a CPU that rehearses nothing the toy alone."""
    return [f"{WHERE}{name}" for name in ([TOY] if machine.SMALL else names)]


def shape_of(name: str) -> Shape:
    """The shape of a name such as "B/16 224 B256"; on a CPU a toy under that name."""
    name = name.removeprefix(WHERE)
    model, image, batch = (name if machine.GPU else TOY).split(" ")
    return Shape(model, int(image), int(batch[1:]), name if machine.REHEARSED else "")


SHAPES = here(*MAIN, *MORE)


def _runs_at(impl: str, name: str, direction: str) -> bool:
    """Whether `impl` runs at a shape: compiling takes seconds, max-autotune's search up to minutes."""
    if machine.SMALL:
        return impl in ("vitfast", "eager", "sdpa math")
    if impl.startswith(("compile", "max-autotune")):
        return name.removeprefix(WHERE) == FOCUS
    return direction != "backward" or name.removeprefix(WHERE) in MAIN


def grid(impls: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(shape, direction, impl) of an operation's cases; a CPU that rehearses nothing compiles nothing."""
    every = itertools.product(SHAPES, ("forward", "backward", "both"), impls)
    return [(name, direction, impl) for name, direction, impl in every if _runs_at(impl, name, direction)]


# ---- images of many sizes: drawn once, from a fixed seed, so that every run has the same

PATCH = 16
TOKENS = 2**15  # at most, in a batch: padded to the longest image, it still fits into 80 GB


@dataclass(frozen=True)
class Mix:
    """A batch of images: (height, width) of each in pixels; patches of PATCH, a class token each.

    layers: how many the model has, where it is not to have all of its preset's. A Mix has what model_work counts with,
    by the names of a Shape; `tokens` is how many keys a query has on average.
    """

    label: str
    model: str
    images: tuple[tuple[int, int], ...]
    layers: int | None = None

    name = property(lambda self: f"{self.model} {self.label}")
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


TOY_MIX = Mix("NaViT 32-96 px", "Ti/16", filled(32, 96, 96), layers=2)
MIXES_ON_GPU = (
    # NaViT (Dehghani et al., 2023): resolutions drawn anew for every image, aspects kept
    Mix("NaViT 64-256 px", "B/16", filled(64, 256, TOKENS)),
    # DINO's crops of 64 images (Caron et al., 2021): two large ones and eight small ones of each
    Mix("DINO 2x224 + 8x96 px", "B/16", (((224, 224),) * 2 + ((96, 96),) * 8) * 64),
    Mix("documents 224-1024 px", "B/16", filled(224, 1024, TOKENS)),
)
MIXES = {f"{WHERE}{mix.label}": mix for mix in ([TOY_MIX] if machine.SMALL else MIXES_ON_GPU)}
if not machine.GPU:
    MIXES = {label: replace(TOY_MIX, label=label) for label in MIXES}


# ---- their work


def patch_embed_work(s: Shape, size: int, pixel_size: int) -> work.Work:
    """The work of the patch embedding with bias, class token and position embeddings."""
    added = (s.tokens + 2) * s.width
    return work.patch_embed(s.rows - s.batch, 3 * s.patch**2, s.rows, s.width, added, size, pixel_size)


def model_work(s: Shape | Mix, size: int, classes: int = 1000) -> work.Work:
    """The whole ViT: patch embedding, every layer, and the head on the class token."""
    attention_block = work.attention_block(s.rows, s.tokens, s.width, size)
    layers = (attention_block + work.mlp_block(s.rows, s.width, s.hidden, size)) * s.depth
    return patch_embed_work(s, size, size) + layers + work.linear(s.batch, classes, s.width, size)
