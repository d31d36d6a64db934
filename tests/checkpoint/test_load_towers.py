"""DINOv3, SigLIP and CLIP of Hugging Face, judged by transformers' features on random weights."""

import json
import logging

import pytest
import safetensors.torch
import torch
import transformers
from checkpoints import HEADS, HF, IMAGENET, TOL, agree, images, logits, pick, randomised

from vitfast import InputError, ViT, load_checkpoint

VISION = {name: HF[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
VISION |= dict(image_size=32, patch_size=8)
TEXT = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=96, vocab_size=99)
TEXT |= dict(max_position_embeddings=9, bos_token_id=0, eos_token_id=1, pad_token_id=2)
BY_ITSELF = "CLIPVisionModel CLIPVisionModelWithProjection SiglipVisionModel DINOv3ViTModel".split()
WHOLE = ["CLIPModel", "SiglipModel", "SiglipForImageClassification"]


def made(name, **changes):
    cls = getattr(transformers, name)
    if name in WHOLE:
        more = dict(projection_dim=40) if name == "CLIPModel" else {}
        config = cls.config_class(vision_config=VISION | changes, text_config=TEXT, num_labels=5, **more)
    else:
        fields = {**VISION, "projection_dim": 40, "num_register_tokens": 2}
        config = cls.config_class(**{k: v for k, v in fields.items() if k in cls.config_class().to_dict()} | changes)
    config._attn_implementation = "eager"
    return randomised(cls(config))


def pooled(truth, x):
    """What stands for the image: its projection, logits, or else what is pooled."""
    with torch.no_grad():
        found = truth.get_image_features(x) if hasattr(truth, "get_image_features") else truth(x)
    for name in ("image_embeds", "logits", "pooler_output"):
        if (value := getattr(found, name, None)) is not None:
            return value


@pytest.mark.parametrize("name", [*BY_ITSELF, *WHOLE])
def test_folder_and_bare_tensors(tmp_path, name):
    truth, x = made(name), images()
    truth.save_pretrained(tmp_path)
    folder = ViT.from_pretrained(tmp_path)
    agree(folder, lambda x: pooled(truth, x), x)
    torch.save(truth.state_dict(), tmp_path / "bare.pth")
    bare = ViT.from_pretrained(tmp_path / "bare.pth", num_heads=HEADS)
    assert torch.equal(logits(bare.eval(), x), logits(folder, x))
    loaded = load_checkpoint(tmp_path)
    assert loaded.keys() == folder.state_dict().keys()


@pytest.mark.parametrize("name", ["SiglipVisionModel", "SiglipModel", "DINOv3ViTModel"])
def test_every_token(tmp_path, name):
    truth, x = made(name), images()
    truth.save_pretrained(tmp_path)
    tower = getattr(truth, "vision_model", truth)
    with torch.no_grad():
        tokens = ViT.from_pretrained(tmp_path).eval().forward_features(x)
        torch.testing.assert_close(tokens, tower(x).last_hidden_state, **TOL)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [(32, 32), (48, 16), (24, 80)])
def test_dinov3_at_any_size(tmp_path, gated, size):
    """The class token after the norm, and all the others."""
    act = dict(use_gated_mlp=True, hidden_act="silu") if gated else {}
    truth, x = made("DINOv3ViTModel", **act), images(*size)
    truth.save_pretrained(tmp_path)
    model = ViT.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        theirs = truth(x)
        torch.testing.assert_close(model.forward_features(x), theirs.last_hidden_state, **TOL)
        torch.testing.assert_close(model(x), theirs.pooler_output, **TOL)
    assert pick(model.config, "rope", "norm_eps", "swiglu_mlp") == dict(rope="dinov3", norm_eps=1e-5, swiglu_mlp=gated)
    assert pick(model.config, *IMAGENET) == IMAGENET


def test_a_gate_with_another_activation(tmp_path):
    made("DINOv3ViTModel", use_gated_mlp=True).save_pretrained(tmp_path)  # transformers' default is "gelu"
    with pytest.raises(InputError, match="config.json says act_layer='gelu', and the ViT's gated MLP has 'silu' alone"):
        ViT.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["Siglip2VisionModel", "Siglip2Model"])
def test_siglip2_for_any_aspect_at_its_own_size(tmp_path, name, caplog):
    """It takes patches with their channels last; its positions are resized to every other grid."""
    from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

    vision = {name: value for name, value in VISION.items() if name != "image_size"} | dict(num_patches=16)
    cls = getattr(transformers, name)
    config = cls.config_class(vision_config=vision, text_config=TEXT) if name == "Siglip2Model" else None
    truth = randomised(cls(config or cls.config_class(**vision)))
    truth.save_pretrained(tmp_path)
    x = images()
    patches = torch.stack([convert_image_to_patches(image, 8) for image in x])
    tower = getattr(truth, "vision_model", truth)
    with torch.no_grad():
        theirs = tower(patches, torch.ones(2, 16), torch.tensor([[4, 4]] * 2)).pooler_output
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path)
    agree(model, lambda x: theirs, x)
    assert "positions are SigLIP 2's at its own square size alone" in caplog.text
    assert model.patch_embed.img_size == (32, 32)


# ---- what the files say


@pytest.mark.parametrize("name", [*BY_ITSELF, "CLIPModel", "SiglipModel"])
def test_no_field_is_unknown(tmp_path, name):
    """With every field written, those at their defaults too."""
    truth, x = made(name), images()
    truth.save_pretrained(tmp_path)
    truth.config.to_json_file(tmp_path / "config.json", use_diff=False)
    agree(ViT.from_pretrained(tmp_path), lambda x: pooled(truth, x), x)


@pytest.mark.parametrize("name", ["CLIPModel", "CLIPVisionModel"])
def test_fields_left_out_have_transformers_defaults(tmp_path, name):
    """12 heads, the quick GELU, and eps 1e-5; vision_config_dict of older files wins over vision_config."""
    truth, x = made(name, num_attention_heads=12), images()
    truth.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    if name == "CLIPModel":
        small = dict(image_size=32, patch_size=8)
        content["vision_config"] = small | dict(layer_norm_eps=0.1)
        content["vision_config_dict"] = small | dict(hidden_size=48, num_hidden_layers=2, intermediate_size=96)
    else:
        content = {key: content[key] for key in ("model_type", "image_size", "patch_size")}
    path.write_text(json.dumps(content))
    agree(ViT.from_pretrained(tmp_path), lambda x: pooled(truth, x), x)


@pytest.mark.parametrize("older", [False, True])
def test_clips_processor(tmp_path, older):
    made("CLIPVisionModel").save_pretrained(tmp_path)
    sizes = dict(size=dict(shortest_edge=40), crop_size=dict(height=32, width=32))
    processor = transformers.CLIPImageProcessor(**sizes)
    processor.save_pretrained(tmp_path)
    if older:
        pixels = dict(feature_extractor_type="CLIPFeatureExtractor", size=40, crop_size=32, do_center_crop=True)
        pixels |= dict(
            image_mean=processor.image_mean, image_std=processor.image_std, do_resize=True, do_normalize=True
        )
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels))
    model = ViT.from_pretrained(tmp_path)
    assert pick(model.config, "crop_mode", "crop_pct") == dict(crop_mode="center", crop_pct=pytest.approx(0.8))
    raw = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
    prepared = transformers.CLIPImageProcessor.from_pretrained(tmp_path)(raw, return_tensors="pt")["pixel_values"]
    ours = logits(model.eval(), raw[None, :, 4:36, 4:36])
    torch.testing.assert_close(ours, logits(model, prepared), **TOL)


def test_the_tower_of_texts_is_said_to_be_left_out(tmp_path, caplog):
    made("CLIPModel").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "vitfast"):
        ViT.from_pretrained(tmp_path)
    left_out = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(left_out) == 1 and "logit_scale, text_model." in left_out[0] and left_out[0].endswith("more")


def test_what_transformers_trains_with_is_said(tmp_path, caplog):
    made("DINOv3ViTModel", attention_dropout=0.1).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "vitfast"):
        ViT.from_pretrained(tmp_path)
    assert "attention_dropout=0.1 is not taken over" in caplog.text
    assert "pos_embed_rescale=2.0 is not taken over, the ViT changes no positions in training" in caplog.text


@pytest.mark.parametrize(
    "name, fields, says",
    [
        ("CLIPModel", dict(vision_config=dict(VISION, hidden_act="relu")), "vision_config: activation 'relu'"),
        ("CLIPModel", dict(vision_config=dict(VISION, warp=1)), "vision_config has 'warp'"),
        ("CLIPModel", dict(vision_config=3), "vision_config must be an object, got 3"),
        ("CLIPModel", dict(architectures=["CLIPForImageClassification"]), "architecture 'CLIPForImageClassification'"),
        ("CLIPModel", dict(model_type="siglip", architectures=["SiglipModel"]), "the tensors are those of .* CLIP"),
        ("SiglipModel", dict(vision_config=dict(VISION, num_hidden_layers=3)), "depth=3, the tensors depth=2"),
        ("DINOv3ViTModel", dict(use_gated_mlp=True, hidden_act="silu"), "swiglu_mlp=True, the tensors swiglu_mlp=F"),
        ("DINOv3ViTModel", dict(rope_theta=-1), "rope_theta must be "),
        ("DINOv3ViTModel", dict(num_register_tokens=3), "reg_tokens=3, the tensors reg_tokens=2"),
    ],
    ids=str,
)
def test_fields_of_another_function(tmp_path, name, fields, says):
    made(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InputError, match=f"^{tmp_path}: config.json.*{says}"):
        ViT.from_pretrained(tmp_path)


def test_clips_classifier_is_refused(tmp_path):
    """It reads patches before the last norm."""
    truth = randomised(transformers.CLIPForImageClassification(transformers.CLIPConfig(vision_config=VISION)))
    torch.save(truth.state_dict(), tmp_path / "bare.pth")
    with pytest.raises(InputError, match="a classifier on CLIP's patches before their last norm is not supported yet"):
        ViT.from_pretrained(tmp_path / "bare.pth", num_heads=HEADS)


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_lost_positions(tmp_path, name):
    made(name).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path)
    state = {key: value for key, value in state.items() if key != "vision_model.embeddings.position_embedding.weight"}
    safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="there is no position table, and a Hugging Face .* always has one"):
        ViT.from_pretrained(tmp_path)


@pytest.mark.parametrize("gated", [False, True])
def test_dinov2_in_memory(tmp_path, gated):
    """transformers names a gated MLP's layers otherwise in memory than in its files."""
    fields = {k: v for k, v in VISION.items() if k != "intermediate_size"}
    truth, x = randomised(transformers.Dinov2Model(transformers.Dinov2Config(use_swiglu_ffn=gated, **fields))), images()
    torch.save(truth.state_dict(), tmp_path / "bare.pth")
    bare = ViT.from_pretrained(tmp_path / "bare.pth", num_heads=HEADS)
    agree(bare, lambda x: pooled(truth, x), x)


def test_clip_with_an_attentional_pooler_is_not_taken_for_clip(tmp_path):
    open_clip = pytest.importorskip("open_clip.transformer")
    model = open_clip.VisionTransformer(32, 8, 48, 1, 3, 2.0, attentional_pool=True, attn_pooler_heads=3, output_dim=48)
    torch.save(model.state_dict(), tmp_path / "coca.pth")
    with pytest.raises(InputError, match="coca.pth: a CLIP whose embedding an attentional pooler makes"):
        ViT.from_pretrained(tmp_path / "coca.pth", num_heads=3)


def test_what_openais_tensors_do_not_say_is_named(tmp_path, caplog):
    open_clip = pytest.importorskip("open_clip.transformer")
    torch.save(open_clip.VisionTransformer(32, 8, 48, 1, 3, 2.0, output_dim=48).state_dict(), tmp_path / "clip.pth")
    with caplog.at_level(logging.WARNING, "vitfast"):
        ViT.from_pretrained(tmp_path / "clip.pth", num_heads=3)
    assert "act_layer='quick_gelu', global_pool='token', norm_eps=1e-05: assumed" in caplog.text


def test_a_gate_has_one_activation_whoever_asks(tmp_path):
    model = ViT(32, 8, embed_dim=48, depth=1, num_heads=3, num_classes=3, swiglu_mlp=True)
    model.save_pretrained(tmp_path / "ours")
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    for source in (tmp_path / "ours", tmp_path / "bare.pth"):
        with pytest.raises(InputError, match=rf"{source}: its MLPs are gated, .* not act_layer='gelu'"):
            ViT.from_pretrained(source, num_heads=3, act_layer="gelu")
        ViT.from_pretrained(source, num_heads=3, act_layer="silu")
        with pytest.raises(InputError, match=f"{source}: image size 33 x 33 is no multiple"):
            ViT.from_pretrained(source, num_heads=3, img_size=33)
