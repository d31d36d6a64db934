"""LoRA: in training, under autocast, compiled, switched off. Numbers of each family: test_changed_models.py."""

import copy

import pytest
import torch
from adapter_models import IMAGES, Q_AND_V, hf_vit, lora, tensor, timm_vit
from checks import gradients, randomize

import vitfast
from vitfast.adapters.families import hugging_face_model
from vitfast.ops._dispatch import counting

clip = hugging_face_model("CLIPVisionModel")
DROPPING = {
    "CLIP": clip,
    "BEiT with drop path": hugging_face_model("BeitModel", drop_path_rate=0.5),
    "timm with drop path": lambda: timm_vit(drop_path_rate=0.5),
}


@pytest.mark.parametrize("name", DROPPING)
def test_it_draws_its_dropout_as_without_accelerate(name):
    base, wrapped = randomize(DROPPING[name]()).train(), lora(*Q_AND_V, "qkv", lora_dropout=0.5)
    truth = wrapped(copy.deepcopy(base))
    model = wrapped(vitfast.accelerate(base))
    outputs = []
    for each in (model, truth):
        torch.manual_seed(7)
        with counting() as ran:
            outputs.append(tensor(each(IMAGES)))
        assert (ran["attention"] == 2) == (each is model)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    torch.manual_seed(8)
    assert not torch.allclose(tensor(model(IMAGES)), outputs[0], atol=1e-3)


def test_outputs_and_gradients_in_double_precision():
    base, images, wrapped = randomize(clip()).double(), IMAGES.double(), lora("q_proj", "v_proj", "out_proj")
    truth, model = wrapped(copy.deepcopy(base)), wrapped(vitfast.accelerate(base))
    expected, output = tensor(truth(images)), tensor(model(images))
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=1e-9)
    upstream = torch.randn_like(expected)
    wanted, found = gradients(truth, expected, upstream), gradients(model, output, upstream)
    assert any("lora_A" in name for name in wanted)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("in_fp32", [None, True, False])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "v_proj", "out_proj"]], ids=len)
def test_under_autocast(targets, in_fp32):
    base = randomize(clip()).eval()
    truth = lora(*targets)(copy.deepcopy(base))
    model = lora(*targets)(vitfast.accelerate(base, residual_in_fp32=in_fp32))
    exact = tensor(truth(IMAGES))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (tensor(each(IMAGES)) for each in (model, truth))
    assert ours.dtype == theirs.dtype or in_fp32 is not None
    error, allowed = ((each - exact).abs().max() for each in (ours, theirs))
    assert error <= 2 * allowed + 1e-2


@pytest.mark.slow
def test_compiled_code_has_the_same_numbers():
    model = lora(*Q_AND_V)(vitfast.accelerate(randomize(hf_vit()))).eval()
    torch.testing.assert_close(tensor(torch.compile(model)(IMAGES)), tensor(model(IMAGES)), atol=1e-5, rtol=1e-4)


def test_adapters_are_switched_off_and_merged():
    base = randomize(hf_vit()).eval()
    plain, model = tensor(copy.deepcopy(base)(IMAGES)), lora(*Q_AND_V)(vitfast.accelerate(base)).eval()
    adapted = tensor(model(IMAGES))
    assert (adapted - plain).abs().max() > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(tensor(model(IMAGES)), plain, atol=1e-5, rtol=1e-4)
    merged = model.merge_and_unload()
    with counting() as ran:
        torch.testing.assert_close(tensor(merged(IMAGES)), adapted, atol=1e-4, rtol=1e-3)
    assert ran["attention_block"] == 2
