"""Every configuration that the functions beside the kernels give, for a few shape classes of each branch."""

from collections.abc import Iterator
from itertools import product

from vitfast.kernels import tiles

HEADS = [f"d{size}{padded}" for size, padded in product((16, 32, 48, 64, 80, 96, 128), "nm")]
OPTIONS = [rope + mask for rope, mask in product(("", "r", "f"), ("", "b", "k", "bk"))]
ATTENTION = [a + b + c for a, b, c in product(HEADS, ("64", "128", "256", "320", "long"), OPTIONS)]
ATTENTION += [f"{head}{rope}p" for head, rope in product(HEADS, ("", "r", "f"))]
PRODUCTS = [f"{k}x{n}{rest}" for k, n, rest in product((60, 768, 1024), (384, 3072), ("", "f", "a", "s"))]
ROWS = [f"{chunks}x{block}" for chunks, block in product((1, 3, 4, 5), (16, 64, 128, 256, 512, 1024, 2048))]
PATCHES = ["-".join(words) for words in product(("u8", "f16", "f32"), ("even", "odd"), ("large", "small"))]


def shapes_of(op: str) -> list[str]:
    """Shape classes that reach every branch of an operation's function."""
    kinds = {"attention": ATTENTION, "rope": ATTENTION, "layer_norm": ROWS, "patch_embed": PATCHES}
    return next((shapes for word, shapes in kinds.items() if op.startswith(word)), PRODUCTS)


def known_configs() -> Iterator[tuple[str, int, str, str, list[tiles.KernelConfig]]]:
    """Yields (operation, generation, bits, shape class, its configurations, the best first)."""
    for op, function in tiles.operations().items():
        for sm, bits, shape in product(tiles.GENERATIONS, ("16", "32"), shapes_of(op)):
            yield op, sm, bits, shape, function(shape, bits, sm)


def providers() -> set[tuple[str, str]]:
    """(operation, provider) of all."""
    return {(op, config.provider) for op, *_, configs in known_configs() for config in configs}
