"""Peers that need a package of their own: what is around it is right, and without it a case says so."""

import sys

import bench_model
import bench_ops
import engine
import harness
import machine
import onnxruntime
import peers
import pytest
import torch
from engine import TENSORRT
from harness import WrongResult
from libraries import QUACK
from peer_libraries import TensorRT, install_quack, install_tensorrt
from peers import Peer, Setting
from shapes import Shape

NANO = Shape("Nano/8", 16, 6)
FP16, FP8 = (Setting(TENSORRT, "engine", precision) for precision in ("fp16", "fp8"))
WITH_QUACK = [name for name, op in bench_ops.OPS.items() if QUACK in op.impls]


@pytest.mark.parametrize("name", WITH_QUACK)
def test_quack_computes_the_operation_where_it_is_installed(name, monkeypatch):
    with pytest.raises(pytest.skip.Exception, match="quack-kernels cannot be used: No module named 'quack"):
        bench_ops.function_of(name, NANO, QUACK)
    install_quack(monkeypatch)
    check = harness.Check(bench_ops.case_of(name, NANO), "forward" if name == "linear_gelu" else "both")
    assert check.judge(QUACK, bench_ops.function_of(name, NANO, QUACK))["error"] < 1e-5


def test_quack_is_not_asked_for_a_backward_that_it_lacks(monkeypatch):
    """It has LayerNorm's, RMSNorm's and the MLP's."""
    assert sorted(WITH_QUACK) == ["layer_norm", "linear_gelu", "mlp", "rms_norm"]
    monkeypatch.setattr(bench_ops, "function_of", lambda *_: pytest.fail("it was called"))
    for direction in ("backward", "both"):
        with pytest.raises(pytest.skip.Exception, match="quack has no backward of linear_gelu"):
            bench_ops.test_linear_gelu(None, next(iter(bench_ops.SHAPES)), direction, QUACK)


def test_a_package_that_cannot_be_imported_skips_the_case_with_the_reason(monkeypatch):
    class Broken:
        def find_spec(self, name, *_):
            if name == "tensorrt":
                raise OSError("libnvinfer.so.11: cannot open shared object file")

    for setting in (FP16, FP8):
        with pytest.raises(pytest.skip.Exception, match="tensorrt cannot be used: No module named 'tensorrt'"):
            Peer(setting, NANO, training=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(pytest.skip.Exception, match="tensorrt cannot be used: libnvinfer.so.11"):
        engine.needed("fp16")
    install_tensorrt(monkeypatch)
    engine.needed("fp16")
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(pytest.skip.Exception, match="nvidia-modelopt.* cannot be used: .*modelopt"):
        Peer(FP8, NANO, training=False)


def test_tensorrt_is_in_inference_alone_and_in_no_ratio_of_bf16():
    assert not any(setting.library == TENSORRT for setting in (*bench_model.LEADING, *bench_model.EVERY))
    ours = {(s.library, s.precision) for s in bench_model.HALF}
    assert {(TENSORRT, "fp16"), (TENSORRT, "fp8"), ("vitfast", "fp16"), ("timm", "fp16")} == ours


def test_memory_that_torch_does_not_see_is_not_reported():
    """That of CUDA graphs' pools and of engines."""
    for setting in (FP16, *(Setting("timm", how, "bf16") for how in ("reduce-overhead", "compile", "eager"))):
        assert setting.peak_known == (setting.how in ("compile", "eager"))


def slightly_wrong(context: TensorRT.Context, stream: int, right=TensorRT.Context.execute_async_v3) -> bool:
    right(context, stream)
    context.memory["logits"] *= 1.05
    return True


@pytest.mark.slow
def test_an_engine_is_timms_model_and_is_judged_before_and_after(monkeypatch):
    """By onnxruntime in TensorRT's place: the export, the memory that is bound, and another batch of images."""
    install_tensorrt(monkeypatch)
    peer = Peer(FP16, NANO, training=False)
    with torch.inference_mode():
        assert peer.check()["error"] < 4e-3 and peer.backend is None
        assert peer.check_again()["error_after"] < 4e-3
        other = torch.randn_like(peer.images)
        assert harness.worst_row([peer(other)], [peer.model(other).double()]) < 4e-3
        monkeypatch.setattr(TensorRT.Context, "execute_async_v3", slightly_wrong)
        with pytest.raises(WrongResult, match="tensorrt engine fp16 is wrong on .* after timing"):
            peer.check_again()
        monkeypatch.setattr(TensorRT.Context, "execute_async_v3", lambda self, stream: False)
        with pytest.raises(RuntimeError, match="could not run the engine"):
            peer(other)


def test_a_graph_that_tensorrt_cannot_parse_is_an_error(monkeypatch):
    install_tensorrt(monkeypatch)
    monkeypatch.setattr(engine, "write_onnx", lambda *_: None)
    monkeypatch.setattr(TensorRT.OnnxParser, "parse_from_file", lambda self, path: setattr(self, "num_errors", 2))
    monkeypatch.setattr(TensorRT.OnnxParser, "get_error", lambda self, i: f"node {i}", raising=False)
    with pytest.raises(RuntimeError, match="cannot parse timm's model: node 0; node 1"):
        engine.Engine(torch.nn.Identity(), torch.randn(1, 3, 8, 8))


def test_rounding_to_fp8_by_hand():
    """448 is E4M3's largest number; steps are 32 from 256 to 448 and 1/8 of a power of 2 everywhere."""
    x = torch.tensor([448.0, 300.0, -17.2, 1.05, 0.0])
    assert engine.round_to_fp8(x).tolist() == [448.0, 288.0, -18.0, 1.0, 0.0]
    assert torch.allclose(engine.round_to_fp8(x / 7), engine.round_to_fp8(x) / 7)
    assert engine.round_to_fp8(torch.zeros(3)).tolist() == [0.0] * 3


def fp8_error(logits: torch.Tensor, model: torch.nn.Module, images: torch.Tensor) -> float:
    return harness.worst_row([logits.double()], [model.double()(images.double())])


def test_the_limit_of_fp8_is_that_of_an_eager_model_in_fp8(monkeypatch):
    install_tensorrt(monkeypatch)
    monkeypatch.setattr(engine, "needed", lambda precision: None)
    calibrated = []
    stand_in = lambda model, images, calibration: calibrated.append(len(calibration)) or engine.rounded(model)  # noqa: E731
    monkeypatch.setattr(engine, "Engine", stand_in)
    peer = Peer(FP8, NANO, training=False)
    with torch.inference_mode():
        found = peer.check()
        assert 0.02 < found["error"] < found["error_limit"] < 0.5 and calibrated == [harness.CHECKED]
        peer.function = lambda images: 1.4 * peer.model(images)
        with pytest.raises(WrongResult, match="tensorrt engine fp8 is wrong"):
            peer.check_again()


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_the_onnx_file_is_timms_model(precision, tmp_path):
    """Of Ti/16 at 224 px, by onnxruntime; in FP8 quantised by ModelOpt, where that is installed."""
    if precision == "fp8":
        pytest.importorskip("modelopt.onnx.quantization")
    shape, path = Shape("Ti/16", 224, 5), tmp_path / "model.onnx"
    model = peers.make_model("timm", shape).eval().half()
    images = torch.randn(5, 3, 224, 224, device=machine.DEVICE).half()
    engine.write_onnx(model, images, path, images[:3] if precision == "fp8" else None)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    with torch.no_grad():
        eager = (engine.rounded(model) if precision == "fp8" else model)(images)
        own, error = (fp8_error(y, model, images) for y in (eager, logits))
    assert logits.dtype == torch.float16 and error < 2 * own + 2e-3
    assert "QuantizeLinear" in str(path.read_bytes()) or precision == "fp16"
