"""The packed benchmarks: their mixes, the share of padded work, and that no way of a wrong result gets a time."""

import itertools
import math
import sys
import types
from pathlib import Path

import bench_packed
import clock
import harness
import mixes
import packed_models
import packed_peers
import padding
import pytest
import report
import torch
from bench_results import op_entry, planted_results
from harness import WrongResult
from mixes import Mix

from vitfast import ops
from vitfast.kernels import attention_packed, launch, tiles
from vitfast.presets import PRESETS

ROOT = Path(__file__).parents[2]
SMALL = Mix("small", "Ti/16", ((32, 48), (16, 16), (80, 64), (32, 48)), 2)  # 7, 2, 21 and 7 tokens
LIKE = torch.empty((), dtype=torch.bfloat16, device="meta")


# ---- the mixes


def test_the_mixes_are_what_their_names_say():
    navit, dino, documents = mixes.ON_GPU
    for mix, least, most in ((navit, 64, 256), (documents, 224, 1024)):
        sides = list(itertools.chain.from_iterable(mix.images))
        assert least <= min(sides) and max(sides) <= most and not any(side % 16 for side in sides)
        assert max(h / w for h, w in mix.images) <= 2.5 and min(h / w for h, w in mix.images) >= 0.4
        assert 0 <= mixes.TOKENS - mix.tokens <= 1 + (most // 16) ** 2
    assert len(navit.groups) > 50 and len(documents.images) > 10
    assert sorted(set(dino.lengths)) == [37, 197] and dino.tokens == 64 * (2 * 197 + 8 * 37)
    assert dino.uniform == [(128, 197), (512, 37)]
    assert [(len(m.images), m.tokens) for m in mixes.ON_GPU] == [(290, 32724), (640, 44160), (15, 31491)]  # for ever
    assert all(mix.name.startswith("cpu small") for mix in mixes.ON_CPU)


def test_work_is_that_of_the_images_alone():
    """Attention by squares, and of one size what every other benchmark counts."""
    squares = 7**2 + 2**2 + 21**2 + 7**2
    assert math.isclose(sum(f for f, _ in SMALL.attention_work(2).forward), 4 * squares * 192)
    assert math.isclose(sum(f for f, _ in SMALL.attention_work(2).backward), 10 * squares * 192)
    import shapes

    same = Mix("same", "Ti/16", ((224, 224),) * 3)
    of_shape = shapes.model_work(shapes.Shape("Ti/16", 224, 3), 2)
    for direction in ("forward", "both"):
        ours, theirs = (sum(f for f, _ in w.of(direction)) for w in (same.model_work(2), of_shape))
        assert math.isclose(ours, theirs)


# ---- the share of padded work


def pairs_by_hand(queries: int, keys: int, block_m: int, block_n: int) -> int:
    """Pairs that programs of block_m queries compute, one block of keys after the other."""
    computed = 0
    for _ in range(0, queries, block_m):
        for _ in range(0, keys, block_n):
            computed += block_m * block_n
    return computed


def share_by_hand(mix: Mix, parts) -> float:
    """parts(n): (pairs computed, products) of an image of n tokens."""
    needed = computed = 0
    for n in mix.lengths:
        for pairs, products in parts(n):
            needed += products * sum(1 for _ in itertools.product(range(n), range(n)))
            computed += products * pairs
    return 1 - needed / computed


def overridden(stack, **found):
    for op, value in found.items():
        stack.enter_context(tiles.override(op, value))


def test_shares_are_those_of_a_slow_count():
    """Of odd tiles, so that none is taken for another."""
    import contextlib

    longest, lengths = SMALL.longest, SMALL.lengths
    with contextlib.ExitStack() as stack:
        overridden(
            stack,
            attention_fwd=tiles.tile(4, 1, "tiled", BLOCK_M=32, BLOCK_N=16),
            attention_bwd=tiles.tile(provider="tiled"),
            attention_bwd_dq=tiles.tile(4, 1, BLOCK_M=16, BLOCK_N=64),
            attention_bwd_dkdv=tiles.tile(4, 1, BLOCK_M=128, BLOCK_N=16),
        )
        share = lambda *arguments: padding.attention_share(SMALL, *arguments, LIKE)  # noqa: E731
        forward = lambda n: [(pairs_by_hand(n, n, 32, 16), 2)]  # noqa: E731
        backward = lambda n: [(pairs_by_hand(n, n, 16, 64), 3), (pairs_by_hand(n, n, 128, 16), 4)]  # noqa: E731
        both = lambda n: forward(n) + backward(n)  # noqa: E731
        for direction, parts in dict(forward=forward, backward=backward, both=both).items():
            assert math.isclose(share("packed", direction), share_by_hand(SMALL, parts)), direction
        padded = lambda n: [(pairs_by_hand(longest, n, 32, 16), 2)]  # noqa: E731
        assert math.isclose(share("padded", "forward"), share_by_hand(SMALL, padded))
        # the 21 queries of every image end in a block of 32, and each of 21 keys has its program
        padded = lambda n: [(pairs_by_hand(longest, n, 16, 64), 3), (pairs_by_hand(longest, 32, 16, 32), 4)]  # noqa: E731
        assert math.isclose(share("padded", "backward"), share_by_hand(SMALL, padded))
        # one size: 21 keys are 16 and a short block of 16; 2 and 7 one of 16
        single = lambda n: [(pairs_by_hand(n, n, 32, 16), 2)]  # noqa: E731
        assert math.isclose(share("one size at a time", "forward"), share_by_hand(SMALL, single))
    assert set(lengths) == {2, 7, 21}


def test_shares_of_sm_90_by_hand():
    dino = mixes.ON_GPU[1]
    with tiles.targeting(90):
        packed, single = (
            padding.attention_share(dino, way, "forward", LIKE) for way in ("packed", "one size at a time")
        )
        both = padding.attention_share(dino, "one size at a time", "both", LIKE)
    needed = 2 * 197**2 + 8 * 37**2
    assert math.isclose(packed, 1 - needed / (2 * 256**2 + 8 * 64**2))
    rows = 2 * 256 * (128 + 64 + 16) + 8 * 64 * (32 + 16)  # keys of whole rows in falling powers of two
    assert math.isclose(single, 1 - needed / rows)
    head = 2 * 256 * (192 + 16) + 8 * 64 * 64  # five products: 5 keys apart, in a block of 16
    assert math.isclose(both, 1 - 7 * needed / (2 * rows + 5 * head))
    assert math.isclose(padding.token_share(dino, "padded"), 1 - (2 * 197 + 8 * 37) / (10 * 197))
    assert math.isclose(padding.full_share(dino), 1 - needed / (10 * 197**2))
    assert padding.token_share(dino, "packed") == 0.0


def test_on_a_cpu_plain_pytorch_pads_and_a_library_has_no_share():
    assert padding.attention_share(SMALL, "packed", "both") == padding.full_share(SMALL)
    assert padding.attention_share(SMALL, "one size at a time", "both") == 0.0
    assert padding.share(None) is None and padding.model_share(SMALL, 0.0, None) is None
    assert padding._forward(tiles.tile(provider="cudnn"), "packed", 5, 5) is None
    assert math.isclose(padding.model_share(SMALL, 0.25, 0.25), 0.25)


@pytest.mark.skipif(not launch.INTERPRETED, reason="runs the kernel in the interpreter")
def test_the_table_of_tiles_has_as_many_as_are_counted():
    for block in (16, 64):
        table = attention_packed.tile_table(packed_peers.offsets_of(SMALL), SMALL.tokens, block)
        assert int((table[:, 1] > 0).sum()) == sum(padding.whole(n, block) // block for n in SMALL.lengths)


def test_flex_computes_the_blocks_of_its_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    for block in (4, 8, 16):
        owner = torch.arange(4).repeat_interleave(torch.tensor(SMALL.lengths))
        same = lambda b, h, i, j, owner=owner: owner[i] == owner[j]  # noqa: E731
        mask = create_block_mask(same, None, None, SMALL.tokens, SMALL.tokens, device="cpu", BLOCK_SIZE=block)
        blocks = int(
            mask.kv_num_blocks.sum() + (0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks.sum())
        )
        assert math.isclose(padding.flex_share(SMALL, block), 1 - SMALL.squares / (blocks * block**2))


def test_the_page_has_the_numbers_that_the_tiles_give():
    page = (ROOT / "docs" / "kernels" / "packed.md").read_text()
    for table in padding.tables().split("\n\n"):
        assert table.strip() in page, f"docs/kernels/packed.md lacks this table of python bench/padding.py:\n{table}"


# ---- attention


def check_of(layout: str, direction: str) -> harness.Check:
    return harness.Check(bench_packed.case_of(SMALL, layout), direction)


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_every_layout_and_peer_computes_attention(direction, monkeypatch):
    from torch.nn.attention import flex_attention

    for impl, layout in bench_packed.LAYOUTS.items():
        assert check_of(layout, direction).judge(impl, bench_packed.function_of(impl, SMALL))["error"] < 1e-6
    check = check_of("packed", direction)
    assert check.judge("torch nested", packed_peers.nested(SMALL))["error"] < 1e-6
    if direction == "forward":  # its backward is for GPUs
        cut = lambda function: lambda *x, **more: function(*(t.detach() for t in x), **more)  # noqa: E731
        monkeypatch.setattr(harness, "compiled", lambda function, how, **options: cut(function))
        make = flex_attention.create_block_mask
        monkeypatch.setattr(flex_attention, "create_block_mask", lambda *a, _compile, **more: make(*a, **more))
        assert check.judge("flex compile", packed_peers.flex(SMALL, "compile"))["error"] < 1e-6


@pytest.mark.skipif(not launch.INTERPRETED, reason="runs the kernels in the interpreter")
def test_our_kernels_are_right_at_a_mix():
    function = bench_packed.function_of("vitfast", SMALL)
    with ops.use_kernels("on"):
        assert check_of("packed", "both").judge("vitfast", function)["error"] < 1e-5


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


# As the packages promise: packed tensors, with the logsumexp too or without.
VARLEN = """
import torch

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    sizes = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(sizes) and cu_seqlens_q.dtype == torch.int32
    images = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)))
    out = torch.cat([torch.nn.functional.scaled_dot_product_attention(*x) for x in images], 1).transpose(0, 1)
    return {result}
"""


def test_peers_run_where_installed_and_are_skipped_with_a_reason_where_not(tmp_path, monkeypatch):
    names = ("flash-attn 2", "out"), ("flash-attn 3", "(out, None)")
    for number, (impl, _) in enumerate(names):
        monkeypatch.setitem(packed_peers.FLASH_VARLEN, impl, (f"fake{number}", f"vitfast_fake_varlen{number}"))
        with pytest.raises(pytest.skip.Exception, match=f"fake{number} cannot be imported: No module named"):
            bench_packed.function_of(impl, SMALL)
    for number, (_, result) in enumerate(names):
        (tmp_path / f"vitfast_fake_varlen{number}.py").write_text(VARLEN.format(result=result))
    monkeypatch.syspath_prepend(tmp_path)
    for impl, _ in names:
        assert check_of("packed", "both").judge(impl, bench_packed.function_of(impl, SMALL))["error"] < 1e-6
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", types.ModuleType("old"))
    with pytest.raises(pytest.skip.Exception, match="torch has no torch.nn.attention.varlen.varlen_attn"):
        bench_packed.function_of("torch varlen", SMALL)


def test_a_gpu_has_every_mix_direction_and_peer(gpu, monkeypatch):
    monkeypatch.setattr(bench_packed, "MIXES", {mix.name: mix for mix in mixes.ON_GPU})
    ids = {case.id for case in bench_packed.wanted()}
    ways = (*bench_packed.LAYOUTS, *packed_peers.PEERS)
    wanted = itertools.product((m.name for m in mixes.ON_GPU), bench_packed.DIRECTIONS, ways)
    assert ids == {"-".join(case) for case in wanted} and len(ids) == 9 * 10


# ---- whole models


@pytest.fixture
def tiny(monkeypatch) -> Mix:
    monkeypatch.setitem(PRESETS, "Ti/16", PRESETS["Ti/16"] | dict(embed_dim=32, num_heads=2))
    packed_models.weights.cache_clear()
    yield SMALL
    packed_models.weights.cache_clear()


def test_every_way_makes_the_same_step(tiny):
    check = packed_models.Check(tiny, torch.float32)
    assert check.chosen == [0, 1, 2, 3]
    for name, way in packed_models.WAYS.items():
        assert check.judge(name, way(tiny, "eager", torch.float32))["error"] < 1e-5, name


def test_what_our_compiled_ways_keep_follows_the_memory_as_in_eager_training(tiny, settled, monkeypatch):
    found = []
    monkeypatch.setattr(packed_models, "compiled", lambda call, *_, **__: found.append(call.__self__.model))
    packed_models.Way(tiny, "compile", torch.float32)
    packed_models.Padded(tiny, "compile", torch.float32)
    assert {block.keep for model in found for block in model.blocks} == {"all"} and len(found) == 2
    assert settled == [7 + 2 + 21 + 7, 4 * 21]


def test_a_way_that_sees_padding_or_loses_an_image_gets_no_time(tiny, monkeypatch):
    check = packed_models.Check(tiny, torch.float32)
    padded = packed_models.Padded(tiny, "eager", torch.float32)
    padded.images = padded.images[0], torch.full_like(padded.images[1], tiny.longest)
    with pytest.raises(WrongResult, match="vitfast padded is wrong on Ti/16 small"):
        check.judge("vitfast padded", padded)
    single = packed_models.OneSize(tiny, "eager", torch.float32)
    images, group = single.images[0]
    single.images[0] = images, group.flip(0)
    with pytest.raises(WrongResult):
        check.judge("vitfast one size at a time", single)
    way = packed_models.Way(tiny, "eager", torch.float32)
    way.model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="after timing"):
        check.judge("vitfast", way, " after timing")


def test_shares_of_a_step_grow_with_padding(tiny):
    shares = {name: way(tiny, "eager", torch.float32).share() for name, way in packed_models.WAYS.items()}
    assert shares["vitfast one size at a time"] == 0.0 < shares["vitfast"] < shares["vitfast padded"] < 1
    assert shares["timm NaFlexVit"] == shares["vitfast padded"]  # plain PyTorch computes every pair too
    assert 0.4 < padding.token_share(tiny, "padded") < shares["vitfast padded"] + 0.05


# ---- the report


def test_the_report_has_a_table_for_each_mix():
    facts = dict(shape="B/16 NaViT 64-256 px", images=290, tokens=32724, error=1e-3)
    cases = [
        op_entry("packed attention", impl, "forward", time, padded_share=share, **facts)
        for impl, time, share in (("vitfast", 100, 0.36), ("flash-attn 3", 80, None), ("vitfast padded", 250, 0.777))
    ]
    cases.append(op_entry("train packed", "timm NaFlexVit eager", "both", 5000, padded_share=0.5, **facts))
    text = report.sections(planted_results(*cases))
    assert "#### packed attention: B/16 NaViT 64-256 px forward (290 images, 32,724 tokens)" in text
    rows = [line for line in text.splitlines() if " ± " in line and ("vitfast" in line or "flash" in line)]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(c[0], c[2], c[3]) for c in cells] == [
        ("flash-attn 3", "0.80", "-"),
        ("vitfast", "1.00", "36.0%"),
        ("vitfast padded", "2.50", "77.7%"),
    ]
    assert "| timm NaFlexVit eager | 5 ± 0.002 | - | 50.0% |" in text
    assert clock.GPU or all(case.startswith("cpu small") for case in mixes.MIXES)
