"""Host time: how long Python and C++ take for a call before a GPU computes, measured on a CPU.

    python bench/host.py [CASE ...] [--shares] [--json FILE] [--against COMMIT] [--rounds N]

Counted are checks of operations and models, custom operations and autograd of PyTorch, new tensors, tiles and keys of
launches, descriptors of tensors and Triton's own launcher, down to a libcuda that counts launches and refuses illegal
ones (libcuda_stub.c). Kernels are compiled for sm_90 and not run, so results have no meaning. Not counted are the
driver's part of a launch, cuBLAS, memory and streams of a GPU in PyTorch, optimisers, and garbage collection.

Tensors lie on the CPU, where another allocator makes them, and PyTorch's matrix products compute nothing. The batch is
one image, so that the little that PyTorch still computes is short; FEW_ROWS and MANY_HEADS are set such that launchers
take the paths of a large batch. So shares and ratios mean more than times. Those of a GPU, beside timm's, whose kernels
would all compute here, are the question host_time of questions.py.

Of each case there are the launches of a call and its microseconds, by the process's own clock, so that others disturb
it less: the 10th percentile and the median. --against COMMIT measures that commit in turns with this tree, in a process
each, and compares the least 10th percentiles. Against BEFORE it wants the ratios of WANTED, and the exit code is 1
where one is missed.
"""

import argparse
import cProfile
import ctypes
import functools
import importlib.util
import json
import os
import pstats
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "d20ce08"  # before launches were made cheaper
WANTED = dict(block=0.5, eager=0.5, compiled=0.6, inference=0.6)
WARMUP, LEAST, PROFILED = 6, 20, 25  # calls

# ---- a GPU that computes nothing


def stub() -> Path:
    """Compiles libcuda.so.1; returns its folder, always the same, so that Triton's caches stay."""
    folder = ROOT / "bench" / "cache" / "libcuda"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{os.getpid()}.so"  # another process may do the same
    include = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia" / "include"
    options = ["-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1", "-o", str(part)]
    subprocess.run(["gcc", *options, str(ROOT / "bench" / "libcuda_stub.c")], check=True)
    part.replace(folder / "libcuda.so.1")
    return folder


ATEN = torch.library.Library("aten", "IMPL")
PRODUCTS = {
    "mm": lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    "addmm": lambda c, a, b, *, beta=1, alpha=1: a.new_empty(a.shape[0], b.shape[1]),
    "addmm_": lambda c, a, b, *, beta=1, alpha=1: c,
    "mm.out": lambda a, b, *, out: out,
    "addmm.out": lambda c, a, b, *, beta=1, alpha=1, out: out,
}


def pretend(tree: Path) -> ctypes.CDLL:
    """Has the vitfast of this tree take the CPU for a GPU, in this process; returns the stub."""
    folder = stub()
    lib = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= dict(CUDA_VISIBLE_DEVICES="", TRITON_LIBCUDA_PATH=str(folder), VITFAST_TILES=os.devnull)
    sys.path.insert(0, str(tree))
    import triton
    from triton.backends.nvidia import driver

    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)  # else Inductor moves it
    gpu = driver.CudaDriver.__new__(driver.CudaDriver)
    gpu.utils, gpu.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
    gpu.get_current_device, gpu.set_current_device = lambda: 0, lambda device: None
    gpu.get_current_stream, gpu.get_device_capability = lambda device: 0, lambda device=0: (9, 0)
    triton.runtime.driver.set_active(gpu)

    from vitfast import ops
    from vitfast.kernels.attention import launchers
    from vitfast.kernels.matmul import linear, product

    linear.FEW_ROWS = product.FEW_ROWS = launchers.MANY_HEADS = 1
    prefix = "" if hasattr(ops, "dispatch") else "_"  # BEFORE has both names with one
    setattr(vars(ops)[f"{prefix}dispatch"], f"{prefix}unsupported_reason", lambda x, unsupported: unsupported)
    for name, function in PRODUCTS.items():
        ATEN.impl(name, function, "CPU")
    ops.use_kernels("on")
    torch.set_num_threads(1)
    return lib


# ---- cases

CASES = ("layer_norm", "block", "eager", "compiled", "inference", "compiled_inference")


def training(forward: Callable[[], Tensor], leaves: Iterable[Tensor]) -> Callable[[], None]:
    """Forward and backward, after which gradients are removed."""
    upstream, leaves = torch.randn_like(forward()), [*leaves]

    def run():
        forward().backward(upstream)
        for leaf in leaves:
            leaf.grad = None

    return run


def made(case: str) -> Callable[[], object]:
    """The call that is timed."""
    from vitfast import ViT, ops

    x, weight, bias = leaves = [torch.randn(s).bfloat16().requires_grad_() for s in ((1, 197, 768), 768, 768)]
    if case == "layer_norm":
        return training(lambda: ops.layer_norm(x, weight, bias), leaves)
    model = ViT.from_preset("B/16", depth=1 if case == "block" else 12).bfloat16().train("inference" not in case)
    if case == "block":
        return training(lambda: model.blocks[0](x), [x, *model.blocks[0].parameters()])
    images, called = torch.randn(1, 3, 224, 224).bfloat16(), torch.compile(model) if "compiled" in case else model
    forward = lambda: called(images)  # noqa: E731
    return training(forward, model.parameters()) if model.training else torch.no_grad()(forward)


# ---- measurements


def measure(run: Callable[[], None], lib: ctypes.CDLL, seconds: float) -> dict:
    """The launches of a call, and its microseconds without Python's garbage collection."""
    timed = functools.partial(timeit.repeat, run, timer=time.process_time, number=1)
    timed(repeat=WARMUP)
    before = lib.stub_launches()
    (once,) = timed(repeat=1)
    found = dict(launches=lib.stub_launches() - before)
    times = sorted(timed(repeat=max(LEAST, int(seconds / once))))
    return found | dict(low_us=1e6 * times[len(times) // 10], median_us=1e6 * times[len(times) // 2])


LAYERS = {  # by the files' names; the first that fits counts
    "custom operations of PyTorch": "torch/_(library|ops)",
    "models": "torch/nn|vitfast/(?!kernels|ops)",
    "other Python of PyTorch": "torch/",
    "Triton": "triton/",
    "tile lookups": "vitfast/kernels/(tiles|.*configs)",
    "launchers and keys": "vitfast/kernels/",
    "operations": "vitfast/ops/",
    "builtins, also of C++": "~",
    "the rest": "",
}


def shares(run: Callable[[], None]) -> str:
    """A table of shares by layers of code, under a profiler, which slows Python down more than C++."""
    folders = [f"{Path(sys.modules[name].__file__).parents[1]}/" for name in ("torch", "triton", "vitfast")]
    folders.sort(key=len, reverse=True)  # an environment can lie inside a tree
    calls, spent = [cProfile.Profile() for _ in range(PROFILED)], Counter()
    for profile in calls:
        profile.runcall(run)
    calls = [pstats.Stats(profile).stats for profile in calls]
    for function in calls[0]:
        name = function[0].removeprefix(next(filter(function[0].startswith, folders), ""))
        layer = next(layer for layer, pattern in LAYERS.items() if re.match(pattern, name))
        spent[layer] += statistics.median(call[function][2] for call in calls if function in call)
    return "".join(f"  {seconds / spent.total():6.1%}  {layer}\n" for layer, seconds in spent.most_common())


def in_turns(args: argparse.Namespace, scratch: str) -> dict:
    """The cases of this tree ("now") and of another commit ("then"), each the best of its turns."""
    git, result = ["git", "-C", str(ROOT), "worktree"], Path(scratch, "result.json")
    trees, found = dict(now=str(ROOT), then=f"{scratch}/then"), {case: {} for case in args.cases}
    try:
        add = subprocess.run([*git, "add", "--detach", trees["then"], args.against], capture_output=True, text=True)
        if add.returncode:
            sys.exit(f"bench/host.py cannot have {args.against}: {add.stderr.strip()}")
        for name, tree in args.rounds * [*trees.items()]:
            command = [sys.executable, __file__, *args.cases, "--tree", tree, "--json", str(result)]
            environment = os.environ | dict(PYTHONPATH=tree, CUDA_VISIBLE_DEVICES="")
            child = subprocess.run([*command, f"--seconds={args.seconds}"], env=environment, capture_output=True)
            if child.returncode:
                sys.exit(f"bench/host.py fails on {tree}: {child.stderr.decode()[-3000:]}")
            for case, new in json.loads(result.read_text())["cases"].items():
                found[case][name] = min(new, found[case].get(name, new), key=lambda each: each["low_us"])
    finally:
        subprocess.run([*git, "remove", "--force", trees["then"]], capture_output=True)
    return found


def compare(found: dict, wanted: dict) -> bool:
    """Prints the table, adds its ratios to `found`, and returns whether every wanted one is kept."""
    print("case                launches now, then      µs now        then  ratio  wanted")
    for case, pair in found.items():
        now, then, most = pair["now"], pair["then"], wanted.get(case)
        ratio = now["low_us"] / then["low_us"]
        pair |= dict(ratio=ratio, wanted=most, kept=not most or ratio <= most)
        line = f"{case:20}{now['launches']:12}{then['launches']:6}{now['low_us']:12.1f}{then['low_us']:12.1f}"
        print(f"{line}{ratio:7.2f}" + (f"{most:8}  {'kept' if pair['kept'] else 'missed'}" if most else "       -"))
    return all(pair["kept"] for pair in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; without one, all")
    parser.add_argument("--shares", action="store_true", help="show each case's shares by layers of code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too, without --shares")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each, with --against")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the folder whose vitfast is measured")
    args, found, kept = parser.parse_args(), {}, True
    args.cases = args.cases or [*CASES]
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(unknown)}, only {', '.join(CASES)}")
    for program in ["gcc", *["git"] * bool(args.against)]:
        if not shutil.which(program):
            sys.exit(f"bench/host.py needs {program}; install it")
    if args.against:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the other tree is removed
        with tempfile.TemporaryDirectory(prefix="vitfast-host-") as scratch:
            found = in_turns(args, scratch)
        kept = compare(found, WANTED if args.against.startswith(BEFORE) else {})
    else:
        lib = pretend(args.tree)
        for case in args.cases:
            run = made(case)
            found[case] = measure(run, lib, args.seconds)
            words = "{low_us:10.1f} µs, median {median_us:10.1f}, {launches} launches".format(**found[case])
            print(f"{case:20}{words}\n{shares(run) if args.shares else ''}", end="", flush=True)
    if args.json:
        sys.path.append(str(ROOT / "bench"))  # where Python does not look itself, as with PYTHONSAFEPATH
        from machine import facts  # late: it looks for a GPU, of which `pretend` hides the true ones

        more = dict(against=args.against, rounds=args.rounds) if args.against else {}
        args.json.write_text(json.dumps(dict(facts(), **more, cases=found), indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
