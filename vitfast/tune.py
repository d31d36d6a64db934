"""Finds the fastest tiles on this very GPU: `python -m vitfast.tune`. Never runs by itself.

For every tile that a ViT of the given sizes uses, and for each rival of it (another provider: cuBLAS, tensor descriptors, another path of attention), the
neighbours are tried (each number doubled or halved, more or fewer warps and stages), one step at a time while it gets faster. A candidate whose
result is wrong against float64 is not timed. What is found goes into the user's own table (see kernels/tiles.py) at once, and the operations read it from
then on; a run that is interrupted keeps what it found.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator

import torch

from . import ops
from .doctor import Sizes, cases, examine, make, run
from .kernels import tiles
from .kernels.tiles import Tile

MODELS = {
    "S/16": Sizes(batch=256, tokens=197, width=384, heads=6, hidden=1536, image=224, patch=16),
    "B/16": Sizes(batch=128, tokens=197, width=768, heads=12, hidden=3072, image=224, patch=16),
    "B/16 384": Sizes(batch=32, tokens=577, width=768, heads=12, hidden=3072, image=384, patch=16),
    "L/16": Sizes(batch=64, tokens=197, width=1024, heads=16, hidden=4096, image=224, patch=16),
    "H/14": Sizes(batch=32, tokens=257, width=1280, heads=16, hidden=5120, image=224, patch=14),
}
LIMITS = {"num_warps": (1, 16), "num_stages": (1, 6)}  # of all other numbers: 1 to 512
GAIN = 0.99  # a candidate must take less than this share of the time of the best so far


def neighbours(tile: Tile) -> Iterator[Tile]:
    """Tiles one step away: one number doubled or halved (stages: one more or fewer). None where no kernel of ours would run."""
    if not tile.blocks:
        return
    numbers = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **dict(tile.blocks)}
    for name, value in numbers.items():
        low, high = LIMITS.get(name, (1, 512))
        for other in (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2):
            if value and low <= other <= high:
                if name in LIMITS:
                    yield dataclasses.replace(tile, **{name: other})
                else:
                    yield dataclasses.replace(tile, blocks=tuple(sorted({**dict(tile.blocks), name: other}.items())))


def climb(start: Tile, seconds: Callable[[Tile], float | None]) -> tuple[Tile, float]:
    """(best tile, its time) on the way up from `start`; `seconds` is None for a tile that is wrong or does not run, and so may be the start."""
    best, seen = start, {start}
    first = seconds(start)
    best_time = float("inf") if first is None else first
    improved = True
    while improved:
        improved = False
        for candidate in neighbours(best):
            if candidate in seen:
                continue
            seen.add(candidate)
            time = seconds(candidate)
            if time is not None and time < GAIN * best_time:
                best, best_time, improved = candidate, time, True
                break
    return best, best_time


def choose(starts: list[Tile], seconds: Callable[[Tile], float | None]) -> tuple[Tile, list[tuple[Tile, float]]]:
    """(best tile, [(tile, its time), ...]), climbing from each start; the first start's tile stays unless another is faster by more than noise."""
    reached = [climb(start, seconds) for start in starts]
    best, best_time = reached[0]
    for tile, time in reached[1:]:
        if time < GAIN * best_time:
            best, best_time = tile, time
    return best, reached


def measure(name: str, sizes: Sizes, small: Sizes, dtype: torch.dtype, op: str, shape: str, tile: Tile) -> float | None:
    """Milliseconds of one forward and backward of an operation with this tile, None where it fails or is wrong."""
    device = torch.device("cuda")
    with tiles.override(op, tile, shape):
        if not examine(name, *cases(small)[name], dtype, device, timed=False).passed:
            return None
        from triton.testing import do_bench

        function, inputs = cases(sizes)[name]
        generator = torch.Generator().manual_seed(0)
        tensors = make(inputs, dtype, device, generator)
        with ops.use_kernels("on"):
            upstream = [torch.randn_like(o) for o in run(function, tensors)]
            return do_bench(lambda: run(function, tensors, upstream), return_mode="median")


def tune(models: list[str], dtype: torch.dtype, only: str = "") -> Iterator[dict]:
    """Tunes every tile that these models use (whose operation's name contains `only`); yields a row for the user's table where another is faster."""
    gpu, device, done = torch.cuda.get_device_name(), torch.device("cuda"), set()
    for model in models:
        sizes = MODELS[model]
        small = dataclasses.replace(sizes, batch=2)
        for name in ("layer_norm", "attention", "linear_gelu", "patch_embed, uint8", "attention_block", "mlp_block"):
            with tiles.watching() as used:
                examine(name, *cases(small)[name], dtype, device, timed=False)
            for (op, bits, shape), start in used.items():
                if (op, bits, shape) in done or only not in op:
                    continue
                done.add((op, bits, shape))
                time = lambda t, n=name, s=sizes, m=small, o=op, k=shape: measure(n, s, m, dtype, o, k, t)  # noqa: E731
                like = torch.empty(0, dtype=torch.float32 if bits == "32" else dtype, device=device)
                before = time(start)
                best, reached = choose([start, *tiles.rivals(op, like, shape)], time)
                print(f"{model:<9} {op:<22} {shape:<14} {float('nan') if before is None else before:8.3f} ms as shipped", flush=True)
                for tile, after in reached:
                    print(f"{'':<47}{after:8.3f} {'**' if tile == best else '  '} {tile}", flush=True)
                if best != start:
                    yield tiles.as_row(op, gpu, bits, shape, best)


def keep(row: dict) -> None:
    """Puts a row into the user's table, in the place of one for the same operation, GPU, bits and shape class."""
    path, key = tiles.user_table_path(), ("op", "gpu", "bits", "shape")
    rows = json.loads(path.read_text())["tiles"] if path.is_file() else []
    rows = [r for r in rows if any(r[k] != row[k] for k in key)] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tiles": rows}, indent=1))
    new.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vitfast.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["B/16"], help="whose shapes (default B/16)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--only", default="", help="operations whose name contains this, such as attention")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("vitfast.tune: error: tuning measures times on a GPU, and there is none here", file=sys.stderr)
        return 2
    count = 0
    for row in tune(args.model, getattr(torch, args.dtype), args.only):
        keep(row)
        count += 1
    print(f"{count} tiles faster than the shipped ones, in {tiles.user_table_path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
