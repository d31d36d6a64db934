"""A user's own table of tiles for each test of the tuner."""

import json

import pytest

from vitfast.kernels.configs import tiles


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A user's own table, read on a CPU too."""
    monkeypatch.setenv("VITFAST_TILES", str(tmp_path / "tiles.json"))
    monkeypatch.setattr(
        tiles,
        "_find",
        lambda op, x, shape: tiles._user_table().get((op, "GPU", tiles._bits(x), shape)) or tiles.shipped(op, x, shape),
    )
    tiles.reload_user_table()
    yield (
        lambda: (
            json.loads((tmp_path / "tiles.json").read_text())["tiles"] if (tmp_path / "tiles.json").is_file() else []
        )
    )
    tiles.reload_user_table()
