"""Tile tables: every generation has a tile for everything, a user's table comes first, and the tuner climbs to the best neighbour."""

import json

import pytest
import torch

from vitfast import tune
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
    assert used == {("x", "d64"): c, ("x", "d80"): a} and tiles.lookup("x", half, "d80") == c
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


def test_the_tuner_climbs_past_wrong_candidates():
    def seconds(t):
        if t["BLOCK_M"] == 256:
            return None  # wrong result
        return abs(t["BLOCK_M"] - 128) + abs(t.num_warps - 8) + abs(t.num_stages - 3) + 1.0

    best, after, before = tune.climb(tile(4, 2, BLOCK_M=32), seconds, ())
    assert best == tile(8, 3, BLOCK_M=128) and after == 1.0 and before == 102.0
    assert tune.climb(tile(4, 2, BLOCK_M=256), lambda t: None, ())[0] == tile(4, 2, BLOCK_M=256)
    other = (Rule(tile(4, 2, "cublas")),)
    assert tune.climb(tile(4, 2, BLOCK_M=32), lambda t: 0.5 if t.provider == "cublas" else 1.0, other)[0].provider == "cublas"


def test_tuning_without_a_gpu_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert tune.main([]) == 2
    assert "none here" in capsys.readouterr().err
