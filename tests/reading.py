"""Counts what a reader of an operation meets: our files in which one forward and backward run, and their lines.

    python tests/reading.py                  files and lines of every operation
    python tests/reading.py mlp_block        the files of one, and what runs in each

The operation runs in fp32 in Triton's interpreter, where kernels are Python too, with weights and biases and without
other options. It is its first call with such arguments: a plan would run the third. A file counts whole if one of its
functions runs, and not at all if it is only imported.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parent / "helpers"))

import torch
from operations import OPERATIONS, results

from vitfast import ops
from vitfast.tools.verify.draw import Draw

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {"layer_scale", "drop_path", "cos", "sin"}  # of `draw`; and attention's bias


def functions_run(name: str) -> dict[Path, set[str]]:
    """The functions that run, by our files, in one forward and backward of an operation of OPERATIONS in fp32."""
    operation, codes = OPERATIONS[name], set()
    tensors = operation.draw(Draw(torch.float32, torch.device("cpu")))
    left_out = OPTIONS | ({"bias"} if "cos" in tensors else set())
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    trained = [name for name in operation.trained if name in tensors]
    sys.setprofile(lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None)
    try:
        with ops.use_kernels("on"):
            results(operation.function, tensors, trained)
    finally:
        sys.setprofile(None)
    run = defaultdict(set)
    for code in codes:
        path = Path(code.co_filename).resolve()
        if path.is_relative_to(ROOT / "kernels") or path.is_relative_to(ROOT / "vitfast"):
            run[path].add(code.co_name)
    return run


def count_lines(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main(names: list[str]) -> None:
    for name in names or OPERATIONS:
        run = functions_run(name)
        print(f"{name:<24}{len(run):>3} files {count_lines(run):>6} lines")
        if names:
            for path, functions in sorted(run.items()):
                where = path.relative_to(ROOT)
                print(f"    {where!s:<42}{count_lines([path]):>5}  {', '.join(sorted(functions))}")


if __name__ == "__main__":
    main(sys.argv[1:])
