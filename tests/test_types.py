"""What a type checker makes of a user's script: mypy's types of the public names, and the mistakes it finds."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch

from vitfast import ViT, errors, ops
from vitfast.data.resize import resize
from vitfast.model import config
from vitfast.ops import blocks, dispatch
from vitfast.ops.attention import RopeLayout
from vitfast.ops.checks import Approximate

ROOT = Path(__file__).parent.parent
SCRIPT = """
import torch
from torch import nn

import vitfast
from vitfast import ViT, ops

class Own(nn.Module): ...
class Mine(ViT): ...

q = torch.zeros(1, 2, 3, 4)
reveal_type(ViT(img_size=224, num_classes=10))  # ViT
reveal_type(ViT.from_preset("B/16"))  # ViT
reveal_type(Mine.from_pretrained("B_16.npz"))  # Mine
reveal_type(vitfast.accelerate(Own()))  # Own
reveal_type(vitfast.restore(vitfast.accelerate(ViT())))  # ViT
reveal_type(ops.attention(q, q, q, rope_layout="half"))  # Tensor
reveal_type(ops.attention(q, cu_seqlens=q, max_seqlen=3))  # Tensor
reveal_type(ops.add_layer_norm(q, q, None, None))  # tuple[Tensor, Tensor]
reveal_type(vitfast.load_checkpoint("B_16.npz"))  # dict[str, Tensor]
reveal_type(vitfast.pack([q], 16))  # PackedImages
reveal_type(vitfast.Embedder("B_16.npz", pool="avg").embed(["a.png"]))  # Tensor
with ops.use_kernels("on"), vitfast.batch_invariant(True): ...
ViT(no_such=1)  # error: no_such
ViT(img_size="large")  # error: img_size
ViT(global_pool="sum")  # error: global_pool
ViT().set_keep("some")  # error: set_keep
ops.use_kernels("sometimes")  # error: use_kernels
ops.mlp(q, q, None, q, None, activation="relu")  # error: activation
ops.attention(q, rope_layout="whole")  # error: rope_layout
ops.attention(q, heads=3)  # error: heads
vitfast.accelerate("B/16")  # error: accelerate
vitfast.nothing  # error: nothing
"""


@pytest.mark.slow
def test_a_type_checker_knows_what_is_public(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(SCRIPT)
    options = ["--cache-dir", str(tmp_path / "cache"), "--no-error-summary", "--hide-error-context"]
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT / '.src'}\n")
    mypy = [sys.executable, "-m", "mypy", *options, "--config-file", "mypy.ini", "user.py"]
    run = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True)
    said = {}
    for number, kind, text in re.findall(r"^user\.py:(\d+): (note|error): (.*)$", run.stdout, flags=re.MULTILINE):
        said.setdefault(int(number), []).append((kind, text))
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        code, _, wanted = line.partition("  # ")
        found = said.pop(number, [])
        if wanted.startswith("error"):
            assert [kind for kind, _ in found if kind == "error"] == ["error"], (line, found, run.stderr)
            assert wanted.removeprefix("error: ") in found[0][1], found
        elif wanted:
            shown = re.sub(r"[\w.]+\.(?=\w)", "", re.search('"(.*)"', found[0][1])[1])
            assert shown == wanted, (line, found)
        else:
            assert not found, (line, found)
    assert not said


X, W, V = torch.zeros(1, 4, 32), torch.zeros(96, 32), torch.zeros(32)
BLOCK = dict(x=X, norm_weight=V, norm_bias=V, fc1_weight=W, fc1_bias=None, fc2_weight=W.T, fc2_bias=None)


@pytest.mark.parametrize(
    "choices, refuses",
    [
        (errors.Activation, lambda: ops.linear_gelu(X, W, None, activation="?")),
        (Approximate, lambda: ops.linear_gelu(X, W, None, approximate="?")),
        (blocks.Keep, lambda: ops.mlp_block(**BLOCK, keep="?")),
        (dispatch.Mode, lambda: ops.use_kernels("?")),
        (blocks.Norm, lambda: ops.mlp_block(**BLOCK, norm="?")),
        (RopeLayout, lambda: ops.attention(torch.zeros(1, 4, 3, 2, 16), rope_layout="?")),
        (config.Interpolation, lambda: resize(X.byte(), (2, 2), resample="?")),
        *((f.type, lambda f=f: ViT(**{f.name: "?"})) for f in fields(config.ViTConfig) if "Literal" in str(f.type)),
    ],
    ids=lambda value: None if callable(value) and "Literal" not in str(value) else str(value),
)
def test_the_choices_of_a_type_are_those_that_errors_name(choices, refuses):
    literal = next(each for each in (choices, *get_args(choices)) if get_origin(each) is Literal)
    with pytest.raises(ValueError) as caught:
        refuses()
    named = re.search("must be (?:None or )?(?:one of )?(.*), got", str(caught.value))[1].replace(" (erf)", "")
    assert {name.strip("'") for name in re.split(", | or ", named)} == {*get_args(literal)}
