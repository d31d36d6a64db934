"""Seconds and memory that the proofs of a B/16 take, beside its compilation by Inductor and its training step."""

import ctypes
import gc
import math
import time
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch

from vitfast import backend
from vitfast.backend import proof, rewrite


class Peak:
    """The bytes by which this process grew at most since it was made, as Linux counts them."""

    def __init__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # so that what was freed before is not used unseen
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")

    def _read(self, name: str) -> int:
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[name].split()[0]) * 1024

    def bytes(self) -> int:
        return self._read("VmHWM") - self.before


def first_step(model, images, **options) -> float:
    """The seconds of a first training step of the compiled model, with all proofs to be made."""
    torch._dynamo.reset()
    proof._known.clear()
    start = time.perf_counter()
    torch.compile(model, backend="vitfast", **options)(images).sum().backward()
    return time.perf_counter() - start


@pytest.mark.parametrize("dynamic", [False, True])
def test_proofs_of_a_b16_layer_draw_its_attention_three_times_and_its_mlp_once(dynamic, monkeypatch):
    """Numbers are counted, not seconds, which are those of whatever else runs."""
    drawn, real, width = [], proof._random, 768
    monkeypatch.setattr(proof, "_random", lambda shape, generator: [drawn.append(shape), real(shape, generator)][1])
    layer = timm.models.vision_transformer.Block(width, 12, qkv_bias=True)
    first_step(layer, torch.randn(2, 197, width), dynamic=dynamic, options={"inner": "eager"})
    assert len(backend.report().replaced) == 2
    weights = Counter(math.prod(shape) // width**2 for shape in drawn)  # in squares of the width
    assert weights.pop(0) and weights == {3: 3, 1: 3, 4: 2}
    assert sum(map(math.prod, drawn)) < 21 * width**2  # 20 of them are weights


@pytest.mark.long
def test_proofs_of_a_b16_take_5_percent_of_its_compilation_and_less_memory_than_a_step(monkeypatch):
    torch.manual_seed(0)
    model, images = timm.create_model("vit_base_patch16_224"), torch.randn(4, 3, 224, 224)
    with torch._inductor.config.patch(force_disable_caches=True):
        seconds = first_step(model, images)
    report, of_proofs, real = backend.report(), [], rewrite.prove
    assert len(report.replaced) == 26
    assert report.proof + report.recognition < 0.05 * seconds, (report.summary(), seconds)

    def prove(*arguments):
        peak = Peak()
        try:
            return real(*arguments)
        finally:
            of_proofs.append(peak.bytes())

    monkeypatch.setattr(rewrite, "prove", prove)
    first_step(model, images, options={"inner": "eager"})
    model.zero_grad()
    peak = Peak()
    model(images).sum().backward()
    of_step, mib = peak.bytes(), 2**20
    assert 0 < max(of_proofs) < of_step
    print(f"{report.summary()}, {seconds:.1f} s; proofs {max(of_proofs) / mib:.0f} MiB, step {of_step / mib:.0f} MiB")
