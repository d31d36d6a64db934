"""A user's own table of tiles for each test of the tuner."""

import json

import pytest

from vitfast.kernels import tiles


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A user's own table, read on a CPU too; the rules for linear_gelu begin with a kernel of ours for few rows too."""
    path, shipped = tmp_path / "tiles.json", tiles.shipped
    monkeypatch.setenv("VITFAST_TILES", str(path))
    own = lambda op, x, shape: tiles._user_table().get((op, "GPU", tiles._bits(x), shape))  # noqa: E731
    monkeypatch.setattr(tiles, "_find", lambda *given: own(*given) or shipped(*given))
    monkeypatch.setitem(tiles.RULES, "linear_gelu_fwd", tiles.CANDIDATES["linear_fwd"])
    tiles.reload_user_table()
    yield lambda: json.loads(path.read_text())["tiles"] if path.is_file() else []
    tiles.reload_user_table()
