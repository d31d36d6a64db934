"""Checks every launcher at shapes around the edges of its tiles, in Triton's interpreter.

Each launcher runs with its shipped tile and with that of every other provider that could do it, on contiguous and
strided inputs, and on channels-last images. PyTorch's own error judges its results against float64; the sanitizer
judges its loads and stores.
"""

import contextlib
import dataclasses
import functools
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
import triton
from every_launcher import LIBRARIES, Override, candidates, every_launcher
from layouts import LaidOut
from sanitizer import Finding, Sanitizer
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from vitfast.kernels import rows, tiles
from vitfast.kernels.attention import launchers as attention
from vitfast.kernels.matmul import few_rows
from vitfast.kernels.tiles import KernelConfig
from vitfast.tools.verify import Judge, Wrong
from vitfast.tools.verify.draw import Sizes
from vitfast.tools.verify.launcher import Launcher, outputs

CPU = torch.device("cpu")
# Sequences shorter than a block, longer than one, 5 and 1 longer than whole ones; heads of one or two chunks, padded.
TOKENS = (5, 50, 197, 257)
HEADS = (32, 64, 72, 80)
# The other launchers have rows (batch x tokens) that no tile divides, widths of 100, 384 and 768, odd and even patches.
# The last sizes have patches enough for several steps in each slice of their weight's gradient.
ROWS = (
    Sizes(batch=3, tokens=5, width=100, heads=1, hidden=72, image=28, patch=14),
    Sizes(batch=2, tokens=50, width=384, heads=6, hidden=208, image=48, patch=16),
    Sizes(batch=1, tokens=197, width=768, heads=12, hidden=136, image=40, patch=8),
    Sizes(batch=1, tokens=577, width=100, heads=1, hidden=136, image=92, patch=4),
)
MANY_IMAGES = Sizes(batch=140, tokens=1, width=72, heads=1, hidden=72, image=8, patch=4)  # more than a tile has rows


@dataclass(frozen=True)
class Case:
    """One launcher on one set of inputs."""

    name: str
    sizes: Sizes
    dtype: torch.dtype
    layout: str
    sm: int | None = None  # the GPU generation whose tiles are used; None: the default ones
    many_heads: int = attention.MANY_HEADS  # from this many heads on one program takes every query of its head

    def __str__(self) -> str:
        s = self.sizes
        if self.name.startswith("attention"):
            shape = f"{s.batch} x {s.tokens} x {s.heads} x {s.head}"
        elif self.name.startswith("patch"):
            shape = f"{s.batch} x {s.image}^2 / {s.patch} -> {s.width}"
        else:
            shape = f"{s.batch} x {s.tokens} x {s.width}, {s.hidden}"
        return f"{self.name}, {shape}, {str(self.dtype)[6:]}, {self.layout}" + (f", sm_{self.sm}" if self.sm else "")


@dataclass
class Report:
    """How often some cases ran, and the faults, each with its case and tiles."""

    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    findings: list[tuple[str, Finding]] = field(default_factory=list)


def names() -> list[str]:
    """The names of all launchers."""
    return list(every_launcher(ROWS[0]))


def attention_sizes(*shapes: tuple[int, int, int, int]) -> list[Sizes]:
    """Sizes from shapes (images, tokens, heads, head size)."""
    return [Sizes(b, n, h * head, h, hidden=16, image=16, patch=8) for b, n, h, head in shapes]


def sizes_of(name: str) -> list[Sizes]:
    """The sizes at which a launcher is checked."""
    if not name.startswith("attention"):
        return [*ROWS, *([MANY_IMAGES] if name == "patch embedding" else [])]
    shapes = [(2, n, 2, head) for n in TOKENS for head in HEADS]
    return attention_sizes(*shapes, (1, 215, 1, 64))  # key_blocks cuts 215 keys into three blocks at most


def _slow(name: str, sizes: Sizes) -> bool:
    """Whether it takes seconds in the interpreter, and another launcher runs the kernel at this width."""
    if name.startswith("patch"):
        raw = name.endswith(("uint8, backward", "uint8, few rows"))
        return sizes.width > 100 and raw or "oblong" in name and sizes.image > 28
    largest_weights = any(word in name for word in ("qkv", "proj", "stream"))
    return largest_weights and sizes.width > 384


def layouts_of(name: str) -> tuple[str, ...]:
    return ("odd", "strided", "shifted", "channels-last" if name.startswith("patch") else "contiguous")


def cases(name: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """The cases of one launcher, which take seconds.

    fp16 has the tiles of bfloat16, and fp32 has few of its own, so both run at a few of the sizes only.
    """
    few = (0, 5, 10, 15) if name.startswith("attention") else (0,) if name.startswith("patch") else (3,)
    for i, sizes in enumerate(sizes_of(name)):
        heads, layout = (1, attention.MANY_HEADS)[i // 2 % 2], layouts_of(name)[(i + 2 * (i // len(HEADS))) % 4]
        case = Case(name, sizes, dtype, layout, many_heads=heads)
        if "oblong" in name and i == 0:
            yield case
            yield dataclasses.replace(case, layout="channels-last")
        elif not _slow(name, sizes) and (dtype == torch.bfloat16 or i in few):
            yield case


def _candidates(used: dict[tuple[str, str, str], KernelConfig], case: Case) -> Iterator[Override]:
    """Other tiles for the operations that ran.

    They are the tiles of other providers; the large tiles where few rows have taken small ones; and tiles in groups of
    two (GROUP_M) where there are enough tiles along the rows.
    """
    yield from candidates(used, case.dtype, CPU)
    for op, bits, shape in used:
        like = torch.empty(0, dtype=torch.float32 if bits == "32" else case.dtype)
        if shape.endswith(("-small", "-few")):
            for size in ("small", "large"):
                yield op, tiles.shipped(op, like, shape.rpartition("-")[0] + f"-{size}"), shape
        known = (tiles.shipped(op, like, shape), *tiles.candidates(op, like, shape))
        config = next(config for config in known if config.provider not in LIBRARIES)  # the first of ours
        groups = {block: 2 for block, _ in config.blocks if block.startswith("GROUP")}
        if groups and case.sizes.rows > 256:
            yield op, dataclasses.replace(config, blocks=tuple((dict(config.blocks) | groups).items())), shape


def variants(case: Case) -> Iterator[tuple[str, dict[tuple[str, str, str], KernelConfig]]]:
    """Yields (name, tiles used, which the caller's run fills) for the shipped tiles, then each candidate."""
    waiting: list[tuple[Override, ...]] = [()]
    seen: set[Override] = set()
    with contextlib.ExitStack() as gpu:
        # The GPU is said to have two multiprocessors, so that persistent programs loop several times.
        gpu.enter_context(mock.patch.object(rows, "multiprocessors", lambda device: 2))
        if case.name.startswith("norm +"):  # but "split linear" splits no sum for so few
            gpu.enter_context(mock.patch.object(few_rows, "multiprocessors", lambda device: 2))
        gpu.enter_context(mock.patch.object(attention, "MANY_HEADS", case.many_heads))
        if case.sm:
            gpu.enter_context(tiles.using(sm=case.sm))
        while waiting:
            chosen = waiting.pop(0)
            with contextlib.ExitStack() as stack:
                for op, config, shape in chosen:
                    stack.enter_context(tiles.using(op, config, shape))
                with tiles.using() as used:
                    yield ", ".join([str(case), *(f"{op} by {config.provider}" for op, config, _ in chosen)]), used
            fresh = [candidate for candidate in _candidates(used, case) if candidate not in seen]
            seen.update(fresh)
            waiting += [(*chosen, candidate) for candidate in fresh]


def _where(problem: BaseException) -> str:
    """ "NameError: ... at layer_norm.py:68": the cause of an error and its last line outside of Triton."""
    while problem.__cause__:
        problem = problem.__cause__
    triton_folder = os.path.dirname(triton.__file__)
    lines = [f for f in traceback.extract_tb(problem.__traceback__) if not f.filename.startswith(triton_folder)]
    at = f" at {os.sep.join(lines[-1].filename.split(os.sep)[-2:])}:{lines[-1].lineno}" if lines else ""
    return f"{type(problem).__name__}: {problem}{at}"


def check(*cases: Case) -> Report:
    """Runs cases with their shipped tiles and with every candidate."""
    report = Report()
    for case in cases:
        launcher = every_launcher(case.sizes)[case.name]
        judge = Judge(launcher, case.dtype, CPU, functools.partial(LaidOut, layout=case.layout))
        for label, used in variants(case):
            watch = Sanitizer()
            try:
                _check_once(launcher, judge, watch, used)
            except Wrong as wrong:
                report.wrong.append(f"{label}: {wrong}")
            except Exception as problem:  # a kernel that does not run is a failed case, not the end of the plan
                report.wrong.append(f"{label}: {_where(problem)}")
            report.runs += 1
            report.findings += [(label, finding) for finding in watch.findings]
    return report


def _check_once(launcher: Launcher, judge: Judge, watch: Sanitizer, used: dict) -> None:
    """Runs a case once.

    Raises Wrong where numbers are wrong, where no kernel ran, and where an input was overwritten, which it restores.
    """
    before = tree_map_only(Tensor, Tensor.clone, judge.inputs)
    with watch:
        results = outputs(launcher.call(*judge.inputs))
    judge.judge(results)
    if any(config.provider not in LIBRARIES for config in used.values()) and not watch.counts["reads"]:
        raise Wrong("no kernel ran")
    inputs = [pair for pair in zip(*map(tree_leaves, (judge.inputs, before))) if isinstance(pair[0], Tensor)]
    changed = [i for i, pair in enumerate(inputs) if not torch.equal(*pair)]
    for i in changed:
        inputs[i][0].copy_(inputs[i][1])
    if changed:
        raise Wrong(f"input {changed[0]} is overwritten")
