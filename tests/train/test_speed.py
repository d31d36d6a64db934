"""What a slow step waits for, from recorded clocks of a host and its GPU; what is said of it; what timing costs."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from commands import make_folder
from runs import digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitfast.data.loader import open_data
from vitfast.run.config import Config
from vitfast.run.distributed import Ranks
from vitfast.train.setup import set_up
from vitfast.train.speed import Meter, Waits, remedy, slow_part
from vitfast.train.step import TrainStep
from vitfast.train.trainer import train

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Clock:
    """A host and a GPU whose kernels run in order, at most `ahead` steps behind the host; times in seconds."""

    def __init__(self, ahead: int = 3):
        self.host, self.free, self.ends, self.ahead, self.idle, self.events, self.read = 0.0, 0.0, [], ahead, 0.0, 0, 0

    def __call__(self) -> float:
        self.read += 1
        return self.host

    def event(self):
        clock = self

        class Event:
            """Happens when the GPU has done all that was asked before."""

            def record(self):
                clock.events += 1
                self.at = max(clock.host, clock.free)

            def elapsed_time(self, other) -> float:
                return 1e3 * (other.at - self.at)

        return Event()

    def step(self, meter: Meter, read=0.0, ranks=0.0, between=0.0, start=0.01, gpu=0.02) -> None:
        """One step: so many seconds of the host for each part, and of the GPU."""
        with meter.span("data"):
            self.host += read
        with meter.span("ranks"):
            self.host += ranks
        self.host += between
        with meter.span("start"):
            begin = max(self.host, self.free)
            self.idle += begin - self.free
            self.host += start
            self.free = max(begin + gpu, self.host + 1e-4)  # the last kernel begins after Python has started it
            self.ends.append(self.free)
            if len(self.ends) > self.ahead:  # the queue of kernels is full
                self.host = max(self.host, self.ends[-1 - self.ahead])


def some_data(device=CUDA, ranks=None, workers=64, **settings):
    """As much of a run's Data as is read."""
    config = Config(**dict(name="x", model="B/16", data="d", steps=1) | settings)
    train = SimpleNamespace(content=lambda index: "file")  # no folder of JPEG files
    ranks = ranks or Ranks()
    return SimpleNamespace(
        device=device, ranks=ranks, config=config, workers=workers, packing=None, crops=None, train=train
    )


def learner(compiled=True, runner=None, asks=False):
    """As much of a run's TrainStep as is read."""
    return SimpleNamespace(compiled=compiled, runner=runner or nn.Identity(), asks=asks)


def measured(data=None, expected=None, ahead=3, of=None, **step) -> tuple[Meter, dict, Clock]:
    """A meter after seven windows of ten such steps of 100 images, what it says, and its clock."""
    data, clock = data or some_data(), Clock(ahead)
    meter = Meter(data, of or learner(), expected, clock, clock.event)
    for window in range(7):
        if window == 1:  # the first does not count
            clock.idle, began = 0.0, clock.host
        for _ in range(10):
            clock.step(meter, **step)
        clock.host = max(clock.host, clock.free)
        meter.end_window(1000)
    clock.seconds = clock.host - began
    return meter, meter.judge(), clock


def test_a_data_bound_step():
    """The GPU is idle for the reading that its 20 ms do not cover, as the clock of the GPU itself says."""
    meter, found, clock = measured(read=0.03, start=0.01, gpu=0.02)
    assert found["waits_for"] == "data" and found["share"] == pytest.approx(clock.idle / clock.seconds, abs=1e-4)
    assert 0.4 < found["share"] < 0.56 and meter.waits.share("host") < 0.01
    assert found["said"].startswith("2,") and "; the GPU waits for data 5" in found["said"]


def test_reading_that_the_gpu_does_not_wait_for_is_no_wait():
    """The host waits for data for half of its time, while the GPU has work for three steps."""
    meter, found, _ = measured(read=0.02, start=0.01, gpu=0.06)
    assert found["waits_for"] == "gpu" and meter.waits.share("data") < 0.04


@pytest.mark.parametrize("gpu", [0.039, 0.028, 0.01])
def test_a_host_bound_step_whose_kernels_are_started_late(gpu):
    meter, found, _ = measured(start=0.04, gpu=gpu)
    assert found["waits_for"] == "start" and found["share"] == pytest.approx(1.0, abs=0.02)
    assert (
        "the GPU keeps up with Python, which takes 100% of a step to start its kernels: --set compile_mode=reduce"
        in (found["said"])
    )
    assert meter.waits.kept_up == 60


def test_a_host_bound_step_whose_python_is_between_the_steps():
    _, found, clock = measured(between=0.02, start=0.005, gpu=0.015)
    assert found["waits_for"] == "host" and found["share"] == pytest.approx(clock.idle / clock.seconds, abs=1e-4)
    assert "the GPU waits for Python between steps 42% of the time: a larger --batch-size helps" in found["said"]
    for start, gpu in ((0.01, 0.01), (0.01, 0.003), (0.015, 0.002)):  # and its kernels are started late too
        _, found, clock = measured(between=0.03, start=start, gpu=gpu)
        assert found["waits_for"] == "host" and found["share"] == pytest.approx(clock.idle / clock.seconds, abs=1e-4)


def test_of_two_reasons_the_one_that_costs_more_is_told():
    """Reading costs 8 %, and then 60 %, of a step whose kernels are started late."""
    assert measured(read=0.004, start=0.04, gpu=0.02)[1]["waits_for"] == "start"
    _, found, clock = measured(read=0.06, start=0.04, gpu=0.02)
    assert found["waits_for"] == "data" and found["share"] == pytest.approx(clock.idle / clock.seconds, abs=1e-4)


@pytest.mark.parametrize("start", [0.002, 0.02, 0.055])  # CUDA graphs, compiled, and Python that is hardly ahead
@pytest.mark.parametrize("ahead", [1, 3, 40])
def test_a_gpu_bound_step(start, ahead):
    """However long Python takes, and whether it waits for room in the queue or for the end of a window."""
    meter, found, clock = measured(start=start, gpu=0.058, ahead=ahead, expected=1700.0)
    assert found["waits_for"] == "gpu" and found["share"] > 0.95
    assert found["images_per_second"] == pytest.approx(6000 / clock.seconds, rel=1e-3)
    assert "% of the 1,700 expected; the GPU computes" in found["said"]
    assert found["said"].endswith("no setting is known to help")


def test_an_optimiser_that_waits_for_the_gpu_is_no_late_python():
    """It reads from the GPU whether gradients are finite, and starts its kernels when the others have ended."""
    for asks, wanted in ((True, "unseen"), (False, "start")):
        _, found, _ = measured(of=learner(asks=asks), start=0.06, gpu=0.058)
        assert found["waits_for"] == wanted and ("each step asks the GPU whether" in found["said"]) == asks
    assert measured(of=learner(asks=True), read=0.05)[1]["waits_for"] == "data"


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        (dict(optimizer="lamb"), False),
        (dict(optimizer="lamb", non_finite="skip"), True),
        (dict(optimizer="sgd", non_finite="skip"), False),  # fused: the step looks itself
        (dict(non_finite="skip"), False),
    ],
)
def test_which_optimisers_wait_for_the_gpu(tmp_path, settings, asks):
    config = digits(tmp_path, **settings)
    model, data = set_up(config, CPU, Ranks(), None)
    assert TrainStep(config, model, data).asks == asks


def of_ranks(*steps: dict, exchange=()) -> tuple[str, int, float]:
    """`slow_part` of ranks with these steps."""
    everyone = [measured(**step)[0].waits for step in steps]
    for waits, seconds in zip(everyone, exchange):
        waits.exchange = seconds * waits.steps
    return slow_part(everyone, some_data(ranks=Ranks(0, len(steps))))


def test_rank_bound_steps():
    """The rank that all wait for is named with its own reason; where all wait alike, it is the exchange."""
    fast, slow = dict(ranks=0.03), dict(read=0.03)
    assert of_ranks(fast, fast, slow)[:2] == ("data", 2) and of_ranks(slow, fast)[:2] == ("data", 0)
    late = dict(start=0.039)
    assert of_ranks(dict(ranks=0.029), late)[:2] == ("start", 1)
    busy = dict(gpu=0.05)
    cause, rank, share = of_ranks(busy, busy, exchange=(0.02, 0.0))  # the other GPU is slower, by 20 of 50 ms
    assert (cause, rank) == ("ranks", 1) and share == pytest.approx(0.4, abs=0.02)
    cause, rank, share = of_ranks(busy, busy, exchange=(0.011, 0.01))
    assert (cause, rank) == ("exchange", 1) and share == pytest.approx(0.2, abs=0.01)


def in_turn(ranks: int, read=0.06, gpu=0.02) -> tuple[list[Waits], Clock]:
    """Waits of ranks of which one after the other reads for long while the others wait; the last one's clock."""
    clocks = [Clock() for _ in range(ranks)]
    meters = [Meter(some_data(), learner(), None, clock, clock.event) for clock in clocks]
    for step in range(80):
        for rank, (clock, meter) in enumerate(zip(clocks, meters)):
            late = rank == step % ranks
            clock.step(meter, read=read * late, ranks=read * (not late), start=0.005, gpu=gpu)
    for clock, meter in zip(clocks, meters):
        clock.host = max(clock.host, clock.free)
        meter.end_window(8000)
    return [meter.waits for meter in meters], clocks[-1]


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_ranks_that_read_slowly_in_turn_wait_for_data(ranks):
    everyone, clock = in_turn(ranks)
    cause, _, share = slow_part(everyone, some_data(ranks=Ranks(0, ranks)))
    assert cause == "data" and share == pytest.approx(clock.idle / clock.host, abs=0.02) and share > 0.6


def test_ranks_that_agree_slowly_wait_for_the_exchange():
    late = dict(ranks=0.03, start=0.005)
    cause, _, share = of_ranks(late, late)
    assert cause == "exchange" and share == pytest.approx((9 * 15 + 30) / (9 * 35 + 50), abs=0.01)  # a window ends idle


class Timed(DistributedDataParallel):
    """DDP, of which 3 of 10 ms of communication, or more, come after the backward."""

    def __init__(self, alone=3_000_000):
        nn.Module.__init__(self)
        self.alone = alone

    def _get_ddp_logging_data(self) -> dict:
        return dict(backward_comm_time=7_000_000 + self.alone, backward_compute_comm_overlap_time=7_000_000)


def test_the_exchange_of_gradients_is_what_ddp_timed():
    class Two(Ranks):
        def gather(self, value: Waits) -> list[Waits]:
            return [value, value]

    meter, found, _ = measured(some_data(ranks=Two(0, 2)), of=learner(runner=Timed()))
    assert meter.waits.exchange == pytest.approx(60 * 0.003)
    assert (found["waits_for"], found["share"]) == ("exchange", pytest.approx(0.003 / 0.02, rel=0.08))
    wanted = "rank 0, the slowest, waits for the exchange with other ranks 15% of the time: a larger --batch-size helps"
    assert wanted in found["said"]
    _, found, _ = measured(some_data(ranks=Two(0, 2)), of=learner(runner=Timed(5_000_000_000)), read=0.03)
    assert found["share"] <= 1


@pytest.mark.parametrize(
    ("step", "settings", "compiled", "wanted"),
    [
        ("data", dict(workers=6), True, "--set workers=16 helps, as many as there are cores, in place of 6"),
        ("data", dict(), True, "smaller files help, or shards"),
        ("start", dict(), False, "--compile helps"),
        ("start", dict(), True, "--set compile_mode=reduce-overhead helps"),
        ("start", dict(compile_mode="reduce-overhead"), True, "a larger --batch-size helps"),
        ("start", dict(accumulate=2), True, "a larger --batch-size helps"),
        ("gpu", dict(amp="none"), True, "--set amp=bf16 helps"),
        ("gpu", dict(), True, "`nvidia-smi -q -d PERFORMANCE` says whether power or heat"),
    ],
)
def test_the_setting_that_helps_most(monkeypatch, step, settings, compiled, wanted):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    steps = dict(data=dict(read=0.03), start=dict(start=0.04), gpu=dict(gpu=0.06))
    data = some_data(workers=settings.pop("workers", 64), **settings)
    assert wanted in measured(data, expected=1e5, of=learner(compiled), **steps[step])[1]["said"]


def test_no_setting_is_told_that_cannot_help(monkeypatch):
    """More processes than memory allows, smaller files where there are none, compiling against slow ranks."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    few = SimpleNamespace(**vars(some_data(workers=3)) | dict(config=some_data(workers=3).config))
    assert "workers=16" in remedy("data", few, True, None)
    few.config = dataclasses.replace(few.config, workers=16)
    assert "smaller files" in remedy("data", few, True, None)
    few.train.content = lambda index: None
    assert remedy("data", few, True, None) == "a simpler augmentation helps"
    assert remedy("ranks", some_data(amp="none"), False, None).startswith("`nvidia-smi")
    packed = some_data()
    packed.packing = object()
    assert remedy("exchange", packed, False, None) == "a larger tokens_per_step helps"


def test_jpeg_files_are_for_the_gpu_where_all_cores_read(tmp_path):
    make_folder(tmp_path / "png")
    for path in make_folder(tmp_path / "jpeg").rglob("*.png"):
        path.rename(path.with_suffix(".JPG"))
    for folder, settings, wanted in (
        ("jpeg", dict(), "--set decode=device helps"),
        ("jpeg", dict(decode="device"), "smaller files help"),
        ("jpeg", dict(color_jitter=0.4), "smaller files help"),
        ("png", dict(), "smaller files help"),
    ):
        data = some_data(**settings)
        data.train = open_data(digits(data=str(tmp_path / folder)), (16, 16), (8, 8), CPU).train
        assert wanted in measured(data, read=0.03)[1]["said"]


def test_a_cpu_says_alone_whether_data_waits():
    meter, found, clock = measured(some_data(CPU), read=0.01, between=0.05, start=0.03)
    assert clock.events == 0 and found["waits_for"] == "data" and found["share"] == pytest.approx(0.01 / 0.09, rel=0.01)
    assert found["said"] == "1,111 images/s; a step waits for data 11% of the time"
    found = measured(some_data(CPU), read=0.0001, start=0.03)[1]
    assert found["said"].endswith("images/s; a step does not wait for data")


@pytest.mark.parametrize("window", [1, 7, 10, 25, 60])
def test_nothing_is_said_after_few_steps_or_of_the_first_ten(window):
    """The first three compile for eight seconds each; then a step takes 20 ms, whatever the length of a window."""
    clock = Clock()
    meter, taken = Meter(some_data(), learner(), None, clock, clock.event), 0
    while not (found := meter.judge()):
        for _ in range(window):
            taken += 1
            clock.step(meter, start=8.0 if taken <= 3 else 0.01)
        clock.host = max(clock.host, clock.free)
        meter.end_window(100 * window)
    assert taken == math.ceil(50 / window) * window and meter.waits.steps == taken - 10
    assert found["images_per_second"] == pytest.approx(100 / 0.02, rel=0.02) and found["waits_for"] == "gpu"


def test_a_run_of_few_steps_has_a_speed():
    clock = Clock()
    meter = Meter(some_data(), learner(), None, clock, clock.event)
    for _ in range(3):
        clock.step(meter)
    clock.host = clock.free
    meter.end_window(300)
    summary = meter.summary()
    assert summary["speed"] is None and summary["images_per_second"] == pytest.approx(300 / 0.06)


def test_a_step_costs_two_events_and_six_readings_of_the_clock_and_no_wait_for_the_gpu():
    """An Event of these has nothing that waits; the origin of a window is one event more."""
    meter, _, clock = measured()
    before = clock.events, clock.read
    for _ in range(10):
        clock.step(meter)
    assert (clock.events - before[0], clock.read - before[1]) == (20, 60)


def test_a_step_that_fails_is_no_step():
    clock = Clock()
    meter = Meter(some_data(), learner(), None, clock, clock.event)
    with pytest.raises(torch.OutOfMemoryError), meter.span("start"):
        raise torch.OutOfMemoryError
    assert not meter.steps


@pytest.mark.gpu
def test_cuda_graphs_train_as_eager_steps_do_and_events_time_both(tmp_path):
    """fp32 without TF32: the losses of 80 steps differ by rounding; a GPU's own times fit into the host's."""
    settings = dict(img_size=32, steps=80, batch_size=64, workers=0, device="cuda", amp="none", log_every=10)
    modes = dict(eager=dict(compile=False), graphs=dict(compile=True, compile_mode="reduce-overhead"))
    found = {name: train(digits(tmp_path / name, **settings | mode)) for name, mode in modes.items()}
    assert found["graphs"]["loss"] == pytest.approx(found["eager"]["loss"], abs=0.01)
    for summary in found.values():
        speed = summary["speed"]
        assert speed["waits_for"] in ("data", "host", "start", "gpu") and 0 < speed["share"] <= 1.01
        assert 0 < 70 * 64 / speed["images_per_second"] < summary["seconds"]


@pytest.mark.reports
@pytest.mark.slow
def test_a_run_says_it_once_and_in_its_summary_and_its_report(tmp_path, caplog):
    caplog.set_level("INFO", "vitfast")
    settings = dict(img_size=16, steps=80, batch_size=8, train_images=80, workers=0, log_every=10)
    summary = train(digits(tmp_path / "run", **settings))
    said = [line for line in caplog.messages if "images/s; a step " in line]
    assert len(said) == 1 and said[0].startswith("pretrain: ")
    order = [line for line in caplog.messages if "step 50/80" in line or line == said[0] or "step 56/80" in line]
    assert order.index(said[0]) == 1  # after 50 steps
    assert summary["speed"]["expected"] is None and "share" in summary["speed"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["speed"] == summary["speed"]
    assert math.isclose(summary["speed"]["images_per_second"], summary["images_per_second"], rel_tol=1e-6)
    report = (tmp_path / "run" / "report.html").read_text()
    assert ">Speed<" in report and summary["speed"]["said"] in report
    short = train(digits(tmp_path / "short", **settings | dict(steps=20)))
    assert short["speed"] is None and ">Speed<" not in (tmp_path / "short" / "report.html").read_text()
