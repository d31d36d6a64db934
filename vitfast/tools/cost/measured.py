"""Training steps that were timed on GPUs, from measured.csv.

bench/report.py writes it: of each GPU, model and precision, the fastest settings of vitfast and timm, both compiled.
"""

import csv
import functools
import math
from pathlib import Path
from typing import NamedTuple

from ...model.config import ViTConfig
from ...model.sizes import Sizes
from .gpus import GPUS

PRECISIONS = dict(amp="in amp", bf16="with bf16 weights")


class Measured(NamedTuple):
    """A row of measured.csv: a training step of a preset, adamw and a head of 1,000 classes included.

    library: "vitfast", also where it accelerates a model of timm's, or "timm". precision: "amp" is fp32 weights under
    autocast, "bf16" bf16 weights. setting: its name in the benchmarks. share: of the floors' speed by `estimate`.
    """

    gpu: str
    model: str
    img_size: int
    batch: int
    width: int
    depth: int
    tokens: int
    library: str
    precision: str
    setting: str
    images_per_second: float
    share: float
    machine: str
    file: str

    def told(self, how: str) -> str:
        """Says "SETTING `how` with B/16 at 224 px, batch 256, on one H200 in amp (FILE)"."""
        case = f"{self.model} at {self.img_size} px, batch {self.batch}, on one {self.gpu} {PRECISIONS[self.precision]}"
        return f"{self.setting} {how} with {case} ({self.file})"


@functools.cache
def rows() -> tuple[Measured, ...]:
    """All rows of measured.csv."""
    with open(Path(__file__).with_suffix(".csv"), newline="") as file:
        _, *lines = csv.reader(file)  # its header has the fields' names
    kinds = Measured.__annotations__.values()
    return tuple(Measured(*(kind(text) for kind, text in zip(kinds, line))) for line in lines)


def tokens(model: ViTConfig) -> int:
    """The tokens of an image."""
    return Sizes(model).prefix + Sizes(model).patches


def closest(model: ViTConfig, gpu: str, batch: int, library: str = "vitfast") -> Measured:
    """The row of a library that says most of a step: its generation's, in amp, its model's, its GPU's.

    Models are as far apart as the logarithms of their widths and numbers of tokens, and then of their batches. They
    differ more in their shares than GPUs of a generation do. Of equals, the smaller share counts.
    """

    def distance(row: Measured) -> tuple:
        apart = abs(math.log(row.width / model.embed_dim)) + abs(math.log(row.tokens / tokens(model)))
        generation = GPUS[row.gpu].generation != GPUS[gpu].generation
        return generation, row.precision != "amp", apart, row.gpu != gpu, abs(math.log(row.batch / batch)), row.share

    return min((row for row in rows() if row.library == library), key=distance)
