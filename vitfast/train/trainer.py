"""The training loop, for every recipe. It can be cut off anywhere and goes on bit for bit."""

import contextlib
import logging
import math
import shutil
import signal
from pathlib import Path

import torch
import yaml
from torch import Tensor

from ..config import Config, as_plain, total_steps
from ..device import autocast_dtype, choose_device
from ..distributed import FAILED, GO, STOP, join
from ..errors import InputError, TrainingError
from ..eval.accuracy import evaluate
from ..files import write_text
from .log import Meter, Metrics, Progress, write_summary
from .masked import evaluate_masked
from .report import write_report
from .resume import find_checkpoint, find_start, finished_summary, load_checkpoint, save_checkpoint
from .setup import set_up
from .step import TrainStep

logger = logging.getLogger("vitfast")


class Stopper:
    """Makes SIGTERM and the first Ctrl-C a request to stop after the step; the second stops at once."""

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


class Trainer:
    """A run: its step, its data, its folder, how far it is.

    examples: train on this many images alone.
    """

    def __init__(self, config: Config, resume: str = "auto", examples: int | None = None):
        if not config.output:
            raise InputError("no place for the results: add --output FOLDER")
        self.config, self.run = config, Path(config.output)
        if self.run.exists() and not self.run.is_dir():
            raise InputError(f"--output {self.run} is a file; give a folder")
        self.ranks, self.device = join(choose_device(config.device))
        self.dtype = autocast_dtype(config.amp, self.device)
        self.checkpoint = find_start(config, resume)
        model, self.data = set_up(config, self.device, self.ranks, self.checkpoint, examples)
        self.total = total_steps(config, self.data.train_length)
        self.train_step = TrainStep(config, model, len(self.data.classes), self.device, self.dtype, self.ranks)
        self.step, self.seconds, self.unreadable = 0, 0.0, 0
        if self.checkpoint:
            self.step, self.seconds = load_checkpoint(self.checkpoint, self.train_step)
            logger.info("resumed from step %d", self.step)
        self.ranks.wait()  # every rank has read what the first may now replace

    def fit(self) -> dict:
        """Runs to the end, or until a signal asks to stop. Returns the summary, which is in summary.json too."""
        config, self.meter = self.config, Meter()
        if self.step >= self.total:
            return self._finish(self.evaluate())
        if self.ranks.first:
            self._prepare_folder()
        self.ranks.wait()
        eval_every = config.eval_every or max(1, round(max(self.steps_per_epoch, self.total / 20)))
        save_every = config.save_every or eval_every
        self.metrics = Metrics(self.run if self.ranks.first else None, self.step)
        self.progress = Progress(config.task, self.step, self.total, self.ranks.first)
        self.train_step.model.train()
        window, result = [], None  # (loss, right answers) of the steps since the last record, on the device
        with contextlib.closing(self.metrics), contextlib.closing(self.progress), Stopper() as stopper:
            batches = iter(self.data.train_batches(self.step, self.total))
            while self.step < self.total:
                batch = self._next(batches, stopper)
                if batch is None:  # asked to stop
                    self._log_window(window)
                    self.save()
                    break
                window.append(torch.stack(self._train(*batch[:2])))
                final = self.step == self.total
                evaluating = final or self.step % eval_every == 0
                saving = final or self.step % save_every == 0
                if not (evaluating or saving or self.step % config.log_every == 0):
                    self.progress.step(self.step)
                    continue
                self._log_window(window)
                window = []
                if evaluating:
                    result = self._validate()
                if saving:
                    self.save()
                self.meter.start_window()
        if self.step < self.total:
            logger.info("stopped at step %d of %d, saved; the same command goes on from there", self.step, self.total)
            return dict(finished=False, step=self.step, steps=self.total)
        return self._finish(result)

    def save(self) -> None:
        """Writes the checkpoint of this step."""
        self.seconds += self.meter.take_seconds()
        save_checkpoint(self.run, self.train_step, self.step, self.seconds)

    def evaluate(self) -> dict:
        """Loss and accuracy on the validation set of the model that is kept."""
        function = evaluate_masked if self.train_step.masked else evaluate
        return function(self.train_step.averaged, self.data, self.device, self.dtype)

    @property
    def steps_per_epoch(self) -> float:
        return self.data.train_length / self.config.batch_size

    @property
    def epoch(self) -> float:
        """How many times the training set was seen."""
        return round(self.step / self.steps_per_epoch, 4)

    def _prepare_folder(self) -> None:
        if not self.checkpoint:
            shutil.rmtree(self.run / "checkpoints", ignore_errors=True)
            shutil.rmtree(self.run / "tensorboard", ignore_errors=True)
        self.run.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "report.html"):
            (self.run / name).unlink(missing_ok=True)
        write_text(self.run / "config.yaml", yaml.safe_dump(as_plain(self.config), sort_keys=False))

    def _next(self, batches, stopper: Stopper):
        """The next batch, or None where any rank was asked to stop. An error of one rank stops all of them."""
        flag, batch, error = GO, None, None
        try:
            with self.meter.waiting():
                batch = next(batches)
            self._count_unreadable(batch[2])
        except (InputError, OSError) as caught:
            flag, error = FAILED, caught
        flag = self.ranks.agree(max(flag, STOP if stopper.wanted else GO))
        if error is not None:
            raise error
        if flag == FAILED:
            raise TrainingError("another rank could not go on; its message says why")
        return None if flag == STOP else batch

    def _count_unreadable(self, messages: list[str]) -> None:
        limit = self.config.max_unreadable
        for message in messages:
            self.unreadable += 1
            logger.warning("replaced by the next image (%d of at most %d): %s", self.unreadable, limit, message)
        if self.unreadable > limit:
            raise InputError(
                f"{self.unreadable} images could not be read, more than max_unreadable {limit}; "
                f"the last: {messages[-1]}"
            )

    def _train(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One optimiser step; a TrainingError that says what would fit where the memory does not suffice."""
        result = None
        with contextlib.suppress(torch.OutOfMemoryError):
            result = self.train_step(images, labels, self.step, self.total)
        if result is None:  # here the error, and every activation that its traceback held, is gone
            raise TrainingError(self._out_of_memory(images, labels))
        self.step += 1
        return result

    def _out_of_memory(self, images: Tensor, labels: Tensor) -> str:
        """The message: the size that did not fit, and one that does, found by trying."""
        accumulate, advice = self.config.accumulate, "a smaller model, image or batch may fit"
        if self.ranks.world > 1:
            advice = f"--set accumulate={2 * accumulate} halves what a device holds, with the same result"
        elif fitting := self.train_step.micro_batches_that_fit(images, labels):
            advice = f"--set accumulate={fitting} fits, {-(-len(images) // fitting)} at once, with the same result"
        return (
            f"out of memory in step {self.step + 1} with {-(-len(images) // accumulate)} images at once on a device; "
            f"{advice}; {self._last_good()}"
        )

    def _last_good(self) -> str:
        kept = find_checkpoint(self.run)
        return f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"

    def _check_finite(self, losses: list[float]) -> None:
        """Raises TrainingError naming the first step whose loss is not a number."""
        bad = next((i for i, value in enumerate(losses) if not math.isfinite(value)), None)
        if bad is None:
            return
        step, size = self.step - len(losses) + bad, self.config.batch_size
        epoch, offset = divmod(step * size, max(1, self.data.train_length))
        raise TrainingError(
            f"the loss of step {step + 1} is {losses[bad]} "
            f"(epoch {epoch}, images {offset} to {offset + size - 1} of its order); {self._last_good()}; "
            "a lower --lr, a longer warm-up or --set clip_norm=1 may help"
        )

    def _log_window(self, window: list[Tensor]) -> None:
        """Writes the mean loss and accuracy of the steps since the last record; waits for the device."""
        if not window:
            return
        losses, correct = self.ranks.sum(torch.stack(window)).double().unbind(1)
        self._check_finite(losses.tolist())
        images = len(window) * self.config.batch_size
        loss, accuracy = losses.mean().item(), correct.sum().item() / images
        speed, waiting = self.meter.end_window(images), self.meter.waiting_share
        self.metrics.write(
            step=self.step,
            epoch=self.epoch,
            split="train",
            loss=loss,
            accuracy=accuracy,
            lr=self.train_step.rate,
            images_per_second=speed,
            waiting_for_data=round(waiting, 4),
        )
        self.progress.step(self.step, f"loss {loss:.3f}, {speed:,.0f} images/s, {waiting:.0%} waiting for data")

    def _validate(self) -> dict:
        result = self.evaluate()
        loss, accuracy = result["loss"], result["accuracy"]
        self.metrics.write(step=self.step, epoch=self.epoch, split="val", loss=loss, accuracy=accuracy)
        self.progress.say(f"epoch {self.epoch:.1f}: validation accuracy {accuracy:.4f}, loss {loss:.4f}")
        return result

    def _finish(self, result: dict) -> dict:
        summary = dict(
            finished=True,
            task=self.config.task,
            accuracy=result["accuracy"],
            top5=result.get("top5"),
            loss=result["loss"],
            steps=self.step,
            epochs=self.epoch,
            images_per_second=round(self.meter.speed, 1),
            waiting_for_data=round(self.meter.waiting_share, 4),
            seconds=round(self.seconds, 2),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            ranks=self.ranks.world,
            precision=str(self.dtype or torch.float32).removeprefix("torch."),
            parameters=sum(p.numel() for p in self.train_step.model.parameters()),
            classes=len(self.data.classes),
            train_images=self.data.train_length,
            val_images=result["images"],
            unreadable_images=self.unreadable,
        )
        if self.ranks.first:
            write_summary(self.run, summary)
            write_report(self.config, self.data, summary, self.device, self.dtype)
        return summary


def train(config: Config, resume: str = "auto") -> dict:
    """Trains as the config says, from the start or from where it stopped. Returns the summary.

    Raises InputError and TrainingError.
    """
    return finished_summary(config, resume) or Trainer(config, resume).fit()
