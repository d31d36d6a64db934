"""Exported files against the model in PyTorch, run by onnxruntime, torch.export and AOTInductor."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pictures
import pytest
import torch
from checkpoints import SMALL, randomised
from commands import refuses, works
from PIL import Image
from timm.data import create_transform
from torch._inductor.exc import InductorError

from vitfast import InputError, ViT, ops
from vitfast.eval.predict import predict
from vitfast.model import export as exporting
from vitfast.model.export import export
from vitfast.run.config import Config


def libraries() -> tuple:
    """onnx and onnxruntime, which the test on a GPU does without."""
    import onnx
    import onnxruntime

    return onnx, onnxruntime


TOL = dict(atol=1e-4, rtol=1e-4)  # other libraries' sums of logits of size ~1


@pytest.fixture(scope="module")
def model():
    """Every kind of parameter in one layer."""
    torch.manual_seed(0)
    options = dict(reg_tokens=2, init_values=0.5, representation_size=24, act_layer="gelu_tanh", mean=0.3, std=0.2)
    return randomised(ViT(**SMALL | options | dict(depth=1)))


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    model.save_pretrained(folder)
    return folder


def pixels(*size):
    return torch.randint(0, 256, size, dtype=torch.uint8)


@pytest.mark.slow
def test_onnx_of_floats_on_the_command_line(model, weights, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "m.onnx"
    out = works(capsys, *f"export --weights {weights} --output {path} --format onnx --img-size 48 16".split())
    assert f"wrote {path}: max difference " in out and float(out.split()[4]) < 1e-4
    assert not [r for r in caplog.records if r.name.startswith("onnx")]  # on what the exporter tidied up
    onnx, onnxruntime = libraries()
    session, resized = onnxruntime.InferenceSession(path), ViT.from_pretrained(weights, img_size=(48, 16)).eval()
    for batch in (1, 5):
        x = torch.randn(batch, 3, 48, 16)
        (logits,) = session.run(["logits"], {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), resized(x), **TOL)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert {entry.domain for entry in proto.opset_import} == {""} and not proto.functions  # no runtime has to learn it
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True], ids=["floats", "uint8"])
def test_onnx_metadata_suffices_for_predicts_answers(raw, tmp_path):
    """A program that has the file alone, onnxruntime and timm's transforms, says what `vitfast predict` says."""
    torch.manual_seed(0)
    names = [f"Класс {i}" for i in range(SMALL["num_classes"])]
    crop = dict(crop_mode="border", crop_pct=0.9, interpolation="bilinear", mean=(0.4, 0.5, 0.6), std=(0.3, 0.2, 0.25))
    model = randomised(ViT(**SMALL | crop | dict(img_size=(32, 48), class_names=names)))
    export(model, tmp_path / "m.onnx", "onnx", uint8=raw)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        pictures.smooth(i, 40 + 30 * i, 90 - 10 * i).save(path)

    onnx, onnxruntime = libraries()
    proto = onnx.load(tmp_path / "m.onnx")
    told = {entry.key: json.loads(entry.value) for entry in proto.metadata_props}
    assert told["graph_normalizes"] is raw and told["class_names"] == names
    for value in (*proto.graph.input, *proto.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    keep = {name: told[name] for name in ("crop_mode", "crop_pct", "interpolation", "mean", "std")}
    make = create_transform((3, *told["img_size"]), is_training=False, use_prefetcher=raw, **keep)
    images = np.stack([np.asarray(make(Image.open(path))) for path in paths])
    (logits,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"images": images})
    answers = torch.from_numpy(logits).softmax(-1)
    for row, record in zip(answers, predict(model, map(str, paths), Config(workers=0), top_k=len(names))):
        for found in record["predictions"]:
            assert abs(row[names.index(found["label"])].item() - found["probability"]) < 1e-5


@pytest.mark.slow
def test_torch_export_is_plain_pytorch_even_with_kernels_on(model, tmp_path):
    model.train()
    with ops.use_kernels("on"):
        assert export(model, tmp_path / "m.pt2", "torch") < 1e-5
    assert model.training
    model.eval()
    program = torch.export.load(tmp_path / "m.pt2")
    assert not [node for node in program.graph.nodes if "vitfast" in str(node.target)]
    for batch in (1, 5):
        x = torch.randn(batch, 3, 32, 32)
        torch.testing.assert_close(program.module()(x), model(x), **TOL)


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_aoti_package(model, tmp_path, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = copy.deepcopy(model).to(device)
    assert export(model, tmp_path / "m.pt2", "aoti") < 1e-4
    compiled = torch._inductor.aoti_load_package(str(tmp_path / "m.pt2"))
    for batch in (1, 5):
        x = torch.randn(batch, 3, 32, 32, device=device)
        torch.testing.assert_close(compiled(x), model(x), **TOL)


@pytest.mark.slow
def test_wrong_numbers_are_not_written(model, tmp_path, monkeypatch):
    def wrong(program, path):
        run = exporting._torch(program, path)
        return lambda images: run(images) * 1.001

    monkeypatch.setitem(exporting._FORMATS, "torch", (".pt2", wrong))
    with pytest.raises(RuntimeError, match="other logits than the model .max difference .*nothing was written"):
        export(model, tmp_path / "m.pt2", "torch")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_errors_are_one_line_and_leave_nothing(model, weights, tmp_path, capsys, monkeypatch):
    (tmp_path / "there.onnx").write_text("old")
    for name, form, message in (
        ("m.pt2", "onnx", "m.pt2: the format onnx is written as one file, .onnx"),
        ("m.onnx", "aoti", "m.onnx: the format aoti is written as one file, .pt2"),
        ("there.onnx", "onnx", "there.onnx: is there already; add --force"),
    ):
        refuses(capsys, message, "export", "--weights", weights, "--output", tmp_path / name, "--format", form)
    with pytest.raises(InputError, match="unknown format 'onx'; did you mean onnx"):
        export(model, tmp_path / "m.onnx", "onx")
    with pytest.raises(InputError, match="no bfloat16; call model.float"):
        export(ViT(**SMALL).bfloat16(), tmp_path / "m.onnx", "onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match="ONNX needs the package onnxscript: pip install '..export.' in a checkout"):
        export(model, tmp_path / "m.onnx", "onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["there.onnx"] and (tmp_path / "there.onnx").read_text() == "old"


@pytest.mark.slow
def test_without_onnxruntime_nothing_is_claimed(weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    written = SimpleNamespace(model=SimpleNamespace(metadata_props={}), save=lambda path: Path(path).write_text("onnx"))
    monkeypatch.setattr(torch.onnx, "export", lambda program, **kwargs: written)  # the other tests run it
    out = works(capsys, "export", "--weights", weights, "--output", tmp_path / "m.onnx", "--format", "onnx")
    assert "not checked, onnxruntime is not installed" in out
    assert (tmp_path / "m.onnx").read_text() == "onnx"


def test_aoti_without_a_compiler_says_so(model, tmp_path, monkeypatch):
    def fail(program, package_path):
        raise InductorError(RuntimeError("No working C++ compiler found"), None)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    says = "AOTInductor could not compile .RuntimeError: No working.*it needs a C.. compiler"
    with pytest.raises(InputError, match=says):
        export(model, tmp_path / "m.pt2", "aoti")
    assert not list(tmp_path.iterdir())
