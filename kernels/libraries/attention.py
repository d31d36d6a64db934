"""Attention by libraries: PyTorch's flash, cuDNN and efficient, packages flash-attn-3 and -4.

They are called directly, without autograd, by the conventions of attention/launchers.py: q, k, v, o and do are
(B, N, H, Dh), o is contiguous, lse (B, H, N) is in fp32 and the natural logarithm, which all of these libraries use. So
one provider's backward takes what another's forward left. There is no dropout or mask, and no result aliases an input.

Sources: aten/src/ATen/native/transformers/cuda and cudnn/MHA.cpp of PyTorch; flash-attn-3's
hopper/flash_attn_interface.py and flash-attn-4's flash_attn/cute/interface.py, both of Dao-AILab/flash-attention.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda as backends

aten = torch.ops.aten

# PyTorch's own -> PyTorch's test of whether it can run: by GPU, dtype, sizes and whether the user switched it off.
PYTORCH: dict[str, Callable[[backends.SDPAParams], bool]] = {
    "flash": backends.can_use_flash_attention,
    "cudnn": backends.can_use_cudnn_attention,
    "efficient": backends.can_use_efficient_attention,
}


class Package(NamedTuple):
    """A package's functions and the GPU generations that they run on."""

    module: str
    forward: str
    backward: str
    lse: str  # the name of backward's argument lse
    options: dict[str, bool]  # of forward
    forward_major: tuple[int, ...]
    backward_major: tuple[int, ...]


PACKAGES = {
    "flash_attn_3": Package(
        "flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward", "softmax_lse", {}, (9,), (9,)
    ),
    "flash_attn_4": Package(
        "flash_attn.cute.interface",
        "_flash_attn_fwd",
        "_flash_attn_bwd",
        "lse",
        {"return_lse": True},
        (8, 9, 10, 11, 12),
        (9, 10, 11, 12),
    ),
}
PROVIDERS = (*PYTORCH, *PACKAGES)  # tiles.ATTENTION_LIBRARIES


@functools.cache
def _load(provider: str) -> tuple[ModuleType | None, str]:
    """(the package's module, ""), or (None, why it cannot be used)."""
    package = PACKAGES[provider]
    try:
        module = importlib.import_module(package.module)
    except Exception as error:  # a package built for another PyTorch or GPU fails in its own ways
        missing = isinstance(error, ModuleNotFoundError) and f"{package.module}.".startswith(f"{error.name}.")
        return None, "not installed" if missing else f"import {package.module} fails ({type(error).__name__}: {error})"
    wanted = {
        package.forward: ("q", "k", "v", "softmax_scale", *package.options),
        package.backward: ("q", "k", "v", "out", "dout", package.lse, "softmax_scale", "dq", "dk", "dv"),
    }
    for name, arguments in wanted.items():
        function = getattr(module, name, None)
        try:
            # a custom operation keeps the function that it was made from
            inspect.signature(getattr(function, "_init_fn", function)).bind(**dict.fromkeys(arguments))
        except TypeError as error:
            return None, f"this version's {package.module}.{name} is another than vitfast calls ({error})"
    return module, ""


def _function(provider: str, direction: str) -> Callable:
    """The package's "forward" or "backward"."""
    module, reason = _load(provider)
    if module is None:
        raise RuntimeError(f"attention: {provider} cannot run: {reason}")
    return getattr(module, getattr(PACKAGES[provider], direction))


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, N, H, Dh) -> views (B, H, N, Dh), as PyTorch has them."""
    return tuple(x.transpose(1, 2) for x in tensors)


def unsupported_reason(x: Tensor, provider: str, backward: bool) -> str | None:
    """Why this library cannot run on q = x, or None; shapes count only where x is (B, N, H, Dh)."""
    if provider in PACKAGES and (reason := _load(provider)[1]):
        return reason
    if x.device.type != "cuda" and (provider != "flash" or x.device.type != "cpu"):
        return f"needs an NVIDIA GPU, the tensors are on {x.device}"
    if backward and torch.are_deterministic_algorithms_enabled():
        return "its backward may add in any order, and torch.use_deterministic_algorithms is on"
    if x.dim() == 4 and x.numel() == 0:
        return "the batch is empty"
    return None if x.device.type == "cpu" else _unsupported_on_gpu(provider, x, backward)


def _unsupported_on_gpu(provider: str, x: Tensor, backward: bool) -> str | None:
    if x.dtype not in (torch.float16, torch.bfloat16) and (provider, x.dtype) != ("efficient", torch.float32):
        return f"does not compute in {x.dtype}"
    if provider in PACKAGES:
        package, (major, minor) = PACKAGES[provider], torch.cuda.get_device_capability(x.device)
        runs_on = package.backward_major if backward else package.forward_major
        return None if major in runs_on else f"does not run on a GPU of compute capability {major}.{minor}"
    (q,) = _heads_first(_aligned(x) if x.dim() == 4 else x.new_empty((1, 64, 1, 64)))
    can_use = PYTORCH[provider]
    with torch.cuda.device_of(q):
        if can_use(backends.SDPAParams(q, q, q, None, 0.0, False, False)):
            return None
    return f"torch.backends.cuda.{can_use.__name__} says no to {tuple(x.shape)} of {x.dtype}"


def _aligned(x: Tensor) -> Tensor:
    """x, copied where a row of a head does not start at a multiple of the 16 bytes of a load."""
    step = 16 // x.element_size()
    fits = x.data_ptr() % 16 == 0 and all(stride > 0 and stride % step == 0 for stride in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _forward_pytorch(provider: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(o (B, H, N, Dh), lse), each in the layout that PyTorch returns."""
    qkv = _heads_first(q, k, v)
    if provider == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(*qkv, None, True, 0.0, False, False, scale=scale)[:2]
    if provider == "efficient":
        return aten._scaled_dot_product_efficient_attention(*qkv, None, True, 0.0, False, scale=scale)[:2]
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, False, scale=scale)
    return aten._scaled_dot_product_flash_attention(*qkv, 0.0, False, False, scale=scale)[:2]


def forward(provider: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, H, Dh), unit last stride -> contiguous o (B, N, H, Dh), lse (B, H, N) in fp32."""
    B, N, H, _ = q.shape
    q, k, v = map(_aligned, (q, k, v))
    with torch.cuda.device_of(q):
        if provider in PYTORCH:
            o, lse = _forward_pytorch(provider, q, k, v, scale)
            o = o.transpose(1, 2)
        else:
            options = PACKAGES[provider].options
            o, lse, *_ = _function(provider, "forward")(q=q, k=k, v=v, softmax_scale=scale, **options)
    # efficient pads the N of lse to multiples of 32, and cuDNN's lse may have one more axis of size 1
    return o.contiguous(), lse[:, :, :N].reshape(B, H, N).contiguous()


@functools.cache
def _cudnn_lse_axes(device: torch.device) -> int:
    """Axes of the lse of this PyTorch's cuDNN forward: 4, (B, H, N, 1), or 3 without the last one."""
    q = torch.zeros((1, 1, 64, 64), dtype=torch.float16, device=device)
    return aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, False, scale=1.0)[1].dim()


def _backward_pytorch(provider, q, k, v, o, lse, do, scale) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv (B, H, N, Dh)."""
    B, N, H, _ = q.shape
    do, *qkvo = _heads_first(do, q, k, v, o)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # also given as the offset; only dropout reads them
    if provider == "cudnn":
        lse = lse.view(B, H, N, 1) if _cudnn_lse_axes(q.device) == 4 else lse
        return aten._scaled_dot_product_cudnn_attention_backward(
            do, *qkvo, lse, seed, seed, None, None, None, N, N, 0.0, False, scale=scale
        )
    if provider == "efficient":
        lse = torch.nn.functional.pad(lse, (0, -N % 32), value=float("inf"))  # a query of padding weighs nothing
        *qkv, o = qkvo
        wanted = [True, True, True, False]
        return aten._scaled_dot_product_efficient_attention_backward(
            do, *qkv, None, o, lse, seed, seed, 0.0, wanted, False, scale=scale
        )[:3]
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, *qkvo, lse, 0.0, False, scale=scale)
    return aten._scaled_dot_product_flash_attention_backward(
        do, *qkvo, lse, None, None, N, N, 0.0, False, seed, seed, scale=scale
    )


def backward(
    provider: str, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float, as_qkv: bool
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Returns contiguous dqkv (B, N, 3, H, Dh) where `as_qkv`, else contiguous dq, dk, dv (B, N, H, Dh).

    o and lse are contiguous, as forward returns them. PyTorch's backwards cannot write into dqkv: theirs are copied.
    """
    B, N, H, D = q.shape
    q, k, v, o, do = map(_aligned, (q, k, v, o, do.contiguous()))
    with torch.cuda.device_of(q):
        if provider in PYTORCH:
            grads = _heads_first(*_backward_pytorch(provider, q, k, v, o, lse, do, scale))
            return torch.stack(grads, 2) if as_qkv else tuple(g.contiguous() for g in grads)
        if as_qkv:
            result = torch.empty((B, N, 3, H, D), dtype=q.dtype, device=q.device)
            dq, dk, dv = result.unbind(2)
        else:
            result = dq, dk, dv = tuple(torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
        given = {"q": q, "k": k, "v": v, "out": o, "dout": do, PACKAGES[provider].lse: lse, "softmax_scale": scale}
        _function(provider, "backward")(**given, dq=dq, dk=dk, dv=dv)
    return result
