"""Padded batches of NaFlexVit and SigLIP 2: the padding goes before their layers, and comes back behind them."""

import logging

import pytest
import torch
from checks import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from tower_models import SIGLIP, assert_same, blocks_in, family, naflex, padded, pair

import vitfast
from vitfast.adapters import fallbacks
from vitfast.ops import reference as ref


@pytest.fixture(autouse=True)
def log_starts_anew():
    fallbacks._said.clear()


NAFLEXES = {
    "plain": dict(),
    "prefix tokens, layer scale, drop path": dict(class_token=True, reg_tokens=2, init_values=0.5, drop_path_rate=0.4),
    "class token": dict(class_token=True, global_pool="token"),
    "maximum": dict(global_pool="max"),
    "one learned query": dict(global_pool="map", class_token=True),
    "norms of q and k": dict(qk_norm=True),
    "masks of keys": dict(use_key_only_attn_mask=True),
    "rotary positions": dict(rope_type="axial", pos_embed="none", class_token=True),
    "rotary positions in halves": dict(rope_type="dinov3", rope_rotate_half=True),
    "rotary positions of each layer": dict(rope_type="mixed", class_token=True, reg_tokens=1),
    "SwiGLU": dict(swiglu_mlp=True, attn_type="eva"),
}


@pytest.mark.parametrize("kind", NAFLEXES)
def test_naflexvits(kind):
    model, original = pair(naflex(**NAFLEXES[kind]))
    batch = padded((2, 3), (4, 4), (1, 5))
    for training in (True, False):
        assert_same(model.train(training), original.train(training), batch)
    prefix = original.num_prefix_tokens
    seen = blocks_in(model, batch)
    assert seen and all(x.shape == (6 + 16 + 5 + 3 * prefix, 32) for _, x, _ in seen)
    features = [
        each.forward_features(batch["x"], batch["patch_coord"], batch["patch_valid"]) for each in (model, original)
    ]
    valid = torch.cat([torch.ones(3, prefix, dtype=bool), batch["patch_valid"]], 1)
    assert_close(features[0]["patches"][valid], features[1]["patches"][valid], atol=1e-5)
    assert not features[0]["patches"][~valid].any() and features[0]["patch_valid"] is batch["patch_valid"]


def test_padding_anywhere_and_images_of_nothing_else():
    model, original = pair(naflex(class_token=True))
    batch = padded((2, 3), (4, 4), (1, 5))
    batch["patch_valid"][0, 1], batch["patch_valid"][2] = False, False
    assert_same(model, original, batch)
    assert {x.shape for _, x, _ in blocks_in(model, batch)} == {(5 + 16 + 3, 32)}


def test_batches_without_padding_stay_batches():
    model, original = pair(naflex())
    for batch in (padded((2, 3), (3, 2)), dict(x=torch.randn(2, 3, 32, 32))):
        assert_same(model, original, batch)
        assert {x.dim() for _, x, _ in blocks_in(model, batch)} == {3}
    batch = family(SIGLIP).batch()
    model, original = pair(family(SIGLIP).make())
    batch["pixel_attention_mask"][:] = 1
    batch["spatial_shapes"][:] = 2
    assert_same(model, original, batch)
    assert {x.dim() for _, x, _ in blocks_in(model, batch)} == {3}


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for: numbers read, and shapes that depend on them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += name in ("_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave")
        return function(*args, **(kwargs or {}))


def test_the_host_waits_once_a_forward(monkeypatch):
    monkeypatch.setattr(ref, "at_hand", lambda _: False)  # offsets are looked at on the CPU alone
    tolist, counts = torch.Tensor.tolist, []
    for each in pair(naflex(drop_path_rate=0.4, class_token=True, rope_type="axial")):
        lists = []
        monkeypatch.setattr(torch.Tensor, "tolist", lambda self, lists=lists: (lists.append(1), tolist(self))[1])
        with Waits() as waits, torch.no_grad():
            each.train()(**padded((2, 3), (4, 4)))
        counts.append((len(lists), waits.count))
    (ours, others), (theirs, others_of_library) = counts
    assert ours == theirs + 1 and others == others_of_library


def test_a_mask_of_the_callers_own_is_taken_as_it_is():
    model, original = pair(naflex())
    batch = padded((2, 3), (4, 4))
    batch["attn_mask"] = torch.randn(2, 1, 16, 16)
    assert_same(model, original, batch)
    model, original = pair(family(SIGLIP).make())
    x, mask = torch.randn(2, 4, 32), torch.rand(2, 1, 4, 4) > 0.4
    mask[..., 0] = True
    additive = torch.zeros(2, 1, 1, 4).index_fill(3, torch.tensor([3]), torch.finfo(torch.float32).min)
    additive[..., 1] = 0.5
    for given in (mask, additive):
        outs = [each.encoder(inputs_embeds=x, attention_mask=given).last_hidden_state for each in (model, original)]
        assert_close(*outs, atol=1e-5)
        (left,) = (e for e in vitfast.acceleration_report(model).left if e.part == "packing")
        assert left.name == "encoder" and left.why == "in its last call: the mask is not one of padding"
    additive[..., 1] = 0.0
    out, expected = (
        each.encoder(inputs_embeds=x, attention_mask=additive).last_hidden_state for each in (model, original)
    )
    assert_close(out[:, :3], expected[:, :3], atol=1e-5)
    assert not out[:, 3].any() and "packing" not in str(vitfast.acceleration_report(model))


def test_texts_keep_their_padding():
    """SigLIP 2's tower of texts pools its last token, padding or not."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2, vocab_size=9)
    model, original = pair(transformers.Siglip2TextModel(transformers.Siglip2TextConfig(**sizes)).eval())
    batch = dict(input_ids=torch.arange(8).view(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    assert_same(model, original, batch)


OBSERVERS = {
    "a hook on a block": lambda model, hook: model.blocks[0].register_forward_hook(hook),
    "a hook in a block": lambda model, hook: model.blocks[1].mlp.fc1.register_forward_hook(hook),
    "a hook on the last norm": lambda model, hook: model.norm.register_forward_hook(hook),
    "a hook on all modules": lambda model, hook: torch.nn.modules.module.register_module_forward_hook(hook),
}


@pytest.mark.parametrize("kind", OBSERVERS)
def test_who_looks_at_the_tokens_sees_the_librarys(kind, caplog):
    model, original = pair(naflex(fc_norm=False))
    batch, outs = padded((2, 3), (4, 4)), []
    for each in (model, original):
        seen = []
        handle = OBSERVERS[kind](each, lambda _, __, out, seen=seen: seen.append(out))
        with torch.no_grad(), caplog.at_level(logging.WARNING, "vitfast"):
            each(**batch)
        outs.append([out.shape for out in seen if isinstance(out, torch.Tensor)])
        if each is model:
            assert "NaFlexVit, packing" in caplog.text
            assert [e.why for e in vitfast.acceleration_report(model).left if e.part == "packing"]
        handle.remove()
    assert {tuple(shape) for shape in outs[0]} <= {tuple(shape) for shape in outs[1]}
    assert {x.shape for _, x, _ in blocks_in(model, batch)} == {(22, 32)}, "gone with the hook"
    assert "packing" not in str(vitfast.acceleration_report(model))


def test_intermediate_features_are_the_librarys():
    model, original = pair(naflex())
    batch = padded((2, 3), (4, 4))
    batch = dict(patches=batch["x"], patch_coord=batch["patch_coord"], patch_valid=batch["patch_valid"])
    ours, theirs = (each.forward_intermediates(batch, output_fmt="NLC", output_dict=True) for each in (model, original))
    for a, b in zip(ours["image_intermediates"], theirs["image_intermediates"], strict=True):
        assert a.shape == b.shape and torch.allclose(a[batch["patch_valid"]], b[batch["patch_valid"]], atol=1e-5)


@pytest.mark.parametrize("part", ["qkv", "fc1"])
@pytest.mark.parametrize("options", [dict(class_token=True), dict(class_token=True, rope_type="mixed")], ids=str)
def test_lora_in_a_packed_tower(part, options):
    """The layer runs the library's code on the padded batch, with its mask and rotary positions."""
    peft = pytest.importorskip("peft")
    adapted = []
    for each in pair(naflex(**options)):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=[part], init_lora_weights=False)
        adapted.append(peft.get_peft_model(each, config))
    batch = padded((2, 3), (4, 4))
    outs = [each(**batch) for each in adapted]
    assert_close(*outs, atol=1e-5)
    grads = [
        torch.autograd.grad(out.square().sum(), [p for p in each.parameters() if p.requires_grad])
        for out, each in zip(outs, adapted)
    ]
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, atol=1e-4, rtol=1e-4)
    left = [e.why for e in vitfast.acceleration_report(adapted[0]).left if e.part.endswith("block")]
    assert len(left) == 2 and all("lora" in why for why in left)
    assert {x.shape[0] for _, x, _ in blocks_in(adapted[0], batch)} == {6 + 16 + 2}


def test_gradient_checkpointing_of_timm():
    model, original = pair(naflex(drop_path_rate=0.4, class_token=True))
    for each in (model, original):
        each.set_grad_checkpointing()
    assert_same(model.train(), original.train(), padded((2, 3), (4, 4)))
