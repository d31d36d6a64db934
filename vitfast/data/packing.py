"""Images of many sizes: their sizes, steps filled to a budget of tokens, dropped patches, batches.

As NaViT (Dehghani et al., 2023): every image is drawn a size and keeps its aspect; a step takes as many images as fit
into a budget of tokens; a share of an image's patches is dropped. Everything follows from (seed, epoch, index) and from
where the stream of images is, which a checkpoint keeps: it does not depend on ranks, workers or interruptions.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Sampler
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resized_crop

from ..errors import InputError
from ..ops.packed import PackedImages, draw_kept, pack
from ..run.config import Config
from ..run.distributed import Ranks
from .samples import ONE, Samples, mix_seed, seed_everything

NATIVE_AT_ONCE = 64  # images of an evaluation at their own sizes that are read together
WINDOW = 1024  # images of the order, at least, among which those are found that fit into what is left of a step


def fit_grid(height: int, width: int, patch: tuple[int, int], most: int) -> tuple[int, int]:
    """Patches down and across of a grid in an image's shape, at most so many together.

    height, width: of the image in pixels. Of the grids around a rectangle of so many patches in the image's shape that
    with the largest overlap over union.
    """
    ratio = (height / patch[0]) / (width / patch[1])
    tall, wide = math.sqrt(most * ratio), math.sqrt(most / ratio)
    whole = [{min(max(1, end(side)), most) for end in (math.floor, math.ceil)} for side in (tall, wide)]
    fitting = [(down, across) for down in whole[0] for across in whole[1] if down * across <= most]

    def overlap(grid: tuple[int, int]) -> float:
        both = min(grid[0], tall) * min(grid[1], wide)
        return both / (most + grid[0] * grid[1] - both)

    return max(sorted(fitting), key=overlap)


def native_grid(height: int, width: int, patch: tuple[int, int], most: int | None = None) -> tuple[int, int]:
    """Patches down and across of an image of these pixels, rounded; at most so many together."""
    grid = max(1, round(height / patch[0])), max(1, round(width / patch[1]))
    return grid if most is None or grid[0] * grid[1] <= most else fit_grid(height, width, patch, most)


@dataclass(frozen=True)
class Packing:
    """How the images of a run are sized and packed; made from its settings and its model."""

    low: int  # pixels of the sides of the squares whose area images are given
    high: int
    patch: tuple[int, int]
    prefix: int  # tokens of an image besides its patches
    drop: float
    budget: int | None  # tokens of a step; None: batch_size images
    batch_size: int

    @classmethod
    def of(cls, config: Config, img_size: tuple[int, int], patch: tuple[int, int], prefix: int) -> "Packing | None":
        """None for a run of one size. Raises InputError for settings that do not go together."""
        if config.sizes == "native":
            raise InputError("sizes=native is for eval and predict; a training run draws sizes from LOW:HIGH")
        if not config.sizes and not config.drop_tokens:
            if config.tokens_per_step:
                raise InputError("tokens_per_step is for images of many sizes: add --set sizes=LOW:HIGH")
            return None
        which = "sizes" if config.sizes else "drop_tokens"
        for name, wanted in (("mixup", 0), ("cutmix", 0), ("decode", "host")):
            if getattr(config, name) != wanted:
                raise InputError(f"{which} packs images of many sizes, which {name} cannot: set {name}={wanted}")
        if config.objective == "masked":
            raise InputError(f"{which} packs images of many sizes, which objective=masked cannot")
        low, high = map(int, config.sizes.split(":")) if config.sizes else (round(math.sqrt(math.prod(img_size))),) * 2
        if config.tokens_per_step and config.scale_lr:
            advice = "set scale_lr=none and lr for tokens_per_step"
            raise InputError(f"scale_lr is for steps of batch_size images: {advice}")
        made = cls(low, high, patch, prefix, config.drop_tokens, config.tokens_per_step, config.batch_size)
        if low * low < patch[0] * patch[1]:
            raise InputError(f"sizes={config.sizes} begin below one patch of {patch[0]} x {patch[1]} pixels")
        return made

    @property
    def sides(self) -> range:
        """The sizes that are drawn from, in pixels: a patch's side apart."""
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
        """About how many bytes the images of a step are."""
        images = math.ceil(self.images_per_step)
        return 3 * math.prod(self.patch) * (self.budget or images * self.patches(self.sides[-1]))

    def pack(self, images: tuple[Tensor], kept: tuple[Tensor | None], parts: tuple[int]) -> list[PackedImages]:
        """The images of each micro-batch, packed.

        kept: the patches of each image that stay; parts: the micro-batch of each.
        """
        batches = []
        for part in range(max(parts) + 1):
            own = [i for i, of in enumerate(parts) if of == part]
            batches.append(pack([images[i] for i in own], self.patch, [kept[i] for i in own]))
        return batches

    def check(self, parts: int) -> None:
        """Raises InputError where a step has no room for a largest image in each of so many parts."""
        largest = self.tokens(self.sides[-1])
        if self.budget is not None and self.budget < parts * largest:
            shares = "" if parts == 1 else f", one for each of {parts} ranks and micro-batches"
            raise InputError(
                f"tokens_per_step={self.budget} has no room for images of {self.high} px, {largest} tokens{shares}: "
                f"it must be at least {parts * largest}"
            )


@dataclass
class Progress:
    """Where the stream of images is: what a checkpoint keeps of it."""

    position: int = 0  # of the stream: epochs end to end
    waiting: list[int] = field(default_factory=list)  # positions before that one that no step has taken
    images: int = 0  # taken
    sizes: dict[int, int] = field(default_factory=dict)  # how many images were drawn each size, in pixels

    @classmethod
    def of(cls, record: dict) -> "Progress":
        """One out of its `vars`, read from JSON. Raises ValueError or TypeError where it is none."""
        sizes = {int(side): int(count) for side, count in record["sizes"].items()}
        waiting = [int(position) for position in record["waiting"]]
        return cls(int(record["position"]), waiting, int(record["images"]), sizes)


Key = tuple[int, int, int, int]  # epoch, index, size in pixels, micro-batch


class StepSampler(Sampler):
    """Lists of Key: this rank's part of so many steps, from where `progress` is.

    progress: of the steps whose batches were asked for. after: for each of them, where the stream is then.
    """

    def __init__(
        self, length: int, packing: Packing, config: Config, steps: int, progress: Progress, ranks: Ranks = ONE
    ):
        self.length, self.packing, self.steps, self.progress = length, packing, steps, progress
        self.seed, self.accumulate, self.ranks = config.seed, config.accumulate, ranks
        self.after: deque[Progress] = deque()
        self._epochs: dict[int, tuple[list[int], list[int]]] = {}

    def __len__(self) -> int:
        return self.steps

    def _epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """The order of an epoch, as without packing, and the size of each image."""
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
            order, sides = torch.randperm(self.length, generator=generator).tolist(), self.packing.sides
            drawn = torch.randint(len(sides), (self.length,), generator=generator).tolist()
            self._epochs = {e: kept for e, kept in self._epochs.items() if e >= epoch - 2}  # what may wait still
            self._epochs[epoch] = order, [sides[i] for i in drawn]
        return self._epochs[epoch]

    def _image(self, position: int) -> tuple[int, int, int]:
        """(epoch, index, size) of a position of the stream."""
        epoch, offset = divmod(position, self.length)
        order, sides = self._epoch(epoch)
        return epoch, order[offset], sides[offset]

    def _step(self) -> list[int]:
        """The positions of the next step's images: of a window of the order, one after the other that fits."""
        now, packing = self.progress, self.packing
        window = packing.batch_size
        if packing.budget is not None:
            window = max(WINDOW, 2 * math.ceil(packing.images_per_step))  # or a large budget would not be used
        waiting = now.waiting + list(range(now.position, now.position + window - len(now.waiting)))
        chosen, left, least = [], packing.budget, packing.tokens(packing.low)
        for position in waiting:
            tokens = packing.tokens(self._image(position)[2])
            if left is not None and tokens > left:
                continue
            chosen.append(position)
            if left is not None:
                left -= tokens
                if left < least:
                    break
        taken, sizes = set(chosen), Counter(now.sizes)
        sizes.update(self._image(position)[2] for position in chosen)
        end = now.position + window - len(now.waiting)
        rest = [position for position in waiting if position not in taken]
        self.progress = Progress(end, rest, now.images + len(chosen), dict(sorted(sizes.items())))
        return chosen

    def __iter__(self) -> Iterator[list[Key]]:
        for _ in range(self.steps):
            keys = [self._image(position) for position in self._step()]
            shares = balanced([self.packing.tokens(side) for *_, side in keys], self.ranks.world * self.accumulate)
            mine = shares[self.ranks.rank * self.accumulate : (self.ranks.rank + 1) * self.accumulate]
            self.after.append(self.progress)
            yield [(*keys[i], part) for part, share in enumerate(mine) for i in share]


def balanced(sizes: list[int], parts: int) -> list[list[int]]:
    """The indices of sizes in shares of about the same sum: the largest first, to the lightest share."""
    shares, sums = [[] for _ in range(parts)], [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = sums.index(min(sums))
        shares[lightest].append(i)
        sums[lightest] += sizes[i]
    return [sorted(share) for share in shares]


class SizedTransform:
    """A training transform to a size of each image's own: a crop, resized in its aspect, then the rest."""

    def __init__(self, crop, rest, packing: Packing):
        self.crop, self.rest, self.packing = crop, rest, packing

    def __call__(self, image: Image.Image, side: int) -> Tensor:
        box = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        down, across = fit_grid(*box[2:], self.packing.patch, self.packing.patches(side))
        size = down * self.packing.patch[0], across * self.packing.patch[1]
        return self.rest(resized_crop(image, *box, size, InterpolationMode.BICUBIC))


class SizedSamples(Samples):
    """Key -> (uint8 (C, H, W), label, unreadable, patches that stay or None, micro-batch)."""

    def __init__(self, source, transform: SizedTransform | None, seed: int, packing: Packing):
        super().__init__(source, transform, seed)
        self.packing = packing

    def __getitem__(self, key: Key):
        epoch, index, side, part = key
        try:
            image, label, unreadable = self._read(index)
        except InputError as error:
            return error
        seed_everything(self.seed, epoch, index)
        image = torch.as_tensor(np.asarray(self._sized(image, side)))
        (p, q), drop = self.packing.patch, self.packing.drop
        patches = image.shape[1] // p * (image.shape[2] // q)
        return image, label, unreadable, draw_kept(patches, drop) if drop else None, part

    def _sized(self, image, side: int):
        if self.transform is not None:
            return self.transform(image, side)
        (p, q), (_, height, width) = self.packing.patch, image.shape  # of a data set that is not decoded: its corner
        down, across = fit_grid(height, width, self.packing.patch, self.packing.patches(side))
        return image[:, : down * p, : across * q]


@dataclass(frozen=True)
class Native:
    """Images at their own sizes, to the nearest patch: how an evaluation transforms and packs them.

    most: patches of an image, and of those that are computed together; a larger image is made smaller.
    """

    patch: tuple[int, int]
    most: int

    @classmethod
    def of(cls, config: Config, img_size: tuple[int, int], patch: tuple[int, int]) -> "Native | None":
        """None for an evaluation at one size. Raises InputError for sizes that no evaluation has."""
        if not config.sizes:
            if config.tokens_per_step:
                raise InputError("tokens_per_step is for images of many sizes: add --sizes native")
            return None
        if config.sizes != "native":
            raise InputError(f"eval and predict take sizes=native, got sizes={config.sizes}")
        own = math.prod(img_size) // math.prod(patch)
        return cls(patch, config.tokens_per_step or config.eval_batch_size * own)

    @property
    def batch_bytes(self) -> int:
        """Of NATIVE_AT_ONCE images, were they all as large as one may be."""
        return 3 * math.prod(self.patch) * self.most * NATIVE_AT_ONCE

    def transform(self, image: Image.Image) -> np.ndarray:
        """The whole image as uint8 (C, H, W), resized where the patch does not divide it."""
        down, across = native_grid(image.height, image.width, self.patch, self.most)
        size = across * self.patch[1], down * self.patch[0]
        image = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    def pack(self, images: list) -> list[PackedImages]:
        """The images in their order, as many together as `most` patches allow."""
        groups, held = [[]], 0
        for image in map(torch.as_tensor, images):
            patches = image.shape[1] // self.patch[0] * (image.shape[2] // self.patch[1])
            if groups[-1] and held + patches > self.most:
                groups, held = [*groups, []], 0
            groups[-1].append(image)
            held += patches
        return [pack(group, self.patch) for group in groups if group]
