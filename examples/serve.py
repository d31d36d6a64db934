"""Embeddings of images behind LitServe, at /v1/embeddings as OpenAI's clients ask for them.

    pip install litserve
    python examples/serve.py --weights runs/b16/checkpoints/last [--port 8000]

    curl localhost:8000/v1/embeddings -H "content-type: application/json" \
        -d "{\"model\": \"b16\", \"input\": [\"$(base64 -w0 cat.jpg)\"]}"

"input" is an image or a list of images. Each is an image file in base64, plain or in a data URI
(data:image/jpeg;base64,...). Requests that arrive within --batch-timeout are computed together. If an image cannot be
read, only its own request fails, with 400, 413 or 422 and a message that names the image. LitServe starts a worker on
every GPU, which runs the model as CUDA graphs (--no-graphs: not); without a GPU it computes on the CPU.
"""

import argparse
import base64
import binascii
import signal
from typing import Literal

import litserve as ls
import numpy as np
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import vitfast


class EmbeddingRequest(BaseModel):
    """The body of a request, as OpenAI defines it."""

    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class Refused(Exception):
    """The reason why a request gets no vectors: an HTTP status, a message, and the parameter that is wrong."""

    def response(self) -> JSONResponse:
        status, message, parameter = self.args
        error = dict(message=message, type="invalid_request_error", param=parameter, code=None)
        return JSONResponse(dict(error=error), status)


class EmbeddingAPI(ls.LitAPI):
    """Images of a batch of requests -> their vectors; a bad request passes through as its Refused."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(args.batch_size, args.batch_timeout, api_path="/v1/embeddings")
        self.args = args

    def setup(self, device: str) -> None:
        options = dict(normalize=self.args.normalize, max_pixels=self.args.max_pixels)
        graphs = self.args.graphs and device.startswith("cuda")
        self.embedder = vitfast.Embedder(self.args.weights, device=device, graphs=graphs, **options)

    def decode_request(self, request: EmbeddingRequest) -> tuple[EmbeddingRequest, list[bytes] | Refused]:
        """The request with the content of its image files."""
        try:
            texts = [request.input] if isinstance(request.input, str) else request.input
            if not 1 <= len(texts) <= self.args.max_images:
                raise Refused(400, f"input has {len(texts)} images; give 1 to {self.args.max_images}", "input")
            if request.dimensions not in (None, self.embedder.dim):
                message = f"dimensions must be {self.embedder.dim}, got {request.dimensions}"
                raise Refused(400, message, "dimensions")
            return request, [self.content(text, f"input[{i}]") for i, text in enumerate(texts)]
        except Refused as refused:
            return request, refused

    def content(self, text: str, name: str) -> bytes:
        """The bytes of a base64 text or data URI. Raises Refused."""
        if text.startswith("data:"):
            head, _, text = text.partition(",")
            if not head.endswith(";base64"):
                raise Refused(400, f"{name} is a data URI without ;base64", name)
        if len(text) * 3 // 4 > self.args.max_bytes + 2:
            raise Refused(413, f"{name} is larger than {self.args.max_bytes} bytes", name)
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise Refused(400, f"{name} must be an image file in base64 ({error})", name) from None

    def predict(self, batch: list) -> list:
        """Computes the images of all requests together."""
        named = [
            (None, content, f"input[{i}]")
            for _, contents in batch
            if not isinstance(contents, Refused)
            for i, content in enumerate(contents)
        ]
        results = self.embedder.stream_groups(named)
        return [
            (request, contents if isinstance(contents, Refused) else self.vectors(contents, results))
            for request, contents in batch
        ]

    @staticmethod
    def vectors(contents: list[bytes], results) -> list[np.ndarray] | Refused:
        """The next results, one for each image of a request."""
        found = [next(results)[1] for _ in contents]
        wrong = next((i for i, one in enumerate(found) if one.error), None)
        if wrong is not None:
            return Refused(422, found[wrong].error, f"input[{wrong}]")
        return [one.vector for one in found]

    def encode_response(self, output: tuple) -> JSONResponse:
        request, vectors = output
        if isinstance(vectors, Refused):
            return vectors.response()  # raised, it would fail the whole batch
        if request.encoding_format == "base64":
            encoded = [base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors]
        else:
            encoded = [v.tolist() for v in vectors]
        data = [dict(object="embedding", index=i, embedding=e) for i, e in enumerate(encoded)]
        tokens = len(vectors) * self.embedder.backbone.own_tokens
        usage = dict(prompt_tokens=tokens, total_tokens=tokens)
        return JSONResponse(dict(object="list", data=data, model=request.model, usage=usage))


def invalid(_, error: RequestValidationError) -> JSONResponse:
    """422 that says what is wrong with a body, and does not send the body back as FastAPI does."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return Refused(422, f"{place}: {first['msg']}"[:400], place).response()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--weights", required=True, help="file, folder or hf-hub:owner/name")
    add("--host", default="127.0.0.1", help="0.0.0.0 for all interfaces (default 127.0.0.1)")
    add("--port", type=int, default=8000)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--normalize", action="store_true", help="divide each vector by its L2 norm")
    graphs = "run the model as CUDA graphs where a GPU is used (default); NaFlexViT and SigLIP 2 need --no-graphs"
    add("--graphs", action=argparse.BooleanOptionalAction, default=True, help=graphs)
    add("--batch-size", type=int, default=32, help="requests in a batch, at least 2 (default 32)")
    add(
        "--batch-timeout",
        type=float,
        default=0.01,
        help="seconds that the first request of a batch waits for others (default 0.01)",
    )
    add("--max-images", type=int, default=64, help="most images of a request (default 64)")
    add("--max-bytes", type=int, default=16 << 20, help="most bytes of an image file (default 16 MiB)")
    add(
        "--max-pixels",
        type=int,
        default=100_000_000,
        help="most pixels of an image, known before it is decoded (default 100,000,000)",
    )
    add("--max-body", type=int, default=64 << 20, help="most bytes of a request (default 64 MiB)")
    args = parser.parse_args()
    if args.batch_size < 2:
        parser.error("--batch-size must be at least 2: for one LitServe does not batch")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # LitServe ends its workers after Ctrl-C alone
    server = ls.LitServer(EmbeddingAPI(args), accelerator=args.device, max_payload_size=args.max_body)
    server.app.add_exception_handler(RequestValidationError, invalid)
    server.run(host=args.host, port=args.port, generate_client_file=False)


if __name__ == "__main__":
    main()
