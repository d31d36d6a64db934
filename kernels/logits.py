"""The options of attention that act on its logits: rotary positions, a bias, lengths of the keys."""

from typing import NamedTuple

from torch import Tensor


class Logits(NamedTuple):
    """Options of attention over (B, N, H, Dh); tensors first, as the operations take them."""

    cos: Tensor | None = (
        None  # (N - num_prefix, R), (H, ...) or (B or 1, H or 1, ...); R: Dh, or Dh / 2, one for a pair
    )
    sin: Tensor | None = None
    bias: Tensor | None = None  # (H, N, N) or (B or 1, H, N, N)
    key_lengths: Tensor | None = None  # (B,)
    interleaved: bool = False
    num_prefix: int = 0

    def suffix(self, head_dim: int) -> str:
        """Of the shape class: "r" rope, "f" rope of tables Dh wide, "b" a bias, "k" lengths of keys."""
        rope = "" if self.cos is None else "f" if self.cos.shape[-1] == head_dim else "r"
        return rope + "b" * (self.bias is not None) + "k" * (self.key_lengths is not None)

    @property
    def options(self) -> dict:
        """Keyword arguments of ref.attention."""
        layout = "interleaved" if self.interleaved else "half"
        rope = dict(rope=(self.cos, self.sin), rope_layout=layout, num_prefix=self.num_prefix)
        return dict(bias=self.bias, key_lengths=self.key_lengths, **(rope if self.cos is not None else {}))


PLAIN = Logits()
