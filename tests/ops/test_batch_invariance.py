"""batch_invariant: a mode of a thread; PyTorch's operations inside it, each sample alone and in batches."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import vitfast
from vitfast.kernels.launch import INTERPRETED, launches_made
from vitfast.kernels.tiles import batch_invariant as current
from vitfast.ops import _fixed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOL = {torch.float32: (2e-5, 2e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)}  # a few roundings


@pytest.fixture(autouse=True)
def _off_again():
    yield
    assert not current() and _fixed._library is None


def in_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def test_it_is_a_context_manager_and_a_setter_of_one_thread():
    with vitfast.batch_invariant(True):
        assert current() and not in_thread(current)
        with vitfast.batch_invariant(False):
            assert not current()
        assert current()
    assert not current()
    vitfast.batch_invariant(True)
    assert current() and _fixed._library is not None
    vitfast.batch_invariant(False)
    with pytest.raises(TypeError, match="^batch_invariant: it takes True or False, got 1"):
        vitfast.batch_invariant(1)


def test_other_threads_run_pytorchs_own_kernels(monkeypatch):
    """While the algorithms are in place for one thread."""
    calls, x = [], torch.randn(3, 5)
    monkeypatch.setitem(_fixed.ALGORITHMS, "mm", lambda call: calls.append(1) or call.run())
    with vitfast.batch_invariant(True):
        in_thread(lambda: x @ x.t())
        assert not calls
        x @ x.t()
        assert calls
    x @ x.t()
    assert len(calls) == 1


CODE = """
import threading, torch, vitfast
from vitfast.kernels.tiles import batch_invariant
found = []
thread = threading.Thread(target=lambda: found.append(batch_invariant()))
thread.start(), thread.join()
with vitfast.batch_invariant(False):
    found.append(batch_invariant())
print(found, batch_invariant())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("value", "said"), [("1", "[True, False] True"), ("", "[False, False] False")])
def test_the_environment(value, said):
    """What it may not name is refused in tests/test_imports.py."""
    env = {**os.environ, "VITFAST_BATCH_INVARIANT": value}
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert run.stdout.strip() == said, run.stderr


def test_compiled_code_runs_in_eager_mode_and_cannot_switch_it():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    x = torch.randn(3, 8)
    compiled = torch.compile(lambda x: F.gelu(x @ x.t()), backend=backend)
    with vitfast.batch_invariant(True):
        compiled(x)
        assert not graphs
    compiled(x)
    assert len(graphs) == 1

    def switches(x):
        with vitfast.batch_invariant(True):
            return x + 1

    with pytest.raises(Exception, match="compiled code cannot switch it"):
        torch.compile(switches, backend=backend, fullgraph=True)(x)


def _split(x):
    return (x.unflatten(-1, (3, 16)).transpose(1, 2),) * 3


def _images(x):
    return x[:, :16].reshape(-1, 3, 16, 16)


def _weight(x, *shape):
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64).mul(9).sin().view(shape).to(x.dtype)


OPERATIONS = {
    "linear": lambda x: F.linear(x, _weight(x, 40, 48), _weight(x, 40)),
    "linear, strided": lambda x: F.linear(x.transpose(0, 1), _weight(x, 40, 48), _weight(x, 40)).transpose(0, 1),
    "linear, no bias": lambda x: F.linear(x, _weight(x, 40, 48)),
    "matrix and vector": lambda x: x @ _weight(x, 48),
    "batched products": lambda x: (x @ x.transpose(1, 2) * 0.05).softmax(-1) @ x,
    "einsum": lambda x: torch.einsum("bnd,bmd->bnm", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[:, :, :1], x, x.transpose(1, 2), alpha=0.1),
    "convolution of patches": lambda x: F.conv2d(_images(x), _weight(x, 8, 3, 5, 4), _weight(x, 8), stride=(5, 4)),
    "convolution": lambda x: F.conv2d(_images(x), _weight(x, 8, 3, 3, 3), stride=2, padding=1),
    "attention": lambda x: F.scaled_dot_product_attention(*_split(x)),
    "attention, masked": lambda x: F.scaled_dot_product_attention(*_split(x), _weight(x, x.shape[1], x.shape[1])),
    "group norm": lambda x: F.group_norm(_images(x), 3),
    "batch norm": lambda x: F.batch_norm(_images(x), _weight(x, 3), _weight(x, 3).abs()),
    "layer norm": lambda x: F.layer_norm(x, (48,), _weight(x, 48), _weight(x, 48)),
    "rms norm": lambda x: F.rms_norm(x, (48,), _weight(x, 48)),
    "mean": lambda x: x.mean(1),
    "mean over two": lambda x: _images(x).mean((2, 3), keepdim=True),
    "sum": lambda x: x.sum(1),
    "variance": lambda x: x.var(-1),
    "variance and mean": lambda x: torch.stack(torch.var_mean(x, 1, correction=0)),
    "deviation": lambda x: x.std(1, unbiased=False),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "softmax over tokens": lambda x: x.softmax(1),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "glu": F.glu,
    "mish": F.mish,
    "elu": F.elu,
    "softplus": F.softplus,
    "power": lambda x: (x.abs() + 0.1) ** 1.5,
    "power of a number": lambda x: 2.0**x,
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "sines": lambda x: x.sin() + x.cos(),
    "pooling": lambda x: F.adaptive_avg_pool2d(_images(x), 5),
}


def differences(operation, x, batches) -> int:
    """How many samples have other bits in a batch than alone."""
    axis = 1 if operation is OPERATIONS["variance and mean"] else 0
    alone = [operation(x[i : i + 1]) for i in range(len(x))]
    found = 0
    for batch in batches:
        for start in {0, len(x) - batch}:
            y = operation(x[start : start + batch])
            pieces = zip(y.split(len(y) // batch if not axis else 1, axis), alone[start:])
            found += sum(not torch.equal(piece, one) for piece, one in pieces)
    return found


@pytest.mark.quick(57)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_pytorchs_gives_a_sample_its_bits(name, dtype):
    """And what PyTorch computes in float64."""
    x, operation = torch.randn(9, 17, 48).to(dtype), OPERATIONS[name]
    with vitfast.batch_invariant(True):
        assert differences(operation, x, (2, 9)) == 0
        found = operation(x)
    atol, rtol = TOL[dtype]
    assert_close(found.double(), operation(x.double()), atol=atol * 3, rtol=rtol)
    assert found.dtype == dtype


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_in_batches_of_2_to_64_with_threads(name, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with vitfast.batch_invariant(True):
            assert differences(OPERATIONS[name], torch.randn(64, 197, 48).to(dtype), (2, 3, 8, 33, 64)) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels of this CPU")
def test_without_the_mode_bits_depend_on_the_batch():
    """So that the tests above can fail: PyTorch's own, on this CPU."""
    x = torch.randn(9, 17, 48)
    assert sum(differences(operation, x, (2, 9)) > 0 for operation in OPERATIONS.values()) > 3


def test_rows_that_a_kernel_computes_unlike_run_one_by_one(monkeypatch):
    monkeypatch.setattr(_fixed, "_alike", {})
    seen = []

    def run(block, b):
        seen.append(len(block))
        return block @ b + torch.arange(len(block))[:, None] * 1e-3  # another result at each place

    class Fake:
        name = "mm"

    found = _fixed._product(Fake, torch.randn(5, 16), torch.randn(16, 4), run)
    assert found.shape == (5, 4) and set(seen[: _fixed.TRIALS]) == {_fixed.ROWS} and set(seen[_fixed.TRIALS :]) == {1}


def test_zeros_behind_change_no_sum():
    x = torch.randn(3, 21, 5)
    for more in (1, 11, 12, 100):
        padded = F.pad(x, (0, 0, 0, more))
        assert torch.equal(_fixed.tree_sum(x, [1]), _fixed.tree_sum(padded, [1]))
    assert_close(_fixed.tree_sum(x, [1, 2]), x.sum((1, 2)), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="the kernel on CPU tensors")
def test_our_kernel_computes_products_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_fixed, "kernel_runs", lambda a, *others: True)
    x, weight, bias = torch.randn(2, 5, 24), torch.randn(7, 24), torch.randn(7)
    before = launches_made()
    with vitfast.batch_invariant(True):
        found = F.linear(x, weight, bias), x @ weight.t(), x @ x.transpose(1, 2)
    assert launches_made() == before + 2 + len(x)
    for mine, theirs in zip(found, (F.linear(x, weight, bias), x @ weight.t(), x @ x.transpose(1, 2))):
        assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_gradients_are_right():
    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    run = lambda: F.gelu(F.linear(x, weight)).mean(1).square().sum()  # noqa: E731
    expected = torch.autograd.grad(run(), (x, weight))
    with vitfast.batch_invariant(True):
        found = torch.autograd.grad(run(), (x, weight))
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_has_no_fixed_algorithm_says_so():
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x, hidden = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    with vitfast.batch_invariant(True), torch.no_grad():
        attention(x, x, x, need_weights=False)
        with pytest.raises(NotImplementedError, match="^batch_invariant: nn.MultiheadAttention with a mask"):
            attention(x, x, x, need_weights=False, key_padding_mask=hidden)
