"""The speed of training steps, and what a slow step waits for.

The host's clock tells when a step waits for data and for other ranks, and when Python starts its kernels; on a GPU, two
events tell when these begin and end. What the host does between the kernels of two steps is what the GPU waits for.
Inside a step, a GPU that ends as soon as Python has started the last kernel has waited for Python again and again.
"""

import os
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from ..data.jpeg import check_decodable
from ..data.loader import Data
from ..errors import InputError
from .step import TrainStep, no_graphs

WARM_UP = 10  # first steps, which compile, and count only while there are no others
JUDGED = 50  # steps after which a run says what they wait for
NOTABLE = 0.05  # share of a step from which a wait is named
AT_ONCE = 0.1  # of its time for a step: a GPU that ends this soon after Python kept up with it
NORMAL = 0.9  # share of the expected speed
CAUSES = dict(
    nothing="{who} does not wait for data",
    data="{who} waits for data {share:.0%} of the time",
    host="{who} waits for Python between steps {share:.0%} of the time",
    start="{who} keeps up with Python, which takes {share:.0%} of a step to start its kernels",
    exchange="{who} waits for the exchange with other ranks {share:.0%} of the time",
    ranks="other ranks wait for the GPU of rank {rank} {share:.0%} of the time",
    unseen="each step asks {who} whether gradients are finite, which hides what it waits for",
    gpu="{who} computes {share:.0%} of the time",
)
Span = tuple[float, float]  # seconds of the host's clock


@dataclass
class Waits:
    """The seconds that this rank's steps waited for what; in how many the GPU kept up with Python.

    data, ranks, host: while its GPU (without one: the process) had nothing else to do. start: for Python to start the
    kernels. exchange: for gradients of other ranks, when its own were ready. images: those of all ranks.
    """

    steps: int = 0
    images: float = 0.0
    seconds: float = 0.0
    data: float = 0.0
    ranks: float = 0.0
    host: float = 0.0
    start: float = 0.0
    kept_up: int = 0
    exchange: float = 0.0

    def add(self, spans: dict[str, Span], kernels: Span | None, before: float, images: float) -> float:
        """Adds a step and returns its end. kernels: when the GPU ran it; before: the end of the step before."""
        start, end = kernels or spans["start"]
        self.steps, self.images, self.seconds = self.steps + 1, self.images + images, self.seconds + end - before
        data, ranks = (max(0.0, min(b, start) - max(a, before)) for a, b in (spans["data"], spans["ranks"]))
        self.data, self.ranks = self.data + data, self.ranks + ranks
        self.start += spans["start"][1] - spans["start"][0]
        if kernels is not None:
            self.host += max(0.0, start - before - data - ranks)
            self.kept_up += end - spans["start"][1] < AT_ONCE * (end - start)
        return end

    def share(self, name: str) -> float:
        """A wait, as a share of all steps' time; of "images", their number per second."""
        return getattr(self, name) / self.seconds if self.seconds else 0.0


class Meter:
    """The speed of training steps: evaluation, saving and the first steps (compilation) do not count.

    expected: images per second that are normal, if that is known. clock: the host's, in seconds. event: makes the
    CUDA events.
    """

    def __init__(self, data: Data, train_step: TrainStep, expected: float | None, clock=time.perf_counter, event=None):
        self.data, self.train_step, self.expected, self.clock, self.begun = data, train_step, expected, clock, clock()
        self.event = (event or partial(torch.cuda.Event, enable_timing=True)) if data.device.type == "cuda" else None
        self.waits, self.taken, self.judged = Waits(), 0, False
        self.start_window()

    def start_window(self) -> None:
        """Begins a window now, while the device is idle; the time since the last one is not counted."""
        self.steps, self.now, self.window, self.origin = [], {}, self.clock(), self._record()

    def _record(self):
        event = self.event and self.event()
        if event is not None:
            event.record()
        return event

    @contextmanager
    def span(self, name: str):
        """Times what the host does for a step: "data", "ranks", and then "start", which starts its kernels."""
        begin, first = self.clock(), self._record() if name == "start" else None
        yield
        self.now[name] = begin, self.clock()
        if name == "start":
            self.steps.append((self.now, first, self._record()))
            self.now = {}

    def end_window(self, images: int) -> float:
        """Ends a window of `images` of all ranks (the device is idle now); returns its images per second."""
        seconds, end = max(self.clock() - self.window, 1e-9), self.window
        for spans, *events in self.steps:
            kernels = None
            if self.origin is not None:
                kernels = tuple(self.window + self.origin.elapsed_time(event) / 1e3 for event in events)
            if self.taken == WARM_UP:
                self.waits = Waits()
            self.taken += 1
            end = self.waits.add(spans, kernels, end, images / len(self.steps))
        self.start_window()
        return images / seconds

    def take_seconds(self) -> float:
        """Seconds since the last call, everything included."""
        now = self.clock()
        seconds, self.begun = now - self.begun, now
        return seconds

    def summary(self) -> dict:
        """The entries of summary.json; every rank must call this."""
        shares = dict(images_per_second=("images", 1), waiting_for_data=("data", 4))
        return {k: round(self.waits.share(name), n) for k, (name, n) in shares.items()} | dict(speed=self.judge())

    def judge(self) -> dict | None:
        """The speed so far, what the steps of all ranks wait for, and what helps most; in words too.

        None after fewer steps than JUDGED. Every rank must call this.
        """
        if self.taken < JUDGED:
            return None
        runner, waits = self.train_step.runner, self.waits
        if isinstance(runner, DistributedDataParallel):
            timed = runner._get_ddp_logging_data()  # of one step, which may have been an exception
            alone = timed.get("backward_comm_time", 0) - timed.get("backward_compute_comm_overlap_time", 0)
            most = waits.seconds - waits.data - waits.ranks - waits.host
            waits.exchange = max(0.0, min(most, waits.steps * 1e-9 * alone))
        self.judged, data, normal = True, self.data, self.expected
        everyone = data.ranks.gather(waits)
        cause, rank, share = slow_part(everyone, data, self.train_step.asks)
        on_gpu, speed = data.device.type == "cuda", everyone[0].share("images")
        who = "a step" if not on_gpu else f"rank {rank}, the slowest," if data.ranks.world > 1 else "the GPU"
        told = f"{speed:,.0f} images/s" + (f", {speed / normal:.0%} of the {normal:,.0f} expected" if normal else "")
        told += f"; {CAUSES[cause].format(who=who, share=share, rank=rank)}"
        told += f": {remedy(cause, data, self.train_step.compiled, normal and speed / normal)}" if on_gpu else ""
        found = dict(images_per_second=round(speed, 1), expected=normal and round(normal, 1))
        return found | dict(waits_for=cause, share=round(share, 4), said=told)


def slow_part(everyone: Sequence[Waits], data: Data, asks: bool = False) -> tuple[str, int, float]:
    """(what a slow step waits for, of CAUSES; the rank that the others wait for; the share of a step)."""
    lost = [each.share("ranks") + each.share("exchange") for each in everyone]
    rank = lost.index(min(lost))
    waits = everyone[rank]
    shares = {name: waits.share(name) for name in ("data", "host", "exchange")}
    # Where this rank waits for others too, ranks are late in turn, by what costs all of them most.
    late = {name: sum(each.share(name) for each in everyone) for name in ("data", "host")}
    most = max(late, key=late.get)
    shares[most if late[most] >= waits.share("ranks") else "exchange"] += waits.share("ranks")
    if data.device.type != "cuda":
        return ("data" if shares["data"] >= NOTABLE else "nothing"), rank, shares["data"]
    worst, kept_up = max(shares, key=shares.get), 2 * waits.kept_up > waits.steps and not asks
    inside = max(0.0, 1 - sum(shares.values()))  # between its first kernel and its last
    if shares[worst] >= NOTABLE and not (kept_up and inside > shares[worst]):
        return worst, rank, shares[worst]
    if kept_up:
        return "start", rank, waits.share("start")
    if max(lost) - min(lost) >= NOTABLE:
        return "ranks", rank, max(lost)
    return ("unseen" if asks else "gpu"), rank, inside


def remedy(cause: str, data: Data, compiled: bool, of_normal: float | None) -> str:
    """The setting, or else the advice, that helps most against a cause."""
    config, cores = data.config, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cause == "data" and data.workers < cores and (config.workers or 0) <= data.workers:  # memory may allow no more
        return f"--set workers={cores} helps, as many as there are cores, in place of {data.workers}"
    if cause == "data":
        with suppress(InputError):
            check_decodable(config, data.train)
            if config.decode == "host" and data.train.path(0).lower().endswith((".jpg", ".jpeg")):
                return "--set decode=device helps, by which the GPU reads JPEG files"
        files = "smaller files help, or shards (wds/) where a disk is slow"
        return "a simpler augmentation helps" if data.train.content(0) is None else files
    if not compiled and cause not in ("exchange", "ranks"):
        return "--compile helps"
    if cause == "start" and config.compile_mode == "default" and not no_graphs(data):
        return "--set compile_mode=reduce-overhead helps"
    if cause in ("host", "start", "exchange"):
        return f"a larger {'--batch-size' if data.packing is None else 'tokens_per_step'} helps"
    if cause != "ranks" and config.amp == "none":
        return "--set amp=bf16 helps"
    if cause == "ranks" or (of_normal is not None and of_normal < NORMAL):
        return "`nvidia-smi -q -d PERFORMANCE` says whether power or heat slows a GPU"
    return "no setting is known to help"
