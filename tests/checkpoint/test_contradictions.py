"""Files that leave a thing out, or say it twice: the other library's logits, or an error that names it."""

import argparse
import json
import logging

import pytest
import safetensors.torch
import timm
import torch
import transformers
from checkpoints import CLASSES, HEADS, HF, SMALL, TOL, agree, google, images, logits, randomised, small_timm
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT, load_checkpoint


def spoil(folder, change, name="model.safetensors"):
    """The tensors of a folder after `change(state)`."""
    state = safetensors.torch.load_file(folder / name)
    change(state)
    safetensors.torch.save_file(state, folder / name, metadata={"format": "pt"})


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def hugging_face(name, folder, **changes):
    """A small model of transformers with random weights, saved."""
    cls = getattr(transformers, name)
    known = {*cls.config_class().to_dict(), "num_labels"}
    made = {k: v for k, v in HF.items() if k in known}
    truth = randomised(cls(cls.config_class(**made | changes)))
    truth.save_pretrained(folder)
    return truth


# ---- a lost position table


@pytest.mark.parametrize(
    "name",
    ["ViTForImageClassification", "ViTModel", "DeiTModel", "Dinov2ForImageClassification", "Dinov2WithRegistersModel"],
)
def test_a_hugging_face_model_without_its_positions(tmp_path, name):
    hugging_face(name, tmp_path)
    ViT.from_pretrained(tmp_path, num_classes=0)
    spoil(tmp_path, lambda state: state.pop(next(k for k in state if k.endswith("position_embeddings"))))
    bare = tmp_path / "w.safetensors"
    bare.write_bytes((tmp_path / "model.safetensors").read_bytes())
    for source, more in ((tmp_path, {}), (bare, {}), (bare, dict(pos_embed="none"))):
        with pytest.raises(InputError, match=f"^{source}: there is no position table, and a Hugging Face .* always"):
            ViT.from_pretrained(source, num_heads=HEADS, num_classes=0, **more)


def test_a_timm_folder_without_its_positions(tmp_path):
    """timm cannot load it either; with pos_embed="none" both have the same logits."""
    truth = randomised(timm.create_model("vit_base_patch16_224", **SMALL))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    spoil(tmp_path, lambda state: state.pop("pos_embed"))
    with pytest.raises(InputError, match=f"^{tmp_path}: there is no position table; .*pass pos_embed='none'"):
        ViT.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="pos_embed"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    asked = ViT.from_pretrained(tmp_path, pos_embed="none")
    args = json.loads((tmp_path / "config.json").read_text())["model_args"]
    edit(tmp_path / "config.json", model_args=args | dict(pos_embed="none"))
    truth = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    agree(ViT.from_pretrained(tmp_path), truth)
    agree(asked, truth)


def test_a_torchvision_file_without_its_positions(tmp_path):
    from vitfast.convert import write

    write(randomised(ViT(**SMALL)), tmp_path / "w.safetensors", "torchvision")
    spoil(tmp_path, lambda state: state.pop("encoder.pos_embedding"), "w.safetensors")
    with pytest.raises(InputError, match="no position table, and a torchvision always has one"):
        ViT.from_pretrained(tmp_path / "w.safetensors", num_heads=HEADS)


# ---- timm's own defaults


@pytest.mark.parametrize("args", [dict(fc_norm=True), dict(fc_norm=True, global_pool="avg"), dict(fc_norm=False)])
@pytest.mark.parametrize("name", ["vit_base_patch16_224", "vit_base_patch16_gap_224", "eva_large_patch14_196"])
def test_pooling_that_nothing_says_is_that_of_timms_name(tmp_path, name, args):
    truth = randomised(timm.create_model(name, **SMALL, **args))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["global_pool"]
    (tmp_path / "config.json").write_text(json.dumps(content | dict(model_args=SMALL | args)))
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    model = ViT.from_pretrained(tmp_path)
    agree(model, again)
    assert model.config["global_pool"] == again.global_pool == truth.global_pool


def test_a_norm_after_pooling_that_the_name_has_not(tmp_path):
    """timm fails on its names; what it pools nobody says."""
    truth = randomised(timm.create_model("vit_base_patch16_224", **SMALL, global_pool="avg"))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["global_pool"]
    (tmp_path / "config.json").write_text(json.dumps(content | dict(model_args=SMALL)))
    with pytest.raises(RuntimeError, match="fc_norm"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    with pytest.raises(InputError, match="config.json says nothing of fc_norm, .*global_pool='token'"):
        ViT.from_pretrained(tmp_path)


# ---- two names of one tensor


@pytest.mark.parametrize(
    "first, second",
    [
        ("vit.encoder.layer.0.attention.attention.query.weight", "vit.layers.0.attention.q_proj.weight"),
        ("vit.embeddings.cls_token", "embeddings.cls_token"),
        ("classifier.weight", "cls_classifier.weight"),
    ],
)
def test_two_names_in_a_hugging_face_file(tmp_path, first, second):
    hugging_face("ViTForImageClassification", tmp_path)
    spoil(tmp_path, lambda state: state.update({second: state[first] + 1}))
    for call in (load_checkpoint, ViT.from_pretrained):
        with pytest.raises(InputError, match="are two names of the same tensor") as caught:
            call(tmp_path)
        assert first in str(caught.value) and second in str(caught.value)


@pytest.mark.parametrize(
    "first, second",
    [
        ("blocks.0.ls1.gamma", "blocks.0.gamma_1"),
        ("reg_token", "dist_token"),
        ("blocks.1.attn.qkv.weight", "blocks.1.attn.q.weight"),
    ],
)
def test_two_names_in_a_timm_file(tmp_path, first, second):
    state = small_timm(init_values=0.1, reg_tokens=1).state_dict()
    state |= {second: state[first]}
    if second.endswith(".q.weight"):
        state |= {second.replace(".q.", f".{name}."): state[first][:48] for name in "qkv"}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(InputError, match="are two names of the same tensor") as caught:
        load_checkpoint(tmp_path / "w.pth")
    assert first in str(caught.value) and second in str(caught.value)


def test_stacked_layers_beside_single_ones(tmp_path):
    import numpy as np
    from checkpoints import stacked

    np.savez(tmp_path / "w.npz", **google(), **{k: v for k, v in stacked(google()).items() if "encoderblock/" in k})
    with pytest.raises(InputError, match="encoderblock/.* and .*encoderblock_0/.* are two names of the same tensor"):
        load_checkpoint(tmp_path / "w.npz")


@pytest.mark.parametrize("form", ["timm", "huggingface"])
def test_a_prefix_on_every_second_name(tmp_path, form):
    if form == "timm":
        state = small_timm().state_dict()
    else:
        state = hugging_face("ViTModel", tmp_path).state_dict()
    mixed = {f"module.{k}" if i % 2 else k: v for i, (k, v) in enumerate(state.items())}
    torch.save(mixed, tmp_path / "w.pth")
    for call in (load_checkpoint, ViT.from_pretrained):
        with pytest.raises(InputError, match=r"names behind 'module\.'; missing .*; unexpected module\.") as caught:
            call(tmp_path / "w.pth")
        assert "RMSNorm" not in str(caught.value)


# ---- tensors that are no weights


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_q_k_and_v_are_looked_at_one_by_one(tmp_path, dtype, part):
    """Joined, an int8 beside floats would be floats."""
    hugging_face("ViTModel", tmp_path)
    name = next(
        k for k in safetensors.torch.load_file(tmp_path / "model.safetensors") if f"0.attention.attention.{part}.w" in k
    )
    spoil(tmp_path, lambda state: state.update({name: state[name].to(dtype)}))
    said = rf"blocks\.0\.attn\.{part[0]}\.weight is {dtype} of shape \(48, 48\), expected values of float64, float32"
    for call in (load_checkpoint, ViT.from_pretrained):
        with pytest.raises(InputError, match=said):
            call(tmp_path)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_values_of_their_own(tmp_path, kind):
    state = small_timm().state_dict()
    change = torch.Tensor.to_sparse if kind == "sparse" else lambda t: t.to("meta")
    for name in ("head.weight", "blocks.0.attn.qkv.weight"):
        torch.save(state | {name: change(state[name])}, tmp_path / "w.pth")
        with pytest.raises(InputError, match=f"w.pth: {name} is .*{kind}.*, expected a dense tensor"):
            load_checkpoint(tmp_path / "w.pth")


# ---- pixel statistics, and the arguments of timm's training script


def arguments(as_dict, **values):
    return values if as_dict else argparse.Namespace(**values)


@pytest.mark.parametrize("as_dict", [False, True], ids=["namespace", "dict"])
def test_a_training_checkpoint_says_its_pixels(tmp_path, caplog, as_dict):
    truth = randomised(timm.create_model("vit_base_patch16_224", **SMALL, fc_norm=False, global_pool="avg"))
    options = dict(gp="avg", model_kwargs=dict(fc_norm=False, num_heads=HEADS), mean=[0.1, 0.2, 0.3], std=[0.2] * 3)
    content = dict(state_dict=truth.state_dict(), arch="vit_base_patch16_224", args=arguments(as_dict, **options))
    torch.save(content, tmp_path / "last.pth.tar")
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path / "last.pth.tar")
    assert not caplog.records
    agree(model, truth)
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(options[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(logits(model.eval(), raw), logits(truth, (raw / 255 - mean) / std), **TOL)


@pytest.mark.parametrize("as_dict", [False, True], ids=["namespace", "dict"])
@pytest.mark.parametrize(
    "options, says",
    [
        (dict(mean=[0.1, 0.2]), "mean must be one number or one for each of the 3 channels, got 2"),
        (dict(std=[0, 0, 0]), "std must be "),
        (dict(model_kwargs=dict(warp=1)), "model_kwargs has 'warp'"),
        (dict(model_kwargs=3), "model_kwargs must be an object, got 3"),
        (dict(gp="max"), "gp='max' is not supported"),
        (dict(model_kwargs=dict(act_layer="relu")), "activation 'relu' is not supported"),
        (dict(model_kwargs=dict(qk_norm=True)), "qk_norm=True, the tensors qk_norm=False"),
        (dict(model_kwargs=dict(depth=7)), "depth=7, the tensors depth=2"),
        (dict(model_kwargs=dict(img_size=64)), "images of 64 x 64"),
    ],
    ids=str,
)
def test_arguments_of_a_training_checkpoint_are_named(tmp_path, as_dict, options, says):
    """There is no config.json to speak of."""
    options = dict(model_kwargs=dict(num_heads=HEADS)) | options
    content = dict(state_dict=small_timm().state_dict(), arch="vit_base_patch16_224")
    torch.save(
        content | dict(args=arguments(as_dict, gp=None) if not options else arguments(as_dict, **options)),
        tmp_path / "w.pth",
    )
    with pytest.raises(InputError, match="w.pth: the checkpoint's field args") as caught:
        ViT.from_pretrained(tmp_path / "w.pth")
    assert says in str(caught.value) and "config.json" not in str(caught.value)


def test_statistics_of_another_number_of_channels(tmp_path):
    hugging_face("ViTModel", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(image_mean=[0.1, 0.2], image_std=[0.5] * 3)))
    said = "preprocessor_config.json: image_mean must be one number or one for each of the 3 channels, got 2"
    with pytest.raises(InputError, match=f"^{tmp_path}: {said}"):
        ViT.from_pretrained(tmp_path)
    (tmp_path / "timm").mkdir()
    save_for_hf(
        randomised(timm.create_model("vit_base_patch16_224", **SMALL)), tmp_path / "timm", safe_serialization=True
    )
    content = json.loads((tmp_path / "timm" / "config.json").read_text())
    edit(tmp_path / "timm" / "config.json", pretrained_cfg=content["pretrained_cfg"] | dict(std=[0.1, 0.2]))
    with pytest.raises(
        InputError, match="config.json: std must be one number or one for each of the 3 channels, got 2"
    ):
        ViT.from_pretrained(tmp_path / "timm")


# ---- Hugging Face's fields


OF_TEXT = dict(
    bos_token_id=0, eos_token_id=2, pad_token_id=1, sep_token_id=3, decoder_start_token_id=None, max_length=20,
    min_length=0, do_sample=False, num_beams=1, num_beam_groups=1, diversity_penalty=0.0, early_stopping=False,
    temperature=1.0, top_k=50, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, length_penalty=1.0,
    no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, bad_words_ids=None, num_return_sequences=1,
    remove_invalid_values=False, exponential_decay_length_penalty=None, suppress_tokens=None,
    begin_suppress_tokens=None, forced_bos_token_id=None, forced_eos_token_id=None, output_scores=False,
    return_dict_in_generate=False, tokenizer_class=None, prefix=None, tie_encoder_decoder=False, return_dict=True,
)  # fmt: skip


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2WithRegistersModel"])
def test_fields_of_text_generation_and_of_facebooks_code(tmp_path, name):
    """transformers computes the same with and without them, and with eps 0."""
    hugging_face(name, tmp_path)
    more = OF_TEXT | dict(interpolate_antialias=True, interpolate_offset=0.1, layer_norm_eps=0.0)
    edit(tmp_path / "config.json", **more)
    truth, x = getattr(transformers, name).from_pretrained(tmp_path).eval(), images()
    model = ViT.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), truth(x).last_hidden_state, **TOL)
    assert model.config["norm_eps"] == 0


def test_fields_of_transformers_in_its_wrapper_of_timm(tmp_path):
    config = transformers.TimmWrapperConfig(
        architecture="vit_base_patch16_224",
        model_args={k: v for k, v in SMALL.items() if k != "num_classes"},
        num_labels=CLASSES,
    )
    randomised(transformers.TimmWrapperForImageClassification(config)).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", return_dict=True, output_attentions=False, pad_token_id=None)
    truth = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    agree(ViT.from_pretrained(tmp_path), truth)


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(architectures="ViTModel"), "architectures must be a list of names, got 'ViTModel'"),
        (dict(architectures={}), "architectures must be a list of names, got {}"),
        (dict(id2label={"0": "a", "00": "b", "1": "c"}), "id2label names class 0 twice"),
    ],
    ids=str,
)
def test_fields_that_are_malformed(tmp_path, fields, says):
    hugging_face("ViTForImageClassification", tmp_path)
    edit(tmp_path / "config.json", **fields)
    with pytest.raises(InputError, match=f"^{tmp_path}: config.json: {says}"):
        ViT.from_pretrained(tmp_path)
