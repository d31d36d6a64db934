"""Compiles every kernel for every GPU generation without a GPU and reads the machine code: `make codegen`.

    python tests/codegen.py            writes tests/codegen.csv: registers, stack, shared memory, tensor-core instructions, programs per SM
    python tests/codegen.py --quick    the widths and head sizes that `make test` looks at, printed as JSON

Launchers run on meta tensors with their launches recorded, so what is compiled is exactly what a GPU would get. TRITON_INTERPRET must be unset.
"""

import argparse
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from vitfast.doctor import Sizes  # noqa: E402
from vitfast.kernels import attention, layer_norm, linear, mlp, patch_embed, tiles, weight_grad  # noqa: E402
from vitfast.kernels.launch import Launch, record  # noqa: E402

TABLE = Path(__file__).with_name("codegen.csv")
KERNELS = Path(tiles.__file__).parent
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COLUMNS = ("kernel", "case", "sm", "dtype", "tile", "warps", "stages", "registers", "stack", "spills", "shared", "tensor_core", "programs_per_sm")
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int64: "i64", torch.int32: "i32"}
SHARED_PER_SM = {80: 167_936, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
WARPS_PER_SM = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
ALIGNED = [["tt.divisibility", 16]]


def source_hash() -> str:
    """sha256 over the kernel sources: the table is stale when it differs."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def specialise(launch: Launch) -> tuple[dict, dict, dict, dict]:
    """(signature, constexprs, attributes, options) as Triton's launcher would make them from the arguments."""
    kernel, arguments = launch.kernel, dict(launch.arguments)
    options = {k: arguments.pop(k) for k in ("num_warps", "num_stages") if k in arguments} | {"enable_fp_fusion": True}
    signature, constants, attributes = {}, {}, {}

    def type_of(value, path: tuple):
        if isinstance(value, tuple):
            return tuple(type_of(element, (*path, i)) for i, element in enumerate(value))
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = ALIGNED
        if isinstance(value, torch.Tensor):
            return "*" + TYPES[value.dtype]
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        if isinstance(value, int):
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    for index, parameter in enumerate(kernel.params):
        value = arguments.get(parameter.name, parameter.default)
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            signature[parameter.name] = type_of(value, (index,))
    return signature, constants, attributes, options


class Driver:
    """Stands in the place of a GPU's driver: Triton's front end asks it for the target alone."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def front_end_problems(launches: list[Launch]) -> list[str]:
    """Where Triton's own launcher would compile something else than `specialise` says, or refuse an argument. Compiles nothing."""
    seen, found = [], []
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_cache_hook = lambda **details: seen.append(details["compile"]) or True  # True: go no further
    for launch in launches:
        signature, constants, attributes, options = specialise(launch)
        launch.kernel.warmup(grid=launch.grid, **(launch.arguments | options))
        theirs = seen.pop()
        same = theirs["signature"] == signature and {k: str(v) for k, v in theirs["constants"].items()} == {k: str(v) for k, v in constants.items()}
        if not same or {k: v for k, v in theirs["configs"][0].items() if v} != attributes:
            found.append(f"{launch.kernel.__name__}: Triton would compile {theirs}, not {signature} {constants} {attributes}")
    triton.knobs.runtime.jit_cache_hook = None
    return found


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(BIN / name), *arguments], capture_output=True, text=True, check=True).stdout


def inspect_cubin(cubin: bytes) -> dict:
    """Registers, stack bytes, local loads and stores, and the tensor-core instruction in the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        code = tool("nvdisasm", "-c", "-ndf", file.name)  # without its analysis of branches
    found = next((name for name in ("UTCHMMA", "HGMMA", "HMMA") if name in code), "")
    return dict(
        registers=int(re.search(r"REG:(\d+)", usage).group(1)),
        stack=int(re.search(r"STACK:(\d+)", usage).group(1)),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        tensor_core=found,
    )


def compile_launch(launch: Launch, sm: int) -> dict:
    """One row's measurements."""
    signature, constants, attributes, options = specialise(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    row = inspect_cubin(compiled.asm["cubin"])
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    by_registers = 65_536 // (-(-row["registers"] // 8) * 8 * 32 * warps)
    programs = min(by_registers, WARPS_PER_SM[sm] // warps, SHARED_PER_SM[sm] // (shared + 1024), 32)
    return row | dict(shared=shared, warps=warps, stages=compiled.metadata.num_stages, programs_per_sm=programs)


def launcher_calls(s: Sizes, dtype: torch.dtype, wide: bool) -> dict:
    """Name -> a call of every launcher at a model's shapes, on meta tensors; `wide` adds options that change the code (factors, fp32 stream, uint8)."""
    rows, d, f, head = s.batch * s.tokens, s.width, s.hidden, s.width // s.heads

    def t(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def vector(n: int = d) -> torch.Tensor:
        return t(n)

    x, wide_x, statistics = t(rows, d), t(rows, f), t(rows, dtype=torch.float32)
    qkv, o, lse = t(s.batch, s.tokens, 3, s.heads, head), t(s.batch, s.tokens, s.heads, head), t(s.batch, s.heads, s.tokens, dtype=torch.float32)
    drop, scale = t(s.batch, dtype=torch.float32), vector()
    images, grid = t(s.batch, 3, s.image, s.image), (s.image // s.patch) ** 2
    raw, embed = t(s.batch, 3, s.image, s.image, dtype=torch.uint8), (t(d, 3, s.patch, s.patch), vector(), t(1, 1, d), t(1, 1 + grid, d))
    tokens = t(s.batch, 1 + grid, d)
    wanted = dict(prefix=1, pos_len=1 + grid, want_images=True, want_weight=True, want_bias=True, want_cls=True, want_pos=True)
    calls = {
        "layer_norm": lambda: layer_norm.layer_norm_fwd(x, vector(), vector(), 1e-6),
        "layer_norm backward": lambda: layer_norm.layer_norm_bwd(x, x, vector(), vector(), statistics, statistics, dz=x, want_y=True),
        "attention": lambda: attention.attention_fwd(*qkv.unbind(2), 0.125),
        "attention backward": lambda: attention.attention_bwd(*qkv.unbind(2), o, lse, o, 0.125, want_bias_grad=True),
        "linear": lambda: linear.linear(x, t(3 * d, d), vector(3 * d)),
        "input gradient": lambda: linear.input_grad(t(rows, 3 * d), t(3 * d, d)),
        "linear + residual": lambda: linear.linear_residual(wide_x, t(d, f), vector(), x, None, None, s.tokens),
        "linear + gelu": lambda: mlp.linear_gelu(x, t(f, d), vector(f), "none", True),
        "dgelu": lambda: mlp.dgelu_matmul(x, t(d, f), wide_x, "none", True),
        "weight gradient": lambda: weight_grad.weight_grad(wide_x, x),
        "patch embedding": lambda: patch_embed.patch_embed_fwd(images, *embed, None, None),
        "patch embedding backward": lambda: patch_embed.patch_embed_bwd(tokens, images, embed[0], None, None, **wanted),
    }
    if wide:
        stream = t(rows, d, dtype=torch.float32)
        factors = dict(layer_scale=scale, drop_path=drop, rows_per_sample=s.tokens, want_layer_scale=True)
        calls |= {
            "add + layer_norm": lambda: layer_norm.add_layer_norm_fwd(x, x, vector(), vector(), 1e-6, scale, drop, s.tokens),
            "add + layer_norm backward": lambda: layer_norm.layer_norm_bwd(x, x, vector(), vector(), statistics, statistics, dz=x, branch=x, **factors),
            "scaled rows": lambda: layer_norm.scale_rows(x, None, drop, s.tokens),
            "linear + residual, factors, fp32 stream": lambda: linear.linear_residual(x, t(d, d), vector(), stream, scale, drop, s.tokens),
            "linear + gelu, tanh, inference": lambda: mlp.linear_gelu(x, t(f, d), vector(f), "tanh", False),
            "dgelu, tanh": lambda: mlp.dgelu_matmul(x, t(d, f), wide_x, "tanh", True),
            "gelu backward": lambda: mlp.gelu_bwd(wide_x, wide_x, "none", True),
            "weight gradient, layer scale": lambda: weight_grad.weight_grad_scaled(x, wide_x, t(d, f), vector(), scale, t(d, dtype=torch.float32), dtype),
            "patch embedding, uint8": lambda: patch_embed.patch_embed_fwd(raw, *embed, [0.5] * 3, [0.5] * 3),
            "patch embedding, uint8, backward": lambda: patch_embed.patch_embed_bwd(
                tokens, raw, embed[0], [0.5] * 3, [0.5] * 3, **(wanted | dict(want_images=False))
            ),
        }
    return {f"{name}{rival}": run for name, call in calls.items() for rival, run in with_rivals(call).items()}


def with_rivals(call) -> dict:
    """The call as it is, and once for each rival provider of an operation in it: " (tma)" and so on. What runs no kernel of ours is left out."""
    with tiles.watching() as used:
        runs = {"": call} if record(call) else {}
    for (op, bits, shape), _ in used.items():
        like = torch.empty(0, dtype=torch.float32 if bits == "32" else torch.bfloat16, device="meta")
        for rival in tiles.rivals(op, like, shape):
            if rival.provider != "cublas":

                def run(op=op, rival=rival, shape=shape):
                    with tiles.override(op, rival, shape):
                        call()

                runs[f" ({rival.provider})"] = run
    return runs


def jobs(sizes: dict[str, Sizes], dtypes, generations, wide: bool) -> dict[tuple, tuple]:
    """Distinct compilations: key -> (case, sm, dtype name, index of the launch within its call)."""
    found = {}
    for sm in generations:
        for model, s in sizes.items():
            for dtype in dtypes:
                with tiles.targeting(sm):
                    launches = [(case, *item) for case, call in launcher_calls(s, dtype, wide).items() for item in enumerate(record(call))]
                for case, index, launch in launches:
                    if not wide and model != "B/16" and "attention" not in case:
                        continue  # the quick look takes the second size for its head of 80 alone,
                    if not wide and case.endswith(")") and any(key[:2] == (sm, launch.kernel.__name__) for key in found):
                        continue  # and rivals only where nothing else compiles their kernel
                    signature, constants, attributes, options = specialise(launch)
                    key = (sm, launch.kernel.__name__, str(signature), str(constants), str(sorted(attributes)), str(options))
                    found.setdefault(key, (model, case, sm, dtype, index, wide))
    return found


def compile_job(job: tuple) -> dict:
    """One row of the table."""
    model, case, sm, dtype, index, wide = job
    with tiles.targeting(sm):
        launch = record(launcher_calls(ALL_SIZES[model], dtype, wide)[case])[index]
    blocks = {k: v for k, v in launch.arguments.items() if k.isupper() and isinstance(v, int) and not isinstance(v, bool)}
    named = " ".join(f"{k}={v}" for k, v in blocks.items() if k.startswith("BLOCK") or k in ("SUBTILES", "SPLIT_K", "STAGES", "PER_SM"))
    if "HEAD" in launch.arguments:
        named += " head={0.first}+{0.second}".format(launch.arguments["HEAD"])
    row = dict(kernel=launch.kernel.__name__, case=f"{model} {case}", sm=sm, dtype=TYPES[dtype], tile=named)
    try:
        return row | compile_launch(launch, sm)
    except Exception as error:  # the table says which tile does not compile
        return row | dict(
            registers=-1, stack=-1, spills=-1, shared=-1, tensor_core=f"{type(error).__name__}: {str(error)[:200]}", warps=0, stages=0, programs_per_sm=0
        )


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
}


def rows_of(work: dict[tuple, tuple], processes: int) -> list[dict]:
    """Compiles every job, several at a time."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(compile_job, work.values(), chunksize=4))


def committed() -> list[dict]:
    """The rows of the table."""
    with open(TABLE, newline="") as file:
        next(file)
        return [{k: v if k in ("kernel", "case", "dtype", "tile", "tensor_core") else int(v) for k, v in row.items()} for row in csv.DictReader(file)]


def problems(rows: list[dict]) -> list[str]:
    """What no shipped tile may do: not compile, spill in a 16-bit kernel, take too much shared memory, leave a 16-bit product to the scalar units."""
    found = []
    for r in rows:
        name = f"{r['kernel']} ({r['case']}) on sm_{r['sm']} {r['dtype']} {r['tile']}"
        if r["registers"] < 0:
            found.append(f"{name}: {r['tensor_core']}")
            continue
        if r["spills"] and r["dtype"] != "fp32":
            found.append(f"{name}: {r['spills']} local loads and stores")
        if r["shared"] > tiles.SHARED_LIMIT[r["sm"]]:
            found.append(f"{name}: {r['shared']} bytes of shared memory, limit {tiles.SHARED_LIMIT[r['sm']]}")
        if not r["tensor_core"] and r["dtype"] != "fp32" and any(word in r["kernel"] for word in PRODUCTS):
            found.append(f"{name}: no tensor-core instruction")
    return found


# Kernels whose work is a matrix product.
PRODUCTS = ("linear", "attention", "dgelu_matmul", "input_grad", "weight_grad_kernel", "patch_embed_fwd", "patch_embed_dweight_kernel", "patch_embed_dimages")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two widths in bf16; print JSON, write nothing")
    parser.add_argument("--sm", type=int, nargs="+", default=list(tiles.GENERATIONS))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    work = jobs(QUICK_SIZES if args.quick else ALL_SIZES, [torch.bfloat16], args.sm, not args.quick)
    if not args.quick:
        work |= jobs(QUICK_SIZES, [torch.float32], args.sm, True)
    rows = rows_of(work, args.processes)
    if args.quick:
        with tiles.targeting(90):
            launches = [launch for call in launcher_calls(QUICK_SIZES["Dh 80"], torch.bfloat16, True).values() for launch in record(call)]
        print(json.dumps(dict(rows=rows, problems=problems(rows) + front_end_problems(launches), launches=len(launches))))
        return 0
    with open(TABLE, "w", newline="") as file:
        file.write(f"# kernels {source_hash()}, triton {triton.__version__}; written by make codegen\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda r: (r["kernel"], r["sm"], r["dtype"], r["case"])))
    for problem in problems(rows):
        print(problem)
    print(f"{len(rows)} compilations, {len(problems(rows))} problems, {TABLE}")
    return 1 if problems(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
