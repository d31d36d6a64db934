"""TensorRT and QuACK as modules of the same names, arguments and demands, computed by onnxruntime and PyTorch."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F


class TensorRT:
    """The part of tensorrt 11.1 (python/src/infer/pyCore.cpp, python/src/parsers/pyOnnx.cpp) that an engine needs."""

    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)

    class Logger:
        ERROR = 1

        def __init__(self, min_severity):
            assert min_severity == self.ERROR

    class Builder:
        def __init__(self, logger):
            assert isinstance(logger, TensorRT.Logger)

        def create_network(self, flags=0):
            assert flags == 1  # strongly typed; always in TensorRT 11, a choice in 10
            return SimpleNamespace(file=None)

        def create_builder_config(self):
            return "config"

        def build_serialized_network(self, network, config):
            assert config == "config"
            return network.file

    class OnnxParser:
        def __init__(self, network, logger):
            self.network, self.num_errors = network, 0

        def parse_from_file(self, model: str) -> bool:
            assert isinstance(model, str)
            with open(model, "rb") as file:
                self.network.file = file.read()
            return True

    class Runtime:
        def __init__(self, logger):
            pass

        def deserialize_cuda_engine(self, serialized_engine: bytes):
            return TensorRT.Engine(serialized_engine)

    class Engine:
        """The ONNX file in onnxruntime. It has one batch size, as no profile gives it others."""

        def __init__(self, file: bytes):
            self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            self.tensors = {t.name: t for t in (*self.session.get_inputs(), *self.session.get_outputs())}
            assert list(self.tensors) == ["images", "logits"]
            assert all(t.type == "tensor(float16)" and isinstance(t.shape[0], int) for t in self.tensors.values())

        def get_tensor_shape(self, name: str) -> list[int]:
            return self.tensors[name].shape

        def create_execution_context(self):
            return TensorRT.Context(self)

    class Context:
        def __init__(self, engine):
            self.engine, self.memory = engine, {}

        def set_tensor_address(self, name: str, memory: int) -> bool:
            shape = self.engine.tensors[name].shape
            raw = (ctypes.c_uint16 * int(np.prod(shape))).from_address(memory)
            self.memory[name] = np.ctypeslib.as_array(raw).view(np.float16).reshape(shape)
            return True

        def execute_async_v3(self, stream_handle: int) -> bool:
            (logits,) = self.engine.session.run(None, {"images": self.memory["images"]})
            self.memory["logits"][:] = logits
            return True


def install_tensorrt(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", TensorRT)


def _rows(x, weight, bias):
    """What QuACK's LayerNorm asserts."""
    assert x.dim() == 2 and weight.dim() == bias.dim() == 1 and weight.dtype == bias.dtype == torch.float32


def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    _rows(x, weight, bias)
    found = [F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)]
    found += [(x.float().var(-1, correction=0) + eps).rsqrt()] * return_rstd
    found += [x.float().mean(-1)] * return_mean
    return tuple(found) if len(found) > 1 else found[0]


def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
    assert dout.is_contiguous() and rstd.dtype == mean.dtype == torch.float32
    hat = (x.float() - mean[:, None]) * rstd[:, None]
    g = dout.float() * weight
    dx = rstd[:, None] * (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dout * hat).sum(0).to(weight.dtype), dout.sum(0).to(weight.dtype) if has_bias else None


def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False):
    return F.rms_norm(x, weight.shape, weight, eps)


def gemm_act(A, B, C=None, bias=None, activation=None, alpha=1.0, preact_out=None, postact_out=None, store_preact=True):
    assert A.dim() == B.dim() == 2 and not torch.is_grad_enabled()  # there is no autograd
    preact = A @ B + bias
    return preact if store_preact else None, F.gelu(preact, approximate=GELU[activation])


def mlp_func(x, weight1, weight2, activation, bias1=None, bias2=None, fuse_grad_accum=False, tuned=True):
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate=GELU[activation]), weight2, bias2)


GELU = dict(gelu_erf="none", gelu_tanh_approx="tanh")
QUACK = {  # module -> its functions, with the arguments of quack-kernels 0.6.5
    "quack": [rmsnorm],
    "quack.rmsnorm": [layernorm_fwd, layernorm_bwd],
    "quack.gemm_interface": [gemm_act],
    "quack.mlp": [mlp_func],
}


def install_quack(monkeypatch) -> None:
    for name, functions in QUACK.items():
        module = ModuleType(name)
        module.__dict__.update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
