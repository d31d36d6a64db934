"""The backend on vitfast's own models, which run the operations already, and on accelerated ones."""

from collections import Counter

import pytest
import timm
import torch
from attention_cases import interpreted
from checks import randomize
from compiled import AROUND, block, compare
from torch import nn

import vitfast
from vitfast import ViT, backend, ops

SIZES = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=3)
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
OURS = {"patch embed": 1, "attention block": 2, "MLP block": 2, "layer norm": 1}


def of_timm() -> nn.Module:
    return randomize(timm.create_model("vit_tiny_patch16_224", init_values=0.1, **SIZES))


def already() -> Counter:
    return Counter(entry.kind for entry in backend.report().already)


# On kernels, interpreted, an operation is one node of the graph; elsewhere it is plain PyTorch.
MODES = pytest.mark.parametrize("kernels", ["auto", pytest.param("on", marks=[interpreted, pytest.mark.slow])])


@MODES
def test_operations_are_not_replaced_again(kernels):
    torch.manual_seed(0)
    with ops.use_kernels(kernels):
        assert not compare(randomize(ViT(patch_size=16, **SIZES)), IMAGES, fullgraph=True)
    assert not backend.report().left and already() == OURS
    assert "6 vitfast's already" in str(backend.report()) and "already   2 x MLP block" in str(backend.report())


@pytest.mark.parametrize("called", [False, True])
def test_accelerated_models_are_replaced_once(called):
    """The graph around accelerated layers is the library's, and the backend replaces it as any other."""
    torch.manual_seed(0)
    model = vitfast.accelerate(of_timm())
    if called:
        model(IMAGES)
    assert compare(model, IMAGES, fullgraph=True) == {"attention block": 2, "MLP block": 2} | AROUND
    assert not backend.report().left and not already()


@MODES
def test_a_block_around_an_operation_is_left_on_every_device(kernels):
    """Where the operation's kernel runs, the graph has nothing to prove the block by."""
    torch.manual_seed(0)
    twice = "(torch.cat([x, x], -1).transpose(1, 2) for x in (q, k, v))"  # no kernel has heads of 8 columns
    ours = f"import vitfast; o = vitfast.ops.attention(*{twice}).transpose(1, 2)[..., :8]"
    model = block("o = self.attend(q, k, v)", ours)
    with ops.use_kernels(kernels):
        assert compare(model.float(), torch.randn(2, 7, 32)) == {"MLP block": 1, "LayerNorm": 1}
    assert [entry.why for entry in backend.report().left] == ["attention in it is vitfast's already"]
    assert already() == {"attention": 1}
