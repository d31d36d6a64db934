"""Passes over memory of one encoder layer, counted from what it launches.

Bytes in units of the tokens, u = B N D numbers of 16 bits.

The rule: what a kernel is given it reads or writes once, in full; so does an operation of torch that is no view and
no allocation (cuBLAS' products). What is as large as the tokens is counted in whole u; the rest (weights and their
gradients, statistics, lse, workspaces of column sums) is about one u together. By this rule the layer moved 90 u, 30
forward and 60 backward, before LayerNorm's backward took the column sums of dout: those were 1 u in each block.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
from checks import Calls
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels.attention.options import PLAIN
from vitfast.kernels.launch import recording
from vitfast.ops.operation import _build, _fields

# The functions have the modules' names.
MODULES = "vitfast.ops.attention_block", "vitfast.ops.mlp_block", "vitfast.ops.gated_mlp"
attention_block, mlp_block, gated_mlp = map(importlib.import_module, MODULES)

B, N, D, H, F = 256, 197, 768, 12, 3072
U = B * N * D


def moved(arguments) -> list[int]:
    """Bytes of each piece of memory among a call's arguments.

    Views of one tensor, descriptors too, are no more than that tensor.
    """
    views, storages = {}, {}
    for leaf in tree_leaves(arguments):
        tensor = leaf.base if isinstance(leaf, TensorDescriptor) else leaf
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            view = tensor.storage_offset(), tensor.shape, tensor.stride()
            views.setdefault(storage._cdata, {})[view] = tensor.numel() * tensor.itemsize
    return [min(storage.nbytes(), sum(views[key].values())) for key, storage in storages.items()]


def counted(run) -> tuple[object, float, float]:
    """(result, u in tensors as large as the tokens, u in the rest) of what `run()` does."""
    with recording() as launches, Calls() as torchs:
        result = run()
    free = lambda func: func.is_view or "empty" in func.name() or "resize" in func.name()  # noqa: E731
    calls = [call[1:] for call in torchs.found if not free(call[0])] + [launch.arguments for launch in launches]
    sizes = [size for call in calls for size in moved(call)]
    large = sum(size for size in sizes if size >= 2 * U)
    return result, large / (2 * U), (sum(sizes) - large) / (2 * U)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def block(module, arguments, needs: frozenset) -> tuple[float, float, float]:
    """(forward, backward, the rest) of a block whose backward has to make these gradients."""
    needs = _build(type(arguments), (field.name in needs for field in _fields(type(arguments))))
    (_, saved), forward, rest = counted(lambda: module._forward(arguments))
    _, backward, more = counted(lambda: module._backward(meta(B, N, D), arguments, saved, needs))
    return forward, backward, rest + more


def layer(
    keep: str, needs: frozenset, layer_scale: bool = False, drop_path: bool = False
) -> tuple[float, float, float]:
    """(forward, backward, the rest) of both blocks at ViT-B/16, batch 256, on meta tensors."""
    factors = meta(D) if layer_scale else None, meta(B, dtype=torch.float32) if drop_path else None
    rows = meta(B, N, D), meta(D, dtype=torch.float32), meta(D, dtype=torch.float32)
    options, fc = (1e-6, "layer"), (meta(F, D), meta(F), meta(D, F), meta(D))
    qkv = meta(3 * D, D), meta(3 * D), meta(D, D), meta(D)
    attention = attention_block._Arguments(*rows, *qkv, *factors, PLAIN, H, *options, keep)
    mlp = mlp_block._Arguments(*rows, *fc, *factors, *options, "gelu", keep)
    found = block(attention_block, attention, needs), block(mlp_block, mlp, needs)
    return tuple(map(sum, zip(*found)))


# What both blocks have.
WITH_SCALE = frozenset("x norm_weight norm_bias in_weight in_bias out_weight out_bias layer_scale".split())
ALL = WITH_SCALE - {"layer_scale"}


@pytest.mark.parametrize("keep, wanted", [("least", (30, 58)), ("all", (30, 52)), ("slope", (30, 52))])
def test_a_layer_moves_88_u_and_82_where_all_is_kept(keep, wanted):
    """Beside it weights, statistics and workspaces, a quarter of a u of which is attention's scratch for dQ, in L2."""
    *found, rest = layer(keep, ALL)
    assert tuple(found) == wanted and rest < 1.3


def test_factors_and_frozen_parameters():
    """drop_path: g = drop_path * dout is written and read in place of dout: 2 u a block.

    Its sum comes with it.
    """
    assert layer("least", ALL, drop_path=True)[1] == 58 + 4
    assert layer("all", WITH_SCALE, layer_scale=True)[1] == 52
    frozen = frozenset({"x"})  # no weight gradients, LayerNorm's output or activation
    assert layer("least", frozen)[1] == layer("all", frozen)[1] == 58 - 16 - 2 - 4
    biases = frozenset({"in_bias", "out_bias"})
    # a pass of its own for the sum, where LayerNorm's backward does not run
    assert layer("least", biases)[1] == pytest.approx(1 + 2 + 8 + 1 + 9)


def gated(keep: str, needs: frozenset, inner: bool = False) -> tuple[float, float]:
    """(forward, backward) of the gated MLP block, its hidden width 4 D as that of the others."""
    rows = meta(B, N, D), meta(D, dtype=torch.float32), meta(D, dtype=torch.float32)
    inner_norm = (meta(F), meta(F)) if inner else (None, None)
    hidden = gated_mlp._Hidden(meta(F, D), meta(F), meta(F, D), meta(F), *inner_norm, "silu", 1e-6)
    arguments = gated_mlp._Block(*rows, hidden, meta(D, F), meta(D), None, None, 1e-6, "layer", keep)
    functions = SimpleNamespace(_forward=gated_mlp._block_forward, _backward=gated_mlp._block_backward)
    return block(functions, arguments, needs)[:2]


def test_a_gated_block_moves_what_its_plan_says():
    """In u; a product with F in it moves 4 u for each tensor of that width.

    Forward: LayerNorm 2, up and gate 1 + 12, down 4 + 2. Backward: dh 1 + 8 read and 12 written, down's weight gradient
    5, dx 5 and, onto it, 5 (in place: by the rule once), LayerNorm 5, the weight gradients of up and gate 10.
    """
    needs = ALL | {"up_weight", "up_bias"}
    assert gated("least", needs) == (2 + 13 + 6, 21 + 5 + 5 + 5 + 5 + 10)
    assert gated("all", needs) == (2 + 13 + 6, 21 + 5 + 5 + 5 + 5 + 10 - 4 - 1)
    # Its norm: 8 forward. Backward: dinner 1 + 4, dh and the norm's output of dinner and h 16, dup and dgate 4 + 8 + 8.
    normed = needs | {"inner_norm_weight", "inner_norm_bias"}
    assert gated("least", normed, inner=True) == (21 + 8, 5 + 16 + 20 + 5 + 5 + 5 + 5 + 10)
