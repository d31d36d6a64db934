"""Tile tables: every generation has a tile for everything, and a user's table comes first."""

import json

import pytest
import torch

from vitfast import tuned
from vitfast.kernels import tiles
from vitfast.kernels.tiles import Rule, tile


def test_every_operation_ends_with_a_rule_for_everything():
    for op, rules in tiles.RULES.items():
        last = rules[-1]
        assert last.sm == tiles.GENERATIONS and last.bits == "*" and last.shape == "*", op


def test_lookup_takes_the_first_match(monkeypatch):
    a, b, c = tile(4, 1, BLOCK_M=1), tile(4, 1, BLOCK_M=2), tile(4, 1, BLOCK_M=4)
    monkeypatch.setitem(tiles.RULES, "x", (Rule(a, sm=(80,), bits="16"), Rule(b, shape="d6*"), Rule(c)))
    half, single = torch.empty(1, dtype=torch.float16), torch.empty(1)
    with tiles.targeting(80):
        assert tiles.lookup("x", half, "d64") == a and tiles.lookup("x", single, "d64") == b
    assert tiles.lookup("x", half, "d64") == b and tiles.lookup("x", half, "d80") == c
    with tiles.override("x", a), tiles.override("x", c, "d64"), tiles.watching() as used:
        assert tiles.lookup("x", half, "d64") == c and tiles.lookup("x", half, "d80") == a
    assert used == {("x", "16", "d64"): c, ("x", "16", "d80"): a} and tiles.lookup("x", half, "d80") == c
    monkeypatch.setitem(tiles.RULES, "x", (Rule(a, sm=(80,)),))
    with pytest.raises(KeyError, match="no tile for x on sm_90, 16 bits, shape d64"):
        tiles.lookup("x", half, "d64")


def test_users_table_is_read_and_refused_when_damaged(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    monkeypatch.setenv("VITFAST_TILES", str(path))
    row = tiles.as_row("attention_fwd", "Some GPU", "16", "d64", tile(8, 3, BLOCK_M=32))
    path.write_text(json.dumps({"tiles": [row]}))
    tiles._user_table.cache_clear()
    assert tiles._user_table() == {("attention_fwd", "Some GPU", "16", "d64"): tile(8, 3, BLOCK_M=32)}
    path.write_text('{"tiles": [{"op": 1}]}')
    tiles._user_table.cache_clear()
    with pytest.raises(ValueError, match="tiles.json is damaged"):
        tiles._user_table()
    path.unlink()
    tiles._user_table.cache_clear()
    assert tiles._user_table() == {}


def test_every_rival_that_runs_here_is_offered():
    half = torch.empty(1, dtype=torch.float16)
    for op, shape, providers in [
        ("linear_fwd", "768x2304", ["triton", "tma", "triton", "tma"]),  # and both again with wide tiles
        ("linear_gelu_fwd", "768x3072", ["cublas", "tma", "triton", "tma"]),
        ("weight_grad", "768x3072", ["triton", "tma", "triton", "tma"]),
        ("attention_bwd", "d64n256", ["head", "head", "phases", "tiled", "flash"]),
        ("attention_fwd", "d64nlong", ["flash"]),
        ("layer_norm_bwd", "3x256as", ["torch"]),
    ]:
        assert [t.provider for t in tiles.rivals(op, half, shape)] == providers, op
    with tiles.targeting(80):
        assert [t.provider for t in tiles.rivals("linear_fwd", half, "768x2304")] == ["triton"]  # no tensor descriptors before sm_90


def test_a_provider_may_have_several_rivals_each_a_variant(monkeypatch):
    shipped, wide, tma, wide_tma = (tile(8, 3, name, BLOCK_N=n) for name in ("triton", "tma") for n in (128, 256))
    monkeypatch.setitem(tiles.RULES, "x", (Rule(shipped),))
    rules = Rule(wide, variant="wide"), Rule(tma), Rule(wide_tma, variant="wide"), Rule(tile(4, 2, "tma", BLOCK_N=64), variant="wide")
    monkeypatch.setitem(tiles.RIVALS, "x", rules)
    half = torch.empty(1, dtype=torch.float16)
    assert tiles.rivals("x", half, "d64") == [wide, tma, wide_tma]
    with tiles.override("x", wide):
        assert tiles.rivals("x", half, "d64") == [tma, wide_tma]
    with tiles.override("x", wide_tma):
        assert tiles.rivals("x", half, "d64") == [shipped, wide]


def test_a_limit_of_registers_reaches_the_launch_and_the_users_table():
    limited = tile(4, 2, maxnreg=168, BLOCK_M=64)
    assert limited.meta == dict(BLOCK_M=64, num_warps=4, num_stages=2, maxnreg=168) and "maxnreg" not in tile(4, 2, BLOCK_M=64).meta
    row = tiles.as_row("x", "Some GPU", "16", "d64", limited)
    assert tiles.from_row(json.loads(json.dumps(row))) == limited
    assert tiles.from_row({k: v for k, v in row.items() if k != "maxnreg"}) == tile(4, 2, BLOCK_M=64)  # an older table


def test_a_tuned_row_is_kept_beside_the_others(tmp_path, monkeypatch):
    path = tmp_path / "new" / "tiles.json"
    monkeypatch.setenv("VITFAST_TILES", str(path))
    row = tiles.as_row("attention_fwd", "Some GPU", "16", "d64n256", tile(8, 3, "rows", BLOCK_M=32))
    for changed in (row, row | {"bits": "32"}, row | {"num_warps": 4}):
        tuned.keep(changed)
    assert json.loads(path.read_text())["tiles"] == [row | {"bits": "32"}, row | {"num_warps": 4}]
    tiles._user_table.cache_clear()
    assert tiles._user_table()["attention_fwd", "Some GPU", "16", "d64n256"] == tile(4, 3, "rows", BLOCK_M=32)
    tiles._user_table.cache_clear()
