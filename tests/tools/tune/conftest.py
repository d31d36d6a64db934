"""A user's own table of tiles for each test of the tuner."""

import json

import pytest

from vitfast.kernels import tiles


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The entries of a user's own table that nothing else has."""
    path = tmp_path / "tiles.json"
    monkeypatch.setenv("VITFAST_TILES", str(path))
    tiles.forget_user_table()
    yield lambda: json.loads(path.read_text())["tiles"] if path.is_file() else []
    tiles.forget_user_table()
