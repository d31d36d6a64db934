"""Our own folders, runs, shards and the hub, also one that is silent."""

import json
import shutil
import socket
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import checkpoints as c
import pytest
import safetensors.torch
import torch

from vitfast import InputError, ViT, cli, load_checkpoint
from vitfast.data.datasets import open_sources
from vitfast.model.checkpoint.files import last_checkpoint
from vitfast.model.checkpoint.writers import save
from vitfast.run.config import Config

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
    hub_cache(tmp_path, truth := hugging_face(), (), max_shard_size="50KB")
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


# ---- a hub that is silent or refuses: one line within seconds, and what is cached is used


EVAL = Config(task="eval", epochs=1)
CHECK = "check the name and the network, and set HF_TOKEN for what is private or gated$"
ANSWERS = {  # of a repository of this name: status, X-Error-Code, what is said
    "gated": (403, "GatedRepo", f"GatedRepoError: .*{CHECK}"),
    "private": (401, "RepoNotFound", f"RepositoryNotFoundError: .*{CHECK}"),
    "gone": (404, "RepoNotFound", f"RepositoryNotFoundError: .*{CHECK}"),
    "token": (401, "", f"401 Unauthorized.*{CHECK}"),
    "revision": (404, "RevisionNotFound", f"RevisionNotFoundError: .*{CHECK}"),
    "empty": (404, "EntryNotFound", "no model.safetensors or pytorch_model.bin .RemoteEntryNotFoundError"),
    "down": (503, "", "gives no answer .status 503.; check the network, proxy, HF_ENDPOINT and HF_HUB_OFFLINE"),
    "limited": (429, "", "gives no answer .status 429."),
    "portal": (200, "", f"no model.safetensors or .*{CHECK}"),
}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        status, error, _ = ANSWERS[self.path.split("/")[2]]
        self.send_response(status)
        self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@contextmanager
def hub_at(address, monkeypatch, cache):
    """The hub at another address, with ten seconds for what is done there."""
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    changed = dict(ENDPOINT=address, HUGGINGFACE_CO_URL_TEMPLATE=template, HF_HUB_CACHE=str(cache))
    for name, value in changed.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 10


@pytest.fixture(params=["refuses", "never answers", "has no address"])
def silent(request):
    """(address of a hub, why it gives no answer)"""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address, why = f"http://127.0.0.1:{listening.getsockname()[1]}", "Connect(ion)?Error: .*"
        if request.param == "never answers":
            listening.listen()
            why = "(none in [14] s; HF_HUB_ETAG_TIMEOUT=30 waits for longer|ReadTimeout: .*)"
        yield "http://nowhere.invalid" if request.param == "has no address" else address, why


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_hub_answers_is_said(name, tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said, address = f"hf-hub:o/{name}: .*{ANSWERS[name][2]}", f"http://127.0.0.1:{server.server_port}"
        with hub_at(address, monkeypatch, tmp_path), pytest.raises(InputError, match=said):
            load_checkpoint(f"hf-hub:o/{name}")
        server.shutdown()


@pytest.mark.quick(1)
def test_a_silent_hub_is_said_of_weights_and_what_is_cached_is_used(silent, tmp_path, monkeypatch):
    address, why = silent
    said = f"hf-hub:o/name: no model.safetensors or .* in the hub's cache, and {address} gives no answer .{why}.; check"
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    with hub_at(address, monkeypatch, tmp_path), pytest.raises(InputError, match=said):
        load_checkpoint("hf-hub:o/name")
    truth = ViT.from_preset("Nano/8", img_size=16, num_classes=3)
    hub_cache(tmp_path, truth, ())
    with hub_at(address, monkeypatch, tmp_path):
        assert load_checkpoint("hf-hub:owner/name").keys() == truth.state_dict().keys()


@pytest.mark.slow
def test_a_silent_hub_is_said_of_data_once(silent, tmp_path, monkeypatch, caplog):
    pytest.importorskip("datasets")
    address, why = silent
    said = f"data set 'hfds/o/name', split 'train' in .*: not in the hub's cache, and {address} .*{why}"
    with hub_at(address, monkeypatch, tmp_path), pytest.raises(InputError, match=said):
        open_sources("hfds/o/name", str(tmp_path), (8, 8), (8, 8), EVAL)
    assert not [each for each in caplog.records if each.name == "vitfast"]


@pytest.mark.quick(1)
def test_torchvision_without_its_server_is_one_line(silent, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("torchvision.datasets.CIFAR10.url", f"{silent[0]}/a.tar.gz")
    monkeypatch.setattr("vitfast.data.datasets.PATIENCE", 0.5)
    said = "split 'train' in .* cannot be opened: .*; check the network, or bring its files there"
    with pytest.raises(InputError, match=said):
        open_sources("torch/cifar10", str(tmp_path), (8, 8), (8, 8), EVAL)
    assert not caplog.records and socket.getdefaulttimeout() is None
