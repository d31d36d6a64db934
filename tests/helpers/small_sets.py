"""Three small sets of images as class folders, made without a network: one of photographs, two that are drawn."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64  # pixels of a side
SHAPES = {
    "arrow": [(1, 0), (0, 0.9), (0, 0.35), (-1, 0.35), (-1, -0.35), (0, -0.35), (0, -0.9)],
    "cross": [
        (math.cos(k * math.pi / 4) * (1, 0.25)[k % 2], math.sin(k * math.pi / 4) * (1, 0.25)[k % 2]) for k in range(8)
    ],
    "ell": [(-0.8, -0.9), (-0.2, -0.9), (-0.2, 0.3), (0.8, 0.3), (0.8, 0.9), (-0.8, 0.9)],
    "hexagon": [(math.cos(k * math.pi / 3), math.sin(k * math.pi / 3)) for k in range(6)],
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "star": [
        (math.cos(k * math.pi / 5) * (1, 0.4)[k % 2], math.sin(k * math.pi / 5) * (1, 0.4)[k % 2]) for k in range(10)
    ],
    "tee": [(-0.9, -0.8), (0.9, -0.8), (0.9, -0.2), (0.3, -0.2), (0.3, 0.9), (-0.3, 0.9), (-0.3, -0.2), (-0.9, -0.2)],
    "triangle": [(math.cos(k * 2 * math.pi / 3), math.sin(k * 2 * math.pi / 3)) for k in range(3)],
}


def photos(rng: np.random.Generator, split: str) -> dict[str, Callable[[], Image.Image]]:
    """Crops of scikit-learn's two photographs, upright or upside down; the splits have halves of their own."""
    from sklearn.datasets import load_sample_images

    def crop(pixels: np.ndarray, turned: bool) -> Image.Image:
        half = np.array_split(pixels, 2, axis=1)[split == "val"]
        top, left = (int(rng.integers(0, n - 2 * SIZE)) for n in half.shape[:2])
        part = half[top : top + 2 * SIZE, left : left + 2 * SIZE]
        return Image.fromarray(np.ascontiguousarray(part[::-1] if turned else part)).resize((SIZE, SIZE))

    images = dict(zip(("temple", "flower"), load_sample_images().images))
    kinds = [(name, turned) for name in images for turned in (False, True)]
    return {
        f"{name}{' upside down' if turned else ''}": lambda name=name, turned=turned: crop(images[name], turned)
        for name, turned in kinds
    }


def shapes(rng: np.random.Generator, split: str) -> dict[str, Callable[[], Image.Image]]:
    """Eight outlines, turned a little, of any colour on a darker ground with noise."""

    def draw(points: list) -> Image.Image:
        turn, scale, shift = rng.uniform(-0.4, 0.4), rng.uniform(0.25, 0.4) * SIZE, rng.uniform(0.4, 0.6, 2) * SIZE
        rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
        image = Image.new("RGB", (SIZE, SIZE), tuple(int(v) for v in rng.integers(0, 100, 3)))
        outline = [tuple(point) for point in np.array(points) @ rotation.T * scale + shift]
        ImageDraw.Draw(image).polygon(outline, fill=tuple(int(v) for v in rng.integers(130, 256, 3)))
        return _noisy(rng, np.asarray(image), 30)

    return {name: lambda points=points: draw(points) for name, points in SHAPES.items()}


def textures(rng: np.random.Generator, split: str) -> dict[str, Callable[[], Image.Image]]:
    """Gratings of four directions and two wavelengths, of any phase and contrast, with noise."""
    y, x = np.mgrid[:SIZE, :SIZE]

    def draw(direction: float, frequency: float) -> Image.Image:
        angle, frequency = direction + rng.normal(0, 0.15), frequency * math.exp(rng.normal(0, 0.1))
        wave = np.sin(
            2 * math.pi * frequency * (x * math.cos(angle) + y * math.sin(angle)) + rng.uniform(0, 2 * math.pi)
        )
        return _noisy(rng, rng.uniform(60, 190, 3) + wave[..., None] * rng.uniform(15, 45, 3), 25)

    kinds = [(direction, wave) for direction in range(4) for wave in ("short", "long")]
    return {
        f"{45 * d} degrees, {wave}": lambda d=d, f=dict(short=0.14, long=0.08)[wave]: draw(d * math.pi / 4, f)
        for d, wave in kinds
    }


SETS = {"photos": photos, "shapes": shapes, "textures": textures}


def write_set(name: str, root: Path, train: int, val: int, seed: int = 0) -> Path:
    """Writes ROOT/NAME/{train,val}/<class>/*.png, so many images a class, and returns ROOT/NAME."""
    for split, count in (("train", train), ("val", val)):
        rng = np.random.default_rng([seed, list(SETS).index(name), split == "val"])
        for label, draw in SETS[name](rng, split).items():
            folder = root / name / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                draw().save(folder / f"{number}.png")
    return root / name


def _noisy(rng: np.random.Generator, pixels: np.ndarray, deviation: float) -> Image.Image:
    return Image.fromarray((pixels + rng.normal(0, deviation, pixels.shape)).clip(0, 255).astype(np.uint8))
