"""Images of many sizes as one batch: cut into patches that lie one after the other, without padding.

NaViT (Dehghani et al., 2023) showed that mixed resolutions train faster. Image s owns the patches offsets[s] to
offsets[s + 1] of all; in a ViT its tokens are its prefix tokens and then its patches, likewise one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..errors import both_ends
from ..kernels.launch import cdiv
from . import checks as check
from .reference import owners

ALIGNMENT = 16  # bytes at which a tensor in the buffer begins


@dataclass(eq=False, frozen=True, repr=False)
class PackedImages:
    """A batch of S images of many sizes as N patches, which a ViT takes in place of a list of images.

    `pack` makes it. patches: (N, C, P, Q), uint8 or floats. places: (N,) int32, the index of each patch in the grid of
    its image, row by row. offsets: (S + 1,) int32: image s owns the patches offsets[s] to offsets[s + 1]. grids: (S, 2)
    int32, patches down and across. counts: the number of patches of each image, as Python numbers; longest: the largest
    of them. buffer: the memory that the tensors share, which is pinned and sent as one; None where `pack` has not put
    them there, or one was replaced since.
    """

    patches: Tensor
    places: Tensor
    offsets: Tensor
    grids: Tensor
    counts: tuple[int, ...]
    longest: int
    buffer: Tensor | None = field(default=None, init=False)  # so dataclasses.replace does not hand it on

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def device(self) -> torch.device:
        return self.patches.device

    @property
    def dtype(self) -> torch.dtype:
        return self.patches.dtype

    @property
    def shape(self) -> torch.Size:
        """The patches' shape, (N, C, P, Q)."""
        return self.patches.shape

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """The tensors in the buffer, by name, in the order in which they lie there."""
        return {name: getattr(self, name) for name in ("patches", "places", "offsets", "grids")}

    @property
    def _together(self) -> bool:
        """Whether all tensors still lie in the buffer, and none has moved to other memory."""
        where = lambda t: t.untyped_storage().data_ptr()  # noqa: E731
        return self.buffer is not None and {*map(where, self._tensors.values())} == {where(self.buffer)}

    def __repr__(self) -> str:
        return f"PackedImages({len(self)} images, patches {tuple(self.shape)} {self.dtype} on {self.device})"

    def __reduce__(self):
        if self._together:  # the shared memory is saved once, and the tensors share it again when loaded
            return _in_buffer, (self.buffer, tuple(self.shape), self.dtype, self.counts)
        return PackedImages, (*self._tensors.values(), self.counts, self.longest)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "PackedImages":
        """The same images on another device, moved by one copy where the tensors share their memory.

        To replace the patches, by normalised ones for example, use `dataclasses.replace(images, patches=...)`. Raises
        TypeError for a device that is none, such as a dtype.
        """
        for name, value, kinds in (("device", device, (str, int, torch.device)), ("non_blocking", non_blocking, bool)):
            if not isinstance(value, kinds):
                hint = "for another dtype: dataclasses.replace(images, patches=images.patches.to(dtype))"
                raise TypeError(f"PackedImages.to: {name} cannot be {value!r}; {hint}")
        if self._together:
            return _in_buffer(self.buffer.to(device, non_blocking=non_blocking), self.shape, self.dtype, self.counts)
        return replace(self, **{name: t.to(device, non_blocking=non_blocking) for name, t in self._tensors.items()})

    def cuda(self, device: int | None = None, non_blocking: bool = False) -> "PackedImages":
        return self.to("cuda" if device is None else f"cuda:{device}", non_blocking)

    def cpu(self) -> "PackedImages":
        return self.to("cpu")

    def pin_memory(self) -> "PackedImages":
        """The same images in page-locked memory, which a GPU copies while it computes; DataLoaders call it."""
        images = self.shape, self.dtype, self.counts
        packed = self if self._together else _in_buffer(None, *images, **self._tensors)
        return _in_buffer(packed.buffer.pin_memory(), *images)

    def is_pinned(self) -> bool:
        return self._together and self.buffer.is_pinned()


def _in_buffer(
    buffer: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, counts: tuple[int, ...], **tensors: Tensor
) -> PackedImages:
    """PackedImages whose tensors lie one after the other in `buffer`; None makes a new one.

    tensors: those whose values are copied there, by name; the caller writes the others.
    """
    integers = shape[:1], (len(counts) + 1,), (len(counts), 2)  # places, offsets, grids
    parts = [(torch.Size(shape), dtype), *((torch.Size(size), torch.int32) for size in integers)]
    lengths = [size.numel() * kind.itemsize for size, kind in parts]
    starts = list(accumulate((cdiv(length, ALIGNMENT) * ALIGNMENT for length in lengths), initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8) if buffer is None else buffer
    pieces = (buffer[start : start + length] for start, length in zip(starts, lengths))
    packed = PackedImages(*(x.view(kind).view(size) for x, (size, kind) in zip(pieces, parts)), counts, max(counts))
    object.__setattr__(packed, "buffer", buffer)  # the dataclass is frozen
    for name, values in tensors.items():
        getattr(packed, name).copy_(values)
    return packed


def _checked(images: Sequence[Tensor], patch: tuple[int, int]) -> list[Tensor]:
    """Checks that images (C, H, W) share dtype, device and channels, in whole patches; returns tensors."""
    if not isinstance(images, (list, tuple)):
        raise TypeError(f"pack: images must be a list of (C, H, W) tensors, got {type(images).__name__}")
    if not images:
        raise ValueError("pack: images is empty")
    tensors, first = [], None
    for i, image in enumerate(images):
        if type(image).__module__.startswith("PIL."):
            raise TypeError(f"pack: images[{i}] is a PIL image; vitfast.transform(model) makes a tensor of it")
        try:
            image = image if isinstance(image, Tensor) else torch.as_tensor(np.ascontiguousarray(image))
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"pack: images[{i}] must be a tensor or an array, got {type(image).__name__}") from None
        check.shape("pack", f"images[{i}]", image, ("C", "H", "W"))
        if image.dtype != torch.uint8 and not image.is_floating_point():
            raise TypeError(f"pack: images[{i}] must be uint8 or floating point, got {image.dtype}")
        chans, height, width = image.shape
        if height % patch[0] or width % patch[1] or not height or not width:
            sides = f"multiples of the patch {patch[0]} x {patch[1]}"
            hint = "; it must be (C, H, W), channels first" if width in (1, 3, 4) and chans > 4 else ""
            raise ValueError(f"pack: images[{i}] must have sides that are {sides}, got {height} x {width}{hint}")
        kind = dict(channels=chans, dtype=image.dtype, device=image.device)
        first = first or kind
        for name in kind:
            if kind[name] != first[name]:
                both = f"{name} {first[name]} of images[0], {kind[name]} of images[{i}]"
                raise ValueError(f"pack: images must be alike, got {both}")
        tensors.append(image)
    return tensors


def _cut(image: Tensor, patch: tuple[int, int]) -> Tensor:
    """(C, H, W) -> a view (h, w, C, P, Q) of its patches."""
    grid = image.unflatten(2, (-1, patch[1])).unflatten(1, (-1, patch[0]))
    return grid.permute(1, 3, 0, 2, 4)


def pack(
    images: Sequence[Tensor], patch_size: int | tuple[int, int], keep: Sequence[Tensor | None] | None = None
) -> PackedImages:
    """Makes one batch for a ViT out of images of many sizes, by cutting them into patches.

    images: a list of (C, H, W) tensors or arrays, uint8 or floats, whose sides are multiples of the patch's.
    patch_size: P or (P, Q). keep: for each image the indices of the patches that stay, counted row by row, or None for
    all patches (NaViT's token dropping; see `draw_kept`). On the CPU the result lies in one buffer, which can be pinned
    and sent as one. So call this in the collate function of a DataLoader. Gradients flow back to images that require
    them.

    Raises ValueError or TypeError, which name the image.
    """
    patch = tuple(patch_size) if isinstance(patch_size, (list, tuple)) else (patch_size, patch_size)
    if len(patch) != 2 or not all((check.as_whole(side) or 0) > 0 for side in patch):
        raise ValueError(f"pack: patch_size must be P or (P, Q) in pixels, got {patch_size!r}")
    images = _checked(images, patch)
    grids = [(image.shape[1] // patch[0], image.shape[2] // patch[1]) for image in images]
    kept = [None] * len(images) if keep is None else list(keep)
    if len(kept) != len(images):
        raise ValueError(f"pack: keep must have an entry for each of {len(images)} images, got {len(kept)}")
    kept = [p if p is None else _checked_places(i, p, h * w) for i, (p, (h, w)) in enumerate(zip(kept, grids))]
    counts = tuple(h * w if places is None else len(places) for places, (h, w) in zip(kept, grids))
    places = torch.cat([torch.arange(h * w) if p is None else p.cpu() for p, (h, w) in zip(kept, grids)]).int()
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    first, cuts = images[0], [_cut(image, patch) for image in images]
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # vmap: nothing is copied in place
    if first.device.type != "cpu" or transformed or any(image.requires_grad for image in images):
        whole = [cut.flatten(0, 1) for cut in cuts]
        patches = torch.cat([x if p is None else x[p.to(x.device)] for x, p in zip(whole, kept)])
        rest = (t.to(first.device) for t in (places, offsets, torch.tensor(grids, dtype=torch.int32)))
        return PackedImages(patches, *rest, counts, max(counts))
    shape = (sum(counts), first.shape[0], *patch)
    packed = _in_buffer(None, shape, first.dtype, counts, places=places, offsets=offsets, grids=torch.tensor(grids))
    for cut, p, place in zip(cuts, kept, packed.patches.split(counts)):
        if p is None:
            place.unflatten(0, cut.shape[:2]).copy_(cut)
        else:
            place.copy_(cut[p // cut.shape[1], p % cut.shape[1]])
    return packed


def pack_batch(images: Tensor, patch: tuple[int, int]) -> PackedImages:
    """Images of one size (B, C, H, W) as `pack` packs a list of them; the host does not wait for a GPU.

    Raises ValueError unless the patch divides their sides.
    """
    batch, (h, w) = len(images), (side // part for side, part in zip(images.shape[2:], patch))
    if tuple(images.shape[2:]) != (h * patch[0], w * patch[1]) or not h * w:
        sides = f"multiples of the patch {patch[0]} x {patch[1]}"
        raise ValueError(f"pack: images must have sides that are {sides}, got {tuple(images.shape)}")
    patches = images.unflatten(3, (w, patch[1])).unflatten(2, (h, patch[0])).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    count = lambda n: torch.arange(n, dtype=torch.int32, device=images.device)  # noqa: E731
    grids = torch.stack([torch.full_like(count(batch), side) for side in (h, w)], 1)
    return PackedImages(patches, count(h * w).repeat(batch), count(batch + 1) * (h * w), grids, (h * w,) * batch, h * w)


def _checked_places(i: int, places, count: int) -> Tensor:
    """keep[i], a tensor, list or array, as a tensor.

    Raises ValueError unless it holds at least one patch number, each below `count` and at most once.
    """
    try:
        indices = torch.as_tensor(places)
    except (TypeError, ValueError, RuntimeError):
        indices = torch.empty(0)
    whole = indices.dtype in (torch.int32, torch.int64) and indices.dim() == 1 and len(indices) > 0
    if not whole or indices.min() < 0 or indices.max() >= count or len(indices.unique()) != len(indices):
        text = f"whole numbers of patches from 0 to {count - 1}, each once and at least one"
        raise ValueError(f"pack: keep[{i}] must be {text}")
    return indices


def draw_kept(count: int, drop: float, generator: torch.Generator | None = None) -> Tensor:
    """Draws the indices of the patches that stay, at least one, when a fraction `drop` of `count` goes."""
    return torch.randperm(count, generator=generator)[: max(1, round(count * (1 - drop)))].sort().values


def token_rows(offsets: Tensor, patches: int, prefix: int) -> tuple[Tensor, Tensor]:
    """(rows (N,), starts (S,)) int64: the token of each packed patch, and the first token of each image.

    prefix: how many tokens an image has before its patches.
    """
    count = torch.arange(len(offsets) - 1, device=offsets.device)
    rows = torch.arange(patches, device=offsets.device) + (owners(offsets, patches) + 1) * prefix
    return rows, offsets[:-1] + count * prefix


def check_counts(op: str, name: str, tensor: Tensor, where: torch.device) -> None:
    """Checks that a tensor is int32 or int64 and on the device of the operation's input."""
    check.tensors(op, **{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {tensor.dtype}")
    check.device(op, "its input", where, **{name: tensor})


def check_offsets(op: str, offsets: Tensor, tokens: int, device: torch.device) -> int | None:
    """Checks offsets (S + 1,) and returns the tokens of the longest sample.

    Their values are checked only where the host has them (check.at_hand); otherwise None is returned.
    """
    check_counts(op, "offsets", offsets, device)
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"{op}: offsets must be (S + 1,), got {tuple(offsets.shape)}")
    if not check.at_hand(offsets):
        return None
    if offsets[0] != 0 or offsets[-1] != tokens or bool((offsets.diff() < 0).any()):
        text = f"must rise from 0 to the {tokens} tokens, got {both_ends(str(offsets.tolist()), 80)}"
        raise ValueError(f"{op}: offsets {text}")
    return int(offsets.diff().max()) if len(offsets) > 1 else 0
