"""FLOPs of the operations for torch.utils.flop_counter: those of the layers that they replace.

A multiply-add of a product counts as two, everything else as nothing. Backward counts the products that autograd would
run for the gradients that are needed, and attention's as torch counts those of fused attention, five. What kernels
compute again counts as nothing. Keys that are hidden from a query count as well.

Packed samples count by their lengths, for which the host waits for the device, as it does for torch's own formulas.
Where offsets have no values (FakeTensor, meta), each query counts with `longest` keys, which is an upper bound.
"""

import functools
import math

import torch
from torch import Tensor

from .dispatch import NO_TRITON
from .operation import Registered

_WEIGHTS = ("weight", "in_weight", "up_weight", "out_weight")
_CONSTANT = {"dout", "drop_path", "key_lengths", "offsets", "rows", "starts"}  # `needs` leaves them out
_BELOW = {"images", "x", "norm_weight", "norm_bias"}  # arguments before the first layers
_LAST = {"out_weight", "out_bias", "layer_scale"}  # arguments after attention or the activation


def _pairs(x: Tensor, offsets: Tensor | None, longest: int) -> int:
    """How many pairs of a query and a key a head has; x is (B, N, ...), or (tokens, D) of packed samples."""
    batch, tokens = x.shape[:2] if x.dim() > 2 else (1, x.shape[0])
    if offsets is None:
        return batch * tokens * tokens
    if type(offsets) is not Tensor or offsets.is_meta:
        return tokens * longest
    return sum(length * length for length in offsets.diff().tolist())


def _flops(operation, *args, out_val=None, **kwargs) -> int:
    """FLOPs of a call of an operation or of its backward, whose schema names the arguments."""
    t = dict(zip((argument.name for argument in operation._schema.arguments), args)) | kwargs
    x, forward = next(iter(t.values())), "needs" not in t  # x: the input, or dout, which has its rows
    needed = set() if forward else {k for k, need in zip((k for k in t if k not in _CONSTANT), t["needs"]) if need}
    inner = bool(needed - _LAST)
    rows = math.prod(x.shape[:-1])
    if "images" in t:  # patch_embed's backward takes images only if it has products
        rows = 0 if t["images"] is None else t["images"].numel() // math.prod(t["weight"].shape[1:])
    total = 0
    for name in _WEIGHTS:
        if isinstance(t.get(name), Tensor):
            below = inner if name == "out_weight" else bool(needed & _BELOW)
            total += rows * t[name].numel() * (1 if forward else (name in needed) + below)
    if "offsets" in t:
        width = t["out_weight"].shape[-1] if "out_weight" in t else math.prod(x.shape[-2:])
        products = 2 if forward else 5 * inner
        total += products and products * width * _pairs(x, t["offsets"], t["longest"])
    return 2 * total


def register_formulas() -> None:
    """Adds the formulas to torch's counter; not without Triton, where importing the counter warns."""
    if NO_TRITON is None:
        from torch.utils.flop_counter import register_flop_formula

        for name, operation in Registered.all.items():
            if "linear" in name or "norm" not in name:  # norms have no products
                packet = getattr(torch.ops.vitfast, name)
                register_flop_formula(packet, get_raw=True)(functools.partial(_flops, operation.call))
