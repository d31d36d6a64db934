"""A ViT as a folder in the model repository of NVIDIA's Triton Inference Server."""

import json
import shutil
from pathlib import Path

from ...model.checkpoint.files import check_free, staged
from ...model.vit import ViT
from ..embedder import Embedder

CONFIG = """\
# Written by `vitfast export --format triton-repository`; all of it may be changed but the names and types.
backend: "python"
max_batch_size: 64
dynamic_batching {{
  preferred_batch_size: [ 64 ]
  max_queue_delay_microseconds: 2000
}}
input [
  {{
    name: "IMAGE"
    {images}
  }}
]
output [
  {{
    name: "EMBEDDING"
    data_type: TYPE_FP32
    dims: [ {dim} ]
  }}
]
instance_group [
  {{
    kind: KIND_{kind}
    count: 1
  }}
]
parameters {{ key: "pool" value {{ string_value: "" }} }}  # token, avg or map; empty: what the model's head sees
parameters {{ key: "normalize" value {{ string_value: "false" }} }}  # true: divide each vector by its L2 norm
"""
ENCODED = "data_type: TYPE_STRING  # the content of an image file\n    dims: [ 1 ]"
PIXELS = """data_type: TYPE_UINT8
    dims: [ 3, -1, -1 ]
    allow_ragged_batch: true  # sizes may differ from request to request"""


def write_repository(
    model: ViT,
    path: str | Path,
    *,
    processor: dict | None = None,
    uint8: bool = False,
    device: str = "cuda",
    force: bool = False,
) -> int:
    """Writes config.pbtxt, 1/model.py and 1/weights/ below `path`; returns D, the length of a vector.

    path: the model's folder in the server's repository; its name is the model's. processor: the content of a
    preprocessor_config.json, whose resize and crop the server is to have. uint8: requests carry raw pixels
    (n, 3, H, W) in place of image files. device: "cuda" for an instance on every GPU, or "cpu". An Embedder reads the
    weights before the folder is moved to `path`. Raises InputError for a model that has no pooled output and, unless
    `force` is set, where `path` exists already.
    """
    path = Path(path).expanduser()
    check_free(path, force, ("folder",))
    with staged(path, force) as scratch:
        version = scratch / "1"
        model.save_pretrained(version / "weights")
        if processor:
            (version / "weights" / "preprocessor_config.json").write_text(json.dumps(processor))
        dim = Embedder(version / "weights", device="cpu").dim
        shutil.copyfile(Path(__file__).with_name("model.py"), version / "model.py")
        kind = {"cuda": "GPU", "cpu": "CPU"}[device]
        (scratch / "config.pbtxt").write_text(CONFIG.format(images=PIXELS if uint8 else ENCODED, dim=dim, kind=kind))
    return dim
