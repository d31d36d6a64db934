"""Position tables and heads of files without a config.json: the writer's logits, or an error."""

import logging
import math

import checkpoints as c
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
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


@pytest.mark.parametrize(
    "length, extra, says",
    [
        (225, {}, r"14 x 16 \+ 1 \(img_size=\(112, 128\), .* or 15 x 15 \+ 0 \(img_size=\(120, 120\), .*; pass those"),
        (196, {}, r"13 x 15 \+ 1 .* or 14 x 14 \+ 0 "),
        (25, dict(reg_tokens=4), r"4 x 5 \+ 5 .* or 5 x 5 \+ 0 "),
        (4, dict(reg_tokens=2), r"1 x 1 \+ 3 .* or 2 x 2 \+ 0 "),  # both are squares
        (224, {}, r"no square grid; pass img_size="),
        (224, NO_TOKEN, r"no square grid; pass img_size="),
    ],
)
def test_what_no_square_or_more_than_one_grid_fills_is_refused(tmp_path, length, extra, says):
    """Also at a size that is none of them."""
    model = c.small(img_size=(c.P * length, c.P), **{**extra, "no_embed_class": not extra.get("global_pool")})
    path = bare(tmp_path, model)
    for size in ({}, dict(img_size=31 * c.P)):
        c.refused(path, f"a position table of {length} entries is {says}", **HEADS, **size)


def test_the_one_square_is_taken_and_said(tmp_path, caplog):
    """A table of 16 + 1; where the caller's grid is as long, it is that, and a square is loaded at its own size."""
    square, wide = c.small_timm(), c.small_timm(img_size=(16, 64))
    with caplog.at_level(logging.WARNING, "vitfast"):
        c.agree(ViT.from_pretrained(bare(tmp_path, square), **HEADS), square)
    assert "do not say img_size=32, no_embed_class=False, norm_eps" in said(caplog)
    model = ViT.from_pretrained(tmp_path / "w.safetensors", img_size=32, **HEADS)
    model.set_input_size((16, 64))
    square.set_input_size((16, 64))
    c.agree(model, square, c.images(16, 64))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "vitfast"):
        c.agree(ViT.from_pretrained(bare(tmp_path, wide), img_size=(16, 64), **HEADS), wide, c.images(16, 64))
    assert "do not say img_size=(16, 64), no_embed_class=False" in said(caplog)


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
    """B/16's own width, in which 12 heads would be assumed."""
    truth = c.randomised(timm.create_model("vit_base_patch16_224", depth=12, num_heads=6, qk_norm=True, img_size=32))
    assert ViT.from_pretrained(bare(tmp_path, truth), act_layer="gelu").config["num_heads"] == 6
    c.refused(tmp_path / "w.safetensors", "expected num_heads=12, not 6", num_heads=12, act_layer="gelu")


@pytest.mark.parametrize("name", [name for name, made in PRESETS.items() if made["embed_dim"] < 700])
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


def test_siglip2s_number_of_patches_is_a_square(tmp_path):
    c.made("SiglipVisionModel").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "siglip2_vision_model", "num_patches": 15}')
    with pytest.raises(InputError, match="num_patches must be a square, as SigLIP 2's grid is, got 15"):
        ViT.from_pretrained(tmp_path)
