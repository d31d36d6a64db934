"""Compiles kernels ahead of a run, without a GPU, into an archive (vitfast/kernels/archives.py)."""

import json
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import as_completed
from pathlib import Path

from ...errors import InputError
from ...kernels import archives, tiles
from ...kernels.launch import Launch
from ...model.presets import preset
from ...run.files import write_tar
from ...version import __version__
from .compiler import Compiler
from .model_launches import launching_on_meta, model_launches

SECONDS = 300  # enough for a kernel, even on a busy machine
NEEDED = (".cubin", ".json")  # what a launch reads; the stages before it are left out


def write_archive(archive: Path, sm: int, found: Iterable[Launch], models: list[str], processes: int = 0) -> int:
    """Compiles launches and packs them; returns how many kernels they are.

    models: names for the manifest. processes: see Compiler. Shows how far it is on a terminal. Raises RuntimeError
    where a launch does not compile.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=archive.parent).close()  # raises now, not after minutes, where nothing can be written
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(sm, processes, Path(folder), SECONDS)
        try:
            futures = {compiler.submit(launch): launch.kernel.__name__ for launch in found}
            for done, future in enumerate(as_completed(futures), 1):
                if failure := future.result()[1]:
                    raise RuntimeError(f"{futures[future]} does not compile for sm_{sm}: {failure}")
                if sys.stderr.isatty():
                    print(f"\rcompiled {done} of {len(futures)} kernels", end="", file=sys.stderr, flush=True)
        finally:
            compiler.close()
            print(end="\n" if sys.stderr.isatty() else "", file=sys.stderr)
        facts = archives.fingerprint(sm) | dict(vitfast=__version__, models=models, count=len(futures))
        kept = [file for file in sorted(Path(folder).rglob("*")) if file.suffix in NEEDED]
        files = {str(file.relative_to(folder)): file.read_bytes() for file in kept}
        write_tar(archive, {archives.MANIFEST: json.dumps(facts, indent=1).encode()} | files, "xz")
    return len(futures)


def pack_models(archive: Path, gpu: str, models: list[str], processes: int = 0) -> int:
    """Writes the archive of the kernels that presets run on a GPU; returns how many they are.

    gpu: its compute capability, such as "sm_90". models: presets, and the side of the images where it is not 224, as in
    "B/16 384". Raises InputError for a model that is no preset.
    """
    sm, sizes = int(gpu.removeprefix("sm_")), []
    for model in models:
        name, _, side = model.partition(" ")
        preset(name)
        if side and not side.isdecimal():
            raise InputError(f"--model {model!r}: after the preset comes the side of the images in pixels, as in '384'")
        sizes.append((name, int(side or 224)))
    with tiles.using(sm=sm), launching_on_meta():
        found = [launch for name, side in sizes for launch in model_launches(name, side)]
    return write_archive(archive, sm, found, models, processes)
