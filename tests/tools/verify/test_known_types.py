"""tests/helpers/known_types.py gives Triton's interpreter the types that Triton derives itself."""

import math

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from vitfast.kernels import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter alone")


@pytest.mark.parametrize("element", [tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.float16)], ids=str)
def test_what_is_remembered_of_a_type_is_what_triton_derives(element):
    """The first time, the second time, and in every form that a shape comes in."""
    block_type, tensor = core.block_type, core.tensor
    for sides in ([16], [4, 8], [core.constexpr(32), 1], core.tuple([8, core.constexpr(2)])):
        made, derived = block_type.__new__(block_type), block_type.__new__(block_type)
        block_type.__init__.__wrapped__(derived, element, sides)
        for _ in range(2):
            block_type.__init__(made, element, sides)
            assert {k: str(v) for k, v in vars(made).items()} == {k: str(v) for k, v in vars(derived).items()}
            assert made == derived and made.element_ty is element and made.scalar is element
        for of in (made, element):
            ours, theirs = tensor("handle", of), tensor.__new__(tensor)
            tensor.__init__.__wrapped__(theirs, "handle", of)
            assert {k: str(v) for k, v in vars(ours).items()} == {k: str(v) for k, v in vars(theirs).items()}
    for wrong in ([], [3], [2**21]):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match="0d block_type|power of 2|exceeds"):
                block_type(element, wrong)
    pair = [core.pointer_type(core.float16, space) for space in ("global", "shared")]  # of one name
    assert [block_type(each, [16]).element_ty.address_space for each in pair] == ["global", "shared"]


def test_blocks_of_other_shapes_are_still_broadcast_or_refused():
    semantic, numbers = interpreter.interpreter_semantic, np.arange(8, dtype=np.int32)

    def tensor(*shape):
        handle = interpreter.TensorHandle(numbers[: math.prod(shape)].reshape(shape), tl.int32)
        return core.tensor(handle, core.block_type(tl.int32, list(shape)))

    rows, scalar = tensor(4, 1), core.tensor(interpreter.TensorHandle(numbers[:1], tl.int32), tl.int32)
    for other, shape in ((tensor(1, 2), (4, 2)), (tensor(4, 1), (4, 1)), (scalar, (4, 1))):
        for pair in ((rows, other), (other, rows)):
            found = semantic.broadcast_impl_value(*pair)
            assert [tuple(x.handle.data.shape) for x in found] == [shape] * 2
            assert [tuple(x.type.shape) for x in found] == [shape] * 2
    for _ in range(2):
        with pytest.raises(ValueError, match="incompatible dimensions"):
            semantic.broadcast_impl_value(tensor(4, 2), tensor(2, 2))
