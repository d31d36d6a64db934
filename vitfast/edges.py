"""Every launcher at shapes around the edges of its tiles, in Triton's interpreter: right numbers, and no wrong access.

Each runs with every provider that could do it (with its shipped tile and with each other provider's), on contiguous and
strided inputs; images channels-last too. Its results are judged against float64 by PyTorch's own error, its loads and
stores by the sanitizer.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .kernels import tiles
from .kernels.tiles import Tile
from .launchers import Sizes, launchers, outputs
from .sanitizer import Finding, Sanitizer
from .trial import Judge, Wrong

CPU = torch.device("cpu")
# Sequences shorter than a block, one past it, and 3 and 1 past whole ones; heads of one part, of two, and padded.
TOKENS = (5, 50, 197, 257)
HEADS = (32, 64, 72, 80)
MORE_ATTENTION = ((2, 17, 3, 24), (1, 64, 1, 88), (1, 130, 2, 48), (1, 300, 1, 128), (1, 577, 1, 64), (520, 1, 1, 16))
# For the rest: rows (batch x tokens) that no tile divides, widths of 100, 384 and 768, odd and even patches.
ROWS = (
    Sizes(batch=3, tokens=5, width=100, heads=1, hidden=72, image=28, patch=14),
    Sizes(batch=2, tokens=50, width=384, heads=6, hidden=200, image=48, patch=16),
    Sizes(batch=1, tokens=197, width=768, heads=12, hidden=136, image=40, patch=8),
)
MORE_ROWS = (
    Sizes(batch=1, tokens=257, width=1280, heads=16, hidden=520, image=42, patch=14),
    Sizes(batch=7, tokens=5, width=1000, heads=8, hidden=264, image=60, patch=10),
    Sizes(batch=70, tokens=1, width=72, heads=1, hidden=768, image=16, patch=8),
    Sizes(batch=3, tokens=65, width=384, heads=6, hidden=1536, image=96, patch=32),
)

Override = tuple[str, Tile, str]  # an operation, its tile, a shape class


@dataclass(frozen=True)
class Case:
    """One launcher on one set of inputs."""

    name: str
    sizes: Sizes
    dtype: torch.dtype
    layout: str
    sm: int | None = None  # tiles of this GPU generation; None: the default ones, and libraries

    def __str__(self) -> str:
        s = self.sizes
        if self.name.startswith("attention"):
            shape = f"{s.batch} x {s.tokens} x {s.heads} x {s.width // s.heads}"
        elif self.name.startswith("patch"):
            shape = f"{s.batch} x {s.image}^2 / {s.patch} -> {s.width}"
        else:
            shape = f"{s.batch} x {s.tokens} x {s.width}, {s.hidden}"
        return f"{self.name}, {shape}, {str(self.dtype)[6:]}, {self.layout}" + (f", sm_{self.sm}" if self.sm else "")


@dataclass
class Report:
    """What came of a case: the worst error with PyTorch's own, and what was found, each with the tiles it was found with."""

    case: Case
    runs: int = 0
    error: float = 0.0
    torch_error: float = 0.0
    wrong: list[str] = field(default_factory=list)
    findings: list[tuple[str, Finding]] = field(default_factory=list)
    ran: set[tuple[str, str]] = field(default_factory=set)  # operations and their providers
    counts: Counter = field(default_factory=Counter)

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.findings


def names() -> list[str]:
    """Of every launcher."""
    return list(launchers(ROWS[0]))


def _sizes(name: str, long: bool) -> list[Sizes]:
    if not name.startswith("attention"):
        return [*ROWS, *(MORE_ROWS if long else ())]
    shapes = [(2 if n < 100 else 1, n, 2, head) for n in TOKENS for head in HEADS] + [*(MORE_ATTENTION if long else ())]
    return [Sizes(b, n, h * head, h, hidden=16, image=16, patch=8) for b, n, h, head in shapes]


def _slow(name: str, sizes: Sizes) -> bool:
    """Takes seconds in the interpreter, to run a kernel that another launcher runs at this width too."""
    if any(part in name for part in ("qkv", "proj", "stream")):  # their weights are the largest
        return sizes.width > (100 if name.startswith("weight gradient") else 384)
    return "uint8" in name and sizes.width > 384


def cases(name: str, dtype: torch.dtype = torch.bfloat16, long: bool = False) -> Iterator[Case]:
    """The plan for one launcher: seconds of processor time. long: every layout of more shapes, and each GPU generation's tiles.

    fp16 takes the tiles of bfloat16, and fp32 fewer of its own: they run at a few of the shapes unless `long`.
    """
    other = "channels-last" if name.startswith("patch") else "contiguous"
    for i, sizes in enumerate(_sizes(name, long)):
        if long:
            for layout in dict.fromkeys(("contiguous", "strided", "odd", other)):
                yield Case(name, sizes, dtype, layout)
            yield from (Case(name, sizes, dtype, "strided", sm) for sm in tiles.GENERATIONS)
        elif not _slow(name, sizes) and (dtype == torch.bfloat16 or i % (len(HEADS) + 1) == 0):
            yield Case(name, sizes, dtype, ("odd", "strided", other)[(i + i // len(HEADS)) % 3])


def _candidates(used: dict[tuple[str, str, str], Tile], dtype: torch.dtype) -> Iterator[Override]:
    """What else could do what was done: the tiles of other providers, and where few rows take small tiles, the large ones."""
    for op, bits, shape in used:
        like = torch.empty(0, dtype=torch.float32 if bits == "32" else dtype)
        for rival in tiles.rivals(op, like, shape):
            yield op, rival, shape
        if shape.endswith("-small"):
            yield op, tiles.shipped(op, like, shape.removesuffix("small") + "large"), shape


def variants(case: Case) -> Iterator[tuple[str, dict[tuple[str, str, str], Tile]]]:
    """With the shipped tiles in force, then with every candidate: the case's name, and the tiles used, to be filled by a run."""
    waiting: list[tuple[Override, ...]] = [()]
    seen: set[Override] = set()
    with tiles.targeting(case.sm) if case.sm else contextlib.nullcontext():
        while waiting:
            chosen = waiting.pop(0)
            with contextlib.ExitStack() as stack:
                for op, tile, shape in chosen:
                    stack.enter_context(tiles.override(op, tile, shape))
                with tiles.watching() as used:
                    yield ", ".join([str(case), *(f"{op} by {tile.provider}" for op, tile, _ in chosen)]), used
            fresh = [candidate for candidate in _candidates(used, case.dtype) if candidate not in seen]
            seen.update(fresh)
            waiting += [(*chosen, candidate) for candidate in fresh]


def examine(case: Case) -> Report:
    """Runs a case with its shipped tiles and with every candidate."""
    report, launcher = Report(case), launchers(case.sizes)[case.name]
    judge = Judge(launcher, case.dtype, CPU, case.layout)
    for label, used in variants(case):
        watch = Sanitizer()
        try:
            with watch:
                results = outputs(launcher.call(*judge.inputs))
            error, torch_error = judge.judge(results)
            if error > report.error:
                report.error, report.torch_error = error, torch_error
        except Wrong as wrong:
            report.wrong.append(f"{label}: {wrong}")
        except Exception as problem:  # a kernel that does not run is a failed case, not the end of the plan
            report.wrong.append(f"{label}: {type(problem).__name__}: {problem}")
        report.runs += 1
        report.counts.update(watch.counts)
        report.findings += [(label, finding) for finding in watch.findings]
        report.ran.update((op, tile.provider) for (op, _, _), tile in used.items())
    return report
