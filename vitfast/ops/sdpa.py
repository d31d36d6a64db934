"""scaled_dot_product_attention by our kernels, an implementation that torch.nn.attention activates.

After `torch.nn.attention.activate_flash_attention_impl("vitfast")` the fused attentions that PyTorch chooses from on
CUDA (flash, cuDNN's and the memory-efficient one) are ours for the calls that ours covers, and PyTorch's for the rest.
What forward keeps for backward is the same in all of them, so that either may follow the other.
"""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.library import Library

from ._dispatch import NO_TRITON, Call, current_mode, put_before, reason_for_plain
from .attention import unsupported_reason

if NO_TRITON is None:
    from ..kernels.attention import launchers as kernels

FUSED = ("flash", "cudnn", "efficient")


def register() -> None:
    """Makes the name "vitfast" known to torch.nn.attention, where this PyTorch has the registry."""
    known = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if known is not None and NO_TRITON is None:
        known("vitfast", register_fn=activate)


def activate(key: str = "CUDA") -> SimpleNamespace:
    """Puts our attention in front of PyTorch's for the tensors of a dispatch key.

    Nothing changes in a PyTorch that has no fused attention for it, as one without CUDA. The result's remove(), which
    torch.nn.attention calls, undoes it.
    """
    library = Library("aten", "IMPL")
    for name in FUSED:
        for suffix, direction, ours in (("", "attention_fwd", _forward), ("_backward", "attention_bwd", _backward)):

            def where_covered(call: Call, name=name, direction=direction, ours=ours):
                return ours(name, call.given) if _covers(call.given, direction) else call.run()

            operation = f"_scaled_dot_product_{name}_attention{suffix}"
            put_before(library, operation, key, lambda: current_mode() != "off", where_covered)
    return SimpleNamespace(remove=library._destroy)


def _covers(given: dict, direction: str) -> bool:
    """Whether our kernels compute this call, and the table names them rather than a kernel of PyTorch's."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    masked = given.get("attn_bias") is not None or given["is_causal"] or given.get("return_debug_mask")
    if masked or given["dropout_p"] != 0 or q.dim() != 4 or not q.numel() or not q.shape == k.shape == v.shape:
        return False
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return False
    if reason_for_plain(q, unsupported_reason(q.shape[-1], _scale(given))) is not None:
        return False
    return not kernels.is_of_pytorch(direction, q.transpose(1, 2))


@functools.cache
def _cudnn_lse_axes() -> int:
    """The axes of cuDNN's lse in this PyTorch: 4 for (B, H, N, 1), 3 for (B, H, N)."""
    q = torch.empty((1, 1, 1, 64), device="meta")
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1].dim()


def _scale(given: dict) -> float:
    return given["query"].shape[-1] ** -0.5 if given["scale"] is None else given["scale"]


def _forward(name: str, given: dict) -> tuple:
    """The outputs of the operation's schema; those that only dropout reads are not filled."""
    query = given["query"]
    q, k, v = (given[each].transpose(1, 2) for each in ("query", "key", "value"))
    out = q.new_empty(q.shape) if name == "efficient" else torch.empty_like(query).transpose(1, 2)
    found, lse = kernels.attention_fwd(q, k, v, _scale(given), o=out)
    out = (out if found is out else out.copy_(found)).transpose(1, 2)
    N, seed = q.shape[1], functools.partial(q.new_empty, (), dtype=torch.int64)
    if name == "efficient":  # whose lse has rows of a multiple of 32
        padded = torch.nn.functional.pad(lse, (0, -N % 32), value=float("inf"))
        return out, padded if given["compute_log_sumexp"] else lse.new_empty(*lse.shape[:2], 0), seed(), seed()
    if name == "cudnn":
        lse = lse.reshape(*lse.shape, *(1,) * (_cudnn_lse_axes() - 3))
        return out, lse, None, None, N, N, seed(), seed(), None
    state, unused = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return out, lse, None, None, N, N, state, unused, q.new_empty(0)


def _backward(name: str, given: dict) -> tuple[Tensor | None, ...]:
    """Gradients of query, key and value, and of the bias (None) where the schema has it."""
    inputs = [given[each] for each in ("query", "key", "value")]
    q, k, v, o = (x.transpose(1, 2) for x in (*inputs, given["out"]))
    do = given["grad_out_" if name == "efficient" else "grad_out"].transpose(1, 2)
    do = do if do.stride(-1) == 1 else do.contiguous()
    lse = given["logsumexp"].flatten(2)[..., : q.shape[1]].contiguous()
    grads, _ = kernels.attention_bwd(q, k, v, o, lse, do, _scale(given), as_qkv=False)
    grads = tuple(x.transpose(1, 2) for x in grads)
    if name == "efficient":
        return *grads, None
    return tuple(map(_laid_out_like, grads, inputs))


def _laid_out_like(x: Tensor, other: Tensor) -> Tensor:
    """x with the strides of empty_like(other), which compiled code reckons with."""
    same = x.stride() == torch.empty_like(other, device="meta").stride()
    return x if same else torch.empty_like(other).copy_(x)
