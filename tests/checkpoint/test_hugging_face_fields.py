"""Hugging Face's config.json: the model that transformers makes of it, or an error that says why not."""

import json
import logging

import pytest
import torch
import transformers
from checkpoints import HEADS, HF, TOL, agree, images, logits, randomised

from vitfast import InputError, ViT

OTHERS = """
    ViTMAEModel ViTMAEForPreTraining ViTMSNModel ViTMSNForImageClassification IJepaModel BeitModel Data2VecVisionModel
    CLIPTextModel ASTModel VideoMAEModel DPTModel VitDetModel VitPoseBackbone
""".split()


def made(name, **changes):
    """A small model of transformers with random weights; only the fields that its configuration has."""
    cls = getattr(transformers, name)
    fields = set(cls.config_class().to_dict()) | {"num_labels"}
    small = HF | dict(decoder_num_hidden_layers=1, decoder_hidden_size=16, decoder_num_attention_heads=2)
    return randomised(cls(cls.config_class(**{k: v for k, v in small.items() if k in fields} | changes)))


def tokens(truth, x):
    with torch.no_grad():
        return truth(x).last_hidden_state


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused_by_their_own_word(tmp_path, name):
    made(name).save_pretrained(tmp_path)
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    with pytest.raises(
        InputError, match=f"^{tmp_path}: config.json: model_type '{kind}' is not this ViT; known are vit"
    ):
        ViT.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["Dinov2Backbone", "Dinov2WithRegistersBackbone", "DINOv3ViTBackbone"])
def test_other_architectures_of_a_known_type_are_refused(tmp_path, name):
    made(name).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"config.json: architecture '{name}' is not this ViT; known are D.*Model"):
        ViT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("ViTModel", dict(layer_norm_eps=0.1)),
        ("ViTModel", dict(hidden_act="gelu_pytorch_tanh")),
        ("ViTModel", dict(pooler_act="relu", encoder_stride=8)),
        ("ViTModel", dict(hidden_dropout_prob=0.1)),
        ("ViTModel", dict(num_attention_heads=4)),
        ("Dinov2Model", dict(layer_norm_eps=0.1, layerscale_value=0.5)),
        ("Dinov2Model", dict(apply_layernorm=False, reshape_hidden_states=False, use_mask_token=False)),
        ("Dinov2Model", dict(drop_path_rate=0.3, qkv_bias=False)),
        ("Dinov2Model", dict(use_swiglu_ffn=True)),
        ("ViTModel", dict(hidden_act="quick_gelu")),
        ("DINOv3ViTModel", dict(layer_norm_eps=0.1, num_register_tokens=2, rope_theta=30.0)),
        ("DINOv3ViTModel", dict(use_gated_mlp=True, hidden_act="silu", key_bias=True, drop_path_rate=0.1)),
        ("SiglipVisionModel", dict(layer_norm_eps=0.1, hidden_act="gelu", vision_use_head=False)),
        ("Dinov2WithRegistersModel", dict(num_register_tokens=2)),
    ],
    ids=str,
)
def test_fields_that_are_heard_or_have_no_say(tmp_path, name, changes):
    truth, x = made(name, **changes), images()
    truth.save_pretrained(tmp_path)
    model = ViT.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), tokens(truth, x), **TOL)
    assert model.config["drop_path_rate"] == changes.get("drop_path_rate", 0)


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden_act="relu"),
        dict(use_swiglu_ffn=True),
        dict(qkv_bias=False),
        dict(hidden_size=64),
        dict(num_hidden_layers=3),
        dict(intermediate_size=64),
        dict(num_channels=1),
        dict(patch_size=16),
        dict(image_size=64),
        dict(pruned_heads={"0": [1]}),
        dict(is_decoder=True),
        dict(position_embedding_type="rotary"),
        dict(use_rope=False),
        dict(model_type="deit", architectures=["DeiTModel"]),
        dict(model_type="vit_mae"),
        dict(architectures=["ViTHybridModel"]),
    ],
    ids=str,
)
def test_fields_of_another_function(tmp_path, changes):
    """The error names the field, or what the tensors contradict."""
    truth = made("ViTForImageClassification")
    truth.save_pretrained(tmp_path)
    agree(ViT.from_pretrained(tmp_path), truth)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=f"^{tmp_path}: config.json") as caught:
        ViT.from_pretrained(tmp_path)
    ours = dict(hidden_size="embed_dim", num_hidden_layers="depth", num_channels="in_chans", hidden_act="activation")
    ours |= dict(use_swiglu_ffn="swiglu_mlp")
    ours |= dict(image_size="images", architectures="architecture")
    first = next(iter(changes))
    assert ours.get(first, first) in str(caught.value)


def test_fields_left_out_have_transformers_defaults(tmp_path):
    """12 heads and eps 1e-12, not those of a preset."""
    truth = made("ViTModel", num_attention_heads=12)
    truth.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    kept = ("model_type", "architectures", "image_size")
    path.write_text(json.dumps({key: content[key] for key in kept}))
    model, x = ViT.from_pretrained(tmp_path).eval(), images()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), tokens(truth, x), **TOL)
    assert (model.config["num_heads"], model.config["norm_eps"]) == (12, 1e-12)


@pytest.mark.parametrize("name", ["ViTModel", "DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel"])
def test_no_field_of_transformers_is_unknown(tmp_path, name):
    """With every field written, those at their defaults too."""
    truth, x = made(name), images()
    truth.save_pretrained(tmp_path)
    truth.config.to_json_file(tmp_path / "config.json", use_diff=False)
    model = ViT.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), tokens(truth, x), **TOL)


def test_what_is_left_out_or_assumed_is_said(tmp_path, caplog):
    made("ViTForMaskedImageModeling", encoder_stride=8, hidden_dropout_prob=0.1).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "vitfast"):
        ViT.from_pretrained(tmp_path)
    assert [record.getMessage().removeprefix(f"{tmp_path}: ") for record in caplog.records] == [
        "hidden_dropout_prob=0.1 is not taken over, the ViT has no dropout there",
        "nothing here says mean=0.5, std=0.5: assumed; pass those that differ",
        "left out, as the ViT has no place for them: decoder.0.bias, decoder.0.weight, mask_token",
    ]


@pytest.mark.parametrize(
    "pixels",
    [
        dict(do_rescale=False),
        dict(rescale_factor=1 / 127.5),
        dict(do_normalize=False),
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


def test_timm_models_in_transformers_wrapper(tmp_path):
    """transformers saves timm's config.json beside fields of its own, the names of the classes too."""
    import timm

    name = "vit_base_patch16_224"
    options = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=HEADS)
    config = transformers.TimmWrapperConfig(
        architecture=name,
        model_args=options,
        num_labels=2,
        id2label={0: "cat", 1: "dog"},
        label2id={"cat": 0, "dog": 1},
    )
    truth = randomised(transformers.TimmWrapperForImageClassification(config))
    truth.save_pretrained(tmp_path)
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth)
    assert model.class_names == ("cat", "dog") and isinstance(truth.timm_model, timm.models.VisionTransformer)
