"""acceleration_report against the operations that ran: our models, last calls, own forwards."""

import logging
from collections import Counter

import pytest
import torch
from adapter_models import IMAGES, calls, claimed, left, report, said, timm_vit
from torch import nn
from torch.nn.utils import prune

import vitfast
from vitfast import ViT, ops
from vitfast.adapters import fallback_log

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")

SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)


def hybrid():
    return ViT(**{**SMALL, "patch_size": 8}, backbone=dict(layers=(1,), width=0.5))


def changed():
    model = ViT(**SMALL)
    prune.l1_unstructured(model.patch_embed.proj, "weight", 0.5)
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)
    model.blocks[1].mlp.fc1 = nn.Sequential(model.blocks[1].mlp.fc1)
    return model


class Wrapped(nn.Module):
    """As a user has one of ours in a model of their own."""

    def __init__(self):
        super().__init__()
        self.backbone = ViT(**{**SMALL, "num_classes": 0})

    def forward(self, x):
        return self.backbone(x)


# Of vitfast's own models; of others the contract (test_accelerate.py) tells it. A word of each reason for what is left.
OURS = {
    "plain": (lambda: ViT(**SMALL, init_values=0.1, reg_tokens=1), []),
    "average pooling": (lambda: ViT(**SMALL, global_pool="avg"), []),
    "hybrid": (hybrid, []),
    "in a model of the user's": (Wrapped, []),
    "relative positions": (lambda: ViT(**SMALL, pos_embed="relative"), ["relative"] * 4),
    "dropout in training": (lambda: ViT(**SMALL, proj_drop_rate=0.1).train(), ["active in training"] * 4),
    "pruned and hooked": (changed, ["proj has hooks", "attn.qkv has hooks", "fc1 is", "mlp.fc1 is"]),
}


@pytest.mark.parametrize("name", OURS)
def test_the_report_claims_what_runs(name):
    make, words = OURS[name]
    model = make().train("training" in name)
    assert calls(model, IMAGES) == claimed(model), report(model)
    assert len(left(model)) == len(words) and all(word in why for word, why in zip(words, left(model))), report(model)


REST = Counter({"MLP block": 2, "norm": 1, "patch projection": 1})


def test_the_last_call_counts(caplog):
    """Causal, then not: and the log says once what the library's own code ran for."""
    fallback_log.said.clear()
    model = vitfast.accelerate(timm_vit()).eval()
    assert len(report(model).replaced) == 6, "nothing was called yet"
    with caplog.at_level(logging.WARNING, "vitfast"):
        for _ in range(2):
            assert calls(model, IMAGES, is_causal=True) == claimed(model) == REST
    assert said(caplog) == ["Block, attention block: the call has is_causal; the library's own code runs"]
    assert calls(model, IMAGES) == claimed(model) == REST + Counter({"attention block": 2})


def test_log_and_report_say_once_what_was_done(caplog):
    fallback_log.said.clear()
    model = timm_vit(act_layer="relu")
    assert set(left(model)) == {"vitfast.accelerate(model) was not called"}
    with caplog.at_level(logging.INFO, "vitfast"):
        vitfast.accelerate(model)
        model(IMAGES)
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("vitfast", "INFO")
        assert "2 x attention block" in record.message and "ReLU" in record.message
        model.blocks[0].attn.register_forward_hook(lambda *_: None)
        model(IMAGES)
        model(IMAGES)
    (record,) = caplog.records[1:]
    assert record.message == "Block, attention block: attn has hooks; the library's own code runs"
    text = str(vitfast.acceleration_report(model))
    assert "blocks.0 ... blocks.1 (2) (Block), MLP block: mlp.act is torch.nn.modules.activation.ReLU" in text


def test_compiled_models(caplog):
    """One graph: its operations are those that the report claims."""
    torch._dynamo.reset()
    graphs, inner = [], ViT(**SMALL).eval()
    model = torch.compile(inner, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    with ops.use_kernels("on"), torch.no_grad():
        model(IMAGES)
        model(IMAGES)
    (graph,) = graphs
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    found = Counter(name.split(".")[1].removesuffix("_fwd") for name in names if name.startswith("vitfast."))
    assert found == dict(patch_embed=1, attention_block=2, mlp_block=2, layer_norm=1)
    assert claimed(model) == calls(inner, IMAGES) and not left(model) and not said(caplog)


@pytest.mark.parametrize("make", [lambda: vitfast.accelerate(timm_vit()), lambda: ViT(**SMALL)], ids=["timm", "ours"])
def test_a_forward_set_on_the_instance_decides(make):
    made = make()
    before = claimed(made)
    for name in ("blocks.0", "norm", "patch_embed.proj" if type(made) is not ViT else "patch_embed"):
        module = made.get_submodule(name)
        module.forward = lambda x, *_, **__: x
        (entry,) = report(made).left
        assert entry.name == name and "a forward of its own" in entry.why
        del module.forward
    assert claimed(made) == before


def test_our_heads_without_a_kernel_are_left():
    model = ViT(**{**SMALL, "embed_dim": 20, "num_heads": 2})
    entries = report(model).left
    assert [entry.part for entry in entries] == ["attention block"] * 2 and "head size 10" in entries[0].why
    with pytest.raises(RuntimeError, match="head size 10"), ops.use_kernels("on"):
        model(IMAGES)


def test_the_report_says_where_no_kernel_runs():
    model = ViT(**SMALL)
    for mode, why in (("auto", "the weights are on cpu"), ("off", "use_kernels('off')")):
        with ops.use_kernels(mode):
            assert f"the operations run plain PyTorch, not kernels: {why}" in str(report(model))
    with ops.use_kernels("on"):
        assert report(model).plain is None
        assert "torch.float64" in report(model.double()).plain
