"""Compiles on the user's machine: this folder's C++ extensions; names what Triton lacks to do so.

Extensions are built when they are first asked for, by torch's cpp_extension with ninja, from the headers and the
libraries of the wheels that torch came with: no CUDA toolkit. They have a C interface, for ctypes.
"""

import hashlib
import importlib.util
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import triton

BUILD_SECONDS = 120
logger = logging.getLogger("vitfast")

# Run by a process of its own: what hangs can be ended, and what is killed leaves no lock that others wait for
# (pytorch/pytorch#189245, mended in torch 2.15). torch hands the folder of its own libraries to the shell as it is.
_BUILD = """
import json, shlex, sys
from torch.utils import cpp_extension
cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
cpp_extension.load(**json.loads(sys.argv[1]))
"""


def _cublaslt() -> tuple[Path, list[Path]]:
    """torch's libcublasLt and the folders of the headers that it needs."""
    name = f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
    for library in (found for folder in folders for found in folder.glob(f"*/lib/{name}")):
        wheel = library.parents[1]
        # CUDA 12's wheels have a folder each; crt/host_defines.h is in none that torch asks for, but Triton has it.
        headers = [wheel / "include", wheel.parent / "cuda_runtime" / "include"]
        return library, [*headers, Path(triton.__file__).parent / "backends" / "nvidia" / "include"]
    raise RuntimeError(f"no {name} in the nvidia wheels beside torch {torch.__version__}")


def _tools() -> dict[str, str]:
    """The environment of a build. Raises RuntimeError for what is missing."""
    # pip puts ninja beside Python, which is on PATH only where the environment was activated.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    if not shutil.which("ninja", path=path):
        raise RuntimeError("ninja is not installed (pip install vitfast[native])")
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler, path=path):
        raise RuntimeError(f"no C++ compiler: {compiler} is not on PATH")
    return {**os.environ, "PATH": path}


def _gist(log: str) -> str:
    """The first and the last error of the compiler or the linker, or the last line, in one line."""
    lines = log.strip().splitlines() or ["no output"]
    errors = [line for line in lines if "error: " in line or "ld: " in line] or lines[-1:]
    return " ... ".join(line.strip()[:200] for line in dict.fromkeys([errors[0], errors[-1]]))


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Raises RuntimeError where the command fails or takes too long; none of its processes outlives it."""
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {BUILD_SECONDS} s") from None
        finally:
            if process.poll() is None:  # Ctrl-C too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise RuntimeError(_gist(log.read_text(errors="replace")))


def build(source: Path, target: Path) -> None:
    """Compiles `source`, linked to cuBLASLt, into `target`.

    In a folder beside it, so that whoever finds `target` finds all of it. Of processes that start together each builds
    it, and the last one's stays. Raises RuntimeError or OSError.
    """
    logger.info("compiling %s, once for this torch: %d s at most", source.name, BUILD_SECONDS)
    environment, (library, headers) = _tools(), _cublaslt()
    flags = f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".vitfast-build-", dir=target.parent) as folder:
        arguments = dict(
            name="extension",
            sources=[str(source)],
            extra_include_paths=[str(path) for path in headers],
            extra_ldflags=[shlex.quote(flag) for flag in flags],
            build_directory=folder,
            with_cuda=False,
            is_python_module=False,
        )
        _run([sys.executable, "-c", _BUILD, json.dumps(arguments)], Path(folder), environment)
        Path(folder, "extension.so").chmod(0o755)
        os.replace(Path(folder, "extension.so"), target)


def _check_owner(path: Path) -> None:
    """Raises RuntimeError for a library that another user could have written: loading runs it."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise RuntimeError(f"{path} belongs to another user, or others may write it; remove it")


def built(source: Path) -> Path:
    """`source` compiled, among torch's own extensions, built if missing.

    A file for each text, torch, libcublasLt and kind of processor: machines may share a home folder. Raises
    RuntimeError for one that another user could have written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    made_for = f"{torch.__version__} {_cublaslt()[0]} {platform.machine()}"
    kind = hashlib.sha256(source.read_bytes() + made_for.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache).absolute()  # ninja runs in another
    path = folder / f"vitfast_{source.stem}_{kind}.so"
    if path.exists():
        _check_owner(path)
    else:
        build(source, path)
    return path
