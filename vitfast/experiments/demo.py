"""The demo, the paper in small: pre-train on digits, fine-tune at a higher resolution, report."""

import html
import json
from pathlib import Path

import torch

from ..eval.accuracy import open_weights
from ..eval.inspect.page import columns, page
from ..run.config import Config
from ..run.files import as_csv
from ..run.results import Results
from ..train.log import COLUMNS, read_metrics
from ..train.recipes import resolve
from ..train.report import model_sections, optional
from ..train.report.commands import origin
from ..train.report.progress import curves
from ..train.report.words import with_error
from ..train.run_folder import kept_weights
from .runs import finish


def demo_configs(output: Path, seed: int = 0, device: str = "") -> tuple[Config, Config]:
    """The two runs of the demo: pre-training at 32 px, fine-tuning of its result at 48 px."""
    shared = dict(data="digits", seed=seed, device=device)
    pretrain = resolve("pretrain", dict(recipe="digits", output=str(output / "pretrain"), **shared))
    weights = str(output / "pretrain" / "checkpoints" / "last")
    own = dict(recipe="finetune/digits", output=str(output / "finetune"), weights=weights)
    return pretrain, resolve("finetune", own | shared)


def demo(output: Path, seed: int = 0, device: str = "") -> dict:
    """Runs the demo into `output`, or goes on with it. Returns its summary. Raises Stopped."""
    files = ("metrics.csv", "summary.json", "report.html")
    results = Results(output, "demo", dict(seed=seed, device=device), files)
    print(f"vitfast demo: a 4-layer ViT learns handwritten digits from scratch; results in {output}/")
    summaries, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower on more threads, whose sums round differently
    try:
        for config in demo_configs(output, seed, device):
            print(f"{config.task}: {config.img_size} px, {config.epochs:g} epochs")
            summaries[config.task] = finish(config)
    finally:
        torch.set_num_threads(threads)
    first, second = summaries["pretrain"], summaries["finetune"]
    summary = dict(
        pretrain_accuracy=first["accuracy"],
        finetune_accuracy=second["accuracy"],
        images_per_second=first["images_per_second"],
        device=first["device"],
        seconds=round(first["seconds"] + second["seconds"], 2),
        seed=seed,
        test_images=second["val_images"],
        pretrain=first,
        finetune=second,
    )
    both = [dict(task=task) | record for task in summaries for record in read_metrics(output / task)]
    results.write("metrics.csv", as_csv(("task", *COLUMNS), both))
    results.write("summary.json", json.dumps(summary, indent=2) + "\n")
    write_report(output, summary, results)
    before, after = (with_error(each["accuracy"], each["val_images"]) for each in (first, second))
    print(f"test accuracy: {before} after pre-training, {after} after fine-tuning at 48 px")
    print(f"± is the standard error. {showed(summary)}")
    speed = f"{summary['images_per_second']:,.0f} images/s on {summary['device']}"
    print(f"{summary['seconds']:.0f} s, {speed}; see {output}/report.html")
    return summary


def showed(summary: dict) -> str:
    """The sentences on the test images that are classified correctly before and after fine-tuning."""
    images, shares = summary["test_images"], (summary["pretrain_accuracy"], summary["finetune_accuracy"])
    before, after = (round(share * images) for share in shares)
    change = f"{abs(after - before)} {'more' if after > before else 'fewer'}" if after != before else "as many"
    chance = sum(share * (1 - share) * images for share in shares) ** 0.5
    verdict = "more than chance" if abs(after - before) > 2 * chance else "no more than chance would give"
    return (
        f"Of {images} test images, {before} are classified correctly after pre-training and {after} after fine-tuning "
        f"at 48 pixels: {change}. The standard error of the difference is {chance:.1f} images, so this is {verdict}."
    )


@optional()
def write_report(output: Path, summary: dict, results: Results) -> None:
    """Writes report.html into the results from the demo's run folders, or says in one line why not."""
    weights, images = str(kept_weights(output / "finetune")), summary["test_images"]
    model, data = open_weights(resolve("eval", dict(data="digits", weights=weights, device="cpu")))
    names = dict(pretrain="Pre-training at 32 pixels", finetune="Fine-tuning at 48 pixels")
    links = (f'<li><a href="{task}/report.html">{html.escape(name)}</a></li>' for task, name in names.items())
    runs = "The report of each run has its settings, its evaluations and the commands that go on from it."
    sections = {"What fine-tuning showed": (showed(summary), ""), "The runs": (runs, f"<ul>{''.join(links)}</ul>")}
    sections |= curves({task: output / task for task in names})
    sections |= model_sections(model, data)
    numbers = {
        "test accuracy after pre-training": with_error(summary["pretrain_accuracy"], images),
        "test accuracy after fine-tuning at 48 px": with_error(summary["finetune_accuracy"], images),
        "test images, never trained on": f"{images}",
        "training speed, pre-training": f"{summary['images_per_second']:,.0f} images/s",
        "device": summary["device"],
        "time": f"{summary['seconds']:.0f} s",
        "parameters": f"{summary['finetune']['parameters']:,}",
    }
    introduction = (
        f"A {len(model.blocks)}-layer, {model.embed_dim}-wide Vision Transformer, pre-trained from scratch on 8 x 8 "
        "scans of handwritten digits, then fine-tuned at a higher resolution: its position embeddings interpolated in "
        "2-D, its head replaced by one zero linear layer. ± is the standard error."
    )
    sections["Origin"] = ("", columns(("", ""), origin().items(), left=2))
    results.write("report.html", page("vitfast demo", numbers, sections, introduction))
