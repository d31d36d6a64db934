"""Every configuration that the functions beside the kernels give, for a few shape classes of each branch."""

from collections.abc import Iterator
from itertools import product

from vitfast.kernels import tiles

HEADS = [f"d{size}{padded}" for size, padded in product((16, 32, 48, 64, 80, 96, 128), "nm")]
OPTIONS = [rope + mask for rope, mask in product(("", "r", "f"), ("", "b", "k", "bk"))]
ATTENTION = [a + b + c for a, b, c in product(HEADS, ("64", "128", "256", "320", "long"), OPTIONS)]
ATTENTION += [f"{head}{rope}p" for head, rope in product(HEADS, ("", "r", "f"))]
ATTENTION += [f"{head}{tokens}s" for head, tokens in product(HEADS, ("64", "128", "256", "320", "long"))]
PRODUCTS = [f"{k}x{n}{rest}" for k, n, rest in product((60, 768, 1024), (384, 3072), ("", "f", "a", "s"))]
FEW = [f"{size}r{rows}" for size, rows in product((192, 512, 768, 1024, 1280, 1408), (16, 256, 1024))]
FEW += [f"{shape}g" for shape in FEW]
SPLIT = [f"{k}x{n}r{rows}" for k, n, rows in product((60, 768, 3072), (384, 768), (256, 1024))]
ROWS = [f"{chunks}x{block}" for chunks, block in product((1, 3, 4, 5), (16, 64, 128, 256, 512, 1024, 2048))]
PATCHES = ["-".join(words) for words in product(("u8", "f16", "f32"), ("even", "odd"), ("large", "small", "few"))]


def shapes_of(op: str) -> list[str]:
    """Shape classes that reach every branch of an operation's function."""
    kinds = {"attention": ATTENTION, "rope": ATTENTION, "layer_norm": ROWS, "patch_embed": PATCHES}
    kinds |= {"norm_linear": FEW, "split_linear": SPLIT}
    return next((shapes for word, shapes in kinds.items() if op.startswith(word)), PRODUCTS)


def known_configs() -> Iterator[tuple[str, int, str, str, list[tiles.KernelConfig]]]:
    """Yields (operation, generation, bits, shape class, its configurations, the best first)."""
    for op, function in tiles.operations().items():
        for sm, bits, shape in product(tiles.GENERATIONS, ("16", "32"), shapes_of(op)):
            yield op, sm, bits, shape, function(shape, bits, sm)


def providers() -> set[tuple[str, str]]:
    """(operation, provider) of all."""
    every = {(op, config.provider) for op, *_, configs in known_configs() for config in configs}
    return every - {("norm_linear_fwd", "none")}  # which is no kernel
