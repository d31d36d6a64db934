"""The cost of a launch in Python; another batch size compiles nothing new.

Counted for every launcher and its candidates, on meta tensors, without compiling.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from every_launcher import in_training

from vitfast.kernels import launch
from vitfast.kernels.attention import launchers as attention
from vitfast.kernels.attention.options import AttentionOptions
from vitfast.tools.verify.draw import Draw, Sizes

TESTS = Path(__file__).parents[1]
BATCHES = (1, 3, 8, 62, 64, 100, 255, 256)  # 62: 96 row tiles of 128
MODEL = dict(tokens=197, width=768, heads=12, hidden=3072, image=224, patch=16)
COUNTING = f"""
import json, sys

sys.path.insert(0, {str(TESTS)!r})
import codegen
from codegen import Sizes, compiler, record, tiles
from vitfast.kernels.launch import signature

found, known = {{}}, {{}}
for batch in {BATCHES}:
    with tiles.using(sm=90):
        for name, call in codegen.launcher_calls(Sizes(batch=batch, **{MODEL}), codegen.torch.bfloat16, True).items():
            with tiles.using() as used:
                launches = record(call)
            keys = sorted({{" ".join(compiler.key_of(launch, 90)) for launch in launches}})
            for launch in launches:
                key = signature(launch.kernel, launch.arguments)[0]
                assert known.setdefault(key, compiler.key_of(launch, 90)) == compiler.key_of(launch, 90), (name, key)
            same_tiles = found.setdefault(name, {{}}).setdefault(str(sorted(used.items())), [])
            if keys not in same_tiles:
                same_tiles.append(keys)
print(json.dumps({{name: list(by_tiles.values()) for name, by_tiles in found.items()}}))
"""


@pytest.mark.long
def test_another_batch_size_compiles_nothing_new():
    """For each choice of tiles the batches ask for one set of specialisations, of every launcher and candidate.

    And what a launch is known by, so that Triton need not look at it again, tells apart all that Triton does.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(PYTHONPATH=str(TESTS.parent))
    done = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name.partition(" (")[0] for name in found} == set(in_training(Sizes(batch=3, **MODEL)))
    assert all(keys for by_tiles in found.values() for same_tiles in by_tiles for keys in same_tiles)
    grows = {name: same for name, by_tiles in found.items() for same in by_tiles if len(same) > 1}
    assert not grows, {name: sorted(set(map(str, a)) ^ set(map(str, b))) for name, (a, b, *_) in grows.items()}


def test_a_batch_of_6000_fits_every_grid():
    """CUDA allows 65,535 programs in y and z: what grows with the batch must lie in x, tables of each sample too."""
    batch, heads = 6000, MODEL["heads"]
    draw = Draw(torch.bfloat16, torch.device("meta"))
    q, k, v, o, do = draw.values(batch, 197, 5, heads, 64).unbind(2)
    lse, table = draw.values(batch, heads, 197, dtype=torch.float32), draw.values(batch, heads, 197, 32)
    own = AttentionOptions(cos=table, sin=table), AttentionOptions(bias=draw.values(batch, heads, 197, 197))
    calls = [lambda: attention.rope_bwd(q, k, o, do, own[0])]
    calls += [lambda: attention.bias_bwd(q, k, v, o, lse, do, 0.125, own[1])]
    each_launcher = in_training(Sizes(batch=batch, **MODEL)).values()
    calls += [lambda each=each: each.call(*each.make(draw)) for each in each_launcher]
    found = [each for call in calls for each in launch.record(call)]
    assert len({each.kernel.__name__ for each in found}) > 20
    assert not {each.kernel.__name__: each.grid for each in found if max(each.grid[1:], default=0) > 65_535}


def test_products_in_fp32_take_torchs_precision():
    """Set by either of torch's ways; each makes some of the other's getters raise."""

    def precision():
        (found,) = launch.record(
            lambda: attention.attention_fwd(*torch.empty(1, 5, 3, 1, 64, device="meta").unbind(2), 0.1)
        )
        return found.arguments["HEAD"].precision

    before, matmul = torch.backends.fp32_precision, torch.backends.cuda.matmul
    assert precision() == "ieee"
    try:
        torch.backends.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert precision() == "tf32"
        matmul.fp32_precision = "ieee"
        assert precision() == "ieee"
    finally:
        torch.backends.fp32_precision = before
        matmul.fp32_precision = "none"
    for name, expected in (("high", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(name)
        assert precision() == expected
