"""The best evaluation of a run, and when to wait no longer for a better one.

RUN/best/ is the checkpoint of the best evaluation, as `checkpoints/last/` is that of the last. The paper's 4.3: models
pre-trained on small sets use early stopping, and the best validation accuracy counts. With `early_stop=N` a run ends
after N evaluations in a row without a better accuracy than the best before them. A resumed run reads its earlier
evaluations from metrics.csv, up to the step that it goes on from.
"""

import logging
from pathlib import Path

from ..errors import InputError
from ..run.config import Config
from .log import read_metrics
from .run_folder import BEST

logger = logging.getLogger("vitfast")


class EarlyStop:
    """Follows the evaluations of a run: which is the best, and with `early_stop` when the run ends."""

    def __init__(self, config: Config, checkpoint: Path | None, step: int):
        self.patience, run = config.early_stop, Path(config.output)
        self.step, self.accuracy, self.since = None, -1.0, 0  # step and accuracy of the best; evaluations since then
        own = checkpoint is not None and checkpoint.resolve().is_relative_to(run.resolve())
        if checkpoint and not own and self.patience:
            whose = checkpoint.resolve().parents[1]
            raise InputError(f"a run with early_stop continues in its own folder only: give --output {whose}")
        for record in read_metrics(run) if own else ():
            if record["split"] == "val" and record["step"] <= step:
                self.add(int(record["step"]), record["accuracy"])
        if self.step != step and not (run / BEST).is_dir():  # best/ was removed: the next evaluation is the best
            self.step, self.accuracy = None, -1.0

    def add(self, step: int, accuracy: float | None) -> None:
        """Counts the evaluation after `step`, but not that of step 0, or one without accuracy."""
        if accuracy is None or not step:
            return
        self.since += 1
        if accuracy > self.accuracy:
            self.step, self.accuracy, self.since = step, accuracy, 0
        if self.over:
            logger.info("the run ends early: no accuracy was above that of step %d, %.4f", self.step, self.accuracy)

    @property
    def over(self) -> bool:
        """Whether the run has waited for a better evaluation long enough."""
        return self.patience is not None and self.since >= self.patience

    def summary(self) -> dict:
        """The entries of summary.json."""
        best = {} if self.step is None else dict(best_accuracy=self.accuracy, best_step=self.step)
        return best | (dict(stopped_early=self.over) if self.patience else {})
