"""The user's own table: several writers, one tuner for each GPU."""

import os

import pytest

from vitfast.errors import InputError
from vitfast.kernels.configs import tiles
from vitfast.kernels.configs.tiles import tile
from vitfast.tools.tune import user_table


def two_writers(path: str, name: str, count: int) -> None:
    os.environ["VITFAST_TILES"] = path
    for i in range(count):
        user_table.keep(tiles.to_record("x", name, "16", str(i), tile(4, 2, BLOCK_M=16)))


def test_two_processes_that_write_the_table_lose_nothing(table, tmp_path):
    from processes import Child, done

    path = str(tmp_path / "tiles.json")
    done([Child(two_writers, path, name, 40) for name in ("a", "b")])
    assert sorted((r["gpu"], int(r["shape"])) for r in table()) == [(name, i) for name in ("a", "b") for i in range(40)]


def test_one_tuner_at_a_time(table):
    held = user_table.only_one("GPU-1")
    assert user_table.only_one("GPU-2")
    with pytest.raises(InputError, match="another vitfast tune runs on this GPU"):
        user_table.only_one("GPU-1")
    held.close()
    assert user_table.only_one("GPU-1")
