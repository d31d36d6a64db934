"""report.html of a finished run: one file that opens offline, its pictures inside."""

import dataclasses
import hashlib
import logging
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from torch import Tensor, nn

from ...data.loader import Data
from ...errors import InputError
from ...eval.accuracy import open_weights
from ...eval.answers import Answers, look
from ...eval.inspect.measures import attention_rollout, position_similarity
from ...eval.inspect.page import columns, fold, page, picture, sentences
from ...model.baselines import load_any
from ...model.vit import ViT
from ...run.config import UNLABELLED, Config
from ...run.distributed import is_first_rank
from ...run.files import write_atomically
from ...run.lock import LOCK, locked
from ..introduction import model_in_words
from ..resume import read_record
from ..run_data import CHANGED, SPLITS
from ..run_folder import BEST, LAST
from .answers import answer_sections, first_images
from .commands import cpu_name, next_commands, origin
from .neighbours import neighbours
from .progress import progress_sections
from .words import results, settings

ATTENDED = 8  # validation images with attention
LOOKED = 2000  # validation images that are looked at where the run's last evaluation is lost
logger = logging.getLogger("vitfast")


@contextmanager
def optional():
    """Turns an error in the block into a warning: a run counts as finished even without a report."""
    try:
        yield
    except ModuleNotFoundError as error:
        logger.warning("no report.html: %s is not installed", error.name)
    except Exception as error:
        logger.warning("no report.html: %s", " ".join(f"{type(error).__name__}: {error}".split()))


@optional()
def write_report(config: Config, data: Data, summary: dict, answers: Answers | None = None) -> None:
    """Writes report.html into the folder of a run that has its checkpoint, or says why not.

    answers: those of the run's last evaluation, of all ranks; None: the model looks at up to LOOKED validation images.
    """
    run, last = Path(config.output), Path(config.output) / "checkpoints" / LAST
    model = load_any(config.model, last).to(data.device).eval()  # not compiled, not sharded
    sections = progress_sections(config)
    if summary.get("speed"):
        sections["Speed"] = "", sentences(summary["speed"]["said"])
    sections |= model_sections(model, data, answers) | many_sizes(summary)
    sections["Next commands"] = next_commands(config, summary, best_weights(run, summary))
    header, (shown, rest) = ("setting", "value", "field"), settings(config)
    folded = fold(f"{len(rest)} more, at their defaults", columns(header, rest, left=3))
    note = "They are in config.yaml; --set FIELD=VALUE changes one."
    sections["Settings"] = note, columns(header, shown, left=3) + folded
    sections["Origin"] = _origin(run, summary)
    told = introduction(config, model, data, summary)
    text = page(f"vitfast {config.task}", results(summary), sections, told)
    content = text.encode(errors="replace")  # names of folders need not be valid text
    write_atomically(run / "report.html", lambda temporary: temporary.write_bytes(content))


@optional()
def complete(config: Config, summary: dict) -> None:
    """Writes the report that a finished run lacks after a kill, and removes the lock that a kill left."""
    run = Path(config.output)
    if not is_first_rank() or ((run / "report.html").exists() and not (run / LOCK).exists()):
        return
    with locked(run):
        if (run / "report.html").exists():
            return
        last = dataclasses.replace(config, weights=str(run / "checkpoints" / LAST))
        write_report(config, open_weights(last)[1], summary)


def introduction(config: Config, model: nn.Module, data: Data, summary: dict) -> str:
    """The sentences below the title: what was trained where and when, and the model of the report."""
    run = Path(config.output)
    what = "Fine-tuning" if config.task == "finetune" else "Pre-training"
    where = summary["device"] if summary["device"] != "cpu" else f"the CPU ({cpu_name()})"
    finished = datetime.fromtimestamp((run / "summary.json").stat().st_mtime).astimezone()
    size = "x".join(map(str, data.img_size))
    told = f"{what} of {model_in_words(config, model)} on images of {size} pixels of {config.data}"
    told += f" by the recipe {config.name}" if config.name else ""
    told += f", finished on {finished:%Y-%m-%d at %H:%M %Z} on {where}. ± is the standard error. This report looks at "
    told += f"the last model, of step {summary['steps']:,}, in checkpoints/{LAST}/."
    if best_weights(run, summary).name != BEST:
        return told
    better = f"of step {summary['best_step']:,} with accuracy {summary['best_accuracy']:.4f}, in {BEST}/"
    return f"{told} An earlier one was better, {better}: the commands below take that."


def best_weights(run: Path, summary: dict) -> Path:
    """The folder of a run's best model, which is that of the last where no other was better."""
    last, best = run / "checkpoints" / LAST, summary.get("best_accuracy")
    return run / BEST if best is not None and best > summary["accuracy"] else last


def _origin(run: Path, summary: dict) -> tuple[str, str]:
    """The command, versions, machine and data of a run."""
    where = summary["device"] if summary["device"] != "cpu" else cpu_name()
    facts = origin() | {"device": where, "processes": f"{summary['ranks']}", "precision": summary["precision"]}
    facts |= {"CPU threads": f"{summary['threads']}"} if "threads" in summary else {}
    data, note = read_record(run / "checkpoints" / LAST)["data"], ""
    for split, name in zip(SPLITS, ("training", "validation")):
        hashes = [data[f"{split}_{kind}"] for kind in CHANGED if f"{split}_{kind}" in data]
        if hashes:
            facts[f"fingerprint of the {name} images"] = hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
            note = "A fingerprint is a hash of the paths, classes and sizes of all files."
    return note, columns(("", ""), facts.items(), left=2)


def many_sizes(summary: dict) -> dict[str, tuple[str, str]]:
    """The section of a run on images of many sizes; other runs have none."""
    if not summary.get("sizes"):
        return {}
    from ...eval.inspect.figures import as_png, draw_counts

    saved, each = summary["padding_not_computed"], summary["patches_per_image"]
    note = (
        f"Each image got a random size, the side of a square of its area, and had {each:,.1f} patches on average. "
        f"If every image were filled up to the longest of its batch, {saved:.1%} of all patches would be padding. "
        "None of it was computed."
    )
    figure = draw_counts({int(side): count for side, count in summary["sizes"].items()}, "pixels", "images")
    return {"Sizes": (note, picture(as_png(figure), "how many images got each size", chart=True))}


def model_sections(model: nn.Module, data: Data, answers: Answers | None = None) -> dict[str, tuple[str, str]]:
    """The sections on a model's answers, if it has a head, and on a ViT's attention and positions.

    model: in eval mode. answers: those to the whole validation set; None: it looks at up to LOOKED images.
    """
    sections = {}
    if data.config.objective in UNLABELLED:
        sections = neighbours(model, data)
    elif getattr(model, "num_classes", 0):
        if answers is None:
            answers = look(model, data, LOOKED)
        sections = answer_sections(answers, data)
    return sections | (_inside(model, first_images(data, ATTENDED)) if isinstance(model, ViT) else {})


def _inside(model: ViT, images: Tensor) -> dict[str, tuple[str, str]]:
    """Attention rollout and position embeddings, as `vitfast inspect` draws them."""
    from matplotlib import rc_context

    from ...eval.inspect.figures import as_png, draw_attention, draw_similarity
    from ...eval.inspect.report import SECTIONS

    grey = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), "0.48")  # legible on white and on black
    rollout = draw_attention(images.numpy(), attention_rollout(model, images).cpu().numpy())
    pictures = dict(rollout=picture(as_png(rollout, transparent=True), SECTIONS["rollout"][0]))
    with suppress(InputError), rc_context(grey):  # InputError: the model adds no positions to its patches
        positions = draw_similarity(position_similarity(model).cpu().numpy(), pixels=400)
        pictures["positions"] = picture(as_png(positions, transparent=True), SECTIONS["positions"][0])
    return {
        heading: (note, pictures[name]) if name in pictures else (absent, "")
        for name, (heading, note, absent) in SECTIONS.items()
        if name in ("rollout", "positions")
    }
