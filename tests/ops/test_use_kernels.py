"""use_kernels in threads, backward passes and compiled code; VITFAST_KERNELS."""

import contextvars
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_cases import MODES, interpreted
from torch.utils.checkpoint import checkpoint

from vitfast import InputError, ops
from vitfast.kernels.launch import launches_made
from vitfast.ops import dispatch
from vitfast.ops.dispatch import current_mode

X, WEIGHT = torch.randn(3, 16), torch.randn(16)


@pytest.fixture(autouse=True)
def _fresh():
    """Each test begins and ends as a thread does that never chose."""
    with ops.use_kernels("auto"):
        yield
    assert current_mode() == "auto"


def in_thread(function):
    """What `function()` returns, or raises, in a new context of a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.Context().run, function).result()


def norm(x):
    return ops.layer_norm(x, WEIGHT, None)


def test_a_plain_call_is_of_its_thread():
    """In every context of the thread: a notebook's cells have their own; and it can be undone."""

    def run():
        ops.use_kernels("off")
        with ops.use_kernels("on"):
            pass
        ops.use_kernels("on").__exit__()
        return current_mode(), contextvars.Context().run(current_mode)

    assert in_thread(run) == ("off", "off")
    chosen = ops.use_kernels("off")
    assert in_thread(current_mode) == "auto", "neither between the call and the entry"
    with chosen:
        assert current_mode() == "off" and in_thread(current_mode) == "auto", "nor inside"
        with pytest.raises(ValueError, match="must be one of auto, on, off, got 'yes'"):
            ops.use_kernels("yes")
        assert current_mode() == "off"


@pytest.mark.parametrize("order", ["aA", "abABba", "abAaBb", "aAaA", "abBbA", "aAbBbaBA"])
def test_calls_entries_and_exits_act_as_those_of_set_grad_enabled(order):
    """A letter makes an object, its capital enters it, the letter again leaves it."""

    def states(make, current):
        made, entered, seen = {}, set(), []
        for letter in order:
            name = letter.lower()
            if letter.isupper():
                made[name].__enter__()
                entered.add(name)
            elif name in entered:
                made[name].__exit__(None, None, None)
                entered.remove(name)
            else:
                made[name] = make(name == "b")
            seen.append(current())
        return seen

    with torch.set_grad_enabled(True):
        expected = states(torch.set_grad_enabled, torch.is_grad_enabled)
    with ops.use_kernels("on"):
        found = states(lambda on: ops.use_kernels("on" if on else "off"), current_mode)
    assert found == ["on" if on else "off" for on in expected]


@pytest.mark.slow
def test_many_calls_and_many_threads_keep_nothing():
    """torch 2.11 gives back a reference that it never took, when a thread ends: memory was freed that was in use."""

    def alive():
        gc.collect()
        return sum(type(thing) is ops.use_kernels for thing in gc.get_objects())

    before = alive()
    for _ in range(50):
        ops.use_kernels("off")
        assert in_thread(lambda: (ops.use_kernels("off"), current_mode())[1]) == "off"
    ops.use_kernels("auto")
    assert alive() == before


@interpreted
@pytest.mark.parametrize("mode", ["on", "off"])
def test_backward_is_of_the_forward_that_ran(mode):
    x = X.clone().requires_grad_()
    with ops.use_kernels(mode):
        y = norm(x).sum()
    before = launches_made()
    with ops.use_kernels("off" if mode == "on" else "on"):
        in_thread(y.backward)
    assert (launches_made() > before) == (mode == "on")


class Deep(torch.autograd.Function):
    """Its backward calls backward again, so deep that autograd takes another of its threads, as it does on a GPU."""

    @staticmethod
    def forward(ctx, x, depth, run):
        ctx.depth, ctx.run = depth, run
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            if ctx.depth == 0:
                checkpoint(ctx.run, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
            else:
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.run).backward()
        return grad, None, None


@pytest.mark.parametrize("mode", MODES)
def test_autograds_threads_have_the_mode_of_the_backward_call(mode):
    """Forward code that is run again there, of a checkpoint, runs as it did."""
    seen = []

    def run(x):
        with ops.use_kernels("auto"):
            norm(x)
        seen.append((threading.get_ident(), current_mode()))
        return norm(x)

    for _ in range(2):
        with ops.use_kernels(mode):
            Deep.apply(torch.ones(1, requires_grad=True), 70, run).backward()
    assert [found for _, found in seen] == [mode] * 4 and threading.get_ident() not in dict(seen)


class Graphs(list):
    """A backend that keeps whether each graph that it is given calls a kernel."""

    def __call__(self, graph, _):
        self.append(any("vitfast" in str(node.target) for node in graph.graph.nodes))
        return graph


@interpreted
def test_compiled_code_follows_the_mode_without_end_of_compilations():
    torch._dynamo.reset()
    graphs, expected = Graphs(), norm(X)
    compiled = torch.compile(norm, fullgraph=True, backend=graphs)
    for _ in range(3):
        for mode in ("on", "off"):
            with ops.use_kernels(mode):
                before = launches_made()
                torch.testing.assert_close(compiled(X), expected, atol=1e-5, rtol=1e-5)
                assert (launches_made() > before) == (mode == "on")
    assert graphs == [True, False]
    with ops.use_kernels("on"):
        before = launches_made()
        in_thread(lambda: compiled(X))
        assert launches_made() == before, "another thread, another mode"
    assert len(graphs) == 3


@pytest.mark.quick(1)
@interpreted
@pytest.mark.parametrize("outer", ["auto", "on"])
def test_the_mode_is_chosen_in_compiled_code(outer):
    """In one graph; in an object made before, and with breaks of the graph inside."""
    torch._dynamo.reset()
    graphs, seen = Graphs(), []

    def both(x):
        with ops.use_kernels("on"):
            y = norm(x)
        with ops.use_kernels("off"):
            return y - norm(x)

    def broken(x):
        chosen = ops.use_kernels("off")
        y = norm(x)
        with chosen:
            torch._dynamo.graph_break()
            seen.append(current_mode())
            y = y + norm(x)
            torch._dynamo.graph_break()
        seen.append(current_mode())
        return y

    assert torch.compile(both, fullgraph=True, backend=graphs)(X).abs().max() < 1e-5 and graphs == [True]
    with ops.use_kernels(outer):
        torch.testing.assert_close(torch.compile(broken, backend="eager")(X), 2 * norm(X), atol=1e-5, rtol=1e-5)
        assert seen == ["off", outer] and current_mode() == outer


def test_the_mode_that_the_environment_names(monkeypatch):
    """An unknown one is an error at the first operation."""
    monkeypatch.setattr(dispatch._MODE, "start", "off")
    assert in_thread(current_mode) == "off"
    monkeypatch.setattr(dispatch._MODE, "start", "foo")
    wrong = "^VITFAST_KERNELS: must be one of auto, on, off, got 'foo' in the environment"
    with pytest.raises(InputError, match=wrong):
        in_thread(current_mode)
    monkeypatch.undo()
