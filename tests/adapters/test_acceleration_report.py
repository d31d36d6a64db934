"""acceleration_report before and after the first call, its texts and the log, and of vitfast's own models."""

import logging
from collections import Counter

import pytest
import torch
from adapter_models import ALL_PARTS, IMAGES, NOT_CALLED, counting, hf_vit, left, report, said, timm_vit
from torch import nn
from torch.nn.utils import prune

import vitfast
from vitfast import ViT, ops

SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
FIRST_CALL = "decided at the first call"


@pytest.mark.slow
def test_before_the_first_call_it_is_on_what_a_call_would_do():
    model = hf_vit()
    assert {*left(model)} == {NOT_CALLED}
    vitfast.accelerate(model)
    state, before = torch.get_rng_state(), report(model)
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    kinds = Counter(entry.part for entry in before.replaced)
    assert kinds == {"attention block": 2, "MLP block": 2, "LayerNorm": 1}
    assert [entry.why for entry in before.left] == [FIRST_CALL]
    with torch.no_grad():
        model(IMAGES)
    after = report(model)
    assert len(after.replaced) == ALL_PARTS and not after.left
    assert {*after.replaced} >= {*before.replaced}


@pytest.mark.slow
def test_the_last_call_counts():
    model = vitfast.accelerate(timm_vit()).eval()
    model(IMAGES, is_causal=True)
    assert "attention block: causal attention" in str(report(model))
    assert Counter(entry.part for entry in report(model).replaced)["attention block"] == 0
    model(IMAGES)
    assert len(report(model).replaced) == ALL_PARTS and not left(model)


def test_log_and_report_say_what_was_done(caplog):
    model = timm_vit(act_layer="relu")
    with caplog.at_level(logging.INFO, "vitfast"):
        vitfast.accelerate(model)
    (line,) = said(caplog)
    assert line.startswith("accelerate: VisionTransformer: ") and "2 x Block" in line
    assert line.endswith("the first call of each compiles it")
    model(IMAGES)
    text = str(report(model))
    assert text.startswith("VisionTransformer: 6 parts on vitfast, 2 left\n"), text
    assert "  replaced  blocks.0 ... blocks.1 (2) (Block), attention block\n" in text
    assert "  left      blocks.0 ... blocks.1 (2) (Block), MLP block: " in text and "relu" in text
    assert "the operations run plain PyTorch, not kernels: the weights are on cpu" in text
    assert (
        report(model).summary().startswith("VisionTransformer: ") and "2 x attention block" in report(model).summary()
    )


def changed():
    model = ViT(**SMALL)
    prune.l1_unstructured(model.patch_embed.proj, "weight", 0.5)
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)
    model.blocks[1].mlp.fc1 = nn.Sequential(model.blocks[1].mlp.fc1)
    return model


# Of vitfast's own models: a word of each reason for what is left.
OURS = {
    "plain": (lambda: ViT(**SMALL, init_values=0.1, reg_tokens=1), []),
    "hybrid": (lambda: ViT(**SMALL, backbone=dict(layers=(1,), width=0.5)), []),
    "relative positions": (lambda: ViT(**SMALL, pos_embed="relative"), ["relative"] * 4),
    "dropout in training": (lambda: ViT(**SMALL, proj_drop_rate=0.1).train(), ["active in training"] * 4),
    "pruned and hooked": (changed, ["proj has hooks", "attn.qkv has hooks", "fc1 is", "mlp.fc1 is"]),
}
PART_OF = {"layer_norm": "norm", "norm_linear": "norm", "patch_embed": "patch projection", "mlp_block": "MLP block"}
PART_OF |= {"attention_block": "attention block", "attention": "attention", "linear_gelu": "linear layer and GELU"}


@pytest.mark.parametrize("name", OURS)
def test_the_report_on_our_models_claims_what_runs(name):
    make, words = OURS[name]
    model = make().train("training" in name)
    with counting() as seen, torch.no_grad():
        model(IMAGES)
    ran = Counter(PART_OF[name] for name in seen.elements() if name != "linear_residual")
    parts = Counter()
    for entry in report(model).replaced:  # a half that runs on smaller operations has its norm, and one in its middle
        half, _, around = entry.part.partition(", around ")
        middle = "attention" if half == "attention block" else "linear layer and GELU"
        parts.update(["norm", middle] if around else [half])
    assert ran == parts, report(model)
    assert len(left(model)) == len(words) and all(word in why for word, why in zip(words, left(model))), report(model)


def test_a_forward_set_on_an_instance_of_ours_decides():
    model = ViT(**SMALL)
    for name in ("blocks.0", "norm", "patch_embed"):
        module = model.get_submodule(name)
        module.forward = lambda x, *_, **__: x
        (entry,) = report(model).left
        assert entry.name == name and "a forward of its own" in entry.why
        del module.forward
    assert not left(model)


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
