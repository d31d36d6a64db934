"""Estimate what training a model costs: parameters, FLOPs, memory, lower bounds of the time, and
the time on a GPU that you name; compare a speed that you measured with these.
"""

import argparse
import json
import math

from ..errors import InputError, unknown
from .options import add_set, add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = "a preset such as B/16, R50+B/16 or DINOv3-B/16, a ResNet such as R50x1, or timm:NAME (or give --recipe)"
    add("--model", metavar="NAME", help=model)
    add("--recipe", metavar="NAME", help="take model, image size, batch and length from this recipe; other flags win")
    add("--img-size", metavar="N", type=int, help="side of the images in pixels (default 224)")
    add("--batch-size", metavar="N", type=int, help="images per optimiser step, over all GPUs (default 256)")
    add("--epochs", metavar="N", type=float, help="passes over the data, for the cost of the whole training")
    add("--images", metavar="N", type=float, help="images in an epoch, such as 303e6")
    gpu = "A10 L4 L40S A100 A100-40 H100 H100-PCIe H200 GH200 B200 3090 4090 5090 (default H200)"
    add("--gpu", metavar="NAME", default="H200", help=gpu)
    gpus = "number of GPUs that share the batch; their communication is not counted (default 1)"
    add("--gpus", metavar="N", type=int, default=1, help=gpus)
    dtype = "dtype of the matrix products (default bf16; fp32 counts as TF32)"
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help=dtype)
    keep = "what blocks keep for backward; auto (default): all, if it fits into memory"
    add("--keep", choices=("auto", "all", "least"), default="auto", help=keep)
    reached = "images/s that your code reaches on these GPUs, to be compared with the bound, vitfast and timm"
    add("--reached", metavar="X", type=float, help=reached)
    add_set(parser, "other settings, such as local_crops=4 or objective=lejepa")
    add_shared(parser, "--json", help="print all numbers as JSON")


def run(args: argparse.Namespace) -> int:
    from ..model.config import ViTConfig
    from ..tools.cost.gpus import rates
    from ..tools.cost.text import as_text
    from ..tools.cost.training import compare, estimate, estimate_baseline

    device = rates(args.gpu, args.dtype)
    name, model, epochs, images, training = _asked(args)
    if (epochs is None) != (images is None):
        raise InputError("the length of a training takes both --epochs N and --images N, the images in an epoch")
    for flag, value in (("--epochs", epochs), ("--images", images)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{flag} must be positive, got {value}")
    training |= dict(images=None if epochs is None else epochs * images, dtype=args.dtype)
    if isinstance(model, ViTConfig):
        found = estimate(model, device, gpus=args.gpus, keep=args.keep, **training)
        if "reached" in args:
            found["reached"] = compare(model, found, args.reached)
    elif "reached" in args:
        raise InputError(f"--reached is for ViTs that vitfast reads; {name} is none, and no time of it is known")
    else:
        del training["batch_size"]
        found = estimate_baseline(model, model.image_size, **training)
    print(json.dumps(dict(model=name, **found), indent=2) if args.json else as_text(name, found))
    return 0


def _asked(args: argparse.Namespace) -> tuple:
    """(name, a ViT's arguments or a baseline, epochs, images in an epoch, `estimate`'s other arguments).

    Flags win over the recipe.
    """
    from ..model.config import ViTConfig
    from ..model.presets import PRESETS, RESNETS, TIMM, is_baseline
    from ..run.config import UNLABELLED
    from ..tools.cost.training import DATASETS
    from ..train.recipes import cost_arguments, resolve, vit_arguments

    given = {k: v for k, v in vars(args).items() if k in ("model", "img_size", "batch_size", "epochs", "recipe")}
    images, classes, settings = getattr(args, "images", None), 1000, dict(getattr(args, "set", []))
    if "recipe" in given:
        config = resolve("pretrain", given, settings)
        per_epoch, classes = DATASETS.get(config.name.rpartition("/")[2].partition("-")[0], (None, classes))
        epochs, images = config.epochs, images or per_epoch
        if config.steps:
            epochs, images = 1, config.steps * config.batch_size
        if images is None:
            raise InputError(f"recipe {config.name} is for any data: add --images N, the images in an epoch")
    elif "model" in given:
        if "/" not in args.model and not is_baseline(args.model):
            raise unknown("model", args.model, [*PRESETS, *RESNETS, f"{TIMM}NAME"])
        epochs = given.pop("epochs", None)
        config = resolve("eval", dict(batch_size=256), given, settings)
    else:
        raise InputError("no model given: add --model NAME or --recipe NAME")
    if is_baseline(config.model):
        import torch

        from ..model.baselines import as_vit, baseline
        from ..train.setup import new_model

        # new_model takes the size of a recipe or a flag, and refuses the objectives that train no baseline.
        own = not {"img_size", "recipe"} & given.keys() and config.objective not in UNLABELLED
        with torch.device("meta"):
            model = baseline(config.model, classes) if own else new_model(config, classes)
        model = as_vit(model, config.model) or model
    else:
        model = ViTConfig(**vit_arguments(config, 0 if config.objective == "lejepa" else classes))
    training = cost_arguments(config, model)
    return config.model, model, epochs, images, training
