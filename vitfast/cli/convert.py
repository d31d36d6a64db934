"""Convert weights of any format to another: vitfast, timm, huggingface, npz (Google's) or
torchvision.
"""

import argparse

from .options import add_shared, overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="IN", help="file, folder or hf-hub:owner/name")
    add("path", metavar="OUT", help="a folder, or a file whose suffix suits the format")
    formats = ("vitfast", "timm", "huggingface", "npz", "torchvision")
    add("--format", dest="form", required=True, choices=formats, help="the format to write")
    add_shared(parser, "--num-heads", "--img-size", "--force")
    activations = ("gelu", "gelu_tanh", "quick_gelu", "silu")
    unsaid = "activation of the MLPs; give this option and those below only if the weights do not say it"
    add("--act-layer", choices=activations, help=unsaid)
    add(
        "--pos-embed",
        choices=("learn", "none"),
        help="learn or none: there are no rotary positions, unless --rope says so",
    )
    add("--rope", choices=("dinov3", "cat", "none"), help="rotary positions: DINOv3's, EVA-02's or none")
    shape = "patches down and across, for --rope cat (16 16 in EVA-02)"
    add("--ref-feat-shape", metavar="N", type=int, nargs=2, help=shape)
    add("--global-pool", choices=("token", "avg", "map"), help="what the head reads")
    add("--norm-eps", metavar="X", type=float, help="epsilon of every norm")
    mean = "mean of raw images on the 0..1 scale: one number, or one for each channel"
    add("--mean", metavar="X", type=float, nargs="+", help=mean)
    add("--std", metavar="X", type=float, nargs="+", help="standard deviation of raw images, in the form of --mean")
    classes = "give the model a new head of zeros for this many classes; 0: no head"
    add("--num-classes", metavar="N", type=int, help=classes)


def run(args: argparse.Namespace) -> None:
    from ..model.convert import convert

    asked = ("act_layer", "pos_embed", "rope", "ref_feat_shape", "global_pool", "norm_eps", "mean", "std")
    given = overrides(args) | {name: getattr(args, name) for name in asked if hasattr(args, name)}
    given |= {"rope": None} if given.get("rope") == "none" else {}
    notes = convert(args.source, args.path, args.form, force=args.force, **given)
    print("\n".join([f"wrote {args.path}", *(f"note: {note}" for note in notes)]))
