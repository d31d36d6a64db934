"""Images of many sizes: their sizes, steps filled to a budget of tokens, dropped patches, batches.

The method is NaViT's (Dehghani et al., 2023): a size is drawn for every image, which keeps its aspect; a step takes as
many images as fit into a budget of tokens; a share of an image's patches is dropped. Everything follows from (seed,
epoch, index) and the position in the stream of images, which a checkpoint keeps, not from ranks, workers or restarts.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose, InterpolationMode
from torchvision.transforms.functional import resized_crop

from ..errors import InputError
from ..ops.packed import PackedImages, draw_kept, pack
from ..run.config import Config
from ..run.distributed import Ranks
from .samples import ONE, epoch_order

NATIVE_AT_ONCE = 64  # images of an evaluation at their own sizes that are read together
WINDOW = 1024  # at least so many images of the order are searched for some that fit into the rest of a step


def fit_grid(height: int, width: int, patch: tuple[int, int], most: int) -> tuple[int, int]:
    """Patches down and across of a grid in an image's shape, at most `most` in all.

    height, width: the image's, in pixels. A rectangle of `most` patches in the image's shape has sides that are not
    whole; each is rounded down or up, so that the grid has the largest overlap over union with the rectangle.
    """
    ratio = (height / patch[0]) / (width / patch[1])
    tall, wide = math.sqrt(most * ratio), math.sqrt(most / ratio)
    whole = [{min(max(1, end(side)), most) for end in (math.floor, math.ceil)} for side in (tall, wide)]
    fitting = [(down, across) for down in whole[0] for across in whole[1] if down * across <= most]

    def overlap(grid: tuple[int, int]) -> float:
        both = min(grid[0], tall) * min(grid[1], wide)
        return both / (most + grid[0] * grid[1] - both)

    return max(sorted(fitting), key=overlap)


@dataclass(frozen=True)
class Packing:
    """How the images of a run are sized and packed; made from its settings and its model."""

    low: int  # low and high: the sides, in pixels, of the least and the largest square whose area an image gets
    high: int
    patch: tuple[int, int]
    prefix: int  # tokens of an image besides its patches
    drop: float
    budget: int | None  # tokens of a step; None: batch_size images
    batch_size: int

    @classmethod
    def of(
        cls, config: Config, img_size: tuple[int, int], patch: tuple[int, int], prefix: int, world: int
    ) -> "Packing | None":
        """The Packing of a run on `world` ranks, None for one size. Raises InputError for wrong settings."""
        if config.sizes == "native":
            raise InputError("sizes=native is for eval and predict; a training run draws sizes from LOW:HIGH")
        if not config.sizes and not config.drop_tokens:
            if config.tokens_per_step:
                raise InputError("tokens_per_step is for images of many sizes: add --set sizes=LOW:HIGH")
            return None
        which = "sizes" if config.sizes else "drop_tokens"
        for name, wanted in (("mixup", 0), ("cutmix", 0), ("decode", "host")):
            if getattr(config, name) != wanted:
                raise InputError(f"{which} packs images of many sizes, and {name} cannot: set {name}={wanted}")
        if config.objective == "masked":
            raise InputError(f"{which} packs images of many sizes, and objective=masked cannot")
        low, high = map(int, config.sizes.split(":")) if config.sizes else (round(math.sqrt(math.prod(img_size))),) * 2
        if config.tokens_per_step and config.scale_lr:
            advice = "set scale_lr=none and lr for tokens_per_step"
            raise InputError(f"scale_lr is for steps of batch_size images: {advice}")
        made = cls(low, high, patch, prefix, config.drop_tokens, config.tokens_per_step, config.batch_size)
        if low * low < patch[0] * patch[1]:
            raise InputError(f"sizes={config.sizes} begin below one patch of {patch[0]} x {patch[1]} pixels")
        parts, largest = world * config.accumulate, made.tokens(made.sides[-1])
        if made.budget is not None and made.budget < parts * largest:
            shares = "" if parts == 1 else f", one for each of {parts} ranks and micro-batches"
            room = f"has no room for images of {high} px, {largest} tokens{shares}"
            raise InputError(f"tokens_per_step={made.budget} {room}: it must be at least {parts * largest}")
        return made

    @property
    def sides(self) -> range:
        """The sizes, in pixels, of which one is drawn for each image; they are one patch side apart."""
        return range(self.low, self.high + 1, max(1, round(math.sqrt(math.prod(self.patch)))))

    def patches(self, side: int) -> int:
        """The most patches of an image of a size, before any are dropped."""
        return max(1, side * side // (self.patch[0] * self.patch[1]))

    def tokens(self, side: int) -> int:
        """The most tokens of an image of a size: known before its file is read, whatever its aspect."""
        return self.prefix + max(1, round(self.patches(side) * (1 - self.drop)))

    @property
    def images_per_step(self) -> float:
        """About how many images a step has."""
        if self.budget is None:
            return self.batch_size
        return self.budget / (sum(self.tokens(side) for side in self.sides) / len(self.sides))

    @property
    def step_bytes(self) -> int:
        """About how many bytes the images of a step take."""
        images = math.ceil(self.images_per_step)
        return 3 * math.prod(self.patch) * (self.budget or images * self.patches(self.sides[-1]))

    def transform(
        self, chain: Compose | None, image: Image.Image | np.ndarray, side: int, part: int
    ) -> tuple[Tensor, Tensor | None, int]:
        """(pixels (C, H, W), patches that stay or None for all, `part`) of an image at the drawn size `side`.

        chain: a crop, which is resized in its own aspect here, and the transforms after it; None for images that are
        `transformed` already, whose top left corner is taken. part: the micro-batch of the image.
        """
        p, q = self.patch
        if chain is None:
            down, across = fit_grid(*image.shape[1:], self.patch, self.patches(side))
            image = image[:, : down * p, : across * q]
        else:
            crop, *rest = chain.transforms
            box = crop.get_params(image, crop.scale, crop.ratio)
            down, across = fit_grid(*box[2:], self.patch, self.patches(side))
            image = Compose(rest)(resized_crop(image, *box, (down * p, across * q), InterpolationMode.BICUBIC))
        kept = draw_kept(down * across, self.drop) if self.drop else None
        return torch.as_tensor(np.asarray(image)), kept, part

    def pack(self, images: tuple[tuple[Tensor, Tensor | None, int]]) -> list[PackedImages]:
        """Packs the images of each micro-batch. images: the results of `transform`."""
        batches = [[] for _ in range(1 + max(part for *_, part in images))]
        for image, kept, part in images:
            batches[part].append((image, kept))
        return [pack([image for image, _ in own], self.patch, [kept for _, kept in own]) for own in batches]


@dataclass
class Progress:
    """The position in the stream of images, as a checkpoint keeps it."""

    position: int = 0  # in the stream, which is all epochs end to end
    waiting: list[int] = field(default_factory=list)  # earlier positions whose images no step has taken
    images: int = 0  # how many images the steps have taken
    sizes: dict[int, int] = field(default_factory=dict)  # how many images were drawn each size, in pixels

    @classmethod
    def of(cls, record: dict) -> "Progress":
        """One from its `vars`, read from JSON; damage raises KeyError, TypeError, ValueError, AttributeError."""
        sizes = {int(side): int(count) for side, count in record["sizes"].items()}
        waiting = [int(position) for position in record["waiting"]]
        return cls(int(record["position"]), waiting, int(record["images"]), sizes)


Key = tuple[int, int, int, int]  # epoch, index, size in pixels, micro-batch


class StepKeys:
    """Iterates over `steps` steps from `progress` on: a list of Key, this rank's part, for each step.

    `progress` moves on with every step. after: the Progress after each step that was iterated over.
    """

    def __init__(
        self, length: int, packing: Packing, config: Config, steps: int, progress: Progress, ranks: Ranks = ONE
    ):
        self.length, self.packing, self.steps, self.progress = length, packing, steps, progress
        self.seed, self.accumulate, self.ranks = config.seed, config.accumulate, ranks
        self.after: deque[Progress] = deque()

    def _step(self) -> list[tuple[int, int, int]]:
        """(epoch, index, size) of the next step's images: those in a window of the order that fit in it."""
        now, packing = self.progress, self.packing
        window, left = packing.batch_size, math.inf
        if packing.budget is not None:
            window = max(WINDOW, 2 * math.ceil(packing.images_per_step))  # else a large budget would not be used up
            left = packing.budget
        end, taken = now.position + window - len(now.waiting), {}
        waiting = [*now.waiting, *range(now.position, end)]
        for position in waiting:
            epoch, offset = divmod(position, self.length)
            order, sides = epoch_order(self.length, self.seed, epoch, packing.sides)
            if packing.tokens(sides[offset]) <= left:
                taken[position] = epoch, order[offset], sides[offset]
                left -= packing.tokens(sides[offset])
            if left < packing.tokens(packing.low):
                break
        sizes = Counter(now.sizes) + Counter(side for *_, side in taken.values())
        rest = [position for position in waiting if position not in taken]
        self.progress = Progress(end, rest, now.images + len(taken), dict(sorted(sizes.items())))
        return list(taken.values())

    def __iter__(self) -> Iterator[list[Key]]:
        for _ in range(self.steps):
            keys = self._step()
            shares = balanced([self.packing.tokens(side) for *_, side in keys], self.ranks.world * self.accumulate)
            mine = shares[self.ranks.rank * self.accumulate : (self.ranks.rank + 1) * self.accumulate]
            self.after.append(self.progress)
            yield [(*keys[i], part) for part, share in enumerate(mine) for i in share]


def balanced(sizes: list[int], parts: int) -> list[list[int]]:
    """Divides indices into shares of about the same total size: largest first, each to the lightest."""
    shares, sums = [[] for _ in range(parts)], [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = sums.index(min(sums))
        shares[lightest].append(i)
        sums[lightest] += sizes[i]
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class Native:
    """Images at their own sizes, to the nearest patch: how an evaluation transforms and packs them.

    most: the most patches of an image, and of the images that are computed together; a larger image is made smaller.
    """

    patch: tuple[int, int]
    most: int
    interpolation: str = "bicubic"

    @classmethod
    def of(cls, config: Config, img_size: tuple[int, int], patch: tuple[int, int]) -> "Native | None":
        """The Native of an evaluation's settings, None without `sizes`. Raises InputError for LOW:HIGH."""
        if not config.sizes:
            if config.tokens_per_step:
                raise InputError("tokens_per_step is for images of many sizes: add --sizes native")
            return None
        if config.sizes != "native":
            raise InputError(f"eval and predict take sizes=native, got sizes={config.sizes}")
        own = math.prod(img_size) // math.prod(patch)
        most = config.tokens_per_step or config.eval_batch_size * own
        return cls(patch, most, config.interpolation or "bicubic")

    @property
    def batch_bytes(self) -> int:
        """The bytes of NATIVE_AT_ONCE images that are all as large as one may be."""
        return 3 * math.prod(self.patch) * self.most * NATIVE_AT_ONCE

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) to which an image is resized: whole patches, at most `most` of them."""
        down, across = max(1, round(height / self.patch[0])), max(1, round(width / self.patch[1]))
        if down * across > self.most:
            down, across = fit_grid(height, width, self.patch, self.most)
        return down * self.patch[0], across * self.patch[1]

    def transform(self, image: Image.Image) -> np.ndarray:
        """The whole image as uint8 (C, H, W), resized to `size_of` its own size."""
        size = self.size_of(image.height, image.width)[::-1]
        image = image if image.size == size else image.resize(size, Image.Resampling[self.interpolation.upper()])
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    def pack(self, images: list) -> list[PackedImages]:
        """Packs the images in their order, as many together as `most` patches allow."""
        groups, held = [[]], 0
        for image in map(torch.as_tensor, images):
            patches = image.shape[1] // self.patch[0] * (image.shape[2] // self.patch[1])
            if groups[-1] and held + patches > self.most:
                groups, held = [*groups, []], 0
            groups[-1].append(image)
            held += patches
        return [pack(group, self.patch) for group in groups if group]
