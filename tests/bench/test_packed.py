"""The packed benchmarks: their mixes, the share of padded work, and that no way of a wrong result gets a time."""

import contextlib
import itertools
import math
from pathlib import Path

import bench_packed
import harness
import mixes
import packed
import padding
import pytest
import torch
from harness import WrongResult
from mixes import Mix
from shapes import Shape, model_work

from vitfast import ops
from vitfast.kernels import launch
from vitfast.kernels.configs import tiles
from vitfast.model.presets import PRESETS

ROOT = Path(__file__).parents[2]
SMALL = Mix("small", "Ti/16", ((32, 48), (16, 16), (80, 64), (32, 48)), 2)  # 7, 2, 21 and 7 tokens
LIKE = torch.empty((), dtype=torch.bfloat16, device="meta")


def test_mixes_and_their_work():
    """The same images for ever; of one size the work is what every other benchmark counts."""
    assert [(len(m.images), m.tokens) for m in mixes.ON_GPU] == [(290, 32724), (640, 44160), (15, 31491)]
    assert all(mix.name.startswith("cpu small") for mix in mixes.ON_CPU)
    assert math.isclose(sum(f for f, _ in SMALL.attention_work(2).forward), 4 * (49 + 4 + 441 + 49) * 192)
    same, of_shape = Mix("same", "Ti/16", ((224, 224),) * 3), model_work(Shape("Ti/16", 224, 3), 2)
    for direction in ("forward", "both"):
        ours, theirs = (sum(f for f, _ in w.of(direction)) for w in (same.model_work(2), of_shape))
        assert math.isclose(ours, theirs)


def share_by_hand(parts) -> float:
    """parts(n): (pairs computed, products) of an image of n tokens of SMALL."""
    found = [(products * n * n, products * pairs) for n in SMALL.lengths for pairs, products in parts(n)]
    return 1 - sum(needed for needed, _ in found) / sum(computed for _, computed in found)


def pairs(queries: int, keys: int, block_m: int, block_n: int) -> int:
    """That programs of block_m queries compute, one block of keys after the other."""
    return block_m * len(range(0, queries, block_m)) * block_n * len(range(0, keys, block_n))


def test_shares_are_those_of_a_slow_count():
    """Of odd tiles, so that none is taken for another; and of flex_attention the blocks of torch's own mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    longest, shares = SMALL.longest, lambda *arguments: padding.attention_share(SMALL, *arguments, LIKE)
    found = dict(attention_fwd=tiles.tile(4, 1, "tiled", BLOCK_M=32, BLOCK_N=16))
    found |= dict(attention_bwd=tiles.tile(provider="tiled"))
    found |= dict(attention_bwd_dq=tiles.tile(4, 1, BLOCK_M=16, BLOCK_N=64))
    found |= dict(attention_bwd_dkdv=tiles.tile(4, 1, BLOCK_M=128, BLOCK_N=16))
    by_hand = {
        ("packed", "forward"): lambda n: [(pairs(n, n, 32, 16), 2)],
        ("packed", "backward"): lambda n: [(pairs(n, n, 16, 64), 3), (pairs(n, n, 128, 16), 4)],
        ("padded", "forward"): lambda n: [(pairs(longest, n, 32, 16), 2)],
        # the 21 queries of every image end in a block of 32, and each of 21 keys has its program
        ("padded", "backward"): lambda n: [(pairs(longest, n, 16, 64), 3), (pairs(longest, 32, 16, 32), 4)],
        # one size: 21 keys are 16 and a short block of 16; 2 and 7 one of 16
        ("one size at a time", "forward"): lambda n: [(pairs(n, n, 32, 16), 2)],
    }
    by_hand["packed", "both"] = lambda n: by_hand["packed", "forward"](n) + by_hand["packed", "backward"](n)
    with contextlib.ExitStack() as stack:
        for op, tile in found.items():
            stack.enter_context(tiles.override(op, tile))
        for arguments, parts in by_hand.items():
            assert math.isclose(shares(*arguments), share_by_hand(parts)), arguments
    for block in (4, 16):
        owner = torch.arange(4).repeat_interleave(torch.tensor(SMALL.lengths))
        same = lambda b, h, i, j, owner=owner: owner[i] == owner[j]  # noqa: E731
        mask = create_block_mask(same, None, None, SMALL.tokens, SMALL.tokens, device="cpu", BLOCK_SIZE=block)
        full = 0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks.sum()
        blocks = int(mask.kv_num_blocks.sum() + full)
        assert math.isclose(padding.flex_share(SMALL, block), 1 - SMALL.squares / (blocks * block**2))


def test_the_page_has_the_numbers_that_the_tiles_give():
    """And DINO's crops, with sm_90's tiles, those of a count by hand."""
    page = (ROOT / "docs" / "kernels" / "packed.md").read_text()
    for table in padding.tables().split("\n\n"):
        assert table.strip() in page, f"docs/kernels/packed.md lacks this table of python bench/padding.py:\n{table}"
    dino, needed = mixes.ON_GPU[1], 2 * 197**2 + 8 * 37**2
    with tiles.targeting(90):
        single = padding.attention_share(dino, "one size at a time", "both", LIKE)
        assert padding.attention_share(dino, "packed", "forward", LIKE) == 1 - needed / (2 * 256**2 + 8 * 64**2)
    rows = 2 * 256 * (128 + 64 + 16) + 8 * 64 * (32 + 16)  # keys of whole rows in falling powers of two
    head = 2 * 256 * (192 + 16) + 8 * 64 * 64  # five products: 5 keys apart, in a block of 16
    assert math.isclose(single, 1 - 7 * needed / (2 * rows + 5 * head))
    assert math.isclose(padding.model_share(SMALL, 0.25, 0.25), 0.25)
    assert padding.model_share(SMALL, 0.0, None) is None


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_every_layout_and_peer_computes_attention(direction, monkeypatch):
    from torch.nn.attention import flex_attention

    for impl, layout in bench_packed.LAYOUTS.items():
        check = harness.Check(bench_packed.case_of(SMALL, layout), direction)
        assert check.judge(impl, bench_packed.function_of(impl, SMALL))["error"] < 1e-6
    check = harness.Check(bench_packed.case_of(SMALL, "packed"), direction)
    assert check.judge("torch nested", packed.nested(SMALL))["error"] < 1e-6
    if direction == "forward":  # its backward is for GPUs
        cut = lambda function: lambda *x, **more: function(*(t.detach() for t in x), **more)  # noqa: E731
        monkeypatch.setattr(packed, "compiled", lambda function, how, **options: cut(function))
        make = flex_attention.create_block_mask
        monkeypatch.setattr(flex_attention, "create_block_mask", lambda *a, _compile, **more: make(*a, **more))
        assert check.judge("flex compile", packed.flex(SMALL, "compile"))["error"] < 1e-6
    if launch.INTERPRETED:
        with ops.use_kernels("on"):
            assert check.judge("vitfast", bench_packed.function_of("vitfast", SMALL))["error"] < 1e-5


def test_one_lost_tile_among_many_images_gets_no_time():
    """Its share of the whole result's norm would be below the limit of bf16."""
    many = Mix("many", "Ti/16", ((16, 16),) * 2000 + ((16, 32),), 2)
    case, right = bench_packed.case_of(many, "packed"), bench_packed.function_of("vitfast", many)

    def loses_a_token(q, k, v):
        o = right(q, k, v)
        return torch.cat([o[:-1], torch.zeros_like(o[-1:])])

    check = harness.Check(case, "forward")
    check.judge("vitfast", right)
    with pytest.raises(WrongResult, match="packed attention Ti/16 many forward"):
        check.judge("vitfast", loses_a_token)


def test_a_gpu_has_every_mix_direction_and_peer(gpu, monkeypatch):
    monkeypatch.setattr(bench_packed, "MIXES", {mix.name: mix for mix in mixes.ON_GPU})
    ways = (*bench_packed.LAYOUTS, *packed.PEERS)
    wanted = itertools.product((m.name for m in mixes.ON_GPU), ("forward", "backward", "both"), ways)
    ids = {case.id for case in bench_packed.wanted()}
    assert ids == {"-".join(case) for case in wanted} and len(ids) == 9 * 10


@pytest.fixture
def tiny(monkeypatch) -> Mix:
    monkeypatch.setitem(PRESETS, "Ti/16", PRESETS["Ti/16"] | dict(embed_dim=32, num_heads=2))
    packed.weights.cache_clear()
    yield SMALL
    packed.weights.cache_clear()


def test_every_way_makes_the_same_step_or_gets_no_time(tiny):
    """A way that sees padding, loses an image's place, or turns wrong is found; shares grow with padding."""
    check, shares = packed.Check(tiny, torch.float32), {}
    ways = {name: way(tiny, "eager", torch.float32) for name, way in packed.WAYS.items()}
    for name, way in ways.items():
        assert check.judge(name, way)["error"] < 1e-5, name
        shares[name] = way.share()
    assert shares["vitfast one size at a time"] == 0.0 < shares["vitfast"] < shares["vitfast padded"] < 1
    assert shares["timm NaFlexVit"] == shares["vitfast padded"]  # plain PyTorch computes every pair too
    padded = ways["vitfast padded"]
    padded.images = padded.images[0], torch.full_like(padded.images[1], tiny.longest)
    with pytest.raises(WrongResult, match="vitfast padded is wrong on Ti/16 small"):
        check.judge("vitfast padded", padded)
    single = ways["vitfast one size at a time"]
    images, group = single.images[0]
    single.images[0] = images, group.flip(0)
    with pytest.raises(WrongResult):
        check.judge("vitfast one size at a time", single)
    ways["vitfast"].model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="after timing"):
        check.judge("vitfast", ways["vitfast"], " after timing")


def test_what_our_compiled_ways_keep_follows_the_memory_as_in_eager_training(tiny, settled, monkeypatch):
    found = []
    monkeypatch.setattr(packed, "compiled", lambda call, *_, **__: found.append(call.__self__.model))
    packed.Way(tiny, "compile", torch.float32)
    packed.Padded(tiny, "compile", torch.float32)
    assert {block.keep for model in found for block in model.blocks} == {"all"} and len(found) == 2
    assert settled == [7 + 2 + 21 + 7, 4 * 21]
