"""Models that are changed after their first accelerated call: LoRA, hooks, other modules, weights and forwards.

Dynamo's guards see each change, or the call does. What becomes of a changed layer is tests/backend/test_mutations.py's.
"""

import copy

import pytest
import torch
from adapter_models import (
    ALL_PARTS,
    IMAGES,
    Q_AND_V,
    assert_same,
    claimed,
    counted,
    family,
    hf_vit,
    left,
    lora,
    outputs,
    pair,
    report,
    tensor,
    timm_vit,
)
from checks import assert_close, randomize
from timm.models.vision_transformer import Attention, Block
from torch import nn
from torch.nn.modules import module as torch_module

import vitfast


def at(path: str, new):
    """Puts new(module) in the place of a module."""

    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new(getattr(model.get_submodule(parent), name)))

    return change


def hook(path: str):
    return lambda model: model.get_submodule(path).register_forward_hook(lambda m, a, out: out * 2.0) and None


def own_forward(path: str):
    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module.forward = lambda x, *args, old=module.forward, **kwargs: 1.5 * old(x, *args, **kwargs)

    return change


def class_of(path: str):
    """A subclass with code of its own, as quantisation and experiments put one in."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        forward = type(module).forward
        module.__class__ = type("Doubled", (type(module),), dict(forward=lambda *a, **k: 2 * forward(*a, **k)))

    return change


def scaled_weight(layer: nn.Module) -> nn.Module:
    nn.utils.parametrizations.weight_norm(layer).parametrizations.weight.original0.data.mul_(1.5)
    return layer


BEIT, CLIP, TV = "timm BEiT", "transformers CLIP", "encoder.layers.encoder_layer_0"
PLAIN_NORM = lambda _: nn.LayerNorm(32, elementwise_affine=False)  # noqa: E731
# name: (model, change, the least number of operations then: a whole block in pieces is fewer or more).
CHANGES = {
    "LoRA": ("timm ViT", lora("qkv"), 8),
    "LoRA on the patches": ("timm ViT", lora("patch_embed.proj"), 5),
    "LoRA, which reads a weight and calls none": (BEIT, lora("qkv"), 4),
    "LoRA, CLIP": (CLIP, lora("v_proj"), 9),
    "a hook on a projection": (CLIP, hook("encoder.layers.0.self_attn.q_proj"), 7),
    "a hook on a layer": ("timm ViT", hook("blocks.0"), 6),
    "a hook on a branch": ("timm ViT", hook("blocks.0.attn"), 6),
    "a hook on the patches": ("timm ViT", hook("patch_embed"), 5),
    "a wrapped layer": ("timm ViT", at("blocks.0.mlp.fc1", lambda layer: nn.Sequential(layer, nn.Softshrink())), 6),
    "weight norm": ("timm ViT", at("blocks.0.mlp.fc1", scaled_weight), 6),
    "weight norm of the patches": ("timm ViT", at("patch_embed.proj", scaled_weight), 5),
    "a forward of a branch": ("timm ViT", own_forward("blocks.0.mlp"), 6),
    "a forward of a layer": ("timm ViT", own_forward("blocks.0"), 4),
    "a forward of the last norm": ("timm ViT", own_forward("norm"), 5),
    "a class with code of its own": ("timm ViT", class_of("blocks.0"), 6),
    "another activation": ("timm ViT", at("blocks.0.mlp.act", lambda _: nn.ReLU()), 6),
    "another eps": ("timm ViT", at("blocks.0.norm1.eps", lambda _: 0.5), 6),
    "a norm without weights": ("timm ViT", at("blocks.0.norm1", PLAIN_NORM), 6),
    "a layer scale of one number": ("timm ViT", at("blocks.0.ls1.gamma", lambda _: nn.Parameter(torch.tensor(0.3))), 6),
    "a layer in an MLP": ("torchvision ViT", lambda m: m.get_submodule(f"{TV}.mlp").insert(3, nn.LayerNorm(64)), 5),
    "frozen layers": ("timm ViT", lambda model: model.blocks[0].requires_grad_(False) and None, 6),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_have_the_librarys_numbers(name):
    start, change, least = CHANGES[name]
    base = randomize(family(start).make())
    batch, changed = family(start).batch(), []
    accelerated = vitfast.accelerate(copy.deepcopy(base))
    before = outputs(accelerated, batch)[0]
    for each in (accelerated, base):
        torch.manual_seed(5)
        new = change(each) if "LoRA" in name else change(each) and None
        changed.append(new or each)
    model, original = changed
    assert_same(model, original, batch)
    ran = counted(model, batch)
    assert sum(ran.values()) >= least and ran == claimed(model), report(model)
    same = torch.allclose(outputs(original, batch)[0], before, atol=1e-6)
    assert same == (name == "frozen layers" or "calls none" in name)


@pytest.mark.slow
def test_every_kind_of_hook_is_called_until_it_is_removed(capsys):
    """Also after Dynamo was reset, which takes out the callbacks by which layers are compiled with guards on hooks."""
    model, original = pair(timm_vit())
    assert_same(model, original, dict(x=IMAGES))
    torch._dynamo.reset()
    assert_same(model, original, dict(x=IMAGES))
    logs, handles = [], []
    for each in (model, original):
        log, block = [], each.blocks[1]
        logs.append(log)
        handles += [
            block.attn.attn_drop.register_forward_hook(lambda m, i, out, log=log: log.append(("dropout", out.shape))),
            block.attn.register_forward_pre_hook(lambda m, i, log=log: log.append(("attention", i[0].shape))),
            block.mlp.fc1.register_full_backward_hook(lambda m, gi, go, log=log: log.append(("fc1", go[0].shape))),
            block.register_forward_hook(lambda m, i, out, log=log: log.append(("block", out.shape))),
            block.register_forward_hook(lambda m, i, out: print("printed", tuple(out.shape))),
            block.mlp.register_forward_hook(lambda m, i, out: print("inside", tuple(out.shape))),
            each.patch_embed.proj.register_forward_hook(lambda m, i, out, log=log: log.append(("patches", out.shape))),
            each.norm.register_forward_hook(lambda m, i, out, log=log: 2 * out),
        ]
    for _ in range(2):
        assert_same(model, original, dict(x=IMAGES))
    assert logs[0] == logs[1] and {kind for kind, _ in logs[0]} == {"attention", "fc1", "block", "patches"}
    assert capsys.readouterr().out == "inside (2, 5, 32)\nprinted (2, 5, 32)\n" * 4
    for handle in handles:
        handle.remove()
    assert_same(model, original, dict(x=IMAGES))
    assert sum(counted(model, dict(x=IMAGES)).values()) == ALL_PARTS and not capsys.readouterr().out


@pytest.mark.slow
def test_global_hooks_see_every_module():
    model, original = pair(hf_vit())
    model(IMAGES)
    counts = []
    for each in (model, original):
        seen = []
        with torch_module.register_module_forward_hook(lambda m, i, o, seen=seen: seen.append(type(m).__name__)):
            each(IMAGES)
        counts.append(seen)
    assert counts[0] == counts[1] and counts[0].count("Linear") == 13
    assert "in its last call: a hook on all modules is set" in str(report(model))
    assert_same(model, original, dict(pixel_values=IMAGES))
    assert len(report(model).replaced) == ALL_PARTS and not left(model)


@pytest.mark.slow
def test_a_forward_that_was_put_back():
    """transformers 5.0 records by a forward on the instance, and puts the bound one of the class there afterwards."""
    model, original = (each.eval() for each in pair(timm_vit()))

    def put_back():
        for module in model.modules():
            module.forward = module.forward

    for step in (put_back, lambda: vitfast.restore(model), put_back, lambda: vitfast.accelerate(model), put_back):
        step()
        assert_close(model(IMAGES), original(IMAGES), atol=1e-5)
    assert len(report(model).replaced) == ALL_PARTS and not left(model)


@pytest.mark.slow
def test_lora_is_switched_off_and_merged():
    base = randomize(hf_vit()).eval()
    plain, model = tensor(copy.deepcopy(base)(IMAGES)), lora(*Q_AND_V)(vitfast.accelerate(base)).eval()
    adapted = tensor(model(IMAGES))
    assert (adapted - plain).abs().max() > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(tensor(model(IMAGES)), plain, atol=1e-5, rtol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(tensor(merged(IMAGES)), adapted, atol=1e-4, rtol=1e-3)
    assert counted(merged, dict(pixel_values=IMAGES))["attention_block"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Block, Attention])
def test_a_library_that_was_patched_is_seen_by_the_next_accelerate(cls, monkeypatch):
    """Dynamo does not guard on the functions of inner classes, as little as in a plain torch.compile."""
    model, original = pair(timm_vit())
    model(IMAGES)
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x, **kwargs: 2 * forward(self, x, **kwargs))
    assert_same(vitfast.accelerate(model), original, dict(x=IMAGES))
    monkeypatch.undo()
    assert_same(vitfast.accelerate(model), original, dict(x=IMAGES))
    assert len(report(model).replaced) == ALL_PARTS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per", "ignore::UserWarning")
def test_quantised_linear_layers_are_called():
    models = pair(hf_vit())
    quantised = [torch.ao.quantization.quantize_dynamic(each.eval(), {nn.Linear}, dtype=torch.qint8) for each in models]
    vitfast.accelerate(quantised[0])
    assert_close(*(tensor(each(IMAGES)) for each in quantised), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [hf_vit, timm_vit])
def test_lora_draws_its_dropout_as_without_accelerate(make):
    base, wrapped = randomize(make()).train(), lora(*Q_AND_V, "qkv", lora_dropout=0.5)
    truth = wrapped(copy.deepcopy(base))
    model, found = wrapped(vitfast.accelerate(base)), []
    for each in (model, truth):
        torch.manual_seed(7)
        found.append(tensor(each(IMAGES)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    torch.manual_seed(8)
    assert not torch.allclose(tensor(model(IMAGES)), found[0], atol=1e-3)
