"""Masks and padded batches: on the operations, and equal to the library's on every token that counts."""

import copy
import logging

import pytest
import torch
from adapter_models import accelerated_pair, assert_same, hf_vit, timm_vit
from checks import assert_close, randomize
from operation_calls import calls
from torch import nn

import vitfast
from vitfast import ops
from vitfast.adapters import fallbacks
from vitfast.adapters.families import FAMILIES

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.manual_seed(0))
BOTH = {"attention block": 2, "MLP block": 2}


def given_to_attention(model, **batch) -> list[dict]:
    """The keyword arguments of each attention block in a forward."""
    seen, function = [], ops.attention_block
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(ops, "attention_block", lambda *a, **k: (seen.append(k), function(*a, **k))[1])
        model(**batch)
    return seen


@pytest.mark.parametrize(
    "name, lengths", [("NaFlexViT, padded", [4, 3]), ("SigLIP 2, padded", [4, 2])], ids=["timm", "transformers"]
)
def test_padded_batches(name, lengths, caplog):
    """Equal on valid tokens; where somebody looks at all, attention is told how many keys there are."""
    family = next(family for family in FAMILIES if family.name == name)
    pytest.importorskip(family.library)
    original = randomize(family.make()).eval()
    model, batch = vitfast.accelerate(copy.deepcopy(original)), family.batch()
    fallbacks._said.clear()
    with caplog.at_level(logging.WARNING, "vitfast"):
        for each in given_to_attention(model, **batch):
            assert each["offsets"].tolist() == [0, lengths[0], sum(lengths)] and each["longest"] == 4
    assert not caplog.records
    outs = []
    for each in (model, original):
        layers = each.blocks if family.library == "timm" else each.encoder.layers
        layers[-1].register_forward_hook(lambda _, __, out: outs.append(out))
        with torch.no_grad():
            each(**batch)
    for each in given_to_attention(model, **batch):
        assert each["key_lengths"].tolist() == lengths and each["bias"].shape == (2, 2, 4, 4)
    for i, length in enumerate(lengths):
        assert_close(outs[0][i, :length], outs[1][i, :length], atol=1e-5)


LEAST, FIRST, LAST = torch.finfo(torch.float32).min, torch.tensor([0]), torch.tensor([4])


def masks():
    tail = torch.arange(5) < torch.tensor([5, 3])[:, None]
    some = torch.rand(2, 1, 5, 5, generator=torch.manual_seed(1)) > 0.4
    some[..., 0] = True
    return {
        "of keys": tail[:, None, None, :],
        "of keys and queries": some,
        "one for all": some[0, 0],
        "additive": torch.randn(2, 1, 5, 5, generator=torch.manual_seed(2)),
        "additive, by head": torch.randn(1, 2, 5, 5, generator=torch.manual_seed(3)),
        "least numbers": torch.zeros(2, 1, 5, 5).masked_fill(~some, torch.finfo(torch.float32).min),
        "a query that sees all alike": torch.zeros(5, 5).index_fill(0, FIRST, LEAST).index_fill(1, LAST, LEAST),
        "an image that is padding alone": torch.zeros(2, 1, 1, 5).index_fill(0, torch.tensor([1]), LEAST),
        "a query that sees nothing": torch.arange(5)[None, None, :, None].expand(2, 1, 5, 5) < 4,
    }


@pytest.mark.parametrize("kind", masks())
def test_every_mask_gives_the_librarys_numbers(kind):
    mask, (model, original), results = masks()[kind], accelerated_pair(timm_vit), []
    for each in (model, original):
        out = each(IMAGES, attn_mask=mask)
        each.zero_grad()
        out.square().sum().backward()
        results.append((out, {name: p.grad for name, p in each.named_parameters()}))
    assert_same(results)
    assert calls(model, IMAGES, attn_mask=mask) == {**BOTH, "norm": 1, "patch projection": 1}
    assert (results[0][0] - original(IMAGES)).abs().max() > 1e-4, "it acts"


def test_a_mask_that_does_not_fit_is_the_librarys_error():
    model, original = accelerated_pair(timm_vit)
    for mask in (torch.ones(2, 1, 4, 4, dtype=torch.bool), torch.ones(7, dtype=torch.bool)):
        errors = []
        for each in (model, original):
            with pytest.raises((RuntimeError, IndexError)) as error:
                each(IMAGES, attn_mask=mask)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_an_encoder_layer(batch_first):
    """In which True hides a key; alone and together."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, "gelu", batch_first=batch_first, norm_first=True)
    original, x = randomize(layer).train(), torch.randn(2, 5, 32)
    model = vitfast.accelerate(copy.deepcopy(original))
    x = x if batch_first else x.transpose(0, 1)
    padding = torch.arange(5) >= torch.tensor([5, 3])[:, None]
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for options in (
        dict(src_key_padding_mask=padding),
        dict(src_mask=causal),
        dict(src_mask=causal, src_key_padding_mask=padding),
        dict(src_mask=torch.randn(5, 5)),
    ):
        assert_close(model(x, **options), original(x, **options), atol=1e-5, name=str(options.keys()))
        assert calls(model, x, **options) == {"attention block": 1, "MLP block": 1}
    by_head = torch.randn(4, 5, 5)
    assert_close(model(x, src_mask=by_head), original(x, src_mask=by_head), atol=1e-5)
    assert "one for all images and heads" in vitfast.acceleration_report(model).left[0].why


def test_masks_by_the_registry():
    model = randomize(hf_vit(attn_implementation="vitfast")).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]])
    out = model(IMAGES, attention_mask=mask).logits
    assert calls(model, IMAGES, attention_mask=mask) == {"attention": 2}
    model.set_attn_implementation("sdpa")
    assert_close(out, model(IMAGES, attention_mask=mask).logits, atol=1e-5)
