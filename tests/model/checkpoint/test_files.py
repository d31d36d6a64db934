"""Our own folders, runs, shards and the hub; and what from_pretrained changes of a checkpoint."""

import json
import re
import shutil
import sys
from pathlib import Path

import checkpoints as c
import pytest
import safetensors.torch
import torch
from timm.layers import resample_abs_pos_embed

from vitfast import InputError, ViT, cli, load_checkpoint
from vitfast.model.checkpoint.files import last_checkpoint
from vitfast.model.checkpoint.load import read
from vitfast.model.checkpoint.writers import save

VARIANTS = {
    "plain": dict(),
    "numbers": dict(act_layer="gelu_tanh", norm_eps=1e-3, mean=(0.1, 0.2, 0.3), std=0.7, residual_in_fp32=True)
    | dict(drop_path_rate=0.1),
    "sincos": dict(pos_embed="sincos2d", class_token=False, global_pool="avg", img_size=(32, 16), patch_size=(8, 4)),
    "head": dict(representation_size=40, init_values=0.1, reg_tokens=3, no_embed_class=True, weight_init="jax")
    | dict(head_init_bias=-1.0),
    "features": dict(num_classes=0, dynamic_img_size=True, global_pool=""),
    "DINOv3": dict(rope="dinov3", rope_temperature=50.0, pos_embed="none", reg_tokens=4, qkv_bias=False),
    "EVA-02": dict(rope="cat", ref_feat_shape=(3, 5), swiglu_mlp=True, scale_mlp_norm=True, mlp_ratio=8 / 3),
    "MAP head": dict(global_pool="map", class_token=False, pre_norm=True, act_layer="quick_gelu"),
    "norms everywhere": dict(qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ours_come_back_bit_for_bit(tmp_path, variant):
    model, folder = c.randomised(ViT(**{**c.SMALL, **VARIANTS[variant]})), tmp_path / "a" / "b"
    model.save_pretrained(folder)
    again = ViT.from_pretrained(folder).eval()
    assert again.config == model.config == ViT(**again.config).config and again.mean == model.mean
    assert [*again.state_dict()] == [*model.state_dict()] and c.same(again.state_dict(), model.state_dict())
    assert {p.name for p in folder.iterdir()} == {"model.safetensors", "config.json"}
    size = model.patch_embed.img_size
    for x in (c.images(*size), torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)):
        assert torch.equal(c.logits(again, x), c.logits(model, x))
    content = json.loads((folder / "config.json").read_text())
    assert c.pick(content, "library", "architecture") == dict(library="vitfast", architecture="ViT")


def test_ours_come_back_after_changes(tmp_path):
    model = ViT(**c.SMALL)
    model.set_input_size((16, 48))
    model.prune_intermediate_layers([0])
    model.reset_classifier(7)
    c.randomised(model).save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert again.config == model.config and len(again.blocks) == 1
    c.agree(again, model, c.images(16, 48))


def test_save_untidy_tensors(tmp_path):
    """Tied weights, transposed ones and views into larger memory; 16 bits, which load into fp32."""
    model = c.randomised(ViT(**c.SMALL))
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    model.blocks[0].attn.proj.weight.data = model.blocks[0].attn.proj.weight.data.T
    model.cls_token.data = torch.randn(1, 5, c.D)[:, 2:3]
    save(model, tmp_path)
    c.agree(ViT.from_pretrained(tmp_path), model)
    save(model.bfloat16(), tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert all(torch.equal(v, model.state_dict()[k].float()) for k, v in again.state_dict().items())


# ---- what from_pretrained changes


@pytest.fixture
def saved(tmp_path):
    truth = c.small_timm()
    torch.save(truth.state_dict(), tmp_path / "w.pth")
    return truth, tmp_path / "w.pth"


@pytest.mark.parametrize("size", [64, (16, 56)])
def test_another_image_size(saved, size):
    truth, path = saved
    model = ViT.from_pretrained(path, num_heads=c.HEADS, img_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    positions = resample_abs_pos_embed(truth.pos_embed.data, (height // c.P, width // c.P))
    torch.testing.assert_close(model.pos_embed.data, positions, atol=1e-6, rtol=0)
    truth.set_input_size((height, width))
    c.agree(model, truth, c.images(height, width))
    assert model.config["img_size"] == (height, width)


def test_another_number_of_classes(saved):
    truth, path = saved
    c.agree(ViT.from_pretrained(path, num_heads=c.HEADS, num_classes=c.CLASSES, img_size=c.SIZE), truth)
    model, x = ViT.from_pretrained(path, num_heads=c.HEADS, num_classes=9).eval(), c.images()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), truth.forward_features(x), **c.TOL)
    assert c.logits(model, x).shape == (2, 9) and not c.logits(model, x).any()
    headless = ViT.from_pretrained(path, num_heads=c.HEADS, num_classes=0)
    assert headless.num_classes == 0 and not any(k.startswith("head") for k in headless.state_dict())
    truth.reset_classifier(0)
    c.agree(headless, truth)


def test_other_arguments(saved):
    truth, path = saved
    plain = dict(drop_path_rate=0.2, mean=0.1, dynamic_img_size=True, residual_in_fp32=True)
    model = ViT.from_pretrained(path, num_heads=c.HEADS, global_pool="avg", embed_dim=c.D, **plain)
    assert model.blocks[-1].drop_path_rate == 0.2 and model.mean == (0.1,) * 3 and model.config["global_pool"] == "avg"
    truth.global_pool = "avg"  # timm's own norm stays before the pooling here
    c.agree(model, truth)
    assert c.logits(model, c.images(48, 16)).shape == (2, c.CLASSES)
    state, config = read(path, num_heads=c.HEADS)
    assert ViT(**config).load_state_dict(state, strict=True)


# ---- shards and the hub


def hugging_face():
    return c.made("ViTForImageClassification")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_of_hugging_face(tmp_path, suffix):
    truth = hugging_face()
    truth.save_pretrained(tmp_path, max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.json"
    if suffix == "bin":  # as transformers 4 wrote them
        listed = json.loads(index.read_text())
        for shard in tmp_path.glob("*.safetensors"):
            torch.save(safetensors.torch.load_file(shard), shard.with_name(f"pytorch_{shard.stem}.bin"))
            shard.unlink()
        index.unlink()
        index = tmp_path / "pytorch_model.bin.index.json"
        files = {k: f"pytorch_{v.removesuffix('.safetensors')}.bin" for k, v in listed["weight_map"].items()}
        index.write_text(json.dumps(dict(weight_map=files)))
    shards = sorted(tmp_path.glob(f"*-of-*.{suffix}"))
    assert len(shards) > 1
    x = c.images()
    for source in (tmp_path, index):
        c.agree(ViT.from_pretrained(source), truth, x)
    c.refused(shards[0], "one shard of several; give the folder", (load_checkpoint,))

    def load_folder(says):
        with pytest.raises(InputError, match=says):
            load_checkpoint(tmp_path)

    kept = shards[1].read_bytes()
    shutil.copy(shards[0], shards[1])
    load_folder(f"{shards[1].name}: lacks .*, which {index.name} lists")
    shards[1].unlink()
    load_folder(f"{index.name}: lists {shards[1].name}, which is not there")
    shards[1].write_bytes(kept)
    for odd in ({}, dict(weight_map=[]), dict(weight_map={"a": "../x.safetensors"}), dict(weight_map={"a": 3})):
        index.write_text(json.dumps(odd))
        load_folder("weight_map must list a file such as")
    index.unlink()
    load_folder("shards without the index that lists them")


def hub_cache(folder, truth, names, **options):
    """A repository as huggingface_hub caches it."""
    snapshot = folder / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "models--owner--name" / "refs").mkdir()
    (folder / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    truth.save_pretrained(folder / "made", **options)
    for name in names or [path.name for path in (folder / "made").iterdir()]:
        (folder / "made" / name).rename(snapshot / name)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def test_hub_names(tmp_path, offline, monkeypatch):
    """They load like their folders; what is not in the cache, or no name, is said."""
    truth, reads = hugging_face(), (load_checkpoint,)
    c.refused("hf-hub:owner/nobody", "no model.safetensors or pytorch_model.bin .*HF_HUB_OFFLINE", reads)
    c.refused("hf-hub:no/such/form", "the hub did not give", reads)
    hub_cache(tmp_path, truth, ("model.safetensors",))  # config.json may say another eps than the format's
    c.refused("hf-hub:owner/name", "config.json is not in the cache", reads)
    (snapshot,) = tmp_path.glob("models--*/snapshots/*")
    (tmp_path / "made" / "config.json").rename(snapshot / "config.json")
    c.agree(ViT.from_pretrained("hf-hub:owner/name"), truth)
    assert "blocks.0.attn.qkv.weight" in load_checkpoint("hf-hub:owner/name@main")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    c.refused("hf-hub:owner/name", "needs the package huggingface_hub", reads)


def test_shards_of_a_hub_name(tmp_path, offline):
    truth = hugging_face()
    hub_cache(tmp_path, truth, (), max_shard_size="50KB")
    c.agree(ViT.from_pretrained("hf-hub:owner/name"), truth)
    shard = next(tmp_path.glob("models--*/snapshots/*/*-00001-of-*"))
    shard.unlink()
    c.refused("hf-hub:owner/name", f"index.json lists {shard.name}, which is not there", (load_checkpoint,))


# ---- the last checkpoint of a run, whatever `last` is


@pytest.mark.parametrize("kind", ["link", "text", "folder"])
def test_the_last_checkpoint_of_a_run(tmp_path, monkeypatch, kind):
    run, model = tmp_path / "p1", c.randomised(ViT(**c.SMALL))
    checkpoints = run / "checkpoints"
    c.randomised(ViT(**c.SMALL)).save_pretrained(checkpoints / "step-00000002")
    model.save_pretrained(checkpoints / ("last" if kind == "folder" else "step-00000010"))
    (run / "config.yaml").write_text("task: pretrain\n")
    if kind == "link":
        (checkpoints / "last").symlink_to("step-00000010")
    elif kind == "text":
        (checkpoints / "last").write_text("step-00000010\n")
    for source in (run, f"{run}/", checkpoints / "last"):
        c.agree(ViT.from_pretrained(source), model)
    assert load_checkpoint(run).keys() == model.state_dict().keys()
    monkeypatch.chdir(tmp_path)
    c.agree(ViT.from_pretrained("p1"), model)
    monkeypatch.chdir(checkpoints)
    c.agree(ViT.from_pretrained("last"), model)
    assert cli.main(["convert", str(run), str(tmp_path / "w.safetensors"), "--format", "timm"]) == 0
    c.agree(ViT.from_pretrained(tmp_path / "w.safetensors", num_heads=c.HEADS), model)
    other = c.randomised(ViT(**c.SMALL))
    other.save_pretrained(run)  # weights of a folder go before its checkpoints
    c.agree(ViT.from_pretrained(run), other)


def test_runs_without_a_checkpoint(tmp_path):
    (tmp_path / "p1" / "checkpoints").mkdir(parents=True)
    last = tmp_path / "p1" / "checkpoints" / "last"
    assert last_checkpoint(last.parent) is None
    c.refused(tmp_path / "p1", "no weights in this folder")
    c.refused(last, "no such file or folder")

    for text in (b"step-3", b"", b"../../secret", b"\xff\x00", b"/etc", b"."):
        last.write_bytes(text)
        with pytest.raises(InputError, match=f"^{last}: names no checkpoint beside it; give the path of one of "):
            ViT.from_pretrained(tmp_path / "p1")
    last.unlink()
    last.symlink_to("step-3")
    assert last_checkpoint(last.parent) is None


@pytest.mark.parametrize(
    "source, hint",
    [
        (
            "vit_base_patch16_224",
            "of a timm model write hf-hub:timm/vit_base_patch16_224 .and .TAG, as in hf-hub:timm/",
        ),
        ("timm/vit_base_patch16_224.mae", "of a timm model write hf-hub:timm/vit_base_patch16_224.mae$"),
        ("hf_hub:timm/vit_tiny", "did you mean hf-hub:timm/vit_tiny.$"),
        ("hf-hub/owner/name", "did you mean hf-hub:owner/name.$"),
        ("https://huggingface.co/owner/name", "did you mean hf-hub:owner/name.$"),
        ("B/16", "B/16 is the name of a model, not weights: give a file, a folder or hf-hub:owner/name$"),
        ("google/vit-base", "for a repository of the Hugging Face hub write hf-hub:google/vit-base$"),
        ("b16.npy", "did you mean b16.npz.$"),
        ("my_weights", "$"),
    ],
)
def test_weights_that_are_not_there_get_a_hint(tmp_path, monkeypatch, source, hint):
    monkeypatch.chdir(tmp_path)
    Path("b16.npz").touch()
    c.refused(source, f"{re.escape(source)}: no such file or folder(; .*)?{hint}")
