"""The log of a run: a progress bar, metrics.csv, TensorBoard events, summary.json."""

import csv
import json
import logging
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from ..files import write_text

COLUMNS = ("step", "epoch", "split", "loss", "accuracy", "lr", "images_per_second", "waiting_for_data")
logger = logging.getLogger("vitfast")


def read_metrics(run: Path) -> list[dict]:
    """The records of metrics.csv as dictionaries of numbers (and `split`); none where there is no file."""
    path = run / "metrics.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        records = list(csv.DictReader(file))
    return [{k: v if k == "split" else float(v) if v else None for k, v in record.items()} for record in records]


class Metrics:
    """Appends records to metrics.csv and TensorBoard; to neither where `run` is None.

    A resumed run drops the records after the step that it resumes from.
    """

    def __init__(self, run: Path | None, resumed_step: int):
        self.file = self.board = None
        if run is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = run / "metrics.csv"
        kept = [record for record in read_metrics(run) if record["step"] <= resumed_step] if resumed_step else []
        write_text(path, ",".join(COLUMNS) + "\n" + "".join(map(self._line, kept)))
        self.file = open(path, "a", newline="")
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None)

    @staticmethod
    def _line(record: dict) -> str:
        def text(value) -> str:
            if value is None:
                return ""
            whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
            return str(int(value) if whole else value)

        return ",".join(text(record.get(column)) for column in COLUMNS) + "\n"

    def write(self, **record) -> None:
        """One record: the columns, those left out empty."""
        if self.file is None:
            return
        self.file.write(self._line(record))
        self.file.flush()
        for key in COLUMNS[3:]:
            if record.get(key) is not None:
                self.board.add_scalar(f"{record['split']}/{key}", record[key], record["step"])

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.board.close()


class Progress:
    """A bar with loss, images/s and time left on a terminal; a line every tenth of the run elsewhere."""

    def __init__(self, name: str, start: int, total: int, shown: bool):
        off = not (shown and sys.stderr.isatty())
        self.bar = tqdm(total=total, initial=start, desc=name, unit="step", dynamic_ncols=True, disable=off)
        self.name, self.total, self.tenth = name, total, start * 10 // total

    def step(self, step: int, text: str = "") -> None:
        self.bar.update(step - self.bar.n if not self.bar.disable else 0)
        if text:
            self.bar.set_postfix_str(text, refresh=False)
        if self.bar.disable and step * 10 // self.total > self.tenth and text:
            self.tenth = step * 10 // self.total
            logger.info("%s: step %d/%d, %s", self.name, step, self.total, text)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.bar.disable:
            logger.info(text)
        else:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()


def write_summary(run: Path, summary: dict) -> None:
    write_text(run / "summary.json", json.dumps(summary, indent=2) + "\n")


class Meter:
    """Speed of the training steps alone: evaluation, saving, the first window (compilation) do not count."""

    def __init__(self):
        self.begun = self.window = time.perf_counter()
        self.window_wait = self.spent = self.waited = 0.0
        self.images = self.windows = 0
        self.speed = self.waiting_share = 0.0

    @contextmanager
    def waiting(self):
        """The time inside counts as waiting for data."""
        start = time.perf_counter()
        yield
        self.window_wait += time.perf_counter() - start

    def end_window(self, images: int) -> float:
        """Ends a window of `images` (the device is idle now); returns its images per second."""
        seconds = max(time.perf_counter() - self.window, 1e-9)
        if self.windows == 1:  # from the second window on the first one is forgotten
            self.spent, self.images, self.waited = 0.0, 0, 0.0
        self.windows += 1
        self.spent += seconds
        self.images += images
        self.waited += self.window_wait
        self.speed, self.waiting_share = self.images / self.spent, self.waited / self.spent
        self.start_window()
        return images / seconds

    def start_window(self) -> None:
        """Begins a window now; the time since the last one is not counted."""
        self.window, self.window_wait = time.perf_counter(), 0.0

    def take_seconds(self) -> float:
        """Seconds since the last call, everything included."""
        now = time.perf_counter()
        seconds, self.begun = now - self.begun, now
        return seconds
