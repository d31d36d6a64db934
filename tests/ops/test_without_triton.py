"""vitfast where triton is not installed, as on macOS and Windows: one process in which every import of it fails."""

import json
import os
import subprocess
import sys

import pytest
import timm
import torch
from checks import randomize

pytestmark = pytest.mark.slow

SCRIPT = """
import contextlib, io, json, sys, warnings


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
import torch
import vitfast
from vitfast import InputError, ViT, ops
from vitfast.cli import main

folder, found = sys.argv[1], {}
truth = torch.load(f"{folder}/truth.pt", weights_only=True)
images = truth["images"]
try:
    ops.layer_norm(images, None, None)
except InputError as error:  # VITFAST_KERNELS=foo, which importing took no notice of
    found["mode"] = str(error)
ops.use_kernels("auto")

model = ViT(**truth["sizes"])
model.load_state_dict(truth["state"])


def agrees(model):
    logits = model(images)
    model.zero_grad()
    logits.backward(truth["upstream"])
    close = torch.allclose(logits, truth["logits"], atol=1e-5)
    grads = dict(model.named_parameters())
    return close and all(torch.allclose(grads[name].grad, g, atol=1e-4) for name, g in truth["grads"].items())


found["ViT"] = agrees(model)
model.save_pretrained(f"{folder}/saved")
found["loaded"] = agrees(ViT.from_pretrained(f"{folder}/saved"))
tokens = torch.randn(2, 5, 32)
compiled = torch.compile(model.norm, fullgraph=True, backend="aot_eager")
found["compiled"] = torch.allclose(compiled(tokens), model.norm(tokens), atol=1e-6)

import timm

theirs = timm.models.VisionTransformer(**truth["sizes"])
theirs.load_state_dict(truth["state"])
vitfast.accelerate(theirs)
found["accelerated"] = agrees(theirs) and len(vitfast.acceleration_report(theirs).replaced)
with contextlib.suppress(RuntimeError), ops.use_kernels("on"):
    model(images)
    found["on"] = "no error"
with ops.use_kernels("on"):
    found["plain"] = vitfast.acceleration_report(model).plain


def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


found["help"] = command("--help")
found["cost"] = command("cost", "--model", "B/16")
found["doctor"] = command("doctor")
found["tune"] = command("tune")
small = ["--model", "Nano/8", "--img-size", "16", "--steps", "2", "--batch-size", "4", "--device", "cpu"]
found["pretrain"] = command("pretrain", "--data", "digits", *small, "--set", "workers=0", "--output", f"{folder}/run")
found["triton"] = sorted(name for name in sys.modules if name.partition(".")[0] == "triton")
json.dump(found, open(f"{folder}/found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the process found; timm's numbers, and what triton was there for, are the truth."""
    folder = tmp_path_factory.mktemp("without_triton")
    sizes = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    torch.manual_seed(0)
    model = randomize(timm.models.VisionTransformer(**sizes))
    images = torch.randn(2, 3, 16, 16)
    logits = model(images)
    upstream = torch.randn_like(logits)
    logits.backward(upstream)
    grads = {name: p.grad for name, p in model.named_parameters()}
    truth = dict(sizes=sizes, state=model.state_dict(), images=images, logits=logits.detach(), upstream=upstream)
    torch.save({**truth, "grads": grads}, folder / "truth.pt")
    environment = {**os.environ, "VITFAST_KERNELS": "foo", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "found.json").read_text()) | {"folder": folder}


def test_models_compute_what_timm_does(found):
    assert found["mode"] == "VITFAST_KERNELS: must be one of auto, on, off, got 'foo' in the environment"
    assert found["ViT"] is found["loaded"] is found["compiled"] is True
    assert found["accelerated"] == 6 and found["triton"] == []
    assert "on" not in found and found["plain"] == "triton cannot be imported (No module named 'triton')"


def test_commands_run_or_say_in_one_line_what_they_need(found):
    for command, wanted in (("help", "pretrain"), ("cost", "86,567,656 parameters"), ("pretrain", "")):
        code, out, err = found[command]
        assert code == 0 and wanted in out, err
    assert (found["folder"] / "run/checkpoints/last/model.safetensors").exists()
    needs = "vitfast: error: this command runs the kernels, which need triton (pip install triton, on Linux): "
    for command in ("doctor", "tune"):
        assert found[command] == [2, "", needs + "No module named 'triton'\n"]
