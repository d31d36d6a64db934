"""The loop: one optimiser step after another, for every recipe. It can be cut off anywhere and goes on bit for bit."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import signal
from pathlib import Path

import torch
import yaml
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from .. import ref
from ..errors import InputError
from ..model import ViT
from . import state
from .build import autocast_dtype, build, choose_device
from .data import seed_everything
from .evaluate import evaluate
from .log import Meter, Metrics, Progress, write_summary, write_text
from .objectives import OBJECTIVES
from .optim import learning_rate, make_optimizer
from .recipes import RUN_ONLY, Config, as_plain

logger = logging.getLogger("vitfast")


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stopped and what is kept."""


def total_steps(config: Config, images: int) -> int:
    """Optimiser steps of the whole run."""
    return config.steps or max(1, round(config.epochs * images / config.batch_size))


class Stopper:
    """Turns SIGTERM and the first Ctrl-C into a request to stop after the step; a second Ctrl-C stops at once."""

    def __init__(self):
        self.wanted = False
        self.previous = {}

    def __enter__(self):
        with contextlib.suppress(ValueError):  # not in the main thread: signals are someone else's
            for number in (signal.SIGTERM, signal.SIGINT):
                self.previous[number] = signal.signal(number, self._stop)
        return self

    def _stop(self, number, frame):
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def _changed(config: Config, run: Path) -> None:
    """Raises InputError where the run folder holds a run whose course other settings decided."""
    path = run / "config.yaml"
    if not path.exists():
        return
    saved, now = yaml.safe_load(path.read_text()), as_plain(config)
    other = [k for k in now if k not in RUN_ONLY | {"epochs", "steps"} and saved.get(k) != now[k]]
    if other:
        shown = "; ".join(f"{k}: {saved.get(k)} there, {now[k]} now" for k in other[:3])
        raise InputError(f"{run} holds a run with other settings ({shown}); choose another --output, or --resume never to start it again")


def find_start(config: Config, resume: str) -> Path | None:
    """The checkpoint to continue from: none for "never", the run folder's last for "auto", else the one at this path."""
    run = Path(config.output)
    if resume == "never":
        return None
    if resume == "auto":
        checkpoint = state.find_checkpoint(run)
        if checkpoint:
            _changed(config, run)
        return checkpoint
    checkpoint = state.find_checkpoint(Path(resume))
    if checkpoint is None:
        raise InputError(f"--resume {resume}: no checkpoint there; give a run folder or one of its checkpoints/step-... folders")
    return checkpoint


class Trainer:
    """A run: model, data, optimiser and where it stands."""

    def __init__(self, config: Config, resume: str = "auto"):
        if not config.output:
            raise InputError("no place for the results: add --output FOLDER")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("training runs in one process in this version; start it without torchrun")
        self.config, self.run = config, Path(config.output)
        if self.run.exists() and not self.run.is_dir():
            raise InputError(f"--output {self.run} is a file; give a folder")
        self.device = choose_device(config.device)
        self.dtype = autocast_dtype(config, self.device)
        self.checkpoint = find_start(config, resume)
        source = dataclasses.replace(config, weights=str(self.checkpoint), task="pretrain") if self.checkpoint else config
        self.model, data = build(source, self.device)
        self.data = dataclasses.replace(data, config=config)
        self.total = total_steps(config, self.data.train_length)
        self.optimizer = make_optimizer(config, self.model)
        self.ema = ModelEmaV3(self.model, decay=config.ema_decay) if config.ema_decay else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.objective = OBJECTIVES[config.objective]
        mixing = config.mixup or config.cutmix
        self.mixup = Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=len(self.data.classes)) if mixing else None
        self.step, self.seconds = 0, 0.0
        if self.checkpoint:
            self._load(state.load_state(self.checkpoint))
            logger.info("resumed from step %d", self.step)
        if config.compile if config.compile is not None else self.device.type == "cuda":
            self.model.compile()

    def _load(self, saved: dict) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        if self.ema:
            self.ema.module.load_state_dict(saved["ema"])
        self.step, self.seconds = saved["step"], saved["seconds"]

    def save(self) -> Path:
        """Writes the checkpoint of this step; what was there before stays until the new one is whole."""
        ema = self.ema.module if self.ema else None
        saved = dict(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict(),
            ema=ema.state_dict() if ema else None,
            seconds=self.seconds,
        )
        return state.save_checkpoint(self.run, self.step, ema or self.model, saved)

    # ---- one step

    def _forward_backward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the gradients of one global batch in micro-batches. Returns its (loss, correct), on the device."""
        loss_sum, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for part, target in zip(images.chunk(self.config.accumulate), labels.chunk(self.config.accumulate)):
            part, target = part.to(self.device, non_blocking=True), target.to(self.device, non_blocking=True)
            classes, smoothing = target, self.config.label_smoothing
            if self.mixup:
                part, target = self.mixup(ref.normalize(part, self.model.mean, self.model.std, torch.float32), target)
                smoothing = 0.0  # the mixed targets are smooth already
            with torch.autocast(self.device.type, self.dtype) if self.dtype else contextlib.nullcontext():
                logits = self.model(part)
            share = len(part) / len(images)
            loss = self.objective(logits, target, smoothing) * share
            self.scaler.scale(loss).backward()
            loss_sum += loss.detach()
            correct += (logits.detach().argmax(-1) == classes).sum()
        return loss_sum, correct

    def train_step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One optimiser step on uint8 images (B, C, H, W) and labels (B,). Returns (loss, correct), on the device."""
        seed_everything(self.config.seed, self.step, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step, self.total)
        loss, correct = self._forward_backward(images, labels)
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.ema:
            self.ema.update(self.model, step=self.step)
        return loss, correct

    # ---- the run

    def _check(self, losses: list[Tensor]) -> None:
        """Raises TrainingError naming the first step whose loss is not a number."""
        values = torch.stack(losses).tolist()
        bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is None:
            return
        step, size = self.step - len(values) + bad, self.config.batch_size
        epoch, offset = divmod(step * size, max(1, self.data.train_length))
        kept = state.find_checkpoint(self.run)
        raise TrainingError(
            f"the loss of step {step + 1} is {values[bad]} (epoch {epoch}, images {offset} to {offset + size - 1} of its order); "
            + (f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet")
            + "; a lower --lr, a longer warm-up or --set clip_norm=1 may help"
        )

    def fit(self) -> dict:
        """Runs to the end, or until a signal asks to stop. Returns the summary, which is in summary.json too."""
        config = self.config
        if self.step >= self.total:
            return self._finish(evaluate(self._eval_model, self.data, self.device, self.dtype), 0.0, 0.0)
        if not self.checkpoint:
            shutil.rmtree(self.run / "checkpoints", ignore_errors=True)
            shutil.rmtree(self.run / "tensorboard", ignore_errors=True)
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / "summary.json").unlink(missing_ok=True)
        write_text(self.run / "config.yaml", yaml.safe_dump(as_plain(config), sort_keys=False))
        per_epoch = self.data.train_length / config.batch_size
        eval_every = config.eval_every or max(1, round(max(per_epoch, self.total / 20)))
        save_every = config.save_every or eval_every
        metrics, progress = Metrics(self.run, self.step), Progress(config.task, self.step, self.total)
        meter, losses, corrects, result, stopping = Meter(), [], [], None, False
        self.model.train()
        try:
            with Stopper() as stopper:
                batches = iter(self.data.train_batches(self.step, self.total))
                while self.step < self.total and not stopping:
                    loss, correct = self.train_step(*meter.next(batches))
                    losses.append(loss)
                    corrects.append(correct)
                    final, stopping = self.step == self.total, stopper.wanted
                    evaluating = final or self.step % eval_every == 0
                    saving = final or stopping or self.step % save_every == 0
                    if not (evaluating or saving or self.step % config.log_every == 0):
                        progress.step(self.step)
                        continue
                    self._check(losses)
                    seen = len(losses) * config.batch_size
                    speed, epoch = meter.end_window(seen), round(self.step / per_epoch, 4)
                    mean, share = torch.stack(losses).mean().item(), torch.stack(corrects).sum().item() / seen
                    losses, corrects = [], []
                    rate = self.optimizer.param_groups[0]["lr"]
                    metrics.write(step=self.step, epoch=epoch, split="train", loss=mean, accuracy=share, lr=rate, images_per_second=speed)
                    progress.step(self.step, f"loss {mean:.3f}, {speed:,.0f} images/s, {meter.waiting_share:.0%} waiting for data")
                    if evaluating:
                        result = evaluate(self._eval_model, self.data, self.device, self.dtype)
                        metrics.write(step=self.step, epoch=epoch, split="val", loss=result["loss"], accuracy=result["accuracy"])
                        progress.say(f"epoch {epoch:.1f}: validation accuracy {result['accuracy']:.4f}, loss {result['loss']:.4f}")
                    if saving:
                        self.seconds += meter.take_seconds()
                        self.save()
                    meter.start_window()
        finally:
            progress.close()
            metrics.close()
        if self.step < self.total:
            logger.info("stopped at step %d of %d, saved; the same command goes on from there", self.step, self.total)
            return dict(finished=False, step=self.step, steps=self.total)
        return self._finish(result, meter.speed, meter.waiting_share)

    @property
    def _eval_model(self) -> ViT:
        return self.ema.module if self.ema else self.model

    def _finish(self, result: dict, speed: float, waiting: float) -> dict:
        summary = dict(
            finished=True,
            task=self.config.task,
            accuracy=result["accuracy"],
            top5=result["top5"],
            loss=result["loss"],
            steps=self.step,
            epochs=round(self.step * self.config.batch_size / self.data.train_length, 4),
            images_per_second=round(speed, 1),
            waiting_for_data=round(waiting, 4),
            seconds=round(self.seconds, 2),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            precision=str(self.dtype or torch.float32).removeprefix("torch."),
            parameters=sum(p.numel() for p in self.model.parameters()),
            classes=len(self.data.classes),
            train_images=self.data.train_length,
            val_images=result["images"],
        )
        write_summary(self.run, summary)
        return summary


def train(config: Config, resume: str = "auto") -> dict:
    """Trains as the config says, from the start or from where it stopped. Returns the summary. Raises InputError, TrainingError."""
    done = _finished(config, resume)
    return done if done else Trainer(config, resume).fit()


def _finished(config: Config, resume: str) -> dict | None:
    """The summary of a run that is complete already, None otherwise."""
    path = Path(config.output) / "summary.json"
    if resume != "auto" or not config.output or not path.exists():
        return None
    _changed(config, Path(config.output))
    summary = json.loads(path.read_text())
    wanted = config.steps or max(1, round((config.epochs or 0) * summary["train_images"] / config.batch_size))
    if not summary.get("finished") or summary["steps"] < wanted:
        return None
    logger.info("%s is finished: %d steps, accuracy %.4f; --resume never starts it again", config.output, summary["steps"], summary["accuracy"])
    return summary
