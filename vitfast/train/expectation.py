"""The speed that a run should reach on its GPUs, by the estimate of `vitfast cost`."""

import math

import torch
from torch import nn

from ..data.identity import stamp
from ..data.loader import Data
from ..data.sources import Source, evenly
from ..errors import InputError
from ..model.vit import ViT
from ..run.config import Config
from ..tools.cost.gpus import name_of, rates
from ..tools.cost.steps import arguments_of, forward_flops
from ..tools.cost.training import estimate
from .recipes import cost_arguments
from .setup import new_model

SAMPLED = 200  # images whose files are asked for their size


def expectation(config: Config, model: nn.Module, data: Data) -> tuple[float | None, str]:
    """(images per second that are normal for a run, if that is known; a sentence on it, but on a CPU)."""
    if data.device.type != "cuda":
        return None, ""
    name, vit = torch.cuda.get_device_name(data.device), getattr(model, "vit", model)
    gpu, arguments = name_of(name), dict(gpus=data.ranks.world, keep="auto")
    try:
        if gpu is None or not isinstance(vit, ViT) or data.dtype is None or data.packing:
            known = "only vitfast's ViTs, in 16 bits and of one image size, were timed"
            raise InputError(known if gpu else f"no data sheet of {name} is known")
        arguments |= cost_arguments(config, arguments_of(vit)) | dict(batch_size=data.images_per_step)
        cost = estimate(vit, rates(gpu), **arguments)
        if cost["dropout"] or cost["predicted"]["step_seconds"] < 0.01:
            raise InputError("dropout is in no estimate" if cost["dropout"] else "no step below 10 ms was timed")
    except InputError as error:
        return None, f" What speed is normal is not known: {str(error).removeprefix('cost: ')}."
    speed, ranks = cost["predicted"]["images_per_second"], data.ranks.world
    gpus = f"{ranks} {gpu} should give, their communication left out," if ranks > 1 else f"One {gpu} should give"
    basis = "{efficiency:.0%} of the floors' speed, {basis}".format(**cost["predicted"])
    rate = speed * bytes_per_image(data.train, data.img_size) / 1e6
    needed = f"for that, the data has to deliver {speed:,.0f} images/s, {rate:,.0f} MB/s"
    return speed, f" {gpus} about {speed:,.0f} images/s ({basis}); {needed}."


def training_flops(config: Config, classes: int) -> float:
    """FLOPs per training image: 3 times a forward pass, 2 for each multiply-add. Raises InputError."""
    with torch.device("meta"):
        model = new_model(config, classes)
    return 3.0 * forward_flops(model.eval(), (3, config.img_size, config.img_size))


def bytes_per_image(source: Source, img_size: tuple[int, int]) -> float:
    """The mean size of an image's file, or of its pixels where files are not known."""
    if source.content(0) is None:
        return 3 * math.prod(img_size)
    sizes = [stamp(source.content(index))[0] for index in evenly(len(source), SAMPLED)]
    return sum(sizes) / len(sizes)
