"""report.html of a finished run: one file that opens offline, its pictures inside."""

import dataclasses
import io
import logging
import platform
import shlex
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from ..data.datasets import Shards, Subset
from ..data.loader import Data
from ..data.samples import ONE, PADDING
from ..errors import InputError
from ..eval.accuracy import logits_of, open_weights
from ..eval.inspect.measures import attention_rollout, position_similarity
from ..eval.inspect.page import gallery, page, picture, table
from ..model.baselines import load_any
from ..model.vit import ViT
from ..run.config import Config, as_plain
from ..run.distributed import is_first_rank
from ..run.files import write_atomically
from ..run.lock import LOCK, locked
from ..version import __version__
from .log import read_metrics
from .run_folder import LAST

SHOWN, ATTENDED = 24, 8  # validation images with predictions, with attention
THUMBNAIL = 96  # pixels of the longer side: with these numbers a report stays under 3 MB, whatever is in the images
logger = logging.getLogger("vitfast")


@contextmanager
def optional():
    """Turns an error in the block into one warning: a run counts as finished without a report too."""
    try:
        yield
    except ModuleNotFoundError as error:
        logger.warning("no report.html: %s is not installed", error.name)
    except Exception as error:
        logger.warning("no report.html: %s", " ".join(f"{type(error).__name__}: {error}".split()))


@optional()
def write_report(config: Config, data: Data, summary: dict, device: torch.device, dtype: torch.dtype | None) -> None:
    """Writes report.html into the folder of a run that has its checkpoint, or says why not."""
    run = Path(config.output)
    model = load_any(config.model, run / "checkpoints" / LAST).to(device).eval()  # not compiled, not sharded
    sections = curves({config.task: run}) | validation_sections(model, data, device, dtype, config.objective)
    sections |= many_sizes(summary)
    settings = {name: str(value) for name, value in as_plain(config).items() if name != "about"}
    sections["Settings"] = ("Those of config.yaml.", table(settings))
    introduction = f"Recipe {config.name} on {config.data}. ± is the standard error."
    text = encoded_page(f"vitfast {config.task}", facts(summary) | origin(), sections, introduction)
    write_atomically(run / "report.html", lambda temporary: temporary.write_bytes(text))


@optional()
def complete(config: Config, summary: dict) -> None:
    """Writes the report that a finished run lacks, as after a kill, and removes the lock that one left."""
    run = Path(config.output)
    if not is_first_rank() or ((run / "report.html").exists() and not (run / LOCK).exists()):
        return
    with locked(run):
        if (run / "report.html").exists():
            return
        last = dataclasses.replace(config, weights=str(run / "checkpoints" / LAST))
        _, data, device, dtype = open_weights(last)
        write_report(config, data, summary, device, dtype)


def encoded_page(title: str, *content) -> bytes:
    """The bytes of a report, from the arguments of `page`; names of folders need not be valid text."""
    return page(title, *content).encode(errors="replace")


def facts(summary: dict) -> dict[str, str]:
    """The entries of a run's summary as readable text."""

    def text(value) -> str:
        if isinstance(value, float):
            return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    known = {
        k.replace("_", " "): text(v) for k, v in summary.items() if v is not None and k not in ("finished", "sizes")
    }
    if summary.get("top5") is not None:  # the accuracy of masked patches is no share of images
        known["accuracy"] = with_error(summary["accuracy"], summary["val_images"])
    return known


def many_sizes(summary: dict) -> dict[str, tuple[str, str]]:
    """The section of a run on images of many sizes; other runs have none."""
    if not summary.get("sizes"):
        return {}
    from ..eval.inspect.figures import as_png, draw_counts

    saved, each = summary["padding_not_computed"], summary["patches_per_image"]
    note = (
        f"Each image was drawn a size, the side of a square of its area, and had {each:,.1f} patches in the mean. "
        f"Filled up to the longest image of its batch, {saved:.1%} of all patches would have been padding: "
        "none of it was computed."
    )
    figure = draw_counts({int(side): count for side, count in summary["sizes"].items()}, "pixels", "images")
    return {"Sizes": (note, picture(as_png(figure), "how many images were drawn each size"))}


def with_error(accuracy: float, images: int) -> str:
    """An accuracy on so many images, as text with its binomial standard error."""
    return f"{accuracy:.4f} ± {(accuracy * (1 - accuracy) / images) ** 0.5:.4f}"


def origin() -> dict[str, str]:
    """The command and the versions that make a page."""
    program = Path(sys.argv[0]).name
    words = ["python", "-m", "vitfast"] if program == "__main__.py" else [program]
    command = shlex.join([*words, *sys.argv[1:]])
    versions = f"vitfast {__version__}, torch {torch.__version__}, timm {timm.__version__}"
    return dict(command=command, versions=f"{versions}, Python {platform.python_version()}")


def curves(runs: dict[str, Path]) -> dict[str, tuple[str, str]]:
    """The section of the curves in metrics.csv of the named run folders, side by side."""
    from ..eval.inspect.figures import as_png, draw_curves

    figure = draw_curves({name: read_metrics(run) for name, run in runs.items()})
    return {"Curves": ("", picture(as_png(figure), "loss, accuracy and learning rate against epochs"))}


def validation_sections(
    model: nn.Module,
    data: Data,
    device: torch.device,
    dtype: torch.dtype | None,
    objective: str = "softmax",
    examined: int = SHOWN,
) -> dict[str, tuple[str, str]]:
    """Sections with a model's predictions for SHOWN validation images and, for a ViT, its attention.

    model: in eval mode. examined: how many images the shown ones are chosen from, mistakes first; these are evenly
    spread over the set, or the first of a set that is read in order.
    """
    images, labels = _validation_images(data, examined)
    sections = {}
    if getattr(model, "num_classes", 0):  # a ViT that learned by masked patches has no head
        sections["Validation images and predictions"] = _predictions(
            model, images, labels, data.classes, device, dtype, objective
        )
    return sections | (_inside(model, images[:ATTENDED]) if isinstance(model, ViT) else {})


def _validation_images(data: Data, count: int) -> tuple[Tensor, Tensor]:
    source = data.val
    if not isinstance(source, Shards):
        chosen = np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int)
        source = Subset(source, chosen.tolist())
    config = dataclasses.replace(data.config, eval_batch_size=count)
    images, labels = next(iter(dataclasses.replace(data, config=config, workers=0, ranks=ONE).in_order(source)))[:2]
    read = (labels.reshape(len(labels), -1) != PADDING).all(1)
    return images[read], labels[read]


def _predictions(model, images, labels, classes, device, dtype, objective) -> tuple[str, str]:
    """Note and pictures of SHOWN images with their most probable classes, and the truth if it is another.

    labels: classes (B,), or zeros and ones (B, K).
    """
    with torch.no_grad():
        logits = logits_of(model, images, device, dtype).cpu()
    probabilities, found = (logits.sigmoid() if objective == "sigmoid" else logits.softmax(-1)).max(-1)
    truth = labels if labels.dim() == 2 else nn.functional.one_hot(labels, logits.shape[-1])
    right = truth.gather(1, found[:, None])[:, 0] > 0
    pictures = []
    for i in right.int().argsort(stable=True)[:SHOWN].tolist():
        names = ", ".join(classes[k] for k in truth[i].nonzero().flatten()) or "of no class"
        text = f"{classes[found[i]]} {probabilities[i]:.0%}"
        shown = _thumbnail(images[i], f"validation image, {names}")
        pictures.append((shown, text if right[i] else f"{text}, is {names}", not right[i]))
    wrong = int((~right).sum())
    return f"Of {len(images)} images {wrong} are answered wrongly: those first, in orange.", gallery(pictures)


def _thumbnail(image: Tensor, alt: str) -> str:
    small = to_pil_image(image)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "png")
    return picture(buffer.getvalue(), alt)


def _inside(model: ViT, images: Tensor) -> dict[str, tuple[str, str]]:
    """Attention rollout and position embeddings, as `vitfast inspect` draws them."""
    from ..eval.inspect.figures import as_png, draw_attention, draw_similarity
    from ..eval.inspect.report import SECTIONS

    figures = dict(rollout=draw_attention(images.numpy(), attention_rollout(model, images).cpu().numpy()))
    with suppress(InputError):  # the model adds no positions to its patches
        figures["positions"] = draw_similarity(position_similarity(model).cpu().numpy(), pixels=400)
    return {
        heading: (note, picture(as_png(figures[name]), heading)) if name in figures else (absent, "")
        for name, (heading, note, absent) in SECTIONS.items()
        if name in ("rollout", "positions")
    }
