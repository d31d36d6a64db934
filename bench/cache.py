"""Archives of Triton's cache: kernels compiled ahead, for the first minutes on a GPU.

    python bench/cache.py FILE.tar.xz      adds an archive to this machine's cache (TRITON_CACHE_DIR or ~/.triton/cache)

`tests/codegen.py --cache` writes one. Triton finds a kernel by a hash over its source, its options and Triton itself,
shared libraries included, so an archive serves the kernels, the Triton and the Python that it was made with: with
others nothing in it is found, which `unpack` reports. It holds machine code; the small C functions by which Triton
launches it are compiled by the machine's own C compiler, each once.
"""

import hashlib
import json
import platform
import sys
import tarfile
from pathlib import Path

import triton
from triton.runtime.cache import triton_key

from vitfast import kernels
from vitfast.run.files import write_atomically

MANIFEST = "vitfast.json"
NEEDED = (".cubin", ".json")  # what a launch reads; the stages before it are left out


def source_hash() -> str:
    """sha256 over the files with kernels and their configurations, not those that call libraries."""
    digest = hashlib.sha256()
    for path in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        if path.parent.name != "libraries":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def made_with() -> dict[str, str]:
    """The versions that must be the same where the archive is used."""
    key = hashlib.sha256(triton_key().encode()).hexdigest()[:16]
    python = ".".join(platform.python_version_tuple()[:2])
    return dict(triton=triton.__version__, python=python, key=key, kernels=source_hash())


def pack(folder: Path, archive: Path, **facts) -> int:
    """Writes a folder of Triton's cache as .tar.xz, `facts` in its manifest; returns its bytes."""
    (folder / MANIFEST).write_text(json.dumps(made_with() | facts))
    archive.parent.mkdir(parents=True, exist_ok=True)

    def write(path: Path) -> None:
        with tarfile.open(path, "w:xz") as tar:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.suffix in NEEDED:
                    tar.add(file, file.relative_to(folder))

    write_atomically(archive, write)
    return archive.stat().st_size


def unpack(archive: Path, folder: Path | None = None) -> tuple[int, str]:
    """Adds an archive to Triton's cache (or another folder).

    Returns how many kernels it holds, and why none of them will be found, or "". Triton notes the absolute path of
    every file of a kernel: these paths are rewritten for where the files lie now.
    """
    folder = Path(triton.knobs.cache.dir) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        made = json.load(tar.extractfile(MANIFEST))
        members = [member for member in tar.getmembers() if member.name != MANIFEST]
        tar.extractall(folder, members, filter="data")
    groups = [folder / member.name for member in members if Path(member.name).name.startswith("__grp__")]
    for group in groups:
        files = [name for name in json.loads(group.read_text())["child_paths"] if (group.parent / name).is_file()]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in files}}))
    here, reason, versions = made_with(), "", "Triton {triton} on Python {python}".format
    if made["key"] != here["key"]:
        reason = f"made with {versions(**made)}, this is {versions(**here)}: nothing in it will be found"
    elif made["kernels"] != here["kernels"]:
        other = f"made from other kernels ({made['kernels']}, here {here['kernels']})"
        reason = f"{other}: what has changed will not be found"
    return len(groups), reason


def main() -> int:
    """Exit code 0 where the archive serves, 1 where it does not."""
    count, reason = unpack(Path(sys.argv[1]))
    print(f"{count} kernels added to {triton.knobs.cache.dir}" + (f"; {reason}" if reason else ""))
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
