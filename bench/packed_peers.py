"""Attention over packed samples as others do it, each a function of q, k, v, all (tokens, H, Dh).

What depends on the sizes alone (offsets, a block mask) is made once, outside of what is timed, as a model makes it once
for all its layers.
"""

import functools
import importlib
from collections.abc import Callable

import clock
import pytest
import torch
import torch.nn.functional as F
from mixes import Mix
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

FLASH_VARLEN = {  # name -> package, the module of its public flash_attn_varlen_func, which has a backward
    "flash-attn 2": ("flash_attn", "flash_attn"),
    "flash-attn 3": ("flash_attn_3", "flash_attn_interface"),
    "flash-attn 4": ("flash_attn_4", "flash_attn.cute"),
}


def offsets_of(mix: Mix) -> Tensor:
    """(S + 1,) int32."""
    return torch.tensor([0, *mix.lengths], device=clock.DEVICE).cumsum(0).int()


def found(package: str, module: str, name: str) -> Callable:
    """A function of a package; skips the case where that is not installed or has none of that name."""
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        pytest.skip(f"{package} cannot be imported: {error}")
    if function is None:
        pytest.skip(f"{package} has no {module}.{name}")
    return function


def flash(name: str, mix: Mix) -> Attention:
    """flash-attn's varlen."""
    package, module = FLASH_VARLEN[name]
    function, offsets, longest = found(package, module, "flash_attn_varlen_func"), offsets_of(mix), mix.longest

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
        result = function(q, k, v, **sizes)
        return result[0] if isinstance(result, tuple) else result  # some versions return the logsumexp too

    return attention


def torch_varlen(mix: Mix) -> Attention:
    """torch.nn.attention.varlen (torch 2.10 and later), with the backend that torch picks."""
    function = found("torch", "torch.nn.attention.varlen", "varlen_attn")
    offsets, longest = offsets_of(mix), mix.longest
    return lambda q, k, v: function(q, k, v, offsets, offsets, longest, longest)


def nested(mix: Mix) -> Attention:
    """SDPA on jagged nested tensors, with the backend that torch picks."""
    offsets = offsets_of(mix).long()
    sizes = dict(min_seqlen=min(mix.lengths), max_seqlen=mix.longest)  # else torch asks the device for them

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        jagged = [torch.nested.nested_tensor_from_jagged(x, offsets, **sizes).transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*jagged).transpose(1, 2).values()

    return attention


def flex_mask(mix: Mix):
    """The block-diagonal mask of flex_attention: blocks without a pair are left out."""
    from torch.nn.attention.flex_attention import create_block_mask

    owner = torch.arange(len(mix.lengths), device=clock.DEVICE).repeat_interleave(
        torch.tensor(mix.lengths, device=clock.DEVICE)
    )
    # compiled, so that the mask of every pair is not in memory
    return create_block_mask(
        lambda b, h, i, j: owner[i] == owner[j], None, None, mix.tokens, mix.tokens, device=clock.DEVICE, _compile=True
    )


def flex(mix: Mix, how: str) -> Attention:
    """Compiled flex_attention over all tokens as one sequence. how: "compile" or "max-autotune"."""
    from harness import compiled
    from torch.nn.attention.flex_attention import flex_attention

    function, mask = compiled(flex_attention, how, fullgraph=True), flex_mask(mix)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]  # views (1, H, tokens, Dh)
        return function(*heads, block_mask=mask)[0].transpose(0, 1)

    return attention


PEERS: dict[str, Callable[[Mix], Attention]] = {
    **{name: functools.partial(flash, name) for name in FLASH_VARLEN},
    "torch varlen": lambda mix: torch_varlen(mix),
    "torch nested": nested,
    "flex compile": lambda mix: flex(mix, "compile"),
    "flex max-autotune": lambda mix: flex(mix, "max-autotune"),
}
