"""LoRA, pruning, hooks, replaced layers: what is done to a layer of a ViT counts, as in timm's; the report says so."""

import pytest
import timm
import torch
from checks import randomize
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from vitfast import ViT, acceleration_report

SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3)
IMAGES = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LINEARS = ("blocks.0.attn.qkv", "blocks.1.attn.proj", "blocks.0.mlp.fc1", "blocks.1.mlp.fc2")
NORMS = ("blocks.0.norm1", "blocks.1.norm2")
PROJECTION = "patch_embed.proj"


@pytest.fixture
def twins():
    torch.manual_seed(0)
    ours, theirs = randomize(ViT(**SMALL), std=0.3), timm.create_model("vit_tiny_patch16_224", **SMALL)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def replace(model: nn.Module, name: str, make) -> None:
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, last, make(getattr(owner, last)))


def assert_alike(ours, theirs) -> dict[str, torch.Tensor]:
    """Equal logits and gradients, and equal logits after a step along them. Returns our gradients."""
    found = []
    for model in (ours, theirs):
        model.zero_grad()
        out = model(IMAGES)
        (out * torch.arange(6.0).reshape(2, 3)).sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        found.append((out.detach(), grads, model(IMAGES).detach()))
    (out, grads, later), (truth, true_grads, true_later) = found
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)
    assert grads.keys() == true_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, true_grads[name], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(later, true_later, atol=1e-4, rtol=1e-4)
    return grads


class LoRA(nn.Module):
    """As peft's: the layer itself frozen, and a product of low rank beside it."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, layer.in_features, generator=generator))
        self.lora_B = nn.Parameter(torch.randn(layer.out_features, 2, generator=generator))

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x):
        return self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T


class Skip(nn.Module):
    def forward(self, x, **_):
        return x


class Louder(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def louder(layer: nn.Linear) -> nn.Linear:
    made = Louder(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    return made


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


CHANGES = {
    "LoRA": (LoRA, LINEARS),
    "a class of its own": (louder, LINEARS),
    "two layers": (lambda layer: nn.Sequential(layer, nn.Tanh()), (*LINEARS, *NORMS)),
    "pruning": (pruned, (*LINEARS, *NORMS, PROJECTION)),
    "old weight norm": (weight_norm, (*LINEARS, PROJECTION)),
    "weight norm": (parametrizations.weight_norm, (*LINEARS, PROJECTION)),
    "RMSNorm": (lambda norm: nn.RMSNorm(32), NORMS),
    "none": (lambda layer: Skip(), ("blocks.0.attn", "blocks.1.mlp", *NORMS)),
}


@pytest.mark.quick(16)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("change, name", [(kind, name) for kind, (_, names) in CHANGES.items() for name in names])
def test_what_is_put_into_a_layer_runs(twins, change, name):
    ours, theirs = twins
    before = ours(IMAGES).detach()
    for model in twins:
        replace(model, name, CHANGES[change][0])
    first = assert_alike(ours, theirs)
    assert all(first[name].abs().max() > 0 for name in first if "lora" in name)
    assert "weight norm" in change or (ours(IMAGES).detach() - before).abs().max() > 1e-4
    last = name.rpartition(".")[2]
    assert any(last in entry.why for entry in acceleration_report(ours).left)


@pytest.mark.parametrize("name", [*LINEARS, *NORMS, PROJECTION, "blocks.0.attn", "blocks.1.mlp", "blocks.0", "norm"])
def test_hooks_fire_with_what_passes(twins, name):
    """Once each, with timm's inputs and outputs, and what they return counts; nothing is left once they are gone."""
    seen, before = [], twins[0](IMAGES).detach()
    for model in twins:
        module, calls = model.get_submodule(name), []

        def forward(module, args, output, calls=calls):
            calls.append(("forward", args[0].detach().clone(), output.detach().clone()))
            return output * 1.5

        handles = [
            module.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(("before", args[0]))),
            module.register_forward_hook(forward),
            module.register_full_backward_hook(
                lambda module, into, out, calls=calls: calls.append(("backward", out[0]))
            ),
        ]
        model(IMAGES).square().sum().backward()
        for handle in handles:
            handle.remove()
        seen.append(calls)
    ours, theirs = seen
    assert [kind for kind, *_ in ours] == ["before", "forward", "backward"] == [kind for kind, *_ in theirs]
    for (_, *mine), (_, *truth) in zip(ours, theirs):
        torch.testing.assert_close(mine, truth, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(twins[0](IMAGES), before)
    assert not acceleration_report(twins[0]).left


def test_a_hook_on_the_last_dropout_of_a_gated_mlp_leaves_it_fused():
    seen, mlp = [], ViT(**SMALL, swiglu_mlp=True).blocks[0].mlp
    mlp.drop2.register_forward_hook(lambda *_: seen.append(1))
    mlp(torch.rand(2, 4, 32))
    assert seen == [1] and mlp.unsupported_reason() is None


def test_with_an_fp32_residual_stream(twins):
    """In 16 bits, whose norms see the stream in fp32."""
    model, seen = ViT(**SMALL, residual_in_fp32=True).bfloat16(), []
    model.load_state_dict(twins[0].state_dict())
    plain = model(IMAGES)
    for name in ("blocks.1.norm1", *LINEARS):
        model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append((module, args[0].dtype)))
    torch.testing.assert_close(model(IMAGES), plain, atol=0.05, rtol=0.05)
    assert len(seen) == 5 and (model.blocks[1].norm1, torch.float32) in seen


@pytest.mark.long
def test_compiled_models_see_what_was_there(twins):
    ours, theirs = twins
    for model in twins:
        replace(model, "blocks.0.mlp.fc1", LoRA)
        pruned(model.blocks[1].attn.qkv)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IMAGES), theirs(IMAGES), atol=1e-5, rtol=1e-5)
    for model in twins:  # after it: the types of layers are looked at in each call
        replace(model, "blocks.1.mlp.fc2", louder)
    torch.testing.assert_close(compiled(IMAGES), theirs(IMAGES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", ["hook", "wrapper", "old weight norm"])
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_changed_projection_in_fx_and_with_an_fp32_stream(twins, change, in_fp32):
    model = ViT(**SMALL, residual_in_fp32=in_fp32)
    model.load_state_dict(twins[0].state_dict())
    if change == "hook":
        model.patch_embed.proj.register_forward_hook(lambda module, args, out: 2 * out)
    else:
        replace(model, PROJECTION, nn.Sequential if change == "wrapper" else weight_norm)
    out = model(IMAGES)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(IMAGES), out)
    if change != "hook":
        torch.testing.assert_close(out, twins[1](IMAGES), atol=1e-5, rtol=1e-5)
    raw = (IMAGES * 255).to(torch.uint8)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(raw), model(raw))
    model.reset_classifier(2)
    assert model(IMAGES).shape == (2, 2)
