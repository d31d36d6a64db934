"""The options of attention that act on its logits: rotary positions, a bias, which keys count."""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Constant = Annotated[Tensor, "constant"]  # without a gradient


class AttentionOptions(NamedTuple):
    """The options of attention over (B, N, H, Dh); the tensors come first, as the operations take them."""

    # (N - num_prefix, R), (H, ...) or (B or 1, H or 1, ...); R: Dh, or Dh / 2 where a pair of columns has one number
    cos: Tensor | None = None
    sin: Tensor | None = None
    bias: Tensor | None = None  # (H, N, N) or (B or 1, H, N, N)
    key_lengths: Constant | None = None  # (B,)
    offsets: Constant | None = None  # (S + 1,), of packed samples: then B is 1, and num_prefix 0
    interleaved: bool = False
    num_prefix: int = 0
    longest: int = 0  # tokens of the longest packed sample, or more

    def suffix(self, head_dim: int) -> str:
        """The end of the shape class: "r" rope, "f" rope (Dh wide), "b" bias, "k" key lengths, "p" packed."""
        rope = "" if self.cos is None else "f" if self.cos.shape[-1] == head_dim else "r"
        keys = "p" if self.offsets is not None else "k" * (self.key_lengths is not None)
        return rope + "b" * (self.bias is not None) + keys

    @property
    def keywords(self) -> dict:
        """The same options as keyword arguments of ref.attention, without `longest`."""
        layout = "interleaved" if self.interleaved else "half"
        rope = dict(rope=(self.cos, self.sin), rope_layout=layout, num_prefix=self.num_prefix)
        masks = dict(bias=self.bias, key_lengths=self.key_lengths, offsets=self.offsets)
        return masks if self.cos is None else masks | rope


PLAIN = AttentionOptions()


def as_packed(options: AttentionOptions, q: Tensor) -> AttentionOptions:
    """Turns options for samples of one size, q (B, N, H, Dh), without masks, into those of packed ones."""
    B, N = q.shape[:2]
    offsets = torch.arange(B + 1, dtype=torch.int32, device=q.device) * N
    if options.cos is not None:
        pairs = (options.cos, 1.0), (options.sin, 0.0)  # prefix tokens are rotated by angle 0
        cos, sin = (_packed_table(table, B, still, options.num_prefix) for table, still in pairs)
        options = options._replace(cos=cos, sin=sin)
    return options._replace(offsets=offsets, num_prefix=0, longest=N)


def _packed_table(table: Tensor, B: int, still: float, prefix: int) -> Tensor:
    """Expands cos or sin (..., N - prefix, R) to each token of B samples, (B N, R) or (H, B N, R).

    still: the number for prefix tokens, which leaves a token as it is.
    """
    table = F.pad(table.reshape((1,) * (4 - table.dim()) + table.shape), (0, 0, prefix, 0), value=still)
    table = table.expand(B, -1, -1, -1).transpose(0, 1).flatten(1, 2)
    return table[0] if len(table) == 1 else table
