"""GPUs by their data sheets, and the rates, theirs or measured ones, from which costs are computed."""

import fnmatch
import json
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, unknown

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet: dense bf16 TFLOP/s (fp32 accumulation), GB/s and GiB; and its driver's names."""

    teraflops: float
    gigabytes_per_second: float
    memory_gib: float
    driver_names: tuple[str, ...] = ()  # patterns of fnmatch


GPUS = {
    "A10": Gpu(125, 600, 24, ("NVIDIA A10",)),
    "L4": Gpu(121, 300, 24, ("NVIDIA L4",)),
    "L40S": Gpu(362, 864, 48, ("NVIDIA L40S",)),
    "A100": Gpu(312, 2039, 80, ("NVIDIA A100*GB", "NVIDIA A100 80GB PCIe")),
    "A100-40": Gpu(312, 1555, 40),  # the entry above matches its driver's name and has the same TFLOP/s
    "H100": Gpu(989, 3350, 80, ("NVIDIA H100 80GB HBM3",)),  # SXM
    "H100-PCIe": Gpu(756, 2000, 80, ("NVIDIA H100 PCIe",)),
    "H200": Gpu(989, 4800, 141, ("NVIDIA H200", "NVIDIA GH200 480GB")),
    "B200": Gpu(2250, 8000, 180, ("NVIDIA B200",)),
    "3090": Gpu(71, 936, 24),
    "4090": Gpu(165.2, 1008, 24, ("NVIDIA GeForce RTX 4090",)),
    "5090": Gpu(209.5, 1792, 32, ("NVIDIA GeForce RTX 5090",)),
}


def datasheet_flops(driver_name: str) -> float | None:
    """The data sheet's FLOP/s for dense bf16; None for a device, or a slice of one, that is not in GPUS."""
    for gpu in GPUS.values():
        if any(fnmatch.fnmatchcase(driver_name, pattern) for pattern in gpu.driver_names):
            return 1e12 * gpu.teraflops
    return None


@dataclass(frozen=True)
class Rates:
    """Rates and memory of a device; source: "data sheet" or "measured"."""

    gpu: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    source: str


def rates(gpu: str = "H200", dtype: str = "bf16", ceilings: str | Path | None = None) -> Rates:
    """A GPU's rates by its data sheet, or those in a JSON file of measured ceilings.

    The file holds {"flops_per_second": X, "bytes_per_second": Y}, at the top or under "ceilings", or the benchmarks
    wrote it, with "copy" and a rate of products by dtype. Raises InputError for unknown names and bad files.
    """
    names = {name.lower(): name for name in GPUS}
    name = names.get(gpu.lower().removeprefix("nvidia ").removeprefix("rtx ").replace(" ", "-"))
    if name is None:
        raise unknown("GPU", gpu, GPUS)
    sheet = GPUS[name]
    if ceilings is not None:
        return Rates(name, *_measured(Path(ceilings), dtype), sheet.memory_gib * GIB, "measured")
    flops = sheet.teraflops * 1e12 / (2 if dtype == "fp32" else 1)  # fp32 products run as TF32, at half the rate
    return Rates(name, flops, sheet.gigabytes_per_second * 1e9, sheet.memory_gib * GIB, "data sheet")


def _measured(path: Path, dtype: str) -> tuple[float, float]:
    """(FLOP/s, bytes/s) of a file of ceilings."""
    try:
        found = json.loads(path.read_text())
        for key in ("machine_info", "vitfast", "ceilings"):
            found = found.get(key, found)
        product = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
        both = found.get("flops_per_second", found.get(product)), found.get("bytes_per_second", found.get("copy"))
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"--ceilings {path} cannot be read as a JSON object ({error})") from None
    if not all(isinstance(rate, (int, float)) and rate > 0 for rate in both):
        wanted = "positive numbers flops_per_second and bytes_per_second"
        raise InputError(f"--ceilings {path} must hold {wanted}, got {both[0]} and {both[1]}")
    return both
