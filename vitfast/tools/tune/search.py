"""Climbs from tile to faster tile, a wave of candidates at a time. Whoever asks times them."""

import dataclasses
import math
from collections.abc import Iterator

from ...kernels.tiles import KernelConfig

# The least and the largest value of a number; (1, 256) for those not listed, such as the other blocks.
LIMITS = {
    "num_warps": (1, 16),
    "num_stages": (1, 6),
    "STAGES": (1, 6),
    "SUBTILES": (1, 4),
    "GROUP_M": (1, 32),
    "GROUP_N": (1, 32),
    "SPLIT_K": (1, 16),
    "PER_SM": (1, 16),
    "PROGRAMS": (64, 2112),
    "BLOCK_K": (1, 512),
}
# The limits of a thread's registers, if a tile has one: for four, three or two programs of 4 warps on a multiprocessor.
REGISTERS = (128, 168, 248)
STEPS = ("num_stages", "STAGES", "PER_SM")  # these change by one; all others double or halve
GAIN = 0.98  # a candidate must take less than this share of the time of the best so far
# A climb stops at a tile that takes longer than this times the best of all: in the first wave, and in later ones.
REACH_AT_FIRST, REACH = 2.0, 1.25
WAVES = 6


def _near(name: str, value: int) -> list[int]:
    """The values that a number may take in one step."""
    low, high = LIMITS.get(name, (1, 256))
    return [n for n in ((value - 1, value + 1) if name in STEPS else (value // 2, value * 2)) if low <= n <= high]


def neighbours(config: KernelConfig) -> Iterator[KernelConfig]:
    """Tiles with one number or the limit of registers changed; none for a library's."""
    if not config.blocks:
        return
    numbers = {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.blocks)}
    for name, value in numbers.items():
        for other in _near(name, value):
            if name in ("num_warps", "num_stages"):
                yield dataclasses.replace(config, **{name: other})
            else:
                yield dataclasses.replace(config, blocks=tuple(sorted({**dict(config.blocks), name: other}.items())))
    if config.maxnreg in REGISTERS:
        at = REGISTERS.index(config.maxnreg)
        for near in (*REGISTERS[max(0, at - 1) : at], *REGISTERS[at + 1 : at + 2]):
            yield dataclasses.replace(config, maxnreg=near)


class Search:
    """Climbs from every start at once, a wave of candidates at a time.

    starts[0] is the table's tile. times: the seconds of each tile tried, None for one that is wrong or does not run.
    """

    def __init__(self, starts: list[KernelConfig]):
        self.start = starts[0]
        self.times: dict[KernelConfig, float | None] = {}
        self.wave = list(dict.fromkeys(starts))
        self._climbing = list(self.wave)
        self._waves = 0

    def time(self, config: KernelConfig) -> float:
        """The seconds of a tile, infinite where it has none."""
        found = self.times.get(config)
        return math.inf if found is None else found

    @property
    def best(self) -> KernelConfig:
        """The fastest tile if it is faster by more than noise, else the table's own."""
        fastest = min(self.times, key=self.time, default=self.start)
        return fastest if self.time(fastest) < GAIN * self.time(self.start) else self.start

    def advance(self) -> list[KernelConfig]:
        """The next wave, once this one's times are in; empty when no climb goes on."""
        self._waves += 1
        if self._waves > 1:
            steps = [(t, min(neighbours(t), key=self.time, default=t)) for t in self._climbing]
            faster = [higher for config, higher in steps if self.time(higher) < GAIN * self.time(config)]
            self._climbing = list(dict.fromkeys(faster))
        reach = (REACH_AT_FIRST if self._waves == 1 else REACH) * min(map(self.time, self.times), default=math.inf)
        # The table's own tile is always climbed from: if it does not run at all, it may only be too large for this GPU.
        self._climbing = [t for t in self._climbing if t == self.start or not reach < self.time(t) < math.inf]
        wave = dict.fromkeys(n for config in self._climbing for n in neighbours(config) if n not in self.times)
        self.wave = list(wave) if self._waves <= WAVES else []
        return self.wave
