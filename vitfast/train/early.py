"""Early stopping: the best evaluation of a run, and when to wait no longer for a better one.

The paper's 4.3: models pre-trained on small sets use early stopping, and the best validation accuracy counts. With
`early_stop` N a run ends after N evaluations in a row without a better accuracy than the best before them. RUN/best/
is the checkpoint of the best evaluation, as `checkpoints/last/` is that of the last. A resumed run reads its earlier
evaluations from metrics.csv, up to the step that it goes on from.
"""

import logging
from pathlib import Path

from ..errors import InputError
from ..run.config import Config
from .log import read_metrics

logger = logging.getLogger("vitfast")


class EarlyStop:
    """Follows the evaluations of a run and says when to stop it; without `early_stop` it never stops one."""

    def __init__(self, config: Config, checkpoint: Path | None, step: int):
        self.patience, run = config.early_stop, Path(config.output)
        self.step, self.accuracy, self.since = None, -1.0, 0  # step and accuracy of the best; evaluations since
        if not self.patience or not checkpoint:
            return
        whose = checkpoint.resolve().parents[1]
        if whose != run.resolve():
            raise InputError(f"a run with early_stop goes on in its own folder only: give --output {whose}")
        for record in read_metrics(run):
            if record["split"] == "val" and record["step"] <= step and record["accuracy"] is not None:
                self.add(int(record["step"]), record["accuracy"])

    def add(self, step: int, accuracy: float) -> None:
        """Counts the evaluation after `step`."""
        self.since += 1
        if accuracy > self.accuracy:
            self.step, self.accuracy, self.since = step, accuracy, 0
        if self.over:
            logger.info("the run ends: no better accuracy since step %d, %.4f", self.step, self.accuracy)

    def is_best(self, step: int) -> bool:
        """Whether the evaluation after this step is the best so far; its weights are to be kept."""
        return self.patience is not None and self.step == step

    @property
    def over(self) -> bool:
        """Whether the run waited long enough."""
        return self.patience is not None and self.since >= self.patience

    def summary(self) -> dict:
        """The entries of summary.json; none without `early_stop`."""
        if not self.patience:
            return {}
        return dict(best_accuracy=self.accuracy, best_step=self.step, stopped_early=self.over)
