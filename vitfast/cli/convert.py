"""Write weights of any format in another one: vitfast, timm, huggingface, npz (Google's)
or torchvision.
"""

import argparse

from .options import add_shared, overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="IN", help="file, folder or hf-hub:owner/name")
    add("path", metavar="OUT", help="a folder, or a file whose suffix suits the format")
    formats = ("vitfast", "timm", "huggingface", "npz", "torchvision")
    add("--format", dest="form", required=True, choices=formats)
    add_shared(parser, "--num-heads")
    add_shared(parser, "--img-size")
    add_shared(parser, "--force")
    asked = "where the weights leave it open: as the error for such a file says"
    add("--act-layer", choices=("gelu", "gelu_tanh"), help=f"the activation, {asked}")
    add("--pos-embed", choices=("learn", "none"), help=f"position embeddings, {asked}")
    classes = "other than the weights' own: a new head of zeros, 0 for none"
    add("--num-classes", metavar="N", type=int, help=classes)


def run(args: argparse.Namespace) -> int:
    from ..convert import convert

    given = overrides(args) | {name: getattr(args, name) for name in ("act_layer", "pos_embed") if hasattr(args, name)}
    notes = convert(args.source, args.path, args.form, force=args.force, **given)
    print("\n".join([f"wrote {args.path}", *(f"note: {note}" for note in notes)]))
    return 0
