"""Compiles every kernel for every GPU generation without a GPU and reads the machine code: `make codegen`.

    python tests/codegen.py            writes tests/codegen.csv: registers, stack, shared memory, tensor-core instructions, programs per SM
    python tests/codegen.py --quick    the widths and head sizes that `make test` looks at, printed as JSON
    python tests/codegen.py --cache FILE.tar.xz --sm 90
                                       an archive of Triton's cache for one generation and the Triton and Python that run this: all that doctor,
                                       the gpu tests and the benchmarks launch; `bench/gpu.sh` unpacks it (bench/cache.py), and compiles nothing in it

Launchers run on meta tensors with their launches recorded, and Triton's own front end decides what a launch is compiled for (vitfast/offline.py), so
what is compiled is exactly what a GPU would get. TRITON_INTERPRET must be unset.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import cache  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

from vitfast import doctor, ops  # noqa: E402
from vitfast.errors import both_ends  # noqa: E402
from vitfast.kernels import tiles  # noqa: E402
from vitfast.kernels.launch import Launch, record  # noqa: E402
from vitfast.machine_code import compiler as offline
from vitfast.machine_code import cubin as machine_code  # noqa: E402
from vitfast.verify import Input, cases  # noqa: E402
from vitfast.verify.launchers import Draw, Sizes, launchers  # noqa: E402

TABLE = Path(__file__).with_name("codegen.csv")
WORDS = ("kernel", "case", "dtype", "tile", "tensor_core", "notes")
# hgmma, hmma: how many of each; waits: HGMMAs that wait; notes: of ptxas, on wgmma that it serialised.
COLUMNS = (
    "kernel",
    "case",
    "sm",
    "dtype",
    "tile",
    "warps",
    "stages",
    "registers",
    "stack",
    "spills",
    "shared",
    "tensor_core",
)
COLUMNS += ("hgmma", "waits", "hmma", "notes", "programs_per_sm")
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
SHARED_PER_SM = {80: 167_936, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
WARPS_PER_SM = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
META = torch.device("meta")
ARCHIVE_LIMIT = 64 * 2**20  # bytes


def compile_launch(launch: Launch, sm: int) -> dict:
    """One row's measurements."""
    compiled = offline.compiled(launch, sm)
    code = machine_code.read(compiled.asm["cubin"])
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    by_registers = 65_536 // (-(-code.registers // 8) * 8 * 32 * warps)
    hgmma = code.count("HGMMA")
    return dict(
        registers=code.registers,
        stack=code.stack,
        spills=code.spills,
        tensor_core=code.tensor_core,
        hgmma=hgmma,
        waits=code.waits,
        hmma=code.count("HMMA"),
        notes=" ".join(machine_code.assembler_notes(compiled.asm["ptx"], sm)) if hgmma else "",
        shared=shared,
        warps=warps,
        stages=compiled.metadata.num_stages,
        programs_per_sm=min(by_registers, WARPS_PER_SM[sm] // warps, SHARED_PER_SM[sm] // (shared + 1024), 32),
    )


def launcher_calls(s: Sizes, dtype: torch.dtype, wide: bool) -> dict[str, Callable]:
    """Name -> a call of every launcher at a model's shapes, on meta tensors; `wide`: the variants too, and every rival provider of each."""

    def on_meta(launcher):
        return lambda: launcher.call(*launcher.make(Draw(dtype, META)))

    calls = {name: on_meta(launcher) for name, launcher in launchers(s).items() if wide or not launcher.variant}
    return {f"{name}{rival}": run for name, call in calls.items() for rival, run in with_rivals(call).items()}


def with_rivals(call) -> dict:
    """The call as it is, and once for each rival of an operation in it: " (tma)", " (tma 2)" and so on. What runs no kernel of ours is left out."""
    with tiles.watching() as used:
        runs = {"": call} if record(call) else {}
    for (op, bits, shape), _ in used.items():
        like = torch.empty(0, dtype=torch.float32 if bits == "32" else torch.bfloat16, device=META)
        for rival in tiles.candidates(op, like, shape, unchecked=True):
            if rival.blocks or rival.provider == "tiled":

                def run(op=op, rival=rival, shape=shape):
                    with tiles.override(op, rival, shape):
                        call()

                earlier = sum(name.startswith(f" ({rival.provider}") for name in runs)
                runs[f" ({rival.provider} {earlier + 1})" if earlier else f" ({rival.provider})"] = run
    return runs


def jobs(sizes: dict[str, Sizes], dtypes, generations, wide: bool) -> dict[tuple, tuple]:
    """Distinct compilations: key -> (case, sm, dtype name, the launch as plain data)."""
    found = {}
    for sm in generations:
        for model, s in sizes.items():
            for dtype in dtypes:
                with tiles.targeting(sm):
                    launches = [
                        (case, launch)
                        for case, call in launcher_calls(s, dtype, wide).items()
                        for launch in record(call)
                    ]
                for case, launch in launches:
                    if not wide and model != "B/16" and not case.startswith("attention"):
                        continue  # the quick look takes the second size for its head of 80 alone,
                    if (
                        not wide
                        and case.endswith(")")
                        and any(key[:2] == (sm, launch.kernel.__name__) for key in found)
                    ):
                        continue  # and rivals only where nothing else compiles their kernel
                    key = (sm, launch.kernel.__name__, *offline.key_of(launch, sm))
                    found.setdefault(key, (f"{model} {case}", sm, TYPES[dtype], offline.Job.of(launch)))
    return found


def tile_name(launch: Launch) -> str:
    """The numbers of a launch's tile, as in "BLOCK_M=128 BLOCK_N=128 head=64+0"."""
    blocks = {
        k: v for k, v in launch.arguments.items() if k.isupper() and isinstance(v, int) and not isinstance(v, bool)
    }
    blocks |= {k: launch.arguments[k] for k in ("maxnreg",) if k in launch.arguments}
    named = " ".join(
        f"{k}={v}"
        for k, v in blocks.items()
        if k.startswith("BLOCK") or k in ("SUBTILES", "SPLIT_K", "STAGES", "PER_SM", "maxnreg")
    )
    return named + (" head={0.first}+{0.second}".format(launch.arguments["HEAD"]) if "HEAD" in launch.arguments else "")


def compile_job(job: tuple) -> dict:
    """One row of the table."""
    case, sm, dtype, plain = job
    launch = plain.launch()
    named = tile_name(launch)
    row = dict(kernel=launch.kernel.__name__, case=case, sm=sm, dtype=dtype, tile=named)
    try:
        return row | compile_launch(launch, sm)
    except Exception as error:  # the table says which tile does not compile
        unknown = dict.fromkeys((name for name in COLUMNS if name not in WORDS), -1) | dict(notes="")
        return unknown | row | dict(tensor_core=f"{type(error).__name__}: {str(error)[:200]}")


QUICK_SIZES = {
    "B/16": Sizes(batch=256, tokens=197, width=768, heads=12, hidden=3072, image=224, patch=16),
    "Dh 80": Sizes(batch=64, tokens=257, width=1280, heads=16, hidden=5120, image=224, patch=14),
}
ALL_SIZES = QUICK_SIZES | {
    "S/16": Sizes(batch=512, tokens=197, width=384, heads=6, hidden=1536, image=224, patch=16),
    "B/32": Sizes(batch=512, tokens=50, width=768, heads=12, hidden=3072, image=224, patch=32),
    "B/16 384": Sizes(batch=64, tokens=577, width=768, heads=12, hidden=3072, image=384, patch=16),
    "L/16": Sizes(batch=128, tokens=197, width=1024, heads=16, hidden=4096, image=224, patch=16),
    "Dh 32": Sizes(batch=64, tokens=197, width=192, heads=6, hidden=768, image=224, patch=16),
    "Dh 128": Sizes(batch=64, tokens=197, width=1024, heads=8, hidden=4096, image=224, patch=16),
    "Ti/16": Sizes(batch=1024, tokens=197, width=192, heads=3, hidden=768, image=224, patch=16),
    "S/32": Sizes(batch=1024, tokens=50, width=384, heads=6, hidden=1536, image=224, patch=32),
    "L/32": Sizes(batch=512, tokens=50, width=1024, heads=16, hidden=4096, image=224, patch=32),
}


def rows_of(work: dict[tuple, tuple], processes: int, chunk: int = 4) -> list[dict]:
    """Compiles every job, several at a time."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(compile_job, work.values(), chunksize=chunk))


def committed() -> list[dict]:
    """The rows of the table."""
    with open(TABLE, newline="") as file:
        next(file)
        return [{k: v if k in WORDS else int(v) for k, v in row.items()} for row in csv.DictReader(file)]


def problems(rows: list[dict]) -> list[str]:
    """What no tile may do: not compile, fit no multiprocessor; in 16 bits, spill, leave a product to the scalar units or, on sm_90, have
    wgmma wait one by one, or leave tiles of 64 rows and more, on sm_100 any product, to mma.sync."""
    found = []
    for r in rows:
        name = f"{r['kernel']} ({r['case']}) on sm_{r['sm']} {r['dtype']} {r['tile']}"
        if r["registers"] < 0:
            found.append(f"{name}: {r['tensor_core']}")
            continue
        if r["spills"] and r["dtype"] != "fp32":
            found.append(f"{name}: {r['spills']} local loads and stores")
        elif r["stack"] and r["dtype"] != "fp32":
            found.append(f"{name}: {r['stack']} bytes of stack")
        if r["shared"] > tiles.SHARED_LIMIT[r["sm"]]:
            found.append(f"{name}: {r['shared']} bytes of shared memory, limit {tiles.SHARED_LIMIT[r['sm']]}")
        elif r["programs_per_sm"] < 1:
            found.append(f"{name}: no program fits a multiprocessor")
        product = r["dtype"] != "fp32" and any(word in r["kernel"] for word in PRODUCTS)
        if product and not r["tensor_core"]:
            found.append(f"{name}: no tensor-core instruction")
        if r["hgmma"] and (r["notes"] or (r["hgmma"] > 1 and r["waits"] > WAITING * r["hgmma"])):
            found.append(
                f"{name}: serialised wgmma, {r['waits']} waits for {r['hgmma']} HGMMA ({r['notes'] or 'ptxas says nothing'})"
            )
        if r["sm"] == 90 and r["hmma"] and r["dtype"] != "fp32" and _rows(r["tile"]) >= 64:
            found.append(f"{name}: {r['hmma']} HMMA, mma.sync where wgmma fits")
        if r["sm"] == 100 and r["hmma"] and product:
            found.append(f"{name}: {r['hmma']} HMMA, mma.sync where tcgen05 fits")
    return found


def _rows(tile: str) -> int:
    """Rows of the largest tile that is multiplied; infinitely many where its name does not say."""
    sizes = dict(word.split("=") for word in tile.split() if word.startswith("BLOCK"))
    return max((int(size) for name, size in sizes.items() if name.startswith(("BLOCK_M", "BLOCK_N"))), default=math.inf)


# Of a kernel's HGMMAs, the share that may wait for all before them: at most 0.52 do (14 of 27, "phases" at heads of 32; Triton 3.6 and 3.9).
WAITING = 2 / 3
# Kernels whose work is a matrix product.
PRODUCTS = ("linear", "attention", "dgelu_matmul", "product_gluon", "input_grad", "weight_grad_kernel")
PRODUCTS += ("patch_embed_fwd", "patch_embed_dweight_kernel", "patch_embed_dimages")


# ---- an archive of what a run on a GPU launches


@contextlib.contextmanager
def launching_on_meta() -> Iterator[None]:
    """Operations on meta tensors run their launchers inside, as they would on a GPU, in place of their fakes."""
    from torch._library.custom_ops import OPDEFS

    from vitfast.ops import _dispatch

    ours = [op for name, op in OPDEFS.items() if name.startswith("vitfast::")]
    fakes, reason = [op._abstract_fn for op in ours], _dispatch._unsupported_reason
    for op in ours:
        op._abstract_fn = op._init_fn
    _dispatch._unsupported_reason = lambda x, unsupported: unsupported
    try:
        with ops.use_kernels("on"):
            yield
    finally:
        _dispatch._unsupported_reason = reason
        for op, fake in zip(ours, fakes):
            op._abstract_fn = fake


def _meta(inputs: list[Input], dtype: torch.dtype) -> list[torch.Tensor]:
    """What verify.make draws, on the meta device."""
    kinds = dict(uint8=torch.uint8, factor=torch.float32)
    tensors = [torch.empty(shape, dtype=kinds.get(kind, dtype), device=META) for kind, shape in inputs]
    return [t.requires_grad_() if kind not in kinds else t for t, (kind, _) in zip(tensors, inputs)]


def operations(
    s: Sizes, dtypes: list[torch.dtype], names: list[str] | None = None, rivals: bool = False
) -> list[Launch]:
    """What doctor's cases launch at these sizes: forward without gradients, forward and backward with them, and every rival provider."""
    found = []
    for name, (function, inputs) in cases(s, ops).items():
        for dtype in dtypes if names is None or name in names else ():
            tensors = _meta(inputs, dtype)

            def run(function=function, tensors=tensors):
                with torch.no_grad():
                    function(*tensors)
                return run(function, tensors, [torch.empty_like(o) for o in run(function, tensors)])

            with tiles.watching() as used:
                found += record(run)
            for (op, bits, shape), _ in used.items() if rivals else ():
                like = torch.empty(0, dtype=torch.float32 if bits == "32" else dtype, device=META)
                for rival in tiles.candidates(op, like, shape, unchecked=True):
                    with tiles.override(op, rival, shape):
                        found += record(run)
    return found


def training_step(preset: str, image: int, batch: int, train: bool, amp: bool) -> list[Launch]:
    """What a step, or an inference, of a preset launches in bf16; under autocast (`amp`) LayerNorm's parameters are fp32."""
    from vitfast import ViT

    with META:
        model = ViT.from_preset(preset, img_size=image).bfloat16().train(train)
    for module in model.modules() if amp else ():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    images = torch.empty(batch, 3, image, image, dtype=torch.bfloat16, device=META)

    def run():
        with torch.set_grad_enabled(train):
            logits = model(images)
            if train:
                logits.backward(torch.empty_like(logits))

    return record(run)


def fp32_stream(s: Sizes) -> list[Launch]:
    """What the two halves launch where `accelerate` keeps timm's fp32 residual stream under autocast."""
    found = []
    for name, function in (("attention_block", ops.attention_block), ("mlp_block", ops.mlp_block)):
        x, w, b, *matrices = _meta(cases(s, ops)[name][1], torch.bfloat16)[:7]
        stream = [t.detach().float().requires_grad_() for t in (x, w, b)]
        options = dict(num_heads=s.heads) if name == "attention_block" else {}

        def run(function=function, tensors=(*stream, *matrices), options=options):
            out = function(*tensors, residual_in_fp32=True, **options)
            out.backward(torch.empty_like(out))

        found += record(run)
    return found


def everything(sm: int) -> list[Launch]:
    """What doctor, the gpu tests, and the benchmarks of operations and models launch on a GPU of this generation."""
    sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("kernels", "helpers")]
    import test_gpu

    wanted, half, bf16 = (
        [torch.float32, torch.float16, torch.bfloat16],
        [torch.float16, torch.bfloat16],
        [torch.bfloat16],
    )
    marks = {
        mark.args[0]: mark.args[1]
        for mark in test_gpu.test_attention_around_tile_edges.pytestmark
        if mark.name == "parametrize"
    }
    with tiles.targeting(sm), launching_on_meta():
        found = operations(doctor.GPU_SIZES, wanted)
        for s in ALL_SIZES.values():
            found += operations(s, bf16)
            found += fp32_stream(s)
        for name, s in test_gpu.SIZES.items():
            found += operations(s, wanted)
            found += operations(s, half, rivals=True) if name in ("B/16 224", "H/14 224") else []
        for tokens in marks["tokens"]:
            for head in marks["head"]:
                s = Sizes(batch=2, tokens=tokens, width=3 * head, heads=3, hidden=64, image=32, patch=16)
                found += operations(s, bf16, ["attention"])
        for preset, image, batch in (
            ("B/16", 224, 256),
            ("S/16", 224, 512),
            ("L/16", 224, 128),
            ("H/14", 224, 64),
            ("B/16", 384, 64),
        ):
            for amp in (False, True):
                found += training_step(preset, image, batch, True, amp)
                found += [
                    x for count in (1, 64, 128, 256, 512) for x in training_step(preset, image, count, False, amp)
                ]
        return found


def compile_only(work: tuple[offline.Job, int]) -> str:
    """Compiles into the cache; what went wrong, or nothing."""
    job, sm = work
    try:
        offline.compiled(job.launch(), sm)
        return ""
    except Exception as error:
        return f"{job.kernel}: {both_ends(f'{type(error).__name__}: {error}')}"


def write_cache(archive: Path, sm: int, processes: int, found: list[Launch]) -> int:
    """Compiles these launches and packs them; returns the exit code."""
    launches = {offline.key_of(launch, sm): launch for launch in found}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with ProcessPoolExecutor(processes) as pool:
            failures = [
                f
                for f in pool.map(compile_only, [(offline.Job.of(x), sm) for x in launches.values()], chunksize=4)
                if f
            ]
        size = cache.pack(Path(folder), archive, sm=sm)
    print(*failures, sep="\n", end="\n" if failures else "")
    made = f"Triton {triton.__version__}, Python {sys.version.split()[0]}"
    print(f"{len(launches) - len(failures)} kernels for sm_{sm}, {made}: {archive}, {size / 2**20:.1f} MiB")
    if size > ARCHIVE_LIMIT:
        print(f"{archive} is larger than {ARCHIVE_LIMIT / 2**20:.0f} MiB", file=sys.stderr)
    return 1 if failures or size > ARCHIVE_LIMIT else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two widths in bf16; print JSON, write nothing")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="write an archive of Triton's cache for one --sm")
    parser.add_argument("--sm", type=int, nargs="+", default=list(tiles.GENERATIONS))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.cache:
        if len(args.sm) != 1:
            parser.error("--cache is for one GPU generation: give --sm 90, say")
        return write_cache(args.cache, args.sm[0], args.processes, everything(args.sm[0]))
    work = jobs(QUICK_SIZES if args.quick else ALL_SIZES, [torch.bfloat16], args.sm, not args.quick)
    if not args.quick:
        work |= jobs(QUICK_SIZES, [torch.float32], args.sm, True)
    rows = rows_of(work, args.processes)
    if args.quick:
        print(json.dumps(dict(rows=rows, problems=problems(rows))))
        return 0
    with open(TABLE, "w", newline="") as file:
        file.write(f"# kernels {cache.source_hash()}, triton {triton.__version__}; written by make codegen\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda r: (r["kernel"], r["sm"], r["dtype"], r["case"])))
    for problem in problems(rows):
        print(problem)
    print(f"{len(rows)} compilations, {len(problems(rows))} problems, {TABLE}")
    return 1 if problems(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
