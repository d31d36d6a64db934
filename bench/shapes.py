"""The shapes of the models, and which implementations run at which of them. A CPU has one small shape, and its name says so."""

from dataclasses import dataclass

import clock
import pytest

from vitfast.presets import preset

WHERE = "" if clock.GPU else "cpu small "


@dataclass(frozen=True)
class Shape:
    """A model at a resolution and batch: B images of N tokens, D wide, H heads, MLP width F, patches of P pixels."""

    model: str
    image: int
    batch: int

    @property
    def name(self) -> str:
        return f"{WHERE}{self.model} {self.image} B{self.batch}"

    @property
    def width(self) -> int:
        return preset(self.model)["embed_dim"]

    @property
    def heads(self) -> int:
        return preset(self.model)["num_heads"]

    @property
    def depth(self) -> int:
        return preset(self.model)["depth"]

    @property
    def patch(self) -> int:
        return preset(self.model)["patch_size"]

    @property
    def hidden(self) -> int:
        return 4 * self.width

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


CPU_SHAPE = Shape("Ti/16", 64, 2)
FOCUS = Shape("B/16", 224, 256)  # where everything runs
MAIN = (FOCUS, Shape("S/16", 224, 512), Shape("B/16", 384, 64), Shape("L/16", 224, 128), Shape("H/14", 224, 64))
FEW = (
    *MAIN,
    Shape("B/16", 224, 1),
    Shape("B/16", 224, 32),
    Shape("Ti/16", 224, 512),
    Shape("L/16", 512, 16),
    Shape("H/14", 518, 8),
)
SIZES = {"Ti/16": (224, 384), "S/16": (224, 384), "B/16": (224, 384, 512), "L/16": (224, 384, 512), "H/14": (224, 518)}
ROWS = 128 * 1025  # more than this many rows of D do not come up in training on one GPU
ALL = tuple(
    Shape(model, image, batch) for model, images in SIZES.items() for image in images for batch in (1, 8, 64, 256, 512)
)

SHAPES: dict[str, Shape] = {}


def choose(which: str) -> None:
    """Fills SHAPES, before the bench files are read: "few", or "all" of them that fit."""
    chosen = (CPU_SHAPE,) if not clock.GPU else FEW if which == "few" else (*FEW, *(s for s in ALL if s.rows <= ROWS))
    SHAPES.clear()
    SHAPES.update({s.name: s for s in chosen})


def _runs_at(impl: str, shape: Shape, direction: str, compile_at: tuple[Shape, ...]) -> bool:
    """Whether this implementation is measured there. Compiling takes seconds, the search of max-autotune up to minutes."""
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
    """Parameters (shape, direction, impl) of a bench file's cases. cpu: the implementations that run on a CPU."""
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
