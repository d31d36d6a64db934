"""The packed benchmarks: their mixes, and that no way of a wrong result gets a time."""

import math
from pathlib import Path

import bench_packed
import harness
import pytest
import shapes
import torch
from harness import WrongResult
from peers import Setting
from shapes import Mix, Shape, model_work

from vitfast import ops
from vitfast.kernels import launch
from vitfast.model.presets import PRESETS

ROOT = Path(__file__).parents[2]
SMALL = Mix("small", "Ti/16", ((32, 48), (16, 16), (80, 64), (32, 48)), 2)  # 7, 2, 21 and 7 tokens


def test_mixes_and_their_work():
    """As docs/kernels/packed.md has them; of one size the work is what every other benchmark counts."""
    page = (ROOT / "docs" / "kernels" / "packed.md").read_text()
    for m in shapes.MIXES_ON_GPU:
        row = f"| {m.label} | {m.batch} | {m.rows:,} | {min(m.lengths)} | {m.longest:,} | {len(set(m.images))} |"
        pairs = 1 - sum(n * n for n in m.lengths) / (m.batch * m.longest**2)
        assert f"{row} {m.padded_tokens:.1%} | {pairs:.1%} |".replace("%", " %") in page
    assert math.isclose(SMALL.padded_tokens, 1 - 37 / 84)
    same, of_shape = Mix("same", "Ti/16", ((224, 224),) * 3), Shape("Ti/16", 224, 3)
    assert model_work(same, 2) == model_work(of_shape, 2)


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_every_peer_computes_attention(direction, monkeypatch):
    from torch.nn.attention import flex_attention

    check = harness.Check(bench_packed.case_of(SMALL), direction)
    assert check.judge("vitfast", bench_packed.IMPLEMENTATIONS["vitfast"](SMALL))["error"] < 1e-6
    if direction == "forward":  # its backward is for GPUs
        cut = lambda function: lambda *x, **more: function(*(t.detach() for t in x), **more)  # noqa: E731
        monkeypatch.setattr(bench_packed, "compiled", lambda function, how, **options: cut(function))
        make = flex_attention.create_block_mask
        monkeypatch.setattr(flex_attention, "create_block_mask", lambda *a, _compile, **more: make(*a, **more))
        assert check.judge("flex compile", bench_packed.flex(SMALL, "compile"))["error"] < 1e-6
    if launch.INTERPRETED:
        with ops.use_kernels("on"):
            assert check.judge("vitfast", bench_packed.IMPLEMENTATIONS["vitfast"](SMALL))["error"] < 1e-5


def test_one_lost_tile_among_many_images_gets_no_time():
    """Its share of the whole result's norm would be below the limit of bf16."""
    many = Mix("many", "Ti/16", ((16, 16),) * 2000 + ((16, 32),), 2)
    right = bench_packed.IMPLEMENTATIONS["vitfast"](many)

    def loses_a_token(q, k, v):
        o = right(q, k, v)
        return torch.cat([o[:-1], torch.zeros_like(o[-1:])])

    check = harness.Check(bench_packed.case_of(many), "forward")
    check.judge("vitfast", right)
    with pytest.raises(WrongResult, match="packed attention Ti/16 many forward"):
        check.judge("vitfast", loses_a_token)


@pytest.mark.parametrize("name", bench_packed.WAYS)
def test_every_way_makes_the_same_step_or_gets_no_time(name, monkeypatch):
    """A way that takes one image for another, or turns wrong in a gradient, is found."""
    monkeypatch.setitem(PRESETS, "Ti/16", PRESETS["Ti/16"] | dict(embed_dim=64, num_heads=2))
    peer = bench_packed.PackedPeer(Setting(name, "eager", "fp32"), SMALL, training=True)
    assert peer.check()["error"] < 1e-5
    right, images = peer.images, peer.compared
    peer.images = peer.lay_out([images[3], *images[1:3], images[0]])
    with pytest.raises(WrongResult, match="is wrong on Ti/16 small after timing"):
        peer.check_again()
    peer.images = right
    peer.model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="is wrong on Ti/16 small after timing"):
        peer.check_again()
