"""A call like one before goes without checks to the operation in which that ended, and nowhere else."""

import warnings
from pathlib import Path

import pytest
import torch
from attention_cases import interpreted
from torch.overrides import TorchFunctionMode

from vitfast import ops
from vitfast.kernels import tiles
from vitfast.kernels.launch import launches_made
from vitfast.ops import checks, dispatch
from vitfast.ops import reference as ref

pytestmark = interpreted
X, WEIGHT, BIAS = torch.randn(2, 5, 32), torch.randn(32), torch.randn(32)
QKV = torch.randn(2, 6, 3, 2, 16)


@pytest.fixture(autouse=True)
def _on():
    with ops.use_kernels("on"):
        yield


@pytest.fixture
def checked(monkeypatch) -> list:
    """The operations that checked a dtype, as all do."""
    found, floating = [], checks.floating
    monkeypatch.setattr(checks, "floating", lambda op, **given: found.append(op) or floating(op, **given))
    return found


def test_checks_are_made_once(checked):
    for shape in ((2, 7, 32), (2, 9, 32)):
        for i in range(3):
            checked.clear()
            x = torch.randn(shape) + i
            torch.testing.assert_close(ops.layer_norm(x, WEIGHT, BIAS), ref.layer_norm(x, WEIGHT, BIAS, 1e-6))
            assert checked == ["layer_norm"] * (i == 0), "of each shape once"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(weight=torch.randn(16)), "weight must be"),
        (dict(weight=WEIGHT.half()), "weight must be torch.float32"),
        (dict(eps=-1.0), "eps must be a number"),
        (dict(eps=True), "eps must be a number"),
        (dict(x=X.long()), "x must be floating point"),
        (dict(bias="none"), "bias must be a tensor"),
    ],
)
def test_wrong_arguments_are_refused_after_right_ones(wrong, message):
    right = dict(x=X, weight=WEIGHT, bias=BIAS, eps=1.0)
    for _ in range(3):
        ops.layer_norm(**right)
    with pytest.raises((TypeError, ValueError), match=message):
        ops.layer_norm(**(right | wrong))


def test_modes_choose_at_each_call():
    def launches(mode):
        before = launches_made()
        with ops.use_kernels(mode):
            y = ops.layer_norm(X, WEIGHT, BIAS)
        torch.testing.assert_close(y, ref.layer_norm(X, WEIGHT, BIAS, 1e-6))
        return launches_made() - before

    assert [launches(mode) for mode in ("on", "on", "off", "auto", "on", "off")] == [1, 1, 0, 0, 1, 0]


def test_gradients_are_those_that_are_needed_at_each_call():
    for wanted in ((), (0,), (0,), (1, 2), (0, 1, 2), (), (0,)):
        given = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((X, WEIGHT, BIAS))]
        y, upstream = ops.layer_norm(*given), torch.randn_like(X)
        assert y.requires_grad == bool(wanted)
        if wanted:
            y.backward(upstream)
        for i, t in enumerate(given):
            if i not in wanted:
                assert t.grad is None
                continue
            double = [t.detach().double().requires_grad_() for t in given]
            (want,) = torch.autograd.grad(ref.layer_norm(*double, 1e-6), double[i], upstream.double())
            torch.testing.assert_close(t.grad.double(), want, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            assert not ops.layer_norm(*given).requires_grad


def test_what_is_kept_for_backward_is_that_of_the_call():
    weights = torch.randn(48, 32), None, torch.randn(16, 48), None
    for trained in (False, False, True, True, False, True):
        x = X.clone().requires_grad_(trained)
        y, upstream = ops.mlp(x, *weights), torch.randn(2, 5, 16)
        if trained:
            y.backward(upstream)
            double = X.double().requires_grad_()
            ref.mlp(double, *(w if w is None else w.double() for w in weights)).backward(upstream.double())
            torch.testing.assert_close(x.grad.double(), double.grad, atol=1e-4, rtol=1e-4)


def test_autocast_decides_at_each_call():
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            x = X.clone().requires_grad_()
            y = ops.layer_norm(x, WEIGHT, BIAS)
        y.sum().backward()
        assert y.dtype == dtype and x.grad.dtype == torch.float32


def test_offsets_on_the_host_are_read_at_each_call():
    q = torch.randn(8, 3, 2, 16)
    for offsets in ([0, 3, 8], [0, 3, 8], [0, 7, 8], [0, 1, 8]):
        offsets = torch.tensor(offsets)
        found = ops.attention(q, offsets=offsets)
        for a, b in zip(offsets, offsets[1:]):
            want = ref.attention(*q[None, a:b].double().unbind(2), scale=0.25)[0]
            torch.testing.assert_close(found[a:b].double(), want, atol=1e-5, rtol=1e-5)
    for wrong in ([0, 3, 9], [0, 5, 3, 8], [1, 3, 8]):
        with pytest.raises(ValueError, match="offsets must rise from 0 to the 8 tokens"):
            ops.attention(q, offsets=torch.tensor(wrong))


def test_rotary_tables_are_those_of_the_call():
    for i in range(4):
        angle = torch.rand(6, 16) + i
        rope = angle.cos(), angle.sin()
        found = ops.attention(QKV, rope=rope)
        want = ref.attention(*QKV.double().unbind(2), scale=0.25, rope=tuple(t.double() for t in rope))
        torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="cos and sin must be"):
        ops.attention(QKV, rope=(rope[0][:5], rope[1][:5]))


def test_one_tensor_as_two_arguments_leads_no_other_call_astray():
    q, k, v = QKV.unbind(2)
    for given in ((q, q, q), (q, q, q), (q, k, v), (q, k, k), (q, k, v), (q, q, v)):
        want = ref.attention(*(t.double() for t in given), scale=0.25)
        torch.testing.assert_close(ops.attention(*given).double(), want, atol=1e-5, rtol=1e-5)


def test_the_way_of_writing_a_call_does_not_matter():
    """The same tensors by place, by name, in another order."""
    want = ref.layer_norm(X, WEIGHT, BIAS, 0.5)
    for _ in range(2):
        for found in (
            ops.layer_norm(X, WEIGHT, BIAS, 0.5),
            ops.layer_norm(X, weight=WEIGHT, bias=BIAS, eps=0.5),
            ops.layer_norm(X, bias=BIAS, weight=WEIGHT, eps=0.5),
            ops.layer_norm(eps=0.5, bias=BIAS, weight=WEIGHT, x=X),
        ):
            torch.testing.assert_close(found, want)


def test_transforms_and_fake_tensors_take_no_route():
    for _ in range(3):
        ops.layer_norm(X, WEIGHT, BIAS)
    with ops.use_kernels("auto"):
        found = torch.func.vmap(lambda x: ops.layer_norm(x, WEIGHT, BIAS))(X)
    torch.testing.assert_close(found, ref.layer_norm(X, WEIGHT, BIAS, 1e-6))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = ops.layer_norm(mode.from_tensor(X), WEIGHT, BIAS)
        assert type(y) is not torch.Tensor and y.shape == X.shape


@pytest.mark.parametrize("op", ["layer_norm", "patch_embed"])
def test_the_warning_of_a_fallback_is_of_the_users_line(op, monkeypatch):
    monkeypatch.setattr(dispatch, "unsupported_reason", lambda x, unsupported: "the GPU is too old")
    monkeypatch.setattr(dispatch, "_warned", set())
    with torch._subclasses.FakeTensorMode(), ops.use_kernels("auto"), warnings.catch_warnings(record=True) as said:
        x, weight = (torch.empty(shape, device="cuda") for shape in ((1, 3, 8, 8), (16, 3, 4, 4)))
        ops.layer_norm(x, None, None) if op == "layer_norm" else ops.patch_embed(x, weight, None)
    assert [(Path(each.filename), op in str(each.message)) for each in said] == [(Path(__file__), True)]


class Scaled(TorchFunctionMode):
    """Multiplies what the operations of vitfast return by a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(2.0, requires_grad=True)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found[0] * self.scale if str(function) == "vitfast.layer_norm.default" else found


def test_what_a_function_mode_computes_has_gradients():
    for _ in range(3):
        x, upstream = X.clone().requires_grad_(), torch.randn_like(X)
        with Scaled() as mode:
            ops.layer_norm(x, WEIGHT, BIAS).backward(upstream)
        want = ref.layer_norm(X.double(), WEIGHT.double(), BIAS.double(), 1e-6).mul(upstream).sum()
        torch.testing.assert_close(mode.scale.grad.double(), want, atol=1e-4, rtol=1e-4)


def test_a_default_device_is_no_such_mode():
    with torch.device("cpu"):
        y = ops.layer_norm(X.clone().requires_grad_(), WEIGHT, BIAS)
    assert type(y.grad_fn).__name__ == "layer_normBackward", "an autograd.Function, not the derivative for compilers"


def test_a_new_table_of_tiles_is_looked_at(checked):
    seen = []
    for new in (True, False, True, False):
        if new:
            tiles.forget_user_table()
        checked.clear()
        ops.rms_norm(torch.randn(3, 32), WEIGHT)
        seen.append(len(checked))
    assert seen == [1, 0, 1, 0]


def test_routes_are_bounded(checked, monkeypatch):
    """The first of many shapes is checked again; nothing else shows that it was forgotten."""
    monkeypatch.setattr(dispatch, "MOST", 4)
    for n in (*range(11, 22), 11):
        checked.clear()
        ops.rms_norm(torch.randn(n, 32), WEIGHT)
        assert checked == ["rms_norm"]
