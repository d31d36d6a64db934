"""Towers of images of many sizes: batches for them, and what their fused blocks are given."""

import copy

import pytest
import torch
from checks import randomize
from torch import nn

import vitfast
from vitfast import ops
from vitfast.adapters.families import FAMILIES

QWEN, PIXTRAL, SIGLIP, NAFLEX = "Qwen2.5-VL", "Pixtral", "SigLIP 2, padded", "NaFlexViT, padded"
BLOCKS = {"attention_block", "mlp_block", "gated_mlp_block"}


def family(name: str):
    found = next(each for each in FAMILIES if each.name == name)
    pytest.importorskip(found.library)
    return found


def naflex(**options) -> nn.Module:
    module = pytest.importorskip("timm.models.naflexvit")
    sizes = dict(patch_size=8, embed_dim=32, depth=2, num_heads=2, pos_embed_grid_size=(4, 4), global_pool="avg")
    return module.NaFlexVit(module.NaFlexVitCfg(**{**sizes, **options}), num_classes=5)


def padded(*grids: tuple[int, int]) -> dict:
    """Patches of images of these grids as NaFlexVit takes them."""
    longest = max(h * w for h, w in grids)
    places, valid = torch.zeros(len(grids), longest, 2, dtype=torch.long), torch.zeros(len(grids), longest, dtype=bool)
    for i, (h, w) in enumerate(grids):
        places[i, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        valid[i, : h * w] = True
    x = torch.randn(len(grids), longest, 192, generator=torch.manual_seed(0))
    return dict(x=x, patch_coord=places, patch_valid=valid)


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    model = randomize(model)
    return vitfast.accelerate(copy.deepcopy(model)), model


def outputs(model: nn.Module, batch: dict, valid: str = "") -> list[torch.Tensor]:
    """All floating tensors that a forward gives, of tokens those that count."""
    torch.manual_seed(3)  # of drop path
    found = model(**batch)
    found = [found] if isinstance(found, torch.Tensor) else [t for t in found.values() if isinstance(t, torch.Tensor)]
    return [t[batch[valid].bool()] if valid and t.dim() == 3 else t for t in found]


def assert_same(model: nn.Module, original: nn.Module, batch: dict, valid: str = "") -> None:
    """Outputs, and gradients of all parameters by random upstream ones, to 1e-5 of the largest."""
    ours, theirs = outputs(model, batch, valid), outputs(original, batch, valid)
    upstream = [torch.randn(t.shape, generator=torch.manual_seed(4)) for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    a, b = (
        torch.autograd.grad(out, list(each.parameters()), upstream, allow_unused=True)
        for out, each in ((ours, model), (theirs, original))
    )
    assert [g is None for g in a] == [g is None for g in b]
    largest = max(g.abs().max() for g in b if g is not None)
    for ours_of, theirs_of in zip(a, b):
        assert theirs_of is None or (ours_of - theirs_of).abs().max() <= 1e-5 * largest


def blocks_in(model: nn.Module, batch: dict) -> list[tuple[str, torch.Tensor, dict]]:
    """(operation, input, keyword arguments) of each fused block in a forward."""
    seen = []

    def watched(name, function):
        return lambda x, *a, **k: (seen.append((name, x, k)), function(x, *a, **k))[1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name in BLOCKS:
            patch.setattr(ops, name, watched(name, getattr(ops, name)))
        model(**batch)
    return seen
