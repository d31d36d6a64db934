"""`model.set_attn_implementation("vitfast")`: the attention operation in transformers' own registry."""

import copy
import importlib
import sys

import pytest
import torch
from adapter_models import IMAGES, assert_same, counted, counting, hf_vit, said
from checks import assert_close, outputs, randomize
from torch import nn

import vitfast
from vitfast import ops
from vitfast.kernels.launch import launches_made

transformers = pytest.importorskip("transformers")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

import vitfast.adapters.attention_interface as interface  # noqa: E402

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]])


@pytest.fixture(autouse=True)
def log_starts_anew():
    interface._said.clear()


def with_attention(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.set_attn_implementation("vitfast")
    return model


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests")
def test_equals_sdpa_on_kernels():
    original = randomize(hf_vit())
    model, before = with_attention(original), launches_made()
    with ops.use_kernels("on"):
        assert_same(model, original, dict(pixel_values=IMAGES))
    assert launches_made() - before >= 6, "one forward and two backward kernels a layer"
    assert_same(vitfast.accelerate(model), original, dict(pixel_values=IMAGES))


def test_it_can_be_in_the_config_and_takes_masks_and_dropout(caplog):
    model = randomize(hf_vit(attn_implementation="vitfast", attention_probs_dropout_prob=0.3)).eval()
    original = copy.deepcopy(model)
    original.set_attn_implementation("sdpa")
    batch = dict(pixel_values=IMAGES, attention_mask=MASK)
    assert counted(model, batch) == {"attention": 2}
    assert_same(model, original, batch)
    for _ in range(2):
        assert_close(*(outputs(each.train(), batch)[0] for each in (model, original)), atol=1e-6)
    (line,) = said(caplog)  # once
    assert "attention dropout is active in training; transformers' sdpa runs" in line


CASES = {
    "plain": {},
    "mask": dict(attention_mask=torch.rand(2, 1, 5, 5, generator=torch.manual_seed(4)) > 0.5),
    "key mask": dict(attention_mask=torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:, None, None].bool()),
    "float mask": dict(attention_mask=torch.randn(2, 1, 5, 5)),
    "mask of heads": dict(attention_mask=torch.randn(1, 4, 5, 5)),
    "smallest numbers": dict(attention_mask=torch.zeros(2, 1, 5, 5).index_fill(3, torch.tensor([4]), -3.4e38)),
    "scale": dict(scaling=0.7),
}


@pytest.mark.parametrize("case", CASES)
def test_masks_and_scales(case):
    module, arguments = nn.Module(), dict(attention_mask=None, dropout=0.0, scaling=None) | CASES[case]
    module.is_causal, module.num_key_value_groups = False, 1
    if case == "mask":
        arguments["attention_mask"][..., 0] = True  # every query sees a key
    found = []
    for attention, kind in (
        (interface.vitfast_attention_forward, torch.float32),
        (sdpa_attention_forward, torch.float64),
    ):
        mask = arguments["attention_mask"]
        mask = mask.to(kind) if mask is not None and mask.is_floating_point() else mask
        q, k, v = (x.to(kind).requires_grad_() for x in torch.randn(3, 2, 4, 5, 16, generator=torch.manual_seed(3)))
        with counting() as seen:
            out, weights = attention(module, q, k, v, **arguments | dict(attention_mask=mask))
        assert weights is None and dict(seen) == ({} if attention is sdpa_attention_forward else {"attention": 1})
        upstream = torch.randn(out.shape, generator=torch.manual_seed(2)).to(kind)
        found.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
    for ours, truth in zip(*found):
        assert_close(ours.double(), truth, atol=2e-6)


@pytest.mark.parametrize("case", ["dropout", "causal", "causal module", "fewer keys", "longer keys", "other arguments"])
def test_what_it_does_not_do_is_sdpas(case, caplog):
    q, k, v = torch.randn(3, 2, 4, 5, 16)  # of a head size that kernels have
    module, arguments = nn.Module(), dict(attention_mask=None, dropout=0.0, scaling=None)
    module.is_causal, module.num_key_value_groups = case == "causal module", 1
    if case == "fewer keys":
        k, v, module.num_key_value_groups = k[:, :2], v[:, :2], 2
    if case == "longer keys":
        k, v = torch.randn(2, 2, 4, 7, 16)
    arguments |= {"dropout": dict(dropout=0.5), "causal": dict(is_causal=True)}.get(case, {})
    if case == "other arguments":
        arguments["position_bias"] = torch.randn(1, 4, 5, 5)
    outs = []
    with counting() as seen:
        for attention in (interface.vitfast_attention_forward, sdpa_attention_forward) * 2:
            torch.manual_seed(0)
            outs.append(attention(module, q, k, v, **arguments)[0])
    assert not seen and len(said(caplog)) == 1, "once a reason"
    assert_close(outs[0], outs[1], atol=1e-6)


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
