"""`vitfast export --format triton-repository`: its model.py under a stub of the Python backend, its config.pbtxt."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from commands import run_cli
from pictures import encoded, smooth

import vitfast

TOL = dict(atol=1e-5, rtol=1e-5)  # other images in the batch


class Tensor(SimpleNamespace):
    """pb_utils.Tensor: of bytes it keeps objects."""

    def __init__(self, name: str, array: np.ndarray):
        super().__init__(name=name, array=array)

    def as_numpy(self) -> np.ndarray:
        return self.array


class TritonError(SimpleNamespace):
    INVALID_ARG = 3

    def __init__(self, message: str, code: int = 1):
        super().__init__(message=message, code=code)


class InferenceResponse(SimpleNamespace):
    def __init__(self, output_tensors: list = (), error: TritonError | None = None):
        super().__init__(output_tensors=output_tensors, error=error)


@pytest.fixture
def backend(monkeypatch):
    """The module that the server gives to a model.py; a request is a dictionary of tensors."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError, module.InferenceResponse = Tensor, TritonError, InferenceResponse
    module.get_input_tensor_by_name = lambda request, name: request.get(name)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    shape = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5, crop_pct=0.9)
    vitfast.ViT(**shape, mean=0.4, std=0.3).save_pretrained(folder)
    return folder


def exported(capsys, weights: Path, folder: Path, *flags) -> Path:
    arguments = ("export", "--format", "triton-repository", "--weights", weights, "--output", folder, *flags)
    code, out, err = run_cli(capsys, *arguments)
    assert code == 0 and f"wrote {folder}" in out, err
    return folder


def instance(folder: Path, config: dict | None = None, **parameters):
    """The class of the folder's model.py, as the server makes it on a CPU."""
    spec = importlib.util.spec_from_file_location("1.model", folder / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = re.search(r"data_type: (\w+)", (folder / "config.pbtxt").read_text())[1]
    settings = {name: dict(string_value=value) for name, value in parameters.items()}
    config = config or dict(input=[dict(name="IMAGE", data_type=kind)], parameters=settings)
    model = module.TritonPythonModel()
    where = dict(model_instance_kind="CPU", model_instance_device_id="0", model_repository=str(folder))
    model.initialize(dict(model_config=json.dumps(config), model_version="1", **where))
    return model


def request(images: list) -> dict:
    """A client's request: (n, 1) image files or (n, 3, H, W) pixels."""
    files = isinstance(images[0], bytes)
    array = np.array([[image] for image in images], dtype=object) if files else np.stack(images)
    return {"IMAGE": Tensor("IMAGE", array)}


def vectors_of(response: InferenceResponse) -> np.ndarray:
    (tensor,) = response.output_tensors
    assert response.error is None and tensor.name == "EMBEDDING" and tensor.array.dtype == np.float32
    return tensor.array


def test_a_broken_image_fails_its_request_alone(weights, backend, tmp_path, capsys):
    """Requests of one image and of several, computed together; the vectors are the Embedder's."""
    model = instance(exported(capsys, weights, tmp_path / "vit"))
    images = [encoded(smooth(i, 40 + 9 * i, 80 - 5 * i), ("JPEG", "PNG")[i % 2]) for i in range(6)]
    truth = vitfast.Embedder(weights, device="cpu").embed(images).numpy()
    cut = images[2][:-60]
    groups = [images[:1], [cut], images[1:4], [images[4], b"a cat"], images[5:]]
    responses = model.execute([request(group) for group in groups])
    assert len(responses) == 5
    for number, rows in ((0, slice(0, 1)), (2, slice(1, 4)), (4, slice(5, 6))):
        np.testing.assert_allclose(vectors_of(responses[number]), truth[rows], **TOL)
    for number, says in ((1, "IMAGE[0] is a broken image"), (3, "IMAGE[1] cannot be read as an image")):
        assert not responses[number].output_tensors and says in responses[number].error.message
        assert responses[number].error.code == TritonError.INVALID_ARG


def test_pixels_of_any_size_and_the_parameters_of_the_config(weights, backend, tmp_path, capsys):
    folder = exported(capsys, weights, tmp_path / "vit", "--uint8", "--device", "cpu")
    model = instance(folder, pool="avg", normalize="true")
    pixels = [np.asarray(smooth(i, 40 + 9 * (i // 2), 70)).transpose(2, 0, 1) for i in range(4)]
    responses = model.execute([request(pixels[:2]), request(pixels[2:])])
    truth = vitfast.Embedder(weights, device="cpu", pool="avg", normalize=True).embed(pixels).numpy()
    np.testing.assert_allclose(np.concatenate([vectors_of(r) for r in responses]), truth, **TOL)


def test_weights_of_transformers_keep_their_processor(backend, tmp_path, capsys):
    """Its size, crop and normalisation: the Embedder of the original gives the same vectors.

    Where an odd number of columns is cut off, the crop begins a pixel before timm's.
    """
    shape = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=96)
    config = transformers.ViTConfig(**shape, image_size=48, patch_size=8)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "hf")
    processor = dict(size=dict(shortest_edge=37), crop_size=dict(height=32, width=32), resample=2)
    processor |= dict(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4])
    transformers.BitImageProcessorPil(**processor).save_pretrained(tmp_path / "hf")
    capsys.readouterr()
    model = instance(exported(capsys, tmp_path / "hf", tmp_path / "vit"))
    images = [encoded(smooth(i, 50, 70 + i)) for i in range(2)]
    (response,) = model.execute([request(images)])
    truth = vitfast.Embedder(tmp_path / "hf", device="cpu").embed(images).numpy()
    np.testing.assert_allclose(vectors_of(response), truth, **TOL)


SETTINGS = """backend "python" max_batch_size 64 preferred_batch_size [64] max_queue_delay_microseconds 2000
name "IMAGE" data_type {} name "EMBEDDING" data_type TYPE_FP32 dims [48] kind {} count 1
key "pool" string_value "" key "normalize" string_value "false"
"""


@pytest.mark.parametrize(
    ("flags", "images", "kind"),
    [
        ((), "TYPE_STRING dims [1]", "KIND_GPU"),
        (("--uint8", "--device", "cpu"), "TYPE_UINT8 dims [3,-1,-1] allow_ragged_batch true", "KIND_CPU"),
    ],
)
def test_the_configuration(flags, images, kind, weights, tmp_path, capsys, backend):
    """Its settings, and where tritonclient is installed, as the server's own schema reads them."""
    folder = exported(capsys, weights, tmp_path / "vit", *flags)
    text = (folder / "config.pbtxt").read_text()
    bare = re.sub(r"#.*", "", text)
    found = [f"{name} {re.sub(' ', '', value)}" for name, value in re.findall(r'(\w+): (\[.*?\]|"\w*"|\w+)', bare)]
    assert " ".join(found).split() == SETTINGS.format(images, kind).split()
    assert (bare.count("{"), bare.count("[")) == (bare.count("}"), bare.count("]"))
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2", exc_type=Exception)
    from google.protobuf import json_format, text_format

    message = text_format.Parse(text, schema.ModelConfig())
    config = json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))
    assert config["output"] == [dict(name="EMBEDDING", data_type="TYPE_FP32", dims=["48"])]
    assert instance(folder, config).embedder.dim == 48


def test_what_is_there_is_replaced_with_force_alone(weights, tmp_path, capsys):
    folder, command = tmp_path / "vit", ("export", "--format", "triton-repository", "--weights", weights, "--output")
    exported(capsys, weights, folder)
    (folder / "1" / "model.py").write_text("old")
    code, _, err = run_cli(capsys, *command, folder)
    assert code == 2 and f"{folder}: is there already; add --force" in err and err.count("\n") == 1
    assert (folder / "1" / "model.py").read_text() == "old"
    exported(capsys, weights, folder, "--force")
    assert "class TritonPythonModel" in (folder / "1" / "model.py").read_text()
    (tmp_path / "file").write_text("old")
    code, _, err = run_cli(capsys, *command, tmp_path / "file", "--force")
    assert code == 2 and "a file is in the way" in err and (tmp_path / "file").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "vit"]  # no scratch folder
