"""`accelerate`: vitfast's operations under the ViTs of other libraries, in place.

Encoder layers and what stands around them are found by structure (structure.py), and each is run through the compile
backend in place, its graph eagerly (backend/eager.py). Parameters, names, classes and hooks stay as they are. What
Inductor compiles of the model afterwards is rewritten too (backend/inductor.py).
"""

import contextlib
import importlib
import logging
import sys
from collections import Counter
from typing import TypeVar, get_args

from torch import nn

from ..errors import InputError
from ..ops.blocks import Keep
from .report import Entry, Report, acceleration_report
from .structure import is_ours, parts_of, require_module

__all__ = ["Entry", "Report", "accelerate", "acceleration_report", "restore"]

Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger("vitfast")


def _register_attention() -> None:
    """Puts "vitfast" into transformers' registry of attentions, where transformers is imported."""
    if "transformers.modeling_utils" in sys.modules:
        with contextlib.suppress(ImportError):  # transformers 4 has no registry of masks
            importlib.import_module(f"{__name__}.attention_interface")


def accelerate(
    model: Model, residual_in_fp32: bool | None = None, keep: Keep = "least", *, pack: bool = False
) -> Model:
    """Replaces the ViT layers of a model by vitfast's operations, in place; returns the model.

    The layers are found by structure: modules of one class in a list or sequence, with a norm and linear layers inside.
    So are embeddings, norms and pooling heads around them. At its first call in each mode (training, autocast,
    gradients) and for at most two kinds of sizes, the code of one layer is captured, as torch.compile does it; what
    vitfast's operations compute is proven by numbers, and replaced. The rest runs as it is.

    Parameters, names and classes are the same. LoRA, hooks and other changes are seen at the next call. The logger
    "vitfast" says what was found; `acceleration_report(model)` says it again, and why the rest was left. Copies,
    exports and torch.compile: docs/reference/accelerate.md.

    residual_in_fp32: the dtype of the residual stream under autocast. None keeps that of the original (fp32 if an fp32
    parameter is added to the stream). False takes autocast's dtype, which moves less memory. True takes fp32. Outside
    autocast the stream has the dtype of the weights.

    keep: with "least", backward computes the norms' outputs and the input of each MLP's last layer again. With "all"
    they are kept, which is faster where the memory has room (see ops.attention_block). Of several calls, the last one
    decides about both options.

    pack: whether batches of images of many sizes run without their padding: those of timm's NaFlexVit and SigLIP 2. The
    outputs of padding are then other numbers than the library's, in `last_hidden_state` for example. Pixtral writes no
    mask of all pairs of tokens. An entry "packing" in the report says if the last call did so, and why not. In each
    mode the first call runs the padded way too, and compares. Hooks, dropout and drop path in training, outputs of all
    layers, CUDA graphs and compiled code keep the padding.

    Call it before or after you set up DDP, torch.compile, fully_shard and activation checkpointing. Raises InputError
    if `model` is no module, or for another `keep`.
    """
    require_module("accelerate", model)
    if keep not in get_args(Keep):
        raise InputError(f"accelerate: keep must be 'least' or 'all', got {keep!r}")
    _register_attention()
    parts = parts_of(model)
    from . import in_place  # here, because torch._dynamo takes a second to import

    in_place.install(model, parts, residual_in_fp32, keep, pack)
    classes = ", ".join(f"{n} x {kind}" for kind, n in Counter(type(part.module).__name__ for part in parts).items())
    ours = any(map(is_ours, model.modules()))
    nothing = "runs vitfast's operations already" if ours else "has nothing that vitfast replaces"
    text = f": {classes}; the first call of each compiles it" if parts else f" {nothing}"
    _log.log(logging.INFO if parts or ours else logging.WARNING, "accelerate: %s%s", type(model).__name__, text)
    return model


def restore(model: Model) -> Model:
    """Undoes `accelerate`, in place; returns the model."""
    require_module("restore", model)
    from . import in_place  # as above

    in_place.remove(model)
    return model


_register_attention()  # for model.set_attn_implementation("vitfast")
