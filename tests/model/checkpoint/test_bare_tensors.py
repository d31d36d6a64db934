"""Files without a config.json: position tables, heads, and the ViT behind the names of training frameworks."""

import collections
import logging
import math
import pathlib

import checkpoints as c
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from vitfast import InputError, ViT, load_checkpoint
from vitfast.model.presets import PRESETS

HEADS = dict(num_heads=c.HEADS, act_layer="gelu")
NO_TOKEN = dict(class_token=False, global_pool="avg")
TABLES = [{}, dict(no_embed_class=True), dict(reg_tokens=4), dict(reg_tokens=4, no_embed_class=True), NO_TOKEN]


def bare(folder, model):
    safetensors.torch.save_file(model.state_dict(), folder / "w.safetensors")
    return folder / "w.safetensors"


def said(caplog):
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.quick(16)
@pytest.mark.parametrize("grid", [(2, 4), (3, 5), (4, 6), (4, 4), (4, 5), (1, 3), (2, 8), (3, 4), (7, 8)], ids=str)
@pytest.mark.parametrize("extra", TABLES, ids=lambda extra: ",".join(extra))
def test_the_callers_size_is_that_of_the_table(tmp_path, grid, extra):
    """timm's logits; or refused, where a table for patches alone is as long as a square with its prefix tokens."""
    size = grid[0] * c.P, grid[1] * c.P
    truth = c.small_timm(img_size=size, **extra)
    path, usual = bare(tmp_path, truth), truth.pos_embed.shape[1] - 1 - extra.get("reg_tokens", 0)
    told = {}
    if extra.get("no_embed_class") and usual > 0 and math.isqrt(usual) ** 2 == usual:
        own = rf"{grid[0]} x {grid[1]} \+ 0 \(img_size=\({size[0]}, {size[1]}\), no_embed_class=True\)"
        both = rf"{own} or .* \+ {1 + truth.num_reg_tokens} \(.* no_embed_class=False\); pass those"
        c.refused(path, both, img_size=size, **HEADS)
        told = dict(no_embed_class=True)
    c.agree(ViT.from_pretrained(path, img_size=size, **told, **HEADS), truth, c.images(*size))


@pytest.mark.parametrize("cls, alone", [(True, False), (True, True), (False, True)])
def test_googles_arrays_of_images_that_are_not_square(tmp_path, cls, alone):
    w = c.google(big_vision=alone, cls=cls)
    name = "pos_embedding" if alone else "Transformer/posembed_input/pos_embedding"
    w[name] = np.random.default_rng(1).normal(size=(1, 15 + (not alone), c.D)).astype(np.float32)
    path = tmp_path / "w.npz"
    np.savez(path, **w)
    c.refused(path, rf"a position table of {15 + (not alone)} entries is no square grid; pass img_size=\(height")
    options = dict(img_size=(24, 40), no_embed_class=alone, class_token=cls, act_layer="gelu_tanh")
    truth = c.timm_vit.VisionTransformer(**c.SMALL | options, global_pool="token" if cls else "avg", fc_norm=False)
    truth.load_state_dict(load_checkpoint(path))
    c.agree(ViT.from_pretrained(path, img_size=(24, 40)), truth.eval(), c.images(24, 40))


@pytest.mark.parametrize("kind", ["learn2d", "factorized", "relative"])
def test_other_tables_say_their_grid_and_heads(tmp_path, kind):
    model, size = c.small(img_size=(24, 40), pos_embed=kind), dict(img_size=(24, 40))
    told = dict(pos_embed=kind, act_layer="gelu") | (size if kind == "relative" else dict(num_heads=c.HEADS))
    again = ViT.from_pretrained(bare(tmp_path, model), **told)
    assert again.config["num_heads"] == c.HEADS
    c.agree(again, model, c.images(24, 40))


def test_norms_of_queries_say_the_heads(tmp_path):
    """Ti/16's own width, in which 3 heads would be assumed."""
    truth = c.randomised(timm.create_model("vit_tiny_patch16_224", num_heads=6, qk_norm=True, img_size=32))
    assert ViT.from_pretrained(bare(tmp_path, truth), act_layer="gelu").config["num_heads"] == 6
    c.refused(tmp_path / "w.safetensors", "expected num_heads=3, not 6", num_heads=3, act_layer="gelu")


NARROW = [name for name, made in PRESETS.items() if made["embed_dim"] < 700]
FAST = ("Ti/16", "Nano/8", "EVA02-Ti/14", "S/32", "B-half/32")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in NARROW])
def test_heads_of_a_presets_width(tmp_path, name, caplog):
    """Assumed and said, or refused where two presets of this width and patch differ."""
    with torch.device("meta"):
        model = ViT.from_preset(name, img_size=2 * PRESETS[name]["patch_size"], num_classes=1)
    model.to_empty(device="cpu")
    options = {k: v for k, v in PRESETS[name].items() if k in ("rope", "act_layer", "global_pool", "pos_embed")}
    path, told = bare(tmp_path, model), dict(act_layer="gelu") | options
    if name in ("S/32", "B-half/32"):
        says = r"how many heads there are; pass num_heads=6 \(S/32\) or num_heads=12 \(B-half/32\)"
        return c.refused(path, says, **told)
    with caplog.at_level(logging.WARNING, "vitfast"):
        assert ViT.from_pretrained(path, **told).config["num_heads"] == model.config["num_heads"]
    assert f"num_heads={model.config['num_heads']}" in said(caplog)


@pytest.mark.parametrize("chans", [None, 1, 4])
def test_channels_of_patches_that_are_rows_of_a_matrix(tmp_path, caplog, chans):
    """SigLIP 2's: those of config.json or of the caller; else three, which is said, or refused if they do not fit."""
    import transformers

    vision = {name: value for name, value in c.VISION.items() if name != "image_size"}
    config = transformers.Siglip2VisionConfig(**vision, num_patches=16, num_channels=chans or 3)
    truth = c.randomised(transformers.Siglip2VisionModel(config))
    truth.save_pretrained(tmp_path)
    path, told = tmp_path / "model.safetensors", dict(num_heads=c.HEADS)
    folder = ViT.from_pretrained(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "elsewhere.json")
    with caplog.at_level(logging.WARNING, "vitfast"):
        if chans is None:
            model = ViT.from_pretrained(path, **told)
            assert "the weights do not say in_chans=3, patch_size=8: assumed" in said(caplog)
        else:
            c.refused(path, f"a patch of {chans * 64} numbers is no . x . of 3 channels; pass in_chans=", **told)
            c.refused(path, "pass in_chans=", calls=(load_checkpoint,))
            model = ViT.from_pretrained(path, in_chans=chans, **told)
    x = c.images(chans=chans or 3)
    patches = nn.functional.unfold(x, 8, stride=8).mT.unflatten(2, (-1, 64)).mT.flatten(2)
    with torch.no_grad():
        theirs = truth(patches, torch.ones(2, 16), torch.tensor([[4, 4]] * 2)).pooler_output
    for found in (folder, model):
        c.agree(found, lambda x: theirs, x)


# ---- checkpoints of training frameworks: heads and losses beside the ViT


BESIDE = {"criterion.weight": torch.ones(5), "train_accuracy.tp": torch.zeros(1), "ema.n_averaged": torch.tensor(3)}


def lightning(path: pathlib.Path, state: dict) -> pathlib.Path:
    """A file with the entries of pytorch_lightning 2.6's, as its Trainer.save_checkpoint writes them."""
    callback = {"best_model_score": torch.tensor(0.5), "monitor": "val_loss", "dirpath": "/runs"}
    content = {
        "epoch": 2,
        "global_step": 100,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": collections.OrderedDict(state),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": callback},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-3, "name": "vit"},
    }
    torch.save(content, path)
    return path


@pytest.mark.parametrize("beside", [{}, BESIDE], ids=["alone", "beside others"])
@pytest.mark.parametrize("prefix", ["model.", "net.", "backbone.vit.", "module.model.encoder_x.", "net._orig_mod."])
def test_a_lightning_checkpoint_loads(tmp_path, prefix, beside, caplog):
    truth = c.small_timm()
    path = lightning(tmp_path / "x.ckpt", {prefix + k: v for k, v in truth.state_dict().items()} | beside)
    with caplog.at_level(logging.WARNING, "vitfast"):
        c.agree(ViT.from_pretrained(path, num_heads=c.HEADS), truth)
    said = "left out, as they are outside of the ViT: criterion.weight, train_accuracy.tp, ema.n_averaged"
    assert (said in caplog.text) == bool(beside)
    assert c.same(load_checkpoint(path), truth.state_dict())


@pytest.mark.parametrize("prefix", ["", "net."])
@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."])
def test_single_blocks_may_be_wrapped(tmp_path, prefix, wrapper):
    """Where `model.blocks[0] = torch.compile(model.blocks[0])`, or that of PyTorch's other wrappers."""
    truth = c.small_timm().state_dict()
    state = {prefix + k.replace("blocks.0.", f"blocks.0.{wrapper}"): v for k, v in truth.items()}
    assert c.same(load_checkpoint(lightning(tmp_path / "x.ckpt", state)), truth)


HUGGING_FACE = {
    "ViT": transformers.ViTForImageClassification(transformers.ViTConfig(**c.HF)),
    "ViT, no head": transformers.ViTModel(transformers.ViTConfig(**c.HF)),
    "DINOv2": transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**c.HF)),
    "CLIP": transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**c.HF, projection_dim=7)),
}


@pytest.mark.parametrize("prefix", ["net.", "backbone.encoder.", "vit.", "encoder.vit."])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_transformers_model_in_it_keeps_its_own_head(tmp_path, name, prefix):
    model = HUGGING_FACE[name]
    model.save_pretrained(tmp_path / "alone")
    alone = load_checkpoint(tmp_path / "alone")
    state = load_file(tmp_path / "alone/model.safetensors")  # its names are those of transformers 4
    wrapped = {prefix + k: v for k, v in state.items()} | {"fc.weight": torch.ones(2, c.D)}
    assert c.same(load_checkpoint(lightning(tmp_path / "x.ckpt", wrapped)), alone)


def test_a_head_outside_of_the_backbone_is_left_out(tmp_path, caplog):
    truth = c.small_timm(num_classes=0)
    state = {f"backbone.{k}": v for k, v in truth.state_dict().items()} | {"head.weight": torch.ones(3, c.D)}
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(lightning(tmp_path / "x.ckpt", state), num_heads=c.HEADS, num_classes=3)
    assert model.num_classes == 3 and not model.head.weight.any() and "outside of the ViT: head.weight" in caplog.text


def test_several_models_are_a_choice_of_the_user(tmp_path):
    state = {f"{who}.{k}": v for who in ("student", "teacher.ema") for k, v in c.small_timm().state_dict().items()}
    with pytest.raises(
        InputError, match=r"x.ckpt: there are 2 models in it, behind 'student.' and 'teacher.ema.'"
    ) as e:
        load_checkpoint(lightning(tmp_path / "x.ckpt", state))
    one = eval(str(e.value).partition("save one of them: ")[2], dict(state_dict=state))  # what the message advises
    torch.save(one, tmp_path / "one.pth")
    assert load_checkpoint(tmp_path / "one.pth").keys() == c.small_timm().state_dict().keys()


def test_a_dictionary_of_any_name_is_opened_and_several_are_a_choice(tmp_path):
    """As {"student": ..., "teacher": ...} of DINO's full checkpoints."""
    truth = c.small_timm().state_dict()
    content = {"epoch": 3, "teacher": {f"backbone.{k}": v for k, v in truth.items()}, "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "x.pth")
    assert c.same(load_checkpoint(tmp_path / "x.pth"), truth)
    torch.save({"student": {f"module.{k}": v for k, v in truth.items()}} | content, tmp_path / "x.pth")
    told = r"x.pth: there are 2 models in it, 'student' and 'teacher'; save one of them: checkpoint\['student'\]"
    with pytest.raises(InputError, match=told):
        load_checkpoint(tmp_path / "x.pth")
