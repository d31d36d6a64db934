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

from vitfast.kernels.launch import recording
from vitfast.ops import blocks
from vitfast.ops.blocks import BlockNeeds

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
        (blocks._attention_fwd, blocks._attention_bwd, 5, (meta(3 * D, D), meta(3 * D), meta(D, D), meta(D)), H),
        (blocks._mlp_fwd, blocks._mlp_bwd, 3, (meta(F, D), meta(F), meta(D, F), meta(D)), "none"),
    ):
        tensors = (meta(B, N, D), *vectors, *matrices, *factors)
        (_, *kept), u, small = counted(lambda: fwd._init_fn(*tensors, option, 1e-6, keep))  # noqa: B023
        kept = [*kept[:held], *(t if keep == "all" else None for t in kept[held:])]
        dout = meta(B, N, D)
        options = (1e-6, list(needs)) if option == H else (option, 1e-6, list(needs))
        _, back, more = counted(lambda: bwd._init_fn(dout, *tensors, *kept, *options))  # noqa: B023
        forward, backward, rest = forward + u, backward + back, rest + small + more
    return forward, backward, rest


NONE = BlockNeeds(*[False] * 8)
WITH_SCALE = BlockNeeds(*[True] * 8)
ALL = WITH_SCALE._replace(layer_scale=False)


def test_a_layer_moves_88_u_and_82_where_all_is_kept():
    forward, backward, rest = layer("least", ALL)
    # beside it weights, statistics and workspaces, a quarter of a u of which is attention's scratch for dQ, made to
    # stay in L2
    assert (forward, backward) == (30, 58) and rest < 1.3
    forward, backward, rest = layer("all", ALL)
    assert (forward, backward) == (30, 52) and rest < 1.3


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
