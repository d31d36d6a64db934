"""The sanitizer on small kernels: every kind of finding, what looks like one and is none; all put back at the end."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels import launch
from vitfast.verify.sanitizer import Sanitizer

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter alone")


def watched(run):
    """What is found while `run()` runs."""
    with Sanitizer() as watch:
        run()
    return watch.findings


@triton.jit
def _copy_kernel(
    x_ptr, y_ptr, stride_x, stride_y, M, D, FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_d = FIRST + tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < M) & (offs_d < D)
    x = tl.load(x_ptr + rows * stride_x + offs_d, mask=mask, other=0.0)
    tl.store(y_ptr + rows * stride_y + offs_d, x, mask=mask)


def copy(x, y, *, m=None, d=None, first=0, stride_y=None, block_m=4):
    m, d = m or x.shape[0], d or x.shape[1]
    _copy_kernel[(triton.cdiv(m, block_m),)](
        x, y, x.stride(0), y.stride(0) if stride_y is None else stride_y, m, d, FIRST=first, BLOCK_M=block_m, BLOCK_D=8
    )


def test_a_correct_kernel_gives_nothing_and_does_its_work():
    x, wide = torch.randn(6, 7), torch.randn(6, 20)
    for source in (x, wide[:, 5:12], x.t().contiguous().t()[:, :7].contiguous(), torch.randn(7).expand(6, 7)):
        y = torch.full((6, 7), float("nan"))
        assert not watched(lambda: copy(source, y))  # noqa: B023
        assert torch.equal(y, source)
    copy(x, x)  # unwatched
    assert not watched(lambda: copy(x, x))  # in place: what each thread read itself
    assert not watched(lambda: copy(x[:0], x, m=0, d=7))


@pytest.mark.parametrize(
    "m, d, first, element, what",
    [
        (7, 7, 0, "x_ptr[6, 0] of (6, 7)", "reads"),
        (6, 8, 0, "x_ptr[0, 7] of (6, 7)", "reads"),  # inside of the storage, and not of the view
        (6, 7, -1, "x_ptr[-1, 19] of (6, 7)", "reads"),  # one before the first, counted in rows of 20
    ],
)
def test_bounds_are_those_of_the_view(m, d, first, element, what):
    x, y = torch.randn(9, 20)[1:7, 5:12], torch.zeros(12, 20)
    found = watched(lambda: copy(x, y, m=m, d=d, first=first))
    assert found[0].kind == "out of bounds" and found[0].tensor == "x_ptr" and found[0].kernel == "_copy_kernel"
    assert element in found[0].detail and what in found[0].detail
    assert found[0].source.startswith("test_sanitizer.py:") and found[0].program == (1 if m == 7 else 0, 0, 0)


def test_a_write_out_of_bounds_is_found_and_not_done():
    x, storage = torch.ones(6, 7), torch.zeros(9, 7)
    found = watched(lambda: copy(x, storage[:4]))
    assert [f.kind for f in found] == ["out of bounds"] and "writes y_ptr[4, 0] of (4, 7)" in found[0].detail
    assert storage[:4].all() and not storage[4:].any()


def test_two_programs_write_one_element():
    found = watched(lambda: copy(torch.randn(6, 7), torch.zeros(6, 7), stride_y=0))
    assert {"write-write race", "two values"} == {f.kind for f in found}
    race = next(f for f in found if f.kind == "write-write race")
    assert (
        race.program == (1, 0, 0) and "what program (0, 0, 0) wrote, y_ptr[0, 0] of (6, 7), 14 elements" in race.detail
    )


def test_lanes_that_write_the_same_value_agree():
    assert not watched(lambda: copy(torch.ones(3, 7), torch.zeros(1, 7), stride_y=0))


@triton.jit
def _shift_kernel(x_ptr, y_ptr, N, BY: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    tl.store(y_ptr + offs + BY, x, mask=offs + BY < N)


def test_a_program_reads_what_another_writes():
    """In place and forwards: the interpreter runs the writer first; then backwards: it runs the reader first."""
    x = torch.randn(64)
    found = {f.kind: f for f in watched(lambda: _shift_kernel[(4,)](x, x, 64, BY=4, BLOCK=16))}
    assert found.keys() == {"missing barrier", "read-write race"}
    assert "reads what program (0, 0, 0) wrote, x_ptr[16] of (64,), 4 elements" in found["read-write race"].detail
    (found,) = watched(lambda: _shift_kernel[(2,)](x[16:], x, 32, BY=0, BLOCK=16))
    assert found.kind == "read-write race" and found.program == (1, 0, 0)
    assert "writes what program (0, 0, 0) read, y_ptr[16] of (64,), 16 elements" in found.detail


def test_what_several_programs_read_none_may_write():
    @triton.jit
    def kernel(x_ptr, y_ptr):
        offs = tl.arange(0, 16)
        x = tl.load(x_ptr + offs)
        if tl.program_id(0) == 2:
            tl.store(y_ptr + offs, x)

    x = torch.randn(16)
    found = watched(lambda: kernel[(3,)](x, x))
    assert [f.kind for f in found] == ["read-write race"] and "writes what several programs read," in found[0].detail


@triton.jit
def _turn_kernel(x_ptr, work_ptr, y_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(work_ptr + offs, tl.load(x_ptr + offs))
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + offs, tl.load(work_ptr + N - 1 - offs))


def test_a_barrier_lies_between_a_write_and_its_reading_by_other_threads():
    x, y = torch.randn(32), torch.empty(32)
    assert not watched(lambda: _turn_kernel[(1,)](x, torch.empty(32), y, N=32, BARRIER=True))
    assert torch.equal(y, x.flip(0))
    found = watched(lambda: _turn_kernel[(1,)](x, torch.empty(32), y, N=32, BARRIER=False))
    assert (
        [f.kind for f in found] == ["missing barrier"]
        and found[0].tensor == "work_ptr"
        and "reads again" in found[0].detail
    )


@triton.jit
def _reverse_kernel(x_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + N - 1 - offs, x)


@triton.jit
def _twice_kernel(y_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y_ptr + offs, offs.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + N - 1 - offs, offs.to(tl.float32))


@pytest.mark.parametrize(
    "kernel, text", [(_reverse_kernel, "what other threads read"), (_twice_kernel, "writes again")]
)
def test_a_barrier_lies_before_a_write_to_what_other_threads_read_or_wrote(kernel, text):
    assert not watched(lambda: kernel[(1,)](torch.randn(32), N=32, BARRIER=True))
    found = watched(lambda: kernel[(1,)](torch.randn(32), N=32, BARRIER=False))
    assert [f.kind for f in found] == ["missing barrier"] and text in found[0].detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_uninitialised_memory(dtype):
    x, y = torch.ones(6, 7, dtype=dtype), torch.zeros(6, 7, dtype=dtype)

    def through_a_workspace(rows):
        work = torch.empty(6, 7, dtype=dtype)
        copy(x[:rows], work)
        copy(work, y)

    assert not watched(lambda: through_a_workspace(6))
    found = watched(lambda: through_a_workspace(5))
    assert [f.kind for f in found] == ["uninitialised read", "left unwritten"]
    assert "reads what nothing wrote, x_ptr[5, 0] of (6, 7), 7 elements" in found[0].detail and found[0].program == (
        1,
        0,
        0,
    )
    assert (
        found[1].tensor == "y_ptr" and found[1].detail.startswith("y_ptr[5, 0] of (6, 7)") and found[1].program is None
    )


def test_what_torch_writes_is_written():
    def run():
        work = torch.empty_like(torch.empty(6, 7))
        work.copy_(torch.ones(6, 7))
        copy(work, torch.ones(6, 7).new_empty(6, 7))

    assert not watched(run)


@triton.jit
def _described_kernel(x_desc, y_desc):
    y_desc.store([0, 0], x_desc.load([0, 0]))


def test_tensor_descriptors():
    """Beyond its shape a descriptor reads zeros and writes nothing; its shape must be the tensor's."""

    def described(x, rows):
        return TensorDescriptor(x, [rows, x.shape[1]], list(x.stride()), [8, 16])

    x, y = torch.randn(8, 32)[:6, :16], torch.full((6, 16), 7.0)
    assert not watched(lambda: _described_kernel[(1,)](described(x, 6), described(y, 6)))
    assert torch.equal(x, y)
    found = watched(lambda: _described_kernel[(1,)](described(x, 7), described(y, 6)))
    assert [f.kind for f in found] == ["out of bounds"] and "reads x_desc[6, 0] of (6, 16)" in found[0].detail
    found = watched(lambda: _described_kernel[(1,)](described(x, 6), described(y, 8)))
    assert [f.kind for f in found] == ["out of bounds"] and "writes y_desc[6, 0] of (6, 16)" in found[0].detail


@triton.jit
def _tuple_kernel(pair, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(pair[1] + offs, tl.load(pair[0] + offs))


def test_tensors_in_tuples():
    assert not watched(lambda: _tuple_kernel[(1,)]((torch.randn(16), torch.empty(16)), N=16))
    found = watched(lambda: _tuple_kernel[(1,)]((torch.randn(15), torch.empty(16)), N=16))
    assert (
        found[0].kind == "out of bounds" and found[0].tensor == "pair[0]" and "pair[0][15] of (15,)" in found[0].detail
    )


@triton.jit
def _hint_kernel(y_ptr, stride, STEP: tl.constexpr):
    offs = tl.multiple_of(tl.arange(0, 4) * stride, STEP)
    tl.store(y_ptr + offs, offs.to(tl.float32))


def test_false_hints_are_found():
    assert not watched(lambda: _hint_kernel[(1,)](torch.zeros(40), 8, STEP=8))
    found = watched(lambda: _hint_kernel[(1,)](torch.zeros(40), 12, STEP=8))
    assert [f.kind for f in found] == ["false hint"] and "12 is no multiple of 8" in found[0].detail


@triton.jit
def _atomic_kernel(x_ptr, y_ptr):
    tl.atomic_add(y_ptr, tl.load(x_ptr + tl.program_id(0)))


def test_atomic_operations_are_named_and_done():
    y = torch.zeros(1)
    found = watched(lambda: _atomic_kernel[(5,)](torch.ones(5), y))
    assert (
        [f.kind for f in found] == ["atomic operation"]
        and found[0].count == 5
        and "5 times" in str(found[0])
        and y == 5
    )


@triton.jit
def _run_hint_kernel(y_ptr, start, BLOCK: tl.constexpr):
    offs = tl.max_contiguous(tl.multiple_of(start + tl.arange(0, BLOCK), BLOCK), BLOCK)
    both = tl.multiple_of(offs[:, None] * 8 + tl.arange(0, 8)[None, :], (1, 8))
    tl.store(y_ptr + both, both.to(tl.float32))


def test_of_a_contiguous_run_the_first_must_divide():
    """The usual hint for a block of offsets, and one for each axis."""
    assert not watched(lambda: _run_hint_kernel[(1,)](torch.zeros(256), 16, BLOCK=16))
    found = watched(lambda: _run_hint_kernel[(1,)](torch.zeros(256), 12, BLOCK=16))
    assert [f.kind for f in found] == ["false hint"] and "12 is no multiple of 16" in found[0].detail


@triton.jit
def _partial_sum_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    if OTHER:
        x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    else:
        x = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(y_ptr, tl.sum(x, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_mask_leaves_out_is_undefined(dtype):
    """The interpreter has zeros there, a GPU whatever the register held: whoever adds it up gets NaN."""
    x, y = torch.ones(12, dtype=dtype), torch.zeros(1, dtype=dtype)
    assert not watched(lambda: _partial_sum_kernel[(1,)](x, y, 12, BLOCK=16, OTHER=True)) and y == 12
    assert not watched(lambda: _partial_sum_kernel[(1,)](x, y, 12, BLOCK=16, OTHER=False)) and y.isnan()


@triton.jit
def _bytes_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y_ptr.to(tl.pointer_type(tl.uint8)) + offs, tl.load(x_ptr.to(tl.pointer_type(tl.uint8)) + offs))


def test_pointers_cast_to_bytes_are_checked_for_bounds():
    x, y = torch.randn(8), torch.empty(8)
    assert not watched(lambda: _bytes_kernel[(1,)](x, y, N=32)) and torch.equal(x, y)
    assert {f.kind for f in watched(lambda: _bytes_kernel[(1,)](x[:4], torch.zeros(8), N=32))} == {"out of bounds"}


def test_what_else_comes_as_a_tensor():
    """Reinterpreted arguments, and what torch.empty gives that is no new memory."""
    bits, y = torch.randint(0, 100, (16,), dtype=torch.int16), torch.empty(16, dtype=torch.float16)
    assert not watched(lambda: _tuple_kernel[(1,)]((triton.reinterpret(bits, tl.float16), y), N=16))
    assert torch.equal(y.view(torch.int16), bits)
    storage = torch.ones(8)

    def others():
        torch.empty(4, out=storage[:4])
        torch.func.vmap(lambda x: torch.empty_like(x).copy_(x))(torch.ones(3, 4))
        torch.func.grad(lambda x: (torch.empty_like(x).copy_(x)).sum())(torch.ones(3))

    assert not watched(others) and storage[4:].eq(1).all()


META = """
import torch
from vitfast.verify.sanitizer import Sanitizer

def empty_is_meta():
    with torch.device("meta"):
        return torch.empty(2).is_meta and torch.empty_like(torch.empty(2)).is_meta

with Sanitizer():
    print(empty_is_meta())
print(empty_is_meta())
"""


def test_a_device_context_works_inside_and_afterwards():
    """torch looks up what it acts on once, whatever stands in the functions' places then."""
    done = subprocess.run(
        [sys.executable, "-c", META], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_hook_that_is_put_back_later_does_nothing():
    with Sanitizer():
        hooked = torch.empty
    assert hooked is not torch.empty and not hooked(1000).isnan().all()


def test_one_storage_in_two_dtypes():
    """fp32 numbers and their halves as fp16: a race where they overlap."""
    storage = torch.zeros(32)
    x, y = storage[:16], storage.view(torch.float16)
    assert not watched(lambda: _shift_kernel[(1,)](x, y[32:48], 16, BY=0, BLOCK=16))
    found = watched(lambda: _shift_kernel[(2,)](x, y[16:32], 16, BY=0, BLOCK=8))
    assert {f.kind for f in found} == {"read-write race", "missing barrier"}


def test_an_error_in_a_kernel_comes_through_and_all_is_put_back():
    empty, originals = torch.empty, [getattr(*pair[:2]) for pair in Sanitizer()._hooks()]
    with pytest.raises(Exception, match="must be 16-byte aligned"), Sanitizer() as watch:
        x = torch.randn(9, 16)
        with pytest.raises(RuntimeError, match="do not nest"), Sanitizer():
            pass
        _described_kernel[(1,)](*[TensorDescriptor(x, [8, 15], [15, 1], [8, 16])] * 2)
    assert torch.empty is empty and [getattr(*pair[:2]) for pair in Sanitizer()._hooks()] == originals
    assert "new_empty" not in vars(torch.Tensor)
    assert str(watch).startswith("nothing found in ") and watch.counts["launches"] <= 1
