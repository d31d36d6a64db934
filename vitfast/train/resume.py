"""Checkpoints of a run: whole or absent, read without executing anything; where it goes on.

    checkpoints/last/model.safetensors, config.json   what ViT.from_pretrained reads (EMA where there is one)
                     state/state.safetensors          model, optimiser, EMA
                     state/state.json                 the record (step, settings, data), scaler, all that is no tensor

The random numbers and the position in the data follow from (seed, step), so they need no place here.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..data.datasets import fingerprint
from ..data.folders import first_of
from ..data.loader import Data
from ..errors import InputError, both_ends
from ..model.checkpoint.writers import write_safetensors
from ..run.config import Config, as_plain, course, total_steps
from .many_sizes import PackedTotals
from .run_folder import (
    BEST,
    LAST,
    PREVIOUS,
    begin_checkpoint,
    find_checkpoint,
    is_checkpoint,
    keep_as_last,
    read_settings,
    read_summary,
)
from .step import TrainStep

logger = logging.getLogger("vitfast")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # unsharded, on the CPU of the first rank
FLAT = dataclasses.replace(WHOLE, flatten_optimizer_state_dict=True)
START_AGAIN = "choose another --output, or --resume never to start it again"
MODEL = "model.safetensors"
CHANGED = dict(names="files renamed or moved", labels="files of other classes", sizes="files of other sizes")
RECORD = dict(step=int, seconds=(int, float), settings=dict, data=dict)  # of state.json, with their types


def make_record(config: Config, data: dict, step: int, seconds: float, packed: PackedTotals | None) -> dict:
    """Where a run is and what it trains: the part of a checkpoint that is compared before a run goes on.

    data: its `data_index`. packed: of images of many sizes.
    """
    record = dict(step=step, seconds=seconds, settings=as_plain(config), data=data)
    return record if packed is None else record | dict(packing=dataclasses.asdict(packed))


def data_index(data: Data, saved: dict | None, checkpoint: Path | None) -> dict:
    """The classes, the numbers of images and the `fingerprint` of the data of a run.

    saved: that of the checkpoint that the run goes on from. Raises InputError where the two differ.
    """
    index = dict(classes=list(data.classes), train_images=len(data.train), val_images=len(data.val))
    for split, source in (("train", data.train), ("val", data.val)):
        index |= {f"{split}_{kind}": value for kind, value in fingerprint(source).items()}
    if saved is not None:
        check_data(saved, index, checkpoint)
    return index


def save_checkpoint(run: Path, train_step: TrainStep, record: dict) -> None:
    """Writes a checkpoint with this record and makes it the last one; the one before it is kept.

    Every rank calls it, the first one writes. Until the new checkpoint is whole the others stay as they are.
    """
    models = {name: get_model_state_dict(model, options=WHOLE) for name, model in _models(train_step).items()}
    sections = {**models, "scaler": train_step.scaler.state_dict() if train_step.scaled else {}}
    if train_step.optimizer.state:  # before the first step torch would make up the state after one
        sections["optimizer"] = get_optimizer_state_dict(train_step.model, train_step.optimizer, options=FLAT)
    train_step.ranks.on_first(_write, run, train_step, models, record, sections)


def _models(train_step: TrainStep) -> dict[str, nn.Module]:
    return {"model": train_step.model} | ({"ema": train_step.ema.module} if train_step.ema else {})


def _write(run: Path, train_step: TrainStep, models: dict, record: dict, sections: dict) -> None:
    network = train_step.averaged
    if train_step.unsharded is not None:
        network = copy.deepcopy(train_step.unsharded)
        network.load_state_dict(models["ema" if train_step.ema else "model"], assign=True)
    named = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    # Cloned where it is cheap: LAMB counts its steps in one tensor, which stands under the name of every parameter.
    tensors = {k: v.contiguous() if v.dim() else v.clone() for k, v in named.items() if isinstance(v, Tensor)}
    rest = {name: value for name, value in named.items() if name not in tensors}
    work = begin_checkpoint(run)
    try:
        network.save_pretrained(work)
        (work / "state").mkdir()
        write_safetensors(tensors, work / "state" / "state.safetensors", {"step": str(record["step"])})
        (work / "state" / "state.json").write_text(json.dumps(record | rest))
        keep_as_last(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # there still where something failed: a full disk gets its room back


def load_checkpoint(checkpoint: Path, train_step: TrainStep) -> None:
    """Loads a checkpoint into `train_step`, on any number of ranks. InputError where it does not fit."""
    training_state = read_training_state(checkpoint)
    try:
        _load(training_state, train_step)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        said = f"the training state in {checkpoint} does not fit ({both_ends(str(error))})"
        raise InputError(f"{said}; {_otherwise(checkpoint)}") from error


def _load(training_state: dict, train_step: TrainStep) -> None:
    """Raises one of several errors where something is missing or has another shape."""
    sections: dict[str, dict] = {"scaler": {}}
    for name, value in training_state.items():
        section, _, rest = name.partition(".")
        sections.setdefault(section, {})[rest] = value
    models = _models(train_step)
    for name, model in models.items():
        odd = sorted(model.state_dict().keys() ^ sections.get(name, {}).keys())  # torch itself ignores what is missing
        if odd:
            raise ValueError(f"the saved {name} has other tensors: {first_of(odd)}")
    if "optimizer" in sections:
        _check_optimizer(sections["optimizer"], train_step.model)
        # Before the models: torch makes room for the state by a step of rate 0.
        set_optimizer_state_dict(train_step.model, train_step.optimizer, sections["optimizer"], options=WHOLE)
    for name, model in models.items():
        set_model_state_dict(model, sections[name], options=WHOLE)
    if train_step.scaled:
        train_step.scaler.load_state_dict(sections["scaler"])


def _check_optimizer(saved: dict, model: nn.Module) -> None:
    """Raises ValueError where a parameter's state is not whole or of another shape: torch does not check."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    entries: dict[str, set] = {}
    for key, value in saved.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if name not in shapes:
            raise ValueError(f"the optimiser has state of {name}, which this model has not")
        if kind == "state":
            entries.setdefault(name, set()).add(entry)
            if isinstance(value, Tensor) and value.dim() and value.shape != shapes[name]:
                raise ValueError(f"{entry} of {name} has shape {tuple(value.shape)}, expected {tuple(shapes[name])}")
    lacking = [name for name, some in entries.items() if some != set.union(*entries.values())]
    if lacking:
        raise ValueError(f"the optimiser's state of {lacking[0]} is not whole")


def read_record(checkpoint: Path) -> dict:
    """The content of a checkpoint's state.json, its RECORD checked. InputError where it is not whole."""
    path = checkpoint / "state" / "state.json"
    if not is_checkpoint(checkpoint):
        takes = "--resume takes a run folder or one of its checkpoints"
        raise InputError(f"{checkpoint} holds no training state (no state/ folder); {takes}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not (checkpoint / "config.json").is_file():
            raise ValueError("no object in it, or no config.json beside it")
        with safe_open(checkpoint / MODEL, "pt"):
            pass
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise _damaged(checkpoint, error) from None
    if content and not RECORD.keys() <= content.keys():
        start = f"--weights {checkpoint} starts from its model; {_otherwise(checkpoint)}"
        raise InputError(f"{checkpoint} was written by an earlier vitfast, and this one cannot resume it; {start}")
    whole = all(isinstance(content.get(name), kind) for name, kind in RECORD.items()) and content["step"] >= 0
    if not whole or not isinstance(content["data"].get("classes"), list):
        raise _damaged(checkpoint, "state.json lacks values, or holds some of other types")
    return content


def read_training_state(checkpoint: Path) -> dict:
    """The names and values in a checkpoint's state/. InputError where it, or its model, is not whole."""
    record = read_record(checkpoint)
    try:
        with safe_open(checkpoint / "state" / "state.safetensors", "pt") as file:
            step, tensors = (file.metadata() or {}).get("step"), {name: file.get_tensor(name) for name in file.keys()}
        same = _is_of(tensors, checkpoint / MODEL)
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(checkpoint, error) from None
    if step != str(record["step"]):  # copied while the run wrote it
        raise _damaged(checkpoint, f"state.json is of step {record['step']}, state.safetensors of {step}")
    if not same:
        raise _damaged(checkpoint, f"{MODEL} is not the model of step {step}, of which state/ is")
    return tensors | record


def _is_of(tensors: dict[str, Tensor], model: Path) -> bool:
    """Whether a kept model is that of a training state: biases and norms are compared, the quickly read."""
    kept = next(("ema." for name in tensors if name.startswith("ema.")), "model.")
    found = {name.removeprefix(kept).removeprefix("vit."): t for name, t in tensors.items() if name.startswith(kept)}
    with safe_open(model, "pt") as file:
        names = [name for name in file.keys() if name in found and len(file.get_slice(name).get_shape()) == 1]
        return all(torch.equal(file.get_tensor(name), found[name]) for name in names)


def _damaged(checkpoint: Path, reason: object) -> InputError:
    return InputError(f"the training state in {checkpoint} is damaged ({reason}); {_otherwise(checkpoint)}")


def _otherwise(checkpoint: Path) -> str:
    """Advice where a checkpoint cannot be resumed: the one before it, where that can be."""
    previous = checkpoint.with_name(PREVIOUS)
    with contextlib.suppress(InputError):
        if checkpoint.name == LAST and read_training_state(previous):
            return f"--resume {previous} goes on from the one before it"
    return "start again with --resume never"


def check_settings(config: Config, saved: dict, source: Path, advice: str) -> None:
    """Raises InputError where `saved`, the settings of a run, differ in one that decides its course."""
    saved, now = as_plain(Config()) | saved, course(as_plain(config))
    other = [name for name in now if saved[name] != now[name]]
    if other:
        shown = "; ".join(f"{k}: {_value(saved[k])} there, {_value(now[k])} now" for k in other[:3])
        raise InputError(f"{source} holds a run with other settings ({shown}); {advice}")


def _value(value: object) -> str:
    """The value of a setting in a message."""
    return "unset" if value in (None, "", []) else str(value)


def check_data(saved: dict, now: dict, checkpoint: Path) -> None:
    """Raises InputError where the data of a run (its `data_index`) is not what it was.

    A checkpoint of an earlier vitfast has no fingerprint, and is compared without.
    """
    counts, before, after = ("train_images", "val_images"), list(map(str, saved["classes"])), now["classes"]
    changes = [f"{k}: {saved.get(k)} there, {now[k]} now" for k in counts if saved.get(k) != now[k]]
    if before != after:
        there, here = set(before), set(after)
        sides = dict(gone=[c for c in before if c not in here], new=[c for c in after if c not in there])
        named = [f"{first_of(classes)} {word}" for word, classes in sides.items() if classes]
        changes.insert(0, f"classes: {', '.join(named) or 'another order'}")
    if changes := changes or _changed_files(saved, now):
        advice = f"restore it, or start a new run from the weights: --weights {checkpoint} and another --output"
        raise InputError(f"the data is not what {checkpoint} was trained on ({', '.join(changes)}); {advice}")


def _changed_files(saved: dict, now: dict) -> list[str]:
    """The first difference between the files of each split, by their fingerprints."""
    changes = []
    for split in ("train", "val"):
        kinds = ((text, f"{split}_{kind}") for kind, text in CHANGED.items())
        other = [text for text, key in kinds if key in saved and key in now and saved[key] != now[key]]
        changes += [f"{split}_images: {text}" for text in other[:1]]
    return changes


def find_start(config: Config, resume: str) -> tuple[Path | None, dict]:
    """The checkpoint to continue from and its state.json; (None, {}) for a run from the beginning.

    resume: "never", "auto" for the run's own, or a path to any. Raises InputError where it is of another run, and where
    the folder's own run would be lost.
    """
    run = Path(config.output)
    checkpoint = None if resume == "never" else find_checkpoint(run if resume == "auto" else Path(resume))
    if checkpoint is None:
        if resume == "auto":
            _check_nothing_to_continue(run)
        elif resume != "never":
            wanted = "a run folder or one of its checkpoints"
            raise InputError(f"--resume {resume}: no checkpoint there; give {wanted}")
        for kept in (f"checkpoints/{LAST}", f"checkpoints/{PREVIOUS}", BEST) if config.weights else ():
            if Path(config.weights).resolve().is_relative_to((run / kept).resolve()):
                replaced = f"--weights {config.weights} is in --output, where it would be replaced"
                raise InputError(f"{replaced}; choose another --output")
        return None, {}
    own = resume == "auto" or checkpoint.resolve().is_relative_to(run.resolve())
    if not own and (find_checkpoint(run) or read_summary(run)):
        raise InputError(f"{run} holds a run already; --resume auto goes on with it, or choose another --output")
    record = read_record(checkpoint)
    advice = START_AGAIN if own else f"give those, or start a new run from its weights: --weights {checkpoint}"
    check_settings(config, record["settings"], run if own else checkpoint, advice)
    return checkpoint, record


def _check_nothing_to_continue(run: Path) -> None:
    """Raises InputError where a run without its last checkpoint would begin again over what there is."""
    never = "--resume never starts again"
    others = sorted(path for path in (run / "checkpoints").glob("[!.]*") if is_checkpoint(path))
    if others:
        advice = f"--resume {others[-1]} goes on from it, {never}"
        raise InputError(f"{run} has no checkpoints/last, but checkpoints/{others[-1].name}; {advice}")
    if read_summary(run):
        raise InputError(f"{run} holds a finished run, but not its checkpoints/last; bring it back, or {never}")


def finished_summary(config: Config, resume: str) -> dict | None:
    """The summary of a run that is complete already, None otherwise."""
    run = Path(config.output)
    summary = read_summary(run) if resume == "auto" and config.output else None
    settings = read_settings(run) if summary else None
    if settings is None:
        return None
    check_settings(config, settings, run, START_AGAIN)
    whole = total_steps(config, summary["train_images"], summary.get("expected_images_per_step"))
    if not summary.get("stopped_early") and summary["steps"] < whole:
        return None
    said = "%s is finished: %d steps, accuracy %.4f; --resume never starts it again"
    logger.info(said, config.output, summary["steps"], summary["accuracy"])
    return summary
