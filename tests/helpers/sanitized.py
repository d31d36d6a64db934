"""Every operation once, forward and backward, for NVIDIA's compute-sanitizer to watch.

    python tests/helpers/sanitized.py [--only NAME]
        runs them in bfloat16: on a GPU, elsewhere small ones in the interpreter

tests/kernels/test_gpu.py runs it under `memcheck` and `racecheck`. N is 197 and 257, which ends in the middle of a
tile, K is at least 768, so that loops run more often than they have stages, and heads are of 32, 64, 80 and 96. Then
each operation runs with every candidate for its tiles. cuBLAS computes nothing, since racecheck ends in it by an
internal error. A name is printed when it is done: it shows how far a run came.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools" / "verify"))

import torch
from every_launcher import LIBRARIES, candidates

from vitfast import ops
from vitfast.kernels import tiles
from vitfast.kernels.launch import INTERPRETED
from vitfast.tools.doctor import SMALL_SIZES, device, own_products, prepare
from vitfast.tools.verify import cases, run
from vitfast.tools.verify.draw import Draw, Sizes

COMMAND = [sys.executable, str(Path(__file__).resolve())]
CHECKERS = ("memcheck", "racecheck")
FOUND = 9  # the exit code of compute-sanitizer where it found something
B16 = Sizes(batch=1, tokens=197, width=768, heads=12, hidden=1536, image=224, patch=16)
H14 = Sizes(batch=1, tokens=257, width=1280, heads=16, hidden=1280, image=224, patch=14)


def plan() -> dict[str, tuple]:
    """What runs, by name: (function, inputs) as in vitfast.tools.verify.cases."""
    if INTERPRETED:
        return cases(dataclasses.replace(SMALL_SIZES, batch=1), ops)
    found = {f"{name}, H/14": case for name, case in cases(H14, ops).items()}
    found |= cases(B16, ops)
    for head in (32, 96):
        for tokens in (197, 257):
            sizes = dataclasses.replace(B16, tokens=tokens, width=2 * head, heads=2)
            found[f"attention, N = {tokens}, heads of {head}"] = cases(sizes, ops)["attention"]
    return found


def run_all(only: str = "") -> None:
    """Runs the plan, with the tiles that are shipped and then with each candidate."""
    prepare()
    dtype = torch.bfloat16
    later, done = [], set()
    with ops.use_kernels("on"), own_products(dtype):
        for name, (function, inputs) in plan().items():
            if only not in name:
                continue
            tensors = Draw(dtype, device()).leaves(inputs)
            with tiles.using() as used:
                upstream = [torch.randn_like(o) for o in run(function, tensors)]
                run(function, tensors, upstream)
                with torch.no_grad():  # few rows have kernels of their own then
                    run(function, tensors)
            print(name, flush=True)
            later.append((name, function, tensors, upstream, list(used)))
        for name, function, tensors, upstream, used in later:
            for override in candidates(used, dtype, device()):
                if override not in done and override[1].provider not in LIBRARIES:
                    done.add(override)
                    with tiles.using(*override):
                        run(function, tensors, upstream)
                    print(name, *override, flush=True)
    if device().type == "cuda":
        torch.cuda.synchronize()


def find() -> str | None:
    """Where compute-sanitizer is: on PATH, or where the CUDA toolkit puts it."""
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    places = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def check(checker: str, seconds: float = 200) -> tuple[int | None, str]:
    """The exit code of one checker (None: it took longer than `seconds`) and what was printed.

    The script runs by itself first, so that compilation is not watched. memcheck sees each tensor's own allocation:
    in one block of torch's allocator the neighbour's memory would be there to be read.
    """
    together = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    plain = subprocess.run(COMMAND, **together)
    if plain.returncode:
        return plain.returncode, f"without the sanitizer:\n{plain.stdout}"
    command, environment = [find(), "--tool", checker, "--error-exitcode", str(FOUND)], dict(os.environ)
    if checker == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        watched = subprocess.run([*command, *COMMAND], timeout=seconds, env=environment, **together)
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode()
    found = [line for line in watched.stdout.splitlines() if "=========" in line and "Host Frame" not in line]
    return watched.returncode, "\n".join([*found[:60], watched.stdout[-1000:]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", default="", help="the operations whose name contains this")
    run_all(parser.parse_args().only)
