"""The formats that are written: what each has no place for, its names, layouts and files."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from .. import arguments
from ..errors import InputError, both_ends
from ..files import write_all_atomically
from ..presets import pair
from ..version import __version__
from . import hugging_face
from .files import READERS, make_folder, target
from .formats import differences
from .names import BIG_VISION, GOOGLE, HUGGING_FACE, TORCHVISION, Renames, State, rename, to_theirs

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
# Arguments of ViT that timm's VisionTransformer has too; `model_args` lists them all, so that any of its names can
# carry any shape.
TIMM_ARGS = (
    "img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "qkv_bias", "proj_bias", "init_values", "class_token", "no_embed_class", "reg_tokens", "fc_norm",
    "dynamic_img_size", "act_layer",
)  # fmt: skip

HUGGING_FACE_NAMES = to_theirs(HUGGING_FACE)
TORCHVISION_NAMES = to_theirs(TORCHVISION)
GOOGLE_NAMES: Renames = (
    (r"\.", "/"),
    *to_theirs(GOOGLE),
    (r"((LayerNorm_\d|encoder_norm)/)weight$", r"\1scale"),
    (r"/weight$", "/kernel"),
)
# PyTorch's layouts to Flax's, w for the array and h for the number of heads.
GOOGLE_LAYOUTS = (
    (r"^embedding/kernel$", lambda w, h: w.permute(2, 3, 1, 0)),  # (D, C, P, Q) -> (P, Q, C, D)
    (r"/(query|key|value)/kernel$", lambda w, h: w.T.unflatten(1, (h, -1))),  # (H*Dh, D) -> (D, H, Dh)
    (r"/(query|key|value)/bias$", lambda w, h: w.unflatten(0, (h, -1))),  # (H*Dh,) -> (H, Dh)
    (r"/out/kernel$", lambda w, h: w.T.unflatten(0, (h, -1))),  # (D, H*Dh) -> (H, Dh, D)
    (r"(/Dense_[01]|^head|^pre_logits)/kernel$", lambda w, h: w.T),
)

# What a format may have no place for: how the error calls it, and whether a model (its configuration) has it.
FEATURES: dict[str, tuple[str, Callable[[dict], bool]]] = {
    "registers": ("register tokens", lambda c: c["reg_tokens"] > 0),
    "layer_scale": ("LayerScale", lambda c: bool(c["init_values"])),
    "no_class_token": ("a model without class token", lambda c: not c["class_token"]),
    "patch_positions": (
        "positions for patches alone (no_embed_class)",
        lambda c: c["class_token"] and c["no_embed_class"],
    ),
    "no_positions": ("a model without positions", lambda c: c["pos_embed"] in ("none", "")),
    "positions": (
        "other positions than one table at the stem",
        lambda c: c["pos_embed"] in ("learn2d", "relative") or c["pos_embed_at"] != "stem",
    ),
    "hybrid": ("the ResNet of a hybrid", lambda c: c["backbone"] is not None),
    "fc_norm": ("a norm after pooling (fc_norm)", lambda c: bool(c["fc_norm"])),
    "pre_logits": ("the hidden layer of a pre-training head (pre_logits)", lambda c: bool(c["representation_size"])),
    "no_qkv_bias": ("qkv without bias", lambda c: not c["qkv_bias"]),
    "no_bias": ("linear layers without bias (proj_bias)", lambda c: not c["proj_bias"]),
    "pooling": ("another pooling than the class token", lambda c: c["num_classes"] > 0 and c["global_pool"] != "token"),
    "no_head": ("a model without head", lambda c: c["num_classes"] == 0),
    "no_square": (
        "images or patches that are no squares",
        lambda c: any(h != w for h, w in (pair(c["img_size"]), pair(c["patch_size"]))),
    ),
    "channels": ("other than 3 channels", lambda c: c["in_chans"] != 3),
}


@dataclass(frozen=True)
class Writer:
    """One format.

    suffixes: of the file it writes, "" for a folder. write: (model, path) -> None, writes the files. lacks: the keys of
    FEATURES that it has no place for.
    """

    suffixes: tuple[str, ...]
    write: Callable[[nn.Module, Path], None]
    lacks: tuple[str, ...] = ()


def tensors(model) -> State:
    """The state dict on the CPU, contiguous, no two tensors in the same memory (for safetensors)."""
    state, storages = {}, set()
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        state[name] = value.clone() if storage in storages else value
        storages.add(storage)
    return state


def file_suffix(path: Path) -> str:
    """The suffix of a weights file, "" for any other name, which is that of a folder ("vit-b16.v2")."""
    return path.suffix if path.suffix in READERS else ""


def _write_tensors(state: State, path: Path) -> None:
    """A state dict as safetensors, or to a .pth as torch.save writes it (which `weights_only` reads)."""
    if path.suffix != ".pth":
        return write_safetensors(state, path, {"format": "pt"})
    try:
        torch.save(state, path)
    except RuntimeError as error:  # how it tells of a full disk
        raise OSError(f"is the disk full? torch.save says: {both_ends(str(error))}") from error


def write_safetensors(state: State, path: Path, metadata: dict[str, str]) -> None:
    """A safetensors file. Raises OSError where the disk is full."""
    try:
        safetensors.torch.save_file(state, path, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def _write_json(content: dict, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(model) -> dict:
    """`model.config` as JSON holds it. Raises InputError for a value that no reader would take."""
    return arguments.checked(model.config)


def _check_readable(model, state: State, config: dict) -> None:
    """Raises InputError for a model that `from_pretrained` would not make of its configuration."""
    try:
        with torch.device("meta"):
            twin = type(model)(**config)
    except (TypeError, RuntimeError):  # a class with a constructor of its own
        return
    if wrong := differences(twin.state_dict(), state):
        advice = "undo that, or save model.state_dict() with torch.save"
        raise InputError(f"save_pretrained: its layers are not those that its arguments make ({wrong}); {advice}")
    made = {name: _function(module) for name, module in twin.named_modules()}
    other = [name for name, module in model.named_modules() if name and made.get(name) != _function(module)]
    if other:
        logger.warning("save_pretrained: from_pretrained will not make %s as it is now", ", ".join(other[:3]))


def _function(module: nn.Module) -> tuple:
    """The class of a module, and what else of its function is not in the tensors."""
    return type(module), *(getattr(module, name, None) for name in ("eps", "approximate", "num_heads"))


def save(model, folder: str | Path) -> None:
    """Writes model.safetensors and config.json, each replaced atomically, neither before both are whole.

    The folder is made. The state dict is written as it is (dtypes too), from any device; config.json holds
    `model.config` (with the names of the classes where they are known), the library and its version. Raises InputError
    for a model that could not be read back: without its last norm, or with a head of its own.
    """
    folder = target(folder)
    state, config = tensors(model), _config(model)
    _check_readable(model, state, config)
    made_by = {"library": "vitfast", "library_version": __version__, "architecture": type(model).__name__}
    make_folder(folder, folder)
    write_all_atomically(
        {
            folder / "model.safetensors": lambda path: _write_tensors(state, path),
            folder / "config.json": lambda path: _write_json({**made_by, **config}, path),
        }
    )


def _write_timm(model: nn.Module, path: Path) -> None:
    """A bare state dict, or a folder for timm.create_model("local-dir:...") as timm's repositories are."""
    state, config = tensors(model), _config(model)
    if file_suffix(path):
        return _write_tensors(state, path)
    path.mkdir()
    size = pair(config["img_size"])
    model_args = {name: config[name] for name in TIMM_ARGS} | {"pos_embed": "learn" if "pos_embed" in state else "none"}
    pretrained = dict(
        input_size=(config["in_chans"], *size),
        fixed_input_size=not config["dynamic_img_size"],
        interpolation="bicubic",
        crop_pct=config["crop_pct"] or 1.0,
        crop_mode=config["crop_mode"] or "center",
        mean=config["mean"],
        std=config["std"],
        num_classes=config["num_classes"],
        pool_size=None,
        first_conv="patch_embed.proj",
        classifier="head",
    )
    name = TIMM_NAMES.get((config["patch_size"], config["embed_dim"], config["depth"]), "vit_base_patch16_224")
    content = dict(
        architecture=name,
        num_classes=config["num_classes"],
        num_features=config["embed_dim"],
        global_pool=config["global_pool"],
    )
    content |= {"label_names": model.class_names} if model.class_names else {}
    _write_json(content | dict(model_args=model_args, pretrained_cfg=pretrained), path / "config.json")
    _write_tensors(state, path / "model.safetensors")


def _write_hugging_face(model: nn.Module, path: Path) -> None:
    """A folder for ViTForImageClassification.from_pretrained, without head for ViTModel's (no prefix)."""
    path.mkdir()
    state, config = tensors(model), _config(model)
    classes, size = config["num_classes"], pair(config["img_size"])
    content = dict(
        architectures=["ViTForImageClassification" if classes else "ViTModel"],
        model_type="vit",
        hidden_size=config["embed_dim"],
        num_hidden_layers=config["depth"],
        num_attention_heads=config["num_heads"],
        intermediate_size=state["blocks.0.mlp.fc1.weight"].shape[0],
        hidden_act={"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[config["act_layer"]],
        layer_norm_eps=config["norm_eps"],
        image_size=size[0] if size[0] == size[1] else size,
        patch_size=config["patch_size"],
        num_channels=config["in_chans"],
        qkv_bias=config["qkv_bias"],
        dtype=str(state["cls_token"].dtype).removeprefix("torch."),
    )
    pixels = dict(
        **hugging_face.processor(size, config["crop_mode"] or "center", config["crop_pct"] or 1.0),
        resample=3,  # bicubic
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=config["mean"],
        image_std=config["std"],
    )
    state = rename(_split_qkv(state), HUGGING_FACE_NAMES)
    if classes:
        labels = dict(enumerate(model.class_names or [f"LABEL_{i}" for i in range(classes)]))
        content |= dict(id2label=labels, label2id={name: i for i, name in labels.items()})
        state = {key if key.startswith("classifier.") else f"vit.{key}": value for key, value in state.items()}
    _write_json(content, path / "config.json")
    _write_json(pixels, path / "preprocessor_config.json")
    _write_tensors(state, path / "model.safetensors")


def _write_google(model: nn.Module, path: Path) -> None:
    """The npz of the paper's code, or big_vision's where positions are for patches alone.

    bfloat16, which NumPy lacks, becomes float32.
    """
    config = model.config
    state = rename(_split_qkv(tensors(model)), GOOGLE_NAMES)
    if config["no_embed_class"] or not config["class_token"]:
        state = rename(state, to_theirs(BIG_VISION))
    for pattern, turn in GOOGLE_LAYOUTS:
        state |= {key: turn(value, config["num_heads"]) for key, value in state.items() if re.search(pattern, key)}
    state = {key: value.float() if value.dtype == torch.bfloat16 else value for key, value in state.items()}
    np.savez(path, **{key: value.contiguous().numpy() for key, value in state.items()})


def _write_torchvision(model: nn.Module, path: Path) -> None:
    _write_tensors(rename(tensors(model), TORCHVISION_NAMES), path)


def _split_qkv(state: State) -> State:
    """`blocks.i.attn.qkv` -> `blocks.i.attn.{q,k,v}`."""
    apart: dict[str, Tensor] = {}
    for key, value in state.items():
        names = [key.replace(".qkv.", f".{name}.") for name in "qkv"] if ".attn.qkv." in key else [key]
        apart |= zip(names, value.chunk(3) if len(names) == 3 else (value,))
    return {key: value.contiguous() for key, value in apart.items()}


_OURS = ("positions", "hybrid")  # what only our own folder has
_CLASSIC = (*_OURS, "registers", "layer_scale", "no_positions", "fc_norm", "no_bias")  # what none of these three has
_CLASS_TOKEN_ONLY = ("no_class_token", "patch_positions", "pooling")
WRITERS = {
    "vitfast": Writer(("",), save),
    "timm": Writer(("", ".safetensors", ".pth"), _write_timm, (*_OURS, "pre_logits")),
    "huggingface": Writer(("",), _write_hugging_face, (*_CLASSIC, *_CLASS_TOKEN_ONLY, "pre_logits")),
    "npz": Writer((".npz",), _write_google, (*_CLASSIC, "no_qkv_bias")),
    "torchvision": Writer(
        (".safetensors", ".pth"),
        _write_torchvision,
        (*_CLASSIC, *_CLASS_TOKEN_ONLY, "no_qkv_bias", "no_head", "no_square", "channels"),
    ),
}
