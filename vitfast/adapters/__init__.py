"""`accelerate`: vitfast's operations under the ViTs of other libraries, in place.

How a library builds its layers is data (descriptions.py, and the tables in timm.py, hugging_face.py, libraries.py). A
layer that vitfast knows gets another class, a subclass of its own, whose forward runs the operations where it can and
calls the library's modules where it cannot. Parameters, names, hooks, copies, pickles, isinstance and what was wrapped
around the model stay as they are. A library is imported only where the model is made of it.
"""

import contextlib
import logging
import sys

import torch
from torch import nn

from ..errors import InputError
from ..ops.fusable import set_class
from .descriptions import Attention, Layer, Mlp
from .registry import known_classes, register, replaceable_modules, replacement_class, towers, unsupported_reason
from .report import Entry, Report, describe

__all__ = [
    "Attention",
    "Entry",
    "Layer",
    "Mlp",
    "Report",
    "accelerate",
    "acceleration_report",
    "register",
    "restore",
]

_log = logging.getLogger("vitfast")


def _require_module(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def _set_classes(classes: list[tuple[nn.Module, type]]) -> None:
    """Replaces the classes of modules, and makes torch.compile look again."""
    for module, cls in classes:
        set_class(module, cls)
    # torch 2.11 does not guard on a module's class, 2.15 does: what it compiled before would go on unchanged.
    if classes and "torch._dynamo" in sys.modules and torch.__version__ < "2.15":
        torch.compiler.reset()


def accelerate(model: nn.Module, residual_in_fp32: bool | None = None) -> nn.Module:
    """Puts vitfast's operations under the ViT layers of a model, in place; returns the model.

    timm's (1.0 and later) VisionTransformer, Eva (EVA-02, DINOv3, Perception Encoder), Beit, NaFlexViT and their
    relatives; transformers' (5 and later) ViT, DeiT, MAE, MSN, I-JEPA, AST, Vivit, VideoMAE, DPT, YOLOS, CLIP, SigLIP,
    OWL-ViT, DINOv2, DINOv3, AIMv2, BEiT, Data2Vec, InternVL, Pixtral and the towers of Qwen2-VL, 2.5 and 3;
    torchvision's vit_*; open_clip's and OpenAI's CLIP; facebookresearch/dinov2 and /dinov3;
    nn.TransformerEncoderLayer(norm_first=True); and what `register` was given. Where a transformers model has other
    layers, its attention is set to "vitfast" in place of "sdpa", in configs of its own.

    Images of many sizes: the layers of NaFlexVit and SigLIP 2 run without the padding of a batch, whose tokens are
    zeros behind them; Pixtral's and Qwen's on images in one row, each attending to itself. Compiled code, and a model
    whose layers have hooks, keeps padding and masks; the report has an entry "packing" that says so.

    Parameters are the same objects under the same names. What a layer holds is looked at in every call: replaced linear
    layers (LoRA, quantisation), parametrisations, hooks, dropout in training, causal attention and requests for
    attention weights run the library's own code. What was replaced and what was left, with the reason, is logged by the
    logger "vitfast"; `acceleration_report(model)` says it again.

    residual_in_fp32: the residual stream under autocast. None keeps the original's dtype (fp32 where a parameter of
    fp32 is added to it), False takes autocast's, which is faster, True fp32. Outside autocast the stream has the dtype
    of the weights.

    Call it before or after DDP, torch.compile, fully_shard and activation checkpointing are set up. Raises InputError
    for what is no module.
    """
    _require_module("accelerate", model)
    known = known_classes(model)
    modules = replaceable_modules(model, known).values()
    _set_classes(
        [
            (module, replacement_class(type(module), known.ours))
            for module in (*modules, *towers(model, known))
            if replacement_class(type(module), known.originals) is None and unsupported_reason(module, known) is None
        ]
    )
    for module in modules:
        if hasattr(module, "vitfast_layer"):
            module.__dict__.pop("residual_in_fp32", None)
            if residual_in_fp32 is not None:
                module.residual_in_fp32 = residual_in_fp32
    interface = sys.modules.get(f"{__name__}.attention_interface")
    if interface is not None:
        interface.set_attention(model)
    report = describe(model).told()
    _log.log(logging.INFO if report.replaced else logging.WARNING, "accelerate: %s", report.summary())
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undoes `accelerate`; returns the model.

    Every module has the class it came with, and transformers' attention is what it was.
    """
    _require_module("restore", model)
    originals = known_classes(model).originals
    classes = [(module, replacement_class(type(module), originals)) for module in model.modules()]
    classes = [(module, cls) for module, cls in classes if cls is not None]
    for module, _ in classes:
        module.__dict__.pop("residual_in_fp32", None)
    _set_classes(classes)
    interface = sys.modules.get(f"{__name__}.attention_interface")
    if interface is not None:
        interface.restore_attention(model)
    return model


def acceleration_report(model: nn.Module) -> Report:
    """The parts of a model that run on vitfast's operations now, and those that do not and why.

    Print it; `.replaced` and `.left` are lists of entries. It looks at the modules as they are now, in training or not,
    and at each one's last call outside of compiled code: what only a call shows, such as causal attention, counts from
    then on, and the logger "vitfast" says it once, compiled or not. An operation runs a kernel on a GPU, and
    plain PyTorch elsewhere, which the last line says. vitfast's own models and `set_attn_implementation("vitfast")`
    are in it too.
    """
    _require_module("acceleration_report", model)
    return describe(model)


if "transformers.modeling_utils" in sys.modules:
    with contextlib.suppress(ImportError):  # transformers 4 has no registry of masks
        from . import attention_interface  # noqa: F401  model.set_attn_implementation("vitfast")
