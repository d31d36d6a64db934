"""Fixtures of the benchmarks' tests: a pretended GPU, and planted result files."""

import json
from pathlib import Path

import clock
import pytest
import shapes
import torch
from bench_results import entry, model_entry

from vitfast.model import activation_memory as keep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    """The benchmarks take this device for a GPU."""
    monkeypatch.setattr(clock, "GPU", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(shapes, "SHAPES", dict(shapes.SHAPES))
    shapes.choose("few")


@pytest.fixture
def settled(monkeypatch) -> list[int]:
    """The tokens that ViTs were settled for: this device has memory for all that their blocks may keep."""
    asked = []
    monkeypatch.setattr(keep, "DEVICES", (clock.DEVICE.type,))
    monkeypatch.setattr(keep, "choose", lambda blocks, parameters, rows, *_: asked.append(rows) or "all")
    return asked


@pytest.fixture
def results(tmp_path) -> Path:
    """Two files of one GPU: attention won forward and lost in both directions.

    A case failed at first and ran later, another one failed.
    """
    facts = dict(
        device="GPU", torch="2.11", commit="abc", ceilings=dict(copy=4e12, bfloat16=8e14), datasheet_bf16_flops=989e12
    )

    def case(impl, direction, median):
        return entry(
            f"attention {impl} {direction}",
            median,
            op="attention",
            shape="B/16 224 B256",
            direction=direction,
            impl=impl,
        )

    def missing(name, reason):
        return dict(name=name, fullname=f"bench/{name}", params={}, reason=reason)

    ours = [case("vitfast", "forward", 100e-6), case("vitfast", "both", 400e-6)]
    theirs = [
        case("sdpa cudnn", "forward", 150e-6),
        case("sdpa cudnn", "both", 200e-6),
        case("sdpa flash", "both", 300e-6),
    ]
    old = dict(
        benchmarks=ours,
        failed=[
            missing("attention sdpa cudnn both", "OutOfMemoryError: once"),
            missing("attention sdpa math both", "OutOfMemoryError: no room"),
        ],
    )
    new = dict(
        benchmarks=[*theirs, model_entry("vitfast compile bf16", 4000.0), model_entry("timm compile bf16", 5000.0)],
        failed=[],
    )
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    for name, date, content in (("a", "2026-01-02", new), ("b", "2026-01-01", old)):
        own = dict(facts, ceilings=facts["ceilings"] | dict(copy=4e12 if name == "a" else 4.1e12))
        whole = dict(
            content, skipped=[missing("train max", "out of time")], datetime=date, machine_info=dict(vitfast=own)
        )
        (folder / f"{name}.json").write_text(json.dumps(whole))
    return tmp_path / "results"
