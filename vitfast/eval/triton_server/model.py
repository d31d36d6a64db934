"""Embeddings of images in NVIDIA's Triton Inference Server, for its Python backend.

IMAGE, encoded files (n, 1) or raw uint8 pixels (n, 3, H, W) as config.pbtxt has it -> EMBEDDING (n, D) fp32. The
images of all requests of a batch are computed together; one that cannot be read fails its own request alone. The
server's Python needs vitfast with its extra `train`.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

import vitfast


class TritonPythonModel:
    """The class that the server makes for each instance."""

    def initialize(self, args: dict) -> None:
        """Loads the weights beside this file onto the instance's device."""
        config = json.loads(args["model_config"])
        settings = {name: entry.get("string_value") for name, entry in config.get("parameters", {}).items()}
        gpu = args["model_instance_kind"] == "GPU"
        self.embedder = vitfast.Embedder(
            Path(__file__).with_name("weights"),
            pool=settings.get("pool") or None,
            normalize=settings.get("normalize") == "true",
            device=f"cuda:{args['model_instance_device_id']}" if gpu else "cpu",
        )
        self.encoded = config["input"][0]["data_type"] == "TYPE_STRING"

    def execute(self, requests: list) -> list:
        """A response to each request, in order: its vectors or an error."""
        given = [pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy() for request in requests]
        given = [images.reshape(-1) if self.encoded else images for images in given]
        named = ((None, image, f"IMAGE[{i}]") for images in given for i, image in enumerate(images))
        results = self.embedder.stream_groups(named)
        return [self.response([next(results)[1] for _ in images]) for images in given]

    @staticmethod
    def response(found: list):
        """The vectors of a request's images, or the first error among them."""
        if error := next((one.error for one in found if one.error), None):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(error, pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", np.stack([one.vector for one in found]))])
