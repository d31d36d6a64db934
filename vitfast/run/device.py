"""The device of a run and the dtype of its matrix products."""

import contextlib

import torch

from ..errors import InputError


def choose_device(name: str) -> torch.device:
    """The device cpu, cuda or cuda:N; "" picks CUDA if present. Raises InputError for an absent device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if count else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"no device {name}; known are cpu, cuda and cuda:N")
    if device.type == "cuda" and not count:
        raise InputError("no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"no device {name}; there are {count}: cuda:0 to cuda:{count - 1}")
    return device


def autocast_dtype(amp: str, device: torch.device) -> torch.dtype | None:
    """autocast's dtype for amp "auto" (bf16 on CUDA), "bf16", "fp16" or "none"; None: fp32."""
    name = amp if amp != "auto" else "bf16" if device.type == "cuda" else "none"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}[name]


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """torch.autocast in `dtype`, nothing where that is None."""
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()
