"""TPUv3-core-days, the unit of the paper's Table 2, by the share of the peak that its models reached.

Core-days are cores (two a chip) times days. Table 2 gives them for four pre-trainings on TPUv3; their FLOPs over what
so many cores could have done is the utilisation, which differs from row to row, so what follows from it is a range.
"""

from dataclasses import dataclass

PEAK = 123e12 / 2  # FLOP/s of a core: bf16, by the data sheet of the chip
DAY = 86_400


@dataclass(frozen=True)
class Row:
    """A pre-training of Table 2: its exaFLOPs, its TPUv3-core-days."""

    name: str
    exaflops: float
    core_days: float

    @property
    def utilisation(self) -> float:
        """The share of the cores' peak that its FLOPs are."""
        return self.exaflops * 1e18 / (self.core_days * DAY * PEAK)


# exaFLOPs of Table 6.
TRANSFORMERS = (
    Row("ViT-H/14 on JFT-300M", 4262, 2_500),
    Row("ViT-L/16 on JFT-300M", 1567, 680),
)
# BiT-L is not in Table 6: torch's count of a ResNet152x4's forward pass at 224 px, 3 times that for each of 303M
# images, 30 epochs (D.1).
BIT_L_FLOPS = 365_837_860_864
RESNETS = (Row("BiT-L (ResNet152x4) on JFT-300M", 3 * BIT_L_FLOPS * 303e6 * 30 / 1e18, 9_900),)


def core_days(flops: float, resnet: bool = False) -> dict:
    """TPUv3-core-days of a training of so many FLOPs: (fewest, most), and the rows that they follow from.

    resnet: by Table 2's ResNet, in the place of its Vision Transformers.
    """
    rows = RESNETS if resnet else TRANSFORMERS
    days = [flops / (row.utilisation * PEAK * DAY) for row in rows]
    basis = [
        dict(row=row.name, exaflops=row.exaflops, core_days=row.core_days, utilisation=row.utilisation) for row in rows
    ]
    return dict(core_days=[min(days), max(days)], core_peak=PEAK, basis=basis)


def as_text(found: dict) -> str:
    """The result of `core_days` in a line."""
    few, many = (f"{days:,.3g}" for days in found["core_days"])
    basis = "; ".join(
        f"{row['row']}, {row['exaflops']:,.0f} exaFLOP in {row['core_days']:,} core-days, {row['utilisation']:.0%}"
        for row in found["basis"]
    )
    days = few if few == many else f"{few} to {many}"
    return f"{days} TPUv3-core-days at the share of {found['core_peak'] / 1e12} TFLOP/s a core of Table 2: {basis}"
