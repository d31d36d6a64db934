"""The training loop, for every recipe. It can be cut off anywhere and goes on bit for bit."""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..data.resize import INSTALLED
from ..errors import Diverged, InputError, TrainingError
from ..eval.accuracy import evaluate
from ..eval.answers import Collector
from ..run.config import UNLABELLED, Config, as_plain, total_steps
from ..run.device import choose_device
from ..run.distributed import FAILED, GO, STOP, join, peers_told, run_facts
from ..run.files import write_text
from ..run.lock import locked
from .early import EarlyStop
from .introduction import introduce, precision
from .lejepa import Collapse
from .log import Metrics, Progress, in_words, read_metrics
from .many_sizes import PackedTotals, counts, packed_summary, read_totals
from .report import complete, write_report
from .resume import find_start, finished_summary, load_checkpoint, read_record, save_checkpoint
from .run_data import run_data
from .run_folder import LAST, PREVIOUS, check_output, find_checkpoint, keep_as_best, prepare
from .setup import set_up
from .speed import Meter
from .step import Images, TrainStep
from .stopper import Stopper
from .unlabelled import evaluate_features

logger = logging.getLogger("vitfast")
MOST_SKIPPED = 20  # steps left out in a row (non_finite=skip), at which the run stops


class Trainer:
    """A run: its step, its data, its folder, and how far it is.

    examples: train on this many images only. on_metrics: as in `train`.
    """

    def __init__(
        self,
        config: Config,
        resume: str = "auto",
        examples: int | None = None,
        on_metrics: Callable[[dict], object] | None = None,
    ):
        if not config.output:
            raise InputError("no place for the results: add --output FOLDER")
        if on_metrics is not None and not callable(on_metrics):
            raise InputError(f"on_metrics must be a function of one dictionary, got {type(on_metrics).__name__}")
        self.config, self.run, self.resume, self.on_metrics = config, Path(config.output), resume, on_metrics
        check_output(self.run)
        self.ranks, self.device = join(choose_device(config.device))
        self.ranks.check_same(run_facts(config))
        self._write(".", self.ranks.on_first, self._check_unlocked)
        self.checkpoint, record = find_start(config, resume)
        model, self.data = set_up(config, self.device, self.ranks, self.checkpoint, examples)
        self.index, self.images = run_data(self.data, record, self.checkpoint)
        expected = introduce(config, model, self.data)
        self.total = total_steps(config, len(self.data.train), self.data.images_per_step)
        self.train_step = TrainStep(config, model, self.data)
        self.meter = Meter(self.data, self.train_step, expected)
        self.step, self.seconds, self.unreadable, self.skipped = 0, 0.0, [], 0
        self.packed = PackedTotals()
        self.answers = self.saved = None  # those of the last evaluation, for the report; the last checkpoint's step
        if self.checkpoint:
            load_checkpoint(self.checkpoint, self.train_step)
            self.step, self.seconds = record["step"], record["seconds"]
            self.unreadable = record["unreadable"]
            self.packed = read_totals(record, self.data, self.checkpoint)
            self.data.progress = self.packed.progress
            if self.checkpoint.resolve() == (self.run / "checkpoints" / LAST).resolve():
                self.saved = self.step
            logger.info("resumed from step %d", self.step)
        steps_per_epoch = len(self.data.train) / self.data.images_per_step
        self.eval_every = config.eval_every or max(1, round(max(steps_per_epoch, self.total / 20)))
        self.save_every = config.save_every or self.eval_every
        self.log_every, self.collapse = config.log_every, Collapse(self.epoch)
        if config.objective == "lejepa":  # a collapse is to be named within two epochs
            self.log_every = min(config.log_every, max(1, int(steps_per_epoch)))
        self.early = EarlyStop(config, self.checkpoint, self.step)
        self.recorded = {(record["step"], record["split"]) for record in read_metrics(self.run)}
        self.ranks.agree(GO)  # now every rank has read the files, and the first may replace them

    def fit(self) -> dict:
        """Runs to the end and returns summary.json's content, or {finished: False, ...} after SIGTERM.

        Raises KeyboardInterrupt after Ctrl-C. In both cases the run is saved. A run that SIGTERM reached at its end has
        asked_to_stop=True beside the summary: no other run is to follow it.
        """
        self.metrics = None  # only the first rank has metrics
        with contextlib.ExitStack() as stack:
            stopper = Stopper(stack, self.ranks.first)
            self._write(".", self.ranks.on_first, self._open_folder, stack)
            self.progress = Progress(self.config.task, self.step, self.total, self.ranks.first)
            with contextlib.closing(self.progress):
                result = self._go_on(stopper)
            summary = self._finish(result) if self.done else None
            asked = self.ranks.agree(stopper.wanted + stopper.interrupted)
        if summary is not None and asked < 2:
            return summary | (dict(asked_to_stop=True) if asked else {})
        if summary is None:
            logger.info("stopped at step %d of %d, saved; the same command goes on from there", self.step, self.total)
        if asked == 2:
            raise KeyboardInterrupt
        return dict(finished=False, step=self.step, steps=self.total)

    @property
    def done(self) -> bool:
        """Whether the run is at its end."""
        return self.step >= self.total or self.early.over

    def _go_on(self, stopper: Stopper) -> dict | None:
        """Takes the steps that are left. Returns the last evaluation."""
        result = self._evaluate_again() if self.checkpoint else None
        if not self.checkpoint and self.config.objective in UNLABELLED:
            self._validate()  # random weights have features too
        self.train_step.model.train()
        self.meter.start_window()
        window = []  # (loss, right answers, gradient norm, *counts) of each step since the last record, on the device
        batches = iter(self.data.train_batches(self.step, self.total))
        while not self.done:
            batch = self._next(batches, stopper)
            if batch is None:  # asked to stop
                self._log_window(window)
                self.save()
                break
            counted = counts(batch[0], len(batch[1])).to(self.device, non_blocking=True)
            window.append(torch.cat([torch.stack([*self._train(*batch[:2]), self.train_step.grad_norm]), counted]))
            evaluating, saving = self._is_due(self.eval_every), self._is_due(self.save_every)
            if not (evaluating or saving or self.step % self.log_every == 0):
                self.progress.step(self.step)
                continue
            self._log_window(window)
            window = []
            if saving:  # first, so that nothing in an evaluation can lose the steps before it
                self.save()
            if evaluating:
                result = self._validate()
                self._keep_best()
            self.meter.start_window()
        return result

    def _is_due(self, every: int) -> bool:
        """Whether something that happens every `every` steps, and at the end, is due now."""
        return self.step >= self.total or self.step % every == 0

    def _evaluate_again(self) -> dict | None:
        """Evaluates the step that the run goes on from, if it is the last or its evaluation is unrecorded."""
        if self.done:
            self.save()
        recorded, result = self.ranks.agree(int((self.step, "val") in self.recorded)), None
        if self.done or (self.step and self._is_due(self.eval_every) and not recorded):
            result = self._validate(record=not recorded)
        self._keep_best()
        return result

    def _keep_best(self) -> None:
        """Keeps the model of this step where it is the best so far; saves the step where the run ends."""
        is_best = self.early.step == self.step
        if self.early.over or is_best:
            self.save()
        if is_best:
            record = dict(step=self.early.step, accuracy=self.early.accuracy)
            self._write("best", self.ranks.on_first, keep_as_best, self.run, record)

    def save(self) -> None:
        """Writes the checkpoint of this step, unless it is there. Raises Diverged if it is not finite."""
        if self.saved == self.step:
            return
        if self.ranks.agree(FAILED if not self.train_step.is_finite() else GO):
            raise Diverged(
                f"after step {self.step} a weight or a state of the optimiser is not finite, so it is not saved; "
                f"{self._last_good()}; {self._against_overflow()}"
            )
        self.seconds += self.meter.take_seconds()
        record = dict(step=self.step, seconds=self.seconds, settings=as_plain(self.config), data=self.index)
        record |= dict(pillow=INSTALLED)  # the order of resize's passes in evaluations
        self.unreadable = record["unreadable"] = self.ranks.union(self.unreadable)
        record |= {} if self.data.packing is None else dict(packing=dataclasses.asdict(self.packed))
        self._write("checkpoints", save_checkpoint, self.run, self.train_step, record, self.images)
        self.saved = self.step

    def evaluate(self) -> dict:
        """The loss and accuracy, on the validation set, of the model that is kept."""
        if self.config.objective in UNLABELLED:
            return evaluate_features(self.train_step.averaged, self.data)
        self.answers = Collector(self.config.objective)
        return evaluate(self.train_step.averaged, self.data, self.answers.add)

    @property
    def epoch(self) -> float:
        """How many times the training set was seen."""
        images = self.step * self.config.batch_size if self.data.packing is None else self.packed.progress.images
        return round(images / max(1, len(self.data.train)), 4)

    def _check_unlocked(self) -> None:
        """Raises InputError where another process trains in the run folder; called before data is read."""
        if self.run.is_dir():
            with locked(self.run):
                pass

    def _open_folder(self, stack: contextlib.ExitStack) -> None:
        """Makes the run folder this process's own until the stack closes, and ready to be written."""
        stack.enter_context(locked(self.run))
        newest = find_checkpoint(self.run)
        if self.resume == "auto" and (read_record(newest)["step"] if newest else 0) != self.step:
            raise InputError(f"another process has continued {self.run} meanwhile; the same command goes on from there")
        prepare(self.run, self.config, fresh=not self.checkpoint)
        self.metrics = stack.enter_context(contextlib.closing(Metrics(self.run, self.step, self.on_metrics)))

    def _write(self, name: str, function: Callable, *args) -> None:
        """Calls function(*args). Raises TrainingError if it cannot write file `name`, as on a full disk."""
        try:
            function(*args)
        except OSError as error:
            reason = error.strerror or error
            said = f"{self.run / name} cannot be written ({reason}); {self._last_good()}"
            raise TrainingError(f"{said}; make room or repair this, and the same command continues the run") from error

    def _next(self, batches, stopper: Stopper):
        """The next batch, or None where any rank was asked to stop. An error of one rank stops all of them."""
        flag, batch, error = GO, None, None
        try:
            with self.meter.span("data"):
                batch = next(batches)
            self._count_unreadable(batch[2])
        except (InputError, OSError) as caught:
            flag, error = FAILED, caught
        with self.meter.span("ranks"):
            flag = self.ranks.agree(max(flag, STOP if stopper.wanted else GO))
        if error is not None:
            raise error
        if flag == FAILED:
            raise TrainingError("another rank could not go on; its message says why")
        return None if flag == STOP else batch

    def _count_unreadable(self, messages: list[str]) -> None:
        """Counts each unreadable image once over all epochs. Raises InputError beyond max_unreadable."""
        limit = self.config.max_unreadable
        for message in messages:
            if message not in self.unreadable:
                self.unreadable.append(message)
                count = len(self.unreadable)
                logger.warning("replaced by the next image (%d of at most %d): %s", count, limit, message)
        if len(self.unreadable) > limit:
            told = f"{len(self.unreadable)} images could not be read, more than max_unreadable {limit}"
            raise InputError(f"{told}; the last: {self.unreadable[-1]}")

    def _train(self, images: Images, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Takes one optimiser step. Raises TrainingError if memory runs out, saying what would fit."""
        result = None
        with contextlib.suppress(torch.OutOfMemoryError), self.meter.span("start"):
            taken = self.data.progress.images - self.packed.progress.images  # 0 for images of one size
            result = self.train_step(images, labels, self.step, self.total, count=taken or None)
        if result is None:  # here the error, and every activation that its traceback held, is gone
            raise TrainingError(self._out_of_memory(images, labels))
        self.step += 1
        self.packed.progress = self.data.progress
        return result

    def _out_of_memory(self, images: Images, labels: Tensor) -> str:
        """The out-of-memory message: which size did not fit, and which does if trying shows one."""
        accumulate, same = self.config.accumulate, "with the same result except for random numbers, such as dropout's"
        if self.config.objective == "lejepa":
            same = "with statistics of fewer images at once"
        packed, advice = isinstance(images, list), "a smaller model, image or batch may fit"
        if packed:
            held = f"{max(len(some.patches) for some in images):,} patches"
        else:
            held = f"{-(-len(images) // accumulate)} images"
        if packed or self.ranks.world > 1:
            advice = f"--set accumulate={2 * accumulate} halves what a device holds, {same}"
        elif fitting := self.train_step.micro_batches_that_fit(images, labels):
            advice = f"--set accumulate={fitting} fits, {-(-len(images) // fitting)} at once, {same}"
        return f"out of memory in step {self.step + 1} with {held} at once on a device; {advice}; {self._last_good()}"

    def _last_good(self) -> str:
        for kept in (self.run / "checkpoints" / name for name in (LAST, PREVIOUS)):
            with contextlib.suppress(InputError):  # no checkpoint, or a damaged one
                return f"the last good checkpoint is {kept} (step {read_record(kept)['step']})"
        return "there is no checkpoint yet"

    def _finite_losses(self, losses: list[float], norms: list[float]) -> list[float]:
        """The losses of the steps that count. Raises Diverged where a loss or gradient is not finite.

        With non_finite=skip a step with such a gradient, which the optimiser left out, is logged and does not count.
        """
        counted = []
        for step, (loss, norm) in enumerate(zip(losses, norms), self.step - len(losses)):
            if math.isfinite(loss) and math.isfinite(norm):
                self.skipped = 0
                counted.append(loss)
                continue
            size = self.config.batch_size
            epoch, offset = divmod(step * size, max(1, len(self.data.train)))
            what = f"the norm of the gradients of step {step + 1} is {norm}"
            if not math.isfinite(loss):
                what = f"the loss of step {step + 1} is {loss}"
            if self.data.packing is None:
                what += f" (epoch {epoch}, images {offset} to {offset + size - 1} of its order)"
            self.skipped += 1
            if self.config.non_finite == "stop" or math.isfinite(norm) or self.skipped == MOST_SKIPPED:
                many = f", as in {MOST_SKIPPED} steps in a row" if self.skipped == MOST_SKIPPED else ""
                raise Diverged(f"{what}{many}; {self._last_good()}; {self._against_overflow()}")
            if self.ranks.first:
                logger.warning("left out: %s", what)
        return counted

    def _against_overflow(self) -> str:
        skip = "" if self.config.non_finite == "skip" else ", or --set non_finite=skip for single steps"
        return f"a lower --lr, a longer warm-up or --set clip_norm=1 may help{skip}"

    def _log_window(self, window: list[Tensor]) -> None:
        """Writes the mean loss and accuracy of the steps since the last record; waits for the device."""
        if not window:
            return
        losses, correct, norms, *counted = self.ranks.sum(torch.stack(window)).double().unbind(1)
        images, patches, padded = (int(each.sum()) for each in counted)
        self.packed.patches, self.packed.padded = self.packed.patches + patches, self.packed.padded + padded
        counted = self._finite_losses(losses.tolist(), norms.tolist())
        loss = sum(counted) / len(counted) if counted else math.nan
        measure = {getattr(self.train_step.model, "measure", "accuracy"): correct.sum().item() / images}
        speed, waiting = self.meter.end_window(images), self.meter.waits.share("data")
        rates = dict(lr=self.train_step.rate, images_per_second=speed, waiting_for_data=round(waiting, 4))
        self._record(split="train", loss=loss, **measure, **rates)
        self.collapse.add(self.epoch, measure.get("rank"))
        self.progress.step(self.step, f"loss {loss:.3f}, {speed:,.0f} images/s, {waiting:.0%} waiting for data")
        if not self.meter.judged and (found := self.meter.judge()):
            self.progress.say(f"{self.config.task}: {found['said']}")

    def _record(self, **record) -> None:
        """Writes a record of this step to metrics.csv and TensorBoard."""
        record |= dict(step=self.step, epoch=self.epoch)
        self._write("metrics.csv", self.ranks.on_first, lambda: self.metrics.write(**record))

    def _validate(self, record: bool = True) -> dict:
        """Evaluates and logs the result. record: whether metrics.csv and early stopping get it too."""
        result = self.evaluate()
        if record:
            self._record(split="val", **{name: result.get(name) for name in ("loss", "accuracy", "knn", "rank")})
            self.early.add(self.step, result["accuracy"])
        self.answers = self.answers if self.done else None  # answers of many classes take memory
        self.progress.say(f"epoch {self.epoch:.1f}: {in_words(result)}")
        return result

    def _finish(self, result: dict) -> dict:
        self.seconds += self.meter.take_seconds()
        summary = dict(
            finished=True,
            task=self.config.task,
            accuracy=result["accuracy"],
            **{name: result.get(name) for name in ("top5", "loss", "map", "knn", "rank")},
            steps=self.step,
            epochs=self.epoch,
            **self.meter.summary(),
            seconds=round(self.seconds, 2),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            ranks=self.ranks.world,
            threads=torch.get_num_threads(),
            precision=precision(self.data.dtype),
            parameters=sum(p.numel() for p in self.train_step.model.parameters()),
            classes=len(self.data.classes),
            train_images=len(self.data.train),
            val_images=result["images"],
            unreadable_images=len(self.unreadable),
            val_unreadable_images=result["unreadable_images"],
            **self.early.summary(),
        )
        summary |= {} if self.data.packing is None else packed_summary(self.data, self.packed, self.step)
        # JSON has no word for a number that is not finite.
        summary = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        self._write("summary.json", self.ranks.on_first, write_text, self.run / "summary.json", text)
        answers = None if self.answers is None else self.answers.gather(self.data)
        if self.ranks.first:
            write_report(self.config, self.data, summary, answers)
        return summary


def train(config: Config, resume: str = "auto", on_metrics: Callable[[dict], object] | None = None) -> dict:
    """Trains as the config says, from the start or from where it stopped. Returns the summary.

    on_metrics: called on the first rank with each new row of metrics.csv, without empty cells. The run waits for it.
    Its error is an InputError in the first row of a split, and later a warning. Raises InputError and TrainingError.
    """
    with peers_told():
        summary = finished_summary(config, resume, lambda: Trainer(config, resume))
        if summary is None:
            return Trainer(config, resume, on_metrics=on_metrics).fit()
        complete(config, summary)
        return summary
