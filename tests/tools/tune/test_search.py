"""The climb from tile to tile, with planted times."""

import math

from vitfast.kernels.tiles import config
from vitfast.tools.tune.search import Search, neighbours


def test_search_climbs_past_what_is_wrong_and_stops_at_the_top():
    search, top = Search([config(4, 2, BLOCK_M=32)]), config(8, 3, BLOCK_M=128)
    while search.wave:
        for t in search.wave:
            far = abs(math.log2(t["BLOCK_M"] / 128)) + abs(math.log2(t.num_warps / 8)) + abs(t.num_stages - 3)
            search.times[t] = None if t["BLOCK_M"] == 256 else 1.0 + far
        search.advance()
    assert search.best == top and search.times[top] == 1.0 and len(search.times) < 30


def test_search_keeps_the_tables_tile_within_noise_and_gives_up_slow_providers():
    start, cublas, slow = config(4, 2, BLOCK_M=32), config(provider="cublas"), config(4, 2, "tma", BLOCK_M=32)
    search = Search([start, cublas, slow])
    search.times |= {start: 1.0, cublas: 0.99, slow: 2.1}
    wave = search.advance()
    assert (
        search.best == start and wave and {t.provider for t in wave} == {"triton"}
    )  # nothing of cuBLAS or of the slow one to vary
    search.times |= dict.fromkeys(wave, 1.0)
    assert search.advance() == [] and search.best == start
    search.times[cublas] = 0.9
    assert search.best == cublas
    search = Search([start, cublas, slow])  # the table's own is looked around however slow it is as it stands
    search.times |= {start: 1.0, cublas: 0.3, slow: 0.5}
    assert {t.provider for t in search.advance()} == {"triton", "tma"}
    search.times |= {t: 0.29 if t.provider == "triton" and t["BLOCK_M"] == 64 else 0.5 for t in search.wave}
    assert {t.provider for t in search.advance()} == {"triton"} and search.best["BLOCK_M"] == 64


def test_search_varies_the_limit_of_registers_where_a_tile_has_one():
    limits = lambda t: sorted(n.maxnreg for n in neighbours(t) if n.maxnreg != t.maxnreg)  # noqa: E731
    assert limits(config(4, 2, BLOCK_M=64)) == [] and limits(config(4, 2, maxnreg=168, BLOCK_M=64)) == [128, 248]
    assert limits(config(4, 2, maxnreg=128, BLOCK_M=64)) == [168]


def test_search_goes_on_from_a_tile_that_does_not_run():
    search, start = Search([config(8, 4, BLOCK_M=256)]), config(8, 4, BLOCK_M=256)
    search.times[start] = None
    search.times |= {t: 1.0 if t["BLOCK_M"] == 128 else None for t in search.advance()}
    assert search.best == config(8, 4, BLOCK_M=128)
