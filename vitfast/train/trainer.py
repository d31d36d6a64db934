"""The loop: one optimiser step after another, for every recipe. It can be cut off anywhere and goes on bit for bit."""

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import signal
from pathlib import Path

import torch
import yaml
from torch import Tensor

from ..baselines import is_baseline
from ..device import autocast_dtype, choose_device
from ..distributed import FAILED, GO, STOP, join
from ..errors import InputError
from ..eval.accuracy import evaluate
from . import resume as state
from .build import build
from .log import Meter, Metrics, Progress, write_summary, write_text
from .masked import evaluate_masked
from .recipes import RUN_ONLY, Config, as_plain
from .step import Learner

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
    other = [k for k in now if k not in RUN_ONLY | {"epochs", "steps"} and k in saved and saved[k] != now[k]]
    if other:
        shown = "; ".join(f"{k}: {saved.get(k)} there, {now[k]} now" for k in other[:3])
        raise InputError(
            f"{run} holds a run with other settings ({shown}); choose another --output, or --resume never to start it again"
        )


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
        raise InputError(
            f"--resume {resume}: no checkpoint there; give a run folder or one of its checkpoints/step-... folders"
        )
    return checkpoint


class Trainer:
    """A run: what learns, its data, its folder, and where it stands."""

    def __init__(self, config: Config, resume: str = "auto"):
        if not config.output:
            raise InputError("no place for the results: add --output FOLDER")
        self.config, self.run = config, Path(config.output)
        if self.run.exists() and not self.run.is_dir():
            raise InputError(f"--output {self.run} is a file; give a folder")
        self.ranks, self.device = join(choose_device(config.device))
        self.dtype = autocast_dtype(config.amp, self.device)
        self.checkpoint = find_start(config, resume)
        weights = "" if is_baseline(config.model) else str(self.checkpoint)
        source = dataclasses.replace(config, weights=weights, task="pretrain") if self.checkpoint else config
        model, data = build(source, self.device, self.ranks)
        self.data = dataclasses.replace(data, config=config)
        self.total = total_steps(config, self.data.train_length)
        self.learner = Learner(config, model, len(data.classes), self.device, self.dtype, self.ranks)
        self.step, self.seconds, self.unreadable = 0, 0.0, 0
        if self.checkpoint:
            saved = state.load_state(self.checkpoint)
            self.learner.load(saved)
            self.step, self.seconds = saved["step"], saved["seconds"]
            logger.info("resumed from step %d", self.step)
        self.ranks.wait()  # every rank has read what the first may now replace

    def save(self) -> None:
        """Writes the checkpoint of this step; what was there before stays until the new one is whole."""
        saved = self.learner.state()
        if self.ranks.first:
            state.save_checkpoint(self.run, self.step, self.learner.network(saved), {**saved, "seconds": self.seconds})
        self.ranks.wait()

    def evaluate(self) -> dict:
        """The validation set, with what would be kept."""
        if self.learner.masked:
            return evaluate_masked(self.learner.trained, self.data, self.device, self.dtype)
        return evaluate(self.learner.trained, self.data, self.device, self.dtype)

    # ---- what can go wrong

    def _next(self, batches, meter: Meter, stopper: "Stopper"):
        """The next batch, or None where any rank was asked to stop. An error of one rank stops all of them."""
        flag, batch, error = GO, None, None
        try:
            batch = meter.next(batches)
            self._count_unreadable(batch[2])
        except (InputError, OSError) as caught:
            flag, error = FAILED, caught
        flag = self.ranks.agree(max(flag, STOP if stopper.wanted else GO))
        if error is not None:
            raise error
        if flag == FAILED:
            raise TrainingError("another rank could not go on; its message says why")
        return None if flag == STOP else batch

    def _count_unreadable(self, names: list[str]) -> None:
        for text in names:
            self.unreadable += 1
            logger.warning(
                "replaced by the next image (%d of at most %d): %s", self.unreadable, self.config.max_unreadable, text
            )
        if self.unreadable > self.config.max_unreadable:
            raise InputError(
                f"{self.unreadable} images could not be read, more than max_unreadable {self.config.max_unreadable}; the last: {names[-1]}"
            )

    def _learn(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = None
        with contextlib.suppress(torch.OutOfMemoryError):
            result = self.learner.train_step(images, labels, self.step, self.total)
        if result is None:  # here the error, and every activation that its traceback held, is gone
            raise TrainingError(self._out_of_memory(images, labels))
        self.step += 1
        return result

    def _out_of_memory(self, images: Tensor, labels: Tensor) -> str:
        """What ran out, and what would fit, by trying."""
        parts = self.learner.micro_batches_that_fit(images, labels) if self.ranks.world == 1 else None
        size = -(-len(images) // self.config.accumulate)
        advice = "a smaller model, image or batch may fit"
        if parts:
            advice = f"--set accumulate={parts} fits, {-(-len(images) // parts)} at once, with the same result"
        elif self.ranks.world > 1:
            advice = f"--set accumulate={2 * self.config.accumulate} halves what a device holds, with the same result"
        return f"out of memory in step {self.step + 1} with {size} images at once on a device; {advice}; {self._kept()}"

    def _kept(self) -> str:
        kept = state.find_checkpoint(self.run)
        return f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"

    def _check(self, losses: list[float]) -> None:
        """Raises TrainingError naming the first step whose loss is not a number."""
        bad = next((i for i, value in enumerate(losses) if not math.isfinite(value)), None)
        if bad is None:
            return
        step, size = self.step - len(losses) + bad, self.config.batch_size
        epoch, offset = divmod(step * size, max(1, self.data.train_length))
        raise TrainingError(
            f"the loss of step {step + 1} is {losses[bad]} (epoch {epoch}, images {offset} to {offset + size - 1} of its order); {self._kept()}; "
            "a lower --lr, a longer warm-up or --set clip_norm=1 may help"
        )

    # ---- the run

    def _prepare_folder(self) -> None:
        if not self.checkpoint:
            shutil.rmtree(self.run / "checkpoints", ignore_errors=True)
            shutil.rmtree(self.run / "tensorboard", ignore_errors=True)
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / "summary.json").unlink(missing_ok=True)
        write_text(self.run / "config.yaml", yaml.safe_dump(as_plain(self.config), sort_keys=False))

    def fit(self) -> dict:
        """Runs to the end, or until a signal asks to stop. Returns the summary, which is in summary.json too."""
        config, meter = self.config, Meter()
        if self.step >= self.total:
            return self._finish(self.evaluate(), meter)
        if self.ranks.first:
            self._prepare_folder()
        self.ranks.wait()
        per_epoch = self.data.train_length / config.batch_size
        eval_every = config.eval_every or max(1, round(max(per_epoch, self.total / 20)))
        save_every = config.save_every or eval_every
        metrics, progress = (
            Metrics(self.run if self.ranks.first else None, self.step),
            Progress(config.task, self.step, self.total, self.ranks.first),
        )
        window, result, stopping = [], None, False
        self.learner.model.train()
        try:
            with Stopper() as stopper:
                batches = iter(self.data.train_batches(self.step, self.total))
                while self.step < self.total and not stopping:
                    batch = self._next(batches, meter, stopper)
                    stopping = batch is None
                    if batch:
                        window.append(torch.stack(self._learn(*batch[:2])))
                    final = self.step == self.total
                    evaluating = batch is not None and (final or self.step % eval_every == 0)
                    saving = stopping or final or self.step % save_every == 0
                    if not (evaluating or saving or self.step % config.log_every == 0):
                        progress.step(self.step)
                        continue
                    epoch = round(self.step / per_epoch, 4)
                    if window:
                        losses, correct = self.ranks.sum(torch.stack(window)).double().unbind(1)
                        self._check(losses.tolist())
                        seen = len(window) * config.batch_size
                        window, speed, rate = [], meter.end_window(seen), self.learner.rate
                        row = dict(
                            loss=losses.mean().item(),
                            accuracy=correct.sum().item() / seen,
                            lr=rate,
                            images_per_second=speed,
                        )
                        metrics.write(
                            step=self.step,
                            epoch=epoch,
                            split="train",
                            **row,
                            waiting_for_data=round(meter.waiting_share, 4),
                        )
                        progress.step(
                            self.step,
                            f"loss {row['loss']:.3f}, {speed:,.0f} images/s, {meter.waiting_share:.0%} waiting for data",
                        )
                    if evaluating:
                        result = self.evaluate()
                        metrics.write(
                            step=self.step, epoch=epoch, split="val", loss=result["loss"], accuracy=result["accuracy"]
                        )
                        progress.say(
                            f"epoch {epoch:.1f}: validation accuracy {result['accuracy']:.4f}, loss {result['loss']:.4f}"
                        )
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
        return self._finish(result, meter)

    def _finish(self, result: dict, meter: Meter) -> dict:
        summary = dict(
            finished=True,
            task=self.config.task,
            accuracy=result["accuracy"],
            top5=result.get("top5"),
            loss=result["loss"],
            steps=self.step,
            epochs=round(self.step * self.config.batch_size / self.data.train_length, 4),
            images_per_second=round(meter.speed, 1),
            waiting_for_data=round(meter.waiting_share, 4),
            seconds=round(self.seconds, 2),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            ranks=self.ranks.world,
            precision=str(self.dtype or torch.float32).removeprefix("torch."),
            parameters=sum(p.numel() for p in self.learner.model.parameters()),
            classes=len(self.data.classes),
            train_images=self.data.train_length,
            val_images=result["images"],
            unreadable_images=self.unreadable,
        )
        if self.ranks.first:
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
    logger.info(
        "%s is finished: %d steps, accuracy %.4f; --resume never starts it again",
        config.output,
        summary["steps"],
        summary["accuracy"],
    )
    return summary
