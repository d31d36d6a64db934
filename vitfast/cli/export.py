"""Write a model to a file that runs without vitfast."""

import argparse
from pathlib import Path

from .options import add_shared, overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_shared(parser, "--weights")
    add("--output", metavar="FILE", type=Path, required=True, help=".onnx for onnx, .pt2 for torch and aoti")
    formats = ("onnx", "torch", "aoti")
    add("--format", dest="form", required=True, choices=formats, help="aoti: compiled for this machine")
    add_shared(parser, "--num-heads", "--img-size", "--force")
    add("--uint8", action="store_true", default=False, help="the model takes raw pixels in place of normalised floats")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the file will run (default cpu)")


def run(args: argparse.Namespace) -> None:
    from ..model.export import check_target, export
    from ..model.vit import ViT
    from ..run.device import choose_device

    check_target(args.output, args.form, args.force)
    device = choose_device(args.device)
    model = ViT.from_pretrained(args.weights, **overrides(args)).to(device)
    difference = export(model, args.output, args.form, uint8=args.uint8, force=args.force)
    unchecked = "not checked, onnxruntime is not installed"
    checked = unchecked if difference is None else f"max difference {difference:.2g} from PyTorch"
    print(f"wrote {args.output}: {checked}")
