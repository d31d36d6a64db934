"""report.html of the demo: one file that opens offline, with its figures inside."""

import html
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from ..data.loader import open_data
from ..device import choose_device
from ..files import write_text
from ..inspect.figures import STYLE, as_png, draw_attention, draw_similarity, embed
from ..inspect.measures import attention_rollout, position_similarity
from ..model import ViT
from ..train.log import read_metrics
from ..train.recipes import resolve

BLUE, ORANGE = "#3366aa", "#dd7722"


def draw_curves(runs: dict[str, list[dict]]) -> Figure:
    """Loss and accuracy of each run against its epochs."""
    figure = Figure(figsize=(10, 5.5))
    axes = figure.subplots(2, len(runs), squeeze=False, sharex="col")
    for column, (name, rows) in enumerate(runs.items()):
        for row, key in enumerate(("loss", "accuracy")):
            axis = axes[row][column]
            for split, color in (("train", BLUE), ("val", ORANGE)):
                points = [(r["epoch"], r[key]) for r in rows if r["split"] == split]
                axis.plot(*zip(*points), color=color, label={"train": "training", "val": "test"}[split], linewidth=1.4)
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


def _image(figure: Figure, alt: str) -> str:
    return embed(as_png(figure), alt)


@torch.no_grad()
def write_report(output: Path, summary: dict) -> Path:
    """Writes `output/report.html` from the demo's run folders; returns its path."""
    weights = output / "finetune" / "checkpoints" / "last"
    device = choose_device("cpu")
    model = ViT.from_pretrained(weights).eval()
    config = resolve("eval", dict(data="digits", weights=str(weights)))
    data = open_data(config, model.patch_embed.img_size, model.patch_embed.patch_size, device)
    images, labels = (torch.cat(parts) for parts in zip(*data.eval_batches()))
    predicted = model(images).argmax(-1)
    wrong = (predicted != labels).nonzero().flatten()[:4]
    shown = torch.cat([wrong, (predicted == labels).nonzero().flatten()[: 24 - len(wrong)]])
    eight = images[:8]
    runs = {name: read_metrics(output / name) for name in ("pretrain", "finetune")}
    figures = dict(
        curves=_image(draw_curves(runs), "loss and accuracy against epochs"),
        predictions=_image(
            draw_predictions(images[shown].numpy(), labels[shown].tolist(), predicted[shown].tolist(), data.classes),
            "test images",
        ),
        attention=_image(draw_attention(eight.numpy(), attention_rollout(model, eight).numpy()), "attention maps"),
        similarity=_image(draw_similarity(position_similarity(model).numpy()), "similarity of position embeddings"),
    )
    facts = (
        ("test accuracy after pre-training", f"{summary['pretrain_accuracy']:.4f}"),
        ("test accuracy after fine-tuning at 48 px", f"{summary['finetune_accuracy']:.4f}"),
        ("test images, never trained on", f"{summary['test_images']}"),
        ("training speed, pre-training", f"{summary['images_per_second']:,.0f} images/s"),
        ("device", summary["device"]),
        ("time", f"{summary['seconds']:.0f} s"),
        ("parameters", f"{summary['finetune']['parameters']:,}"),
    )
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td class=n>{html.escape(v)}</td></tr>" for k, v in facts)
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>vitfast demo</title>
<style>{STYLE}</style>
<h1>vitfast demo</h1>
<p class="small">A {len(model.blocks)}-layer, {model.embed_dim}-wide Vision Transformer, pre-trained from scratch on
8 x 8 scans of handwritten digits, then fine-tuned at a higher resolution: its position embeddings interpolated in 2-D,
its head replaced by one zero linear layer.</p>
<table>{rows}</table>
<h2>Curves</h2>
{figures["curves"]}
<h2>Test images and predictions</h2>
<p class="small">{len(wrong)} of the model's mistakes first (orange), then right ones.</p>
{figures["predictions"]}
<h2>Attention</h2>
<p class="small">Attention rollout: how much of each patch reaches the class token, heads averaged, through all
layers.</p>
{figures["attention"]}
<h2>Position embeddings</h2>
<p class="small">Each tile is one patch; its colours are the cosine similarity of its position embedding to all
others.</p>
{figures["similarity"]}
</html>
"""
    path = output / "report.html"
    write_text(path, page)
    return path
