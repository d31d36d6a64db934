"""`model.set_attn_implementation("vitfast")`: transformers' own registry, the lighter way."""

import os
import subprocess
import sys

import pytest
import torch
from adapter_models import hf_dinov2, hf_vit
from checks import assert_close, gradients, randomize
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import vitfast
from vitfast import ops
from vitfast.adapters.attention_interface import vitfast_attention_forward
from vitfast.kernels.launch import launches_made

IMAGES = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16).sin()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
def test_equals_sdpa():
    model = randomize(hf_vit())
    expected = model(IMAGES).logits
    upstream = torch.randn_like(expected)
    wanted = gradients(model, expected, upstream)
    model.set_attn_implementation("vitfast")
    before = launches_made()
    with ops.use_kernels("on"):
        out = model(IMAGES).logits
        mine = gradients(model, out, upstream)
    assert launches_made() - before >= 6, "one forward and two backward kernels a layer"
    assert_close(out, expected, atol=1e-5)
    for name, grad in wanted.items():
        assert_close(mine[name], grad, atol=1e-5, rtol=1e-5, name=name)
    assert not vitfast.acceleration_report(vitfast.accelerate(model)).left, "both ways together"
    assert_close(model(IMAGES).logits, expected, atol=1e-5)


def test_any_model_of_the_registry_and_from_the_config():
    config = CLIPVisionConfig(
        image_size=16, patch_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    for model in (randomize(CLIPVisionModel(config)).eval(), randomize(hf_dinov2("Dinov2Model")).eval()):
        expected = model(IMAGES).last_hidden_state
        model.set_attn_implementation("vitfast")
        assert model.config._attn_implementation == "vitfast"
        assert_close(model(IMAGES).last_hidden_state, expected, atol=1e-5)
    assert hf_vit(attn_implementation="vitfast").config._attn_implementation == "vitfast"


@pytest.mark.parametrize(
    "case", ["mask", "dropout", "causal", "causal module", "fewer keys", "longer keys", "float mask", "scale", "plain"]
)
def test_what_it_does_not_do_is_sdpas(case):
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    module, arguments = nn.Module(), dict(attention_mask=None, dropout=0.0, scaling=None)
    module.is_causal, module.num_key_value_groups = False, 1
    if case == "mask":
        arguments["attention_mask"] = torch.rand(2, 1, 5, 5) > 0.5
    elif case == "float mask":
        arguments["attention_mask"] = torch.randn(2, 1, 5, 5)
    elif case == "dropout":
        arguments["dropout"] = 0.5
    elif case == "causal":
        arguments["is_causal"] = True
    elif case == "causal module":
        module.is_causal = True
    elif case == "fewer keys":
        k, v, module.num_key_value_groups = k[:, :2], v[:, :2], 2
    elif case == "longer keys":
        k, v = torch.randn(2, 2, 4, 7, 8)
    elif case == "scale":
        arguments["scaling"] = 0.7
    torch.manual_seed(0)
    out, weights = vitfast_attention_forward(module, q, k, v, **arguments)
    torch.manual_seed(0)
    expected, _ = sdpa_attention_forward(module, q, k, v, **arguments)
    assert weights is None
    assert_close(out, expected, atol=1e-6)


def test_masks_and_dropout_in_a_model():
    model = randomize(hf_vit(attention_probs_dropout_prob=0.3)).train()
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]])
    results = {}
    for implementation in ("sdpa", "vitfast"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)
        results[implementation] = model(IMAGES, attention_mask=mask).logits, model(IMAGES).logits
    for mine, theirs in zip(results["vitfast"], results["sdpa"]):
        assert_close(mine, theirs, atol=1e-6)


SCRIPT = """
import sys
from transformers import ViTConfig, ViTForImageClassification
sizes = dict(image_size=16, patch_size=8, hidden_size=32, intermediate_size=64)
model = ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
import vitfast
model.set_attn_implementation("vitfast")
assert "timm" not in sys.modules
"""


def test_import_vitfast_after_transformers_is_enough():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
