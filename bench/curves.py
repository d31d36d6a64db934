"""Loss curves of vitfast's ViT and timm's, from the same weights on the same images, a few seeds.

    python bench/curves.py OUT [--model S/16 --image 224 --batch 128 --steps 1000 --seeds 3 --precision amp|bf16]

writes OUT/curves.json. The task is made on the device: gratings of 10 directions x 10 frequencies, in random colours
and phases under noise, 100 classes that take a ViT some hundred steps to tell apart. Losses are averaged over windows
of 50 steps. "distance": over all windows the largest difference between the two means over seeds, in standard
deviations of a single run between seeds (0.001 at least), over the seeds that both have run. Both are compiled on a
GPU. The file is written after every run, with the number of `runs` done of those `planned`; an interrupt (SIGINT) keeps
what is done.
"""

import argparse
import json
import math
import signal
import statistics
import sys
import time
from pathlib import Path

import clock
import machine
import torch
import torch.nn.functional as F
from peers import BUILDERS, Setting
from shapes import Shape

from vitfast import ops
from vitfast.run.files import write_text

WINDOW = 50
CLASSES = 100


def gratings(generator: torch.Generator, batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(images (B, 3, size, size) fp32, labels (B,)): a label is 10 * direction + frequency."""

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=generator.device)

    labels = torch.randint(CLASSES, (batch,), generator=generator, device=generator.device)
    angle, frequency = math.pi * (labels // 10) / 10, 2.0 + 1.5 * (labels % 10)
    y, x = torch.meshgrid(*[torch.linspace(0, 1, size, device=generator.device)] * 2, indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    wave = (2 * math.pi * (frequency[:, None, None] * along + uniform(batch, 1, 1))).sin()
    images = wave[:, None] * (2 * uniform(batch, 3, 1, 1) - 1)
    return images + torch.randn(images.shape, generator=generator, device=generator.device), labels


def losses(setting: Setting, shape: Shape, weights: dict, seed: int, steps: int) -> list[float]:
    """The mean loss of every window of a run from `weights`."""
    with clock.DEVICE:
        model = BUILDERS[setting.library](shape).train()
    model.load_state_dict(weights)
    model, _ = setting.cast(model, torch.empty(0, device=clock.DEVICE))
    torch._dynamo.reset()
    if setting.library == "vitfast":
        model.decide_keep(shape.batch, setting.dtype)  # before torch.compile, which takes what it finds
    function = model if setting.how == "eager" else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=clock.GPU)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (0.1 * steps)))
    generator, found = torch.Generator(clock.DEVICE).manual_seed(seed), []
    with ops.use_kernels("on" if clock.GPU and setting.library == "vitfast" else "auto"):
        for _ in range(steps):
            images, labels = gratings(generator, shape.batch, shape.image)
            with setting.autocast():
                loss = F.cross_entropy(function(images.to(next(model.parameters()).dtype)).float(), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            warm_up.step()
            found.append(loss.detach())
    found = torch.stack(found).double()
    return [found[i : i + WINDOW].mean().item() for i in range(0, steps, WINDOW)]


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float | None:
    """The largest difference of the means over seeds of any window, in standard deviations between seeds.

    ours, theirs: runs x windows. Of the seeds that both have; None where there is none.
    """
    seeds, worst = min(len(ours), len(theirs)), None
    for a, b in zip(zip(*ours[:seeds]), zip(*theirs[:seeds])):
        spread = math.sqrt((statistics.variance(a) + statistics.variance(b)) / 2) if seeds > 1 else 0.0
        worst = max(worst or 0.0, abs(statistics.mean(a) - statistics.mean(b)) / max(spread, 1e-3))
    return worst


def save(path: Path, facts: dict, runs: dict[str, list[list[float]]]) -> dict:
    """Writes the file as it stands now, whole or not at all."""
    done = sum(map(len, runs.values()))
    result = dict(facts, runs=done, distance=distance(*runs.values()), losses=runs, machine=machine.facts())
    write_text(path, json.dumps(dict(curves=result), indent=1) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder")
    parser.add_argument("--model", default="S/16")
    for name, default in dict(image=224, batch=128, steps=1000, seeds=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=("amp", "bf16", "fp32"), default="amp")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    shape, how = Shape(args.model, args.image, args.batch), "compile" if clock.GPU else "eager"
    runs = {"vitfast": [], "timm": []}
    facts = {name: value for name, value in vars(args).items() if name != "out"}
    facts.update(window=WINDOW, planned=args.seeds * len(runs))
    path = args.out / "curves.json"
    args.out.mkdir(parents=True, exist_ok=True)
    result = None
    try:
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            with clock.DEVICE:
                weights = BUILDERS["timm"](shape).state_dict()
            for library, found in runs.items():
                start = time.perf_counter()
                found.append(losses(Setting(library, how, args.precision), shape, weights, seed, args.steps))
                result, last = save(path, facts, runs), found[-1][-1]
                took = time.perf_counter() - start
                print(f"seed {seed} {library}: loss {found[-1][0]:.4f} -> {last:.4f}, {took:.0f} s", flush=True)
    except KeyboardInterrupt:
        done = f"{sum(map(len, runs.values()))} of {facts['planned']} runs done"
        print(f"interrupted: {done}{f', kept in {path}' if result else ''}", file=sys.stderr)
        return 130
    print(f"largest distance: {result['distance']:.2f} standard deviations between seeds; {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
