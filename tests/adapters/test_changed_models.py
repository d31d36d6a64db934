"""Models that are changed after their first accelerated call: LoRA, hooks, other modules, weights and forwards."""

import copy

import pytest
import torch
from adapter_models import (
    ALL_PARTS,
    IMAGES,
    MAKERS,
    NAMED,
    Q_AND_V,
    assert_same,
    claimed,
    counted,
    family,
    hf_vit,
    images_for,
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


def set_to(*pairs):
    """Sets attributes: path, value, path, value ...; a tensor as a parameter."""

    def change(model: nn.Module) -> None:
        for path, value in zip(pairs[::2], pairs[1::2]):
            parent, _, name = path.rpartition(".")
            value = nn.Parameter(value.clone()) if isinstance(value, torch.Tensor) else value
            setattr(model.get_submodule(parent), name, value)

    return change


def hook(path: str, factor: float = 2.0):
    return lambda model: model.get_submodule(path).register_forward_hook(lambda m, a, out: out * factor) and None


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


class Wrapped(nn.Module):
    """A linear layer inside a module that says its sizes."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer, self.in_features, self.out_features = layer, layer.in_features, layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * self.layer(x)


EVA, BEIT, CLIP, ENCODER = "timm EVA-02", "timm BEiT", "transformers CLIP", "torch nn.TransformerEncoder"
TV = "encoder.layers.encoder_layer_0"
PLAIN_NORM = lambda _: nn.LayerNorm(32, elementwise_affine=False)  # noqa: E731
OWN_BIAS = lambda old: nn.Linear(old.in_features, old.out_features)  # noqa: E731
# name: (model, change, the least number of operations then: a whole block in pieces is fewer or more).
CHANGES = {
    "LoRA": ("timm", lora("qkv"), 8),
    "LoRA everywhere": ("timm", lora("qkv", "attn.proj", "fc1", "fc2"), 6),
    "LoRA on the patches": ("timm", lora("patch_embed.proj"), 5),
    "LoRA, BEiT, which reads a weight and calls none": (BEIT, lora("qkv"), 4),
    "LoRA, ViT": ("transformers ViT", lora(*Q_AND_V), 8),
    "LoRA, CLIP": (CLIP, lora("v_proj"), 9),
    "a hook on a projection": (CLIP, hook("encoder.layers.0.self_attn.q_proj"), 7),
    "a hook on a layer": ("timm", hook("blocks.0"), 6),
    "a hook on a branch": ("timm", hook("blocks.0.attn"), 6),
    "a hook on a norm": ("timm", hook("blocks.1.norm1"), 6),
    "a hook on the patches": ("Hugging Face", hook("vit.embeddings.patch_embeddings"), 5),
    "a hook, nn.Transformer": (ENCODER, hook("layers.0.linear1"), 4),
    "a wrapped layer": ("timm", at("blocks.0.mlp.fc1", Wrapped), 6),
    "a wrapped layer, EVA-02": (EVA, at("blocks.0.mlp.fc1_g", Wrapped), 6),
    "weight norm": ("timm", at("blocks.0.mlp.fc1", scaled_weight), 6),
    "weight norm, torchvision": ("torchvision", at(f"{TV}.mlp.0", scaled_weight), 5),
    "weight norm of the patches": ("timm", at("patch_embed.proj", scaled_weight), 5),
    "the old weight norm": ("timm", at("blocks.0.mlp.fc1", nn.utils.weight_norm), 6),
    "a forward of a branch": ("timm", own_forward("blocks.0.mlp"), 6),
    "a forward of a layer": ("timm", own_forward("blocks.0"), 4),
    "a forward of the last norm": ("timm", own_forward("norm"), 5),
    "a class with code of its own": ("timm", class_of("blocks.0"), 6),
    "a class of a branch": ("torchvision", class_of(f"{TV}.mlp"), 5),
    "another activation": ("timm", at("blocks.0.mlp.act", lambda _: nn.ReLU()), 6),
    "another scale": ("timm", set_to("blocks.0.attn.fused_attn", False, "blocks.0.attn.scale", 1.0), 6),
    "another eps": ("timm", set_to("blocks.0.norm1.eps", 0.5, "norm.eps", 0.5), 6),
    "a norm without weights": ("timm", at("blocks.0.norm1", PLAIN_NORM), 6),
    "a norm without a bias": ("timm", at("blocks.0.norm1", lambda _: nn.LayerNorm(32, bias=False)), 6),
    "timm's fast norms": ("timm", set_to("blocks.0.norm1._fast_norm", True, "norm._fast_norm", True), 6),
    "another kind of MLP": ("timm", at("blocks.0.mlp", lambda _: nn.Linear(32, 32)), 6),
    "a layer scale of one number": ("timm ViT", set_to("blocks.0.ls1.gamma", torch.tensor(0.3)), 6),
    "a layer scale of one channel": ("timm ViT", set_to("blocks.0.ls1.gamma", torch.tensor([0.3])), 6),
    "a bias beside EVA-02's": (EVA, at("blocks.0.attn.q_proj", OWN_BIAS), 6),
    "a bias beside BEiT's": (BEIT, at("blocks.0.attn.qkv", OWN_BIAS), 6),
    "frozen layers": ("timm", lambda model: model.blocks[0].requires_grad_(False) and None, 6),
    "a layer behind an MLP": ("torchvision", lambda m: m.get_submodule(TV).mlp.append(nn.Linear(32, 32)) and None, 5),
    "a layer in an MLP": ("torchvision", lambda m: m.get_submodule(TV).mlp.insert(3, nn.LayerNorm(64)) and None, 5),
}
SAME_OUTPUTS = ["frozen layers", "timm's fast norms", "the old weight norm", *[n for n in CHANGES if "calls none" in n]]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_have_the_librarys_numbers(name):
    start, change, least = CHANGES[name]
    base = randomize(family(start).make() if start in NAMED else MAKERS[start]())
    batch, changed = images_for(start), []
    accelerated = vitfast.accelerate(copy.deepcopy(base))
    before = outputs(accelerated, batch)[0]
    for each in (accelerated, base):
        torch.manual_seed(5)
        new = change(each)
        changed.append(new if isinstance(new, nn.Module) else each)
    model, original = changed
    assert_same(model, original, batch)
    ran = counted(model, batch)
    assert sum(ran.values()) >= least, report(model)
    assert ran == claimed(model), report(model)
    assert name in SAME_OUTPUTS or not torch.allclose(outputs(original, batch)[0], before, atol=1e-6)


@pytest.mark.parametrize("name", ["patch_embed.proj", "blocks.0.attn.proj", "blocks.0.mlp.fc1"])
def test_a_spectral_norm_takes_the_librarys_steps(name):
    """In training, each look at its weight takes a step of the power iteration."""
    ours, theirs = pair(timm_vit().train())
    ours(IMAGES)
    for model in (theirs, ours):
        torch.manual_seed(5)
        nn.utils.parametrizations.spectral_norm(model.get_submodule(name))
    assert_same(ours, theirs, dict(x=IMAGES))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
def test_every_kind_of_hook_is_called_until_it_is_removed(called, capsys):
    model, original = pair(timm_vit())
    logs, handles = [], []
    if called:
        assert_same(model, original, dict(x=IMAGES))
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


def test_hooks_are_seen_after_dynamo_was_reset():
    """A reset also takes out the callbacks by which layers are compiled with guards on hooks."""
    model, original = pair(timm_vit())
    model(IMAGES)
    torch._dynamo.reset()
    assert_same(model, original, dict(x=IMAGES))
    for each in (model, original):
        hook("blocks.0.mlp")(each)
    assert_same(model, original, dict(x=IMAGES))


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


@pytest.mark.parametrize("make", [timm_vit, hf_vit])
def test_a_forward_that_was_put_back(make):
    """transformers 5.0 records by a forward on the instance, and puts the bound one of the class there afterwards."""
    model, original = (each.eval() for each in pair(make()))
    expected = tensor(original(IMAGES))

    def put_back():
        for module in model.modules():
            module.forward = module.forward

    for step in (put_back, lambda: vitfast.restore(model), put_back, lambda: vitfast.accelerate(model), put_back):
        step()
        assert_close(tensor(model(IMAGES)), expected, atol=1e-5)
    assert len(report(model).replaced) == ALL_PARTS and not left(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per", "ignore::UserWarning")
def test_quantised_linear_layers_are_called():
    model, original = pair(family(CLIP).make())
    batch = NAMED[CLIP].batch()
    quantised = [
        torch.ao.quantization.quantize_dynamic(m.eval(), {nn.Linear}, dtype=torch.qint8) for m in (model, original)
    ]
    for each in quantised:
        vitfast.accelerate(each) if each is quantised[0] else each
    assert_close(*(outputs(each, batch)[0] for each in quantised), atol=1e-6)


def test_weights_of_a_class_of_their_own():
    class Marked(torch.Tensor):
        pass

    model, original = pair(timm_vit())
    model(IMAGES)
    fc1 = model.blocks[0].mlp.fc1
    fc1.weight = nn.Parameter(fc1.weight.detach().as_subclass(Marked))
    assert_close(model(IMAGES).as_subclass(torch.Tensor), original(IMAGES), atol=1e-5)


def test_changing_the_model_afterwards():
    model, original = pair(timm_vit(global_pool="avg"))
    model(IMAGES)
    for each in (model, original):
        torch.manual_seed(3)
        each.reset_classifier(7)
        each.set_input_size(img_size=(24, 32), patch_size=(4, 4))
    assert_same(model, original, dict(x=torch.randn(2, 3, 24, 32)))
    assert len(report(vitfast.accelerate(model)).left) <= 1


@pytest.mark.parametrize("name", ["transformers BEiT", "timm"])
def test_lora_draws_its_dropout_as_without_accelerate(name):
    base = randomize(timm_vit(drop_path_rate=0.5) if name == "timm" else NAMED[name].make()).train()
    wrapped = lora(*Q_AND_V, "qkv", lora_dropout=0.5)
    truth = wrapped(copy.deepcopy(base))
    model = wrapped(vitfast.accelerate(base))
    found = []
    for each in (model, truth):
        torch.manual_seed(7)
        found.append(tensor(each(IMAGES)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    torch.manual_seed(8)
    assert not torch.allclose(tensor(model(IMAGES)), found[0], atol=1e-3)


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
