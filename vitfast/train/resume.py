"""Checkpoints of a run, whole or absent, read without executing anything; and where a run goes on.

    checkpoints/last/model.safetensors, config.json   what ViT.from_pretrained reads (EMA where there is one)
                     state/state.safetensors          model, optimiser, EMA
                     state/state.json                 the record (step, settings, data), scaler, all that is no tensor

The random numbers and the position in the data follow from (seed, step), so they are not saved.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..data.classes import first_of
from ..errors import InputError, both_ends
from ..model.checkpoint.writers import write_safetensors
from ..run.config import Config, as_plain, changes, course, total_steps
from .run_folder import (
    BEST,
    LAST,
    PREVIOUS,
    find_checkpoint,
    is_checkpoint,
    new_checkpoint,
    read_settings,
    read_summary,
)
from .step import TrainStep

logger = logging.getLogger("vitfast")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # unsharded, on the CPU of the first rank
FLAT = dataclasses.replace(WHOLE, flatten_optimizer_state_dict=True)
# What state.json must have, with the types.
RECORD = dict(step=int, seconds=(int, float), settings=dict, data=dict, unreadable=list)


def save_checkpoint(run: Path, train_step: TrainStep, record: dict, images: dict[str, np.ndarray]) -> None:
    """Writes a checkpoint and makes it the last one; the one before it is kept.

    record: where the run is and what it trains: the keys of RECORD (`unreadable` has the messages on images that could
    not be read), `pillow` (of data/resize.py) and, for images of many sizes, `packing`. images: the arrays of
    `run_data`. Every rank calls this, and the first one writes. The other checkpoints stay until the new one is
    whole.
    """
    models = {name: get_model_state_dict(model, options=WHOLE) for name, model in train_step.models.items()}
    sections = {**models, "scaler": train_step.scaler.state_dict() if train_step.scaled else {}}
    sections["images"] = {name: torch.from_numpy(values.copy()) for name, values in images.items()}
    if train_step.optimizer.state:  # before the first step torch would invent the state after one
        sections["optimizer"] = get_optimizer_state_dict(train_step.model, train_step.optimizer, options=FLAT)
        named = train_step.model.named_parameters()  # parameters that had no gradient yet have no state
        sections["optimizer"]["stateless"] = [name for name, p in named if p not in train_step.optimizer.state]
    train_step.ranks.on_first(_write, run, train_step, models, record, sections)


def _write(run: Path, train_step: TrainStep, models: dict, record: dict, sections: dict) -> None:
    network = train_step.averaged
    if train_step.unsharded is not None:
        network = copy.deepcopy(train_step.unsharded)
        network.load_state_dict(models["ema" if train_step.ema else "model"], assign=True)
    named = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    # Scalars are cloned, which is cheap: LAMB counts its steps in one tensor, saved under every parameter's name.
    tensors = {k: v.contiguous() if v.dim() else v.clone() for k, v in named.items() if isinstance(v, Tensor)}
    rest = {name: value for name, value in named.items() if name not in tensors}
    with new_checkpoint(run) as work:
        network.save_pretrained(work)
        (work / "state").mkdir()
        write_safetensors(tensors, work / "state" / "state.safetensors", {"step": str(record["step"])})
        (work / "state" / "state.json").write_text(json.dumps(record | rest))


def load_checkpoint(checkpoint: Path, train_step: TrainStep) -> None:
    """Loads a checkpoint into `train_step`, on any number of ranks. Raises InputError if it does not fit."""
    sections: dict[str, dict] = {"scaler": {}}
    for name, value in read_training_state(checkpoint).items():
        section, _, rest = name.partition(".")
        sections.setdefault(section, {})[rest] = value
    with reading(checkpoint):
        for name, model in train_step.models.items():
            odd = sorted(model.state_dict().keys() ^ sections.get(name, {}).keys())  # torch ignores what is missing
            if odd:
                raise ValueError(f"the saved {name} has other tensors: {first_of(odd)}")
        if "optimizer" in sections:
            saved = sections["optimizer"]
            shapes = {name: parameter.shape for name, parameter in train_step.model.named_parameters()}
            state = {key.removeprefix("state."): saved[key] for key in saved if key.startswith("state.")}
            for key, value in state.items():  # torch checks neither shapes nor whether an entry is missing
                if isinstance(value, Tensor) and value.dim() and value.shape != shapes.get(key.rpartition(".")[0]):
                    raise ValueError(f"the optimiser's state.{key} has shape {tuple(value.shape)}")
            kinds = {key.rpartition(".")[2] for key in state}
            stateful = shapes.keys() - saved.pop("stateless")
            wanted = {f"{name}.{kind}" for name in stateful for kind in kinds or {"state"}}
            if missing := sorted(wanted - state.keys()):
                raise ValueError(f"the optimiser's state is not there for every parameter: no {first_of(missing)}")
            # How the step is computed is this run's own: FSDP2 shards no fused SGD, and a run may go on without FSDP2.
            fused = train_step.optimizer.param_groups[0].get("fused")
            saved |= {key: fused for key in saved if key.startswith("param_groups.") and key.endswith(".fused")}
            # This comes before the models, because torch makes room for the state by a step of rate 0.
            set_optimizer_state_dict(train_step.model, train_step.optimizer, saved, options=WHOLE)
        for name, model in train_step.models.items():
            set_model_state_dict(model, sections[name], options=WHOLE)
        if train_step.scaled:
            train_step.scaler.load_state_dict(sections["scaler"])


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turns the errors of damaged files, and of values that do not fit, into `unreadable`."""
    try:
        yield
    except KeyError as error:
        raise unreadable(checkpoint, f"state.json lacks {error}") from error
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise unreadable(checkpoint, error) from error


def read_record(checkpoint: Path) -> dict:
    """The content of a checkpoint's state.json, RECORD checked. Raises InputError if it is damaged."""
    with reading(checkpoint), safe_open(checkpoint / "model.safetensors", "pt"):
        texts = [(checkpoint / name).read_text(encoding="utf-8") for name in ("config.json", "state/state.json")]
        _, record = map(json.loads, texts)
        whole = all(isinstance(record[name], kind) for name, kind in RECORD.items()) and record["step"] >= 0
        if not whole or not isinstance(record["data"]["classes"], list):
            raise ValueError("values of other types")
    return record


def read_training_state(checkpoint: Path) -> dict:
    """The names and values in a checkpoint's state/. Raises InputError if it or its model is damaged."""
    record = read_record(checkpoint)
    with reading(checkpoint), safe_open(checkpoint / "state" / "state.safetensors", "pt") as file:
        step, tensors = (file.metadata() or {}).get("step"), {name: file.get_tensor(name) for name in file.keys()}
        if step != str(record["step"]):  # the checkpoint was copied while the run wrote it
            raise ValueError(f"state.json is of step {record['step']}, state.safetensors of {step}")
        if not _is_of(tensors, checkpoint / "model.safetensors"):
            raise ValueError(f"model.safetensors is not the model of step {step}, of which state/ is")
    return tensors | record


def _is_of(tensors: dict[str, Tensor], model: Path) -> bool:
    """Whether a saved model is that of a training state, judged by its biases and norms."""
    kept = next(("ema." for name in tensors if name.startswith("ema.")), "model.")
    found = {name.removeprefix(kept).removeprefix("vit."): t for name, t in tensors.items() if name.startswith(kept)}
    with safe_open(model, "pt") as file:
        names = [name for name in file.keys() if name in found and len(file.get_slice(name).get_shape()) == 1]
        return all(torch.equal(file.get_tensor(name), found[name]) for name in names)


def unreadable(checkpoint: Path, reason: object) -> InputError:
    """The error that refuses to go on from a checkpoint; it names the previous one if that can be read."""
    advice = f"start again with --resume never, or from its model: --weights {checkpoint} and another --output"
    previous = checkpoint.with_name(PREVIOUS)
    with contextlib.suppress(InputError):
        if checkpoint.name == LAST and read_training_state(previous):
            advice = f"--resume {previous} goes on from the one before it"
    said = f"cannot be read, as it is damaged or does not fit ({both_ends(str(reason))})"
    return InputError(f"the training state in {checkpoint} {said}; {advice}")


def check_settings(config: Config, saved: dict, source: Path) -> None:
    """Raises InputError if `saved`, the settings of `source`, differ in one that decides a run's course.

    The name of the data does not count: its images are compared.
    """
    if other := changes(course(saved | dict(data=config.data)), course(as_plain(config))):
        advice = f"give those, or another --output (and --weights {source}), or --resume never to start it again"
        raise InputError(f"{source} holds a run with other settings ({'; '.join(other[:3])}); {advice}")


def find_start(config: Config, resume: str) -> tuple[Path | None, dict]:
    """The checkpoint to continue from and its state.json; (None, {}) for a run from the beginning.

    resume: "never", "auto" for the run's own checkpoint, or a path to any. Raises InputError where there is none at the
    path, where it is of a run with other settings, and where the folder's own run would be lost.
    """
    run = Path(config.output)
    checkpoint = None if resume == "never" else find_checkpoint(run if resume == "auto" else Path(resume))
    if checkpoint:
        own = resume == "auto" or checkpoint.resolve().is_relative_to(run.resolve())
        if not own and (find_checkpoint(run) or read_summary(run)):
            raise InputError(f"{run} holds a run already; --resume auto goes on with it, or choose another --output")
        record = read_record(checkpoint)
        check_settings(config, record["settings"], checkpoint)
        return checkpoint, record
    if resume == "auto":
        others = sorted(path for path in (run / "checkpoints").glob("[!.]*") if is_checkpoint(path))
        if others or read_summary(run):
            advice = f"--resume {others[-1]} goes on from that" if others else "bring it back"
            raise InputError(f"{run} holds a run, but not its checkpoints/last; {advice}, --resume never starts again")
    elif resume != "never":
        raise InputError(f"--resume {resume}: no checkpoint there; give a run folder or one of its checkpoints")
    for kept in (f"checkpoints/{LAST}", f"checkpoints/{PREVIOUS}", BEST) if config.weights else ():
        if Path(config.weights).resolve().is_relative_to((run / kept).resolve()):
            replaced = f"--weights {config.weights} is in --output, where it would be replaced"
            raise InputError(f"{replaced}; choose another --output")
    return None, {}


def check_unfinished(config: Config) -> None:
    """Raises InputError where a finished run would go on to another length, which replaces what it has."""
    run = Path(config.output)
    summary = read_summary(run) if config.output else None
    if summary and (whole := _longer(config, summary)):
        raise InputError(
            f"{run} holds a finished run of {summary['steps']} steps{_accuracy(summary, ' ({})')}, and this one takes "
            f"{whole}: going on replaces its checkpoint, summary.json and report.html; add --resume auto to go on from "
            "it, or take another --output"
        )


def finished_summary(config: Config, resume: str, compare: Callable[[], object]) -> dict | None:
    """The summary of a run that is complete already, None otherwise.

    compare: called where the data has another name; it raises InputError where the images are others.
    """
    run = Path(config.output)
    summary = read_summary(run) if resume == "auto" and config.output else None
    settings = read_settings(run) if summary else None
    if settings is None:
        return None
    check_settings(config, settings, run)
    if _longer(config, summary):
        return None
    if os.path.realpath(settings.get("data") or "") != os.path.realpath(config.data):
        compare()
    said = "%s is finished: %d steps%s; --resume never starts it again"
    logger.info(said, config.output, summary["steps"], _accuracy(summary, ", {}"))
    return summary


def _accuracy(summary: dict, form: str) -> str:
    """The accuracy of a finished run in this form; "" without labels."""
    return "" if summary["accuracy"] is None else form.format(f"accuracy {summary['accuracy']:.4f}")


def _longer(config: Config, summary: dict) -> int | None:
    """The steps of this config, if a run that did not stop early took fewer; else None."""
    whole = total_steps(config, summary["train_images"], summary.get("expected_images_per_step"))
    return whole if summary["steps"] < whole and not summary.get("stopped_early") else None
