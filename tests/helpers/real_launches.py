"""Launches kernels by Triton's own launcher on libcuda_stub.c, and compares what arrives with what was given.

    python tests/helpers/real_launches.py FOLDER SM

FOLDER holds the stub as libcuda.so.1, and Triton's cache from then on. Every parameter of every kernel must arrive with
the size that the kernel's PTX declares, and the value that its signature and the launch's arguments give. Prints JSON:
the kernels that were launched, what was wrong, and what is found wrong with a launch of another tensor.
"""

import ctypes
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

FOLDER, SM = Path(sys.argv[1]).absolute(), int(sys.argv[2])
os.environ |= dict(TRITON_LIBCUDA_PATH=str(FOLDER), TRITON_CACHE_DIR=str(FOLDER / "cache"), VITFAST_TILES=os.devnull)
sys.path[:0] = [str(Path(__file__).parents[1])]

import codegen  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.nvidia import driver  # noqa: E402

from vitfast.kernels.configs.tiles import SHARED_LIMIT  # noqa: E402
from vitfast.kernels.launch import Launch  # noqa: E402
from vitfast.tools.machine_code import compiler  # noqa: E402

# Bytes of a parameter by its type in PTX, and in a kernel's signature.
PTX = {kind + str(8 * size): size for size in (1, 2, 4, 8) for kind in "usbf"}
SIZES = {kind + str(8 * size): size for size in (1, 2, 4, 8) for kind in "iu"} | dict(i1=1, u1=1, fp32=4, fp64=8)
TENSOR_MAP = 128
SCRATCH = 2  # parameters that Triton adds: global and profiling scratch memory


def stub() -> ctypes.CDLL:
    """The library, which the launcher will find loaded."""
    library = ctypes.CDLL(str(FOLDER / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    library.stub_parameter.restype = ctypes.POINTER(ctypes.c_ubyte)
    library.stub_complaint.restype = ctypes.c_char_p
    library.stub_device(SM, SHARED_LIMIT[SM])
    return library


def use_real_launcher() -> None:
    """Triton's driver for CUDA, but for the questions that it has for torch."""
    real = driver.CudaDriver.__new__(driver.CudaDriver)
    real.utils, real.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
    real.get_current_device, real.get_current_stream = lambda: 0, lambda device: 0
    real.get_device_capability, real.set_current_device = lambda device=0: divmod(SM, 10), lambda device: None
    triton.runtime.driver.set_active(real)


def declared(ptx: str) -> list[int]:
    """Bytes of each parameter of a kernel."""
    head = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL).group(1)
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,]*?(?:\[(\d+)\])?\s*(?:,|$)", head.strip())
    return [int(count) if count else PTX[kind] for kind, count in found]


def expected(value, kind, maps: list) -> Iterator[tuple[int, bytes]]:
    """(bytes of the parameter, its first bytes) of each parameter that an argument becomes.

    maps: what the compiler says of tensor descriptors, None for one that the kernel reads by pointers.
    """

    def number(x: int, size: int) -> tuple[int, bytes]:
        return size, (x % (1 << (8 * size))).to_bytes(size, "little")

    if isinstance(kind, tuple):
        for part, kind_of_part in zip(value, kind, strict=True):
            yield from expected(part, kind_of_part, maps)
    elif kind.startswith("tensordesc"):
        by_map = bool(maps) and maps.pop(0) is not None
        yield (TENSOR_MAP if by_map else 8), value.base.data_ptr().to_bytes(8, "little")
        if not by_map:
            yield from (number(int(x), 8) for x in (*value.shape, *value.strides))
            yield number(value.padding == "nan", 1)
        yield from (number(int(x), 4) for x in value.shape)
        yield from (number(int(x), 8) for x in value.strides)
    elif kind.startswith("*"):
        yield number(0 if value is None else value.data_ptr(), 8)
    elif kind == "fp32":
        yield 4, struct.pack("<f", value)
    elif kind != "constexpr":
        yield number(int(value), SIZES[kind])


def fault(library: ctypes.CDLL, launch: Launch, given: dict) -> str:
    """What went wrong with one launch of the arguments that were given, or ""."""
    compiled = compiler._warm_up(launch)
    sizes = declared(compiled.asm["ptx"])
    library.stub_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    before = library.stub_launches()
    try:
        launch.kernel[launch.grid](**launch.arguments, enable_fp_fusion=True)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]} ({library.stub_complaint().decode()})"
    if library.stub_launches() != before + 1:
        return f"not launched, with a grid of {launch.grid}"
    maps = list(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    kinds = compiled.src.signature
    names = [parameter.name for parameter in launch.kernel.params if parameter.name in kinds]
    wanted = [x for name in names for x in expected(given.get(name), kinds[name], maps)]
    if [size for size, _ in wanted] != sizes[: len(sizes) - SCRATCH]:
        return f"the PTX declares {sizes}, the arguments are {[size for size, _ in wanted]}"
    for index, (_, start) in enumerate(wanted):
        arrived = bytes(library.stub_parameter(index)[: len(start)])
        if arrived != start:
            return f"parameter {index} of {len(wanted)} is {arrived.hex()}, not {start.hex()}"
    return ""


def main() -> None:
    library, faults, launched = stub(), {}, {}
    use_real_launcher()
    codegen.META = torch.device("cpu")  # pointers that differ
    sizes = {name: replace(s, batch=2) for name, s in codegen.QUICK_SIZES.items()}
    for _, launch, _ in codegen.planned(sizes, [torch.bfloat16], SM, wide=False):
        if 0 in launch.grid:
            continue
        if found := fault(library, launch, launch.arguments):
            faults[launch.kernel.__name__] = found
        launched[launch.kernel.__name__] = launched.get(launch.kernel.__name__, 0) + 1
    name = next(name for name, value in launch.arguments.items() if isinstance(value, torch.Tensor))
    control = fault(library, launch, launch.arguments | {name: torch.empty(1)})  # another tensor than was launched
    print(json.dumps(dict(triton=triton.__version__, launched=launched, faults=faults, control=control)))


if __name__ == "__main__":
    main()
