"""Predicted times of every kernel and of whole steps on H100 and H200, by the port model: part of `make codegen`.

    python tests/predict.py
        writes tests/ports.csv (kernels at the presets' shapes: the ports, which binds, predicted time) and
        vitfast/cost/predicted.csv (predicted steps of the presets, which `vitfast cost` shows)
    python tests/predict.py --notes
        from these two files: the tables of bench/results/NOTES.md for the kernels as they are
    python tests/predict.py --tiles "linear + gelu" --preset B/16
        the shipped tile of an operation, its candidates and all tiles one step away, by predicted time

The model is vitfast/machine_code/ports.py. Nothing here was measured. TRITON_INTERPRET must be unset; what `make
codegen` has compiled before is not compiled again.
"""

import argparse
import csv
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import codegen
import torch
import triton
from meta_launches import META, launching_on_meta
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vitfast import ViT, cost
from vitfast.cost.predicted import STEPS, UPDATE
from vitfast.kernels import tiles
from vitfast.kernels.launch import Launch, recording
from vitfast.machine_code import compiler, ports
from vitfast.tune.search import neighbours
from vitfast.verify.draw import Draw
from vitfast.verify.launchers import launchers

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "tests" / "ports.csv"
PRESETS = {  # name of the sizes: preset, pixels
    "Ti/16": ("Ti/16", 224),
    "S/32": ("S/32", 224),
    "S/16": ("S/16", 224),
    "L/32": ("L/32", 224),
    "B/32": ("B/32", 224),
    "B/16": ("B/16", 224),
    "L/16": ("L/16", 224),
    "Dh 80": ("H/14", 224),
    "B/16 384": ("B/16", 384),
}
COLUMNS = ("preset", "case", "kernel", "tile", "programs", "resident", "waves")
COLUMNS += tuple(f"{port}_us" for port in ("tensor", "mufu", "issue", "shared", "l2", "hbm"))
COLUMNS += ("binds", "predicted_h100_us", "predicted_h200_us")
STEP_COLUMNS = (
    "preset",
    "img_size",
    "batch_size",
    "gpu",
    "direction",
    "width",
    "depth",
    "heads",
    "hidden",
    "tokens",
    "what",
    "times",
    "predicted_us",
)


def key_of(launch: Launch) -> str:
    """Launches with the same key do the same work."""

    def plain(value):
        if isinstance(value, tuple):
            return [plain(part) for part in value]
        value = getattr(value, "base", value)
        return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value

    return repr((launch.kernel.__name__, launch.grid, [(k, plain(v)) for k, v in launch.arguments.items()]))


def _work(job: tuple) -> ports.PortLoad | str:
    plain, tensors = job
    try:
        return ports.measure(plain.launch(), tensors)
    except Exception as error:  # the table says which kernel cannot be predicted, and why
        return f"{plain.kernel}: {type(error).__name__}: {error}"


def measured(launches: list[Launch], processes: int) -> dict[str, ports.PortLoad | str]:
    """The work of every distinct launch, or why nobody knows, by key_of."""
    distinct = {key_of(launch): (compiler.Job.of(launch), ports.views(launch)) for launch in launches}
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(distinct, pool.map(_work, distinct.values(), chunksize=2)))


# ---- kernels


def cases(sizes: str) -> list[tuple[str, Launch]]:
    """What each launcher launches at a preset's shape on sm_90, with its tile and with each candidate's."""
    with tiles.targeting(ports.SM):
        calls = codegen.launcher_calls(codegen.ALL_SIZES[sizes], torch.bfloat16, wide=False)
        return [(case, launch) for case, call in calls.items() for launch in codegen.record(call)]


def row(case: str, launch: Launch, work: ports.PortLoad | str) -> dict:
    """An entry of the table of kernels, without its preset."""
    found = dict(case=case, kernel=launch.kernel.__name__, tile=codegen.tile_name(launch))
    if isinstance(work, str):
        return found | dict(binds=work)
    predicted = {gpu.name: ports.predict(work, gpu) for gpu in ports.RATES}
    on_h100 = predicted["H100"]
    found |= dict(programs=work.programs, resident=work.resident, waves=f"{on_h100.waves:.2f}", binds=on_h100.binds)
    found |= {f"{port}_us": f"{1e6 * seconds:.1f}" for port, seconds in on_h100.ports.items()}
    return found | {f"predicted_{name.lower()}_us": f"{1e6 * p.total:.1f}" for name, p in predicted.items()}


# ---- steps


class Libraries(TorchDispatchMode):
    """Collects (name, FLOPs, bytes) of what PyTorch and cuBLAS run: every operation that is neither ours nor a view."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, float, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "vitfast":  # on meta tensors our launchers run; what they leave to libraries counts here
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        if func.overloadpacket not in flop_registry:
            with self:  # F.linear is addmm or mm inside
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        aliases = [x.alias_info for x in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        name, nothing = func._schema.name, ("empty", "detach", "_unsafe_view", "resize")
        if name.startswith("aten::") and not view and not any(word in name for word in nothing):
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
            moved = sum(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
            self.found.append((name, flops, moved))
        return out


def step(preset: str, image: int, batch: int, train: bool) -> tuple[list[Launch], list[tuple[str, float, int]]]:
    """(our launches, what libraries run) in a training step, or an inference, of a preset in bf16."""
    libraries = Libraries()
    with tiles.targeting(ports.SM), launching_on_meta():
        with torch.device("meta"):
            model = ViT.from_preset(preset, img_size=image).bfloat16().train(train)
        images = torch.empty(batch, 3, image, image, dtype=torch.bfloat16, device="meta")
        with recording() as launches, libraries, torch.set_grad_enabled(train):
            logits = model(images)
            if train:
                logits.backward(torch.empty_like(logits))
        return list(launches), libraries.found


def all_steps() -> dict[tuple, tuple]:
    """(preset, pixels, batch, whether it trains) -> what `step` returns."""
    batches = {(*PRESETS[sizes], codegen.ALL_SIZES[sizes].batch) for sizes in PRESETS}
    return {(*which, train): step(*which, train) for which in sorted(batches) for train in (False, True)}


def step_rows(recorded: dict[tuple, tuple], works: dict[str, ports.PortLoad | str]) -> list[dict]:
    """The table of steps: each whole, then by kernel; a step in which a kernel has no prediction is left out.

    The update is the optimiser's passes over its state (vitfast/cost).
    """
    rows = []
    for (preset, image, batch, train), (launches, libraries) in recorded.items():
        known = [(launch, works[key_of(launch)]) for launch in launches]
        if any(isinstance(work, str) for _, work in known):
            continue
        with torch.device("meta"):
            model = ViT.from_preset(preset, img_size=image)
        update = cost.optimizer_step(sum(p.numel() for p in model.parameters())).backward if train else ()
        for gpu in ports.RATES:
            seconds = Counter()
            for launch, work in known:
                seconds[launch.kernel.__name__] += ports.predict(work, gpu).total
            for name, flops, moved in [*libraries, *((UPDATE, *kernel) for kernel in update)]:
                seconds[name] += ports.library(flops, moved, gpu)
            times = Counter(launch.kernel.__name__ for launch in launches) + Counter(name for name, _, _ in libraries)
            total = sum(seconds.values())
            direction, block = "training" if train else "inference", model.blocks[0]
            about = dict(preset=preset, img_size=image, batch_size=batch, gpu=gpu.name, direction=direction)
            about |= dict(width=model.embed_dim, depth=len(model.blocks), heads=block.attn.num_heads)
            tokens = model.num_prefix_tokens + model.patch_embed.num_patches
            about |= dict(hidden=block.mlp.fc1.out_features, tokens=tokens)
            rows.append(about | dict(what="step", times=1, predicted_us=f"{1e6 * total:.1f}"))
            rows += [
                about | dict(what=name, times=times[name] or 1, predicted_us=f"{1e6 * s:.1f}")
                for name, s in seconds.most_common()
            ]
    return rows


# ---- files


def write(path: Path, rows: list[dict], columns: tuple[str, ...]) -> None:
    """A table whose first line says that it is predicted, and for which kernels."""
    with open(path, "w", newline="") as file:
        made = f"kernels {codegen.cache.source_hash()}, triton {triton.__version__}"
        file.write(f"# predicted, nothing in it was measured; {made}; written by make codegen\n")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict]:
    """The rows of such a table."""
    with open(path, newline="") as file:
        next(file)
        return list(csv.DictReader(file))


def notes() -> str:
    """The tables of bench/results/NOTES.md: what one training step of B/16 is made of, and every preset's steps."""
    rows = [r for r in read(STEPS) if (r["preset"], r["img_size"], r["direction"]) == ("B/16", "224", "training")]
    both = {r["what"]: {} for r in rows}
    for r in rows:
        both[r["what"]][r["gpu"]] = r
    lines = [
        "| B/16, batch 256, a training step | launches | predicted, H100, ms | predicted, H200, ms |",
        "|---|---|---|---|",
    ]
    for what, on in both.items():
        h100, h200 = (float(on[gpu]["predicted_us"]) / 1e3 for gpu in ("H100", "H200"))
        if h100 >= 0.1:
            lines.append(f"| {what} | {on['H100']['times']} | {h100:.2f} | {h200:.2f} |")
    lines += [
        "",
        "| preset, batch | predicted on | inference, images/s | training step, ms | training, images/s |",
        "|---|---|---|---|---|",
    ]
    whole = [r for r in read(STEPS) if r["what"] == "step"]
    of = lambda r: (r["preset"], r["img_size"], r["gpu"])  # noqa: E731
    inference = {of(r): float(r["predicted_us"]) / 1e6 for r in whole if r["direction"] == "inference"}
    for r in whole:
        if r["direction"] == "training":
            batch, seconds = int(r["batch_size"]), float(r["predicted_us"]) / 1e6
            name = r["preset"] + ("" if r["img_size"] == "224" else f" {r['img_size']} px")
            each = f"{batch / inference[of(r)]:,.0f} | {1e3 * seconds:.1f} | {batch / seconds:,.0f}"
            lines.append(f"| {name}, {batch} | {r['gpu']} | {each} |")
    return "\n".join(lines)


def order(operation: str, sizes: str, processes: int) -> str:
    """A launcher's shipped tiles, their candidates and the tiles one step away, by its whole predicted time."""
    tried: dict[str, tuple[list[Launch], list]] = {}
    launcher = launchers(codegen.ALL_SIZES[sizes])[operation]
    inputs = launcher.make(Draw(torch.bfloat16, META))
    with tiles.targeting(ports.SM):
        with tiles.watching() as used, recording():
            launcher.call(*inputs)
        for (op, _, shape), shipped in used.items():
            found = [shipped, *tiles.candidates(op, torch.empty(0, dtype=torch.bfloat16, device="meta"), shape)]
            for tile in dict.fromkeys([*found, *(near for start in found for near in neighbours(start))]):
                with tiles.override(op, tile, shape), recording() as launches, Libraries() as libraries:
                    launcher.call(*inputs)
                mark = "shipped" if tile == shipped else "other" if tile in found else ""
                numbers = " ".join(f"{k}={v}" for k, v in tile.meta.items())
                tried[f"{mark:<8}{op} {tile.provider} {numbers}"] = list(launches), libraries.found
    works = measured([launch for launches, _ in tried.values() for launch in launches], processes)
    entries = []
    for name, (launches, libraries) in tried.items():
        found = [works[key_of(launch)] for launch in launches]
        if any(isinstance(work, str) for work in found):
            continue  # it does not compile, does not fit, or cannot be followed
        predictions = [ports.predict(work, ports.H100) for work in found]
        total = sum(p.total for p in predictions)
        total += sum(ports.library(flops, moved, ports.H100) for _, flops, moved in libraries)
        # What binds is often the same for several tiles: then the one with the fewest instructions comes first.
        issue, binds = sum(p.ports["issue"] for p in predictions), " ".join(p.binds for p in predictions)
        entries.append((round(1e6 * total), issue, name, binds or "library"))
    lines = [f"{operation}, {sizes}, bf16, H100: predicted by the port model, not measured"]
    for total, issue, name, binds in sorted(entries):
        lines.append(f"predicted {total:5} us ({binds:>8}, issue {1e6 * issue:5.0f})  {name}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", action="store_true", help="print the tables of NOTES.md from what is written")
    parser.add_argument("--tiles", metavar="OPERATION", help='of launchers.py, such as "linear + gelu"')
    parser.add_argument("--preset", default="B/16", help=f"for --tiles: {' '.join(codegen.ALL_SIZES)} (default B/16)")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.notes or args.tiles:
        print(notes() if args.notes else order(args.tiles, args.preset, args.processes))
        return 0
    found, recorded = {sizes: cases(sizes) for sizes in PRESETS}, all_steps()
    launches = [launch for some in found.values() for _, launch in some]
    launches += [launch for some, _ in recorded.values() for launch in some]
    works = measured(launches, args.processes)
    rows = []
    for sizes, (preset, image) in PRESETS.items():
        name = preset if image == 224 else f"{preset} {image}"
        rows += [dict(preset=name) | row(case, launch, works[key_of(launch)]) for case, launch in found[sizes]]
    write(KERNELS, rows, COLUMNS)
    whole = step_rows(recorded, works)
    write(STEPS, whole, STEP_COLUMNS)
    problems = {work for work in works.values() if isinstance(work, str)}
    missing = len(recorded) * len(ports.RATES) - sum(row["what"] == "step" for row in whole)
    print(*sorted(problems), sep="\n", end="\n" if problems else "")
    steps = f"{len(whole)} rows of predicted steps, {missing} steps without"
    print(f"{len(rows)} predicted launches, {KERNELS}; {steps}, {STEPS}")
    return 1 if missing else 0  # a candidate may have no prediction, a step not


if __name__ == "__main__":
    sys.exit(main())
