"""Passes over memory of one encoder layer, counted from what it launches.

Bytes in units of the tokens, u = B N D numbers of 16 bits.

The rule: what a kernel is given it reads or writes once, in full; so does an operation of torch that is no view and
no allocation (cuBLAS' products). What is as large as the tokens is counted in whole u; the rest (weights and their
gradients, statistics, lse, workspaces of column sums) is about one u together. By this rule the layer moved 90 u, 30
forward and 60 backward, before LayerNorm's backward took the column sums of dout: those were 1 u in each block.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels.attention.options import PLAIN
from vitfast.kernels.launch import recording
from vitfast.ops._blocks import BlockNeeds
from vitfast.ops.attention_block import _attention_bwd, _attention_fwd
from vitfast.ops.gated_mlp_block import GatedBlockNeeds, _gated_bwd, _gated_fwd
from vitfast.ops.mlp_block import _mlp_bwd, _mlp_fwd

B, N, D, H, F = 256, 197, 768, 12, 3072
U = B * N * D


class Torch(TorchDispatchMode):
    """Collects what each operation of torch reads and writes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or "empty" in func.name() or "resize" in func.name()):
            self.calls.append((args, kwargs, result))
        return result


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
            views.setdefault(storage._cdata, {})[tensor.storage_offset(), tensor.shape, tensor.stride()] = (
                tensor.numel() * tensor.itemsize
            )
    return [min(storage.nbytes(), sum(views[key].values())) for key, storage in storages.items()]


def counted(run) -> tuple[object, float, float]:
    """(result, u in tensors as large as the tokens, u in the rest) of what `run()` does."""
    with recording() as launches, Torch() as torchs:
        result = run()
    sizes = [size for call in (*(launch.arguments for launch in launches), *torchs.calls) for size in moved(call)]
    large = sum(size for size in sizes if size >= 2 * U)
    return result, large / (2 * U), (sum(sizes) - large) / (2 * U)


def layer(
    keep: str, needs: BlockNeeds, layer_scale: bool = False, drop_path: bool = False
) -> tuple[float, float, float]:
    """(forward, backward, the rest) of both blocks at ViT-B/16, batch 256, on meta tensors."""

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    factors = meta(D) if layer_scale else None, meta(B, dtype=torch.float32) if drop_path else None
    vectors = meta(D, dtype=torch.float32), meta(D, dtype=torch.float32)
    forward = backward = rest = 0.0
    for fwd, bwd, held, matrices, option in (
        (_attention_fwd, _attention_bwd, 5, (meta(3 * D, D), meta(3 * D), meta(D, D), meta(D)), H),
        (_mlp_fwd, _mlp_bwd, 3, (meta(F, D), meta(F), meta(D, F), meta(D)), "gelu"),
    ):
        tensors = (meta(B, N, D), *vectors, *matrices, *factors)
        acting = PLAIN if option == H else ()
        (_, *kept), u, small = counted(lambda: fwd._init_fn(*tensors, *acting, option, 1e-6, "layer", keep))  # noqa: B023
        kept = [*kept[:held], *(t if keep == "all" else None for t in kept[held:])]
        inputs, options = (meta(B, N, D), *tensors), (option, 1e-6, "layer", list(needs))
        if option == H:
            inputs = (*inputs[:-1], None, None, None, factors[1], None, None)
            options = (False, 0, 0, 1e-6, "layer", [*needs, False, False, False])
        _, back, more = counted(lambda: bwd._init_fn(*inputs, *kept, *options))  # noqa: B023
        forward, backward, rest = forward + u, backward + back, rest + small + more
    return forward, backward, rest


NONE = BlockNeeds(*[False] * 8)
WITH_SCALE = BlockNeeds(*[True] * 8)
ALL = WITH_SCALE._replace(layer_scale=False)


@pytest.mark.parametrize("keep, wanted", [("least", (30, 58)), ("all", (30, 52))])
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
    frozen = NONE._replace(x=True)  # no weight gradients, LayerNorm's output or activation
    assert layer("least", frozen)[1] == layer("all", frozen)[1] == 58 - 16 - 2 - 4
    biases = NONE._replace(in_bias=True, out_bias=True)
    # a pass of its own for the sum, where LayerNorm's backward does not run
    assert layer("least", biases)[1] == pytest.approx(1 + 2 + 8 + 1 + 9)


def gated(keep: str, needs: GatedBlockNeeds, inner: bool = False) -> tuple[float, float]:
    """(forward, backward) of the gated MLP block, its hidden width 4 D as that of the others."""

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    norm = meta(D, dtype=torch.float32), meta(D, dtype=torch.float32)
    inner_norm = (meta(F), meta(F)) if inner else (None, None)
    gate = meta(F, D), meta(F), meta(F, D), meta(F), *inner_norm
    tensors = meta(B, N, D), *norm, *gate, meta(D, F), meta(D), None, None
    options = "silu", 1e-6, 1e-6, "layer"
    (_, *kept), forward, _ = counted(lambda: _gated_fwd._init_fn(*tensors, *options, keep))
    more = kept[7:] if keep == "all" else (None, None)
    arguments = meta(B, N, D), *tensors, *kept[:7], *more, *options, list(needs)
    return forward, counted(lambda: _gated_bwd._init_fn(*arguments))[1]


def test_a_gated_block_moves_what_its_plan_says():
    """In u; a product with F in it moves 4 u for each tensor of that width.

    Forward: LayerNorm 2, up and gate 1 + 12, down 4 + 2. Backward: dh 1 + 8 read and 12 written, down's weight gradient
    5, dx 5 and, onto it, 5 (in place: by the rule once), LayerNorm 5, the weight gradients of up and gate 10.
    """
    needs = GatedBlockNeeds(*[True] * 12)._replace(inner_norm_weight=False, inner_norm_bias=False, layer_scale=False)
    assert gated("least", needs) == (2 + 13 + 6, 21 + 5 + 5 + 5 + 5 + 10)
    assert gated("all", needs) == (2 + 13 + 6, 21 + 5 + 5 + 5 + 5 + 10 - 4 - 1)
    # Its norm: 8 forward. Backward: dinner 1 + 4, dh and the norm's output of dinner and h 16, dup and dgate 4 + 8 + 8.
    normed = needs._replace(inner_norm_weight=True, inner_norm_bias=True)
    assert gated("least", normed, inner=True) == (21 + 8, 5 + 16 + 20 + 5 + 5 + 5 + 5 + 10)
