"""Draw what a model learned: its filters, positions, attention distances and attention rollout
on images.
"""

import argparse

from .options import add_shared, overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_shared(parser, "--weights", help="file, folder or hf-hub:owner/name, in any format")
    add("--data", metavar="SPEC", required=True, help="a folder of images, in class folders or not, or as for eval")
    add("--output", metavar="DIR", required=True, help="folder for report.html, the figures as PNG, and the numbers")
    add(
        "--images", metavar="N", type=int, default=32, help="number of images, evenly spread over the data (default 32)"
    )
    add_shared(parser, "--img-size", "--num-heads")
    add_shared(parser, "--device", default="")


def run(args: argparse.Namespace) -> None:
    from ..eval.inspect.report import read_images, write_inspection
    from ..model.vit import ViT
    from ..run.device import choose_device

    device = choose_device(args.device)
    model = ViT.from_pretrained(args.weights, **overrides(args)).to(device)
    images, left_out = read_images(args.data, args.images, model.patch_embed.img_size, model.in_chans)
    data = f"{args.data} ({left_out} more could not be read)" if left_out else args.data
    print(f"wrote {write_inspection(model, images, args.output, args.weights, data)}")
