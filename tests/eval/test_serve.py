"""examples/serve.py: a process of LitServe on a loopback port, asked as OpenAI's clients do."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import load
from pictures import bomb, encoded, smooth
from processes import free_port

import vitfast

pytest.importorskip("litserve", reason="the server of the example")

LIMITS = dict(max_images=4, max_bytes=60_000, max_pixels=200_000, max_body=400_000)
TOL = dict(atol=1e-5, rtol=1e-5)  # other images in the batch


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    vitfast.ViT(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images():
    """Image files of two formats and many sizes."""
    return [encoded(smooth(i, 40 + 7 * i, 90 - 5 * i), ("JPEG", "PNG")[i % 2]) for i in range(10)]


@pytest.fixture(scope="module")
def vectors(weights, images):
    return vitfast.Embedder(weights, device="cpu").embed(images).numpy()


@pytest.fixture
def api(weights):
    module = load("serve")
    batching = dict(batch_size=8, batch_timeout=0.01, weights=weights, normalize=False, graphs=True)
    made = module.EmbeddingAPI(Namespace(**batching, **LIMITS))
    made.setup("cpu")
    return made, module.EmbeddingRequest


def test_a_bad_request_in_a_batch_fails_alone(api, images, vectors):
    """As LitServe's loop calls it: decode each, predict all, encode each."""
    api, request = api
    contents = [images[:1], images[1:4], [images[5], images[4][:-60]], [bomb(500, 500)], [], images[6:8]]
    asked = [request(model="m", input=[text(content) for content in group]) for group in contents]
    asked += [request(model="m", input="data:image/png;base64," + text(images[1]), encoding_format="base64")]
    asked += [request(model="m", input="a cat"), request(model="m", input=text(images[0]), dimensions=3)]
    answers = [api.encode_response(one) for one in api.predict([api.decode_request(one) for one in asked])]
    assert [a.status_code for a in answers] == [200, 200, 422, 422, 400, 200, 200, 400, 400]
    told = [json.loads(a.body) for a in answers]
    for i, rows in ((0, range(1)), (1, range(1, 4)), (5, range(6, 8))):
        assert [d["index"] for d in told[i]["data"]] == list(range(len(rows)))
        np.testing.assert_allclose([d["embedding"] for d in told[i]["data"]], vectors[list(rows)], **TOL)
    assert told[1]["object"] == "list" and told[1]["usage"] == dict(prompt_tokens=51, total_tokens=51)  # 17 an image
    packed = base64.b64decode(told[6]["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(packed, "<f4"), vectors[1], **TOL)
    errors = {i: told[i]["error"]["message"] for i in (2, 3, 4, 7, 8)}
    assert "input[1] is a broken image" in errors[2] and "(250000 pixels) exceeds limit of 200000 pixels" in errors[3]
    assert "give 1 to 4" in errors[4] and "input[0] must be an image file in base64" in errors[7]
    assert errors[8] == "dimensions must be 48, got 3"


@pytest.fixture(scope="module")
def server(weights, tmp_path_factory):
    """(URL, process) of a server that is ready; killed with its workers at the end."""
    root, port = Path(__file__).parents[2], free_port()
    flags = [word for name, value in LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "examples/serve.py", "--weights", str(weights), "--port", port, *flags]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "no_proxy": "*"}
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "w") as out:
        options = dict(cwd=root, env=environment, stdout=out, stderr=out, start_new_session=True)
        process = subprocess.Popen([*command, "--device", "cpu"], **options)
    try:
        until = time.monotonic() + 120
        while get(f"http://127.0.0.1:{port}/health")[0] != 200:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)  # it ends by itself
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever of the session is left


def get(url: str, body: bytes | None = None) -> tuple[int, dict]:
    """(status, answer) of a request; status 0 where nothing answers."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"{}") if body else {}
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()) if body else {}
    except OSError as error:
        return 0, dict(error=repr(error))


def ask(server: str, *contents: bytes | str, **fields) -> tuple[int, dict]:
    given = [one if isinstance(one, str) else text(one) for one in contents]
    return get(f"{server}/embeddings", json.dumps(dict(model="m", input=given) | fields).encode())


def bad(images: list[bytes], number: int) -> tuple[bytes, str]:
    """The body of a bad request, and what its answer must say."""
    rng = random.Random(number)
    whole = text(images[0])
    inputs, says = [
        (["data:image/jpeg," + whole], "input[0] is a data URI without ;base64"),
        ([whole, text(rng.randbytes(70_000))], "input[1] is larger than 60000 bytes"),
        ([text(rng.randbytes(900_000))], "Payload too large"),
        ([text(rng.randbytes(rng.randrange(2000)))], "input[0] cannot be read as an image"),
        ([[1, 2], None, 7, {}][number // 6 % 4], "Input should be a valid string"),
        ([whole], "JSON"),
    ][number % 6]
    body = json.dumps(dict(model="m", input=inputs)).encode()
    return (body[: rng.randrange(1, len(body) - 1)] if says == "JSON" else body), says


@pytest.mark.slow
def test_good_requests_of_many_threads_are_right_among_many_bad_ones(server, images, vectors):
    """Bad ones get a 4xx that says why, others are answered, and the process lives."""
    url, process = server

    def good(number: int) -> None:
        rows = [random.Random(number).randrange(len(images)) for _ in range(1 + number % 3)]
        status, answer = ask(url, *(images[row] for row in rows))
        assert status == 200, answer
        assert [d["index"] for d in answer["data"]] == list(range(len(rows)))
        np.testing.assert_allclose([d["embedding"] for d in answer["data"]], vectors[rows], **TOL)

    def refused(number: int) -> None:
        body, says = bad(images, number)
        status, answer = get(f"{url}/embeddings", body)
        assert status in (400, 413, 422) and says in json.dumps(answer), (number, status, str(answer)[:300])
        assert len(json.dumps(answer)) < 600  # the body does not come back

    with ThreadPoolExecutor(6) as pool:
        done = [
            pool.submit(*call) for i in range(60) for call in ((refused, i), *((good, 3 * i + j) for j in range(3)))
        ]
        for one in done:
            one.result()
    good(0)
    assert process.poll() is None


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai", reason="the official client")


@pytest.mark.slow
def test_the_client_of_openai(openai, server, images, vectors):
    client = openai.OpenAI(base_url=server[0], api_key="none", max_retries=0, timeout=60)
    for options in ({}, dict(encoding_format="float")):  # without the option it asks for base64
        uris = [f"data:image/jpeg;base64,{text(image)}" for image in images[:3]]
        found = client.embeddings.create(model="m", input=uris, **options)
        np.testing.assert_allclose([d.embedding for d in found.data], vectors[:3], **TOL)
    with pytest.raises(openai.BadRequestError, match=r"input\[0\] must be an image file in base64"):
        client.embeddings.create(model="m", input="a cat")
