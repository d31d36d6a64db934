"""Models that are changed before or after accelerate: LoRA, hooks, quantisation, odd layers."""

import copy
from functools import partial

import pytest
import torch
from adapter_models import (
    ALL_PARTS,
    IMAGES,
    MAKERS,
    NAFLEX,
    NAMED,
    Q_AND_V,
    assert_same,
    calls,
    claimed,
    family,
    hf_vit,
    left,
    lora,
    outputs,
    pair,
    report,
    running,
    tensor,
    timm_vit,
)
from checks import assert_close, randomize
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn.modules import module as torch_module

import vitfast
from vitfast.adapters.families import naflexvit


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


def hook(path: str):
    return lambda model: model.get_submodule(path).register_forward_hook(lambda *_: None)


def own_forward(path: str):
    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module.forward = lambda x, old=module.forward: old(x)

    return change


def own_bias(name: str):
    return at(f"blocks.0.attn.{name}", lambda old: nn.Linear(old.in_features, old.out_features))


def no_biases_beside(model: nn.Module) -> None:
    """timm adds the bias of `qkv` where there is none of q beside it, and leaves it out where there is."""
    own_bias("qkv")(model)
    set_to(f"{FIRST}.q_bias", None, f"{FIRST}.v_bias", None)(model)


def weight_norm(layer: nn.Module) -> nn.Module:
    nn.utils.parametrizations.weight_norm(layer).parametrizations.weight.original0.data.mul_(1.5)
    return layer


def one_beside_three(model: nn.Module) -> None:
    """timm's Eva takes q, k and v from `qkv` where there is one."""
    model.blocks[0].attn.qkv = nn.Linear(32, 96, bias=False)


def lengthened(add: str, *arguments):
    return lambda model: [getattr(model.encoder.layers[0].mlp, add)(*arguments)]


class Wrapped(nn.Module):
    """A linear layer inside a module that says its sizes."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer, self.in_features, self.out_features = layer, layer.in_features, layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * self.layer(x)


def plain_norm(old: nn.Module) -> nn.Module:
    return nn.LayerNorm(32, elementwise_affine=False)


LORA, SEQUENTIAL, HOOKS = "peft.tuners.lora", "is torch.nn.modules.container.Sequential", "has hooks"
NORM, SCALE, OTHERS = "no weight per channel", "no tensor per channel", "mlp holds other modules than it did"
EVA, BEIT, CLIP, ENCODER = "timm EVA-02", "timm BEiT", "transformers CLIP", "torch nn.TransformerEncoder"
FAST = ("fast norm",) * 2
DINOV3, FIRST, TV = "transformers DINOv3 H+", "blocks.0.attn", "encoder.layers.encoder_layer_0.mlp.0"
# name: (model, change, a word of each reason why a part is left then).
CHANGES = {
    "LoRA": ("timm", lora("qkv"), ()),  # attention runs around the linear layers that LoRA has wrapped
    "LoRA everywhere": ("timm", lora("qkv", "attn.proj", "fc1", "fc2"), (LORA,) * 2),
    "LoRA on the patches": ("timm", lora("patch_embed.proj"), ("nothing that vitfast replaces",)),
    "LoRA, EVA-02": (EVA, lora("q_proj", "v_proj"), ()),
    "LoRA, BEiT, which reads a weight and calls none": (BEIT, lora("qkv"), (LORA,) * 2),
    "LoRA, CLIP": (CLIP, lora("v_proj"), ()),
    **{f"LoRA, {name}": (f"transformers {name}", lora(*Q_AND_V), ()) for name in ("ViT", "DINOv2", "DINOv3", "YOLOS")},
    "LoRA, nn.Transformer, which reads a weight": (ENCODER, lora("out_proj"), ("peft",) * 2),
    "LoRA, a padded batch": (NAFLEX, lora("qkv"), ("a linear layer of",)),
    "a hook on a projection": (CLIP, hook("encoder.layers.0.self_attn.q_proj"), ()),
    "a wrapped projection, BEiT": (BEIT, at("blocks.0.attn.proj", Wrapped), ()),
    "LoRA, a padded batch with rope": ("NaFlexViT with rope", lora("fc1"), ("a linear layer of", *(LORA,) * 2)),
    "a wrapped layer, EVA-02": (EVA, at("blocks.0.mlp.fc1_g", nn.Sequential), (SEQUENTIAL,)),
    "a wrapped layer, BEiT": (BEIT, at("blocks.0.mlp.fc1", nn.Sequential), (SEQUENTIAL,)),
    "a wrapped layer, DINOv3": (DINOV3, at("model.layer.0.mlp.up_proj", nn.Sequential), (SEQUENTIAL,)),
    "a wrapped layer, CLIP": (CLIP, at("encoder.layers.0.mlp.fc1", nn.Sequential), (SEQUENTIAL,)),
    "a wrapped layer, nn.Transformer": (ENCODER, at("layers.0.linear1", nn.Sequential), (SEQUENTIAL,)),
    "a wrapped layer in a head": ("timm SigLIP", at("attn_pool.mlp.fc1", nn.Sequential), ("learned", SEQUENTIAL)),
    "a hook, EVA-02": (EVA, hook(FIRST), (HOOKS,)),
    "a hook, BEiT": (BEIT, hook(FIRST), (HOOKS,)),
    "a hook, DINOv3": (DINOV3, hook("model.layer.0.attention"), (HOOKS,)),
    "a hook, CLIP": (CLIP, hook("encoder.layers.0.self_attn"), (HOOKS,)),
    "a hook, nn.Transformer": (ENCODER, hook("layers.0.self_attn"), (HOOKS,)),
    "weight norm": ("timm", at("blocks.0.mlp.fc1", weight_norm), ("ParametrizedLinear",)),
    "weight norm, torchvision": ("torchvision", at(TV, weight_norm), ("ParametrizedLinear",)),
    "weight norm of a leaf": ("timm", at("patch_embed.proj", weight_norm), ("parametrised",)),
    "the old weight norm": ("timm", at("blocks.0.mlp.fc1", nn.utils.weight_norm), (HOOKS,)),
    "a forward of its own": ("timm", own_forward("blocks.0.mlp"), ("set on the instance",)),
    "another scale": ("timm", set_to(f"{FIRST}.fused_attn", False, f"{FIRST}.scale", 1.0), ("1 / sqrt",)),
    "a norm without weights": ("timm", at("blocks.0.norm1", plain_norm), (NORM,)),
    "a last norm without weights": ("timm", at("norm", plain_norm), ("was not called",)),
    "a norm without a bias": ("timm", at("blocks.0.norm1", lambda _: nn.LayerNorm(32, bias=False)), ()),
    "timm's fast norms": ("timm", set_to("blocks.0.norm1._fast_norm", True, "norm._fast_norm", True), FAST),
    "another kind of MLP": ("timm", at("blocks.0.mlp", lambda _: nn.Linear(32, 32)), ("mlp is torch.nn.modules",)),
    "a convolution of no patches": ("timm", at("patch_embed.proj", lambda _: nn.Conv2d(3, 32, 7, 8)), ("not a patch",)),
    "a layer scale of one number": ("timm ViT", set_to("blocks.0.ls1.gamma", torch.tensor(0.3)), (SCALE,)),
    "a layer scale of one channel": ("timm ViT", set_to("blocks.0.ls1.gamma", torch.tensor([0.3])), (SCALE,)),
    "a bias beside EVA-02's": (EVA, own_bias("q_proj"), ()),
    "a bias beside BEiT's": (BEIT, own_bias("qkv"), ("attn.qkv has a bias beside q_bias",)),
    "a bias in place of BEiT's": (BEIT, no_biases_beside, ("attn.qkv has a bias beside q_bias",)),
    "one layer beside three": (EVA, one_beside_three, ()),
    "a layer behind an MLP": ("torchvision", lengthened("append", nn.Linear(32, 32)), (OTHERS,)),
    "a layer in an MLP": ("torchvision", lengthened("insert", 3, nn.LayerNorm(64)), (OTHERS,)),
}


def made(name: str) -> tuple[nn.Module, dict]:
    if name in MAKERS:
        return MAKERS[name](), {"pixel_values" if name == "Hugging Face" else "x": IMAGES}
    if name == "NaFlexViT with rope":
        return naflexvit(class_token=True, rope_type="mixed")(), NAMED[NAFLEX].batch()
    return family(name).make(), NAMED[name].batch()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_have_the_librarys_numbers(name):
    start, change, words = CHANGES[name]
    base, batch = made(start)
    randomize(base)
    changed = []
    for each in (vitfast.accelerate(copy.deepcopy(base)), copy.deepcopy(base), base):
        torch.manual_seed(5)
        new = change(each)
        changed.append(new if isinstance(new, nn.Module) else each)
    model, original, before = changed
    assert_same(model, original, batch)
    assert len(left(model)) == len(words) and all(word in why for word, why in zip(words, left(model))), report(model)
    assert calls(model, **batch) == claimed(model) or "on the patches" in name, report(model)
    before_a_call = left(vitfast.accelerate(before))
    assert_same(before, original, batch)
    assert left(before) == before_a_call and not any("was not called" in why for why in before_a_call)


def test_a_parametrised_leaf_is_restored():
    model = vitfast.restore(vitfast.accelerate(timm_vit()))
    at("patch_embed.proj", weight_norm)(vitfast.accelerate(model))
    assert running(model) == ALL_PARTS - 1
    vitfast.restore(model)
    assert type(model.patch_embed.proj).__bases__ == (nn.Conv2d,)
    nn.utils.parametrize.remove_parametrizations(model.patch_embed.proj, "weight")
    assert type(model.patch_embed.proj) is nn.Conv2d


@pytest.mark.parametrize("name", ["patch_embed.proj", "blocks.0.attn.proj", "blocks.0.mlp.fc1"])
@pytest.mark.parametrize("accelerated_first", [False, True])
def test_a_spectral_norm_takes_the_librarys_steps(name, accelerated_first):
    """In training, each look at its weight takes a step of the power iteration."""
    theirs, ours = timm_vit().train(), timm_vit().train()
    ours.load_state_dict(theirs.state_dict())
    if accelerated_first:
        vitfast.accelerate(ours)
    for model in (theirs, ours):
        torch.manual_seed(5)
        nn.utils.parametrizations.spectral_norm(model.get_submodule(name))
    vitfast.accelerate(ours)
    assert_same(ours, theirs, dict(x=IMAGES))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), atol=1e-6, rtol=1e-6)


def test_every_kind_of_hook_is_called():
    model, original = pair(timm_vit())
    logs, handles = [], []
    for each in (model, original):
        log, block = [], each.blocks[1]
        logs.append(log)
        handles += [
            block.attn.attn_drop.register_forward_hook(lambda m, i, out, log=log: log.append(("dropout", out.shape))),
            block.attn.register_forward_pre_hook(lambda m, i, log=log: log.append(("attention", i[0].shape))),
            block.mlp.fc1.register_full_backward_hook(lambda m, gi, go, log=log: log.append(("fc1", go[0].shape))),
            block.register_forward_hook(lambda m, i, out, log=log: log.append(("block", out.shape))),
            each.patch_embed.proj.register_forward_hook(lambda m, i, out, log=log: log.append(("patches", out.shape))),
            each.norm.register_forward_hook(lambda m, i, out, log=log: 2 * out),
        ]
    assert running(model) == ALL_PARTS - 2
    assert_same(model, original, dict(x=IMAGES))
    assert logs[0] == logs[1] and {kind for kind, _ in logs[0]} == {"attention", "fc1", "block", "patches"}
    for handle in handles:
        handle.remove()
    assert running(model) == ALL_PARTS


def test_global_hooks_see_every_module():
    counts = []
    for model in pair(hf_vit()):
        seen = []
        with torch_module.register_module_forward_hook(lambda m, i, o, seen=seen: seen.append(type(m).__name__)):
            model(IMAGES)
        counts.append(seen)
    assert counts[0] == counts[1] and counts[0].count("Linear") == 13


@pytest.mark.parametrize("make", [timm_vit, hf_vit])
def test_a_forward_that_was_put_back(make):
    """transformers 5.0 records by a forward on the instance, and puts the bound one of the class there afterwards."""
    model, original = (each.eval() for each in pair(make()))
    expected = tensor(original(IMAGES))

    def put_back():
        for module in model.modules():
            module.forward = module.forward

    for step in (put_back, partial(vitfast.restore, model), put_back, partial(vitfast.accelerate, model), put_back):
        step()
        assert_close(tensor(model(IMAGES)), expected, atol=1e-5)
    assert calls(model, IMAGES) == claimed(model) and not left(model), report(model)


def test_a_forward_that_is_another_is_kept():
    model, x = timm_vit(), torch.randn(2, 5, 32)
    for block in model.blocks:
        block.forward = lambda x, **given: 2 * x
        vitfast.accelerate(model)
        assert type(block) is Block and any("has a forward of its own" in why for why in left(model))
        del block.forward
        vitfast.accelerate(model)
        block.forward = lambda x, **given: 2 * x
        vitfast.restore(model)
        assert torch.equal(block(x), 2 * x) and type(block) is Block


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per")
@pytest.mark.parametrize("name", [EVA, "timm AIMv2", CLIP])
def test_quantised_linear_layers_are_called(name):
    model, original = pair(family(name).make())
    batch = NAMED[name].batch()
    quantised = [
        torch.ao.quantization.quantize_dynamic(m.eval(), {nn.Linear}, dtype=torch.qint8) for m in (model, original)
    ]
    parts = {entry.part.partition(", around ")[0] for entry in report(quantised[0]).replaced}
    assert parts == {"patch projection", "norm", "attention block"}
    assert not left(model)
    assert_close(*(outputs(each, batch)[0] for each in quantised), atol=1e-6)


def test_weights_of_a_class_of_their_own():
    class Marked(torch.Tensor):
        pass

    model, original = pair(timm_vit())
    fc1 = model.blocks[0].mlp.fc1
    fc1.weight = nn.Parameter(fc1.weight.detach().as_subclass(Marked))
    assert len(left(model)) == 1 and "Marked" in left(model)[0]
    assert_close(model(IMAGES).as_subclass(torch.Tensor), original(IMAGES), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_records_the_librarys_code():
    model, original = pair(timm_vit())
    traced = torch.jit.trace(model.eval(), IMAGES)
    assert_close(traced(IMAGES), original.eval()(IMAGES), atol=1e-5)
    assert calls(model, IMAGES) == claimed(model), "afterwards the operations"
    with pytest.raises(NotImplementedError, match="torch.jit.trace cannot record it; torch.export.export"):
        torch.jit.trace(vitfast.ViT(32, 16, embed_dim=32, num_heads=2, depth=1), torch.randn(1, 3, 32, 32))


def test_changing_the_model_afterwards():
    model, original = pair(timm_vit(global_pool="avg"))
    for each in (model, original):
        torch.manual_seed(3)
        each.reset_classifier(7)
        each.set_input_size(img_size=(24, 32), patch_size=(4, 4))
    assert_same(model, original, dict(x=torch.randn(2, 3, 24, 32)))
    (entry,) = report(model).left
    assert (entry.name, entry.why) == ("patch_embed.proj", "vitfast.accelerate(model) was not called")
    assert not left(vitfast.accelerate(model))
    with torch.device("meta"):
        assert running(vitfast.accelerate(timm_vit())) == ALL_PARTS
