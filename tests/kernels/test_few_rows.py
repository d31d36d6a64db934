"""Kernels of few rows: a norm with the layer behind it, and sums in parts that the last program to arrive adds up."""

from functools import partial
from itertools import cycle, product

import pytest
import torch
from attention_cases import interpreted
from programs import in_order, interleaved

from vitfast.kernels import dependent, tiles
from vitfast.kernels.launch import record
from vitfast.kernels.matmul import few_rows
from vitfast.ops import reference as ref
from vitfast.tools.verify import Judge
from vitfast.tools.verify.draw import Draw
from vitfast.tools.verify.launcher import Launcher, outputs

pytestmark = interpreted
CPU, HALVES = torch.device("cpu"), (torch.float16, torch.bfloat16)
ROWS, WIDTHS = (1, 15, 197, 1024), (192, 264, 384, 768, 1024)
DTYPES = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype)[6:])
# What is there, one kind for each shape in turn: w, b of the norm, c of the layer; r RMSNorm; s x is strided.
KINDS = ["wbc", "s", "rwcs gelu", "bc silu", "wbcs gate", "r", "c gelu_tanh", "wb quick_gelu", "rwc gate"]


def within(launcher: Launcher, dtype: torch.dtype) -> None:
    """Its results are as near to float64 as PyTorch's."""
    judge = Judge(launcher, dtype, CPU)
    judge.judge(outputs(launcher.call(*judge.inputs)))


def strided(t: Draw, *shape: int) -> torch.Tensor:
    """Values (M, D) whose rows lie 24 further apart than they are long."""
    return t.values(shape[0], shape[1] + 24)[:, 8:-16]


def norm_linear(rows: int, width: int, columns: int, kind: str, values=None) -> Launcher:
    given, _, activation = kind.partition(" ")
    gated, rms, activation = activation == "gate", "r" in given, activation.replace("gate", "silu") or None

    def make(t: Draw):
        x = (values or (strided if "s" in given else Draw.values))(t, rows, width)
        yield from (x, t.values(width) if "w" in given else None, t.values(width) if "b" in given else None)
        for _ in range(1 + gated):
            yield from (t.weight(columns, width), t.values(columns) if "c" in given else None)

    def call(x, norm_weight, norm_bias, weight, bias, *up):
        counters = few_rows.new_counters(x).fill_(7)
        options = dict(rms=rms, activation=activation, counters=counters)
        out = few_rows.norm_linear(x, norm_weight, norm_bias, 1e-6, weight, bias, *up, **options)
        assert not counters.any() and out.is_contiguous() and out.dtype == x.dtype
        return out

    def formula(x, norm_weight, norm_bias, weight, bias, *up):
        h = ref.rms_norm(x, norm_weight) if rms else ref.layer_norm(x, norm_weight, norm_bias)
        out = ref.linear(h, weight, bias)
        out = ref.ACTIVATIONS[activation](out) if activation else out
        return out * ref.linear(h, *up) if gated else out

    return Launcher(lambda t: tuple(make(t)), call, formula)


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
def test_norm_and_linear(rows, dtype, monkeypatch):
    """On a GPU with programs for all columns, and on one where each goes on to further columns."""
    shift = ROWS.index(rows) + 2 * HALVES.index(dtype)
    for width, kind, processors, columns in zip(WIDTHS, (KINDS * 2)[shift:], cycle((132, 3)), cycle((40, 72, 40))):
        if "gate" in kind and width > 768:
            continue  # no tile
        monkeypatch.setattr(few_rows, "multiprocessors", lambda device, count=processors: count)
        within(norm_linear(rows, width, columns, kind), dtype)


def test_every_kind_of_norm_and_layer_occurs():
    assert {kind for shift in range(6) for kind in (KINDS * 2)[shift:][: len(WIDTHS)]} == set(KINDS)


@DTYPES
@pytest.mark.parametrize("width", [264, 768])
def test_a_mean_far_larger_than_the_spread_cancels_nothing(width, dtype):
    """Rows around 100 whose numbers differ by a unit in the last place: 0.0625 in fp16, 0.5 in bf16."""
    unit = 0.0625 if dtype == torch.float16 else 0.5
    near = lambda t, *shape: (100 + unit * torch.randint(0, 2, shape, generator=t.generator)).to(dtype)  # noqa: E731
    within(norm_linear(5, width, 40, "wbc", near), dtype)
    within(norm_linear(5, width, 40, "", near), dtype)


def split_linear(rows: int, k: int, columns: int, given: str) -> Launcher:
    """given: c a bias, l layer scale, s strided inputs."""

    def make(t: Draw):
        draw = strided if "s" in given else Draw.values
        yield from (draw(t, rows, k), t.weight(columns, k + 8)[:, :k] if "s" in given else t.weight(columns, k))
        yield from (t.values(columns) if "c" in given else None, draw(t, rows, columns))
        yield t.values(columns) if "l" in given else None

    def call(*tensors):
        return few_rows.split_linear(*tensors, few_rows.new_counters(tensors[0]).zero_())

    def formula(x, weight, bias, residual, scale):
        return ref.linear_residual(x, weight, bias, residual, layer_scale=scale)

    return Launcher(lambda t: tuple(make(t)), call, formula)


def splits(run) -> int:
    return record(run)[0].arguments["split"]


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
def test_a_sum_in_parts(rows, dtype, monkeypatch):
    """In one part and in many, over K that BLOCK_K divides and does not."""
    seen = set()
    for (k, processors), given in zip(product((200, 768), (1, 132)), ("cls", "", "c", "ls")):
        monkeypatch.setattr(few_rows, "multiprocessors", lambda device, count=processors: count)
        launcher = split_linear(rows, k, 72, given)
        within(launcher, dtype)
        seen.add(splits(lambda: launcher.call(*launcher.make(Draw(dtype, CPU)))))  # noqa: B023
    assert 1 in seen and max(seen) >= 6, seen


# ---- counters, and the order in which programs arrive


def block(rows: int = 70, width: int = 64, hidden: int = 512) -> tuple[torch.Tensor, dict, dict]:
    """The counters of a block, and the arguments of its first and its last layer."""
    t = Draw(torch.bfloat16, CPU, torch.Generator().manual_seed(rows))
    x, counters = t.values(rows, width), torch.full((few_rows.COUNTERS,), 12345, dtype=torch.int32)
    first = dict(x=x, norm_weight=None, norm_bias=None, eps=1e-6, weight=t.weight(hidden, width), bias=None)
    last = dict(weight=t.weight(width, hidden), bias=None, residual=x, layer_scale=None)
    return counters, first | dict(counters=counters), last | dict(counters=counters)


def run(first: dict, last: dict) -> torch.Tensor:
    return few_rows.split_linear(few_rows.norm_linear(**first), **last)


def test_the_bits_do_not_depend_on_who_arrives_last():
    _, first, last = block()
    inner = few_rows.norm_linear(**first)
    (launch,) = record(lambda: few_rows.split_linear(inner, **last))
    programs, parts = launch.grid[0], launch.arguments["split"]
    assert parts >= 4 and programs == 2 * parts  # two blocks of rows
    orders = [range(programs), range(programs)[::-1], *(torch.randperm(programs).tolist() for _ in range(4))]
    found = []
    for order in orders:
        with in_order(order):
            last["counters"].zero_()
            found.append(few_rows.split_linear(inner, **last))
    assert all(torch.equal(found[0], other) for other in found[1:])
    exact = last["residual"].double() + inner.double() @ last["weight"].double().t()
    torch.testing.assert_close(found[0].double(), exact, atol=1e-2, rtol=1e-2)


def test_counters_hold_from_one_norm_linear_to_the_next():
    """Whatever lay in them before, a run of an aborted block included; and each block runs any number of times."""
    counters, first, last = block()
    right = run(first, last)
    counters.random_(-9, 9)
    assert torch.equal(run(first, last), right) and torch.equal(run(first, last), right)
    counters[:1] += 1  # as if it had ended before the last program
    assert torch.equal(run(first, last), right)


def test_two_streams_do_not_mix():
    """Two blocks at once, each with buffers of its own, program by program."""
    sides = [block(), block(66)]
    right = [run(first, last) for _, first, last in sides]
    inner = [few_rows.norm_linear(**first) for _, first, _ in sides]
    launches = [record(partial(few_rows.split_linear, h, **last))[0] for h, (_, _, last) in zip(inner, sides)]
    interleaved(*launches)
    assert all(torch.equal(launch.arguments["out_ptr"], out) for launch, out in zip(launches, right))


def test_every_block_of_the_output_has_a_counter():
    """Up to the largest output of a layer that they take."""
    weight = torch.empty(1280, 5120, dtype=torch.bfloat16, device="meta")
    x, residual = weight.new_empty(dependent.MOST_ROWS, 5120), weight.new_empty(dependent.MOST_ROWS, 1280)
    for sm in tiles.GENERATIONS:
        with tiles.using(sm=sm):
            for rows in (1, 64, 256, 257, dependent.MOST_ROWS):
                inputs = x[:rows], weight, None, residual[:rows], None, few_rows.new_counters(x)
                (launch,) = record(lambda: few_rows.split_linear(*inputs))  # noqa: B023
                assert launch.grid[0] // launch.arguments["split"] <= few_rows.COUNTERS
