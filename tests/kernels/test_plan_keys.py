"""Which calls a plan is for: not for those that watch, change or read something, nor for other arguments and modes."""

import threading
from unittest import mock

import pytest
import torch
from attention_cases import interpreted
from planned_calls import Kernel, function, launches_of_plans
from torch import Tensor
from triton import knobs

import vitfast
from vitfast.kernels import launch, plans, tiles
from vitfast.ops import operation

pytestmark = interpreted
ONES = torch.ones(3)


@pytest.mark.parametrize(
    "run, reason",
    [
        (lambda x: x + x.sum().item(), "reads what is in a tensor"),
        (lambda x: x + ONES, "it reads a tensor that is no argument"),
        (lambda x: x.nonzero(), None),
    ],
)
def test_what_depends_on_numbers_has_no_plan(run, reason):
    planned = operation.planned(run)
    with torch._C._AutoDispatchBelowAutograd():
        for i in range(5):
            x = torch.tensor([0.0, i, 2.0])
            assert torch.equal(planned(x), run(x))
    (plan,) = planned.plans.values()
    assert isinstance(plan, plans.Plan) if reason is None else reason in plan


def test_two_arguments_that_are_one_tensor_are_told_apart_in_the_next_call():
    planned = operation.planned(lambda x, y: x - y)
    x = torch.ones(3)
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(3):
            assert planned(x, x).tolist() == [0.0] * 3
        assert planned(x, 3 * x).tolist() == [-2.0] * 3


OTHERS = dict(
    shape=lambda x: torch.zeros(5, 16),
    strides=lambda x: torch.zeros(16, 4).t(),
    dtype=lambda x: x.half(),
    alignment=lambda x: torch.zeros(65)[1:].view(4, 16),
)


@pytest.mark.parametrize("what", [*OTHERS, "number"])
def test_another_call_has_another_plan(what):
    planned, x = operation.planned(lambda x, n: x * n), torch.zeros(4, 16)
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(3):
            planned(x, 2)
        planned(*(x, 3) if what == "number" else (OTHERS[what](x), 2))
    assert len(planned.plans) == 2


def test_modes_have_plans_of_their_own(monkeypatch):
    planned, x = operation.planned(lambda x: torch.mm(x, x.t())), torch.randn(4, 16)
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(3):
            planned(x)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                planned(x)
        with vitfast.batch_invariant(True):
            planned(x)
        monkeypatch.setattr(launch, "fp32_precision", lambda: "tf32")
        planned(x)
        tiles.forget_user_table()
        planned(x)
    assert len(planned.plans) == 6


def test_deterministic_mode_fills_what_a_plan_allocates():
    planned, x = operation.planned(torch.empty_like), torch.zeros(1000)
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(3):
            planned(x)
        torch.use_deterministic_algorithms(True)
        try:
            assert planned(x).isnan().all(), "torch.utils.deterministic.fill_uninitialized_memory"
        finally:
            torch.use_deterministic_algorithms(False)
    assert [type(plan) for plan in planned.plans.values()] == [plans.Plan]


@pytest.fixture
def counted():
    """A planned function that has a plan, and how often its own code ran."""
    ran = []
    planned, x = operation.planned(lambda x: ran.append(1) or x + 1), torch.zeros(3)
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(3):
            planned(x)
        assert len(ran) == 2
        ran.clear()
        yield lambda: planned(x), ran


WATCHED = [
    (knobs.runtime, "launch_enter_hook", lambda metadata: None),
    (knobs.runtime, "launch_exit_hook", lambda metadata: None),
    (knobs.runtime, "add_stages_inspection_hook", lambda: ("", "")),
    (knobs.runtime, "debug", True),
    (knobs.compilation, "instrumentation_mode", "default"),
]


@pytest.mark.parametrize("where, name, value", WATCHED, ids=[name for _, name, _ in WATCHED])
def test_hooks_and_other_compilers_meet_the_operations_own_code(where, name, value, counted):
    call, ran = counted
    with mock.patch.object(where, name, value):
        call()
    assert len(ran) == 1
    call()
    assert len(ran) == 1, "a profiler is not waited for after its end"


def test_a_recording_in_another_thread_spoils_no_plan(monkeypatch):
    """It takes the launches of a call that is written down; the operation's own code makes them in later calls."""
    launched, x = launches_of_plans(monkeypatch), torch.zeros(4, 16)
    planned = function(Kernel())
    with torch._C._AutoDispatchBelowAutograd():
        planned(x, 3)
        monkeypatch.setattr(launch, "watched", lambda: False)  # as before the other thread began
        with launch.recording() as taken:
            planned(x, 3)
        for _ in range(3):
            planned(x, 3)
    assert len(taken) == 1 and len(launched) == 4


def test_a_recording_meets_the_operations_own_code(counted):
    call, ran = counted
    with launch.recording():
        call()
    call()
    assert len(ran) == 1


def test_each_change_of_configurations_has_plans_of_its_own(counted):
    """Its lookups are seen, and after its end those of before hold again."""
    call, ran = counted
    for inside in (1, 2):
        with tiles.using():
            for _ in range(4):
                call()
            with tiles.using():
                call()
            tiles.forget_user_table()
            call()
        assert len(ran) == 4 * inside
    call()
    assert len(ran) == 9, "another table of the user's may be read"


def test_a_hook_on_a_kernel_meets_the_operations_own_code(monkeypatch):
    launched = launches_of_plans(monkeypatch)
    kernel, x = Kernel(), torch.zeros(4, 16)
    planned = function(kernel)
    with torch._C._AutoDispatchBelowAutograd():
        for hooks, wanted in (([], int), ([print], Tensor), ([], int)):
            kernel.pre_run_hooks = hooks
            for _ in range(3):
                planned(x, 3)
            assert isinstance(launched[-1][2][0], wanted)


def test_a_stream_is_read_at_each_call(monkeypatch):
    launched = launches_of_plans(monkeypatch)
    planned, x = function(Kernel()), torch.zeros(4, 16)
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(3):
            planned(x, 3)
        for stream in (5, 9):
            monkeypatch.setattr(plans, "_stream", lambda device, stream=stream: stream)
            planned(x, 3)
            assert launched[-1][1] == (3, 1, 1, stream)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(operation, "MOST", 3)
    planned = operation.planned(lambda x, n: x * n)
    with torch._C._AutoDispatchBelowAutograd():
        for n in range(20):
            assert planned(torch.ones(1), n // 2).item() == n // 2 and len(planned.plans) <= 3


def test_threads_share_plans():
    planned, wrong = operation.planned(lambda x, n: (x * n + 1).t()), []

    def work(i):
        with torch._C._AutoDispatchBelowAutograd():
            for k in range(200):
                x = torch.full((2, k % 5 + 1), float(i))
                if not torch.equal(planned(x, k % 3), (x * (k % 3) + 1).t()):
                    wrong.append((i, k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(planned.plans) == 15
