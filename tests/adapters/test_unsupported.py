"""accelerate: what is left alone, and what runs the library's own code."""

import logging

import pytest
import timm
import torch
from adapter_models import (
    BLOCKS,
    SMALL,
    accelerated_pair,
    assert_same,
    classes,
    hf_vit,
    run_both,
    snapshot,
    timm_vit,
    tv_vit,
)
from checks import assert_close
from torch import nn

import vitfast
from vitfast import InputError


@pytest.mark.parametrize(
    "name, options, why",
    [
        ("resnet10t", {}, "nothing in it"),
        ("swin_tiny_patch4_window7_224", dict(depths=(1, 1, 1, 1), embed_dim=16, num_heads=(1, 2, 4, 8)), "windows"),
        ("xcit_nano_12_p16_224", dict(depth=1), "does not know"),
    ],
)
def test_unknown_models_come_back_untouched(name, options, why, caplog):
    model = timm.create_model(name, **options)
    before, types = snapshot(model), classes(model)
    with caplog.at_level(logging.INFO, "vitfast"):
        vitfast.accelerate(model)
    assert snapshot(model) == before and classes(model) == types
    report = vitfast.acceleration_report(model)
    assert not report.replaced and all(why in e.why for e in report.left) and why in str(report)
    assert "nothing on vitfast" in caplog.text and why in caplog.text and caplog.records[0].levelname == "WARNING"


def test_log_and_report_say_what_was_done(caplog):
    model = timm_vit(act_layer="relu")
    assert {e.why for e in vitfast.acceleration_report(model).left} == {"vitfast.accelerate(model) was not called"}
    with caplog.at_level(logging.INFO, "vitfast"):
        vitfast.accelerate(model)
    [record] = caplog.records
    assert (
        record.name == "vitfast"
        and record.levelname == "INFO"
        and "2 x attention block" in record.message
        and "ReLU" in record.message
    )
    text = str(vitfast.acceleration_report(model))
    assert (
        "blocks.0 ... blocks.1 (2) (Block), attention block" in text
        and "MLP block: mlp.act is torch.nn.modules.activation.ReLU" in text
    )


def test_a_subclass_with_code_of_its_own_is_left():
    from timm.models.vision_transformer import Block

    class Doubled(Block):
        def forward(self, x, **kwargs):
            return 2 * super().forward(x, **kwargs)

    model = timm_vit(block_fn=Doubled)
    types = [type(b) for b in model.blocks]
    vitfast.accelerate(model)
    assert [type(b) for b in model.blocks] == types and "Doubled may have code of its own" in str(
        vitfast.acceleration_report(model)
    )


def test_a_layer_with_a_part_that_is_not_known_is_left():
    for make, path in ((timm_vit, "attn.sink"), (hf_vit, "attention.sink"), (tv_vit, "gate")):
        model = make()
        block = next(m for m in model.modules() if type(m).__name__ in BLOCKS)
        parent, _, name = path.rpartition(".")
        setattr(block.get_submodule(parent), name, nn.Parameter(torch.ones(2)) if parent else nn.Linear(2, 2))
        before = type(block)
        vitfast.accelerate(model)
        assert type(block) is before and f"{path} is not known to vitfast" in str(vitfast.acceleration_report(model))


def test_masks_and_causal_attention_run_the_original():
    pair = accelerated_pair(timm_vit)
    images = torch.randn(2, 3, 16, 16)
    mask = torch.rand(2, 1, 5, 5) > 0.4
    mask[..., 0] = True
    for arguments in (dict(attn_mask=mask), dict(is_causal=True), dict(attn_mask=None, is_causal=False)):
        out, expected = (model(images, **arguments) for model in pair)
        assert_close(out, expected, atol=1e-5)
    assert (pair[0](images, is_causal=True) - pair[0](images)).abs().max() > 1e-3
    pair = accelerated_pair(hf_vit)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]])
    out, expected = (model(images, attention_mask=mask).logits for model in pair)
    assert_close(out, expected, atol=1e-5)
    assert (out - pair[0](images).logits).abs().max() > 1e-4


@pytest.mark.parametrize("change", ["scale", "affine", "bias", "dtype"])
def test_odd_layers_run_the_original(change):
    """Differences that the types of the modules do not tell."""

    def make():
        model = timm_vit()
        attn = model.blocks[0].attn
        if change == "scale":
            attn.fused_attn, attn.scale = False, 1.0
        elif change == "affine":
            model.blocks[0].norm1 = nn.LayerNorm(32, elementwise_affine=False)
        elif change == "bias":
            model.blocks[0].norm1 = nn.LayerNorm(32, bias=False)
        else:
            model.blocks[0].double()
        return model

    pair = accelerated_pair(make)
    images = torch.randn(2, 3, 16, 16)
    if change == "dtype":
        for model in pair:
            with pytest.raises(RuntimeError, match="dtype"):
                model(images)
        return
    assert_same(run_both(pair, images))
    assert len(vitfast.acceleration_report(pair[0]).left) == (0 if change == "bias" else 1)


def test_bad_input_is_the_originals_error():
    pair = accelerated_pair(timm_vit)
    for images in (
        torch.randn(2, 3, 16, 24),
        torch.randn(2, 4, 16, 16),
        torch.zeros(2, 3, 16, 16, dtype=torch.uint8),
        torch.randn(2, 3, 16, 16).double(),
    ):
        errors = []
        for model in pair:
            with pytest.raises(Exception) as error:
                model(images)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]
    hf = accelerated_pair(hf_vit)  # its convolution drops what is left of the last patch
    out, expected = (
        model.vit.embeddings.patch_embeddings(torch.randn(1, 3, 19, 17, generator=torch.manual_seed(0))) for model in hf
    )
    assert_close(out, expected, atol=1e-6)
    for function in (vitfast.accelerate, vitfast.restore, vitfast.acceleration_report):
        with pytest.raises(InputError, match="must be a torch.nn.Module, got dict"):
            function({})


def test_changing_the_model_afterwards():
    pair = accelerated_pair(lambda: timm_vit(**{**SMALL, "global_pool": "avg"}))
    for model in pair:
        torch.manual_seed(3)
        model.reset_classifier(7)
        model.set_input_size(img_size=(24, 32))
    assert_same(run_both(pair, torch.randn(2, 3, 24, 32)))
    for model in pair:
        torch.manual_seed(3)
        model.set_input_size(patch_size=(4, 4))
    assert_same(run_both(pair, torch.randn(2, 3, 24, 32)))
    why = {e.name: e.why for e in vitfast.acceleration_report(pair[0]).left}
    assert why == {"patch_embed.proj": "vitfast.accelerate(model) was not called"}, "timm made a new projection"
    assert not vitfast.acceleration_report(vitfast.accelerate(pair[0])).left


def test_a_library_that_computes_its_layer_in_another_way_is_left(monkeypatch):
    """A later version, say: found out on a small layer."""
    from timm.models.vision_transformer import Block

    from vitfast.adapters import registry

    forward = Block.forward
    try:
        for change in (
            lambda self, x, **kwargs: 1.01 * forward(self, x, **kwargs),
            lambda self, x, rope: x,
            lambda self, x: (x,),
        ):
            registry._checked.pop(Block, None)
            monkeypatch.setattr(Block, "forward", change)
            state = torch.get_rng_state()
            model = vitfast.accelerate(timm_vit())
            assert type(model.blocks[0]) is Block
            report = vitfast.acceleration_report(model)
            why = f"timm {timm.__version__} computes it in another way than vitfast"
            assert len(report.left) == 2 and all(e.why.startswith(why) for e in report.left)
            assert not torch.equal(state, torch.get_rng_state()), "the model's own weights"
            state = torch.get_rng_state()
            registry._checked.pop(Block, None)
            vitfast.accelerate(model)
            assert torch.equal(state, torch.get_rng_state()), "the check leaves no trace in the random numbers"
    finally:
        monkeypatch.undo()
        registry._checked.pop(Block, None)
    assert not vitfast.acceleration_report(vitfast.accelerate(timm_vit())).left
