"""report.html of the demo: one file that opens offline, with its figures inside."""

import base64
import html
import io
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from ..inspect import attention_rollout, position_similarity  # noqa: E402
from ..model import ViT  # noqa: E402
from .build import choose_device  # noqa: E402
from .data import open_data  # noqa: E402
from .log import read_metrics, write_text  # noqa: E402
from .recipes import resolve  # noqa: E402

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
h1{margin-bottom:0}h2{margin-top:2.5rem}img{max-width:100%}table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}p.small{color:#666}"""
BLUE, ORANGE = "#3366aa", "#dd7722"


def _embed(figure: plt.Figure, alt: str) -> str:
    """A figure as an <img> that holds its own bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def draw_curves(runs: dict[str, list[dict]]) -> plt.Figure:
    """Loss and accuracy of each run against its epochs."""
    figure, axes = plt.subplots(2, len(runs), figsize=(10, 5.5), squeeze=False, sharex="col")
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


def draw_predictions(images: np.ndarray, labels: list[int], predicted: list[int], classes: list[str]) -> plt.Figure:
    """Pictures with what the model says; wrong ones in orange with the truth."""
    figure, axes = plt.subplots(3, 8, figsize=(10, 4.4))
    for axis, image, label, guess in zip(axes.flat, images, labels, predicted):
        axis.imshow(image.transpose(1, 2, 0))
        right = label == guess
        axis.set_title(classes[guess] if right else f"{classes[guess]}, is {classes[label]}", color="black" if right else ORANGE, fontsize=11)
    for axis in axes.flat:
        axis.axis("off")
    return figure


def draw_attention(images: np.ndarray, maps: np.ndarray) -> plt.Figure:
    """Pictures above the attention that reaches the output from each of their patches."""
    figure, axes = plt.subplots(2, len(images), figsize=(10, 2.8))
    for column, (image, weights) in enumerate(zip(images, maps)):
        axes[0][column].imshow(image.transpose(1, 2, 0))
        axes[1][column].imshow(image.mean(0), cmap="gray")
        axes[1][column].imshow(weights, cmap="inferno", alpha=0.65, extent=(0, image.shape[2], image.shape[1], 0), interpolation="bicubic")
    for axis in axes.flat:
        axis.axis("off")
    return figure


def draw_similarity(similarity: np.ndarray) -> plt.Figure:
    """A grid of grids: the tile of each patch shows its position's cosine similarity to all others."""
    rows, columns = similarity.shape[:2]
    figure, axes = plt.subplots(rows, columns, figsize=(5.4, 5.4 * rows / columns))
    for row in range(rows):
        for column in range(columns):
            picture = axes[row][column].imshow(similarity[row, column], vmin=-1, vmax=1)
            axes[row][column].set_xticks([])
            axes[row][column].set_yticks([])
    figure.colorbar(picture, ax=axes, shrink=0.7, label="cosine similarity")
    return figure


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
        curves=_embed(draw_curves(runs), "loss and accuracy against epochs"),
        predictions=_embed(draw_predictions(images[shown].numpy(), labels[shown].tolist(), predicted[shown].tolist(), data.classes), "test images"),
        attention=_embed(draw_attention(eight.numpy(), attention_rollout(model, eight).numpy()), "attention maps"),
        similarity=_embed(draw_similarity(position_similarity(model).numpy()), "similarity of position embeddings"),
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
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>vitfast demo</title>
<style>{STYLE}</style>
<h1>vitfast demo</h1>
<p class="small">A {len(model.blocks)}-layer, {model.embed_dim}-wide Vision Transformer, pre-trained from scratch on 8 x 8 scans of handwritten digits,
then fine-tuned at a higher resolution: its position embeddings interpolated in 2-D, its head replaced by one zero linear layer.</p>
<table>{rows}</table>
<h2>Curves</h2>
{figures["curves"]}
<h2>Test images and predictions</h2>
<p class="small">{len(wrong)} of the model's mistakes first (orange), then right ones.</p>
{figures["predictions"]}
<h2>Attention</h2>
<p class="small">Attention rollout: how much of each patch reaches the class token, heads averaged, through all layers.</p>
{figures["attention"]}
<h2>Position embeddings</h2>
<p class="small">Each tile is one patch; its colours are the cosine similarity of its position embedding to all others.</p>
{figures["similarity"]}
</html>
"""
    path = output / "report.html"
    write_text(path, page)
    return path
