"""Checkpoints of a run: whole or absent, read without executing anything; where it goes on.

    checkpoints/step-00000120/model.safetensors, config.json   what ViT.from_pretrained reads (EMA where there is one)
                              state/state.safetensors          model, optimiser, EMA
                              state/state.json                 step, scaler, and all that is not a tensor
    checkpoints/last -> step-00000120                          swapped in one rename

The random numbers and the position in the data follow from (seed, step), so they need no place here.
"""

import copy
import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..config import RUN_ONLY, Config, as_plain, total_steps
from ..errors import InputError
from ..files import sync
from .step import TrainStep

logger = logging.getLogger("vitfast")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # unsharded, on the CPU of the first rank
FLAT = dataclasses.replace(WHOLE, flatten_optimizer_state_dict=True)


def save_checkpoint(run: Path, train_step: TrainStep, step: int, seconds: float) -> None:
    """Writes the checkpoint of `step` and makes it the last one.

    Every rank calls it, the first one writes. Until the new checkpoint is whole the one before it stays.
    """
    models = {name: get_model_state_dict(model, options=WHOLE) for name, model in _models(train_step).items()}
    sections = {**models, "scaler": train_step.scaler.state_dict()}
    if train_step.optimizer.state:  # before the first step torch would make up the state after one
        sections["optimizer"] = get_optimizer_state_dict(train_step.model, train_step.optimizer, options=FLAT)
    if train_step.ranks.first:
        network = train_step.averaged
        if train_step.unsharded is not None:
            network = copy.deepcopy(train_step.unsharded)
            network.load_state_dict(models["ema" if train_step.ema else "model"], assign=True)
        named = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
        _write(run / "checkpoints", step, network, {"step": step, "seconds": seconds, **named})
    train_step.ranks.wait()


def _models(train_step: TrainStep) -> dict[str, nn.Module]:
    return {"model": train_step.model} | ({"ema": train_step.ema.module} if train_step.ema else {})


def _write(folder: Path, step: int, network: nn.Module, training_state: dict) -> None:
    final, work = folder / f"step-{step:08d}", folder / f".writing-{step:08d}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        (work / "state").mkdir(parents=True)
        network.save_pretrained(work)
        # Cloned where it is cheap: LAMB counts its steps in one tensor, which stands under the name of every parameter.
        tensors = {
            name: value.contiguous() if value.dim() else value.clone()
            for name, value in training_state.items()
            if isinstance(value, Tensor)
        }
        rest = {name: value for name, value in training_state.items() if name not in tensors}
        save_file(tensors, work / "state" / "state.safetensors")
        (work / "state" / "state.json").write_text(json.dumps(rest))
        for path in [*work.rglob("*"), work]:
            sync(path)
    except BaseException:  # a full disk: the room goes back, and the last checkpoint stays
        shutil.rmtree(work, ignore_errors=True)
        raise
    if final.exists() and not (folder / "last").exists():
        shutil.rmtree(final)
    if final.exists():  # the same step was saved before the run was cut off: its bytes are the same
        shutil.rmtree(work)
    else:
        os.rename(work, final)
    link = folder / ".last"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, folder / "last")
    sync(folder)
    for old in folder.iterdir():
        if not old.is_symlink() and old != final:
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint: Path, train_step: TrainStep) -> tuple[int, float]:
    """Loads a checkpoint into `train_step`, on any number of ranks. Returns (step, seconds so far)."""
    training_state = read_training_state(checkpoint)
    sections: dict[str, dict] = {"scaler": {}}
    for name, value in training_state.items():
        section, _, rest = name.partition(".")
        sections.setdefault(section, {})[rest] = value
    models = _models(train_step)
    for name, model in models.items():
        odd = sorted(model.state_dict().keys() ^ sections.get(name, {}).keys())  # torch itself ignores what is missing
        if odd:
            shown = f"{', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}"
            raise InputError(f"the saved model does not fit this one: {shown}")
    if "optimizer" in sections:  # before the models: torch makes room for the state by a step of rate 0
        set_optimizer_state_dict(train_step.model, train_step.optimizer, sections["optimizer"], options=WHOLE)
    for name, model in models.items():
        set_model_state_dict(model, sections[name], options=WHOLE)
    train_step.scaler.load_state_dict(sections["scaler"])
    return training_state["step"], training_state["seconds"]


def read_training_state(checkpoint: Path) -> dict:
    """The names and values in a checkpoint's state/. Raises InputError where it is not whole."""
    folder = checkpoint / "state"
    if not folder.is_dir():
        takes = "--resume takes a run folder or one of its checkpoints"
        raise InputError(f"{checkpoint} holds no training state (no state/ folder); {takes}")
    try:
        training_state = load_file(folder / "state.safetensors") | json.loads((folder / "state.json").read_text())
    except (OSError, SafetensorError, ValueError) as error:
        again = "start again with --resume never"
        raise InputError(f"the training state in {folder} is damaged ({error}); {again}") from None
    if "step" not in training_state:
        start = f"--weights {checkpoint} starts from its model, --resume never from nothing"
        raise InputError(f"{checkpoint} was written by an earlier vitfast, and this one cannot resume it; {start}")
    return training_state


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint to continue from: `path` itself, or the last one of the run folder `path`."""
    if (path / "state").is_dir():
        return path
    last = path / "checkpoints" / "last"
    return last.resolve() if last.exists() else None


def check_settings(config: Config, run: Path) -> None:
    """Raises InputError where the folder holds a run with other settings that decide its course."""
    path = run / "config.yaml"
    if not path.exists():
        return
    saved, now = yaml.safe_load(path.read_text()), as_plain(config)
    other = [k for k in now if k not in RUN_ONLY | {"epochs", "steps"} and k in saved and saved[k] != now[k]]
    if other:
        shown = "; ".join(f"{k}: {saved.get(k)} there, {now[k]} now" for k in other[:3])
        advice = "choose another --output, or --resume never to start it again"
        raise InputError(f"{run} holds a run with other settings ({shown}); {advice}")


def find_start(config: Config, resume: str) -> Path | None:
    """The checkpoint to continue from: None for "never", the run's last for "auto", or that at a path."""
    if resume == "never":
        return None
    if resume == "auto":
        checkpoint = find_checkpoint(Path(config.output))
        if checkpoint:
            check_settings(config, Path(config.output))
        return checkpoint
    checkpoint = find_checkpoint(Path(resume))
    if checkpoint is None:
        wanted = "a run folder or one of its checkpoints/step-... folders"
        raise InputError(f"--resume {resume}: no checkpoint there; give {wanted}")
    return checkpoint


def finished_summary(config: Config, resume: str) -> dict | None:
    """The summary of a run that is complete already, None otherwise."""
    path = Path(config.output) / "summary.json"
    if resume != "auto" or not config.output or not path.exists():
        return None
    check_settings(config, Path(config.output))
    summary = json.loads(path.read_text())
    if not summary.get("finished"):
        return None
    if not summary.get("stopped_early") and summary["steps"] < total_steps(config, summary["train_images"]):
        return None
    said = "%s is finished: %d steps, accuracy %.4f; --resume never starts it again"
    logger.info(said, config.output, summary["steps"], summary["accuracy"])
    return summary
