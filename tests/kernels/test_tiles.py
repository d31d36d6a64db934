"""Configurations: every generation has one for everything, and a user's table comes first."""

import csv
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cubin import SHARED_LIMIT
from known_configs import known_configs

from vitfast.kernels import tiles
from vitfast.kernels import user_table as kernel_table
from vitfast.kernels.tiles import config
from vitfast.tools.tune import user_table

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.slow
def test_every_shape_class_has_configurations_that_a_launch_takes():
    """Those of one provider differ in their values alone, and no number is one that no kernel runs with."""
    names: dict[tuple[str, str], set[str]] = {}
    for op, sm, bits, shape, configs in known_configs():
        case = f"{op} sm_{sm} {bits} bits {shape}"
        assert configs and len({*configs}) >= len(configs) - 1, case  # a best that is another's fallback comes twice
        for each in configs:
            numbers = dict(each.blocks, num_warps=each.num_warps, num_stages=each.num_stages)
            assert names.setdefault((op, each.provider), {*dict(each.blocks)}) == {*dict(each.blocks)}, case
            powers = [n for name, n in numbers.items() if name.startswith("BLOCK") or name in ("num_warps", "SUBTILES")]
            assert all(n > 0 and n & (n - 1) == 0 for n in powers), (case, each)
            assert all(n >= (name != "AHEAD") for name, n in numbers.items()), (case, each)
        if op.endswith("_fwd"):
            assert any(each.provider in (*tiles.INVARIANT, "none") for each in configs), case


# KiB of shared memory that a program may use, by compute capability: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


@pytest.mark.parametrize("exact", SHARED_KIB)
def test_tiles_fit_the_shared_memory_of_every_gpu(exact, monkeypatch):
    """By what every shipped tile takes when it is compiled, and no instruction is newer than the GPU's."""
    with open(Path(__file__).parents[1] / "codegen.csv", newline="") as file:
        next(file)
        needed = {}
        for row in csv.DictReader(file):
            needed[int(row["sm"])] = max(needed.get(int(row["sm"]), 0), int(row["shared"]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(exact, 10))
    tiles._generation.cache_clear()
    table = tiles.generation(torch.device("cuda", 0))
    tiles._generation.cache_clear()
    with tiles.using(sm=exact):
        assert tiles.generation(torch.device("meta")) == table
    assert needed[table] <= SHARED_LIMIT[table] == 1024 * SHARED_KIB[exact]
    assert table // 10 == exact // 10 and (table == exact or exact in (86, 87, 103, 121))
    assert needed[90] > 1024 * SHARED_KIB[89] and needed[100] > 1024 * SHARED_KIB[121]  # so that this can fail


def test_a_gpu_that_nobody_knows_takes_the_newest_tiles_before_it():
    assert [tiles.table_of(exact) for exact in (75, 88, 101, 130)] == [0, 80, 100, 120]


def test_lookup_takes_the_first_that_can_and_what_is_forced(monkeypatch):
    a, b, c = config(4, 1, BLOCK_M=1), config(4, 1, "other", BLOCK_M=2), config(4, 1, BLOCK_M=4)
    monkeypatch.setitem(tiles.operations(), "x", lambda shape, bits, sm: [a, b] if (bits, sm) == ("16", 80) else [c, b])
    half, single = torch.empty(1, dtype=torch.float16), torch.empty(1)
    with tiles.using(sm=80):
        assert tiles.lookup("x", half, "d64") == a and tiles.lookup("x", single, "d64") == c
        assert tiles.lookup("x", half, "d64", without=("triton",)) == b
    assert tiles.lookup("x", half, "d64") == c and tiles.shipped("x", half, "d64", ("other",)) == b
    with tiles.using("x", a), tiles.using("x", b, "d64"), tiles.using() as used:
        assert tiles.lookup("x", half, "d64") == b and tiles.lookup("x", half, "d80") == a
        assert tiles.lookup("x", half, "d64", without=("other",)) == c
    assert used == {("x", "16", "d64"): c, ("x", "16", "d80"): a}
    with pytest.raises(ValueError, match="tiles.using: no operation 'y'"):
        tiles.using("y", a).__enter__()
    assert not tiles._overrides
    with tiles.using(sm=75), pytest.raises(KeyError, match="no configuration of x for a GPU older than sm_80"):
        tiles.lookup("x", half, "d64")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The path of a user's table on a pretended GPU."""
    monkeypatch.setenv("VITFAST_TILES", str(tmp_path / "tiles.json"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(tiles, "generation", lambda device: 90)
    tiles.forget_user_table()
    yield tmp_path / "tiles.json"
    tiles.forget_user_table()


GPU_TENSOR = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float16)
SPLIT = dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=128)
GATED = dict(tiles.shipped("gated_linear_fwd", torch.empty(0), "768x768", ("triton",)).blocks)
ROWS = [  # of a user's table at 768x3072, and the words for those that no launcher takes
    ("linear_fwd", config(provider="cudnn"), "takes no cudnn"),
    ("gated_bwd", config(provider="torch"), "takes no torch"),
    ("linear_gelu_fwd", config(8, 3, "tma", BLOCK_M=64), "takes no tma BLOCK_M"),
    ("input_grad", config(8, 3, "cublas", BLOCK_M=64), "takes no cublas BLOCK_M"),
    ("gelu_bwd", config(4, 1, BLOCK_M=32, BLOCK_N=32), ""),
    (
        "dgelu_matmul",
        config(4, 2, **dict(tiles.shipped("linear_fwd", torch.empty(0), "768x768", ("triton",)).blocks)),
        "",
    ),
    ("linear_residual_fwd", config(provider="cublas"), ""),
    ("gated_linear_fwd", config(4, 2, **GATED | {"BLOCK_M": 100}), "takes no BLOCK_M = 100"),
    ("dgated_matmul", config(4, 0, **GATED), "takes no num_stages = 0"),
]


def test_a_users_row_comes_first_and_is_left_out_with_one_warning_where_no_launcher_takes_it(table):
    for op, value, _ in ROWS:
        user_table.keep(value, op=op, gpu="Some GPU", bits="16", shape="768x3072")
    user_table.keep(config(), op="linear_fwd", gpu="Another GPU", bits="16", shape="768x768")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for op, value, fault in ROWS:
                wanted = tiles.shipped(op, GPU_TENSOR, "768x3072") if fault else value
                assert tiles.lookup(op, GPU_TENSOR, "768x3072") == wanted, op
                assert tiles.lookup(op, GPU_TENSOR, "768x768") == tiles.shipped(op, GPU_TENSOR, "768x768"), op
            tiles.forget_user_table()
    wanted = [f"the tile table {table}: {op} at 768x3072, 16 bits, {fault}; run" for op, _, fault in ROWS if fault]
    assert [str(warning.message).partition(" vitfast")[0] for warning in said] == wanted


def test_a_damaged_table_is_refused(table):
    table.write_text('{"tiles": [{"op": 1}]}')
    with pytest.raises(ValueError, match="tiles.json is damaged"):
        tiles.lookup("linear_fwd", GPU_TENSOR, "768x768")


@pytest.mark.parametrize(
    "op, shape, dtype, sm, wanted",
    [
        ("attention_fwd", "d64n256", FP16, 90, "single_pass tiled"),
        ("attention_fwd", "d64nlong", FP16, 90, ""),
        ("attention_bwd", "d64n256", FP16, 90, "tiled specialized"),
        ("attention_bwd", "d80n320", FP16, 90, ""),
        ("layer_norm_bwd", "3x256as", FP16, 90, ""),
        ("linear_fwd", "768x2304", FP16, 90, "triton triton tma tma persistent"),
        ("linear_gelu_fwd", "768x3072", FP16, 90, "triton triton tma tma flattened"),
        ("linear_residual_fwd", "768x768", FP32, 90, "cublas"),
        ("linear_fwd", "768x2304", FP16, 80, "triton"),  # there are no tensor descriptors before sm_90
    ],
)
def test_candidates_are_the_others(op, shape, dtype, sm, wanted):
    with tiles.using(sm=sm):
        assert [t.provider for t in tiles.candidates(op, torch.empty(0, dtype=dtype), shape)] == wanted.split()


def test_a_limit_of_registers_reaches_the_launch_and_the_users_table(table):
    limited, free = config(4, 2, maxnreg=168, BLOCK_M=64), config(4, 2, BLOCK_M=64)
    assert limited.meta == free.meta | dict(maxnreg=168) == dict(BLOCK_M=64, num_warps=4, num_stages=2, maxnreg=168)
    assert "maxnreg" not in free.meta
    user_table.keep(limited, op="x", gpu="Some GPU", bits="16", shape="d64")
    assert kernel_table.read(0, tiles.from_record) == {("x", "d64", "16"): limited}
