"""Reads nodes of a captured graph: their calls, values and changes; PyTorch's functions by kind."""

import inspect
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .. import ops

# Operations that read the shape, dtype or device of their first argument, and none of its numbers.
_VALUE_FREE = "size dim numel stride getattr new_empty new_zeros new_ones new_full empty_like zeros_like ones_like"
VALUE_FREE = frozenset(_VALUE_FREE.split())
# Functions that move numbers, and those that change their dtype alone.
_REARRANGEMENTS = """
permute transpose t mT T swapaxes swapdims movedim reshape view _unsafe_view view_as reshape_as flatten unflatten
squeeze unsqueeze expand expand_as repeat unfold contiguous clone
"""
REARRANGEMENTS = frozenset(_REARRANGEMENTS.split())
CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
# Functions that are rearrangements, or analytic in their tensors: equal for random numbers, they are equal for all. A
# clamp, a comparison or a nan_to_num acts where random numbers may not come.
_ANALYTIC = """
linear addmm matmul bmm mm einsum baddbmm scaled_dot_product_attention multi_head_attention_forward layer_norm
rms_norm gelu silu sigmoid tanh erf exp pow sqrt rsqrt square reciprocal softmax _softmax mean var sum amax dropout
where masked_fill masked_fill_ conv2d add iadd add_ sub isub sub_ subtract rsub mul imul mul_ multiply multiply_ div
div_ truediv itruediv true_divide divide neg negative getitem cat stack split chunk unbind tensor_split select narrow
index_select vitfast.backend.arguments.attend
"""
ANALYTIC = frozenset(_ANALYTIC.split()) | REARRANGEMENTS | CASTS
# Functions whose result has a layout in memory of its own, or none.
_LAYS_OUT = frozenset("linear addmm matmul bmm mm einsum layer_norm softmax size dim numel new_zeros new_ones".split())
# Functions that take any layout, and hand it on as PyTorch's fake tensors say. A convolution does not; nor does a norm
# of groups, and what changes a tensor in place reaches other ones if a reshape is a view in one layout alone.
_ANY_LAYOUT = {name for name in ANALYTIC if not name.endswith("_")}
_ANY_LAYOUT -= set("view _unsafe_view view_as conv2d iadd isub imul itruediv".split())
_DRAWS = """
bernoulli bernoulli_ rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform_ exponential_
multinomial geometric_ cauchy_ log_normal_ native_dropout poisson binomial rrelu
"""
DRAWS = frozenset(_DRAWS.split())
_INPLACE = "iadd isub imul itruediv ifloordiv imatmul ipow imod iand ior ixor ilshift irshift setitem"
INPLACE = frozenset(_INPLACE.split())
# Calls without a value that switch no mode: checks, statistics, the choice among PyTorch's own attention kernels.
_CHECKS = ("_assert", "_check", "sym_constrain", "_log_api", "_sdpa_kernel", "_backend_from_string")
ADDS = frozenset({"add", "add_", "iadd"})
MULTIPLIES = frozenset({"mul", "mul_", "imul", "multiply", "multiply_"})
DIVIDES = frozenset({"div", "div_", "truediv", "itruediv", "true_divide", "divide"})
PRODUCTS = frozenset({"matmul", "bmm", "einsum", "mm", "baddbmm"})


def name_of(node: Node) -> str:
    """The name of what a node calls, with its module where that is none of PyTorch's."""
    if node.op != "call_function":
        return node.target if node.op == "call_method" else node.op
    name, module = getattr(node.target, "__name__", str(node.target)), getattr(node.target, "__module__", None) or ""
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        module = "torch" if str(node.target).startswith("aten.") else str(node.target)
    root, _, rest = module.partition(".")
    known = root in ("", "torch", "_operator", "builtins") and not rest.startswith("_dynamo")
    return name if known else f"{module}.{name}"  # Dynamo's own functions call NumPy's and the user's


def argument(node: Node, place: int, name: str, default=None):
    """An argument of a node by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def value_of(node: Node):
    """The fake value that a node had when the graph was captured; None where it is not known."""
    return node.meta.get("example_value", node.meta.get("val"))


def values_read(node: Node) -> list[Node]:
    """The nodes whose values a node reads; of a second tensor view_as reads the shape, type_as the dtype."""
    return node.all_input_nodes[: 1 if name_of(node).endswith("_as") else None]


def tensor_of(node) -> Tensor | None:
    """The fake tensor of a node; None for what is no node or no tensor."""
    value = value_of(node) if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def size(length) -> int:
    """A length as a number, without a guard on a symbol: -1 where nothing is known of it."""
    if isinstance(length, int):
        return length
    hint = getattr(length.node, "hint", None)
    return -1 if hint is None else int(hint)


def shape_of(node) -> tuple[int, ...] | None:
    """The shape of a node's tensor, symbols replaced by the sizes of this call."""
    tensor = tensor_of(node)
    return None if tensor is None else tuple(map(size, tensor.shape))


def storage_of(node) -> int | None:
    """The identity of the memory of a node's tensor, which views share with their base."""
    tensor = tensor_of(node)
    try:
        return None if tensor is None else tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors have no storage
        return None


def is_draw(node: Node) -> bool:
    """Whether a node takes random numbers: dropout of rate 0 or out of training does not."""
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) != 0
    if name == "multi_head_attention_forward":
        return argument(node, 10, "dropout_p", 0.0) != 0 and argument(node, 13, "training", True) is not False
    if "dropout" in name and name != "native_dropout":
        training = argument(node, 2, "training", node.kwargs.get("train", True))
        return argument(node, 1, "p", 0.5) != 0 and training is not False
    return name in DRAWS or name.endswith(".bernoulli_")  # that of eager.py


def is_unchanged(node: Node) -> bool:
    """Whether a node gives back its argument: a cast to what it is already, dropout that drops nothing."""
    name, own, given = name_of(node), tensor_of(node), tensor_of(node.args[0]) if node.args else None
    if own is None or given is None or len(node.all_input_nodes) != 1:
        return False
    same = (own.dtype, own.device, shape_of(node)) == (given.dtype, given.device, shape_of(node.args[0]))
    return same and (name in CASTS | {"contiguous", "clone"} or ("dropout" in name and not is_draw(node)))


def is_layout_seen(node: Node) -> bool:
    """Whether another layout in memory may matter: to a view, random numbers, functions or the caller."""
    stack, seen = [node], set()
    while stack:
        given = stack.pop()
        for user in given.users:
            name = name_of(user)
            if user in seen or given not in values_read(user) or name in _LAYS_OUT or name.startswith("vitfast."):
                continue
            if is_draw(user) or name not in _ANY_LAYOUT:
                return True
            seen.add(user)
            stack.append(user)
    return False


def _takes_inplace(node: Node) -> bool:
    """Whether a function with an argument `inplace` got True for it."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return False
    try:
        signature = inspect.signature(node.target)
        if "inplace" not in signature.parameters:
            return False
        return bool(signature.bind(*node.args, **node.kwargs).arguments.get("inplace", False))
    except (TypeError, ValueError):
        return True


def changed_by(node: Node) -> list[Node]:
    """The nodes whose tensors a node changes in place."""
    name, found = name_of(node), []
    if node.op not in ("call_function", "call_method"):
        return []
    if _may_change_all(node, name):
        return node.all_input_nodes
    map_arg(node.kwargs.get("out"), found.append)
    ends = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")  # of operator
    if name.strip("_") in INPLACE or ends or _takes_inplace(node):
        map_arg(node.args[:1], found.append)
    return found


def _may_change_all(node: Node, name: str) -> bool:
    """Whether a node may change any input: running statistics, custom operations, unknown functions."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, overload)._schema.is_mutable for overload in node.target.overloads())
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.op == "call_function" and "." in name and not name.startswith("vitfast."):
        return True
    renorm = name in ("embedding", "embedding_bag") and argument(node, 3, "max_norm") is not None
    return renorm or "batch_norm" in name or "instance_norm" in name


def switches_mode(node: Node) -> bool:
    """Whether a node changes how those after it run: it is a call without a value that takes no tensor.

    Gradient, inference and autocast mode, streams and the transforms of torch.func are switched so.
    """
    if node.op != "call_function" or value_of(node) is not None or name_of(node).startswith(_CHECKS):
        return False
    return all(tensor_of(a) is None for a in node.all_input_nodes)


def module_of(node: Node) -> str:
    """The path of the module whose forward a node was captured in; empty where it is not known."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path).replace("_modules['", "").replace("']", "")


_IN_OPERATIONS = re.compile(rf'File "{re.escape(str(Path(ops.__file__).parent))}[^"]*", line \d+, in (\w+)')


def operation_of(node: Node) -> str | None:
    """The operation of vitfast that a node calls, or in whose call it was captured; None for other code."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "vitfast":
        return node.target._schema.name.removeprefix("vitfast::")
    return next((name for name in _IN_OPERATIONS.findall(node.stack_trace or "") if name in ops.__all__), None)
