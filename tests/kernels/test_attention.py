"""What attention promises beyond the grid of tests/tools/verify/test_edges.py: extreme logits, masks, what lies beside.

Interpreted, against float64 and against PyTorch's own flash attention.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    ATOL,
    DTYPES,
    HALVES,
    PATHS,
    any_strides,
    by_autograd,
    by_launchers,
    check_attention,
    compare,
    interpreted,
    path,
    random,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import interpreter

from vitfast import ops
from vitfast.kernels import launch, tiles
from vitfast.kernels.attention import common
from vitfast.kernels.attention import launchers as kernels
from vitfast.kernels.attention.options import AttentionOptions
from vitfast.ops import reference as ref

pytestmark = interpreted
CLOSE = dict(atol=1e-5, rtol=1e-5)
PACKED_SIZES = [5, 70, 33, 0, 1, 64, 130]


@pytest.fixture(params=PATHS)
def each_path(request):
    with path(request.param):
        yield request.param


@pytest.fixture
def tiled():
    """The path that takes rotary positions, biases and lengths of keys."""
    with path("tiled"):
        yield


@pytest.fixture
def dots_rounded_once(monkeypatch):
    """Dots in one order of sums, so that backward finds forward's logits again, as on a GPU.

    The order of the interpreter's BLAS depends on the size of the block.
    """

    def create_dot(self, a, b, d, *_):
        exact = a.data.astype(float) @ b.data.astype(float) + d.data
        return interpreter.TensorHandle(exact.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def relative(ours, exact) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def parts(found) -> dict:
    """o, dq, dk and dv, each judged by its own size."""
    return {"o": found["o"]} | dict(zip(("dq", "dk", "dv"), found["dqkv"].unbind(2)))


# Logits and gradients of extreme sizes


def by_flash(qkv, do, scale):
    """PyTorch's own flash attention: like ours it computes the backward's weights from lse."""
    qkv = qkv.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), scale=scale).transpose(1, 2)
    return {"o": o.detach(), "dqkv": torch.autograd.grad(o, qkv, do)[0]}


@pytest.mark.quick(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30.0, 0.0, -1.0], ids=["peaked", "flat", "far below zero"])
def test_peaked_and_flat_rows(size, dtype, each_path, dots_rounded_once):
    """Logits of +-3e4, all equal, and all near -1e4 (where a padded key's logit of 0 would win)."""
    qkv, do = random(1, 75, 1, 64, dtype)
    if size < 0:
        qkv[:, :, 0], qkv[:, :, 1] = 13, -12
        qkv[:, :, :2, :, 0] += torch.randn(1, 75, 2, 1).to(dtype) * 0.1  # bf16's next number after 13 is 13 + 1/16
    else:
        qkv[:, :, :2] *= size
    truth = by_autograd(qkv.double(), do.double(), 1.0)
    truth = {name: truth[name] for name in ("o", "dqkv")}
    compare(by_launchers(qkv, do, 1.0), by_flash(qkv, do, 1.0), truth, dtype)


@pytest.mark.slow
def test_what_keys_have_in_common_cancels_in_dq():
    """Keys share an offset of ten times their spread: dQ of one block of keys is far larger than dQ.

    Values go with the block of keys they are in; with gradients of 900 a part of dQ passes fp16's largest number.
    """
    shape = 1, 197, 2, 64
    part = torch.zeros(1, 197, 1, 1)
    part[:, :64], part[:, 64:128] = 1, -1
    for dtype, offset, size in ((torch.bfloat16, 10, 1.0), (torch.float16, 10, 1.0), (torch.float16, 50, 900.0)):
        q, k, v = torch.randn(shape) * 0.1, torch.randn(shape) + offset * torch.randn(1, 1, 2, 64), torch.randn(shape)
        qkv, do = torch.stack([q, k, v + part], 2).to(dtype), torch.full(shape, size).to(dtype)
        runs = ((by_launchers, qkv, do), (by_autograd, qkv, do), (by_autograd, qkv.double(), do.double()))
        ours, theirs, truth = (run(*given, 0.125) for run, *given in runs)
        for name, exact in parts(truth).items():
            assert relative(parts(ours)[name], exact) <= 2 * relative(parts(theirs)[name], exact), name
        assert not ours["bias gradient"].view(3, -1)[1].any()  # rows of dS sum to zero


# Few rows after the last whole block


@pytest.mark.quick(5)
@pytest.mark.parametrize("N", [1, 16, 63, 64, 65, 80, 81, 197])
def test_few_rows_after_the_last_whole_block(N, each_path):
    """Up to 16 of them take a block of 16, and the sums of the bias's gradient have theirs."""
    qkv, do = random(1, N, 2, 64, torch.bfloat16)
    check_attention(qkv, do)
    few = 0 < N % 64 <= 16
    for ran in launch.record(lambda: by_launchers(qkv, do)):
        if "dkdv" in ran.kernel.__name__ or "dq" in ran.kernel.__name__:
            assert 16 * few in (ran.arguments.get("SHORT_M"), ran.arguments.get("SHORT_N"))


# One program a head


def kernels_of(*call) -> list[str]:
    return [found.kernel.__name__ for found in launch.record(lambda: kernels.attention_bwd(*call))]


def for_backward(qkv, as_one=True):
    """q, k, v, o, lse and do; not as_one: separate tensors."""
    q, k, v = qkv.unbind(2) if as_one else (x.contiguous() for x in qkv.unbind(2))
    return q, k, v, torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[0], q.shape[2], q.shape[1]), q, 0.2


@pytest.mark.quick(1)
@pytest.mark.parametrize("N", [1, 16, 17, 64, 65, 80, 81, 128, 129, 145, 192, 197, 208])
def test_a_resident_head_of_every_division_into_parts(N):
    with path("whole"):
        for dtype, D in ((torch.bfloat16, 64), (torch.float16, (56, 32)[N % 2])):
            qkv, do = random(2, N, 2, D, dtype)
            check_attention(qkv, do)
            assert kernels_of(*for_backward(qkv)) == ["_attention_bwd_resident_kernel"]


def test_what_one_program_cannot_hold_or_read_takes_two_kernels():
    """More tokens, a head of two chunks, fp32, separate tensors, rows that no descriptor can describe."""
    half = torch.bfloat16
    narrow = torch.randn(2, 20, 3, 2, 67).to(half)[..., 3:]  # rows of 67 elements are no multiple of 16 bytes
    shifted = torch.randn(2 * 20 * 3 * 2 * 64 + 1).to(half)[1:].view(2, 20, 3, 2, 64)
    other = [random(1, N, 2, D, dtype)[0] for N, D, dtype in ((209, 64, half), (20, 80, half), (20, 64, torch.float32))]
    between = torch.randn(2, 20, 2, 3, 64).to(half).transpose(2, 3)  # q, k and v side by side within a head
    two = ["_attention_bwd_dq_kernel", "_attention_bwd_dkdv_kernel"]
    with path("whole"):
        for qkv in (*other, narrow, shifted, between):
            assert kernels_of(*for_backward(qkv)) == two
        good = random(2, 20, 2, 64, half)[0]
        assert kernels_of(*for_backward(good, as_one=False)) == two
        q, k, v, *rest = for_backward(good)
        assert kernels_of(k, q, v, *rest) == two  # slices of one tensor, in another order
        assert kernels_of(*for_backward(good), False, AttentionOptions(), True, False) == two  # gradients apart
        assert kernels_of(*for_backward(good)) == ["_attention_bwd_resident_kernel"]


@pytest.mark.parametrize("far", [300.0, -300.0])
def test_far_logits_give_no_nan_in_a_resident_head(far):
    """exp(-lse) is infinite, or zero; keys past N, whose rows are zeros, must not bring in a NaN."""
    qkv, do = random(1, 70, 2, 64, torch.bfloat16)
    qkv[:, :, :2] *= 0.05
    qkv[:, :, 0, :, 0], qkv[:, :, 1, :, 0] = far, 1.0
    with path("whole"):
        ours = by_launchers(qkv, do, 1.0)
    lse = ours["lse"]
    assert (lse.sign() == math.copysign(1, far)).all() and lse.abs().min() > 200
    truth = by_autograd(qkv.double(), do.double(), 1.0)
    compare(ours, by_autograd(qkv, do, 1.0), {n: truth[n] for n in ("o", "dqkv", "bias gradient")}, torch.bfloat16)


# Where things lie in memory


@pytest.mark.quick(1)
def test_any_strides(each_path):
    for qkv, do in any_strides({}):
        check_attention(qkv, do)


@pytest.mark.quick(1)
def test_a_neighbours_nan_stays_there(each_path, N=69):
    """Tiles of 64 rows reach past an image of N: what lies there is the next one's."""
    qkv, do = random(3, N, 2, 64, torch.bfloat16)
    clean = by_launchers(qkv, do)
    qkv[1], do[1] = float("nan"), float("nan")
    broken = by_launchers(qkv, do)
    for name in ("o", "dqkv"):
        assert torch.equal(broken[name][[0, 2]], clean[name][[0, 2]]) and broken[name][1].isnan().all()


def test_heads_whose_rows_lie_far_apart_take_64_bit_offsets():
    """Within a head offsets are 32 bits wide unless N rows reach 2^31 elements."""
    N, apart = 9, 2**28
    storage = torch.empty(1, dtype=torch.bfloat16, device="meta")
    near, far = (storage.as_strided((1, N, 3, 1, 64), (0, step, 64, 64, 1)).unbind(2) for step in (192, apart))
    like = torch.empty(1, N, 1, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 1, N, device="meta")
    for inputs, wanted in ((near, False), (far, True)):
        launches = launch.record(lambda: kernels.attention_bwd(*inputs, like, lse, like, 0.125))  # noqa: B023
        assert launches and all(found.arguments["HEAD"].needs_int64 is wanted for found in launches)


# What acts on the logits


def acting(N, H, D, prefix=0, lead=None, full=True, bias=None, tables=torch.float32, dtype=torch.float32):
    """cos, sin and bias. lead: the first axes of the tables; bias: of the bias."""
    found = {}
    if lead is not None:  # angles of each column its own: no rotation, which the operation does not ask for
        angle = torch.randn(*lead, N - prefix, D if full else D // 2) * 2
        found |= dict(cos=angle.cos().to(tables), sin=angle.sin().to(tables))
    return found | ({} if bias is None else dict(bias=torch.randn(*bias, H, N, N).to(dtype)))


def by_kernels(qkv, do, tensors, **options):
    """o and the gradients of qkv and of what acts on the logits, by the operation."""
    qkv, given = qkv.detach().requires_grad_(), {key: t.detach().requires_grad_() for key, t in tensors.items()}
    rope = (given["cos"], given["sin"]) if "cos" in given else None
    with ops.use_kernels("on"):
        o = ops.attention(qkv, scale=0.2, rope=rope, bias=given.get("bias"), **options)
    dqkv, *more = torch.autograd.grad(o, (qkv, *given.values()), do)
    return {"o": o.detach(), "dqkv": dqkv} | dict(zip(given, more))


def check_logits(qkv, do, tensors, **options):
    double = {key: t.double() for key, t in tensors.items()}
    truth = by_autograd(qkv.double(), do.double(), 0.2, **double, **options)
    theirs, ours = by_autograd(qkv, do, 0.2, **tensors, **options), by_kernels(qkv, do, tensors, **options)
    compare(ours, theirs, {name: t for name, t in truth.items() if name != "bias gradient"}, qkv.dtype)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "dtype, layout, N, D, prefix, lead, full",
    [
        (torch.float32, "half", 50, 64, 1, (), True),
        (torch.bfloat16, "interleaved", 70, 64, 5, (2,), True),
        (torch.float16, "half", 37, 32, 0, (2, 1), False),
        (torch.bfloat16, "interleaved", 37, 16, 3, (2, 2), False),
        (torch.float32, "half", 21, 72, 1, (1, 2), True),  # halves of 36 columns in chunks of 64
        (torch.float16, "interleaved", 21, 24, 21, (), True),  # no token turns
        (torch.float32, "half", 1, 128, 0, (), False),
        *((torch.float32, ("half", "interleaved")[D // 8 % 2], 18, D, 1, (), True) for D in (40, 56, 80, 88, 96, 120)),
    ],
)
def test_rotary_tables_of_every_form(dtype, layout, N, D, prefix, lead, full):
    options = dict(rope_layout=layout, num_prefix=prefix)
    check_logits(*random(2, N, 2, D, dtype), acting(N, 2, D, prefix, lead, full), **options)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "dtype, bias, N, lengths",
    [
        (torch.bfloat16, (1,), 37, None),
        (torch.float16, (2,), 70, (70, 33)),
        (torch.float32, (2,), 1, None),
        (torch.float32, None, 64, (0, 63)),
        (torch.bfloat16, (), 50, (100, -3)),
    ],
)
def test_biases_and_lengths_of_every_form(dtype, bias, N, lengths, tiled):
    """Also all at once, with rotary tables in the dtype of the inputs."""
    options = {} if lengths is None else dict(key_lengths=torch.tensor(lengths))
    tensors = acting(N, 2, 16, 0, (2,) if bias == (2,) else None, True, bias, dtype, dtype)
    check_logits(*random(2, N, 2, 16, dtype), tensors, **options)


def test_hidden_keys_may_hold_anything(tiled):
    """Padding is often uninitialised: NaN there must not spread, nor come back as a gradient."""
    qkv, do = random(2, 70, 2, 32)
    qkv[1, 20:, 1:] = float("nan")
    lengths = dict(key_lengths=torch.tensor([70, 20]))
    ours = by_kernels(qkv, do, {}, **lengths)
    truth = by_autograd(qkv.nan_to_num().double(), do.double(), 0.2, **lengths)
    for name in ("o", "dqkv"):
        torch.testing.assert_close(ours[name].double(), truth[name], **CLOSE)


@pytest.mark.slow
def test_minus_infinity_in_a_bias_hides_keys(tiled):
    """Whole blocks of keys, whole rows: those queries give zeros, and take none."""
    qkv, do = random(1, 130, 2, 16)
    bias = torch.randn(2, 130, 130)
    bias[0, :, :64] = float("-inf")  # the first blocks of keys
    bias[1, 5] = float("-inf")  # one query
    bias[:, :, 129] = float("-inf")
    ours = by_kernels(qkv, do, dict(bias=bias))
    assert not ours["o"][0, 5, 1].any() and not ours["dqkv"][0, 129, 1:].any()
    truth = by_autograd(qkv.double(), do.double(), 0.2, bias=bias.double())
    for name in ours:
        torch.testing.assert_close(ours[name].double(), truth[name].nan_to_num(), **CLOSE)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_mask_of_least_numbers(dtype, tiled):
    """As libraries write masks: padding's queries see nothing, so they see all keys alike; and come to no account."""
    qkv, do = random(1, 70, 2, 16, dtype)
    bias = torch.zeros(1, 2, 70, 70)
    bias[..., 60:] = bias[..., 60:, :] = torch.finfo(torch.float32).min
    do[:, 60:] = 0
    check_logits(qkv, do, dict(bias=bias))
    alike = qkv[:, :, 2].double().mean(1, keepdim=True).expand(1, 10, 2, 16)
    out = by_kernels(qkv, do, dict(bias=bias))["o"][:, 60:]
    torch.testing.assert_close(out.double(), alike, atol=ATOL[dtype], rtol=0)


@pytest.mark.slow
def test_strides_of_tables_and_bias(tiled):
    """cos and sin of unlike strides, a bias with its keys outside, a mask that is read where it lies."""
    (qkv, do), given = random(2, 21, 2, 16), acting(21, 2, 16, 1, (2,), True, ())
    check_logits(qkv, do, given | dict(cos=given["cos"].mT.contiguous().mT, bias=given["bias"].mT), num_prefix=1)
    wide = torch.randn(2, 20, 40)
    wide[..., 8:24] = given["sin"]
    check_logits(qkv, do, given | dict(sin=wide[..., 8:24]), num_prefix=1)
    mask = torch.zeros(2, 1, 1, 21).masked_fill(torch.rand(2, 1, 1, 21) < 0.3, float("-inf"))
    mask[..., 0] = 0
    with ops.use_kernels("on"):
        ours = ops.attention(qkv, bias=mask.expand(2, 2, 21, 21))
    torch.testing.assert_close(ours, ref.attention(*qkv.unbind(2), bias=mask), **CLOSE)


def test_providers_that_know_no_logits_stand_back():
    """A tile that names a provider without rotary positions, or of one size alone, is passed over, not run."""
    qkv, do = random(1, 70, 2, 32, torch.float16)
    with path("whole"):
        launches = launch.record(lambda: by_kernels(qkv, do, acting(70, 2, 32, 1, ()), num_prefix=1))
    names = [found.kernel.__name__ for found in launches]
    assert names[0] == "_attention_fwd_short_kernel" and "_attention_bwd_resident_kernel" not in names
    q, packed = (
        torch.empty(1, 10, 2, 64, dtype=torch.bfloat16),
        AttentionOptions(offsets=torch.tensor([0, 10]), longest=10),
    )
    for op in ("attention_fwd", "attention_bwd"):
        for provider in ("single_pass", "resident"):
            with tiles.using(op, tiles.config(provider=provider, BLOCK_M=64)):
                assert kernels._lookup(op, q, packed).provider == "tiled"


# Packed samples


@pytest.mark.slow
def test_a_sample_does_not_depend_on_the_others():
    """Bit for bit: the embedding of an image may not change with its batch."""
    q, k, v = (torch.randn(sum(PACKED_SIZES), 2, 32) for _ in range(3))
    ends = torch.tensor([0, *PACKED_SIZES]).cumsum(0)
    with ops.use_kernels("on"):
        together = ops.attention(q, k, v, offsets=ends, longest=130)
        for first, end in zip(ends.tolist(), ends[1:].tolist()):
            one = ops.attention(*(x[first:end] for x in (q, k, v)), offsets=torch.tensor([0, end - first]))
            assert torch.equal(together[first:end], one)


@pytest.mark.parametrize("sizes", [PACKED_SIZES, [], [0], [3] * 300, [2000, 1, 2000]], ids=lambda s: str(s)[:20])
def test_the_table_has_each_tile_once_long_samples_first(sizes, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(77))
    offsets, block = torch.tensor([0, *sizes]).cumsum(0).int(), 64
    table = common.tile_table(offsets, sum(sizes), block).tolist()
    blocks = [-(-size // block) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda s: (-blocks[s], s))
    wanted = [[int(offsets[s]), sizes[s], i] for s in order for i in range(blocks[s])]
    assert table[: len(wanted)] == wanted
    assert all(row == [0, 0, 0] for row in table[len(wanted) :])
    assert len(table) == sum(sizes) // block + len(sizes)
