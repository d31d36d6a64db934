"""Weights of Hugging Face in every layout: transformers' tokens, logits and pixels, on random weights."""

import json
import logging

import pytest
import safetensors.torch
import torch
import transformers
from checkpoints import HEADS, IMAGENET, TEXT, TOL, VISION, agree, images, logits, made, pick, randomised
from speed import first

from vitfast import InputError, ViT, load_checkpoint
from vitfast.model.convert import write

HALF = dict(mean=(0.5,) * 3, std=(0.5,) * 3)
TWO_HEADS, TWO_READS = "distilled DeiT has two heads", "class token beside the mean of the patches"
DINOV2 = dict(norm_eps=1e-6, act_layer="gelu", **IMAGENET)
DINOV3 = dict(rope="dinov3", dynamic_img_size=True, norm_eps=1e-5, swiglu_mlp=False, **IMAGENET)
CLIP, SIGLIP = dict(act_layer="quick_gelu", norm_eps=1e-5), dict(act_layer="gelu_tanh", norm_eps=1e-6, **HALF)
# What is found in the arguments, and why the head of some is refused.
MODELS = {
    "ViTForImageClassification": (dict(norm_eps=1e-12, act_layer="gelu", **HALF), ""),
    "ViTModel": (dict(norm_eps=1e-12, num_classes=0), ""),  # has a pooler, and no prefix
    "DeiTModel": (dict(norm_eps=1e-12, **IMAGENET), ""),
    "DeiTForImageClassification": (dict(norm_eps=1e-12, reg_tokens=1, **IMAGENET), ""),  # the distillation token
    "DeiTForImageClassificationWithTeacher": (dict(reg_tokens=1), TWO_HEADS),
    "Dinov2Model": (DINOV2, ""),
    "Dinov2ForImageClassification": (DINOV2 | dict(no_embed_class=False), TWO_READS),
    "Dinov2WithRegistersModel": (DINOV2, ""),
    "Dinov2WithRegistersForImageClassification": (DINOV2 | dict(no_embed_class=True), TWO_READS),
    "DINOv3ViTModel": (DINOV3, ""),
    "CLIPVisionModel": (CLIP, ""),
    "CLIPVisionModelWithProjection": (CLIP, ""),
    "CLIPModel": (CLIP, ""),
    "SiglipVisionModel": (SIGLIP, ""),
    "SiglipModel": (SIGLIP, ""),
    "SiglipForImageClassification": (SIGLIP | dict(global_pool="avg"), ""),
}


def tokens(truth, x):
    tower = truth.base_model if "ForImage" in type(truth).__name__ else truth
    with torch.no_grad():
        return getattr(truth, "vision_model", tower)(x).last_hidden_state


def pooled(truth, x):
    """What stands for the image: its projection, logits, or else what is pooled."""
    with torch.no_grad():
        found = truth.get_image_features(x) if hasattr(truth, "get_image_features") else truth(x)
    if not type(truth).__name__.startswith(("CLIP", "Siglip", "DINOv3")) and not hasattr(found, "logits"):
        return found.last_hidden_state[:, 0]
    names = ("image_embeds", "logits", "pooler_output")
    return next(value for name in names if (value := getattr(found, name, None)) is not None)


def check(source, truth, **known):
    """Every token and the output are transformers'. Returns our model."""
    name, x = type(truth).__name__, images()
    refused = MODELS.get(name, ({}, ""))[1]
    if refused:
        with pytest.raises(InputError, match=f"{refused}.*num_classes="):
            ViT.from_pretrained(source, **known)
        known["num_classes"] = 0
    model = ViT.from_pretrained(source, **known).eval()
    with torch.no_grad():
        if "CLIP" not in name:  # whose tokens have not been through the last norm
            torch.testing.assert_close(model.forward_features(x), tokens(truth, x), **TOL)
        if not refused:
            torch.testing.assert_close(model(x), pooled(truth, x), **TOL)
    return model


# What is written again, by transformers' class, and the keyword with which it has no layers that the ViT lacks.
WRITTEN = dict.fromkeys(["ViTForImageClassification", "DINOv3ViTModel", "CLIPVisionModel", "SiglipVisionModel"], {})
WRITTEN |= {"CLIPVisionModelWithProjection": {}, "ViTModel": dict(add_pooling_layer=False)}


def back(model, truth, out):
    """What we write of it transformers loads whole, with the same output; and so do we."""
    name, x = type(truth).__name__, images(*model.patch_embed.img_size, chans=model.in_chans)
    notes = write(model, out, "huggingface")
    square = x.shape[2] == x.shape[3]
    assert len(notes) == (not square) and all("how images are cut (crop_mode='center'" in note for note in notes)
    again, info = type(truth).from_pretrained(out, output_loading_info=True, **WRITTEN[name])
    assert not any(info.values()), info
    torch.testing.assert_close(pooled(again.eval(), x), pooled(truth, x), **TOL)
    torch.testing.assert_close(tokens(again, x), tokens(truth, x), **TOL)
    assert torch.equal(logits(ViT.from_pretrained(out).eval(), x), logits(model, x))
    names = safetensors.torch.load_file(out / "model.safetensors")
    if name.startswith(("CLIP", "Siglip")):  # transformers before 5.8 would start others at random
        assert all(key.startswith("vision_model.") or key == "visual_projection.weight" for key in names)
    elif name == "ViTForImageClassification":
        truth.save_pretrained(out / "theirs")
        theirs = safetensors.torch.load_file(out / "theirs" / "model.safetensors")
        assert names.keys() == theirs.keys() and all(torch.equal(names[key], theirs[key]) for key in names)


@pytest.mark.quick(8)
@pytest.mark.parametrize("layout", first(1, ["every field", "in memory", "bare"]))
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_is_transformers_model(tmp_path, name, layout):
    """The names of transformers 4, on disk, with all fields of config.json; those of 5 in memory; tensors alone."""
    truth, source = made(name), tmp_path
    if layout == "every field":
        truth.save_pretrained(tmp_path)
        truth.config.to_json_file(tmp_path / "config.json", use_diff=False)
        if name == "ViTForImageClassification":
            names = safetensors.torch.load_file(tmp_path / "model.safetensors")
            assert any(key.startswith("vit.encoder.layer.0.attention.attention.query") for key in names)
    elif layout == "in memory":
        truth.config.save_pretrained(tmp_path)
        torch.save(truth.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        source = tmp_path / "bare.pth"
        torch.save(truth.state_dict(), source)
    model = check(source, truth, num_heads=HEADS)
    if layout == "every field" and name in WRITTEN:
        back(model, truth, tmp_path / "back")
    wanted, refused = MODELS[name]
    found = model.config | dict(mean=model.mean, std=model.std)
    assert pick(found, *wanted) == wanted
    loaded = load_checkpoint(source)
    assert refused or loaded.keys() == model.state_dict().keys()
    if refused == TWO_HEADS:
        features = tokens(truth, x := images())
        first = features[:, 0] @ loaded["head.weight"].T + loaded["head.bias"]
        second = features[:, 1] @ loaded["head_dist.weight"].T + loaded["head_dist.bias"]
        torch.testing.assert_close((first + second) / 2, logits(truth, x), **TOL)


GATED = dict(use_gated_mlp=True, hidden_act="silu")


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "name, changes",
    [
        ("ViTModel", dict(layer_norm_eps=0.1)),
        ("ViTModel", dict(hidden_act="gelu_pytorch_tanh")),
        ("ViTModel", dict(hidden_act="quick_gelu")),
        ("ViTModel", dict(pooler_act="relu", encoder_stride=8)),
        ("ViTModel", dict(hidden_dropout_prob=0.1, num_attention_heads=6, qkv_bias=False)),
        ("Dinov2Model", dict(layer_norm_eps=0.1, layerscale_value=0.5)),
        ("Dinov2Model", dict(apply_layernorm=False, reshape_hidden_states=False, use_mask_token=False)),
        ("Dinov2Model", dict(drop_path_rate=0.3, qkv_bias=False)),
        ("Dinov2Model", dict(use_swiglu_ffn=True)),
        ("DINOv3ViTModel", dict(layer_norm_eps=0.1, num_register_tokens=0, rope_theta=30.0)),
        ("DINOv3ViTModel", dict(key_bias=True, drop_path_rate=0.1, **GATED)),
        ("DINOv3ViTModel", dict(proj_bias=False, mlp_bias=False, hidden_act="gelu_pytorch_tanh")),
        ("DINOv3ViTModel", dict(query_bias=False, value_bias=False)),
        ("SiglipVisionModel", dict(layer_norm_eps=0.1, hidden_act="gelu", vision_use_head=False)),
        ("CLIPModel", dict(layer_norm_eps=0.1, hidden_act="gelu", num_attention_heads=6)),
    ],
    ids=str,
)
def test_fields_that_are_heard_or_have_no_say(tmp_path, name, changes):
    truth = made(name, **changes)
    truth.save_pretrained(tmp_path)
    if "vision_use_head" in changes:  # nothing is pooled
        x, model = images(), ViT.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(model.forward_features(x), tokens(truth, x), **TOL)
        return
    model = check(tmp_path, truth)
    assert model.config["drop_path_rate"] == changes.get("drop_path_rate", 0)
    if name in WRITTEN:
        back(model, truth, tmp_path / "back")
    if "use_swiglu_ffn" in changes:  # whose layers have other names in memory
        torch.save(truth.state_dict(), tmp_path / "bare.pth")
        check(tmp_path / "bare.pth", truth, num_heads=HEADS)


def test_sizes_channels_and_pixels_are_heard(tmp_path):
    truth = made("ViTForImageClassification", image_size=[32, 16], num_channels=2, hidden_act="gelu_new")
    truth.save_pretrained(tmp_path)
    pixels = tmp_path / "preprocessor_config.json"
    pixels.write_text(json.dumps(dict(image_mean=[0.3, 0.4], image_std=[0.2, 0.1])))
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth, images(32, 16, chans=2))
    back(model, truth, tmp_path / "back")
    assert model.mean == (0.3, 0.4) and model.std == (0.2, 0.1) and model.config["img_size"] == (32, 16)
    pixels.write_text(json.dumps(dict(image_mean=[0.3, 0.4], do_normalize=False)))
    assert ViT.from_pretrained(tmp_path).std == (1.0, 1.0)


SMALLEST = dict(image_size=32, patch_size=8)


@pytest.mark.parametrize("name", ["ViTModel", "CLIPModel", "CLIPVisionModel"])
def test_fields_left_out_have_transformers_defaults(tmp_path, name):
    """12 heads, the activation and the eps; vision_config_dict of older files wins over vision_config."""
    truth = made(name, num_attention_heads=12)
    truth.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    if name == "CLIPModel":
        sizes = dict(hidden_size=48, num_hidden_layers=2, intermediate_size=96)
        content["vision_config"] = SMALLEST | dict(layer_norm_eps=0.1)
        content["vision_config_dict"] = SMALLEST | sizes
    else:
        kept = ("model_type", "architectures", "image_size", *(["patch_size"] if "CLIP" in name else []))
        content = {key: content[key] for key in kept}
    path.write_text(json.dumps(content))
    assert check(tmp_path, truth).config["num_heads"] == 12


# What transformers 4 wrote of text generation into the config.json of any model; and fields of Facebook's own code.
OF_TEXT = dict(
    bos_token_id=0, eos_token_id=2, pad_token_id=1, sep_token_id=3, decoder_start_token_id=None, max_length=20,
    min_length=0, do_sample=False, num_beams=1, num_beam_groups=1, diversity_penalty=0.0, early_stopping=False,
    temperature=1.0, top_k=50, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, length_penalty=1.0,
    no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, bad_words_ids=None, num_return_sequences=1,
    remove_invalid_values=False, exponential_decay_length_penalty=None, suppress_tokens=None,
    begin_suppress_tokens=None, forced_bos_token_id=None, forced_eos_token_id=None, output_scores=False,
    return_dict_in_generate=False, tokenizer_class=None, prefix=None, tie_encoder_decoder=False, return_dict=True,
    interpolate_antialias=True, interpolate_offset=0.1, layer_norm_eps=0.0,
)  # fmt: skip


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2WithRegistersModel"])
def test_fields_of_text_generation_and_of_facebooks_code(tmp_path, name):
    """transformers computes the same with and without them, and with eps 0."""
    made(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OF_TEXT))
    truth = getattr(transformers, name).from_pretrained(tmp_path).eval()
    assert check(tmp_path, truth).config["norm_eps"] == 0


@pytest.mark.parametrize("name", ["Siglip2VisionModel", "Siglip2Model"])
def test_siglip2_for_any_aspect(tmp_path, name):
    """It takes patches with their channels last; its positions are resized to every other grid."""
    from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

    vision = {name: value for name, value in VISION.items() if name != "image_size"} | dict(num_patches=16)
    cls = getattr(transformers, name)
    config = cls.config_class(vision_config=vision, text_config=TEXT) if name == "Siglip2Model" else None
    truth = randomised(cls(config or cls.config_class(**vision)))
    truth.save_pretrained(tmp_path)
    model = ViT.from_pretrained(tmp_path)
    assert model.patch_embed.img_size == (32, 32)
    tower, model.dynamic_img_size = getattr(truth, "vision_model", truth), True
    for height, width in ((4, 4), (3, 5), (6, 2)):
        x = images(height * 8, width * 8)
        patches = torch.stack([convert_image_to_patches(image, 8) for image in x])
        with torch.no_grad():
            theirs = tower(patches, torch.ones(2, height * width), torch.tensor([[height, width]] * 2)).pooler_output
        agree(model, lambda x, theirs=theirs: theirs, x)


RESAMPLING = "ViTModel DeiTModel Dinov2Model Dinov2WithRegistersModel SiglipVisionModel CLIPVisionModel".split()


@pytest.mark.parametrize("size", [(48, 48), (24, 56)])
@pytest.mark.parametrize("name", first(2, RESAMPLING))
def test_another_size_has_transformers_positions(tmp_path, name, size):
    """Loaded at that size, taking any size, and packed; also once saved and read again, and from bare tensors."""
    truth, x = made(name), images(*size)
    truth.save_pretrained(tmp_path)
    options = {} if name.startswith("Dinov2") else dict(interpolate_pos_encoding=True)
    with torch.no_grad():
        theirs = truth(x, **options).last_hidden_state
        model = ViT.from_pretrained(tmp_path)
        model.save_pretrained(tmp_path / "ours")
        theirs = model.norm(theirs) if "CLIP" in name else theirs
        for source in (tmp_path, tmp_path / "ours", tmp_path / "model.safetensors"):
            heads = dict(num_heads=HEADS) if source.suffix else {}
            again = ViT.from_pretrained(source, **heads, img_size=size, norm_eps=model.config["norm_eps"]).eval()
            torch.testing.assert_close(again.forward_features(x), theirs, **TOL)
        model.eval().dynamic_img_size = True
        torch.testing.assert_close(model.forward_features(x), theirs, **TOL)
        torch.testing.assert_close(torch.stack(model.forward_features(list(x))), theirs, **TOL)
    other = ViT.from_pretrained(tmp_path, pos_resample="bilinear_antialias", img_size=size)
    assert (other.pos_embed - again.pos_embed).abs().max() > 0.01  # the way matters


def test_timm_models_in_transformers_wrapper(tmp_path):
    """transformers saves timm's config.json beside fields of its own, the names of the classes too."""
    options = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=HEADS)
    labels = dict(id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1}, num_labels=2)
    config = transformers.TimmWrapperConfig(architecture="vit_base_patch16_224", model_args=options, **labels)
    randomised(transformers.TimmWrapperForImageClassification(config)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    more = dict(return_dict=True, output_attentions=False, pad_token_id=None)
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    truth = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth)
    assert model.class_names == ("cat", "dog")


# ---- pixels, and what is said


@pytest.mark.parametrize(
    "pixels",
    [
        dict(do_rescale=False),
        dict(rescale_factor=1 / 127.5),
        dict(do_normalize=False, rescale_factor=1 / 100),
        dict(image_mean=[0.1, 0.2, 0.3], image_std=[0.3, 0.2, 0.1], rescale_factor=0.01),
    ],
    ids=str,
)
def test_raw_images_are_those_of_the_processor(tmp_path, pixels):
    truth = made("ViTForImageClassification")
    truth.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(do_resize=False, **pixels).save_pretrained(tmp_path)
    raw = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    prepared = transformers.ViTImageProcessor.from_pretrained(tmp_path)(raw, return_tensors="pt")["pixel_values"]
    mine, theirs = logits(ViT.from_pretrained(tmp_path).eval(), raw[None]), logits(truth, prepared)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)  # pixels of up to 255 as they are
    write(ViT.from_pretrained(tmp_path), tmp_path / "back", "huggingface")
    again = transformers.ViTImageProcessor.from_pretrained(tmp_path / "back")(raw, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(again, prepared, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("older", [False, True])
def test_clips_processor(tmp_path, older):
    made("CLIPVisionModel").save_pretrained(tmp_path)
    processor = transformers.CLIPImageProcessor(size=dict(shortest_edge=40), crop_size=dict(height=32, width=32))
    processor.save_pretrained(tmp_path)
    if older:
        pixels = dict(feature_extractor_type="CLIPFeatureExtractor", size=40, crop_size=32, do_center_crop=True)
        pixels |= dict(image_mean=processor.image_mean, image_std=processor.image_std)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels | dict(do_resize=True, do_normalize=True)))
    model = ViT.from_pretrained(tmp_path)
    assert pick(model.config, "crop_mode", "crop_pct") == dict(crop_mode="center", crop_pct=pytest.approx(0.8))
    raw = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
    prepared = transformers.CLIPImageProcessor.from_pretrained(tmp_path)(raw, return_tensors="pt")["pixel_values"]
    ours = logits(model.eval(), raw[None, :, 4:36, 4:36])
    torch.testing.assert_close(ours, logits(model, prepared), **TOL)


NO_DROPOUT = "=0.1 is not taken over, the ViT has no dropout there"
SAID = {
    ("ViTForMaskedImageModeling", "hidden_dropout_prob"): [
        f"hidden_dropout_prob{NO_DROPOUT}",
        "the weights do not say mean=0.5, std=0.5: assumed; pass those that differ",
        "left out, as the ViT has no place for them: decoder.0.bias, decoder.0.weight, mask_token",
    ],
    ("DINOv3ViTModel", "attention_dropout"): [
        f"attention_dropout{NO_DROPOUT}",
        "pos_embed_rescale=2.0 is not taken over, the ViT changes no positions in training",
        "mask_token",
    ],
}


@pytest.mark.parametrize("name, field", SAID)
def test_what_is_left_out_or_assumed_is_said(tmp_path, caplog, name, field):
    made(name, **{field: 0.1}, **(dict(encoder_stride=8) if "Masked" in name else {})).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "vitfast"):
        ViT.from_pretrained(tmp_path)
    for line in SAID[name, field]:
        assert sum(line in record.getMessage() for record in caplog.records) == 1, (line, caplog.text)
    assert all(record.getMessage().startswith(f"{tmp_path}: ") for record in caplog.records)
