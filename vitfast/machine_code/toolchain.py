"""The tools that Triton compiles with on this machine: ptxas, and a C compiler for launchers."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def ptxas_version(capability: int) -> str:
    """The version of the ptxas that Triton runs for GPUs of this compute capability, as "12.9"."""
    from triton.backends.nvidia import compiler

    try:
        return compiler.get_ptxas(capability).version
    except RuntimeError as error:  # there is none
        return str(error)


def missing_for_launchers() -> str | None:
    """Why Triton cannot build its launchers, which are C, and what to install; None where it can."""
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
