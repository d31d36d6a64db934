"""Masks and padded batches: on the operations, and equal to the library's on every token that counts."""

import pytest
import torch
from adapter_models import IMAGES, NAFLEX, SIGLIP, assert_same, attention_in, calls, family, left, pair, timm_vit
from checks import assert_close
from torch import nn

BOTH = {"attention block": 2, "MLP block": 2}


@pytest.mark.parametrize("name, lengths", [(NAFLEX, [4, 3]), (SIGLIP, [4, 2])], ids=["timm", "transformers"])
def test_padded_batches(name, lengths):
    """Equal on valid tokens; where somebody looks at all, attention is told how many keys there are."""
    models, batch, outs = pair(family(name).make().eval()), family(name).batch(), []
    for given in attention_in(models[0], batch):
        assert given["offsets"].tolist() == [0, lengths[0], sum(lengths)] and given["longest"] == 4
    for each in models:
        layers = each.blocks if name == NAFLEX else each.encoder.layers
        layers[-1].register_forward_hook(lambda _, __, out: outs.append(out))
        each(**batch)
    for given in attention_in(models[0], batch):
        assert given["key_lengths"].tolist() == lengths and given["bias"].shape == (2, 2, 4, 4)
    for i, length in enumerate(lengths):
        assert_close(outs[0][i, :length], outs[1][i, :length], atol=1e-5)


LEAST, FIRST, LAST = torch.finfo(torch.float32).min, torch.tensor([0]), torch.tensor([4])
TAIL = torch.arange(5) < torch.tensor([5, 3])[:, None]
SOME = torch.rand(2, 1, 5, 5, generator=torch.manual_seed(1)) > 0.4
SOME[..., 0] = True
MASKS = {
    "of keys": TAIL[:, None, None, :],
    "of keys and queries": SOME,
    "one for all": SOME[0, 0],
    "additive": torch.randn(2, 1, 5, 5, generator=torch.manual_seed(2)),
    "additive, by head": torch.randn(1, 2, 5, 5, generator=torch.manual_seed(3)),
    "least numbers": torch.zeros(2, 1, 5, 5).masked_fill(~SOME, LEAST),
    "a query that sees all alike": torch.zeros(5, 5).index_fill(0, FIRST, LEAST).index_fill(1, LAST, LEAST),
    "an image that is padding alone": torch.zeros(2, 1, 1, 5).index_fill(0, torch.tensor([1]), LEAST),
    "a query that sees nothing": torch.arange(5)[None, None, :, None].expand(2, 1, 5, 5) < 4,
}


@pytest.mark.parametrize("kind", [*MASKS, "causal"])
def test_every_mask_gives_the_librarys_numbers(kind):
    model, original = pair(timm_vit())
    given = dict(attn_mask=MASKS[kind]) if kind in MASKS else dict(is_causal=True)
    assert_same(model, original, dict(x=IMAGES, **given), atol=1e-5)
    expected = BOTH if kind in MASKS else {"MLP block": 2}
    assert calls(model, IMAGES, **given) == {**expected, "norm": 1, "patch projection": 1}
    assert (model(IMAGES, **given) - original(IMAGES)).abs().max() > 1e-4, "it acts"


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 4, 4).bool(), torch.ones(7).bool()], ids=["tokens", "dimensions"])
def test_a_mask_that_does_not_fit_is_the_librarys_error(mask):
    errors = []
    for each in pair(timm_vit()):
        with pytest.raises((RuntimeError, IndexError)) as error:
            each(IMAGES, attn_mask=mask)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_an_encoder_layer(batch_first):
    """In which True hides a key; alone and together."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, "gelu", batch_first=batch_first, norm_first=True)
    (model, original), x = pair(layer.train()), torch.randn(2, 5, 32)
    src = x if batch_first else x.transpose(0, 1)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for options in (
        dict(src_key_padding_mask=~TAIL),
        dict(src_mask=causal),
        dict(src_mask=causal, src_key_padding_mask=~TAIL),
        dict(src_mask=torch.randn(5, 5)),
    ):
        assert_same(model, original, dict(src=src, **options))
        assert calls(model, src, **options) == {"attention block": 1, "MLP block": 1}
    assert_same(model, original, dict(src=src, src_mask=torch.randn(4, 5, 5)))
    assert len(left(model)) == 1 and "one for all images and heads" in left(model)[0]
