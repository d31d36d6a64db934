"""Archives of kernels that were compiled ahead, and how they come into Triton's cache.

`vitfast kernels pack` writes an archive (vitfast/tools/machine_code/packing.py): a .tar.xz of a manifest, then of
Triton's cache. Triton finds a kernel by a hash over its source, its options, ptxas, and Triton itself, shared libraries
included. So an archive is good for the kernels, the Triton, the Python and the GPU that it was made for, and is refused
elsewhere. It holds machine code; the C by which Triton launches it is compiled by the machine's own compiler, if there
is one (`missing_for_launchers`).
"""

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tarfile
import tempfile
import threading
import warnings
from collections.abc import Iterator, Set
from pathlib import Path
from types import CodeType

import triton
from triton.backends.compiler import GPUTarget

from .tiles import capability

MANIFEST = "vitfast.json"
FIELDS = set("gpu triton ptxas python key kernels models count".split())  # of the manifest
FILE = re.compile(r"vitfast\.json|\w+/\w+\.(cubin|json)")  # nothing else is written to Triton's cache, least of all C
MOST_BYTES = 2**26  # of a file; a kernel has some 100 KB
GROUP = "__grp__"  # begins the name of the file that lists a kernel's files; Triton looks for this file


def source_hash() -> str:
    """sha256 over the files with kernels and their configurations, without cublaslt.py."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.parent.name != "libraries":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint(sm: int) -> dict[str, str]:
    """The versions and hashes on which the use of an archive for this compute capability depends."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    backend = make_backend(GPUTarget("cuda", sm, 32)).hash()
    key = f"{triton_key()} {backend} {sorted(get_cache_invalidating_env_vars().items())}"
    return dict(
        gpu=f"sm_{sm}",
        triton=triton.__version__,
        ptxas=re.search(r"release ([\d.]+)", backend).group(1),
        python=".".join(platform.python_version_tuple()[:2]),
        key=hashlib.sha256(key.encode()).hexdigest()[:16],
        kernels=source_hash(),
    )


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file of an archive, the manifest first.

    Raises ValueError for a file that is no archive of kernels.
    """
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                if not (member.isreg() and FILE.fullmatch(member.name) and member.size <= MOST_BYTES):
                    raise ValueError(f"{member.name!r} is not a file of a kernel")
                yield member.name, tar.extractfile(member).read()
    except OSError:
        raise
    except Exception as error:  # LZMAError is no OSError or ValueError, and lzma may be missing
        raise ValueError(f"{archive} is no archive of kernels, or is damaged: {error}") from None


def manifest(archive: Path) -> dict:
    """The manifest of an archive. Raises ValueError for a file that is no archive of kernels."""
    name, text = next(_files(archive), ("", b""))
    if name != MANIFEST:
        raise ValueError(f"{archive} is no archive of kernels: it does not begin with {MANIFEST}")
    try:
        fields = json.loads(text)
        if not FIELDS <= fields.keys() or not re.fullmatch(r"sm_\d+", fields["gpu"]):
            raise ValueError(f"it lacks one of {', '.join(sorted(FIELDS))}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{archive} is no archive of kernels: {MANIFEST} is wrong: {error}") from None
    return fields


def driver_version() -> tuple[int, int] | None:
    """The CUDA version of the NVIDIA driver, such as (12, 4); None where there is no driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def refusal(fields: dict, gpus: Set[int]) -> str:
    """Why a machine cannot use the archive with these fields of the manifest, or "".

    gpus: the compute capabilities of its GPUs; where there is none, an archive for any GPU will do.
    """
    sm = int(fields["gpu"].removeprefix("sm_"))
    if gpus and sm not in gpus:
        return f"it is for sm_{sm}, and the GPU here is {' or '.join(f'sm_{each}' for each in sorted(gpus))}"
    here, versions = fingerprint(sm), "Triton {triton}, ptxas {ptxas}, Python {python}, hash {key}".format
    if fields["key"] != here["key"]:
        return f"it was made with {versions(**fields)}; here are {versions(**here)}"
    if fields["kernels"] != here["kernels"]:
        return f"it was made from other kernels (hash {fields['kernels']}, here {here['kernels']})"
    driver, needed = driver_version(), int(fields["ptxas"].partition(".")[0])
    if driver and driver[0] < needed:
        return f"its machine code needs a driver for CUDA {needed}, and the driver here is for CUDA %d.%d" % driver
    return ""


def cache_folder() -> Path:
    """The folder in which Triton looks for compiled kernels: TRITON_CACHE_DIR or ~/.triton/cache."""
    return Path(triton.knobs.cache.dir)


def install(archive: Path, folder: Path | None = None) -> None:
    """Adds an archive to Triton's cache, or to a folder that will become one; does not check `refusal`.

    Raises ValueError for a damaged archive, of which nothing is added.
    Triton notes the absolute path of every file of a kernel: the paths are rewritten for where the files lie now. A
    kernel is whole or absent, for other processes too.
    """
    folder = cache_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    stamp = _stamp(archive, folder)
    with tempfile.TemporaryDirectory(prefix=".vitfast-", dir=folder) as scratch:
        for name, content in _files(archive):
            file = Path(scratch, name)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
        for kernel in filter(Path.is_dir, Path(scratch).iterdir()):
            for group in kernel.glob(f"{GROUP}*"):
                names = [file.name for file in kernel.iterdir() if file != group]
                paths = {name: str(folder.absolute() / kernel.name / name) for name in names}
                group.write_text(json.dumps({"child_paths": paths}))
            try:
                kernel.rename(folder / kernel.name)
            except OSError:  # it is there already
                for file in sorted(kernel.iterdir(), key=lambda file: file.name.startswith(GROUP)):
                    file.replace(folder / kernel.name / file.name)
        Path(scratch, MANIFEST).replace(stamp)


def _stamp(archive: Path, folder: Path) -> Path:
    """The path of a file that `install` leaves in a folder to mark an archive as added.

    Its name depends on the path of the folder, because a cache that was moved must get the archive again.
    """
    digest = hashlib.sha256(json.dumps([manifest(archive), str(folder.absolute())]).encode()).hexdigest()
    return folder / f"vitfast-{digest[:16]}.json"


def install_named(named: Path, device: int) -> None:
    """Adds the archive `named`, or each in that folder, to Triton's cache, if it fits the GPU `device`.

    Warns if it does not, or cannot be added. In a folder, archives that do not fit are passed over if another one does.
    """
    refused, failed, used = {}, {}, 0
    folder = os.path.isdir(named)
    for archive in sorted(named.glob("*.tar.xz")) if folder else [named]:
        try:
            if reason := refusal(manifest(archive), {capability(device)}):
                refused[archive] = reason
                continue
            if not _stamp(archive, cache_folder()).exists():
                install(archive)
            used += 1
        except (OSError, ValueError) as error:
            failed[archive] = str(error)
    reasons = failed if used else refused | failed
    if reasons or not used:
        what = "; ".join(f"{path} is not used: {reason}" for path, reason in reasons.items())
        what = what or f"there is no .tar.xz in {named}"
        text = f"VITFAST_KERNELS_CACHE: {what}. Triton compiles the kernels that are not in its cache"
        warnings.warn(text, stacklevel=2)


_lock = threading.Lock()
_looked_at: set[tuple[int, str]] = set()  # (GPU, the folder of Triton's cache when it was looked at)


def add_named(device: int) -> None:
    """Adds the archives in VITFAST_KERNELS_CACHE to Triton's cache, before the first launch on a GPU.

    It does so again where the cache has moved: Inductor moves it in mid-process, unless TRITON_CACHE_DIR is set.
    """
    if not (archives := os.environ.get("VITFAST_KERNELS_CACHE")):
        return
    now = device, triton.knobs.cache.dir
    with _lock:
        if now not in _looked_at:
            _looked_at.add(now)
            install_named(Path(archives), device)


def _called(code: CodeType, names: dict) -> Iterator[object]:
    """The kernels and @triton.jit functions that code names; names: the globals of its function."""
    for name in code.co_names:
        if hasattr(type(names.get(name)), "cache_key"):  # asking the object itself would compute the key
            yield names[name]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _called(constant, names)


def settle(kernel) -> None:
    """Has Triton hash the functions that a kernel calls, recursively, before it hashes the kernel itself.

    Triton 3.6 takes the global values of a called function into the caller's hash only where that function was hashed
    before. Without this, a kernel's name in Triton's cache would depend on what else the process has run, and a kernel
    compiled ahead would not be found.
    """
    if kernel.hash is None:
        for function in _called(kernel.fn.__code__, kernel.fn.__globals__):
            if function is not kernel:
                settle(function)
        kernel.cache_key  # noqa: B018


def missing_for_launchers() -> str | None:
    """Why Triton cannot build its launchers, which are C, and what to install; None where it can."""
    if triton.knobs.build.impl is not None:  # the user builds launchers in another way
        return None
    named = os.environ.get("CC")
    if named is not None and not shutil.which(named):
        return f"CC is {named!r}, which is not a program"
    if named is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler; install gcc (on Debian: apt install gcc), or name one in CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    folder = sysconfig.get_paths(scheme=scheme)["include"]
    if Path(folder, "Python.h").is_file():
        return None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return f"there is no Python.h in {folder}; install Python's headers (on Debian: apt install {package})"
