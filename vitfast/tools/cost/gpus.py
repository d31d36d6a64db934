"""GPUs by their data sheets, from which costs are computed."""

import fnmatch
from dataclasses import dataclass

from ...errors import unknown

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A data sheet: dense bf16 TFLOP/s (fp32 accumulation), GB/s, GiB, generation, driver's names."""

    teraflops: float
    gigabytes_per_second: float
    memory_gib: float
    generation: str
    driver_names: tuple[str, ...] = ()  # patterns of fnmatch


GPUS = {
    "A10": Gpu(125, 600, 24, "Ampere", ("NVIDIA A10",)),
    "L4": Gpu(121, 300, 24, "Ada", ("NVIDIA L4",)),
    "L40S": Gpu(362, 864, 48, "Ada", ("NVIDIA L40S",)),
    "A100": Gpu(312, 2039, 80, "Ampere", ("NVIDIA A100*80GB", "NVIDIA A100 80GB PCIe")),
    "A100-40": Gpu(312, 1555, 40, "Ampere", ("NVIDIA A100*40GB",)),
    "H100": Gpu(989, 3350, 80, "Hopper", ("NVIDIA H100 80GB HBM3",)),  # SXM
    "H100-PCIe": Gpu(756, 2000, 80, "Hopper", ("NVIDIA H100 PCIe",)),
    "H200": Gpu(989, 4800, 141, "Hopper", ("NVIDIA H200",)),
    "GH200": Gpu(989, 4000, 96, "Hopper", ("NVIDIA GH200 480GB",)),
    "B200": Gpu(2250, 8000, 180, "Blackwell", ("NVIDIA B200",)),
    "3090": Gpu(71, 936, 24, "Ampere", ("NVIDIA GeForce RTX 3090",)),
    "4090": Gpu(165.2, 1008, 24, "Ada", ("NVIDIA GeForce RTX 4090",)),
    "5090": Gpu(209.5, 1792, 32, "Blackwell", ("NVIDIA GeForce RTX 5090",)),
}


def name_of(driver_name: str) -> str | None:
    """The name in GPUS of a device by its driver's name; None for another device, or a slice of one."""
    matching = (
        name for name, gpu in GPUS.items() if any(fnmatch.fnmatchcase(driver_name, p) for p in gpu.driver_names)
    )
    return next(matching, None)


@dataclass(frozen=True)
class Rates:
    """Rates and memory of a device."""

    gpu: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float


def rates(gpu: str = "H200", dtype: str = "bf16") -> Rates:
    """A GPU's rates by its data sheet. Raises InputError for unknown names."""
    gpu, names = " ".join(gpu.split()), {name.lower(): name for name in GPUS}
    name = name_of(gpu) or names.get(gpu.lower().removeprefix("nvidia ").removeprefix("rtx ").replace(" ", "-"))
    if name is None:
        raise unknown("GPU", gpu, GPUS)
    sheet = GPUS[name]
    flops = sheet.teraflops * 1e12 / (2 if dtype == "fp32" else 1)  # fp32 products run as TF32, at half the rate
    return Rates(name, flops, sheet.gigabytes_per_second * 1e9, sheet.memory_gib * GIB)
