"""`model.set_attn_implementation("vitfast")`: transformers' own registry, the lighter way."""

import copy
import importlib
import sys
from collections import Counter

import pytest
import torch
import transformers
from adapter_models import IMAGES, NAMED, TEXT, assert_same, calls, causal_text, claimed, hf_vit, left, report, swin
from checks import assert_close, randomize
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import vitfast
from vitfast import ops
from vitfast.adapters import fallback_log
from vitfast.adapters.attention_interface import vitfast_attention_forward
from vitfast.kernels.launch import launches_made

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]])


def with_attention(model: nn.Module) -> nn.Module:
    model.set_attn_implementation("vitfast")
    return model


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
def test_equals_sdpa_on_kernels():
    original = randomize(hf_vit())
    model, before = with_attention(copy.deepcopy(original)), launches_made()
    with ops.use_kernels("on"):
        assert_same(model, original, dict(pixel_values=IMAGES), atol=1e-5)
    assert launches_made() - before >= 6, "one forward and two backward kernels a layer"
    assert not left(vitfast.accelerate(model)), "both ways together"
    assert_same(model, original, dict(pixel_values=IMAGES), atol=1e-5)


@pytest.mark.parametrize("name", ["transformers CLIP", "transformers DINOv2", "transformers SigLIP"])
def test_any_model_of_the_registry(name):
    original, batch = randomize(NAMED[name].make()), NAMED[name].batch()
    model = with_attention(copy.deepcopy(original))
    assert model.config._attn_implementation == "vitfast"
    assert_same(model, original, batch)
    assert calls(model, **batch) == claimed(model) == {"attention": 2}
    assert all("was not called" in why or "one learned query" in why for why in left(model)), report(model)


def test_it_can_be_in_the_config_and_takes_masks_and_dropout():
    model = randomize(hf_vit(attn_implementation="vitfast", attention_probs_dropout_prob=0.3))
    assert calls(model.eval(), IMAGES, attention_mask=MASK) == {"attention": 2}
    original = copy.deepcopy(model.train())
    original.set_attn_implementation("sdpa")
    for batch in (dict(attention_mask=MASK), {}):
        assert_same(model, original, dict(pixel_values=IMAGES, **batch))
    assert_same(model.eval(), original.eval(), dict(pixel_values=IMAGES, attention_mask=MASK))


CASES = {
    "plain": {},
    "mask": dict(attention_mask=torch.rand(2, 1, 5, 5) > 0.5),
    "float mask": dict(attention_mask=torch.randn(2, 1, 5, 5)),
    "dropout": dict(dropout=0.5),
    "causal": dict(is_causal=True),
    "scale": dict(scaling=0.7),
    "causal module": {},
    "fewer keys": {},
    "longer keys": {},
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_does_not_do_is_sdpas(case):
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    module, arguments = nn.Module(), dict(attention_mask=None, dropout=0.0, scaling=None) | CASES[case]
    module.is_causal, module.num_key_value_groups = case == "causal module", 1
    if case == "fewer keys":
        k, v, module.num_key_value_groups = k[:, :2], v[:, :2], 2
    if case == "longer keys":
        k, v = torch.randn(2, 2, 4, 7, 8)
    outs = []
    for attention in (vitfast_attention_forward, sdpa_attention_forward):
        torch.manual_seed(0)
        outs.append(attention(module, q, k, v, **arguments)[0])
    assert_close(*outs, atol=1e-6)


def test_the_report_knows_dropout_before_the_first_call():
    model = with_attention(hf_vit(attention_probs_dropout_prob=0.1)).train()
    parts = [entry for entry in report(model) if "set_attn_implementation" in entry.part]
    assert len(parts) == 2 and all(entry.why == fallback_log.DROPOUT for entry in parts)
    assert calls(model, IMAGES) == claimed(model) == {}
    assert calls(model.eval(), IMAGES) == claimed(model) == {"attention": 2}


def test_causal_attention_is_known_by_the_last_call():
    model = with_attention(causal_text())
    assert calls(model, torch.tensor([[1, 2, 3, 98]])) == claimed(model) == {}
    assert ["causal" in why for why in left(model)] == [False, True, False, True, False]
    llama = vitfast.accelerate(transformers.LlamaModel(transformers.LlamaConfig(**TEXT)))
    assert llama.config._attn_implementation == "sdpa", "of a decoder it is not set"


def test_attention_is_set_where_layers_stay_transformers_own():
    """And put back; what the user has chosen stays, and the report says what can be done."""
    for chosen in ("sdpa", "eager"):
        model = swin(chosen)
        state = list(model.state_dict()), model.config.to_dict()
        vitfast.accelerate(model)
        if chosen == "sdpa":
            assert model.config._attn_implementation == "vitfast" and not left(model)
            assert calls(model, IMAGES) == claimed(model) == {"attention": 2}
        else:
            assert model.config._attn_implementation == "eager" and not calls(model, IMAGES)
            assert '; model.set_attn_implementation("vitfast") runs its attention' in str(report(model))
        vitfast.restore(model)
        assert model.config._attn_implementation == chosen and not calls(model, IMAGES)
        assert (list(model.state_dict()), model.config.to_dict()) == state
    model = swin("sdpa")
    other = type(model)(model.config).eval()
    vitfast.accelerate(model)
    assert other.config._attn_implementation == "sdpa" and not calls(other, IMAGES), "of the same config"
    vitfast.restore(vitfast.accelerate(other))
    assert model.config._attn_implementation == "vitfast" and calls(model, IMAGES) == Counter(attention=2)
    model.set_attn_implementation("eager")
    assert vitfast.restore(model).config._attn_implementation == "eager", "the last choice is the user's"
    assert other.config._attn_implementation == "sdpa" and not calls(other, IMAGES)


def test_import_vitfast_after_transformers_is_enough(monkeypatch):
    """vitfast imports the adapters, which register it, and import none of the other libraries."""
    mappings = transformers.AttentionInterface._global_mapping, transformers.AttentionMaskInterface._global_mapping
    for mapping in mappings:
        monkeypatch.delitem(mapping, "vitfast")
    for name in [name for name in sys.modules if name.startswith("vitfast.adapters")]:
        monkeypatch.delitem(sys.modules, name)
    for library in ("timm", "torchvision", "open_clip"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(vitfast, "adapters", vitfast.adapters)
    importlib.import_module("vitfast.adapters")
    assert all("vitfast" in mapping for mapping in mappings)
