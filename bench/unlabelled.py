"""LeJEPA and its rivals on real pictures, on two CPU cores in an hour.

    python bench/unlabelled.py                     # all data sets; writes bench/results/unlabelled
    python bench/unlabelled.py --data stamps       # one of them
    python bench/unlabelled.py --choose --data emoji --methods lejepa --set emoji.lejepa.color_jitter=0.8

The data sets are scikit-learn's digits, the stamps of Tux Paint and emoji (unlabelled_data.py has their splits). A
small ViT learns from the training pictures by each method, from the same three initialisations:

- random: it stays as it is.
- lejepa, masked: LeJEPA and masked patch prediction, without labels.
- supervised: all training labels, from scratch.
- few: 5 labels of each class, from scratch, on digits.

Then its features of the training pictures and their labels fit a linear probe and the 20 nearest neighbours, which are
measured on the test pictures; on digits also a linear probe of 5 labels a class, in 5 draws. Those of `few` are the
same, and its seed is the number of the draw.

With --choose, a part of the training pictures takes the place of the test pictures, which are not even written: so the
settings below were chosen. Two processes of one thread each share the runs.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import active_children, get_context
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # before torch, which reads them

import torch
from unlabelled_data import NAMES, Unavailable, both_sides, fetch, write_folder
from unlabelled_table import differences, load, summary, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "unlabelled"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vitfast" / "pictures"
METHODS = ("lejepa", "masked", "supervised", "random", "few")
SEEDS, DRAWS, SHOTS = 3, 5, 5
SIZE = dict(embed_dim=96, depth=4, num_heads=3, class_token=False, global_pool="avg")
# A scan has 8 x 8 pixels, and strokes of one or two.
IMAGE = dict(digits=dict(img_size=24, patch_size=4)) | dict.fromkeys(NAMES[1:], dict(img_size=32, patch_size=8))

# All methods have AdamW and one cosine cycle, and see each training picture equally often. LeJEPA takes six crops of it
# each time, so masked patch prediction, which takes one, has about a quarter of its seconds. SIGReg grows with the
# batch: lambda is larger than the 0.02 to 0.05 of batches of 256.
COMMON = dict(recipe="ssl/small", global_pool="avg", drop_path=0.0, lr_end=0.0, warmup_ratio=0.1)
COMMON |= dict(weight_decay=0.05, hue_jitter=0.0, jitter_share=1.0, grayscale=0.0, blur=0.0, solarize=0.0)
COMMON |= dict(batch_size=64)
LEJEPA = dict(objective="lejepa", lr=2e-3, sigreg_lambda=0.1, projector_width=512, projector_dim=16)
LEJEPA |= dict(global_crops=2, local_crops=4, local_size=16, local_scale=(0.15, 0.4), crop_scale=(0.5, 1.0))
MASKED = dict(objective="masked", lr=1e-3, color_jitter=0.0)
LABELLED = dict(objective="softmax", lr=1e-3, label_smoothing=0.1)
# Pictures are mirrored, and their colours change where colours are not what is predicted.
MIRRORED = dict(hflip=0.5, crop_scale=(0.5, 1.0))
SCANS = dict(hflip=0.0, crop_scale=(0.8, 1.0), crop_ratio=(0.9, 1.1), color_jitter=0.0)  # as the recipe digits
TURNED = "rand-m5-n2-mstd0.5-tweights"  # timm's RandAugment that mostly turns, shears and shifts
SETTINGS = dict(
    digits=dict(
        lejepa=LEJEPA | dict(lr=1e-3, local_size=12, hflip=0.0, auto_augment=TURNED, epochs=40),
        masked=MASKED | SCANS | dict(epochs=40),
        supervised=LABELLED | SCANS | dict(epochs=40),
        few=LABELLED | SCANS | dict(steps=400, batch_size=50, label_smoothing=0.0),
    ),
    stamps=dict(
        lejepa=LEJEPA | MIRRORED | dict(color_jitter=0.4, epochs=80),
        masked=MASKED | MIRRORED | dict(epochs=80),
        supervised=LABELLED | MIRRORED | dict(color_jitter=0.4, epochs=80),
    ),
    emoji=dict(
        lejepa=LEJEPA | MIRRORED | dict(color_jitter=0.4, epochs=30),
        masked=MASKED | MIRRORED | dict(epochs=30),
        supervised=LABELLED | MIRRORED | dict(color_jitter=0.4, epochs=30),
    ),
)

HEAD = """# Learning without labels

Written by `python bench/unlabelled.py`, whose docstring says what is compared; `bench/unlabelled_data.py` says what the
data sets are. A cell has the mean over seeds, and each seed's number in brackets. The other methods start from the
weights of `random`. Standard errors are those of the difference of two means over seeds, on one split. The JSON files
have settings, versions and seconds. Those are seconds of a core, as other programs ran beside the runs of digits.

Settings were chosen by a part of the training pictures (`choices.json`). Each file names the commit that held them
before they were measured. Nobody had looked at the test pictures of digits then. On stamps and emoji, a first
measurement had half as many passes for all methods; its results were known when these were chosen (linear probe of
LeJEPA 0.605 and 0.577, of masked patches 0.592 and 0.562). A pass over the pictures costs masked patch prediction about
a quarter of what it costs LeJEPA, which takes six crops of each; both have the same number of passes.

"""


def jobs(names: list[str], methods: list[str], seeds: int) -> list[tuple[str, str, int]]:
    """(data set, method, seed) of all runs, the longest methods first."""
    found = [(name, method, seed) for method in METHODS for seed in range(seeds) for name in names if method != "few"]
    few = [("digits", "few", draw) for draw in range(DRAWS) if "digits" in names]
    return [each for each in found + few if each[1] in methods]


def run_job(folder: Path, name: str, method: str, seed: int, settings: dict) -> dict:
    """One run in a process of its own: what it was, its scores and what it cost."""
    from vitfast import ViT

    torch.set_num_threads(1)
    began, used = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        torch.manual_seed(seed)
        ViT(**SIZE, **IMAGE[name], num_classes=0).save_pretrained(f"{scratch}/start")
        weights, trained = Path(scratch, "start"), {}
        if method != "random":
            data = folder / name
            if method == "few":
                data = few_folder(Path(scratch), data, seed)
            listed = "train.txt" if settings["objective"] in ("lejepa", "masked") else ""
            trained = train_it(str(data / listed), weights, Path(scratch, "run"), seed, settings)
            weights = Path(scratch, "run", "checkpoints", "last")
        scores = trained if method == "few" else trained | judge(ViT.from_pretrained(weights), folder / name)
    spent = dict(seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - used)
    return dict(data=name, method=method, seed=seed) | rounded(scores | spent)


def train_it(data: str, weights: Path, run: Path, seed: int, settings: dict) -> dict:
    """Trains a ViT from weights: its losses, and the accuracy of its own head where it has one.

    Ends the script where the run was asked to stop, so that no half run is judged.
    """
    from vitfast.train.log import read_metrics
    from vitfast.train.recipes import resolve
    from vitfast.train.trainer import train

    given = dict(data=data, weights=str(weights), output=str(run), seed=seed, device="cpu", workers=0, img_size=0)
    summary = train(resolve("pretrain", COMMON | settings | given | dict(eval_every=10**9)))
    if not summary["finished"] or summary.get("asked_to_stop"):
        raise SystemExit(f"the run of {data} was stopped, so nothing is written")
    losses = [float(each["loss"]) for each in read_metrics(run) if each["split"] == "train"]
    found = dict(steps=summary["steps"], first_loss=losses[0], loss=losses[-1])
    return found | (dict(accuracy=summary["accuracy"]) if settings["objective"] == "softmax" else {})


def few_folder(scratch: Path, data: Path, draw: int) -> Path:
    """A data folder with 5 training pictures of each class, and all of the other side."""
    files, labels, _ = listed(data / "train")
    for i in shots(labels, draw):
        path = scratch / "few" / files[i].relative_to(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files[i], path)
    shutil.copytree(data / "val", scratch / "few" / "val")
    return scratch / "few"


def listed(folder: Path) -> tuple[list[Path], torch.Tensor, int]:
    """(files, class numbers, how many classes) of a folder of class folders."""
    classes, files = sorted(each.name for each in folder.iterdir()), sorted(folder.glob("*/*.png"))
    return files, torch.tensor([classes.index(each.parent.name) for each in files]), len(classes)


def shots(labels: torch.Tensor, draw: int) -> list[int]:
    """5 pictures of each class."""
    from vitfast.eval.fewshot import draw_shots

    return draw_shots(labels.numpy(), len(labels.unique()), SHOTS, draw).tolist()


def judge(model: torch.nn.Module, data: Path) -> dict:
    """The scores of a ViT's features, fitted on train/ and measured on val/."""
    from vitfast import Embedder
    from vitfast.eval.fewshot import knn, linear
    from vitfast.train.unlabelled import effective_rank

    embedder, sides = Embedder(model, workers=0), []
    for side in ("train", "val"):
        files, labels, classes = listed(data / side)
        sides.append((embedder.embed(files), labels))
    (x, y), (queries, truth) = sides
    right = lambda found: (found == truth).double().mean().item()  # noqa: E731
    scores = dict(linear=right(linear(x, y, queries, classes)), knn=right(knn(x, y, queries, classes)))
    if data.name == "digits":
        draws = [shots(y, draw) for draw in range(DRAWS)]
        each = [right(linear(x[chosen], y[chosen], queries, classes)) for chosen in draws]
        scores |= dict(few=statistics.mean(each), few_draws=each)
    return scores | dict(rank=effective_rank(queries))


def rounded(values: dict) -> dict:
    """Numbers with as many digits as mean something."""
    keep = lambda value: round(value, 5) if isinstance(value, float) else value  # noqa: E731
    return {k: [keep(each) for each in v] if isinstance(v, list) else keep(v) for k, v in values.items()}


def run_all(folder: Path, wanted: list[tuple[str, str, int]], settings: dict, processes: int) -> list[dict]:
    """The results of all runs, in the order of `wanted`; says each as it comes."""
    found = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = {pool.submit(run_job, folder, *job, settings[job[0]].get(job[1], {})): job for job in wanted}
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                print(json.dumps(future.result()), flush=True)
        except BaseException:  # where a run failed or was stopped, the others end
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise
    return [found[job] for job in wanted]


def experiment(
    names: list[str], methods: list[str], seeds: int, cache: Path, choosing: bool, settings: dict, processes: int = 2
) -> list[dict]:
    """Runs the methods on the data sets: the content of each data set's result file. Raises Unavailable."""
    began = time.perf_counter()
    if set(names) - {"digits"}:
        fetch(cache)
    facts = machine_facts(cache) | dict(processes=processes, load_before=os.getloadavg()[0], together=list(names))
    pictures = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            sides = both_sides(name, cache, choosing)
            write_folder(Path(scratch, name), sides)
            counts = [Counter(each.subject for each in side) for side in sides]
            classes = {subject: [count[subject] for count in counts] for subject in sorted(counts[0])}
            pictures[name] = dict(train=len(sides[0]), test=len(sides[1]), classes=classes)
        runs = run_all(Path(scratch), jobs(names, methods, seeds), settings, processes)
    facts |= dict(wall_seconds=round(time.perf_counter() - began, 1), load_after=os.getloadavg()[0])
    results = []
    for name in names:
        own = [each for each in runs if each["data"] == name]
        means, cost = summary(own), round(sum(each["cpu_seconds"] for each in own), 1)
        result = dict(data=name, judged_by="a part of the training pictures" if choosing else "the test pictures")
        result |= facts | dict(cpu_seconds=cost, pictures=pictures[name], model=SIZE | IMAGE[name], common=COMMON)
        results.append(result | dict(settings=settings[name], means=means, differences=differences(means), runs=own))
    return results


def machine_facts(cache: Path) -> dict:
    """The commit, versions, packages and processor of a run."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    names = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "pillow")
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    archives = [path.name for path in sorted([*cache.glob("*.deb"), *cache.glob("*.tgz")])]
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return dict(commit=commit, versions=versions, packages=archives, cpu=cpu, cores=os.cpu_count())


def overridden(changes: list[str]) -> dict:
    """SETTINGS with changes DATA.METHOD.FIELD=VALUE, VALUE in JSON."""
    settings = {name: {method: dict(values) for method, values in each.items()} for name, each in SETTINGS.items()}
    for change in changes:
        path, _, value = change.partition("=")
        name, method, field = path.split(".")
        if field in ("epochs", "steps"):
            settings[name][method].pop("epochs", settings[name][method].pop("steps", None))
        settings[name][method][field] = json.loads(value)
    return settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--choose", action="store_true", help="judge by a part of the training pictures")
    parser.add_argument("--set", nargs="+", default=[], metavar="DATA.METHOD.FIELD=VALUE", help="other settings")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the packages are, or are fetched to")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    settings = overridden(args.set)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the runs too
    try:
        results = experiment(args.data, args.methods, args.seeds, args.cache, args.choose, settings, args.processes)
    except Unavailable as error:
        parser.exit(1, f"{error}\n")
    if args.choose:
        print(table(results))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    for result in results:
        (args.output / f"{result['data']}.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.output / "README.md").write_text(HEAD + table(load(args.output)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
