"""Towers of images of many sizes: no operation on padding, no mask of all pairs, and the library's numbers."""

import copy
import pickle

import pytest
import torch
from adapter_models import classes, snapshot
from checks import assert_close, randomize
from tower_models import NAFLEX, PIXTRAL, QWEN, SIGLIP, assert_same, blocks_in, family, outputs, pair

import vitfast
from vitfast.adapters import fallbacks, hugging_face_layers
from vitfast.ops._dispatch import counting


@pytest.fixture(autouse=True)
def log_starts_anew():
    fallbacks._said.clear()


@pytest.mark.parametrize("name", ["Qwen2-VL", QWEN, "Qwen3-VL", PIXTRAL, SIGLIP, NAFLEX])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_numbers_and_gradients_and_operations(name, training, caplog):
    found = family(name)
    torch.manual_seed(0)
    model, original = pair(found.make())
    batch = found.batch()
    assert_same(model.train(training), original.train(training), batch, found.valid)
    assert not caplog.records
    with counting() as called:
        model(**batch)
    assert called["attention_block"] == 2 and called["mlp_block"] + called["gated_mlp_block"] == 2
    assert called["attention"] == 0 and called["mlp"] == (name == SIGLIP), "of its head"


def test_qwen_attends_in_windows_and_in_whole_images():
    model, _ = pair(family(QWEN).make())
    assert model.fullatt_block_indexes == [1]
    batch = family(QWEN).batch()
    seen = blocks_in(model, batch)
    assert all(x.shape == (56, 32) for _, x, _ in seen)
    windows, whole = (given for name, _, given in seen if name == "attention_block")
    assert whole["offsets"].tolist() == [0, 24, 56] and whole["longest"] == 32
    assert windows["offsets"].tolist() == [0, 16, 24, 40, 56] and windows["longest"] == 16
    assert windows["rope"][0].shape == (56, 16)


def test_the_longest_image_is_asked_for_once():
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    hugging_face_layers._counted.clear()
    assert hugging_face_layers._longest(offsets) == 4 and len(hugging_face_layers._counted) == 1
    offsets[1] = 1
    assert hugging_face_layers._longest(offsets) == 6, "written anew"
    with torch.inference_mode():
        assert hugging_face_layers._longest(torch.tensor([0, 3, 5])) == 3
    assert hugging_face_layers._longest(torch.tensor([0])) == 0


def test_what_qwens_layer_cannot_take_runs_its_own_code():
    model, original = pair(family(QWEN).make())
    x, rope = torch.randn(8, 32), tuple(torch.randn(2, 8, 16))
    for offsets, reason in (
        (torch.tensor([0, 3, 8]), None),
        (torch.tensor([0, 3, 8], dtype=torch.int16), "no tensor of whole numbers"),
    ):
        given = dict(cu_seqlens=offsets, position_embeddings=rope)
        assert_close(model.blocks[0](x, **given), original.blocks[0](x, **given), atol=1e-5)
        left = [e.why for e in vitfast.acceleration_report(model).left if e.name == "blocks.0"]
        assert len(left) == (reason is not None) and all(reason in why for why in left)
    given = dict(cu_seqlens=torch.tensor([0, 8]), position_embeddings=rope)
    model.blocks[0].attn.register_forward_hook(lambda *_: None)
    assert_close(model.blocks[0](x, **given), original.blocks[0](x, **given), atol=1e-5)
    left = [e for e in vitfast.acceleration_report(model).left if e.name == "blocks.0"]
    assert [e.part for e in left] == ["attention block"] and "attn has hooks" in left[0].why


def test_pixtral_writes_no_mask(monkeypatch):
    found = family(PIXTRAL)
    model, original = pair(found.make())
    batch = found.batch()
    made, full = [], torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: (made.append(a), full(*a, **k))[1])
    seen = blocks_in(model, batch)
    assert not made and {x.shape for name, x, _ in seen if name == "attention_block"} == {(6, 32)}
    for name, _, given in seen:
        assert name != "attention_block" or given["offsets"].tolist() == [0, 4, 6] and given["longest"] == 4
    with torch.no_grad():
        original(**batch)
    assert made, "the library's own model does"


def test_pixtrals_layers_without_the_tower():
    """A mask alone keeps the images apart, which the operation takes as a bias; flash attention's offsets too."""
    model, original = pair(family(PIXTRAL).make())
    x, rope = torch.randn(1, 6, 32), tuple(torch.randn(2, 6, 16))
    apart = torch.block_diag(torch.ones(4, 4), torch.ones(2, 2)).bool()
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~apart, torch.finfo(torch.float32).min)
    given = dict(attention_mask=mask, position_embeddings=rope)
    expected = original.transformer(x, **given).last_hidden_state
    with counting() as called:
        assert_close(model.transformer(x, **given).last_hidden_state, expected, atol=1e-5)
    assert called["attention_block"] == 2
    offsets, layer = torch.tensor([0, 4, 6], dtype=torch.int32), model.transformer.layers[0]
    flash = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=4, max_length_k=4)
    out = layer(x, None, position_embeddings=rope, **flash)
    assert_close(out, original.transformer.layers[0](x, mask, position_embeddings=rope), atol=1e-5)
    flash["cu_seq_lens_k"] = offsets.clone()
    layer(x, None, position_embeddings=rope, **flash)
    left = [e.why for e in vitfast.acceleration_report(model).left]
    assert left == ["in its last call: the offsets are not of one row of images"]


@pytest.mark.parametrize("asked", [dict(output_hidden_states=True), dict(output_attentions=True)])
@pytest.mark.parametrize("name", [PIXTRAL, SIGLIP])
def test_what_transformers_records(name, asked):
    found = family(name)
    model, original = pair(found.make())
    batch = found.batch()
    for implementation in ("sdpa", "eager"):
        for each in (model, original):
            each.set_attn_implementation(implementation)
        (key,) = (key.removeprefix("output_") for key in asked)
        ours, theirs = (each(**batch, **asked)[key] for each in (model, original))
        assert len(ours) == len(theirs) and (implementation == "sdpa" or len(ours) >= 2)
        for a, b in zip(ours, theirs):
            assert_close(a, b, atol=1e-5)
        outputs(model, batch)  # without, it is packed again
        seen = blocks_in(model, batch)
        assert all("offsets" in given for block, _, given in seen if block == "attention_block") and len(seen) == 4


@pytest.mark.parametrize("name", [PIXTRAL, SIGLIP])
def test_dropout_of_probabilities_runs_the_librarys_attention(name):
    found = family(name)
    model, original = pair(found.make())
    for each in (model, original):
        for module in each.modules():
            if hasattr(module, "dropout") and type(module.dropout) is float:
                module.dropout = 1e-9  # active, and without effect
    assert_same(model.train(), original.train(), found.batch(), found.valid)
    left = [e.part for e in vitfast.acceleration_report(model).left if "dropout" in e.why]
    assert left == ["attention block"] * 2


@pytest.mark.parametrize("name", [PIXTRAL, SIGLIP, QWEN])
def test_gradient_checkpointing_of_transformers(name):
    found = family(name)
    model, original = pair(found.make())
    for each in (model, original):
        each.gradient_checkpointing_enable(dict(use_reentrant=False))
    assert_same(model.train(), original.train(), found.batch(), found.valid)


@pytest.mark.parametrize("name", [NAFLEX, SIGLIP])
def test_under_autocast(name):
    found = family(name)
    model, original = pair(found.make())
    with torch.autocast("cpu", torch.bfloat16):
        batch = found.batch()
        ours, theirs = outputs(model, batch, found.valid), outputs(original, batch, found.valid)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", [NAFLEX, SIGLIP, PIXTRAL, QWEN])
def test_compiled_code_keeps_the_padding(name):
    found = family(name)
    model, original = pair(found.make().eval())
    batch = found.batch()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        ours, theirs = outputs(compiled, batch, found.valid), outputs(original, batch, found.valid)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, atol=1e-5)


@pytest.mark.parametrize("name", [NAFLEX, SIGLIP, PIXTRAL, QWEN])
def test_restore_copies_and_pickles(name):
    found = family(name)
    model = randomize(found.make())
    before, types, batch = snapshot(model), classes(model), found.batch()
    expected = outputs(model, batch)
    vitfast.accelerate(model)
    assert snapshot(model) == before and list(model.state_dict()) == list(copy.deepcopy(model).state_dict())
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(each) == classes(model) != types
        assert any("offsets" in given for _, _, given in blocks_in(each, batch))
    vitfast.restore(model)
    assert classes(model) == types and snapshot(model) == before
    for a, b in zip(outputs(model, batch), expected, strict=True):
        assert torch.equal(a, b)
    assert not blocks_in(model, batch)
