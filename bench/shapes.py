"""The shapes of the models, and which implementations run at which of them.

A CPU has one small shape, and its name says so.
"""

from dataclasses import dataclass

import clock
import pytest

from vitfast.cost import work
from vitfast.presets import preset
from vitfast.verify.draw import Sizes

WHERE = "" if clock.GPU else "cpu small "


def _size(name: str) -> property:
    """Looked up when it is read: a test may shrink the presets."""
    return property(lambda shape: getattr(Sizes.of_preset(shape.model, shape.batch, shape.image), name))


@dataclass(frozen=True)
class Shape:
    """A preset at a resolution and batch, with the sizes of vitfast.verify.draw.Sizes and a name."""

    model: str
    image: int
    batch: int

    patch, tokens, width, heads, head, hidden, rows = map(
        _size, ("patch", "tokens", "width", "heads", "head", "hidden", "rows")
    )
    depth = property(lambda self: preset(self.model)["depth"])
    name = property(lambda self: f"{WHERE}{self.model} {self.image} B{self.batch}")


def patch_embed_work(s: Shape, size: int, pixel_size: int) -> work.Work:
    """With bias, class token and position embeddings."""
    added = (s.tokens + 2) * s.width
    return work.patch_embed(s.rows - s.batch, 3 * s.patch**2, s.rows, s.width, added, size, pixel_size)


def model_work(s: Shape, size: int, classes: int = 1000) -> work.Work:
    """The whole ViT: patch embedding, every layer, and the head on the class token."""
    attention_block = work.attention_block(s.rows, s.tokens, s.width, size)
    layers = (attention_block + work.mlp_block(s.rows, s.width, s.hidden, size)) * s.depth
    return patch_embed_work(s, size, size) + layers + work.linear(s.batch, classes, s.width, size)


CPU_SHAPE = Shape("Ti/16", 64, 2)
FOCUS = Shape("B/16", 224, 256)  # where everything runs
MAIN = (FOCUS, Shape("S/16", 224, 512), Shape("B/16", 384, 64), Shape("L/16", 224, 128), Shape("H/14", 224, 64))
MORE = (("B/16", 224, 1), ("B/16", 224, 32), ("Ti/16", 224, 512), ("L/16", 512, 16), ("H/14", 518, 8))
FEW = (*MAIN, *(Shape(*sizes) for sizes in MORE))
SIZES = {"Ti/16": (224, 384), "S/16": (224, 384), "B/16": (224, 384, 512), "L/16": (224, 384, 512), "H/14": (224, 518)}
BATCHES = (1, 8, 64, 256, 512)
ALL = tuple(Shape(model, image, batch) for model, images in SIZES.items() for image in images for batch in BATCHES)
MOST_ROWS = 128 * 1025  # of D numbers; more do not come up in training on one GPU

SHAPES: dict[str, Shape] = {}


def choose(which: str) -> None:
    """Fills SHAPES, before the bench files are read: "few", or "all" of them that fit."""
    more = () if which == "few" else (s for s in ALL if s.rows <= MOST_ROWS)
    SHAPES.clear()
    SHAPES.update({s.name: s for s in ((*FEW, *more) if clock.GPU else (CPU_SHAPE,))})


def _runs_at(impl: str, shape: Shape, direction: str, compile_at: tuple[Shape, ...]) -> bool:
    """Whether it is measured there: compiling takes seconds, max-autotune's search up to minutes."""
    if not clock.GPU:
        return direction == "both" or not impl.startswith("compile")
    if impl.startswith("max-autotune"):
        return shape == FOCUS
    if shape.batch == 1:
        return direction == "forward" and (not impl.startswith("compile") or compile_at != (FOCUS,))
    if impl.startswith("compile"):
        return shape == FOCUS or (shape in compile_at and direction == "both")
    return shape in MAIN or direction != "backward"


def grid(
    *impls: str,
    cpu: tuple[str, ...] = ("vitfast", "eager"),
    compile_at: tuple[Shape, ...] = (FOCUS,),
    forward_only: tuple[str, ...] = (),
) -> list:
    """(shape, direction, impl) of a bench file's cases; cpu: the implementations that run on a CPU."""
    wanted = [
        (name, direction, impl)
        for name, shape in SHAPES.items()
        for direction in ("forward", "backward", "both")
        for impl in impls
        if _runs_at(impl, shape, direction, compile_at)
        and (clock.GPU or impl in cpu)
        and (direction == "forward" or impl not in forward_only)
    ]
    return [pytest.param(*case, id="-".join(case)) for case in wanted]
