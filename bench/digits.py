"""Small offline results on scikit-learn's digits (the paper's sections 3.2 and 4.6, Table 8).

    python bench/digits.py masked       # 5 seeds; writes masked.json to bench/results/digits
    python bench/digits.py positions    # 8 kinds and places, 3 seeds; writes positions.json and positions.md there
    python bench/digits.py choice       # the demo's fine-tuning, chosen on 3 folds of its training set; choice.json
    python bench/digits.py folds        # 5 folds of all 1,797 scans, 3 seeds; writes folds.json there
    python bench/digits.py demos        # the demo, 3 seeds; writes demos.json there, and demo.json of seed 0
    python bench/digits.py sizes        # pre-training on images of many sizes, 3 seeds; writes sizes.json there

Everything else than what is compared is equal: data, labels, steps, rates, augmentation. Small-scale evidence about our
code, not about the paper's claims.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

from vitfast import ViT
from vitfast.data.datasets import open_sources
from vitfast.data.image_files import image_files
from vitfast.eval.predict import predict
from vitfast.experiments.demo import demo
from vitfast.experiments.positions import positions
from vitfast.experiments.runs import Stopped, finish
from vitfast.run.config import Config
from vitfast.train.recipes import resolve
from vitfast.train.trainer import train

RESULTS = Path(__file__).parent / "results" / "digits"
RUNS = Path("runs") / "digits"  # of choice, folds and demos, which go on where they were cut off
COMMON = dict(recipe="digits", data="digits", device="cpu", hidden_head=False, label_smoothing=0.0)
MASKED = dict(objective="masked", train_images=718, steps=1500, batch_size=64, lr=1e-3, warmup_steps=200)
FEW = dict(shots=5, steps=400, batch_size=50, lr=1e-3, warmup_steps=40)
CHOICES = [dict(lr=lr, epochs=epochs) for lr, epochs in ((1e-4, 12), (3e-4, 12), (1e-3, 12), (3e-4, 24), (1e-3, 24))]
SIZES = dict(sizes="24:40", tokens_per_step=850)  # as many images a step as the recipe's 48, and as many patches
FOLDS = 5
SGD = dict(img_size=48, optimizer="sgd", lr=0.03, weight_decay=0.0)  # as Table 4 has it


def masked(seeds: int) -> dict:
    """Test accuracy with 5 labels a class: masked pre-training on half of the digits, or none."""

    def accuracy(**fields) -> float:
        return train(resolve("pretrain", COMMON | fields))["accuracy"]

    entries = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            few = FEW | dict(seed=seed, eval_every=FEW["steps"])
            right = accuracy(**MASKED, seed=seed, eval_every=1000, output=f"{folder}/masked")
            fine = accuracy(**few, output=f"{folder}/fine", weights=f"{folder}/masked/checkpoints/last")
            scratch = accuracy(**few, output=f"{folder}/scratch")
        entries.append(dict(seed=seed, masked=fine, scratch=scratch, colours_right=right))
        print(entries[-1], flush=True)
    means = {kind: statistics.mean(entry[kind] for entry in entries) for kind in ("masked", "scratch")}
    spread = {f"{kind}_stdev": statistics.stdev(e[kind] for e in entries) if seeds > 1 else 0.0 for kind in means}
    question = "5 labels a class: masked pre-training on half of the digits, or from scratch"
    return dict(question=question, **means, **spread, seeds=entries, pretraining=MASKED, training=FEW)


def choice(seeds: int) -> dict:
    """Accuracy on held-out images of the demo's training set, by rate and length of fine-tuning."""
    scans, entries = load_digits(), []
    training = np.array(open_sources("digits", "", (32, 32), (8, 8), 64, 0)[0].indices)
    split = StratifiedKFold(3, shuffle=True, random_state=1).split(training, scans.target[training])
    for fold, parts in enumerate(split):
        folder = RUNS / f"choice-{fold}"
        write_fold(folder, scans, [training[part] for part in parts])
        for seed in range(seeds):
            entry = dict(fold=fold, seed=seed, pretrain=trained(folder, seed, "pretrain", {})["accuracy"])
            entry["finetune"] = [
                trained(folder, seed, f"finetune-{i}", fields)["accuracy"] for i, fields in enumerate(CHOICES)
            ]
            entries.append(entry)
            print(entry, flush=True)
    means = [
        dict(**fields, accuracy=statistics.mean(e["finetune"][i] for e in entries)) for i, fields in enumerate(CHOICES)
    ]
    question = "3 folds of the demo's training set: how long and at which rate to fine-tune at 48 px"
    return dict(
        question=question, pretrain=statistics.mean(e["pretrain"] for e in entries), finetune=means, runs=entries
    )


def folds(seeds: int) -> dict:
    """Accuracy on scans of other folds, pre-trained as in the demo, then fine-tuned in several ways.

    Differences are of the same scans; their standard errors are over scans, whose answers are averaged over the seeds.
    """
    scans = load_digits()
    kinds = dict(pretrain={}, finetune_48=dict(img_size=48), finetune_32=dict(img_size=32), finetune_48_sgd=SGD)
    right = {kind: np.zeros((seeds, len(scans.target))) for kind in kinds}
    split = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(scans.target, scans.target)
    for fold, parts in enumerate(split):
        folder = RUNS / f"fold-{fold}"
        write_fold(folder, scans, parts)
        for seed, (kind, fields) in itertools.product(range(seeds), kinds.items()):
            trained(folder, seed, kind, fields)
            model = ViT.from_pretrained(folder / f"{kind}-{seed}" / "checkpoints" / "last")
            for record in predict(model, image_files(folder / "data" / "val"), Config(workers=0), top_k=1):
                scan, label = int(Path(record["image"]).stem), int(record["predictions"][0]["label"])
                right[kind][seed, scan] = label == scans.target[scan]
            print(fold, seed, kind, right[kind][seed, parts[1]].mean(), flush=True)

    def difference(a: str, b: str) -> dict:
        change = right[a] - right[b]
        error = change.mean(0).std(ddof=1) / len(scans.target) ** 0.5
        return dict(of=a, over=b, difference=change.mean(), standard_error=error, seeds=list(change.mean(1)))

    pairs = [(kind, "pretrain") for kind in kinds if kind != "pretrain"] + [("finetune_48", "finetune_32")]
    return dict(
        question="5 folds of all digits: fine-tuned at 48 px, at 32 px for as many steps, by the paper's SGD, or not",
        scans=len(scans.target),
        accuracy={kind: found.mean() for kind, found in right.items()},
        seeds={kind: list(found.mean(1)) for kind, found in right.items()},
        differences=[difference(*pair) for pair in pairs],
    )


def trained(folder: Path, seed: int, kind: str, fields: dict) -> dict:
    """The summary of a run on a fold's data: as the demo pre-trains, or, with fields, fine-tuned."""
    run, pretrained = folder / f"{kind}-{seed}", folder / f"pretrain-{seed}" / "checkpoints" / "last"
    config = dict(recipe="digits", data=f"{folder}/data", output=str(run), seed=seed, device="cpu", workers=0)
    if fields:
        config |= dict(recipe="finetune/digits", weights=str(pretrained)) | fields
    return finish(resolve("finetune" if fields else "pretrain", config | dict(eval_every=10_000)))


def write_fold(folder: Path, scans, parts) -> None:
    """Scans for training and for validation as PNG files in class folders: the pixels of `--data digits`."""
    for name, indices in zip(("train", "val"), parts):
        write_scans(folder / "data" / name, scans, indices)


def write_scans(folder: Path, scans, indices) -> None:
    """Scans as PNG files, named by their numbers."""
    for i in indices:
        path = folder / str(scans.target[i]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scans.images[i] * (255 / 16)).round().astype(np.uint8)).save(path)


def demos(seeds: int) -> dict:
    """Accuracies of the demo, always on one thread. The whole summary of seed 0 goes to demo.json."""
    entries = []
    for seed in range(seeds):
        found = demo(RUNS / f"demo-{seed}", seed, "cpu")
        if found is None:
            raise Stopped(f"the demo of seed {seed}")
        if seed == 0:
            (RESULTS / "demo.json").write_text(json.dumps(found, indent=2) + "\n")
        keys = ("seed", "pretrain_accuracy", "finetune_accuracy", "test_images", "seconds")
        entries.append({key: found[key] for key in keys})
        print(entries[-1], flush=True)
    return dict(question="the demo with several seeds", runs=entries)


def sizes(seeds: int) -> dict:
    """Test accuracy at 32 px after the demo's pre-training at 32 px, and on images of many sizes."""
    kinds = dict(one_size={}, many_sizes=SIZES, half_of_the_patches=dict(**SIZES, drop_tokens=0.5))
    entries = []
    for seed, (kind, fields) in itertools.product(range(seeds), kinds.items()):
        with tempfile.TemporaryDirectory() as folder:
            config = dict(recipe="digits", data="digits", device="cpu", seed=seed, output=folder, eval_every=10_000)
            summary = finish(resolve("pretrain", config | fields))
        keys = ("accuracy", "steps", "seconds", "images_per_step", "patches_per_image", "padding_not_computed")
        entries.append(dict(kind=kind, seed=seed, **{key: summary[key] for key in keys if key in summary}))
        print(entries[-1], flush=True)
    means = {kind: statistics.mean(e["accuracy"] for e in entries if e["kind"] == kind) for kind in kinds}
    return dict(question="the demo's pre-training at one size and at many", **means, runs=entries, many_sizes_are=SIZES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("masked", "positions", "choice", "folds", "demos", "sizes"))
    parser.add_argument("--seeds", type=int, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.what != "positions":
        small = dict(demos=(demos, 3), sizes=(sizes, 3))
        function, seeds = (small | dict(masked=(masked, 5), choice=(choice, 2), folds=(folds, 3)))[args.what]
        result = function(args.seeds or seeds) | dict(torch=torch.__version__)
        (RESULTS / f"{args.what}.json").write_text(json.dumps(result, indent=2) + "\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        config = resolve("pretrain", COMMON | dict(output=folder, epochs=16, eval_every=10_000))
        positions(config, args.seeds or 3)
        for name in ("positions.json", "positions.md"):
            (RESULTS / name).write_text((Path(folder) / name).read_text())
    print((RESULTS / "positions.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
