"""The shapes of the models, small ones on a CPU."""

from dataclasses import dataclass

from harness import GPU, WHERE


@dataclass(frozen=True)
class Shape:
    """A model at a resolution and batch: B images of N tokens, width D, H heads, patches of P pixels."""

    name: str
    batch: int
    tokens: int
    width: int
    heads: int
    image: int
    patch: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def head(self) -> int:
        return self.width // self.heads


_GPU = (
    Shape("S/16 224 B512", 512, 197, 384, 6, 224, 16),
    Shape("B/16 224 B256", 256, 197, 768, 12, 224, 16),
    Shape("B/16 384 B64", 64, 577, 768, 12, 384, 16),
    Shape("L/16 224 B128", 128, 197, 1024, 16, 224, 16),
    Shape("H/14 224 B64", 64, 257, 1280, 16, 224, 14),
)
SHAPES = {s.name: s for s in (_GPU if GPU else (Shape(f"{WHERE}Ti/16 64 B2", 2, 17, 192, 3, 64, 16),))}
DIRECTIONS = ("forward", "both") if GPU else ("both",)
