"""`accelerate`: vitfast's operations under the ViTs of other libraries, in place.

How a library builds its layers is data (specs.py, and the tables in timm.py, hugging_face.py, libraries.py). A
layer that vitfast knows gets another class, a subclass of its own, whose forward runs the operations where it can and
calls the library's modules where it cannot. Parameters, names, hooks, copies, pickles, isinstance and what was wrapped
around the model stay as they are. A library is imported only where the model is made of it.
"""

import logging
import sys
from typing import TypeVar, get_args

import torch
from torch import nn

from ..errors import InputError
from ..ops._blocks import Keep
from ..ops.fusable import set_class
from .fallback_log import said
from .registry import (
    accelerated_class,
    original_class,
    register,
    replaceable_modules,
    replacement,
    require_module,
    transformers_attention,
)
from .report import Entry, Report, acceleration_report
from .specs import Attention, Layer, Mlp

__all__ = ["Attention", "Entry", "Layer", "Mlp", "Report", "accelerate", "acceleration_report", "register", "restore"]

Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger("vitfast")


def _set_classes(classes: list[tuple[nn.Module, type]]) -> None:
    """Replaces the classes of modules, and discards code that torch.compile made for the old ones."""
    for module, cls in classes:
        set_class(module, cls)
    # torch 2.11 does not guard on a module's class, 2.15 does: what it compiled before would go on unchanged.
    if classes and "torch._dynamo" in sys.modules and torch.__version__ < "2.15":
        torch.compiler.reset()


def _forget_options(module: nn.Module) -> None:
    """Takes off what an earlier `accelerate` chose for a layer."""
    for name in ("residual_in_fp32", "vitfast_keep"):
        module.__dict__.pop(name, None)


def accelerate(model: Model, residual_in_fp32: bool | None = None, keep: Keep = "least") -> Model:
    """Replaces the ViT layers of a model by vitfast's operations, in place; returns the model.

    It knows timm's (1.0 and later) VisionTransformer, Eva (EVA-02, DINOv3, Perception Encoder), Beit, NaFlexViT and
    their relatives; transformers' (5.10 and later) ViT, DeiT, MAE, MSN, I-JEPA, AST, Vivit, VideoMAE, DPT, YOLOS, CLIP,
    SigLIP, OWL-ViT, DINOv2, DINOv3, AIMv2, BEiT, Data2Vec, InternVL, Pixtral and the towers of Qwen2-VL, 2.5 and 3;
    torchvision's vit_*; open_clip's and OpenAI's CLIP; facebookresearch/dinov2 and /dinov3;
    nn.TransformerEncoderLayer(norm_first=True); and classes given to `register`. If a transformers model has other
    layers, its attention is set to "vitfast" in place of "sdpa", in copies of its configs.

    With images of many sizes, the layers of NaFlexVit and SigLIP 2 run without the padding of a batch, whose tokens are
    zeros in the output. The layers of Pixtral and Qwen run on all images in one row, and each image attends to itself.
    Compiled code and models whose layers have hooks keep padding and masks; an entry "packing" in the report says so.

    Parameters are the same objects under the same names. Every call looks at what a layer holds. The library's own code
    runs if linear layers were replaced (LoRA, quantisation), with parametrisations, hooks, dropout in training or
    causal attention, and if attention weights are wanted. If only q, k, v or the projection were replaced or have
    hooks, these are called, and attention itself stays an operation. The logger "vitfast" says what was replaced and
    what was left, with the reason; `acceleration_report(model)` says it again.

    residual_in_fp32: the dtype of the residual stream under autocast. None keeps that of the original (fp32 if an fp32
    parameter is added to the stream). False takes autocast's dtype, which moves less memory. True takes fp32. Outside
    autocast the stream has the dtype of the weights.

    keep: with "least", backward computes the norms' outputs and the input of each MLP's last layer again. With "all"
    they are kept, which is faster where the memory has room (see ops.attention_block). Of several calls, the last one
    decides about both options.

    Call it before or after you set up DDP, torch.compile, fully_shard and activation checkpointing. Raises InputError
    if `model` is no module, or for another `keep`.
    """
    require_module("accelerate", model)
    if keep not in get_args(Keep):
        raise InputError(f"accelerate: keep must be 'least' or 'all', got {keep!r}")
    modules = replaceable_modules(model).values()
    towers = [module for module in model.modules() if hasattr(accelerated_class(type(module)), "vitfast_tower")]
    originals = [module for module in (*modules, *towers) if original_class(type(module)) is None]
    _set_classes([(module, cls) for module in originals if isinstance(cls := replacement(module), type)])
    for module in modules:
        if hasattr(module, "vitfast_layer"):
            _forget_options(module)
            if residual_in_fp32 is not None:
                module.__dict__["residual_in_fp32"] = residual_in_fp32
            if keep != "least":
                module.__dict__["vitfast_keep"] = keep
    if (interface := transformers_attention()) is not None:
        interface.set_attention(model)
    report = acceleration_report(model)
    for entry in report.left:  # the log does not say it again in a call
        said.add((entry.kind, entry.part, entry.why))
    _log.log(logging.INFO if report.replaced else logging.WARNING, "accelerate: %s", report.summary())
    return model


def restore(model: Model) -> Model:
    """Undoes `accelerate`, in place; returns the model.

    Every module gets back its own class, and a transformers model its own attention.
    """
    require_module("restore", model)
    classes = [(module, original_class(type(module))) for module in model.modules()]
    classes = [(module, cls) for module, cls in classes if cls is not None]
    for module, _ in classes:
        _forget_options(module)
    _set_classes(classes)
    if (interface := transformers_attention()) is not None:
        interface.restore_attention(model)
    return model


transformers_attention()  # for model.set_attn_implementation("vitfast")
