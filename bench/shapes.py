"""The shapes of the models, and which implementations run at which of them.

A CPU has one small shape, a toy's, and its name says so; where it rehearses a GPU's plan, under the names of all.
"""

from dataclasses import dataclass, replace

import clock
import pytest

from vitfast.model.presets import preset
from vitfast.tools.cost import work
from vitfast.tools.verify.draw import Sizes

WHERE = "" if clock.GPU else "rehearsed " if clock.REHEARSED else "cpu small "


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
        """patch, tokens, width, heads, head, hidden and rows; when read, as a test may shrink the presets."""
        return getattr(self.sizes, name)


TOY = Shape("Nano/8", 16, 2)


def planned(*shapes: Shape) -> dict[str, Shape]:
    """A GPU's shapes as they run here, by name: they, toys that have their names, or on a CPU the toy."""
    if not clock.GPU:
        toys = [replace(TOY, label=f"{s.model} {s.image} B{s.batch}") for s in shapes]
        shapes = [TOY] if clock.SMALL else toys
    return {s.name: s for s in shapes}


def patch_embed_work(s: Shape, size: int, pixel_size: int) -> work.Work:
    """With bias, class token and position embeddings."""
    added = (s.tokens + 2) * s.width
    return work.patch_embed(s.rows - s.batch, 3 * s.patch**2, s.rows, s.width, added, size, pixel_size)


def model_work(s: Shape, size: int, classes: int = 1000) -> work.Work:
    """The whole ViT: patch embedding, every layer, and the head on the class token."""
    attention_block = work.attention_block(s.rows, s.tokens, s.width, size)
    layers = (attention_block + work.mlp_block(s.rows, s.width, s.hidden, size)) * s.depth
    return patch_embed_work(s, size, size) + layers + work.linear(s.batch, classes, s.width, size)


FOCUS = Shape("B/16", 224, 256)  # where everything runs
MAIN = (FOCUS, Shape("S/16", 224, 512), Shape("B/16", 384, 64), Shape("L/16", 224, 128), Shape("H/14", 224, 64))
MORE = (("B/16", 224, 1), ("B/16", 224, 32), ("Ti/16", 224, 512), ("L/16", 512, 16), ("H/14", 518, 8))
ON_GPU = (*MAIN, *(Shape(*sizes) for sizes in MORE))
SHAPES = planned(*ON_GPU)


def _runs_at(impl: str, name: str, direction: str, compile_at: tuple[Shape, ...]) -> bool:
    """Whether it is measured there: compiling takes seconds, max-autotune's search up to minutes."""
    focus, main = name == FOCUS.name, any(name == s.name for s in MAIN)
    if clock.SMALL:
        return impl in ("vitfast", "eager", "sdpa math")
    if impl.startswith("max-autotune"):
        return focus
    if name.endswith(" B1"):
        return direction == "forward" and (not impl.startswith("compile") or compile_at != (FOCUS,))
    if impl.startswith("compile"):
        return focus or (direction == "both" and any(name == s.name for s in compile_at))
    return main or direction != "backward"


def grid(impls: tuple[str, ...], compile_at: tuple[Shape, ...], forward_only: tuple[str, ...] = ()) -> list:
    """(shape, direction, impl) of an operation's cases; a CPU that rehearses nothing compiles nothing."""
    wanted = [
        (name, direction, impl)
        for name in SHAPES
        for direction in ("forward", "backward", "both")
        for impl in impls
        if _runs_at(impl, name, direction, compile_at) and (direction == "forward" or impl not in forward_only)
    ]
    return [pytest.param(*case, id="-".join(case)) for case in wanted]
