"""Triton's interpreter, made right for bfloat16 and twice as fast.

With TRITON_INTERPRET=1, Triton runs kernels in NumPy.
Without `mend_bfloat16`, NumPy takes bfloat16 numbers for uint16 bit patterns: casts truncate and sums add the patterns,
without an error. With it they are ml_dtypes.bfloat16, with which NumPy computes as a GPU does: casts round to nearest
even (those from fp64 and integers by way of fp32), arithmetic is fp32 rounded once, `tl.fma` is exact and rounded once,
and `tl.dot` multiplies and adds in its accumulator's dtype. Three things still differ from a GPU: `tl.sum` of bfloat16
rounds after every addition, in an order of its own; `tl.argmax` and `tl.argmin` of NaN; and atomic additions of
bfloat16, which raise. (vitfast sums in fp32 and uses none of these.)

Triton's developers write: "we just don't support it yet" (triton-lang/triton pull request 11585, September 2026).
"""

import dataclasses
from types import SimpleNamespace

from ..kernels import launch

quickened = False


def mend_bfloat16() -> None:
    """Makes kernels interpreted from now on compute bfloat16 as a GPU does.

    Raises ImportError where ml_dtypes is missing.
    """
    if launch.bfloat16_mended:
        return
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    bfloat16, bits = np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)
    memory, np_dtype = interpreter._interpreter, interpreter._get_np_dtype
    load, store, fma = memory.load, memory.store, InterpreterBuilder.create_fma

    def value_dtype(ty):
        return bfloat16 if ty.scalar == tl.bfloat16 else np_dtype(ty)

    def cast(self, src, ty):
        with np.errstate(over="ignore", invalid="ignore"):  # a GPU does not warn of infinities either
            return TensorHandle(src.data.astype(value_dtype(ty)), ty.scalar)

    def stored(data):  # the C++ that reads and writes memory knows only NumPy's own dtypes
        return data.view(bits) if data.dtype == bfloat16 else data

    def load_values(ptrs, mask, other, dtype):
        return load(ptrs, mask, stored(other), stored(np.empty(0, dtype)).dtype).view(dtype)

    def fma_rounded_once(self, x, y, z):  # Triton 3.6 rounds the product too, and NumPy casts fp64 by way of fp32
        if z.data.dtype != bfloat16:
            return fma(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        single = exact.astype(np.float32)
        tie = (single.view(np.uint32) & 0xFFFF) == 0x8000  # between two bfloat16 numbers; what fp32 rounded off decides
        beyond = np.where(np.abs(exact) > np.abs(single), np.float32(np.inf), np.float32(0))
        single = np.where(tie & (exact != single), np.nextafter(single, np.copysign(beyond, single)), single)
        return TensorHandle(single.astype(bfloat16), z.dtype.scalar)

    interpreter._get_np_dtype = value_dtype
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fma = fma_rounded_once
    InterpreterBuilder.get_bf16 = lambda self, value: TensorHandle(np.array([value], bfloat16), tl.bfloat16)
    memory.load = load_values
    memory.store = lambda ptrs, value, mask: store(ptrs, stored(value), mask)
    launch.bfloat16_mended = True


def quicken() -> None:
    """Doubles the speed: patches triton.language once, leaves integer overflow unchecked.

    The interpreter replaces triton.language's functions at every launch and every call of a helper, and puts them back.
    A process in which kernels are compiled too must not call this.
    """
    global quickened
    if quickened:
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    quickened = True
