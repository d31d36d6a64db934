"""Triton's interpreter a third quicker: what it derives from a type and a shape is derived once.

Its operations are quick in NumPy and slow in what stands around them: each makes several block types anew, with their
names, their numbers of elements and a constexpr for each side.
"""

import functools

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def remember_types() -> None:
    """For the rest of the process; to be called before bfloat16 is mended, which asks for NumPy's dtypes too."""
    core.block_type.__init__ = _blocks(core.block_type.__init__)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)
    interpreter._get_np_dtype = _np_dtypes(interpreter._get_np_dtype)


def _sides(shape) -> tuple:
    """The sides of a list or of Triton's own tuple as plain numbers."""
    values = shape.values if type(shape) is core.tuple else shape
    return tuple([side.value if type(side) is core.constexpr else side for side in values])


def _blocks(derive):
    known: dict[tuple, dict] = {}

    @functools.wraps(derive)
    def block_type(self, element_ty, shape):
        key = element_ty.name, _sides(shape)
        if key not in known:
            derive(self, element_ty, shape)  # which raises what a wrong shape deserves
            known[key] = vars(self).copy()
        vars(self).update(known[key], element_ty=element_ty)

    return block_type


def _tensors(derive):
    known: dict[tuple, tuple] = {}

    @functools.wraps(derive)
    def tensor(self, handle, type):
        key = _sides(type.shape) if type.is_block() else ()
        if key not in known:
            derive(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return tensor


def _broadcast(broadcast):
    @functools.wraps(broadcast)
    def broadcast_impl_value(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and _sides(lhs.type.shape) == _sides(rhs.type.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_impl_value


def _np_dtypes(derive):
    known: dict = {}

    @functools.wraps(derive)
    def np_dtype(ty):
        if ty.name not in known:
            known[ty.name] = derive(ty)
        return known[ty.name]

    return np_dtype
