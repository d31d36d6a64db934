"""cuBLASLt for proj and fc2: out = res + x W^T + b in one pass.

That is D = A B + C + bias with C and D in different memory; torch calls cuBLASLt for x W^T + b alone. This module calls
cublaslt.cpp through ctypes. It is compiled when it is first needed, against the headers and the library in the wheels
that torch came with, so no CUDA toolkit has to be installed.
"""

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..launch import no_plan

SOURCE = Path(__file__).with_name("cublaslt.cpp")
BUILD_SECONDS = 120
WORKSPACE = 32 << 20  # bytes an algorithm may ask for; 32 MiB is what cuBLAS recommends from sm_90 on
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType of library_types.h


logger = logging.getLogger("vitfast")


class Problem(NamedTuple):
    """All that the algorithm depends on, as in cublaslt.cpp: strides in elements, alignments in bytes."""

    rows: int
    columns: int
    depth: int
    stride_x: int
    stride_w: int
    stride_res: int
    stride_out: int
    type: int
    out_type: int
    align_x: int
    align_w: int
    align_bias: int  # 0: no bias
    align_res: int
    align_out: int


def find_cublaslt() -> tuple[Path, list[Path]]:
    """torch's libcublasLt and the folders of its headers. Raises RuntimeError where there is none."""
    name = f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
    for library in (path for folder in folders for path in folder.glob(f"*/lib/{name}")):
        wheel = library.parents[1]
        # CUDA 12's wheels have a folder each; crt/host_defines.h is in none of them, but Triton has it.
        headers = [wheel / "include", wheel.parent / "cuda_runtime" / "include"]
        return library, [*headers, Path(triton.__file__).parent / "backends" / "nvidia" / "include"]
    raise RuntimeError(f"no {name} in the nvidia wheels beside torch {torch.__version__}")


def compile_command(sources: list[Path], target: Path) -> list[str]:
    """The command that compiles C++ which calls cuBLASLt into a library `target`.

    Raises RuntimeError where there is no compiler or no cuBLASLt.
    """
    compiler, (library, headers) = os.environ.get("CXX", "c++"), find_cublaslt()
    if not shutil.which(compiler):
        raise RuntimeError(f"no C++ compiler: {compiler} is not on PATH")
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC"]
    flags += [part for folder in headers for part in ("-isystem", str(folder))]
    linked = [f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"]
    return [compiler, *flags, *map(str, sources), *linked, "-o", str(target)]


def build() -> Path:
    """Returns the path of the library of cublaslt.cpp, in torch's extensions; compiles it if missing.

    Since machines may share a home folder, there is a file for each source text, torch, libcublasLt and kind of
    processor. The file appears whole or not at all; processes that start together each build it, and the last one's
    file stays. Raises RuntimeError or OSError where it cannot be built.
    """
    environment = f"{torch.__version__} {find_cublaslt()[0]} {platform.machine()}"
    kind = hashlib.sha256(SOURCE.read_bytes() + environment.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    path = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache, f"vitfast_cublaslt_{kind}.so").absolute()  # for ctypes
    if path.exists():
        return path
    logger.info("compiling %s, once for this torch: %d s at most", SOURCE.name, BUILD_SECONDS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".vitfast-build-", dir=path.parent) as folder:
        command = compile_command([SOURCE], Path(folder, path.name))
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {BUILD_SECONDS} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise RuntimeError(next((line for line in lines if "error: " in line or "ld: " in line), lines[-1])[:400])
        os.replace(command[-1], path)
    return path


def load(path: Path) -> ctypes.CDLL:
    """The compiled library of cublaslt.cpp at `path`, with the types of its functions set."""
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    library.vitfast_choose.argtypes = [pointer, pointer, ctypes.c_uint64, pointer]
    library.vitfast_run.argtypes = [pointer] * 10
    library.vitfast_choose.restype = library.vitfast_run.restype = ctypes.c_char_p
    return library


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    """(the extension, ""), or (None, why there is none)."""
    try:
        return load(build()), ""
    except (RuntimeError, OSError) as error:
        return None, f"not built: {error}"


def unsupported_reason(x: Tensor) -> str | None:
    """Why cuBLASLt cannot run on x, or None; builds the extension if x itself is no obstacle."""
    if x.device.type != "cuda":
        return f"needs an NVIDIA GPU, the tensors are on {x.device}"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"does not compute in {x.dtype}"
    return _library()[1] or None


def _handle_and_stream() -> tuple[int, int]:
    """The current device's cuBLAS handle in torch, which cuBLASLt takes too, and its current stream."""
    return torch.cuda.current_blas_handle(), torch.cuda.current_stream().cuda_stream


def _rows(t: Tensor) -> Tensor:
    """t, copied where its rows overlap or have gaps inside: a matrix of cuBLASLt has neither."""
    return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.clone(memory_format=torch.contiguous_format)


def _alignment(t: Tensor | None) -> int:
    """The alignment of t's address in bytes, at most 256, since no algorithm needs more; 0 for None."""
    return 0 if t is None else min(256, t.data_ptr() & -t.data_ptr())


@functools.lru_cache(maxsize=1024)
def _chosen(handle: int, problem: Problem) -> tuple[ctypes.Array, ctypes.Array]:
    """(problem, algorithm) as cublaslt.cpp takes them; algorithm[0] is the bytes of workspace."""
    fields, algorithm = (ctypes.c_int64 * len(problem))(*problem), (ctypes.c_uint64 * 9)()
    _succeed(_library()[0].vitfast_choose(handle, fields, WORKSPACE, algorithm), problem)
    return fields, algorithm


def _succeed(message: bytes | None, problem: Problem) -> None:
    """Raises RuntimeError with the extension's message, if there is one."""
    if message:
        raise RuntimeError(f"linear_residual (cublaslt): {message.decode()}; {problem}")


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + x W^T + b, rounded once: x (M, K), weight (N, K), bias (N,) or None -> (M, N).

    These are in fp16 or bfloat16; residual (M, N) and the result are in the same dtype or in fp32. The workspace comes
    from torch's allocator, so that each CUDA graph owns its own. vitfast.ops checks the arguments. Raises RuntimeError
    with the status where cuBLASLt fails.
    """
    no_plan("cuBLASLt is called through ctypes")
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    if not out.numel():
        return out
    x, weight, residual = _rows(x), _rows(weight), _rows(residual)
    bias = None if bias is None else bias.to(residual.dtype).contiguous()  # cuBLASLt has it in out's dtype
    with torch.cuda.device_of(x):
        handle, stream = _handle_and_stream()
        library, reason = _library()
        if library is None:
            raise RuntimeError(f"linear_residual: cublaslt cannot run here: {reason}")
        problem = Problem(
            *(x.shape[0], weight.shape[0], x.shape[1]),
            *(t.stride(0) for t in (x, weight, residual, out)),
            *(TYPES[t.dtype] for t in (x, out)),
            *(_alignment(t) for t in (x, weight, bias, residual, out)),
        )
        fields, algorithm = _chosen(handle, problem)
        workspace = torch.empty(algorithm[0], dtype=torch.uint8, device=x.device)
        pointers = (None if t is None else t.data_ptr() for t in (x, weight, bias, residual, out, workspace))
        _succeed(library.vitfast_run(handle, fields, algorithm, *pointers, stream), problem)
    return out
