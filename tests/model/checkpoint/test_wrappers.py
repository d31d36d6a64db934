"""Checkpoints of training frameworks: the ViT behind the name of an attribute, heads and losses beside it."""

import collections
import logging
import pathlib

import checkpoints as c
import pytest
import torch
import transformers
from safetensors.torch import load_file

from vitfast import InputError, ViT, load_checkpoint

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


def test_layers_of_peft_are_to_be_merged(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(c.small_timm(), peft.LoraConfig(target_modules=["qkv"]))
    path = lightning(tmp_path / "x.ckpt", {f"net.{k}": v for k, v in model.state_dict().items()})
    with pytest.raises(InputError, match=r"peft's layers in it; save model.merge_and_unload\(\).state_dict\(\)"):
        load_checkpoint(path)


def test_names_that_lost_their_prefix_are_an_error(tmp_path):
    state = {("" if ".mlp." in k else "net.") + k: v for k, v in c.small_timm().state_dict().items()}
    with pytest.raises(InputError, match="names are behind 'net.', and others are not .blocks.0.mlp.fc1.weight"):
        load_checkpoint(lightning(tmp_path / "x.ckpt", state))
