"""`model.set_attn_implementation("vitfast")`: the attention operation in transformers' own registry."""

import copy
import importlib
import logging
import sys

import pytest
import torch
from checks import assert_close, randomize
from torch import nn
from vision_families import FAMILIES, hugging_face_model

import vitfast
from vitfast import ops
from vitfast.kernels.launch import launches_made
from vitfast.ops.dispatch import counting

transformers = pytest.importorskip("transformers")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

import vitfast.adapters.attention_interface as interface  # noqa: E402

IMAGES = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16).sin()
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]])
TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)


@pytest.fixture(autouse=True)
def log_starts_anew():
    interface._said.clear()


def hf_vit(**options) -> nn.Module:
    return randomize(hugging_face_model("ViTForImageClassification", num_labels=5, **options)()).eval()


def with_attention(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.set_attn_implementation("vitfast")
    return model


def calls(model: nn.Module, *args, **kwargs) -> dict:
    with counting() as seen, torch.no_grad():
        model(*args, **kwargs)
    return dict(seen)


def assert_same(ours: nn.Module, theirs: nn.Module, batch: dict, atol: float = 2e-5) -> None:
    """The first output, and gradients of all parameters, like those of the library's code in float64."""
    found = []
    for model in (ours, copy.deepcopy(theirs).double()):
        dtype = next(model.parameters()).dtype
        torch.manual_seed(1)
        out = model(**{n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()})[0]
        upstream = torch.randn(out.shape, generator=torch.manual_seed(2)).to(dtype)
        grads = torch.autograd.grad(out, list(model.parameters()), upstream, allow_unused=True)
        found.append([out, *grads])
    for own, truth in zip(*found, strict=True):
        assert (own is None) == (truth is None)
        if truth is not None:
            assert_close(own.double(), truth, atol=atol, rtol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests")
def test_equals_sdpa_on_kernels():
    original = hf_vit()
    model, before = with_attention(original), launches_made()
    with ops.use_kernels("on"):
        assert_same(model, original, dict(pixel_values=IMAGES))
    assert launches_made() - before >= 6, "one forward and two backward kernels a layer"
    assert_same(vitfast.accelerate(model), original, dict(pixel_values=IMAGES))


@pytest.mark.parametrize("name", ["CLIP", "DINOv2", "SigLIP"])
def test_any_model_of_the_registry(name):
    found = next(each for each in FAMILIES if (each.library, each.name) == ("transformers", name))
    original, batch = randomize(found.make()).eval(), found.batch()
    model = with_attention(original)
    assert model.config._attn_implementation == "vitfast"
    assert_same(model, original, batch)
    assert calls(model, **batch) == {"attention": 2}


def test_it_can_be_in_the_config_and_takes_masks_and_dropout(caplog):
    model = hf_vit(attn_implementation="vitfast", attention_probs_dropout_prob=0.3)
    original = copy.deepcopy(model)
    original.set_attn_implementation("sdpa")
    batch = dict(pixel_values=IMAGES, attention_mask=MASK)
    assert calls(model, **batch) == {"attention": 2}
    assert_same(model, original, batch)
    with caplog.at_level(logging.WARNING, "vitfast"):
        for _ in range(2):
            outs = []
            for each in (model.train(), original.train()):
                torch.manual_seed(0)
                outs.append(each(**batch)[0])
            assert_close(*outs, atol=1e-6)
    said = [r.message for r in caplog.records if "transformers' sdpa runs" in r.message]
    assert len(said) == 1 and "attention dropout is active in training" in said[0], "once"


CASES = {
    "plain": {},
    "mask": dict(attention_mask=torch.rand(2, 1, 5, 5, generator=torch.manual_seed(4)) > 0.5),
    "key mask": dict(attention_mask=torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:, None, None].bool()),
    "float mask": dict(attention_mask=torch.randn(2, 1, 5, 5)),
    "mask of heads": dict(attention_mask=torch.randn(1, 4, 5, 5)),
    "smallest numbers": dict(attention_mask=torch.zeros(2, 1, 5, 5).index_fill(3, torch.tensor([4]), -3.4e38)),
    "scale": dict(scaling=0.7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_masks_and_scales(case, dtype):
    module, arguments = nn.Module(), dict(attention_mask=None, dropout=0.0, scaling=None) | CASES[case]
    module.is_causal, module.num_key_value_groups = False, 1
    if case == "mask":
        arguments["attention_mask"][..., 0] = True  # every query sees a key
    found = []
    for attention, kind in ((interface.vitfast_attention_forward, dtype), (sdpa_attention_forward, torch.float64)):
        mask = arguments["attention_mask"]
        mask = mask.to(kind) if mask is not None and mask.is_floating_point() else mask
        q, k, v = (x.to(kind).requires_grad_() for x in torch.randn(3, 2, 4, 5, 16, generator=torch.manual_seed(3)))
        with counting() as seen:
            out, weights = attention(module, q, k, v, **arguments | dict(attention_mask=mask))
        assert weights is None and dict(seen) == ({} if attention is sdpa_attention_forward else {"attention": 1})
        upstream = torch.randn(out.shape, generator=torch.manual_seed(2)).to(kind)
        found.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
    for own, truth in zip(*found):
        assert_close(own.double(), truth, atol=2e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("case", ["dropout", "causal", "causal module", "fewer keys", "longer keys", "other arguments"])
def test_what_it_does_not_do_is_sdpas(case, caplog):
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    module, arguments = nn.Module(), dict(attention_mask=None, dropout=0.0, scaling=None)
    module.is_causal, module.num_key_value_groups = case == "causal module", 1
    if case == "fewer keys":
        k, v, module.num_key_value_groups = k[:, :2], v[:, :2], 2
    if case == "longer keys":
        k, v = torch.randn(2, 2, 4, 7, 8)
    arguments |= {"dropout": dict(dropout=0.5), "causal": dict(is_causal=True)}.get(case, {})
    if case == "other arguments":
        arguments["position_bias"] = torch.randn(1, 4, 5, 5)
    outs = []
    with caplog.at_level(logging.WARNING, "vitfast"), counting() as seen:
        for attention in (interface.vitfast_attention_forward, sdpa_attention_forward) * 2:
            torch.manual_seed(0)
            outs.append(attention(module, q, k, v, **arguments)[0])
    assert not seen and len([r for r in caplog.records if r.name == "vitfast"]) == 1, "once a reason"
    assert_close(outs[0], outs[1], atol=1e-6)


def test_causal_models_keep_sdpa():
    config = transformers.CLIPTextConfig(**TEXT, hidden_act="gelu", attn_implementation="sdpa")
    model = with_attention(transformers.CLIPTextModel(config).eval())
    assert calls(model, torch.tensor([[1, 2, 3, 98]])) == {}


def test_import_after_transformers_is_enough(monkeypatch):
    """vitfast.adapters registers it, and imports none of the other libraries."""
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
