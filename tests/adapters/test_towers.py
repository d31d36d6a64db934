"""Towers of images of many sizes: no operation on padding, no mask, and the library's numbers.

That NaFlexVits, SigLIP 2, Pixtral and Qwen have them is told by the contract (test_accelerate.py).
"""

import logging

import pytest
import torch
from adapter_models import (
    NAFLEX,
    PIXTRAL,
    QWEN,
    SIGLIP,
    TEXT,
    assert_same,
    attention_in,
    blocks_in,
    calls,
    family,
    left,
    outputs,
    pair,
    report,
)
from checks import Calls, assert_close
from torch import nn
from transformers import PixtralVisionConfig, Siglip2TextConfig, Siglip2TextModel
from transformers.models.pixtral.modeling_pixtral import PixtralAttentionLayer

from vitfast.adapters import fallback_log, hugging_face, registry
from vitfast.adapters.families import naflexvit
from vitfast.adapters.masks import UnpaddedTokens
from vitfast.ops import reference as ref


@pytest.fixture(autouse=True)
def log_starts_anew():
    fallback_log.said.clear()


def naflex(**options) -> nn.Module:
    return naflexvit(pos_embed_grid_size=(4, 4), **options)()


def padded(*grids: tuple[int, int]) -> dict:
    """Patches of images of these grids as NaFlexVit takes them."""
    longest = max(h * w for h, w in grids)
    places, valid = torch.zeros(len(grids), longest, 2, dtype=torch.long), torch.zeros(len(grids), longest, dtype=bool)
    for i, (h, w) in enumerate(grids):
        places[i, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        valid[i, : h * w] = True
    x = torch.randn(len(grids), longest, 192, generator=torch.manual_seed(0))
    return dict(x=x, patch_coord=places, patch_valid=valid)


def packing(model: nn.Module) -> list[str]:
    return [entry.why for entry in report(model).left if entry.part == "packing"]


def test_qwen_attends_in_windows_and_in_whole_images():
    found = family(QWEN)
    model, _ = pair(found.make())
    batch = found.batch()
    assert model.fullatt_block_indexes == [1] and all(x.shape == (56, 32) for _, x, _ in blocks_in(model, batch))
    windows, whole = attention_in(model, batch)
    assert whole["offsets"].tolist() == [0, 24, 56] and whole["longest"] == 32
    assert windows["offsets"].tolist() == [0, 16, 24, 40, 56] and windows["longest"] == 16
    assert windows["rope"][0].shape == (56, 16)


def test_the_longest_image_is_asked_for_once():
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    hugging_face._counted.clear()
    assert hugging_face._longest(offsets) == 4 and len(hugging_face._counted) == 1
    offsets[1] = 1
    assert hugging_face._longest(offsets) == 6, "written anew"
    with torch.inference_mode():
        assert hugging_face._longest(torch.tensor([0, 3, 5])) == 3
    assert hugging_face._longest(torch.tensor([0])) == 0


def test_what_qwens_layer_cannot_take_runs_its_own_code():
    model, original = (each.blocks[0] for each in pair(family(QWEN).make()))
    x, rope = torch.randn(8, 32), tuple(torch.randn(2, 8, 16))
    for dtype, words in ((torch.int64, []), (torch.int16, ["no tensor of whole numbers"])):
        given = dict(cu_seqlens=torch.tensor([0, 3, 8], dtype=dtype), position_embeddings=rope)
        assert_close(model(x, **given), original(x, **given), atol=1e-5)
        assert len(left(model)) == len(words) and all(word in why for word, why in zip(words, left(model)))
    given = dict(cu_seqlens=torch.tensor([0, 8]), position_embeddings=rope)
    model.attn.register_forward_hook(lambda *_: None)
    assert_close(model(x, **given), original(x, **given), atol=1e-5)
    assert left(model) == ["attn has hooks"]


def test_pixtral_writes_no_mask(monkeypatch):
    found = family(PIXTRAL)
    model, original = pair(found.make())
    batch, written, full = found.batch(), [], torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: (written.append(a), full(*a, **k))[1])
    seen = blocks_in(model, batch)
    assert not written and {x.shape for name, x, _ in seen if name == "attention_block"} == {(6, 32)}
    for given in attention_in(model, batch):
        assert given["offsets"].tolist() == [0, 4, 6] and given["longest"] == 4
    original(**batch)
    assert written, "the library's own model does"


def test_pixtrals_layers_without_the_tower():
    """A mask alone keeps the images apart, which the operation takes as a bias; flash attention's offsets too."""
    model, original = (each.transformer for each in pair(family(PIXTRAL).make()))
    x, rope = torch.randn(1, 6, 32), tuple(torch.randn(2, 6, 16))
    apart = torch.block_diag(torch.ones(4, 4), torch.ones(2, 2)).bool()
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~apart, torch.finfo(torch.float32).min)
    given = dict(attention_mask=mask, position_embeddings=rope)
    assert_close(*(each(x, **given).last_hidden_state for each in (model, original)), atol=1e-5)
    assert calls(model, x, **given)["attention block"] == 2
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32)
    flash = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=4, max_length_k=4)
    out = model.layers[0](x, None, position_embeddings=rope, **flash)
    assert_close(out, original.layers[0](x, mask, position_embeddings=rope), atol=1e-5)
    flash["cu_seq_lens_k"] = offsets.clone()
    model.layers[0](x, None, position_embeddings=rope, **flash)
    assert left(model) == ["in its last call: the offsets are not of one row of images"]


@pytest.mark.parametrize("asked", ["hidden_states", "attentions"])
@pytest.mark.parametrize("name", [PIXTRAL, SIGLIP])
def test_what_transformers_records(name, asked):
    found = family(name)
    models, batch = pair(found.make()), found.batch()
    for implementation in ("sdpa", "eager"):
        for each in models:
            each.set_attn_implementation(implementation)
        ours, theirs = (each(**batch, **{f"output_{asked}": True})[asked] for each in models)
        assert len(ours) == len(theirs) and (implementation == "sdpa" or len(ours) >= 2)
        for a, b in zip(ours, theirs):
            assert_close(a, b, atol=1e-5)
        outputs(models[0], batch)  # without, it is packed again
        assert len(attention_in(models[0], batch)) == 2 and all(
            "offsets" in each for each in attention_in(models[0], batch)
        )


def dropout(model: nn.Module) -> None:
    """Active, and without effect."""
    for module in model.modules():
        if type(getattr(module, "dropout", None)) is float:
            module.dropout = 1e-9


def checkpointing(model: nn.Module) -> None:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "change, name",
    [(dropout, PIXTRAL), (dropout, SIGLIP), *((checkpointing, name) for name in (PIXTRAL, SIGLIP, QWEN, NAFLEX))],
)
def test_training(change, name):
    """Dropout of probabilities runs the library's attention."""
    found = family(name)
    model, original = (each.train() for each in pair(found.make()))
    for each in (model, original):
        change(each)
    assert_same(model, original, found.batch(), found.valid)
    active = [entry.part for entry in report(model).left if "dropout" in entry.why]
    assert active == ["attention block"] * 2 * (change is dropout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAFLEX, PIXTRAL])
def test_compiled_code_keeps_the_padding(name):
    found = family(name)
    model, original = pair(found.make().eval())
    batch = found.batch()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert_close(*(outputs(each, batch, found.valid)[0] for each in (compiled, original)), atol=1e-5)


def test_naflexvits_padding_is_zeros_behind_the_layers():
    model, original = pair(naflex(class_token=True, reg_tokens=2, rope_type="mixed"))
    batch = padded((2, 3), (4, 4), (1, 5))
    seen = blocks_in(model, batch)
    assert len(seen) == 4 and all(x.shape == (6 + 16 + 5 + 3 * 3, 32) for _, x, _ in seen)
    given = batch["x"], batch["patch_coord"], batch["patch_valid"]
    ours, theirs = (each.forward_features(*given) for each in (model, original))
    valid = torch.cat([torch.ones(3, 3, dtype=bool), batch["patch_valid"]], 1)
    assert_close(ours["patches"][valid], theirs["patches"][valid], atol=1e-5)
    assert not ours["patches"][~valid].any() and ours["patch_valid"] is batch["patch_valid"]


def test_padding_anywhere_and_images_of_nothing_else():
    model, original = pair(naflex(class_token=True))
    batch = padded((2, 3), (4, 4), (1, 5))
    batch["patch_valid"][0, 1], batch["patch_valid"][2] = False, False
    assert_same(model, original, batch)
    assert {x.shape for _, x, _ in blocks_in(model, batch)} == {(5 + 16 + 3, 32)}


def test_batches_without_padding_stay_batches():
    batch = family(SIGLIP).batch()
    batch["pixel_attention_mask"][:], batch["spatial_shapes"][:] = 1, 2
    siglip, naflexes = pair(family(SIGLIP).make()), pair(naflex())
    for models, given in (
        (naflexes, padded((2, 3), (3, 2))),
        (naflexes, dict(x=torch.randn(2, 3, 32, 32))),
        (siglip, batch),
    ):
        assert_same(*models, given)
        assert {x.dim() for _, x, _ in blocks_in(models[0], given)} == {3}


# A GPU is waited for where numbers are read, and where shapes depend on them.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave")


def test_the_host_waits_once_a_forward(monkeypatch):
    monkeypatch.setattr(ref, "at_hand", lambda _: False)  # offsets are looked at on the CPU alone
    tolist, counts = torch.Tensor.tolist, []
    for each in pair(naflex(drop_path_rate=0.4, class_token=True, rope_type="axial")):
        lists = []
        monkeypatch.setattr(torch.Tensor, "tolist", lambda self, lists=lists: (lists.append(1), tolist(self))[1])
        with Calls() as calls, torch.no_grad():
            each.train()(**padded((2, 3), (4, 4)))
        counts.append((len(lists), sum(func.overloadpacket.__name__ in WAITS for func, *_ in calls.found)))
    (ours, others), (theirs, others_of_library) = counts
    assert ours == theirs + 1 and others == others_of_library


def test_a_mask_of_the_callers_own_is_taken_as_it_is():
    assert_same(*pair(naflex()), padded((2, 3), (4, 4)) | dict(attn_mask=torch.randn(2, 1, 16, 16)))
    model, original = (each.encoder for each in pair(family(SIGLIP).make()))
    x, mask = torch.randn(2, 4, 32), torch.rand(2, 1, 4, 4) > 0.4
    mask[..., 0] = True
    additive = torch.zeros(2, 1, 1, 4).index_fill(3, torch.tensor([3]), torch.finfo(torch.float32).min)
    additive[..., 1] = 0.5
    for given in (mask, additive):
        outs = [each(inputs_embeds=x, attention_mask=given).last_hidden_state for each in (model, original)]
        assert_close(*outs, atol=1e-5)
        assert packing(model) == ["in its last call: the mask is not one of padding"]
    additive[..., 1] = 0.0
    out, expected = (each(inputs_embeds=x, attention_mask=additive).last_hidden_state for each in (model, original))
    assert_close(out[:, :3], expected[:, :3], atol=1e-5)
    assert not out[:, 3].any() and not packing(model)


def test_texts_keep_their_padding():
    """SigLIP 2's tower of texts pools its last token, padding or not."""
    model = Siglip2TextModel(Siglip2TextConfig(**TEXT)).eval()
    batch = dict(input_ids=torch.arange(8).view(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    assert_same(*pair(model), batch)


OBSERVERS = {
    "a hook on a block": lambda model, hook: model.blocks[0].register_forward_hook(hook),
    "a hook in a block": lambda model, hook: model.blocks[1].mlp.fc1.register_forward_hook(hook),
    "a hook on the last norm": lambda model, hook: model.norm.register_forward_hook(hook),
    "a hook on all modules": lambda model, hook: torch.nn.modules.module.register_module_forward_hook(hook),
}


@pytest.mark.parametrize("kind", OBSERVERS)
def test_who_looks_at_the_tokens_sees_the_librarys(kind, caplog):
    model, original = pair(naflex(fc_norm=False))
    batch, shapes = padded((2, 3), (4, 4)), []
    for each in (model, original):
        seen = []
        handle = OBSERVERS[kind](each, lambda _, __, out, seen=seen: seen.append(out))
        with caplog.at_level(logging.WARNING, "vitfast"):
            each(**batch)
        shapes.append({out.shape for out in seen if isinstance(out, torch.Tensor)})
        assert each is original or ("NaFlexVit, packing" in caplog.text and packing(model))
        handle.remove()
    assert shapes[0] <= shapes[1]
    assert {x.shape for _, x, _ in blocks_in(model, batch)} == {(22, 32)} and not packing(model), "gone with the hook"


def test_intermediate_features_are_the_librarys():
    models, batch = pair(naflex()), padded((2, 3), (4, 4))
    batch["patches"] = batch.pop("x")
    ours, theirs = (each.forward_intermediates(batch, output_fmt="NLC", output_dict=True) for each in models)
    for a, b in zip(ours["image_intermediates"], theirs["image_intermediates"], strict=True):
        assert a.shape == b.shape and torch.allclose(a[batch["patch_valid"]], b[batch["patch_valid"]], atol=1e-5)


def test_a_layer_asked_for_more_gives_the_library_its_mask(monkeypatch):
    """Of tokens that our towers packed, in versions whose layers return the weights of attention."""
    forward, x = PixtralAttentionLayer.forward, torch.randn(2, 5, 32)

    def old(self, hidden_states, attention_mask, position_embeddings=None, output_attentions=False, **kwargs):
        y = forward(self, hidden_states, attention_mask, position_embeddings, **kwargs)
        return (y, torch.zeros(1)) if output_attentions else (y,)

    try:
        registry._checked.pop(PixtralAttentionLayer, None)
        monkeypatch.setattr(PixtralAttentionLayer, "forward", old)
        model, original = pair(PixtralAttentionLayer(PixtralVisionConfig(**TEXT, attn_implementation="sdpa")).eval())
        rope, valid = tuple(torch.randn(2, 5, 16)), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
        mask = torch.zeros(2, 1, 5, 5).masked_fill(~valid[:, None, None], torch.finfo(torch.float32).min)
        expected = original(x, mask, rope, output_attentions=True)
        packed = UnpaddedTokens(valid, 8, 5, lambda: mask)
        out = model(packed.pack(x), packed, rope, output_attentions=True)
        assert len(out) == len(expected) == 2
        assert_close(out[0], packed.pack(expected[0]), atol=1e-5)
    finally:
        monkeypatch.undo()
        registry._checked.pop(PixtralAttentionLayer, None)
