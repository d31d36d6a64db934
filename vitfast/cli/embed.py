"""Write the embeddings of many images to .npy shards with a Parquet index; a stopped job continues."""

import argparse
import logging
import os
import sys
from contextlib import contextmanager

from ..errors import InputError
from ..run.config import MAX_PIXELS
from .options import add_shared, overrides

logger = logging.getLogger("vitfast")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    spec = "a folder of images at any depth; a list of paths (.txt, .lst: one in each line; .csv, .tsv: in a column; "
    spec += "-: the standard input); WebDataset shards (.tar) or Parquet files: a file, a folder of them or a quoted "
    spec += "pattern"
    add("spec", metavar="SPEC", help=spec)
    add_shared(parser, "--weights")
    add("--output", metavar="DIR", required=True, help="folder for embeddings-*.npy, index-*.parquet and manifest.json")
    add_shared(parser, "--img-size", help="default: the model's own")
    native = "native: each image keeps its own size, rounded to whole patches, without padding"
    add("--sizes", metavar="native", choices=("native",), default=None, help=native)
    add(
        "--pool",
        choices=("token", "avg", "map"),
        default=None,
        help="how tokens become one vector (default: as in the model)",
    )
    add("--normalize", action="store_true", default=False, help="divide each vector by its L2 norm")
    dtype = "dtype of the matrix products (default: bf16 on cuda, else as the weights are)"
    add("--dtype", choices=("fp32", "fp16", "bf16"), default=None, help=dtype)
    at_once = "images at once (default: as many as fit into 65,536 tokens on cuda, 8,192 on cpu)"
    add("--batch-size", metavar="N", type=int, default=None, help=at_once)
    add_shared(parser, "--device", default="")
    add_shared(parser, "--graphs")
    decode = "host: Pillow decodes images (default); device: nvJPEG decodes JPEGs, with other rounding"
    add("--decode", choices=("host", "device"), default="host", help=decode)
    turn = "--no-exif-orientation: leave images as they are stored (default: turn them upright)"
    add("--exif-orientation", action=argparse.BooleanOptionalAction, default=True, help=turn)
    add("--max-pixels", metavar="N", type=int, default=MAX_PIXELS, help=f"of an image (default {MAX_PIXELS:,})")
    add(
        "--workers",
        metavar="N",
        type=int,
        default=None,
        help="threads that read images (default: one for each core, up to 16)",
    )
    add("--shard-size", metavar="N", type=int, default=10_000, help="images in a shard (default 10,000)")
    add("--column", metavar="NAME", default=None, help="column of a Parquet file that holds the images' bytes or paths")
    resume = "auto: keep the shards that are there (default); never: start again"
    add("--resume", choices=("auto", "never"), default="auto", help=resume)
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where at least one image has been embedded, else 1."""
    import json

    import torch

    from ..data.records import records
    from ..eval.embed import embed_to
    from ..eval.embedder import Embedder
    from ..run.distributed import local_device, rank_of_world

    rank, world = rank_of_world()
    for name in ("batch_size", "shard_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if os.path.realpath(args.output) == os.path.realpath(args.spec):
        raise InputError(f"--output {args.output} is the folder of the images; give another, or one in it")
    found = records(args.spec, args.column)
    dtype = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16).get(args.dtype)
    same = ("pool", "normalize", "sizes", "decode", "exif_orientation", "max_pixels", "workers", "graphs")
    own = dict(device=local_device(args.device), dtype=dtype, img_size=overrides(args).get("img_size"))
    embedder = Embedder(args.weights, **own, **{name: getattr(args, name) for name in same})
    if args.batch_size is not None:
        embedder.tokens = args.batch_size * embedder.backbone.own_tokens
    if rank == 0:
        logger.info("%s", embedder)
    with _progress_bar(rank) as show:
        options = dict(shard_size=args.shard_size, rank=rank, world=world, resume=args.resume == "auto")
        done = embed_to(embedder, found, args.output, **options, on_progress=show)
    share = done.waiting / max(1e-9, done.seconds)
    result = dict(images=done.images, unreadable=done.unreadable, kept=done.kept, seconds=round(done.seconds, 3))
    result |= dict(images_per_second=round(done.images / max(1e-9, done.seconds), 1), waiting=round(share, 3))
    if args.json:
        print(json.dumps(result))
    else:
        kept = f", {done.kept} were there already" if done.kept else ""
        speed = f"{result['images_per_second']:g} images/s, {share:.0%} of the time waiting for images"
        print(f"{args.output}: {done.images} images, {done.unreadable} of them unreadable{kept}; {speed}")
    return 0 if done.kept or done.images > done.unreadable else 1


@contextmanager
def _progress_bar(rank: int):
    """Shows the first rank's images/s, and the share of the time that waits for images."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    off = rank > 0 or not sys.stderr.isatty()
    with logging_redirect_tqdm(), tqdm(unit="image", dynamic_ncols=True, disable=off) as bar:

        def show(progress, error: str | None) -> None:
            if error is not None:
                logger.warning("left out: %s", error)
            bar.set_postfix_str(f"{progress.waiting / progress.seconds:.0%} waiting", refresh=False)
            bar.update()

        yield show
