"""The sizes that are worked out from a ViT's arguments, against the ViT itself."""

import pytest
import torch
from cost_models import TINY, on_meta

from vitfast import InputError, ViT
from vitfast.model.config import ViTConfig
from vitfast.model.presets import PRESETS
from vitfast.model.sizes import Sizes
from vitfast.tools.cost.gpus import rates
from vitfast.tools.cost.memory import kept_bytes, state_bytes, working_bytes
from vitfast.tools.cost.steps import operations
from vitfast.tools.cost.training import estimate

OPTIONS = [
    dict(num_classes=0, qkv_bias=False, proj_bias=False),
    dict(class_token=False, global_pool="avg", fc_norm=False, reg_tokens=3, representation_size=20),
    dict(pos_embed="factorized", pos_embed_at="layers", norm_layer="rmsnorm", pre_norm=True, qk_norm=True),
    dict(pos_embed="learn2d", pos_embed_at="layers_shared", init_values=0.0, mlp_ratio=2.3, scale_mlp_norm=True),
    dict(pos_embed="relative", depth=3, init_values=0.1),
    dict(global_pool="map", swiglu_mlp=True, scale_mlp_norm=True, no_embed_class=True, patch_size=(8, 4), in_chans=5),
    dict(pos_embed="sincos2d", global_pool="", residual_in_fp32=True),
]


def check(model: ViT) -> None:
    """The sizes of its arguments are those of its modules and parameters."""
    config = ViTConfig(**model.config)
    sizes, layers = Sizes(config), [m for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    products, total = sum(p.numel() for m in layers for p in m.parameters()), sum(p.numel() for p in model.parameters())
    assert sizes.parameters() == (products, total - products)
    assert sizes.grid == model.patch_embed.grid_size
    assert state_bytes(config) == state_bytes(model)


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", [name for name, shape in PRESETS.items() if "backbone" not in shape])
def test_sizes_of_presets(name):
    check(on_meta(name))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sizes_of_options(options):
    check(ViT(**TINY | options, weight_init="skip"))


@pytest.mark.slow
def test_arguments_cost_what_the_model_does():
    """A hybrid's arguments too, whose ResNet timm makes."""
    for name in ("B/16", "SigLIP2-So400m/14", "R50+B/16"):
        model, told = on_meta(name), ViTConfig(**PRESETS[name])
        assert estimate(told, rates(), batch_size=64, keep="auto") == estimate(
            model, rates(), batch_size=64, keep="auto"
        )
    with pytest.raises(InputError, match="ResNet"):
        state_bytes(ViTConfig(**PRESETS["R50+B/16"]))
    plain = on_meta("Ti/16"), ViTConfig(**PRESETS["Ti/16"])
    for function in (kept_bytes, operations, working_bytes):
        assert function(plain[0], 3) == function(plain[1], 3)
