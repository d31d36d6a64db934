"""Tile tables: every generation has a tile for everything, and a user's table comes first."""

import contextlib
import csv
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitfast.kernels.configs import tiles
from vitfast.kernels.configs.tiles import Rule, config
from vitfast.kernels.libraries import cublaslt

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_every_operation_ends_with_a_rule_for_everything():
    for op, rules in tiles.RULES.items():
        last = rules[-1]
        assert last.sm == tiles.GENERATIONS and last.bits == "*" and last.shape == "*", op


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
    assert needed[table] <= tiles.SHARED_LIMIT[table] == 1024 * SHARED_KIB[exact]
    assert table // 10 == exact // 10 and (table == exact or exact in (86, 87, 103, 121))
    assert needed[90] > 1024 * SHARED_KIB[89] and needed[100] > 1024 * SHARED_KIB[121]  # so that this can fail


def test_a_gpu_that_nobody_knows_takes_the_newest_tiles_before_it():
    assert [tiles.table_of(exact) for exact in (75, 88, 101, 130)] == [0, 80, 100, 120]


def test_lookup_takes_the_first_match(monkeypatch):
    a, b, c = config(4, 1, BLOCK_M=1), config(4, 1, BLOCK_M=2), config(4, 1, BLOCK_M=4)
    monkeypatch.setitem(tiles.RULES, "x", (Rule(a, sm=(80,), bits="16"), Rule(b, shape="d6*"), Rule(c)))
    half, single = torch.empty(1, dtype=torch.float16), torch.empty(1)
    with tiles.using(sm=80):
        assert tiles.lookup("x", half, "d64") == a and tiles.lookup("x", single, "d64") == b
    assert tiles.lookup("x", half, "d64") == b and tiles.lookup("x", half, "d80") == c
    with tiles.using("x", a), tiles.using("x", c, "d64"), tiles.using() as used:
        assert tiles.lookup("x", half, "d64") == c and tiles.lookup("x", half, "d80") == a
    assert used == {("x", "16", "d64"): c, ("x", "16", "d80"): a} and tiles.lookup("x", half, "d80") == c
    monkeypatch.setitem(tiles.RULES, "x", (Rule(a, sm=(80,)),))
    with pytest.raises(KeyError, match="no tile for x on sm_90, 16 bits, shape d64"):
        tiles.lookup("x", half, "d64")


def test_users_table_is_read_and_refused_when_damaged(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    monkeypatch.setenv("VITFAST_TILES", str(path))
    row = tiles.to_record("attention_fwd", "Some GPU", "16", "d64", config(8, 3, "single_pass", BLOCK_M=32))
    path.write_text(json.dumps({"tiles": [row]}))
    tiles._user_table.cache_clear()
    assert tiles._user_table() == {("attention_fwd", "Some GPU", "16", "d64"): config(8, 3, "single_pass", BLOCK_M=32)}
    path.write_text('{"tiles": [{"op": 1}]}')
    tiles._user_table.cache_clear()
    with pytest.raises(ValueError, match="tiles.json is damaged"):
        tiles._user_table()
    path.unlink()
    tiles._user_table.cache_clear()
    assert tiles._user_table() == {}


OF_A_PRODUCT = dict(tiles.RULES["linear_gelu_fwd"][-1].config.blocks)
SCALE_ROWS = dict(BLOCK_M=8, BLOCK_D=250, STAGES=3, PER_SM=6)
FAULTS = [  # of a user's rows, and two that have none
    (
        "attention_bwd",
        config(8, 2, "single_pass", BLOCK_M=64),
        "has no provider 'single_pass', only resident, tiled, specialized; ",
    ),
    ("attention_fwd", config(provider="cudnn"), "has no provider 'cudnn', only tiled, single_pass, single_pass_tma; "),
    ("layer_norm_bwd", config(provider="torch"), "has no provider 'torch', only triton; "),
    ("linear_gelu_fwd", config(8, 3, "tma", BLOCK_M=64), "by tma takes BLOCK_K BLOCK_M BLOCK_N GROUP_M SUBTILES, not"),
    ("weight_grad", config(8, 3, "cublas", BLOCK_M=64), "by cublas takes no numbers, not BLOCK_M; "),
    ("gelu_bwd", config(4, 1, BLOCK_M=64, BLOCK_N=-64), "by triton cannot run with BLOCK_N = -64; "),
    ("weight_grad_sum", config(4, 1, BLOCK_N=0, BLOCK_K=512), "by triton cannot run with BLOCK_N = 0"),
    ("scale_rows", config(4, 1, **SCALE_ROWS), "by triton cannot run with"),
    ("column_sums", config("4", 1, BLOCK_P=256, BLOCK_D=16), "by triton cannot run with num_warps = '4'"),
    ("dgelu_matmul", config(4, 2, **OF_A_PRODUCT), ""),
    ("linear_residual_fwd", config(provider="cublas"), ""),
]


def test_a_row_that_no_launcher_takes_is_left_out_with_one_warning(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    monkeypatch.setenv("VITFAST_TILES", str(path))
    monkeypatch.setattr(tiles, "_gpu_name", lambda index: "Some GPU")
    monkeypatch.setattr(tiles, "generation", lambda device: 90)
    rows = [tiles.to_record(op, "Some GPU", "16", "768x3072", value) for op, value, _ in FAULTS]
    unknown = tiles.to_record("softmax_fwd", "Some GPU", "16", "768x3072", config())
    path.write_text(json.dumps({"tiles": [*rows, unknown]}))
    tiles.reload_user_table()
    gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for op, value, fault in FAULTS:
                wanted = tiles.shipped(op, gpu, "768x3072") if fault else value
                assert tiles._find(op, gpu, "768x3072") == wanted, op
            tiles.reload_user_table()
    wanted = [(op, f"{op} {fault}") for op, _, fault in FAULTS if fault]
    wanted += [("softmax_fwd", "no operation 'softmax_fwd'; ")]
    assert len(said) == len(wanted)
    for message, (op, fault) in zip([str(warning.message) for warning in said], wanted):
        assert message.startswith(f"the tile table {path}: {fault}")
        assert f"the row of {op} at 768x3072, 16 bits, Some GPU, is left out: run vitfast tune again" in message
    path.unlink()
    tiles.reload_user_table()


def test_what_is_forced_must_exist():
    says = "linear_residual_fwd has no provider 'nonsense', only cublas, persistent, triton, cublaslt, tma, flattened$"
    with pytest.raises(ValueError, match=says):
        tiles.using("linear_residual_fwd", config(provider="nonsense")).__enter__()
    with pytest.raises(ValueError, match="no operation 'linear_residual'$"):
        tiles.using("linear_residual", config()).__enter__()
    assert not tiles._scope.overrides


@pytest.mark.parametrize(
    "op, shape, dtype, where, wanted, absent",
    [
        ("attention_fwd", "d64n256", FP16, "here", "tiled", set()),
        ("attention_fwd", "d64nlong", FP16, "here", "", set()),
        ("attention_bwd", "d64n256", FP16, "here", "tiled specialized", set()),
        ("attention_bwd", "d80n320", FP16, "here", "", set()),
        ("layer_norm_fwd", "3x256a", FP16, "here", "", set()),
        ("layer_norm_bwd", "3x256as", FP16, "here", "", set()),
        ("gelu_bwd", "d3072", FP16, "here", "", set()),
        ("gated_bwd", "d3072", FP16, "here", "", set()),
        ("linear_fwd", "768x2304", FP16, "here", "triton persistent tma triton tma", set()),  # wide ones too
        ("linear_gelu_fwd", "768x3072", FP16, "here", "cublas triton tma triton tma flattened", set()),
        ("weight_grad", "768x3072", FP16, "here", "triton tma triton tma", set()),
        ("linear_residual_fwd", "768x768", BF16, "here", "cublas triton tma triton tma flattened", {"cublaslt"}),
        ("linear_residual_fwd", "768x768", BF16, "built", "cublas cublaslt triton tma triton tma flattened", set()),
        ("linear_residual_fwd", "768x768", FP32, "built", "cublas", set()),
        # cuBLASLt is not compiled offline; there are no tensor descriptors before sm_90
        ("linear_residual_fwd", "768x768", BF16, 90, "cublas triton tma triton tma flattened", {"cublaslt"}),
        ("linear_fwd", "768x2304", FP16, 80, "triton", set()),
    ],
)
def test_candidates_are_those_that_can_run(op, shape, dtype, where, wanted, absent, monkeypatch):
    if where != "here":
        monkeypatch.setattr(cublaslt, "unsupported_reason", lambda x: None)
    x, offline = torch.empty(0, dtype=dtype), isinstance(where, int)
    with tiles.using(sm=where) if offline else contextlib.nullcontext():
        x = x.to("meta") if offline else x
        assert [t.provider for t in tiles.candidates(op, x, shape)] == wanted.split()
        assert tiles.absent(op, x, shape).keys() == absent


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_provider_that_cannot_run(where, monkeypatch):
    """A table that names it gets the first rule that can; a test or a measurement gets an error."""
    x, lt = torch.empty(0, dtype=BF16, device=where), config(provider="cublaslt")
    reason = "it is not compiled offline" if where == "meta" else "needs an NVIDIA GPU, the tensors are on cpu"
    with tiles.using("linear_residual_fwd", lt), pytest.raises(RuntimeError) as refused:
        tiles.lookup("linear_residual_fwd", x, "768x768")
    assert str(refused.value) == f"linear_residual_fwd: cublaslt cannot run here: {reason}"
    monkeypatch.setattr(tiles, "_find", lambda *_: lt)
    first, second = tiles.config(2, 2), tiles.config(4, 2)
    monkeypatch.setitem(tiles.RULES, "linear_residual_fwd", (Rule(lt), Rule(first), Rule(second)))
    assert tiles.lookup("linear_residual_fwd", x, "768x768") == first


def test_a_limit_of_registers_reaches_the_launch_and_the_users_table():
    limited, free = config(4, 2, maxnreg=168, BLOCK_M=64), config(4, 2, BLOCK_M=64)
    assert limited.meta == free.meta | dict(maxnreg=168) == dict(BLOCK_M=64, num_warps=4, num_stages=2, maxnreg=168)
    assert "maxnreg" not in free.meta
    row = tiles.to_record("x", "Some GPU", "16", "d64", limited)
    assert tiles.from_record(json.loads(json.dumps(row))) == limited
