"""The log of a run: progress bar, metrics.csv, TensorBoard, the user's function; and the run's speed."""

import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from ..errors import InputError, both_ends
from ..run.files import free_name, write_text
from .run_folder import EVENTS

COLUMNS = ("step", "epoch", "split", "loss", "accuracy", "lr", "images_per_second", "waiting_for_data", "knn", "rank")
SLOW_CALL = 1.0  # seconds
logger = logging.getLogger("vitfast")


def in_words(result: dict) -> str:
    """The numbers of an evaluation; one of features has a rank, and a linear probe's accuracy."""
    names = dict(accuracy="linear probe" if "rank" in result else "validation accuracy", loss="loss")
    names |= dict(knn="20 nearest neighbours", rank="effective rank of features")
    return ", ".join(f"{text} {result[name]:.4f}" for name, text in names.items() if result.get(name) is not None)


def read_metrics(run: Path) -> list[dict]:
    """The records of metrics.csv as dictionaries of numbers (and `split`); none where there is no file."""
    return _read_metrics(run / "metrics.csv")[0]


def _read_metrics(path: Path) -> tuple[list[dict], int]:
    """(records, how many lines are no records, such as one that a full disk has cut short)."""
    if not path.exists():
        return [], 0
    header, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rest = lines.pop() if lines else ""  # after the last line break
    columns, records = header.split(","), []
    for line in lines:
        cells = line.split(",")
        try:
            record = {k: v if k == "split" else float(v) if v else None for k, v in zip(columns, cells, strict=True)}
            record = dict.fromkeys(COLUMNS) | record  # some are newer than the file
            record["step"] = int(cells[columns.index("step")])
        except ValueError:
            continue
        if record.get("split") in ("train", "val"):
            records.append(record)
    return records, len(lines) - len(records) + bool(rest)


class Events:
    """TensorBoard's file, without SummaryWriter's thread: that prints a traceback where the disk is full."""

    def __init__(self, folder: Path, purge_step: int | None):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{EVENTS}"
        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        self.records = RecordWriter(open(folder / name, "ab"))
        self._write(file_version="brain.Event:2")
        if purge_step is not None:  # events of this step and later ones, from before the run was cut off, do not count
            self._write(step=purge_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def _write(self, **content) -> None:
        self.records.write(self.event(wall_time=time.time(), **content).SerializeToString())
        self.records.flush()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the scalars of a step, by their names."""
        scalars = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self.summary(value=scalars))

    def close(self) -> None:
        self.records.close()


class OnMetrics:
    """A function of the user, which is called with a copy of each record.

    An error at the first record of a split, where little is lost, stops the run: InputError. After that an error is a
    warning, and so is a call that takes a second or longer, because training waits for it.
    """

    def __init__(self, function: Callable[[dict], object]):
        self.function, self.known, self.warned = function, set(), set()

    def __call__(self, record: dict) -> None:
        start, split = time.perf_counter(), record["split"]
        try:
            self.function(dict(record))
        except Exception as error:
            said = f"on_metrics raised {type(error).__name__} for a {split} row of step {record['step']}: "
            said += both_ends(str(error))
            if split not in self.known:
                raise InputError(f"{said}; correct on_metrics, and start the run again") from error
            self._warn(f"{said}; the run goes on, and metrics.csv has all rows; later errors are not shown", "error")
        seconds, first = time.perf_counter() - start, split not in self.known  # the first may begin a logger's run
        self.known.add(split)
        if seconds >= SLOW_CALL and not first:
            self._warn(f"on_metrics took {seconds:.1f} s at step {record['step']}; training waits for it", "slow")

    def _warn(self, text: str, kind: str) -> None:
        if kind not in self.warned:
            logger.warning(text)
        self.warned.add(kind)


class Metrics:
    """Hands records to `on_metrics`, and appends them to metrics.csv and TensorBoard.

    A resumed run drops the records after the step that it resumes from. Lines that are no records are left out, and a
    copy of the file as it was is kept under another name.
    """

    def __init__(self, run: Path, resumed_step: int, on_metrics: Callable[[dict], object] | None):
        self.on_metrics = OnMetrics(on_metrics) if on_metrics else None
        path = run / "metrics.csv"
        records, bad = _read_metrics(path) if resumed_step else ([], 0)
        if bad:
            shutil.copyfile(path, kept := free_name(path))
            logger.warning("%s: %d lines cannot be read; they are left out, and kept in %s", path, bad, kept.name)
        records = [record for record in records if record["step"] <= resumed_step]
        write_text(path, self._line(dict(zip(COLUMNS, COLUMNS))) + "".join(map(self._line, records)))
        self.file = open(path, "a", newline="")
        self.board = Events(run / "tensorboard", resumed_step + 1 if resumed_step else None)

    @staticmethod
    def _line(record: dict) -> str:
        def text(value) -> str:
            if value is None:
                return ""
            whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
            return str(int(value) if whole else value)

        return ",".join(text(record.get(name)) for name in COLUMNS) + "\n"

    def write(self, **record) -> None:
        """Writes one record; columns that it lacks stay empty. Raises the InputError of `on_metrics`."""
        if self.on_metrics:  # first: a resumed run repeats an evaluation that metrics.csv lacks, and no other one
            self.on_metrics({name: record[name] for name in COLUMNS if record.get(name) is not None})
        self.file.write(self._line(record))
        self.file.flush()
        values = {f"{record['split']}/{k}": record[k] for k in COLUMNS[3:] if record.get(k) is not None}
        self.board.write(record["step"], values)

    def close(self) -> None:
        for file in (self.file, self.board):
            with suppress(OSError):  # a full disk, which was reported when the record was written
                file.close()


class Progress:
    """A bar with loss, images/s and time left on a terminal; a line every tenth of the run elsewhere."""

    def __init__(self, name: str, start: int, total: int, shown: bool):
        disable = None if shown else True  # None disables the bar where standard error is no terminal
        self.bar = tqdm(total=total, initial=start, desc=name, unit="step", dynamic_ncols=True, disable=disable)
        self.name, self.total, self.tenth = name, total, start * 10 // total

    def step(self, step: int, text: str = "") -> None:
        self.bar.update(step - self.bar.n)
        if text:
            self.bar.set_postfix_str(text, refresh=False)
        if self.bar.disable and step * 10 // self.total > self.tenth and text:
            self.tenth = step * 10 // self.total
            logger.info("%s: step %d/%d, %s", self.name, step, self.total, text)

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        if self.bar.disable:
            logger.info(text)
        else:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
