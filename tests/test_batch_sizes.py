"""Another batch size compiles nothing new: counted for every launcher and its rivals, on meta tensors, without compiling."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitfast.launchers import Sizes, launchers

TESTS = Path(__file__).parent
BATCHES = (1, 3, 8, 62, 64, 100, 255, 256)  # 62: 96 row tiles of 128
MODEL = dict(tokens=197, width=768, heads=12, hidden=3072, image=224, patch=16)
COUNTING = f"""
import json, sys

sys.path.insert(0, {str(TESTS)!r})
import codegen
from codegen import Sizes, offline, record, tiles

found = {{}}
for batch in {BATCHES}:
    with tiles.targeting(90):
        for name, call in codegen.launcher_calls(Sizes(batch=batch, **{MODEL}), codegen.torch.bfloat16, True).items():
            with tiles.watching() as used:
                launches = record(call)
            keys = sorted({{" ".join(offline.key_of(launch, 90)) for launch in launches}})
            same_tiles = found.setdefault(name, {{}}).setdefault(str(sorted(used.items())), [])
            if keys not in same_tiles:
                same_tiles.append(keys)
print(json.dumps({{name: list(by_tiles.values()) for name, by_tiles in found.items()}}))
"""


@pytest.fixture(scope="module")
def compiled_for():
    """Launcher "name (rival)" -> for each choice of tiles, the sets of specialisations that the batches asked for."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(PYTHONPATH=str(TESTS.parent))
    done = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow(10)
@pytest.mark.parametrize("launcher", launchers(Sizes(batch=3, **MODEL)))
def test_another_batch_size_compiles_nothing_new(compiled_for, launcher):
    sets = {name: by_tiles for name, by_tiles in compiled_for.items() if name.partition(" (")[0] == launcher}
    assert sets and all(keys for by_tiles in sets.values() for same_tiles in by_tiles for keys in same_tiles)
    grows = {name: same_tiles for name, by_tiles in sets.items() for same_tiles in by_tiles if len(same_tiles) > 1}
    assert not grows, {
        name: sorted(set(map(str, same_tiles[0])) ^ set(map(str, same_tiles[1]))) for name, same_tiles in grows.items()
    }
