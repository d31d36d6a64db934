"""LoRA on q and v, the commonest: attention itself runs as an operation around peft's layers, before and after peft."""

import copy

import pytest
import timm
import torch
import transformers
from adapter_models import report, tensor
from checks import randomize

import vitfast
from vitfast.ops._dispatch import counting

peft = pytest.importorskip("peft")
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
SIZES |= dict(image_size=32, patch_size=8)
FAMILIES = {
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, num_labels=5)),
    "DINOv2": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(**{name: size for name, size in SIZES.items() if name != "intermediate_size"})
    ),
    "DINOv3": lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**SIZES, pos_embed_rescale=None)),
    "CLIP": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES)),
    "SigLIP": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIZES, vision_use_head=False)),
    "YOLOS": lambda: transformers.YolosModel(transformers.YolosConfig(**SIZES | dict(image_size=[32, 32]))),
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2),
    "EVA-02": lambda: timm.create_model(
        "eva02_tiny_patch14_224", img_size=28, depth=2, embed_dim=32, num_heads=2, qkv_fused=False
    ),
}
PAIRS = ({"q_proj", "v_proj"}, {"query", "value"}, {"qkv"})  # what each family calls them


def lora(model: torch.nn.Module, **options) -> torch.nn.Module:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = next(pair for pair in PAIRS if pair <= names)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=sorted(targets), init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def images(name: str, dtype: torch.dtype) -> torch.Tensor:
    side = 28 if name == "EVA-02" else 32
    return torch.randn(2, 3, side, side, dtype=dtype, generator=torch.Generator().manual_seed(3))


def trained(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output, and the gradients of all that learns."""
    y = tensor(model(x))
    y.mul(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return y, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("order", ["peft first", "accelerate first"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_peft_alone(name, dtype, order):
    base = randomize(FAMILIES[name]()).to(dtype).train()
    truth = lora(copy.deepcopy(base))
    model = vitfast.accelerate(lora(base)) if order == "peft first" else lora(vitfast.accelerate(base))
    expected, gradients = trained(truth, images(name, dtype))
    with counting() as ran:
        output, ours = trained(model, images(name, dtype))
    assert ran["attention"] == 2 and "attention_block" not in ran  # one for each layer
    entries = [entry for entry in report(model) if entry.part.startswith("attention block")]
    assert len(entries) == 2 and all(entry.why is None and "v" in entry.part for entry in entries), report(model)
    tol = dict(atol=1e-10, rtol=1e-9) if dtype == torch.float64 else dict(atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(output, expected, **tol)
    assert ours.keys() == gradients.keys() and any("lora_A" in each for each in ours)
    for each, gradient in gradients.items():
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(ours[each] / scale, gradient / scale, **tol, msg=each)


DROPPING = {
    "CLIP": FAMILIES["CLIP"],
    "BEiT with drop path": lambda: transformers.BeitModel(transformers.BeitConfig(**SIZES, drop_path_rate=0.5)),
    "timm with drop path": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2, drop_path_rate=0.5
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_lora_draws_its_dropout_as_without_accelerate(name):
    base = randomize(DROPPING[name]()).train()
    truth = lora(copy.deepcopy(base), lora_dropout=0.5)
    model = lora(vitfast.accelerate(base), lora_dropout=0.5)
    outputs = []
    for each in (model, truth):
        torch.manual_seed(7)
        with counting() as ran:
            outputs.append(tensor(each(images(name, torch.float32))))
        assert (ran["attention"] == 2) == (each is model)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    torch.manual_seed(8)
    assert not torch.allclose(tensor(model(images(name, torch.float32))), outputs[0], atol=1e-3)


@pytest.mark.parametrize("in_fp32", [None, True, False])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "v_proj", "out_proj"]], ids=len)
def test_under_autocast(targets, in_fp32):
    base = randomize(FAMILIES["CLIP"]()).eval()
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(1)
    truth = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(1)
    model = peft.get_peft_model(vitfast.accelerate(base, residual_in_fp32=in_fp32), config)
    exact = tensor(truth(images("CLIP", torch.float32)))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (tensor(each(images("CLIP", torch.float32))) for each in (model, truth))
    assert ours.dtype == theirs.dtype or in_fp32 is not None
    error, allowed = ((each - exact).abs().max() for each in (ours, theirs))
    assert error <= 2 * allowed + 1e-2


@pytest.mark.slow
def test_compiled_code_has_the_same_numbers():
    model = lora(vitfast.accelerate(randomize(FAMILIES["ViT"]()))).eval()
    x = images("ViT", torch.float32)
    torch.testing.assert_close(tensor(torch.compile(model)(x)), tensor(model(x)), atol=1e-5, rtol=1e-4)


def test_adapters_are_switched_off_and_merged():
    base = randomize(FAMILIES["ViT"]()).eval()
    x = images("ViT", torch.float32)
    plain, model = tensor(copy.deepcopy(base)(x)), lora(vitfast.accelerate(base)).eval()
    adapted = tensor(model(x))
    assert (adapted - plain).abs().max() > 1e-2
    with model.disable_adapter():
        torch.testing.assert_close(tensor(model(x)), plain, atol=1e-5, rtol=1e-4)
    merged = model.merge_and_unload()
    with counting() as ran:
        torch.testing.assert_close(tensor(merged(x)), adapted, atol=1e-4, rtol=1e-3)
    assert ran["attention_block"] == 2
