"""Norms, activations and other things of the libraries, by their full names."""

import importlib
import sys
from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

from ..ops.fusable import full_name

LAYER_NORMS = (
    "torch.nn.modules.normalization.LayerNorm",
    "timm.layers.norm.LayerNorm",
    "open_clip.transformer.LayerNorm",
    "clip.model.LayerNorm",
)
RMS_NORMS = (
    "torch.nn.modules.normalization.RMSNorm",
    "timm.layers.norm.RmsNorm",
    "transformers.models.aimv2.modeling_aimv2.Aimv2RMSNorm",
    "transformers.models.internvl.modeling_internvl.InternVLVisionRMSNorm",
    "transformers.models.pixtral.modeling_pixtral.PixtralRMSNorm",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm",
)


def _gelu(module: nn.Module) -> str:
    return "gelu_tanh" if module.approximate == "tanh" else "gelu"


def _transformers_tanh(module: nn.Module) -> str | None:
    return "gelu_tanh" if getattr(module.act, "keywords", None) == {"approximate": "tanh"} else None


# The operations' name of each, or a function of the module that returns it, or None if they do not compute the same.
ACTIVATIONS: dict[str, str | Callable[[nn.Module], str | None]] = {
    "torch.nn.modules.activation.GELU": _gelu,
    "torch.nn.modules.activation.SiLU": "silu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "timm.layers.activations.Swish": "silu",
    "transformers.activations.GELUActivation": lambda module: "gelu" if module.act is F.gelu else None,
    "transformers.activations.GELUTanh": _transformers_tanh,
    "transformers.activations.FastGELUActivation": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
    "open_clip.transformer.QuickGELU": "quick_gelu",
    "clip.model.QuickGELU": "quick_gelu",
}
_FUNCTIONS = ((F.gelu, "gelu"), (F.silu, "silu"))


def loaded(names) -> tuple[type, ...]:
    """The classes of these names whose files are imported."""
    found = []
    for name in names:
        module, _, cls = name.rpartition(".")
        if hasattr(sys.modules.get(module), cls):
            found.append(getattr(sys.modules[module], cls))
    return tuple(found)


def attention_layers(model: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Attention layers that take their attention from transformers' registry, by name; name: the model's."""
    found = {path: module for path, module in model.named_modules(prefix=name) if "Attention" in type(module).__name__}
    return {path: module for path, module in found.items() if attention_name(module) is not None}


def attention_name(module: nn.Module) -> str | None:
    """Under which name a layer of transformers takes its attention out of the registry."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def imported(value):
    """The thing that "module:name" names, imported now; any other value itself."""
    if not isinstance(value, str) or ":" not in value:
        return value
    module, _, name = value.partition(":")
    return getattr(importlib.import_module(module), name)


def activation(act) -> str | None:
    """The operations' name of an activation, a module or a function; None where they have none."""
    if not isinstance(act, nn.Module):
        return next((name for function, name in _FUNCTIONS if act is function), None)
    name = ACTIVATIONS.get(full_name(type(act)))
    return name(act) if callable(name) else name


def norm_kind(norm: nn.Module) -> str:
    """ "rms" for a class with RMSNorm in its name, else "layer"; check.py finds mistakes in this."""
    return "rms" if "rmsnorm" in type(norm).__name__.lower() else "layer"


def norm_eps(norm: nn.Module) -> float | None:
    """The eps of a norm; None for an nn.RMSNorm whose eps depends on the dtype of its input."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
