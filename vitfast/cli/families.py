"""Show what accelerate or the compile backend replaces in each family of models, and the errors."""

import argparse
import dataclasses
import json
from collections.abc import Callable

from .options import add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    libraries = "timm, transformers, torchvision, torch or open_clip (default: all)"
    parser.add_argument("--library", metavar="NAME", default=None, help=libraries)
    parser.add_argument(
        "--compile", action="store_true", default=False, help="check the backend of torch.compile, on more encoders"
    )
    add_shared(parser, "--device", default=None)
    add_shared(parser, "--json", help="print a list of objects")
    parser.add_argument("--markdown", action="store_true", default=False, help="print the tables of the documentation")


def run(args: argparse.Namespace) -> int:
    import torch

    from ..adapters.families import FAMILIES
    from ..tools.encoders import ENCODERS
    from ..tools.families import cover, installed, judge

    known, judged, told, table = FAMILIES, judge, _replaced, markdown
    if args.compile:
        known, judged, told, table = ENCODERS, cover, _covered, coverage_markdown
    device, rows = args.device or ("cuda" if torch.cuda.is_available() else "cpu"), []
    for family in installed(known, args.library):
        row = judged(family, device)
        rows.append(row)
        if not (args.json or args.markdown):
            left = f"\n    left: {_counts(row.left)}" if row.left else ""
            print(f"{row.library} {row.family}: {row.failure or told(row) + left}", flush=True)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) | dict(right=row.right) for row in rows], indent=2))
    elif args.markdown:
        print(table(rows))
    else:
        wrong = ", ".join(f"{row.library} {row.family}" for row in rows if not row.right) or "none"
        where = "kernels ran" if device == "cuda" else "plain PyTorch ran: kernels need a GPU"
        print(f"{len(rows)} families on {device} ({where}); wrong: {wrong}")
        if args.compile:
            print(_total(rows))
    return 0 if all(row.right for row in rows) else 1


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _replaced(row) -> str:
    """The operations of a model that was accelerated, and its errors."""
    errors = f"error {row.logits:.0e} of the output, {row.gradients:.0e} of the gradients"
    return f"{_counts(row.operations)}; {errors}"


def _covered(row) -> str:
    """The blocks that the backend replaced, and the error."""
    done = [f"{a} of {b} {name} blocks" for (a, b), name in ((row.attention, "attention"), (row.mlp, "MLP")) if b]
    return f"{', '.join([*done, _counts(row.besides)])}; error {row.error:.0e}"


def _total(rows) -> str:
    """How many of the halves that have the operations' mathematics are replaced whole."""
    done, of = (sum(row.attention[i] + row.mlp[i] for row in rows) for i in range(2))
    return f"{done} of {of} blocks that an operation could compute are replaced whole ({done / max(1, of):.1%})."


def _bound(error: float) -> str:
    """An error as a bound, so that it is the same on every machine."""
    return next((f"below {bound}" for bound in ("0.00001", "0.0001") if error < float(bound)), "wrong")


def _sections(columns: str, rows: list, cells: Callable[[object], list[str]]) -> str:
    """A section of Markdown for each library, with a table that has a row for each of its families.

    cells: the cells of a row after the family's name; where it failed, its failure is in each.
    """
    count, lines = columns.count("|"), []
    for library in dict.fromkeys(row.library for row in rows):
        lines += [f"### {library}", "", f"| {columns} |", "|" + "---|" * (count + 1)]
        for row in (row for row in rows if row.library == library):
            rest = [row.failure] * count if row.failure else cells(row)
            lines.append(f"| {' | '.join([row.family, *rest])} |")
        lines.append("")
    return "\n".join(lines[:-1])


def coverage_markdown(rows) -> str:
    """The second part of docs/reference/families.md."""

    def cells(row) -> list[str]:
        blocks = [f"{done} of {of}" if of else "" for done, of in (row.attention, row.mlp)]
        return [*blocks, _counts(row.besides), _bound(row.error), _counts(row.left)]

    columns = "encoder | attention blocks | MLP blocks | also replaced | error | the library's own code, and why"
    return f"{_sections(columns, rows, cells)}\n\n{_total(rows)}"


def markdown(rows) -> str:
    """The first part of docs/reference/families.md."""

    def cells(row) -> list[str]:
        return [_counts(row.operations), _bound(max(row.logits, row.gradients)), _counts(row.left)]

    return _sections("family | operations of a forward | error | the library's own code, and why", rows, cells)
