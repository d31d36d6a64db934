"""Compiles every kernel for every GPU generation without a GPU and reads the machine code: `make codegen`.

    python tests/codegen.py
        writes tests/codegen.csv: registers, stack, shared memory, tensor-core instructions, instructions an element of
        the epilogue, programs per SM
    python tests/codegen.py --kernels linear_kernel ...
        as before, but rows of other kernels stay where the same Triton wrote them of the same tile: name every kernel
        whose launcher or source has changed, functions that it calls included
    python tests/codegen.py --quick
        the widths and head sizes that `make test` looks at, printed as JSON

Launchers run on meta tensors with their launches recorded, and Triton's own front end decides what a launch is compiled
for (vitfast/tools/machine_code/compiler.py), so what is compiled is exactly what a GPU would get. TRITON_INTERPRET must
be unset.
"""

import argparse
import csv
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Set
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

sys.path[:0] = [
    str(Path(__file__).parent / folder) for folder in ("helpers", "kernels", "tools/machine_code", "tools/verify")
]

import cubin  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from every_launcher import candidates, in_training, variants  # noqa: E402
from hazards import hazards  # noqa: E402

from vitfast.kernels import archives, tiles  # noqa: E402
from vitfast.kernels.attention import launchers as attention  # noqa: E402
from vitfast.kernels.attention.options import AttentionOptions  # noqa: E402
from vitfast.kernels.launch import Launch, cdiv, record  # noqa: E402
from vitfast.kernels.tiles import GENERATIONS  # noqa: E402
from vitfast.tools.machine_code import compiler  # noqa: E402
from vitfast.tools.machine_code.model_launches import META, resize  # noqa: E402
from vitfast.tools.verify.draw import Draw, Sizes  # noqa: E402

TABLE = Path(__file__).with_name("codegen.csv")
WORDS = ("kernel", "case", "dtype", "tile", "tensor_core", "notes")
# hgmma, hmma: how many of each; waits: HGMMAs that wait; hazards: instructions that touch registers which wgmma still
# uses; notes: of ptxas, on wgmma that it serialised; step: instructions of a step of the main loop (of attention, with
# as many keys or queries as its tile has); epilogue: instructions an element of all else that a product runs once a
# block. An element is one of the numbers of the block that a thread holds; of gated MLPs each counts both layers.
COLUMNS = "kernel case sm dtype tile warps stages registers stack spills shared tensor_core hgmma waits hazards".split()
COLUMNS += ["hmma", "notes", "step", "epilogue", "programs_per_sm"]
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def epilogue(launch: Launch, code: cubin.Code, warps: int) -> float | str:
    """Instructions an element of what a product in blocks of BLOCK_M by BLOCK_N does once a block; "" for others."""
    given = launch.arguments
    if "GROUP_M" not in given or not code.step or code.tensor_core == "UTCHMMA":
        return ""  # on sm_100 a program begins with loops that wait for tensor memory
    block = given["BLOCK_M"], given["BLOCK_N"]
    persistent = math.prod(launch.grid) < cdiv(given["M"], block[0]) * cdiv(given["N"], block[1])
    return round(code.once_a_block(persistent) * 32 * warps / math.prod(block), 2)


def compile_launch(launch: Launch, sm: int) -> dict:
    """What the table says of one launch's machine code."""
    compiled = compiler.compiled(launch, sm)
    code = cubin.read(compiled.asm["cubin"])
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    hgmma = code.count("HGMMA")
    return dict(
        registers=code.registers,
        stack=code.stack,
        spills=code.spills,
        tensor_core=code.tensor_core,
        hgmma=hgmma,
        waits=code.waits,
        hazards=len(hazards(code)),
        hmma=code.count("HMMA"),
        notes=" ".join(cubin.assembler_notes(compiled.asm["ptx"], sm)) if hgmma else "",
        step=len(code.step),
        epilogue=epilogue(launch, code, warps),
        shared=shared,
        warps=warps,
        stages=compiled.metadata.num_stages,
        programs_per_sm=cubin.programs_per_multiprocessor(code.registers, warps, shared, sm),
    )


def launcher_calls(s: Sizes, dtype: torch.dtype, wide: bool, also: Set[str] = frozenset()) -> dict[str, Callable]:
    """Name -> a call of every launcher at a model's shapes, on meta tensors, with each candidate's tile.

    wide: the variants too; otherwise only those whose name begins one in `also`.
    """

    def on_meta(launcher):
        return lambda: launcher.call(*launcher.make(Draw(dtype, META)))

    left_out = set() if wide else {name for name in variants(s) if not any(other.startswith(name) for other in also)}
    calls = {name: on_meta(launcher) for name, launcher in in_training(s).items() if name not in left_out}
    return {f"{name}{tile}": run for name, call in calls.items() for tile, run in with_candidates(call).items()}


def with_candidates(call: Callable) -> dict[str, Callable]:
    """The call as it is, and once for each candidate of an operation in it: " (tma)", " (tma 2)" and so on.

    What runs no kernel of ours is left out.
    """
    with tiles.using() as used:
        runs = {"": call} if record(call) else {}
    for override in candidates(used, torch.bfloat16, META):
        config = override[1]
        if config.blocks or config.provider in ("tiled", "specialized"):

            def run(override=override):
                with tiles.using(*override):
                    call()

            earlier = sum(name.startswith(f" ({config.provider}") for name in runs)
            runs[f" ({config.provider} {earlier + 1})" if earlier else f" ({config.provider})"] = run
    return runs


def job(case: str, launch: Launch, sm: int, dtype: torch.dtype) -> tuple[tuple, tuple]:
    """What tells a compilation from others; and (case, sm, dtype name, the launch)."""
    return (sm, launch.kernel.__name__, *compiler.key_of(launch, sm)), (case, sm, TYPES[dtype], launch)


def jobs(sizes: dict[str, Sizes], dtypes, generations, wide: bool, also: Set[str] = frozenset()) -> dict[tuple, tuple]:
    """Distinct compilations of every launch to be looked at, as `job` gives them; also: as in `launcher_calls`."""
    found = {}
    for sm in generations:
        seen = set()
        for (model, s), dtype in itertools.product(sizes.items(), dtypes):
            with tiles.using(sm=sm):
                calls = launcher_calls(s, dtype, wide, also).items()
                launches = [(case, launch) for case, call in calls for launch in record(call)]
            for case, launch in launches:
                kernel = launch.kernel.__name__
                if not wide and model != "B/16" and not case.startswith("attention"):
                    continue  # the quick look takes the second size for its head of 80 alone,
                if not wide and case.endswith(")") and kernel in seen and case not in also:
                    continue  # and candidates only where nothing else compiles their kernel
                seen.add(kernel)
                found.setdefault(*job(f"{model} {case}", launch, sm, dtype))
    return found


def tile_name(launch: Launch) -> str:
    """The numbers of a launch's tile, as in "BLOCK_M=128 BLOCK_N=128 head=64+0"."""
    names = ("SUBTILES", "STAGES", "PER_SM", "SHORT_M", "SHORT_N", "maxnreg")
    given = [(k, v) for k, v in launch.arguments.items() if (k.startswith("BLOCK") or k in names) and v]
    given.sort(key=lambda pair: (pair[0] == "maxnreg", pair[0]))  # whatever the order of a launch's arguments
    named = " ".join(f"{k}={v}" for k, v in given if isinstance(v, int) and not isinstance(v, bool))
    return named + (" head={0.first}+{0.second}".format(launch.arguments["HEAD"]) if "HEAD" in launch.arguments else "")


def heading(job: tuple) -> dict:
    """What an entry of the table says before anything is compiled."""
    case, sm, dtype, launch = job
    return dict(kernel=launch.kernel.__name__, case=case, sm=sm, dtype=dtype, tile=tile_name(launch))


def compile_job(job: tuple) -> dict:
    """One entry of the table."""
    row, (_, sm, _, launch) = heading(job), job
    try:
        return row | compile_launch(launch, sm)
    except Exception as error:  # the table says which tile does not compile
        unknown = dict.fromkeys((name for name in COLUMNS if name not in WORDS), -1) | dict(notes="")
        return unknown | row | dict(tensor_core=f"{type(error).__name__}: {str(error)[:200]}")


QUICK_SIZES = {"B/16": Sizes.of_preset("B/16", batch=256), "Dh 80": Sizes.of_preset("H/14", batch=64)}
ALL_SIZES = QUICK_SIZES | {
    "S/16": Sizes.of_preset("S/16", batch=512),
    "B/32": Sizes.of_preset("B/32", batch=512),
    "B/16 384": Sizes.of_preset("B/16", batch=64, image=384),
    "L/16": Sizes.of_preset("L/16", batch=128),
    "Dh 32": Sizes(batch=64, tokens=197, width=192, heads=6, hidden=768, image=224, patch=16),
    "Dh 128": Sizes(batch=64, tokens=197, width=1024, heads=8, hidden=4096, image=224, patch=16),
    "Ti/16": Sizes.of_preset("Ti/16", batch=1024),
    "S/32": Sizes.of_preset("S/32", batch=1024),
    "L/32": Sizes.of_preset("L/32", batch=512),
}

# Also of SigLIP's SO-400M: heads that are padded, of tokens that every tile divides.
TABLE_SIZES = ALL_SIZES | {"Dh 72": Sizes(batch=64, tokens=256, width=1152, heads=16, hidden=4304, image=224, patch=14)}
HEAD_SIZES = range(16, 129, 8)  # of packed samples


def packed_calls(head_dim: int, dtype: torch.dtype) -> dict[str, Callable]:
    """Name -> a call of attention of packed samples, forward and backward, with each form of rotary positions."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    tokens, heads, samples = 4096, 16, 30
    q, k, v = empty(1, tokens, 3, heads, head_dim).unbind(2)
    o, do, lse = empty(*q.shape), empty(*q.shape), empty(1, heads, tokens, dtype=torch.float32)
    options = dict(offsets=empty(samples + 1, dtype=torch.int32), longest=1024)
    kinds = {"packed": AttentionOptions(**options)}
    for columns, width in (("", head_dim // 2), (", a column each", head_dim)):
        for layout in ("half", "interleaved"):
            table, turned = empty(tokens, width, dtype=torch.float32), layout == "interleaved"
            kinds[f"packed, {layout}{columns}"] = AttentionOptions(table, table, interleaved=turned, **options)
    calls = {}
    for name, logits in kinds.items():
        calls[f"attention, {name}"] = partial(attention.attention_fwd, q, k, v, 0.1, logits)
        calls[f"attention backward, {name}"] = partial(attention.attention_bwd, q, k, v, o, lse, do, 0.1, True, logits)
    return calls


def packed_jobs(dtype: torch.dtype, generations) -> dict[tuple, tuple]:
    """As `jobs`: attention of packed samples at every head size."""
    found = {}
    for sm, head_dim in itertools.product(generations, HEAD_SIZES):
        with tiles.using(sm=sm):
            for case, call in packed_calls(head_dim, dtype).items():
                for launch in record(call):
                    found.setdefault(*job(f"Dh {head_dim} {case}", launch, sm, dtype))
    return found


def resize_jobs(generations) -> dict[tuple, tuple]:
    """As `jobs`: the two passes of a resize, which know no dtype either."""
    return dict(job(name, launch, sm, torch.bfloat16) for sm in generations for name, launch in resize().items())


def rows_of(work: dict[tuple, tuple], processes: int, chunk: int = 4) -> list[dict]:
    """Compiles every job, several at a time."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(compile_job, work.values(), chunksize=chunk))


def committed() -> list[dict]:
    """The entries of the table."""
    with open(TABLE, newline="") as file:
        next(file)
        kinds = dict.fromkeys(COLUMNS, int) | dict.fromkeys(WORDS, str) | dict(epilogue=lambda v: float(v) if v else "")
        return [{k: kinds[k](v) for k, v in row.items()} for row in csv.DictReader(file)]


def unchanged(work: dict[tuple, tuple], named: list[str]) -> dict[tuple, dict]:
    """Job -> its entry in the table, for kernels not in `named`, if the same Triton wrote it of the same tile."""
    with open(TABLE) as file:
        if f"triton {triton.__version__};" not in next(file):
            return {}
    rows = [row for row in committed() if row["kernel"] not in named and list(row) == COLUMNS]
    known = {(*(row[k] for k in COLUMNS[:7]),): row for row in rows}
    sizes = lambda job: (job[-1].arguments.get("num_warps", 4), job[-1].arguments.get("num_stages", 3))  # noqa: E731
    at = {key: (*heading(job).values(), *sizes(job)) for key, job in work.items()}
    return {key: known[entry] for key, entry in at.items() if entry in known}


def problems(rows: list[dict]) -> list[str]:
    """What no tile may do: not compile, fit no multiprocessor; in 16 bits spill, leave a product to the scalar units.

    On sm_90 nor touch registers that wgmma still uses, have wgmma wait one by one, or leave tiles of 64 rows and more
    to mma.sync; on sm_100 any product.
    """
    found = []
    for r in rows:
        name = f"{r['kernel']} ({r['case']}) on sm_{r['sm']} {r['dtype']} {r['tile']}"
        if r["registers"] < 0:
            found.append(f"{name}: {r['tensor_core']}")
            continue
        if r["spills"] > FEW_SPILLS.get(r["kernel"], 0) and r["dtype"] != "fp32":
            found.append(f"{name}: {r['spills']} local loads and stores")
        elif r["stack"] and not r["spills"] and r["dtype"] != "fp32":
            found.append(f"{name}: {r['stack']} bytes of stack")
        if r["shared"] > cubin.SHARED_LIMIT[r["sm"]]:
            found.append(f"{name}: {r['shared']} bytes of shared memory, limit {cubin.SHARED_LIMIT[r['sm']]}")
        elif r["programs_per_sm"] < 1:
            found.append(f"{name}: no program fits a multiprocessor")
        product = r["dtype"] != "fp32" and any(word in r["kernel"] for word in PRODUCTS)
        if product and not r["tensor_core"]:
            found.append(f"{name}: no tensor-core instruction")
        if r["hgmma"] and (r["notes"] or (r["hgmma"] > 1 and r["waits"] > WAITING * r["hgmma"])):
            waits = f"{r['waits']} waits for {r['hgmma']} HGMMA ({r['notes'] or 'ptxas says nothing'})"
            found.append(f"{name}: serialised wgmma, {waits}")
        if r.get("hazards"):  # earlier tables have no such column
            found.append(f"{name}: {r['hazards']} instructions touch registers that wgmma still uses")
        if "SHORT_" in r["tile"] or r["hmma"] <= OF_ONES.get(r["kernel"], 0):  # a product of 16 rows is for mma.sync
            continue
        few = r["kernel"] == "norm_linear_kernel" or "few rows" in r["case"]  # whose other sizes are columns
        if few and int(re.search(r"BLOCK_M=(\d+)", r["tile"])[1]) < 64:  # wgmma and tcgen05 take 64 at least
            continue
        if r["sm"] == 90 and r["hmma"] and r["dtype"] != "fp32" and _rows(r["tile"]) >= 64:
            found.append(f"{name}: {r['hmma']} HMMA, mma.sync where wgmma fits")
        if r["sm"] == 100 and r["hmma"] and product:
            found.append(f"{name}: {r['hmma']} HMMA, mma.sync where tcgen05 fits")
    return found


def _rows(config: str) -> int:
    """Rows of the largest tile that is multiplied; infinitely many where its name does not say."""
    sizes = dict(word.split("=") for word in config.split() if word.startswith("BLOCK"))
    return max((int(size) for name, size in sizes.items() if name.startswith(("BLOCK_M", "BLOCK_N"))), default=math.inf)


# The most local loads and stores of two kernels in Triton 3.9; in 3.6 and 3.8 they have none. On an H100 with 3.6 the
# resident kernel's tile without any took 30 % longer. The other has none of its in a loop, and no GPU has run it.
FEW_SPILLS = {"_attention_bwd_resident_kernel": 11, "_attention_bwd_specialized_kernel": 27}
# Of a kernel's HGMMAs, the share that may wait for all before them: at most 6 of 9 do (dQ at heads of 16, Triton 3.6).
WAITING = 2 / 3
# Kernels whose work is a matrix product.
PRODUCTS = ("linear", "persistent", "attention", "dgelu_matmul", "input_grad")
PRODUCTS += ("gated_linear", "dgated_matmul", "patch_embed_fwd", "patch_embed_dweight_kernel", "patch_embed_dimages")
# The most instructions of mma.sync in kernels whose column sums are a product with 16 rows of ones.
OF_ONES = {"persistent_kernel": 64, "dgelu_matmul_kernel": 16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two widths in bf16; print JSON, write nothing")
    parser.add_argument("--also", nargs="+", default=[], help="with --quick: variants to be taken, as in 'linear, qkv'")
    parser.add_argument("--kernels", nargs="+", help="those that have changed; rows of others stay")
    parser.add_argument("--sm", type=int, nargs="+", default=list(GENERATIONS))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    sizes = QUICK_SIZES if args.quick else TABLE_SIZES
    work = jobs(sizes, [torch.bfloat16], args.sm, not args.quick, set(args.also))
    if not args.quick:
        # A kernel that knows no dtype (the table of tiles) is the models' in bf16.
        work = packed_jobs(torch.bfloat16, args.sm) | jobs(QUICK_SIZES, [torch.float32], args.sm, True) | work
    work = resize_jobs(args.sm) | work
    if unknown := set(args.kernels or ()) - {launch.kernel.__name__ for *_, launch in work.values()}:
        parser.error(f"--kernels: there is no {', '.join(sorted(unknown))}")
    kept = unchanged(work, args.kernels) if args.kernels else {}
    rows = [*kept.values(), *rows_of({key: job for key, job in work.items() if key not in kept}, args.processes)]
    if args.quick:
        print(json.dumps(dict(rows=rows, problems=problems(rows))))
        return 0
    with open(TABLE, "w", newline="") as file:
        file.write(f"# kernels {archives.source_hash()}, triton {triton.__version__}; written by make codegen\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda r: (r["kernel"], r["sm"], r["dtype"], r["case"])))
    for problem in problems(rows):
        print(problem)
    print(f"{len(rows) - len(kept)} compilations, {len(kept)} rows kept, {len(problems(rows))} problems, {TABLE}")
    return 1 if problems(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
