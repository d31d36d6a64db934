"""The persistent product: every block once, its epilogues against float64, in 16 bits, interpreted."""

import itertools
from functools import partial

import pytest
import torch
from attention_cases import interpreted
from torch.nn import functional as F

from vitfast.kernels import rows, tiles
from vitfast.kernels.launch import record
from vitfast.kernels.matmul import linear, mlp

pytestmark = interpreted
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda p: F.gelu(p, approximate="tanh"),
    "quick_gelu": lambda p: p * torch.sigmoid(1.702 * p),
    "silu": F.silu,
}


def config(pieces: int = 2, ahead: int = 2, columns: int = 32) -> tiles.KernelConfig:
    blocks = dict(BLOCK_M=32, BLOCK_N=columns, BLOCK_K=32, GROUP_M=2, SUBTILES=pieces)
    return tiles.config(4, 2, "persistent", **blocks, AHEAD=ahead)


@pytest.fixture(autouse=True)
def three_multiprocessors(monkeypatch):
    """So that each program makes several blocks."""
    monkeypatch.setattr(rows, "multiprocessors", lambda device: 3)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor, roundings: float = 1, atol: float = 1e-3) -> None:
    """Within some roundings of the exact number; the absolute bound is for sums that cancel."""
    torch.testing.assert_close(found.double(), exact, rtol=roundings * torch.finfo(found.dtype).eps, atol=atol)


# k of one, two and five steps: fewer than those that what is read early is ahead, and more
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k, pieces, ahead", [(24, 1, 2), (40, 2, 2), (136, 4, 2), (136, 2, 0), (72, 2, 1)])
def test_linear_and_residual(dtype, k, pieces, ahead):
    """Twelve blocks by three programs, with every set of factors and either dtype of the residual stream."""
    x, weight, bias = drawn(100, k, dtype=dtype), drawn(80, k, dtype=dtype) / 4, drawn(80, dtype=dtype)
    scale, drop = drawn(80, dtype=dtype), torch.tensor([0.0, 1.25, 2.0, 1.0])
    stream = drawn(100, 144, dtype=dtype)[:, 8:88]  # rows that lie apart
    exact = x.double() @ weight.double().T
    for given in itertools.product((bias, None), (stream, stream.float()), (scale, None), (drop, None)):
        b, residual, ls, dp = given
        with tiles.using("linear_residual_fwd", config(pieces, ahead)):
            call = lambda: linear.linear_residual(x, weight, b, residual, ls, dp, 25)  # noqa: B023, E731
            (launch,) = record(call)
            assert launch.grid == (3,) and launch.kernel.__name__ == "persistent_kernel"
            read_early = residual.dtype == dtype and dp is None and ahead > 0
            assert (launch.arguments["early_ptr"] is not None) == read_early
            found = call()
        branch = exact if b is None else exact + b.double()
        branch = branch if ls is None else branch * ls.double()
        branch = branch if dp is None else branch * dp.double().repeat_interleave(25)[:, None]
        close(found, residual.double() + branch, 1 if residual.dtype == dtype else 40)
    with tiles.using("linear_fwd", config(pieces, ahead)), tiles.using("input_grad", config(pieces, ahead)):
        close(linear.linear(x, weight, bias), exact + bias.double())
        close(linear.input_grad(x, weight.T.contiguous(), stream), exact + stream.double())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_mlp_forward_and_backward(dtype, activation):
    """From pre and from the slope; every path writes the same activation."""
    x, weight, bias = drawn(100, 40, dtype=dtype), drawn(80, 40, dtype=dtype) / 4, drawn(80, dtype=dtype)
    g, weight2 = drawn(100, 136, dtype=dtype), drawn(136, 80, dtype=dtype) / 8
    with tiles.using("linear_gelu_fwd", config()):
        act, pre = mlp.linear_gelu(x, weight, bias, activation, "pre")
        slope_act, slope = mlp.linear_gelu(x, weight, bias, activation, "slope")
        alone, nothing = mlp.linear_gelu(x, weight, bias, activation, "")
    assert nothing.numel() == 0 and torch.equal(act, slope_act) and torch.equal(act, alone)
    close(pre, x.double() @ weight.double().T + bias.double())
    leaf = pre.double().requires_grad_()
    value = ACTIVATIONS[activation](leaf)
    value.sum().backward()
    close(act, value.detach())
    close(slope, leaf.grad)
    exact = (g.double() @ weight2.double()) * leaf.grad
    for want_act, want_sums in itertools.product((False, True), repeat=2):
        with tiles.using("dgelu_matmul", config(pieces=4)):
            dpre, again, sums = mlp.dgelu_matmul(g, weight2, pre, activation, want_sums, want_act)
        close(dpre, exact)
        assert (again is None) == (not want_act) and (sums is None) == (not want_sums)
        assert again is None or torch.equal(again, act)
        if sums is not None:
            torch.testing.assert_close(sums.double().sum(0), dpre.double().sum(0), atol=1e-5, rtol=1e-6)
    with tiles.using("dgelu_matmul", config()):
        dpre, _, sums = mlp.dgelu_matmul(g, weight2, slope, "slope", True, False)
        same, _, same_sums = mlp.dgelu_matmul(g, weight2, slope, "slope", True, False)
    assert torch.equal(dpre, same) and torch.equal(sums, same_sums)
    close(dpre, exact, 2)
    torch.testing.assert_close(sums.double().sum(0), dpre.double().sum(0), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("provider", ["triton", "tma"])
def test_every_provider_keeps_the_slope(provider):
    x, weight, bias = drawn(100, 64), drawn(80, 64) / 4, drawn(80)
    g, weight2 = drawn(100, 64), drawn(64, 80) / 8
    small = tiles.config(4, 2, provider, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=2, SUBTILES=2)
    with tiles.using("linear_gelu_fwd", small), tiles.using("dgelu_matmul", small):
        act, slope = mlp.linear_gelu(x, weight, bias, "gelu", "slope")
        dpre, _, sums = mlp.dgelu_matmul(g, weight2, slope, "slope", True, False)
    leaf = F.linear(x, weight, bias).double().requires_grad_()
    F.gelu(leaf).sum().backward()
    close(act, F.gelu(leaf.detach()), 2)
    close(slope, leaf.grad, 2)
    close(dpre, (g.double() @ weight2.double()) * leaf.grad, 4, 4e-3)
    torch.testing.assert_close(sums.double().sum(0), dpre.double().sum(0), atol=1e-5, rtol=1e-6)


def test_a_matrix_that_is_no_pairs_goes_another_way():
    """Rows that overlap or begin anywhere: the epilogue reads it. An odd number of columns: another kernel."""
    x = drawn(100, 40)
    with tiles.using("linear_residual_fwd", config(), sm=90):
        for residual in (drawn(100, 81)[:, 1:], drawn(1, 80).expand(100, 80), drawn(100, 71)):
            weight = drawn(residual.shape[1], 40)
            product = partial(linear.linear_residual, x, weight, None, residual, None, None, 1)
            (launch,) = record(product) or (None,)
            assert launch is None or launch.arguments.get("early_ptr") is None
            exact = residual.double() + x.double() @ weight.double().T
            close(product(), exact, atol=0.03)


def test_two_programs_share_a_multiprocessor_where_blocks_are_narrow():
    x, weight = torch.empty(4096, 64, device="meta"), torch.empty(512, 64, device="meta")
    for columns, programs in ((128, 6), (256, 3)):
        with tiles.using("linear_fwd", config(columns=columns), sm=90):
            assert record(lambda: linear.linear(x, weight))[0].grid == (programs,)
