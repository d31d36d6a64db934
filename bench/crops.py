"""LeJEPA's crops through an encoder: packed, in separate forwards, and padded to the largest.

    python bench/crops.py [--output bench/results/unlabelled/crops.json]

Of each image there are 2 global crops of 224 px and 6 local crops of 96 px. Counted are the tokens, the FLOPs of
forward and backward (torch's counter), and the kernels that a GPU would run (recorded on meta tensors); the seconds are
those of one thread of this CPU, the least of several turns in which the ways follow each other. Padded crops are filled
up with zeros, as all images of a batch have one size there; masks are not counted.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from vitfast import ViT, pack
from vitfast.kernels import tiles
from vitfast.kernels.launch import record
from vitfast.tools.machine_code.model_launches import launching_on_meta
from vitfast.train.report.commands import cpu_name

CROPS = ((2, 224), (6, 96))


def ways(model: ViT, images: int, device: str, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """(the features of all crops of so many images, the tokens that are computed for them) of each way."""
    patch, prefix = model.patch_embed.patch_size[0], model.num_prefix_tokens
    sizes = [(images * count, side) for count, side in CROPS]
    views = [torch.randn(count, 3, side, side, dtype=dtype, device=device) for count, side in sizes]
    largest = max(side for _, side in CROPS)
    packed = pack([crop for view in views for crop in view], patch)
    padded = torch.cat([pad(view, [0, largest - view.shape[-1]] * 2) for view in views])
    own = sum(count * ((side // patch) ** 2 + prefix) for count, side in sizes)
    return {
        "packed": (lambda: model(packed), own),
        "separate": (lambda: torch.cat([model(view) for view in views]), own),
        "padded": (lambda: model(padded), len(padded) * ((largest // patch) ** 2 + prefix)),
    }


def step(features: Callable[[], Tensor]) -> None:
    """Forward, and backward from gradients of ones."""
    features().sum().backward()


def measured(model: ViT, images: int, turns: int) -> dict[str, dict]:
    """Tokens, FLOPs and seconds of each way on the CPU."""
    found, made = {}, ways(model, images, "cpu", torch.float32)
    expected = made["separate"][0]()
    torch.testing.assert_close(made["packed"][0](), expected, atol=1e-4, rtol=1e-3)
    for name, (features, tokens) in made.items():
        with FlopCounterMode(display=False) as counter:
            step(features)
        found[name] = dict(tokens=tokens, flops=counter.get_total_flops(), seconds=float("inf"))
    for _ in range(turns):
        for name, (features, _) in made.items():
            start = time.process_time()
            step(features)
            found[name]["seconds"] = min(found[name]["seconds"], time.process_time() - start)
    return found


def launches(preset: str, images: int) -> dict[str, int]:
    """How many kernels each way launches on a GPU, in bf16."""
    with torch.device("meta"):
        model = ViT.from_preset(preset, num_classes=0, dynamic_img_size=True).bfloat16()
    found = {}
    with launching_on_meta(), tiles.using(sm=90):
        for name, (features, _) in ways(model, images, "meta", torch.bfloat16).items():
            found[name] = len(record(partial(step, features)))
    return found


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ViT.from_preset(args.model, num_classes=0, dynamic_img_size=True)
    found = measured(model, args.images, args.turns)
    for name, count in launches(args.model, args.images).items():
        found[name]["launches"] = count
    where = dict(cpu=cpu_name(), threads=1, torch=torch.__version__, python=platform.python_version())
    result = dict(model=args.model, images=args.images, crops=[list(crop) for crop in CROPS], **where, ways=found)
    for name, each in found.items():
        print(name, {key: f"{value / found['packed'][key]:.3f}" for key, value in each.items()})
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
