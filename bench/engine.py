"""TensorRT: an engine built from the ONNX export of timm's model, in fp16 or FP8.

Written against the Python API of TensorRT 11.1 (NVIDIA/TensorRT, python/src), whose names 10.x has too, and ModelOpt
0.47 (`modelopt.onnx.quantization.quantize`). Networks are strongly typed, as always in TensorRT 11: the types are those
of the ONNX file. For FP8 that file has Q/DQ nodes (E4M3, a scale per tensor) around inputs and weights of the linear
layers and around both products of attention; scales come from the largest values on the images that are compared.

An engine is judged as every peer is, before and after it is timed. In FP8 the limit comes, as always, from the error of
an eager model in the same precision: timm's, with what enters these products rounded to E4M3 (`rounded`).
"""

import copy
import tempfile
from pathlib import Path

import torch
from libraries import imported
from torch import Tensor, nn

TENSORRT = "tensorrt"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def needed(precision: str) -> None:
    """Skips the case where a package is missing: TensorRT, those of the export, and for FP8 ModelOpt."""
    for package in ("tensorrt", "onnx", "onnxscript"):
        imported(package, package)
    if precision == "fp8":
        imported("nvidia-modelopt[onnx]", "modelopt.onnx.quantization", "quantize")


def write_onnx(model: nn.Module, images: Tensor, path: Path, calibration: Tensor | None = None) -> None:
    """Writes the model in its dtype: images (B, 3, H, W), of this batch size, -> logits (B, 1000).

    calibration: if given, the model is quantised to FP8 by the range of every tensor on these images. ModelOpt runs it
    on the CPU, so that they should be few; until then the batch is free.
    """
    options = dict(input_names=["images"], output_names=["logits"], dynamo=True, verbose=False, external_data=False)
    example = images
    if calibration is not None:  # a free batch is shown as 2 or more
        example, options["dynamic_shapes"] = images[[0, -1]], ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        torch.onnx.export(model, (example,), path, **options)
    if calibration is None:
        return
    import onnx
    from modelopt.onnx.quantization import quantize

    size = f"images:{'x'.join(map(str, calibration.shape))}"
    options = dict(calibration_method="max", calibration_shapes=size, calibration_eps=["cpu"], log_level="ERROR")
    options |= dict(op_types_to_quantize=["MatMul", "Gemm"], output_path=str(path))  # the residual stream stays in fp16
    quantize(str(path), "fp8", calibration.cpu().numpy(), **options)
    made = onnx.load(path)
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = len(images)
    del made.graph.value_info[:]  # some of it has the free batch
    onnx.save(made, path)


class Engine:
    """An engine for images (B, 3, H, W) of one batch size, on the current GPU."""

    def __init__(self, model: nn.Module, images: Tensor, calibration: Tensor | None = None):
        import tensorrt as trt

        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            write_onnx(model, images, path, calibration)
            if not parser.parse_from_file(str(path)):
                reasons = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
                raise RuntimeError(f"TensorRT cannot parse timm's model: {reasons}")
        plan = builder.build_serialized_network(network, builder.create_builder_config())
        if plan is None:
            raise RuntimeError("TensorRT could not build the engine; its log says why")
        self.runtime = trt.Runtime(logger)
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()
        shape = tuple(self.engine.get_tensor_shape("logits"))
        self.logits = torch.empty(shape, dtype=images.dtype, device=images.device)
        # On the default stream TensorRT would wait for the device in each call.
        self.stream = torch.cuda.Stream() if images.is_cuda else None

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, 1000); the next call writes them again."""
        for name, tensor in (("images", images), ("logits", self.logits)):
            self.context.set_tensor_address(name, tensor.data_ptr())
        if self.stream is None:
            self._enqueue(0)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            self._enqueue(self.stream.cuda_stream)
            torch.cuda.current_stream().wait_stream(self.stream)
        return self.logits

    def _enqueue(self, stream: int) -> None:
        if not self.context.execute_async_v3(stream):
            raise RuntimeError("TensorRT could not run the engine; its log says why")


# ---- FP8 in eager PyTorch, for the limit


def round_to_fp8(x: Tensor) -> Tensor:
    """The nearest numbers of E4M3 times a scale, by which the largest number is E4M3's; in x's dtype."""
    scale = (x.abs().amax().float() / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def rounded(model: nn.Module) -> nn.Module:
    """A copy of timm's model with inputs and weights of linear layers, and q, k, v, rounded to FP8."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.weight.data = round_to_fp8(module.weight.data)
            module.register_forward_pre_hook(lambda module, inputs: (round_to_fp8(inputs[0]),))
            if name.endswith("qkv"):
                module.register_forward_hook(lambda module, inputs, qkv: round_to_fp8(qkv))
    return model
