"""Reads FX nodes: what each calls, returns and changes in place. Sorts PyTorch's functions by kind."""

import inspect
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .. import ops

# Functions that read the shape, dtype or device of their first argument, but none of its elements.
_VALUE_FREE = "size dim numel stride getattr new_empty new_zeros new_ones new_full empty_like zeros_like ones_like"
VALUE_FREE = frozenset(_VALUE_FREE.split())
# Functions that move or copy elements and change none of them. CASTS change nothing but the dtype.
_REARRANGEMENTS = """
permute transpose t mT T swapaxes swapdims movedim reshape view _unsafe_view view_as reshape_as flatten unflatten
squeeze unsqueeze expand expand_as repeat unfold contiguous clone
"""
REARRANGEMENTS = frozenset(_REARRANGEMENTS.split())
CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
# Functions that are rearrangements, or analytic in their tensors. If two compositions of these agree on random inputs,
# they agree on all inputs. A clamp, a comparison or a nan_to_num may act only on values that random inputs never reach.
_ANALYTIC = """
linear addmm matmul bmm mm einsum baddbmm scaled_dot_product_attention multi_head_attention_forward layer_norm
rms_norm gelu silu sigmoid tanh erf exp pow sqrt rsqrt square reciprocal softmax _softmax mean var sum amax dropout
where masked_fill masked_fill_ conv2d add iadd add_ sub isub sub_ subtract rsub mul imul mul_ multiply multiply_ div
div_ truediv itruediv true_divide divide neg negative getitem cat stack split chunk unbind tensor_split select narrow
index_select vitfast.backend.arguments.attend
"""
ANALYTIC = frozenset(_ANALYTIC.split()) | REARRANGEMENTS | CASTS
# Functions whose output has the same memory layout whatever that of the input is, or is no tensor.
_LAYS_OUT = frozenset("linear addmm matmul bmm mm einsum layer_norm softmax size dim numel new_zeros new_ones".split())
# Functions that accept any layout, and whose output has the layout that PyTorch's fake tensors predict. Convolutions
# and group norms are none of them. Neither are changes in place: a reshape may be a view of the changed tensor in one
# layout, and a copy in another.
_ANY_LAYOUT = {name for name in ANALYTIC if not name.endswith("_")}
_ANY_LAYOUT -= set("view _unsafe_view view_as conv2d iadd isub imul itruediv".split())
_DRAWS = """
bernoulli bernoulli_ rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform_ exponential_
multinomial geometric_ cauchy_ log_normal_ native_dropout poisson binomial rrelu
"""
DRAWS = frozenset(_DRAWS.split())
INPLACE = frozenset("iadd isub imul itruediv ifloordiv imatmul ipow imod iand ior ixor ilshift irshift setitem".split())
# Prefixes of calls that return nothing but switch no mode: checks, usage logs, the choice of an attention kernel.
_CHECKS = ("_assert", "_check", "sym_constrain", "_log_api", "_sdpa_kernel", "_backend_from_string")
ADDS = frozenset({"add", "add_", "iadd"})
MULTIPLIES = frozenset({"mul", "mul_", "imul", "multiply", "multiply_"})
DIVIDES = frozenset({"div", "div_", "truediv", "itruediv", "true_divide", "divide"})
PRODUCTS = frozenset({"matmul", "bmm", "einsum", "mm", "baddbmm"})


def name_of(node: Node) -> str:
    """Returns the name of the function that a node calls, behind its module's if it is not PyTorch's."""
    if node.op != "call_function":
        return node.target if node.op == "call_method" else node.op
    name, module = getattr(node.target, "__name__", str(node.target)), getattr(node.target, "__module__", None) or ""
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        module = "torch" if str(node.target).startswith("aten.") else str(node.target)
    root, _, rest = module.partition(".")
    is_torch = root in ("", "torch", "_operator", "builtins") and not rest.startswith("_dynamo")
    return name if is_torch else f"{module}.{name}"  # functions of Dynamo call NumPy's and the user's


def argument(node: Node, place: int, name: str, default=None):
    """Returns an argument of a node, passed by position or by keyword, or its default."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def value_of(node: Node):
    """The fake value that a node had when the graph was captured; None where it is not known."""
    return node.meta.get("example_value", node.meta.get("val"))


def values_read(node: Node) -> list[Node]:
    """Returns the nodes whose elements a node reads; calls such as view_as read those of the first."""
    return node.all_input_nodes[: 1 if name_of(node).endswith("_as") else None]


def tensor_of(node) -> Tensor | None:
    """Returns the fake tensor of a node; None if it returns something else, or is no node."""
    value = value_of(node) if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def size(length) -> int:
    """Returns a length, or a symbolic one's size in this call (-1 if unknown), without adding a guard."""
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
    """Whether a node draws random numbers: dropout of rate 0 or outside training does not."""
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) != 0
    if name == "multi_head_attention_forward":
        return argument(node, 10, "dropout_p", 0.0) != 0 and argument(node, 13, "training", True) is not False
    if "dropout" in name and name != "native_dropout":
        training = argument(node, 2, "training", node.kwargs.get("train", True))
        return argument(node, 1, "p", 0.5) != 0 and training is not False
    return name in DRAWS or name.endswith(".bernoulli_")  # eager.bernoulli_


def is_unchanged(node: Node) -> bool:
    """Whether a node returns its argument as it is: a cast to its own dtype, dropout that drops nothing."""
    name, out, x = name_of(node), tensor_of(node), tensor_of(node.args[0]) if node.args else None
    if out is None or x is None or len(node.all_input_nodes) != 1:
        return False
    same = (out.dtype, out.device, shape_of(node)) == (x.dtype, x.device, shape_of(node.args[0]))
    return same and (name in CASTS | {"contiguous", "clone"} or ("dropout" in name and not is_draw(node)))


def layout_matters(node: Node) -> bool:
    """Whether the memory layout of a node's output may matter to a view, a random draw or the caller."""
    stack, visited = [node], set()
    while stack:
        node = stack.pop()
        for user in node.users:
            name = name_of(user)
            if user in visited or node not in values_read(user) or name in _LAYS_OUT or name.startswith("vitfast."):
                continue
            if is_draw(user) or name not in _ANY_LAYOUT:
                return True
            visited.add(user)
            stack.append(user)
    return False


def _takes_inplace(node: Node) -> bool:
    """Whether a node calls a function with inplace=True, or may do so."""
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
    name, changed = name_of(node), []
    if node.op not in ("call_function", "call_method"):
        return []
    if _may_change_all(node, name):
        return node.all_input_nodes
    map_arg(node.kwargs.get("out"), changed.append)
    ends = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")  # operator.and_
    if name.strip("_") in INPLACE or ends or _takes_inplace(node):
        map_arg(node.args[:1], changed.append)
    return changed


def _may_change_all(node: Node, name: str) -> bool:
    """Whether a node may change any of its inputs: running statistics, custom or unknown functions."""
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
    """Whether a node switches a mode for the nodes after it: it takes no tensor, and returns nothing.

    Gradient, inference and autocast modes, streams and the transforms of torch.func are switched by such calls.
    """
    if node.op != "call_function" or value_of(node) is not None or name_of(node).startswith(_CHECKS):
        return False
    return all(tensor_of(a) is None for a in node.all_input_nodes)


def module_of(node: Node) -> str:
    """Returns the path of the module in whose forward a node was captured; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path).replace("_modules['", "").replace("']", "")


_IN_OPERATIONS = re.compile(rf'File "{re.escape(str(Path(ops.__file__).parent))}[^"]*", line \d+, in (\w+)')


def operation_of(node: Node) -> str | None:
    """The operation of vitfast that a node calls, or in whose call it was captured; None for other code."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "vitfast":
        return node.target._schema.name.removeprefix("vitfast::")
    return next((name for name in _IN_OPERATIONS.findall(node.stack_trace or "") if name in ops.__all__), None)
