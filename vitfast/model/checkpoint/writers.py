"""Writes a ViT in each of `WRITERS`; `lacks` says what a format has no place for."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
from torch import nn

from ...errors import InputError, both_ends
from ...run.files import staged
from ...version import __version__
from .. import config as arguments
from ..presets import pair
from . import google, hugging_face
from .files import READERS, make_folder, target
from .formats import differences
from .names import TORCHVISION, State, rename, to_theirs
from .timm import GATED_NAME, ratio_of

logger = logging.getLogger("vitfast")

TIMM_NAMES = {
    (16, 192, 12): "vit_tiny_patch16_224",
    (16, 384, 12): "vit_small_patch16_224",
    (32, 384, 12): "vit_small_patch32_224",
    (16, 768, 12): "vit_base_patch16_224",
    (32, 768, 12): "vit_base_patch32_224",
    (16, 1024, 24): "vit_large_patch16_224",
    (32, 1024, 24): "vit_large_patch32_224",
    (14, 1280, 32): "vit_huge_patch14_224",
}
# The arguments of ViT that timm's VisionTransformer has too. `model_args` lists them all, so that a model of any shape
# can have any of timm's names.
TIMM_ARGS = (
    "img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "qkv_bias", "proj_bias", "init_values", "class_token", "no_embed_class", "reg_tokens", "fc_norm",
    "dynamic_img_size", "act_layer", "pre_norm", "qk_norm", "scale_mlp_norm",
)  # fmt: skip

HEAD, NO_HEAD = "a head", "a model without head"
PRE_LOGITS = "the hidden layer of a pre-training head (pre_logits)"


def tensors(model) -> State:
    """Returns the state dict on the CPU in contiguous tensors of their own memory, for safetensors."""
    state, storages = {}, set()
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        state[name] = value.clone() if storage in storages else value
        storages.add(storage)
    return state


def file_suffix(path: Path) -> str:
    """Returns the suffix of a weights file, "" for the name of a folder (such as "vit-b16.v2")."""
    return path.suffix if path.suffix in READERS else ""


def _write_tensors(state: State, path: Path) -> None:
    """Writes a state dict as safetensors, .pth or .npz, where bfloat16, which NumPy lacks, is float32."""
    if path.suffix == ".npz":
        state = {key: value.float() if value.dtype == torch.bfloat16 else value for key, value in state.items()}
        return np.savez(path, **{key: value.contiguous().numpy() for key, value in state.items()})
    if path.suffix != ".pth":
        return write_safetensors(state, path, {"format": "pt"})
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch.save raises this for a full disk
        raise OSError(f"is the disk full? torch.save says: {both_ends(str(error))}") from error


def write_safetensors(state: State, path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file. Raises OSError if the disk is full."""
    try:
        safetensors.torch.save_file(state, path, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def _write_json(content: dict, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check_readable(model, state: State, config: dict) -> None:
    """Raises InputError if `from_pretrained` could not load the tensors; warns of modules left out."""
    try:
        with torch.device("meta"):
            twin = type(model)(**config)
    except (TypeError, RuntimeError):  # a class with a constructor of its own
        return
    if wrong := differences(twin.state_dict(), state):
        advice = "undo that, or save model.state_dict() with torch.save"
        raise InputError(f"save_pretrained: its layers are not those that its arguments make ({wrong}); {advice}")
    functions = {name: _function(module) for name, module in twin.named_modules()}
    other = [name for name, module in model.named_modules() if name and functions.get(name) != _function(module)]
    if other:
        logger.warning("save_pretrained: from_pretrained will not make %s as it is now", ", ".join(other[:3]))


def _function(module: nn.Module) -> tuple:
    """Returns the class of a module, and its settings that the tensors do not show."""
    return type(module), *(getattr(module, name, None) for name in ("eps", "activation", "num_heads"))


def save(model, folder: str | Path) -> None:
    """Writes model.safetensors and config.json; each is replaced atomically, once both are whole.

    The folder is made if needed. The state dict is written as it is (dtypes too), from any device; config.json holds
    `model.config` (with the class names if the model has them), the library and its version. Raises InputError
    for a model that could not be read back, such as one without its last norm or with a head of the user's own.
    """
    folder = target(folder)
    state, config = tensors(model), arguments.checked(model.config)
    _check_readable(model, state, config)
    header = {"library": "vitfast", "library_version": __version__, "architecture": type(model).__name__}
    make_folder(folder, folder)
    with staged(folder) as scratch:
        _write_tensors(state, scratch / "model.safetensors")
        _write_json({**header, **config}, scratch / "config.json")


def _timm(state: State, config: dict, class_names: tuple[str, ...] | None) -> tuple[State, dict]:
    """Returns the tensors and the JSON of a repository for timm.create_model("local-dir:...")."""
    size = pair(config["img_size"])
    model_args = {name: config[name] for name in TIMM_ARGS} | {"pos_embed": "learn" if "pos_embed" in state else "none"}
    pretrained = dict(
        input_size=(config["in_chans"], *size),
        fixed_input_size=not config["dynamic_img_size"],
        interpolation=config["interpolation"] or "bicubic",
        crop_pct=config["crop_pct"] or 1.0,
        crop_mode=config["crop_mode"] or "center",
        mean=config["mean"],
        std=config["std"],
        num_classes=config["num_classes"],
        pool_size=None,
        first_conv="patch_embed.proj",
        classifier="head",
    )
    if config["norm_layer"] != "layernorm":  # only where needed: it would replace the eps that timm's name implies
        model_args["norm_layer"] = config["norm_layer"]
    name = TIMM_NAMES.get((config["patch_size"], config["embed_dim"], config["depth"]), "vit_base_patch16_224")
    if config["swiglu_mlp"]:  # only a name can say it in JSON; its mlp_ratio counts gate and up
        name, model_args["act_layer"] = GATED_NAME, "silu"
        model_args["mlp_ratio"] = ratio_of(state["blocks.0.mlp.fc1.weight"].shape[0], config["embed_dim"])
    elif config["norm_eps"] == 1e-5 and config["norm_layer"] == "layernorm":
        name = "vit_base_patch16_clip_224"  # this name implies the eps, and model_args says the rest
    content = dict(
        architecture=name,
        num_classes=config["num_classes"],
        num_features=config["embed_dim"],
        global_pool=config["global_pool"],
    )
    content |= {"label_names": class_names} if class_names else {}
    return state, {"config.json": content | dict(model_args=model_args, pretrained_cfg=pretrained)}


# For each format the suffixes of its file ("" for a folder), and a function that makes its tensors and the content of
# its JSON files from the state dict, the configuration and the class names.
WRITERS: dict[str, tuple[tuple[str, ...], Callable | None]] = {
    "vitfast": (("",), None),  # see save
    "timm": (("", ".safetensors", ".pth"), _timm),
    "huggingface": (("",), hugging_face.to_repository),
    "npz": ((".npz",), lambda state, config, names: (google.to_arrays(state, config), {})),
    "torchvision": ((".safetensors", ".pth"), lambda state, config, names: (rename(state, to_theirs(TORCHVISION)), {})),
}


def write_as(model: nn.Module, form: str, path: Path) -> None:
    """Writes a model as a file or folder in the format `form`, one of WRITERS."""
    if form == "vitfast":
        return save(model, path)
    state, content = WRITERS[form][1](tensors(model), arguments.checked(model.config), model.class_names)
    if file_suffix(path):
        return _write_tensors(state, path)
    path.mkdir()
    for name, fields in content.items():
        _write_json(fields, path / name)
    _write_tensors(state, path / "model.safetensors")


def lacks(form: str, config: dict) -> dict[str, bool]:
    """Returns the features that a format lacks, and whether a model with this `config` has them."""
    c, classic = (
        SimpleNamespace(**config),
        "vit clip siglip npz torchvision",
    )  # `classic`: the paper's blocks, but for norms
    (height, width), (p, q) = pair(c.img_size), pair(c.patch_size)
    table, gelu = c.pos_embed not in ("none", ""), c.act_layer in ("gelu", "gelu_tanh")
    other_tables = c.pos_embed in ("learn2d", "factorized", "relative") or c.pos_embed_at != "stem"
    # The feature's name in errors, whether the model has it, the formats (or transformers' families) without it.
    features = (
        ("register tokens", c.reg_tokens > 0, classic),
        ("LayerScale", c.init_values, classic),
        ("a model without class token", not c.class_token, "vit clip dinov3 torchvision"),
        ("positions for patches alone (no_embed_class)", c.class_token and c.no_embed_class, "vit clip torchvision"),
        ("a model without positions", not table, classic),
        ("rotary positions (rope)", c.rope is not None, f"timm {classic}"),
        ("a position table beside rotary positions (pos_embed)", table, "dinov3"),
        ("a model without LayerScale (init_values)", not c.init_values, "dinov3"),
        ("a gated MLP (swiglu_mlp)", c.swiglu_mlp, classic),
        ("a gated MLP and a MAP head", c.swiglu_mlp and c.global_pool == "map", "timm"),
        ("a norm before the blocks (pre_norm)", c.pre_norm, "vit dinov3 siglip npz torchvision"),
        ("norms of queries and keys (qk_norm)", c.qk_norm, f"dinov3 {classic}"),
        ("a norm in the MLP (scale_mlp_norm)", c.scale_mlp_norm, f"dinov3 {classic}"),
        ("RMSNorm (norm_layer)", c.norm_layer != "layernorm", f"dinov3 {classic}"),
        ("another activation than GELU (act_layer)", not c.swiglu_mlp and not gelu, "npz torchvision"),
        ("a MAP head (global_pool)", c.global_pool == "map", "dinov3 clip npz"),
        (HEAD, c.num_classes > 0, "dinov3 siglip"),
        ("prefix tokens (class_token, reg_tokens)", c.class_token or c.reg_tokens > 0, "siglip"),
        ("other positions than one table at the stem", other_tables, f"timm dinov3 {classic}"),
        ("the ResNet of a hybrid", c.backbone is not None, f"timm dinov3 {classic}"),
        ("a norm after pooling (fc_norm)", c.fc_norm, f"dinov3 {classic}"),
        (PRE_LOGITS, c.representation_size, "timm vit dinov3 clip siglip"),
        ("qkv without bias", not c.qkv_bias, "clip siglip npz torchvision"),
        ("linear layers without bias (proj_bias)", not c.proj_bias, classic),
        ("another pooling than the class token", c.num_classes and c.global_pool != "token", "vit clip torchvision"),
        (NO_HEAD, c.num_classes == 0, "torchvision"),
        ("images or patches that are no squares", height != width or p != q, "clip siglip torchvision"),
        ("other than 3 channels", c.in_chans != 3, "torchvision"),
    )
    name = hugging_face.family(config) if form == "huggingface" else form
    return {text: bool(has) for text, has, without in features if name in without.split()}
