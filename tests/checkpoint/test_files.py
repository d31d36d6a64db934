"""Our own files, the hub, and one clear line for what cannot be read."""

import json
import pickle
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from checkpoints import HF, SMALL, D, P, agree, google, images, logits, pick, randomised, small_timm

from vitfast import InputError, ViT, load_checkpoint
from vitfast.checkpoint import save
from vitfast.files import write_atomically


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(
            act_layer="gelu_tanh",
            norm_eps=1e-3,
            mean=(0.1, 0.2, 0.3),
            std=0.7,
            residual_in_fp32=True,
            drop_path_rate=0.1,
        ),
        dict(pos_embed="sincos2d", class_token=False, global_pool="avg", img_size=(32, 16), patch_size=(8, 4)),
        dict(
            representation_size=40,
            init_values=0.1,
            reg_tokens=3,
            no_embed_class=True,
            weight_init="jax",
            head_init_bias=-1.0,
        ),
        dict(num_classes=0, dynamic_img_size=True, global_pool=""),
    ],
    ids=["plain", "numbers", "sincos", "head", "features"],
)
def test_round_trip(tmp_path, changes):
    model = randomised(ViT(**{**SMALL, **changes}))
    model.save_pretrained(tmp_path / "a" / "b")
    again = ViT.from_pretrained(tmp_path / "a" / "b").eval()
    assert again.config == model.config and again.mean == model.mean
    assert ViT(**again.config).config == model.config
    assert [*again.state_dict()] == [*model.state_dict()]
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())
    assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == {"model.safetensors", "config.json"}
    for x in (
        images(*model.patch_embed.img_size),
        torch.randint(0, 256, (2, 3, *model.patch_embed.img_size), dtype=torch.uint8),
    ):
        assert torch.equal(logits(again, x), logits(model, x))
    content = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert pick(content, "library", "architecture") == dict(library="vitfast", architecture="ViT")


def test_round_trip_after_changes(tmp_path):
    model = ViT(**SMALL, global_pool="avg")
    model.set_input_size((16, 48))
    model.reset_classifier(7)
    randomised(model).save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert again.config == model.config
    agree(again, model, images(16, 48))


def test_save_untidy_tensors(tmp_path):
    """Tied weights, transposed ones and views into larger memory."""
    model = randomised(ViT(**SMALL))
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    model.blocks[0].attn.proj.weight.data = model.blocks[0].attn.proj.weight.data.T
    model.cls_token.data = torch.randn(1, 5, D)[:, 2:3]
    save(model, tmp_path)
    agree(ViT.from_pretrained(tmp_path), model)


def test_half_precision_weights_load_into_fp32(tmp_path):
    model = randomised(ViT(**SMALL)).to(torch.bfloat16)
    save(model, tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert all(torch.equal(v, model.state_dict()[k].float()) for k, v in again.state_dict().items())


def test_save_keeps_the_old_file_when_writing_fails(tmp_path):
    write_atomically(tmp_path / "x", lambda path: path.write_text("old"))

    def fail(path):
        path.write_text("half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "x", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"
    with pytest.raises(InputError, match="x: a file is in the way"):
        save(ViT(**SMALL), tmp_path / "x")


def hub_cache(folder, truth, names, **options):
    """A repository as huggingface_hub caches it."""
    snapshot = folder / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "models--owner--name" / "refs").mkdir()
    (folder / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    truth.save_pretrained(folder / "made", **options)
    for name in names:
        (folder / "made" / name).rename(snapshot / name)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def test_a_hub_name_loads_like_its_folder(tmp_path, offline):
    truth = randomised(transformers.ViTForImageClassification(transformers.ViTConfig(**HF)))
    hub_cache(tmp_path, truth, ("model.safetensors", "config.json"))
    agree(ViT.from_pretrained("hf-hub:owner/name"), truth)
    assert "blocks.0.attn.qkv.weight" in load_checkpoint("hf-hub:owner/name@main")


def test_shards_of_a_hub_name(tmp_path, offline):
    truth = randomised(transformers.ViTForImageClassification(transformers.ViTConfig(**HF)))
    truth.save_pretrained(tmp_path / "look", max_shard_size="50KB")
    names = [path.name for path in (tmp_path / "look").iterdir()]
    hub_cache(tmp_path, truth, names, max_shard_size="50KB")
    agree(ViT.from_pretrained("hf-hub:owner/name"), truth)
    shard = next(tmp_path.glob("models--*/snapshots/*/*-00001-of-*"))
    shard.unlink()
    with pytest.raises(InputError, match=f"^hf-hub:owner/name: .*index.json lists {shard.name}, which is not there"):
        load_checkpoint("hf-hub:owner/name")


def test_hub_errors(tmp_path, offline, monkeypatch):
    with pytest.raises(
        InputError, match="^hf-hub:owner/nobody: no model.safetensors or pytorch_model.bin .*HF_HUB_OFFLINE"
    ):
        load_checkpoint("hf-hub:owner/nobody")
    with pytest.raises(InputError, match="^hf-hub:no/such/form: the hub did not give"):
        load_checkpoint("hf-hub:no/such/form")
    hub_cache(tmp_path, randomised(transformers.ViTModel(transformers.ViTConfig(**HF))), ("model.safetensors",))
    with pytest.raises(InputError, match="config.json is not in the cache"):  # it may say another eps than the format's
        load_checkpoint("hf-hub:owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="^hf-hub:owner/name: needs the package huggingface_hub"):
        load_checkpoint("hf-hub:owner/name")


def test_unreadable_files(tmp_path):
    state = small_timm().state_dict()
    safetensors.torch.save_file(state, tmp_path / "cut.safetensors")
    torch.save(state, tmp_path / "cut.pth")
    np.savez(tmp_path / "cut.npz", **google())
    for path in sorted(tmp_path.iterdir()):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "empty.pth").touch()
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.pth").write_text("hello")
    with open(tmp_path / "inside_out.npz", "wb") as file:
        np.save(file, np.zeros(3))
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(InputError, match=f"^{path}: not a whole|^{path}: holds a ndarray") as caught:
            load_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_pickles_are_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return ran.touch, ()

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    with open(tmp_path / "evil.bin", "wb") as file:
        pickle.dump(Evil(), file, protocol=2)
    with open(tmp_path / "evil.npz", "wb") as file:
        pickle.dump(Evil(), file)
    np.savez(tmp_path / "objects.npz", **google(), extra=np.array([Evil()], dtype=object))
    torch.save(small_timm(), tmp_path / "model.pt")
    for name in ("evil.pth", "evil.bin", "evil.npz", "objects.npz", "model.pt"):
        with pytest.raises(InputError, match=f"{name}: .*Python objects.*save model.state_dict") as caught:
            load_checkpoint(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not ran.exists()


def test_wrong_paths_say_what_is_wrong(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.npz: no such file or folder"):
        load_checkpoint(tmp_path / "nowhere.npz")
    with pytest.raises(InputError, match="write hf-hub:owner/name"):
        load_checkpoint("owner/name")
    with pytest.raises(InputError, match="no weights in this folder; expected model.safetensors or pytorch_model.bin"):
        load_checkpoint(tmp_path)
    (tmp_path / "weights.h5").touch()
    with pytest.raises(InputError, match="weights.h5: unknown kind of weights file; known are .safetensors, .npz"):
        load_checkpoint(tmp_path / "weights.h5")
    for name in ("a.pth", "b.pth"):
        torch.save({}, tmp_path / name)
    with pytest.raises(InputError, match="several weights files .a.pth, b.pth."):
        load_checkpoint(tmp_path)
    torch.save(torch.zeros(3), tmp_path / "a.pth")
    with pytest.raises(InputError, match="a.pth: holds a Tensor, expected a dictionary"):
        load_checkpoint(tmp_path / "a.pth")
    with pytest.raises(InputError, match="b.pth: not a Vision Transformer"):
        load_checkpoint(tmp_path / "b.pth")


@pytest.mark.parametrize(
    "content, message",
    [
        ("{not json", "config.json: not readable as JSON"),
        ("[1]", "config.json: expected a JSON object, got a list"),
        ('{"library": "vitfast", "warp": 9}', "config.json has 'warp', which vitfast .* does not know"),
        ('{"model_type": "vit", "hidden_act": "relu"}', "activation 'relu' is not supported"),
        (
            '{"model_type": "vit", "image_size": {"height": 32}}',
            "config.json: image_size must be a whole number of pixels",
        ),
        ('{"architecture": "vit_base_patch16_224", "global_pool": "max"}', "global_pool='max' is not supported"),
        (
            '{"architecture": "vit_base_patch16_rpn_224"}',
            "timm's 'vit_base_patch16_rpn_224' has its norms after attention and MLP, which vitfast does not have",
        ),
    ],
)
def test_config_files_that_do_not_fit(tmp_path, content, message):
    save(ViT(**SMALL), tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        ViT.from_pretrained(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_tensors_of_odd_shapes(tmp_path):
    for key, shape in (
        ("embedding/kernel", (P * P * 3, D)),
        ("Transformer/encoderblock_0/LayerNorm_0/scale", (7,)),
        ("cls", (D,)),
        ("head/bias", ()),
    ):
        np.savez(tmp_path / "w.npz", **{**google(), key: np.zeros(shape, "f4")})
        with pytest.raises(InputError, match="w.npz: "):
            ViT.from_pretrained(tmp_path / "w.npz")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_tensors_that_are_no_weights(tmp_path, dtype):
    """Copied into a float32 parameter they would be numbers that mean something else."""
    state = small_timm().state_dict()
    torch.save(state | {"head.weight": state["head.weight"].to(dtype)}, tmp_path / "w.pth")
    said = f"^{tmp_path / 'w.pth'}: head.weight is {dtype} of shape .*, expected values of float64, float32, float16"
    for call in (load_checkpoint, ViT.from_pretrained):
        with pytest.raises(InputError, match=said):
            call(tmp_path / "w.pth")


@pytest.mark.parametrize("key", ["blocks.0.mlp.fc1.weight", "blocks.0.attn.qkv.weight", "patch_embed.proj.weight"])
@pytest.mark.parametrize("shape", [(), (0, 48), (4,)])
def test_tensors_of_odd_ranks(tmp_path, key, shape):
    torch.save(small_timm().state_dict() | {key: torch.zeros(shape)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=f"w.pth: .*{key}.* of shape"):
        ViT.from_pretrained(tmp_path / "w.pth", num_heads=3)


def test_a_block_number_out_of_all_reason(tmp_path):
    state = small_timm().state_dict()
    torch.save(state | {"blocks.999999999.norm1.bias": torch.zeros(D)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="w.pth: ViT: depth must be a whole number from 1 to 1000, got 1000000000"):
        ViT.from_pretrained(tmp_path / "w.pth", num_heads=3)
