"""A ViT as a file that runs without vitfast: ONNX, torch.export, or compiled by AOTInductor.

The file holds PyTorch's own operations, never the kernels.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError, install, unknown
from ..ops import use_kernels
from .checkpoint.files import check_free, staged
from .preprocessing import CROP
from .vit import ViT

Runner = Callable[[Tensor], Tensor]


def export(
    model: ViT, path: str | Path, form: Literal["onnx", "torch", "aoti"], *, uint8: bool = False, force: bool = False
) -> float | None:
    """Writes `model` for inference: images (B, C, H, W) of the model's size, for any B -> logits.

    form: "onnx" (the exporter's default opset; weights beyond 2 GB lie beside the file in `path.data`), "torch"
    (torch.export, a .pt2 for `torch.export.load`) or "aoti" (a .pt2 for `torch._inductor.aoti_load_package`, compiled
    for this device and machine). uint8: the file takes raw pixels instead of normalised floats. The file is run on a
    random batch and compared with the model before it moves to `path`. An ONNX file says in its metadata_props how
    images are prepared; see `metadata`.

    Returns the largest difference of a logit, or None for ONNX if onnxruntime is not installed. Raises InputError for a
    missing package or compiler, for a wrong suffix, and if `path` exists already, unless `force` is set; RuntimeError
    if the logits differ.
    """
    path = Path(path).expanduser()
    check_target(path, form, force)
    if form == "onnx" and model.patch_embed.proj.weight.dtype == torch.bfloat16:
        why = "NumPy and onnxruntime's CPU have no bfloat16"
        raise InputError(f"export: {why}; call model.float() or model.half() before an ONNX export")
    training = model.training
    model.eval()
    try:
        with staged(path, force) as scratch, torch.no_grad(), use_kernels("off"):
            free_batch = {"images": {0: torch.export.Dim("batch")}}
            program = torch.export.export(model, (_images(model, 2, uint8),), dynamic_shapes=free_batch)
            images = _images(model, 3, uint8)
            if form == "onnx":
                run = _onnx(program, scratch, metadata(model, uint8))
            else:
                run = _FORMATS[form][1](program, scratch)
            return None if run is None else _difference(run(images), model(images))
    finally:
        model.train(training)


def metadata(model: ViT, uint8: bool) -> dict[str, str]:
    """How images for an exported model are prepared, and its classes, under ViT's names and as JSON.

    graph_normalizes: whether the graph takes raw uint8 pixels and normalises them itself; if not, its input is
    (pixels / 255 - mean) / std.
    """
    cfg = model.pretrained_cfg
    entries = {name: cfg[name] for name in ("mean", "std", *CROP)}
    entries |= dict(img_size=cfg["input_size"][1:], graph_normalizes=uint8)
    if model.class_names is not None:
        entries["class_names"] = model.class_names
    return {name: json.dumps(entry) for name, entry in entries.items()}


def check_target(path: Path, form: str, force: bool) -> None:
    """Raises InputError for an unknown format, a wrong suffix, and a path at which something exists."""
    if form not in _FORMATS:
        raise unknown("format", form, _FORMATS)
    suffix, _ = _FORMATS[form]
    if path.suffix != suffix or path.is_dir():
        raise InputError(f"{path}: the format {form} is written as one file, {suffix}")
    check_free(path, force)


def _images(model: ViT, batch: int, uint8: bool) -> Tensor:
    weight = model.patch_embed.proj.weight
    size = (batch, model.in_chans, *model.patch_embed.img_size)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, device=weight.device)
    return raw if uint8 else (raw / 255 * 2 - 1).to(weight.dtype)


def _difference(ours: Tensor, truth: Tensor) -> float:
    """The largest difference of the logits. Raises RuntimeError if it is too large.

    The bound is 1e-4 of the largest logit (at least 1), or 1e-2 of it in 16 bits and on a GPU, which may use TF32.
    """
    difference = (ours.to(truth.device) - truth).abs().max().item()
    exact = truth.dtype == torch.float32 and truth.device.type == "cpu"
    allowed = (1e-4 if exact else 1e-2) * max(1.0, truth.abs().max().item())
    if not difference <= allowed:
        logits = f"the file gives other logits than the model (max difference {difference:.3g})"
        raise RuntimeError(f"export: {logits}; nothing was written")
    return difference


def _onnx(program: torch.export.ExportedProgram, path: Path, entries: dict[str, str]) -> Runner | None:
    for name in ("onnx", "onnxscript"):
        try:
            __import__(name)
        except ImportError as error:
            raise InputError(f"export: ONNX needs the package {name}: {install('export')}") from error
    names = dict(input_names=["images"], output_names=["logits"], dynamic_shapes={"images": {0: "batch"}})
    onnx_program = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    onnx_program.model.metadata_props.update(entries)
    onnx_program.save(str(path))
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.cpu().numpy()})[0])


def _torch(program: torch.export.ExportedProgram, path: Path) -> Runner:
    torch.export.save(program, path)
    return torch.export.load(path).module()


def _aoti(program: torch.export.ExportedProgram, path: Path) -> Runner:
    from torch._inductor import aoti_compile_and_package, aoti_load_package
    from torch._inductor.exc import CppCompileError, InductorError

    try:
        aoti_compile_and_package(program, package_path=os.fspath(path))
    except (CppCompileError, InductorError) as error:
        needs = f"({str(error).splitlines()[0]}); it needs a C++ compiler: g++, or what CXX names"
        raise InputError(f"export: AOTInductor could not compile {needs}") from error
    return aoti_load_package(os.fspath(path))


_FORMATS = {"onnx": (".onnx", _onnx), "torch": (".pt2", _torch), "aoti": (".pt2", _aoti)}
