"""Embeddings of images, which are decoded, resized as the weights say and batched by their tokens."""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ..data.contents import ImageLike, content, name_of, own
from ..data.images import Reading, Unreadable
from ..data.jpeg import Encoded
from ..data.jpeg import decode as decode_jpegs
from ..errors import InputError
from ..model.baselines import load_any
from ..model.checkpoint import hugging_face
from ..model.checkpoint.files import locate
from ..model.graphs import Graphed, check_device, rounded_up
from ..model.vit import ViT
from ..run.config import MAX_PIXELS
from ..run.device import autocast, autocast_dtype, choose_device
from .accuracy import compare_pillow, evaluating
from .backbones import backbone

TOKENS = {"cuda": 65_536, "cpu": 8_192}  # in a batch, by default
AHEAD = 4  # images that each worker reads ahead
CHUNK = 1 << 28  # bytes of images that are resized together on the device
GRAPHS = 16  # the most CUDA graphs


class Embedded(NamedTuple):
    """The result of one image: its vector (D,) fp32 and its size in pixels, or why there is none."""

    vector: np.ndarray | None
    height: int | None
    width: int | None
    error: str | None


class Embeddings(NamedTuple):
    """The result of `embed(..., errors="skip")`."""

    vectors: Tensor  # (n - len(skipped), D)
    skipped: list[tuple[int, str]]  # (index, reason) of the images that could not be read


class Embedder:
    """Turns images into vectors with a model: `Embedder("folder/").embed(paths)` -> (n, D).

    model: a ViT, weights in any format that ViT.from_pretrained reads (a file, a folder, hf-hub:owner/name), or a model
        of timm or transformers, accelerated or not. Weights are loaded here and cast to `dtype`. A model does not
        change; it runs under autocast if `dtype` differs from its own.
    pool: "token", "avg" or "map"; None: what the model's head sees, or transformers' pooled output. CLIP's weights give
        vectors before the projection; transformers' CLIPModel gives vectors that can be compared with texts.
    device: "cuda", "cuda:1", "cpu"; None: the device of a given model, else CUDA if present.
    dtype: None: bfloat16 for weights that are loaded onto CUDA, else the model's own.
    normalize: divide each vector by its L2 norm.
    img_size: for weights, an image size other than their own.
    sizes: "native" gives a ViT each image at its own size, rounded to whole patches, packed without padding. NaFlexViT
        and SigLIP 2 always see images in their own aspect.
    processor: transformers' image processor for a model of transformers, or the folder of its preprocessor_config.json;
        None: the one in the model's own folder or in the hub's cache.
    decode: "host" reads images with Pillow; "device" decodes grey and RGB JPEGs by nvJPEG, whose pixels differ from
        Pillow's by rounding.
    exif_orientation: turn files and PIL images upright as their EXIF orientation says.
    max_pixels: the most pixels of an image; one with more counts as unreadable.
    workers: threads that read images; None: one for each core that this rank has, up to 16.
    tokens: the most tokens of a batch; None: 65,536 on CUDA and 8,192 on a CPU.
    graphs: compute by CUDA graphs (vitfast.graphed). A batch that is not full is filled up to 2^n or 3 * 2^n images, so
        that few graphs serve all. Not for NaFlexViT and SigLIP 2.

    Images are resized as the weights say (crop_mode, crop_pct, interpolation), with Pillow's pixels; on CUDA a kernel
    does so. The patch projection of a ViT normalises them. With `vitfast.batch_invariant(True)` a vector has the same
    bits in any batch. Several threads may use an instance, and it can be pickled. No thread outlives a call.
    Raises InputError if the model cannot do what the arguments ask for.
    """

    def __init__(
        self,
        model: nn.Module | str | os.PathLike,
        *,
        pool: Literal["token", "avg", "map"] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        normalize: bool = False,
        img_size: int | tuple[int, int] | None = None,
        sizes: Literal["native"] | None = None,
        processor=None,
        decode: Literal["host", "device"] = "host",
        exif_orientation: bool = True,
        max_pixels: int = MAX_PIXELS,
        workers: int | None = None,
        tokens: int | None = None,
        graphs: bool = False,
    ):
        if decode not in ("host", "device"):
            raise InputError(f"decode must be 'host' or 'device', got {decode!r}")
        if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise InputError(f"dtype must be torch.float32, float16 or bfloat16, got {dtype!r}")
        for name, value, least in (("workers", workers, 0), ("tokens", tokens, 1), ("max_pixels", max_pixels, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(f"{name} must be a whole number from {least}, got {value!r}")
        if isinstance(model, nn.Module):
            if img_size is not None:
                raise InputError("img_size is for weights; a model has its size (ViT.set_input_size changes it)")
            parameter = next(model.parameters(), torch.empty(0))
            self.device = choose_device(str(parameter.device if device is None else device))
            model = model.to(self.device)
            self.dtype = None if dtype == parameter.dtype else dtype
        else:
            self.device = choose_device("" if device is None else str(device))
            if img_size is None and sizes is None:  # DINOv2's images are smaller than its table of positions
                processor = processor or locate(model).preprocessor
                img_size = hugging_face.image_size(processor) if isinstance(processor, dict) else None
            compare_pillow(str(model))
            model = load_any("", model, img_size).to(self.device, dtype or autocast_dtype("auto", self.device)).eval()
            self.dtype = None
        self.pool, self.normalize, self.decode = pool, normalize, decode
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks share cores
        self.workers = min(16, max(1, cores)) if workers is None else workers
        self.tokens = tokens or TOKENS[self.device.type]
        self._made_from, self._dim = (model, pool, sizes, processor), None
        self.backbone = backbone(*self._made_from)
        self.reading = Reading(exif_orientation, (1, 1) if self.backbone.native else self.backbone.patch, max_pixels)
        self.graphs = graphs
        if graphs:
            check_device("graphs", self.device)
            if self.backbone.native and not isinstance(self.backbone.model, ViT):
                kind = type(self.backbone.model).__name__
                raise InputError(f"graphs: a CUDA graph cannot hold {kind}, whose positions the host computes")
        self._start()

    @overload
    def embed(self, images: Iterable[ImageLike], *, errors: Literal["raise"] = "raise") -> Tensor: ...
    @overload
    def embed(self, images: Iterable[ImageLike], *, errors: Literal["skip"]) -> Embeddings: ...
    def embed(self, images: Iterable[ImageLike], *, errors: Literal["raise", "skip"] = "raise") -> Tensor | Embeddings:
        """Returns the vectors (n, D) of n images, fp32 on the CPU, in the order of the images.

        images: paths, bytes of image files, PIL images, uint8 tensors or arrays (3, H, W), (1, H, W) or (H, W), arrays
        (H, W, 3), of any sizes and in any mix. errors: "raise" raises InputError for the first image that cannot be
        read, by its name; "skip" leaves such images out and returns Embeddings, which lists them.
        """
        whole = isinstance(images, (str, bytes, os.PathLike, Image.Image))
        if whole or (isinstance(images, (Tensor, np.ndarray)) and images.ndim != 4):
            raise TypeError(f"embed: images must be a list of images, got one {type(images).__name__}; give [image]")
        if errors not in ("raise", "skip"):
            raise ValueError(f"embed: errors must be 'raise' or 'skip', got {errors!r}")
        vectors, skipped = [], []
        for index, found in enumerate(self.stream(images)):
            if found.error is None:
                vectors.append(found.vector)
            elif errors == "raise":
                raise InputError(found.error)
            else:
                skipped.append((index, found.error))
        made = torch.from_numpy(np.stack(vectors)) if vectors else torch.empty(0, self.dim)
        return made if errors == "raise" else Embeddings(made, skipped)

    @property
    def dim(self) -> int:
        """D, the length of a vector; the first time, one grey image is computed for it."""
        if self._dim is None:
            (found,) = self.stream([np.full((3, 64, 64), 127, np.uint8)])
            self._dim = len(found.vector)
        return self._dim

    def stream(self, images: Iterable[ImageLike]) -> Iterator[Embedded]:
        """The result of each image in order, as soon as its batch is computed."""
        named = ((None, image, name_of(i, image)) for i, image in enumerate(images))
        return (found for _, found in self.stream_groups(named))

    def stream_groups(
        self, items: Iterable[tuple[object, ImageLike, str]], progress=None
    ) -> Iterator[tuple[object, Embedded]]:
        """Yields (group, result) of each item (group, image, name) in order; a batch is of one group.

        So what is computed together does not depend on the groups before. The seconds in which computing waits for
        images are added to `progress.waiting`.
        """
        batches = self._batches(self._prepared(self._read_ahead(iter(items))))
        while True:
            begun = time.perf_counter()
            batch = next(batches, [])
            if progress is not None:
                progress.waiting += time.perf_counter() - begun
            if not batch:
                return
            yield from zip([one.group for one in batch], self._computed(batch))

    def __repr__(self) -> str:
        model, dtype = self.backbone.model, self.dtype or next(self.backbone.model.parameters()).dtype
        told = ", ".join(f"{name}={value}" for name, value in self.backbone.preprocessing.items())
        options = f"pool={self.pool or 'own'}, normalize={self.normalize}, {str(dtype).removeprefix('torch.')}"
        return f"Embedder({type(model).__name__} on {self.device}, {options}; images: {told})"

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_run", "backbone")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self.backbone = backbone(*self._made_from)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._run = Graphed(self.backbone.model, self._forward, GRAPHS) if self.graphs else self._forward

    def _read_ahead(self, items: Iterator[tuple[object, ImageLike, str]]) -> Iterator["_Read"]:
        """Yields each item (group, image, name) in order, its image read; threads read ahead."""
        if self.workers:
            items = ((group, own(image, self.reading), name) for group, image, name in items)
        first = list(itertools.islice(items, 2))
        items = itertools.chain(first, items)
        if not self.workers or len(first) < 2:  # one image needs no threads
            yield from itertools.starmap(self._read, items)
            return
        ahead = AHEAD * self.workers
        if self.device.type == "cpu":  # prepared images are small: a batch is read while another is computed
            ahead = max(ahead, self._full)
        waiting: deque = deque()
        with ThreadPoolExecutor(self.workers, "vitfast-embed") as pool:
            try:
                for item in items:
                    waiting.append(pool.submit(self._read, *item))
                    if len(waiting) > ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:  # the consumer may have stopped
                for future in waiting:
                    future.cancel()

    def _read(self, group: object, image: ImageLike, name: str) -> "_Read":
        """An image's pixels or (decode="device") the bytes of its file, or the reason why it cannot be read."""
        try:
            found = content(image, name, self.reading, self.decode == "device")
        except Unreadable as error:
            return _Read(group, name, error=str(error))
        pixels = found
        if found.content.dim() == 3 and self.device.type == "cpu":  # here, while other threads do the same
            pixels = self.backbone.prepare([found.content.cpu()])[0]
        return _Read(group, name, pixels, found.height, found.width)

    def _prepared(self, read: Iterator["_Read"]) -> Iterator["_Read"]:
        """Yields the images decoded and resized, on the device as many together as CHUNK bytes allow."""
        chunk, held = [], 0
        for one in read:
            chunk.append(one)
            held += 3 * one.height * one.width if isinstance(one.pixels, Encoded) else 0
            if held > CHUNK or not held:
                yield from self._on_device(chunk)
                chunk, held = [], 0
        yield from self._on_device(chunk)

    def _on_device(self, chunk: list["_Read"]) -> list["_Read"]:
        """Decodes and resizes on the device the images of a chunk that are not prepared yet; returns all."""
        waiting = [one for one in chunk if isinstance(one.pixels, Encoded)]
        decoded = decode_jpegs([one.pixels for one in waiting], [one.name for one in waiting], self.device)
        good = [image for image in decoded if isinstance(image, Tensor)]
        prepared = iter(self.backbone.prepare(good) if good else ())
        for one, image in zip(waiting, decoded):
            if isinstance(image, Tensor):
                one.pixels = next(prepared)
            else:
                one.pixels = one.height = one.width = None
                one.error = str(image)
        return chunk

    def _batches(self, read: Iterator["_Read"]) -> Iterator[list["_Read"]]:
        """Yields batches: images of one group, as many as `tokens` allow, at least one."""
        batch, held = [], 0
        for one in read:
            count = 0 if one.error else self.backbone.tokens(one.height, one.width)
            if batch and (one.group != batch[-1].group or held + count > self.tokens):
                yield batch
                batch, held = [], 0
            batch.append(one)
            held += count
        if batch:
            yield batch

    @torch.inference_mode()
    def _computed(self, batch: list["_Read"]) -> list[Embedded]:
        """The results of a batch, in its order."""
        pixels = [one.pixels for one in batch if one.error is None]
        vectors = iter(self._vectors(pixels) if pixels else ())
        found = []
        for one in batch:
            vector, error = (next(vectors), None) if one.error is None else (None, one.error)
            if vector is not None and not np.isfinite(vector).all():
                vector, error = None, f"{one.name}: the model's output is not a number"
            found.append(Embedded(vector, one.height, one.width, error))
        return found

    def _vectors(self, pixels: list[Tensor]) -> np.ndarray:
        """The vectors (B, D) of prepared images."""
        given = pixels if self.backbone.native else torch.stack(pixels)
        if self.graphs and not self.backbone.native:
            filled = min(rounded_up(len(given), 1), max(len(given), self._full))
            given = torch.cat([given, given.new_zeros(filled - len(given), *given.shape[1:])])
        with self._lock, evaluating(self.backbone.model):
            try:
                vectors = self._run(given)[: len(pixels)]
            except torch.OutOfMemoryError:
                message = f"out of memory with {len(pixels)} images at once; give fewer tokens than {self.tokens}"
                raise InputError(message) from None
            vectors = F.normalize(vectors, dim=-1) if self.normalize else vectors
            return vectors.cpu().numpy()  # here, as the next graph writes into the same memory

    def _forward(self, given: Tensor | list[Tensor]) -> Tensor:
        """The vectors (B, D) fp32."""
        with autocast(self.device, self.dtype):
            vectors = self.backbone.embed(given).float()
        if vectors.dim() != 2:
            got = f"{tuple(vectors.shape[1:])} for an image, no vector"
            raise InputError(f"Embedder: {type(self.backbone.model).__name__} makes {got}; give pool")
        return vectors

    @property
    def _full(self) -> int:
        """How many images of the model's own size fill a batch of `tokens`."""
        return max(1, self.tokens // self.backbone.own_tokens)


@dataclass
class _Read:
    """An image as a worker returns it."""

    group: object
    name: str
    pixels: Tensor | Encoded | None = None  # (3, H, W) uint8, prepared; Encoded where they are not prepared yet
    height: int | None = None  # this and the width are those before it was resized
    width: int | None = None
    error: str | None = None
