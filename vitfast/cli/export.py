"""Write a model to a file that runs without vitfast, or for NVIDIA's Triton Inference Server."""

import argparse
from pathlib import Path

from .options import add_shared, overrides

REPOSITORY = "triton-repository"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_shared(parser, "--weights")
    output = ".onnx for onnx, .pt2 for torch and aoti, a folder for triton-repository"
    add("--output", metavar="PATH", type=Path, required=True, help=output)
    what = f"aoti: compiled for this machine; {REPOSITORY}: embeddings in NVIDIA's Triton Inference Server"
    add("--format", dest="form", required=True, choices=("onnx", "torch", "aoti", REPOSITORY), help=what)
    add_shared(parser, "--num-heads", "--img-size", "--force")
    raw = "the model takes raw pixels in place of normalised floats or of image files"
    add("--uint8", action="store_true", default=False, help=raw)
    add("--device", choices=("cpu", "cuda"), help=f"where the file will run (default cpu; {REPOSITORY}: cuda)")


def run(args: argparse.Namespace) -> None:
    if args.form == REPOSITORY:
        return _repository(args)
    from ..model.export import check_target, export
    from ..model.vit import ViT
    from ..run.device import choose_device

    check_target(args.output, args.form, args.force)
    device = choose_device(getattr(args, "device", "cpu"))
    model = ViT.from_pretrained(args.weights, **overrides(args)).to(device)
    difference = export(model, args.output, args.form, uint8=args.uint8, force=args.force)
    unchecked = "not checked, onnxruntime is not installed"
    checked = unchecked if difference is None else f"max difference {difference:.2g} from PyTorch"
    print(f"wrote {args.output}: {checked}")


def _repository(args: argparse.Namespace) -> None:
    from ..eval.triton_server.repository import write_repository
    from ..model.checkpoint import hugging_face
    from ..model.checkpoint.files import check_free, locate
    from ..model.vit import ViT

    check_free(args.output, args.force, ("folder",))
    processor, given = locate(args.weights).preprocessor, overrides(args)
    if "img_size" in given:  # vitfast.Embedder takes the processor's size where no other is asked for
        processor = {}
    size = hugging_face.image_size(processor)
    model = ViT.from_pretrained(args.weights, **({} if size is None else dict(img_size=size)) | given)
    device = getattr(args, "device", "cuda")
    dim = write_repository(model, args.output, processor=processor, uint8=args.uint8, device=device, force=args.force)
    print(f"wrote {args.output}: {'pixels' if args.uint8 else 'image files'} to vectors of {dim}")
