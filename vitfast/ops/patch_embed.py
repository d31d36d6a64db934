"""Images to tokens (Eq. 1 of the ViT paper): patch projection, prefix tokens, positions."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LEAST_STD, MOST_PIXEL
from . import checks as check
from . import packed
from . import reference as ref
from .dispatch import KERNEL_DTYPES, NO_TRITON, autocasts, kernels_wanted
from .operation import Constant, NothingSaved, custom_op, needs_grad

if NO_TRITON is None:
    from ..kernels.launch import watched
    from ..kernels.patch_embed.backward import Gradients, patch_embed_bwd
    from ..kernels.patch_embed.forward import Folded, fold_normalization, patch_embed_fwd
    from ..kernels.patch_embed.patches import channels_last


def _meta_like(x: Tensor | None) -> Tensor | None:
    """A tensor of x's shape, dtype and device, for backward to read these from; it holds one number."""
    return None if x is None else x.new_empty(()).expand(x.shape)


class _Arguments(NamedTuple):
    """The arguments of patch_embed."""

    images: Tensor  # (B, C, Hi, Wi), or patches (N, C, P, Q)
    weight: Tensor  # (D, C, P, Q)
    bias: Tensor | None  # (D,)
    cls_token: Tensor | None  # (1, T, D)
    pos_embed: Tensor | None  # (1, T+N, D) or (1, N, D); (N, D) for packed images
    rows: Constant | None  # (N,), the token of each patch of packed images
    starts: Constant | None  # (S,), the first token of each packed image
    folded_weight: Constant | None  # these three, or none: what fold_normalization returns for the others
    folded_bias: Constant | None
    folded_scale: Constant | None
    mean: list[float]
    std: list[float]

    @property
    def packed(self) -> tuple[Tensor, Tensor] | None:
        """(rows, starts) for packed images, else None."""
        return None if self.rows is None else (self.rows, self.starts)

    @property
    def folded(self) -> "Folded | None":
        return None if self.folded_weight is None else Folded(self.folded_weight, self.folded_bias, self.folded_scale)

    @property
    def prefix(self) -> int:
        """The number of prefix tokens of an image."""
        return 0 if self.cls_token is None else self.cls_token.shape[1]


def _forward(t: _Arguments) -> tuple[Tensor, NothingSaved]:
    tensors = t.images, t.weight, t.bias, t.cls_token, t.pos_embed
    return patch_embed_fwd(*tensors, t.mean, t.std, t.packed, t.folded), NothingSaved()


def _fake(t: _Arguments) -> tuple[Tensor, NothingSaved]:
    width, _, p, q = t.weight.shape
    if t.packed is not None:
        tokens = (t.images.shape[0] + t.starts.shape[0] * t.prefix,)
    else:
        tokens = t.images.shape[0], t.prefix + (t.images.shape[2] // p) * (t.images.shape[3] // q)
    return t.weight.new_empty(*tokens, width), NothingSaved()


def _reads(t: _Arguments, needs: _Arguments) -> _Arguments:
    """The arguments that backward reads: images only where needed, and the shapes of what is added."""
    t = t._replace(images=t.images if needs.images or needs.weight else None, bias=_meta_like(t.bias))
    return t._replace(cls_token=_meta_like(t.cls_token), pos_embed=_meta_like(t.pos_embed))


def _backward(dy: Tensor, t: _Arguments, _, needs: _Arguments) -> dict[str, Tensor | None]:
    wanted = (getattr(t, name).dtype if getattr(needs, name) else None for name in Gradients._fields)
    sizes = dict(prefix=t.prefix, pos_len=0 if t.pos_embed is None else t.pos_embed.shape[-2])
    grads = patch_embed_bwd(dy, t.images, t.weight, t.mean, t.std, Gradients(*wanted), **sizes, packed=t.packed)
    return grads._asdict()


_patch_embed = custom_op(
    "patch_embed", _Arguments, NothingSaved, forward=_forward, fake=_fake, backward=_backward, reads=_reads
)


class _Holding(threading.local):
    folds: list | None = None


_holding = _Holding()


@contextlib.contextmanager
def holding_folds() -> Iterator[list]:
    """Collects the kept projections that this thread uses inside, for a CUDA graph to hold them."""
    _holding.folds = []
    try:
        yield _holding.folds
    finally:
        _holding.folds = None


def _kept_fold(
    cache: dict | None, images: Tensor, weight: Tensor, bias: Tensor | None, *normalisation: list[float]
) -> "Folded | tuple[None, None, None]":
    """The projection with the normalisation in it, kept in `cache` while weight and bias do not change."""
    tensors, nothing = [weight] if bias is None else [weight, bias], (None, None, None)
    if cache is None or torch.compiler.is_compiling() or needs_grad(images, *tensors):
        return nothing
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.is_inference() for t in tensors):
        return nothing  # they have no versions
    capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing and _holding.folds is None:
        return nothing  # somebody's graph, which makes it at each replay
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else None
    versions = [(t.data_ptr(), t._version, t.dtype) for t in tensors]
    key, kept = (versions, normalisation, channels_last(images), stream), cache.get("kept")
    if kept is None or kept[0] != key:
        if watched() or capturing:
            return nothing  # what is written now is written again, or not at all
        folded = fold_normalization(images, weight, bias, *normalisation)
        kept = cache["kept"] = key, folded, [t.detach() for t in tensors]  # whose addresses no others get
    if _holding.folds is not None:
        _holding.folds.append(kept)
    return kept[1]


_in_compute_dtype = autocasts()(lambda weight: weight)


def channel_values(name: str, value, chans: int) -> list[float] | Tensor | None:
    """Checks a mean or std of one number or one per channel; returns a list, or a tensor (1,) or (C,).

    name: "operation: mean" or "operation: std", for the TypeError or ValueError. A tensor's values are not checked, as
    that would mean waiting for a GPU.
    """
    if value is None:
        return None
    wanted = f"one number or {chans}, one for each of the {chans} channels"
    value = [value] if check.is_number(value) else value
    if isinstance(value, Sequence) and not isinstance(value, str) and all(map(check.is_number, value)):
        low = LEAST_STD if name.endswith("std") else -MOST_PIXEL
        if not all(low <= v <= MOST_PIXEL for v in value):
            raise ValueError(f"{name} must be from {low:g} to {MOST_PIXEL:g}, got {value}")
        values, shape = [float(v) for v in value], (len(value),)
    else:
        try:
            values = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} must be {wanted}, got {value!r}") from None
        if values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must be {wanted}, got {values.dtype}")
        values, shape = values.reshape(-1), tuple(values.shape)
    if len(values) not in (1, chans) or max(shape, default=1) != len(values):
        got = len(values) if len(shape) == 1 else f"shape {shape}"
        raise ValueError(f"{name} must be {wanted}, got {got}")
    return values


def _numbers(values: list[float] | Tensor | None, default: float, chans: int) -> list[float]:
    """A number for each channel, as the kernel takes them."""
    values = [default] if values is None else values.tolist() if isinstance(values, Tensor) else values
    return values * chans if len(values) == 1 else values


def unsupported_reason(mean, std, *tensors: Tensor | None) -> str | None:
    """Why no kernel takes this normalisation or reads these tensors; None where one does."""
    for name, value in (("mean", mean), ("std", std)):
        if isinstance(value, Tensor) and torch.compiler.is_compiling():
            return f"{name} is a tensor, whose numbers compiled code does not know"
        if needs_grad(value):
            return f"{name} is a constant to the kernel, and it requires a gradient"
    floats = (t for t in tensors if t is not None and t.is_floating_point())
    return next((f"no kernel reads {t.dtype}" for t in floats if t.dtype not in KERNEL_DTYPES), None)


def patch_embed(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cls_token: Tensor | None = None,
    pos_embed: Tensor | None = None,
    *,
    mean: float | Sequence[float] | Tensor | None = None,
    std: float | Sequence[float] | Tensor | None = None,
    offsets: Tensor | None = None,
    cache: dict | None = None,
) -> Tensor:
    """Turns images into tokens: [prefix; patch_1 W; ...; patch_N W] + bias + positions.

    images (B, C, Hi, Wi): floats of any dtype, or uint8, which becomes (images / 255 - mean) / std. Floats are never
    normalised here. weight (D, C, P, Q); bias (D,) or None; cls_token (1, T, D): all prefix tokens, registers too;
    pos_embed (1, T+N, D), or (1, N, D) for the patches only. Hi and Wi must be multiples of P and Q. Returns
    (B, T+N, D), contiguous, in the dtype of weight, or under autocast in its dtype.

    mean, std: one number or one for each channel, by default 0 and 1. They are numbers (up to 1e6; a std from 1e-6), or
    a tensor or an array in which at most one axis is longer than 1, such as (1, C, 1, 1). With a CUDA tensor the host
    waits for the GPU. No kernel runs if such a tensor needs gradients or the code is compiled.

    Images of many sizes come as patches: images is (N, C, P, Q), and image s owns the patches offsets[s] to
    offsets[s + 1]. offsets (S + 1,) is int32 or int64, on the device, and rises from 0 to N. pos_embed is then (N, D),
    a position for each patch. Returns (N + S T, D): the tokens of the images, one image after the other.

    cache: a dictionary, empty at first, in which calls without gradients keep the weight with the normalisation of
    uint8 images in it. They make it anew when weight or bias is another tensor or has been changed in place. A change
    through `.data` or by a CUDA graph is not noticed; clear the dictionary after one.
    """
    op = "patch_embed"
    check.shape(op, "weight", weight, ("*", "*", "*", "*"), required=True)
    width, chans, p, q = weight.shape
    check.shape(op, "images", images, ("*", chans, "*", "*"), required=True)
    height, length = images.shape[-2:]
    if not p or not q:
        raise ValueError(f"{op}: weight must have patches of at least 1 x 1, got {tuple(weight.shape)}")
    if height % p or length % q or not height or not length:
        sides = f"multiples of the patch {p} x {q}"
        raise ValueError(f"{op}: images must have sides that are {sides}, got {height} x {length}")
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise TypeError(f"{op}: images must be floating point or uint8, got {images.dtype}")
    check.shape(op, "bias", bias, (width,))
    check.shape(op, "cls_token", cls_token, (1, "*", width))
    patches, prefix = (height // p) * (length // q), 0 if cls_token is None else cls_token.shape[1]
    lie = None
    if offsets is not None:
        if (height, length) != (p, q):
            raise ValueError(f"{op}: with offsets images must be (N, {chans}, {p}, {q}), got {tuple(images.shape)}")
        check.shape(op, "pos_embed", pos_embed, (len(images), width))
        packed.check_offsets(op, offsets, len(images), images.device)
        lie = packed.token_rows(offsets, len(images), prefix)
    else:
        check.shape(op, "pos_embed", pos_embed, (1, "*", width))
        if pos_embed is not None and pos_embed.shape[1] not in (patches, patches + prefix):
            counts = f"{patches + prefix} or {patches} positions"
            raise ValueError(f"{op}: pos_embed must have {counts}, got {pos_embed.shape[1]}")
    parameters = dict(bias=bias, cls_token=cls_token, pos_embed=pos_embed)
    check.floating(op, weight=weight, **parameters)
    check.device(op, "weight", weight.device, images=images, **parameters)
    raw = images.dtype == torch.uint8
    mean, std = channel_values(f"{op}: mean", mean, chans), channel_values(f"{op}: std", std, chans)
    mean, std = (mean, std) if raw else (None, None)
    # Autocast casts the weight alone, whose dtype decides that of the computation. The images, the largest tensor, are
    # converted as they are read.
    weight, stored = _in_compute_dtype(weight), weight
    if kernels_wanted(op, weight, unsupported_reason(mean, std, images, *parameters.values()), stacklevel=3):
        normalisation = (_numbers(mean, 0.0, chans), _numbers(std, 1.0, chans)) if raw else ([], [])
        rows = (None, None) if lie is None else lie
        keeps = raw and weight is stored
        folded = _kept_fold(cache if keeps else None, images, weight, bias, *normalisation)
        return _patch_embed(
            _Arguments(images, weight, bias, cls_token, pos_embed, *rows, *folded, *normalisation)
        ).run()
    return ref.patch_embed(images, weight, bias, cls_token, pos_embed, mean=mean, std=std, rows=lie)
