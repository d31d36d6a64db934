"""With batch_invariant, no configuration reads the number of rows, images or tokens: every forward launch, recorded.

Launches are recorded on meta tensors, for every generation, dtype and size: nothing runs.
"""

import fnmatch

import pytest
import torch
from every_launcher import in_training

import vitfast
from vitfast.kernels import launch, tiles
from vitfast.kernels.attention import launchers as attention
from vitfast.kernels.matmul import linear
from vitfast.kernels.patch_embed import patches
from vitfast.tools.verify.draw import Draw, Sizes

MODEL = dict(width=768, heads=12, hidden=3072, image=224, patch=16)
# (batch, tokens): one row to more than a million; around tiles, and the classes of short and long samples
SIZES = [(1, 1), (2, 50), (3, 64), (1, 65), (64, 197), (7, 256), (1, 320), (8, 577), (4096, 257), (1, 1_000_000)]
# A bias (H, N, N) is of images of one size, whose last block of keys may be any; packs have none.
OF_ONE_SIZE = ("attention, bias",)
CHOSEN = "BLOCK* LAST* KEYS* GROUP* SUBTILES SPLIT* STAGES PERSISTENT query_blocks num_* maxnreg".split()
CHOSEN += ["LOADS", "PRECISION"]
FORWARD = [n for n in in_training(Sizes(2, 5, **MODEL)) if "backward" not in n and "gradient" not in n]
FORWARD = [name for name in FORWARD if not name.startswith(("dg", "column sums", "sum of", "scaled"))]
FORWARD = [name for name in FORWARD if not name.startswith(("norm +", "split"))]  # the mode takes none of few rows


def chosen(name: str, sm: int, dtype: torch.dtype, batch: int, tokens: int) -> list:
    """The kernels of a launcher, with what was chosen for them; and the configurations that it looked up."""
    each = in_training(Sizes(batch, tokens, **MODEL))[name]
    with tiles.using(sm=sm) as used:
        made = launch.record(lambda: each.call(*each.make(Draw(dtype, torch.device("meta")))))
    numbers = [{k: v for k, v in m.arguments.items() if any(fnmatch.fnmatch(k, p) for p in CHOSEN)} for m in made]
    return [(m.kernel.__name__, sorted(n.items())) for m, n in zip(made, numbers)], used


def differing(name: str, sm: int, dtype: torch.dtype, sizes=SIZES) -> list:
    """The sizes for which other kernels or numbers are chosen than for one row."""
    sizes = [(batch, 197) for batch, _ in sizes] if name in OF_ONE_SIZE else sizes
    with vitfast.batch_invariant(True):
        first, *others = (chosen(name, sm, dtype, *size) for size in sizes)
    assert all(config.provider in tiles.INVARIANT for (op, *_), config in first[1].items() if op.endswith("_fwd"))
    return [size for size, other in zip(sizes[1:], others) if other != first]


@pytest.mark.slow
@pytest.mark.parametrize("sm", tiles.GENERATIONS)
def test_the_number_of_rows_chooses_nothing(sm):
    dtypes = (torch.bfloat16, torch.float32) if sm == 80 else (torch.bfloat16,)  # fp32 has few rules
    found = {(name, dtype): differing(name, sm, dtype) for name in FORWARD for dtype in dtypes}
    assert len(FORWARD) > 20 and not {case: sizes for case, sizes in found.items() if sizes}


def test_packed_and_other_samples_take_one_kernel():
    """Of attention with every kind of rotary positions, and of patches, uint8 or not."""
    pairs = [("attention", "attention, packed"), ("attention, rotary", "attention, packed, rotary")]
    with vitfast.batch_invariant(True):
        for one, packed in [*pairs, ("patch embedding, uint8", "patch embedding, packed")]:
            kernels = [chosen(name, 90, torch.bfloat16, 4, 197)[0] for name in (one, packed)]
            assert kernels[0] == kernels[1], one


def by_rows(real):
    """row_product with another order of programs for few rows."""

    def row_product(a, *rest):
        grid, shared = real(a, *rest)
        return grid, shared | dict(GROUP_M=1 if len(a) < 100 else 8)

    return row_product


PLANTED = {  # a class with the tokens and a kernel for one size, a class with the rows, a choice after the lookup
    "attention": (attention, "batch_invariant", lambda _: lambda: False),
    "patch embedding": (patches, "batch_invariant", lambda _: lambda: False),
    "linear, qkv": (linear, "row_product", by_rows),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_choice_by_rows_is_found(monkeypatch, name):
    module, function, planted = PLANTED[name]
    monkeypatch.setattr(module, function, planted(getattr(module, function)))
    assert differing(name, 90, torch.bfloat16)


def test_a_users_table_and_an_override_do_not_count(monkeypatch):
    x = torch.empty(4, 768, device="meta", dtype=torch.bfloat16)
    other = tiles.config(provider="cublas")
    monkeypatch.setattr(tiles, "_of_user", lambda *_: other)
    with tiles.using("linear_fwd", other, sm=90):
        assert tiles.lookup("linear_fwd", x, "768x768") == other
        with vitfast.batch_invariant(True):
            assert tiles.lookup("linear_fwd", x, "768x768").provider == "triton"
            assert tiles.lookup("input_grad", x, "768x768") == other, "backward is as it was"
