"""report.html of the demo: one file that opens offline, with its figures inside."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from ..data.loader import open_data
from ..device import choose_device
from ..files import write_text
from ..inspect.figures import as_png, draw_attention, draw_similarity
from ..inspect.measures import attention_rollout, position_similarity
from ..inspect.page import page, picture
from ..model import ViT
from ..train.log import read_metrics
from ..train.recipes import resolve

BLUE, ORANGE = "#3366aa", "#dd7722"


def draw_curves(runs: dict[str, list[dict]]) -> Figure:
    """Loss and accuracy of each run against its epochs."""
    figure = Figure(figsize=(10, 5.5))
    axes = figure.subplots(2, len(runs), squeeze=False, sharex="col")
    for column, (name, metrics) in enumerate(runs.items()):
        for axis, key in zip(axes[:, column], ("loss", "accuracy")):
            for split, label, color in (("train", "training", BLUE), ("val", "test", ORANGE)):
                points = [(entry["epoch"], entry[key]) for entry in metrics if entry["split"] == split]
                axis.plot(*zip(*points), color=color, label=label, linewidth=1.4)
            axis.set_ylabel(key)
            axis.grid(alpha=0.3)
        axes[0][column].set_title(name)
        axes[0][column].legend(frameon=False)
        axes[1][column].set_xlabel("epoch")
    return figure


def draw_predictions(images: np.ndarray, labels: list[int], predicted: list[int], classes: list[str]) -> Figure:
    """Pictures with what the model says; wrong ones in orange with the truth."""
    figure = Figure(figsize=(10, 4.4))
    axes = figure.subplots(3, 8)
    for axis, image, label, guess in zip(axes.flat, images, labels, predicted):
        axis.imshow(image.transpose(1, 2, 0))
        right = label == guess
        axis.set_title(
            classes[guess] if right else f"{classes[guess]}, is {classes[label]}",
            color="black" if right else ORANGE,
            fontsize=11,
        )
    for axis in axes.flat:
        axis.axis("off")
    return figure


@torch.no_grad()
def write_report(output: Path, summary: dict) -> Path:
    """Writes `output/report.html` from the demo's run folders; returns its path."""
    weights = output / "finetune" / "checkpoints" / "last"
    model = ViT.from_pretrained(weights).eval()
    config = resolve("eval", dict(data="digits", weights=str(weights)))
    data = open_data(config, model.patch_embed.img_size, model.patch_embed.patch_size, choose_device("cpu"))
    images, labels = (torch.cat(batches) for batches in list(zip(*data.eval_batches()))[:2])
    predicted = model(images).argmax(-1)
    wrong = (predicted != labels).nonzero().flatten()[:4]
    shown = torch.cat([wrong, (predicted == labels).nonzero().flatten()[: 24 - len(wrong)]])
    eight = images[:8]
    # Heading: note, figure, what stands for it where it cannot be seen.
    sections = {
        "Curves": (
            "",
            draw_curves({name: read_metrics(output / name) for name in ("pretrain", "finetune")}),
            "loss and accuracy against epochs",
        ),
        "Test images and predictions": (
            f"{len(wrong)} of the model's mistakes first (orange), then right ones.",
            draw_predictions(images[shown].numpy(), labels[shown].tolist(), predicted[shown].tolist(), data.classes),
            "test images",
        ),
        "Attention": (
            "Attention rollout: how much of each patch reaches the class token, heads averaged, through all layers.",
            draw_attention(eight.numpy(), attention_rollout(model, eight).numpy()),
            "attention maps",
        ),
        "Position embeddings": (
            "Each tile is one patch; its colours are the cosine similarity of its position embedding to all others.",
            draw_similarity(position_similarity(model).numpy()),
            "similarity of position embeddings",
        ),
    }
    facts = {
        "test accuracy after pre-training": f"{summary['pretrain_accuracy']:.4f}",
        "test accuracy after fine-tuning at 48 px": f"{summary['finetune_accuracy']:.4f}",
        "test images, never trained on": f"{summary['test_images']}",
        "training speed, pre-training": f"{summary['images_per_second']:,.0f} images/s",
        "device": summary["device"],
        "time": f"{summary['seconds']:.0f} s",
        "parameters": f"{summary['finetune']['parameters']:,}",
    }
    introduction = (
        f"A {len(model.blocks)}-layer, {model.embed_dim}-wide Vision Transformer, pre-trained from scratch on 8 x 8 "
        "scans of handwritten digits, then fine-tuned at a higher resolution: its position embeddings interpolated in "
        "2-D, its head replaced by one zero linear layer."
    )
    pictures = {name: (note, picture(as_png(figure), alt)) for name, (note, figure, alt) in sections.items()}
    write_text(output / "report.html", page("vitfast demo", facts, pictures, introduction))
    return output / "report.html"
