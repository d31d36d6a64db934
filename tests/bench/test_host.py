"""Host time: launches are those that a GPU would get, and the stand-in for libcuda refuses what a driver would."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import host
import pytest
import torch

from vitfast import ops
from vitfast.kernels import tiles
from vitfast.kernels.launch import record
from vitfast.tools.machine_code import model_launches


@pytest.mark.slow
def test_launches_are_those_that_a_large_batch_makes_on_a_gpu(tmp_path):
    """Meta tensors of 256 images count them; the benchmark has one image and a CPU."""
    path, environment = tmp_path / "host.json", {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, host.__file__, "layer_norm", "block", "--seconds", "0.1", "--shares", "--json", path]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    model = model_launches.model("B/16", 224, train=True, amp=False, depth=1)
    x, weight, bias = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((256, 197, 768), 768, 768))
    calls = dict(layer_norm=lambda: ops.layer_norm(x, weight, bias), block=lambda: model.blocks[0](x))
    with model_launches.launching_on_meta(), tiles.using(sm=90):
        for leaf in (x, weight, bias):
            leaf.requires_grad_()
        expected = {name: len(record(lambda: call().backward(x))) for name, call in calls.items()}  # noqa: B023
    found = json.loads(path.read_text())["cases"]
    assert {name: case["launches"] for name, case in found.items()} == expected and min(expected.values()) > 0
    for case in found.values():
        assert 1 < case["low_us"] <= case["median_us"] < 1e6
    listed = [float(line.split("%")[0]) for line in run.stdout.splitlines() if "%" in line]
    assert sum(listed) == pytest.approx(200, abs=2) and "launchers and keys" in run.stdout


CALLS = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
many = lambda kind, *numbers: (kind * len(numbers))(*numbers)

def said(code):
    text = ctypes.c_char_p()
    lib.cuGetErrorString(code, ctypes.byref(text))
    print(text.value.decode() if code else "accepted")

def describe(address=4096, stride=1536, columns=64, rows=128):
    sizes, strides = many(ctypes.c_uint64, 768, 197), many(ctypes.c_uint64, stride)
    box, steps = many(ctypes.c_uint32, columns, rows), many(ctypes.c_uint32, 1, 1)
    bf16, swizzled_by_128 = 9, 3
    place = ctypes.create_string_buffer(128), bf16, 2, ctypes.c_void_p(address)
    said(lib.cuTensorMapEncodeTiled(*place, sizes, strides, box, steps, 0, swizzled_by_128, 0, 0))

def launch(y=65535, threads=1024, shared=232448):
    config = many(ctypes.c_uint32, 1, y, 1, threads, 1, 1, shared, *[0] * 7)
    said(lib.cuLaunchKernelEx(config, None, None, None))

describe(), describe(address=4104), describe(stride=1544), describe(columns=128), describe(rows=512)
launch(), launch(y=65536), launch(threads=1025), launch(shared=232449)
print(lib.stub_launches())
"""


def test_the_stub_refuses_what_a_driver_refuses():
    """Limits are those of CUDA's documentation. In a process of its own, as others look for libcuda too."""
    command = [sys.executable, "-c", CALLS, str(host.stub() / "libcuda.so.1")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    maps = ["a tensor map at 0x1008, not a multiple of 16", "a stride of 1544 bytes"]
    maps += ["256 bytes in a row of the box, swizzled by 128", "512 elements of axis 1 in the box"]
    launches = ["a grid of 1, 65536, 1", "1025 threads", "232449 bytes of shared memory"]
    assert run.stdout.splitlines() == ["accepted", *maps, "accepted", *launches, "4"]


def test_ratios_and_bounds_by_hand(capsys):
    pair = lambda now, then: dict(now=dict(launches=3, low_us=now), then=dict(launches=4, low_us=then))  # noqa: E731
    found = dict(block=pair(50.0, 100.0), layer_norm=pair(90.0, 60.0))
    assert host.compare(found, host.WANTED) and found["layer_norm"]["ratio"] == 1.5
    assert not host.compare(dict(eager=pair(51.0, 100.0)), host.WANTED)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["block", "3", "4", "50.0", "100.0", "0.50", "0.5", "kept"]
    assert lines[2][-2:] == ["1.50", "-"] and lines[4][-3:] == ["0.51", "0.5", "missed"]


def test_a_commit_that_is_none_is_named_and_leaves_no_tree(tmp_path):
    args = argparse.Namespace(against="no-such-commit", cases=["block"], rounds=1, seconds=1.0)
    with pytest.raises(SystemExit, match="cannot have no-such-commit: fatal"):
        host.in_turns(args, str(tmp_path))
    listed = subprocess.run(["git", "worktree", "list"], cwd=host.ROOT, capture_output=True, text=True).stdout
    assert str(tmp_path) not in listed and not Path(tmp_path, "then").exists()
