"""The user's own table: several writers, one tuner for each GPU."""

import pytest
from processes import Child, done
from tool_children import writes

from vitfast.errors import InputError
from vitfast.tools.tune import user_table


def test_two_processes_that_write_the_table_lose_nothing(table, tmp_path):
    path = str(tmp_path / "tiles.json")
    done([Child(writes, path, name, 40) for name in ("a", "b")])
    assert sorted((r["gpu"], int(r["shape"])) for r in table()) == [(name, i) for name in ("a", "b") for i in range(40)]


def test_one_tuner_at_a_time(table):
    held = user_table.only_one("GPU-1")
    assert user_table.only_one("GPU-2")
    with pytest.raises(InputError, match="another vitfast tune runs on this GPU"):
        user_table.only_one("GPU-1")
    held.close()
    assert user_table.only_one("GPU-1")
