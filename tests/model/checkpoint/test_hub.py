"""A hub that is silent or refuses: one line within seconds, for weights and data, and what is cached is used."""

import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vitfast import InputError, ViT, load_checkpoint
from vitfast.data.datasets import open_sources
from vitfast.run.config import Config

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
            why = "none in 4 s; HF_HUB_ETAG_TIMEOUT=30 waits for longer"
        yield "http://nowhere.invalid" if request.param == "has no address" else address, why


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_hub_answers_is_said(name, tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said, address = f"hf-hub:o/{name}: .*{ANSWERS[name][2]}", f"http://127.0.0.1:{server.server_port}"
        with hub_at(address, monkeypatch, tmp_path), pytest.raises(InputError, match=said):
            load_checkpoint(f"hf-hub:o/{name}")
        server.shutdown()


def test_a_silent_hub_is_said_of_weights(silent, tmp_path, monkeypatch):
    address, why = silent
    said = f"hf-hub:o/name: no model.safetensors or .* in the hub's cache, and {address} gives no answer .{why}.; check"
    with hub_at(address, monkeypatch, tmp_path), pytest.raises(InputError, match=said):
        load_checkpoint("hf-hub:o/name")


@pytest.mark.parametrize("library", ["hfds", "hfids"])
def test_a_silent_hub_is_said_of_data_once(silent, tmp_path, monkeypatch, caplog, library):
    pytest.importorskip("datasets")
    address, why = silent
    said = f"data set '{library}/o/name', split 'train' in .*: not in the hub's cache, and {address} .*{why}"
    with hub_at(address, monkeypatch, tmp_path), pytest.raises(InputError, match=said):
        open_sources(f"{library}/o/name", str(tmp_path), (8, 8), (8, 8), EVAL)
    assert not [each for each in caplog.records if each.name == "vitfast"]


def test_what_is_cached_is_used_without_the_hub(silent, tmp_path, monkeypatch):
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    ViT.from_preset("Nano/8", img_size=16, num_classes=3).save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    with hub_at(silent[0], monkeypatch, tmp_path):
        assert load_checkpoint("hf-hub:owner/name").keys() == load_checkpoint(snapshot).keys()


def test_torchvision_without_its_server_is_one_line(silent, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("torchvision.datasets.CIFAR10.url", f"{silent[0]}/a.tar.gz")
    monkeypatch.setattr("vitfast.data.datasets.PATIENCE", 0.5)
    said = "split 'train' in .* cannot be opened: .*; check the network, or bring its files there"
    with pytest.raises(InputError, match=said):
        open_sources("torch/cifar10", str(tmp_path), (8, 8), (8, 8), EVAL)
    assert not caplog.records and socket.getdefaulttimeout() is None
