"""Masks of a call as options of attention: a bias on the logits, and the length of the keys.

Only a look at its values, for which the host would wait for a GPU, tells whether a mask hides nothing but a tail of
padding. So attention gets both: the mask as a bias, which is right for every mask, and the last key that any query
sees, behind which nothing need be read. A query from which a mask of large negative numbers hides every key attends to
all keys alike, in every library, and counts as seeing them all. Queries of padding, whose keys no query sees, do not.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .specs import Logits


class PackedTokens:
    """Samples one after the other in one row (1, tokens, D); its layers get this in the place of a mask.

    offsets (S + 1,), longest: as attention takes them. mask(): the library's mask, for layers that run its code.
    """

    def __init__(self, offsets: Tensor, longest: int, mask: Callable[[], Tensor]):
        self.offsets, self.longest, self.mask = offsets, longest, functools.cache(mask)

    def pack(self, x: Tensor) -> Tensor:
        """Tokens in the library's shape -> in ours."""
        return x

    def unpack(self, x: Tensor) -> Tensor:
        """Tokens in our shape -> in the library's."""
        return x

    def padded(self, arguments: dict) -> dict:
        """The arguments of a layer with the library's mask in place of this object."""
        return {name: self.mask() if value is self else value for name, value in arguments.items()}


class UnpaddedTokens(PackedTokens):
    """The tokens (tokens, D) of a padded batch (B, N, D) that are not padding.

    valid (B, N): True for these tokens. count: how many there are. longest: how many the longest sample has.
    """

    def __init__(self, valid: Tensor, count: int, longest: int, mask: Callable[[], Tensor]):
        super().__init__(F.pad(valid.sum(1).cumsum(0), (1, 0)).int(), longest, mask)
        self.shape = valid.shape
        self.rows = torch.nonzero_static(valid.flatten(), size=count)[:, 0]
        self._padded: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (tokens, ...)."""
        return x.flatten(0, 1).index_select(0, self.rows)

    def unpack(self, x: Tensor) -> Tensor:
        """(tokens, ...) -> (B, N, ...), with zeros for padding."""
        rows = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.rows, x)
        return rows.unflatten(0, self.shape)

    def pack_rope(self, rope: Tensor) -> Tensor:
        """timm's sines beside cosines, (B, 1 or H, N - prefix, 2 Dh), as (tokens, 2 Dh) or (H, tokens, 2 Dh)."""
        still = torch.zeros_like(rope[:, :, :1])
        still[..., still.shape[-1] // 2 :] = 1.0  # prefix tokens are not rotated
        prefix = still.expand(-1, -1, self.shape[1] - rope.shape[2], -1)
        packed = self.pack(torch.cat([prefix, rope], 2).transpose(1, 2)).transpose(0, 1)
        packed = packed[0] if len(packed) == 1 else packed
        self._padded[id(packed)] = packed, rope
        return packed

    def padded(self, arguments: dict) -> dict:
        given = super().padded(arguments)
        return {name: self._padded.get(id(value), (None, value))[1] for name, value in given.items()}


def may_wait(x: Tensor) -> bool:
    """Whether the host may look at the numbers in a tensor: not in compiled code or a CUDA graph."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def packed_tokens(arguments: dict) -> PackedTokens | None:
    """The packed tokens that a layer is called with, if any."""
    return next((value for value in arguments.values() if isinstance(value, PackedTokens)), None)


def call_options(logits: Logits, x: Tensor, shape: tuple[int, int, int]) -> Logits:
    """The keyword arguments of attention for x and shape (B, H, N), or in words why they do not fit."""
    if isinstance(logits, str):
        return logits
    options = {name: value for name, value in logits.items() if name != "mask"}
    mask = logits.get("mask")
    if isinstance(mask, PackedTokens):
        return dict(options, offsets=mask.offsets, longest=mask.longest)
    reason = None if mask is None else _add_mask(options, mask, x, *shape)
    return options if reason is None else reason


def _add_mask(options: dict, mask: Tensor, x: Tensor, B: int, heads: int, N: int) -> str | None:
    """Adds a mask to the options as a bias and lengths; returns in words why it does not fit, or None."""
    if type(mask) is not Tensor or mask.device != x.device:
        return "the mask is no tensor like its input"
    shape = (B, heads, N, N)[-mask.dim() :]
    if mask.dim() not in (2, 4) or any(n not in (1, want) for n, want in zip(mask.shape, shape)):
        return "the mask is not (B, H, N, N) or of a shape that broadcasts to it"
    mask = mask if mask.dim() == 4 else mask[None, None]
    dtype = torch.promote_types(x.dtype, torch.float32)
    if mask.dtype == torch.bool:
        seen = mask
        bias = torch.zeros(mask.shape, dtype=dtype, device=x.device).masked_fill(~mask, float("-inf"))
    elif mask.is_floating_point():
        seen = mask > torch.finfo(mask.dtype).min / 2
        bias = mask.to(dtype)
    else:
        return f"the mask is {mask.dtype}"
    options["key_lengths"] = _last_keys(seen.expand(*seen.shape[:3], N)).expand(B).contiguous()
    bias = bias if "bias" not in options else bias + options["bias"]
    options["bias"] = bias.expand(bias.shape[0], heads, N, N)
    return None


def _last_keys(seen: Tensor) -> Tensor:
    """How many keys to read, (B or 1,), by the keys that queries see, (B or 1, H or 1, N or 1, N)."""
    N = seen.shape[-1]
    sees, keys = seen.any(-1), seen.any(2)
    blind = ~sees & keys if sees.shape[2] == N else ~sees
    blind = blind | ~sees.any(-1, keepdim=True)
    counted = torch.arange(1, N + 1, device=seen.device) * keys.any(1)
    return torch.where(blind.flatten(1).any(1), N, counted.amax(-1))


def rotary_tables(cos: Tensor, sin: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines as attention over x takes them: in its dtype or in fp32."""
    if cos.dtype not in (x.dtype, torch.float32) or torch.is_autocast_enabled(x.device.type):
        cos, sin = cos.float(), sin.float()
    return cos, sin
