"""Show what accelerate does to each family of models: parts, operations, errors against the library."""

import argparse
import dataclasses
import json

from .options import add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--library", metavar="NAME", default=None, help="timm, transformers, torchvision, torch or open_clip (all)"
    )
    add_shared(parser, "--device", default=None)
    add_shared(parser, "--json", help="as a list of objects")
    parser.add_argument("--markdown", action="store_true", default=False, help="as the table of the documentation")


def run(args: argparse.Namespace) -> int:
    import torch

    from ..tools.families import chosen, judge

    device, rows = args.device or ("cuda" if torch.cuda.is_available() else "cpu"), []
    for family in chosen(args.library):
        rows.append(judge(family, device))
        if not (args.json or args.markdown):
            print(_lines(rows[-1]), flush=True)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) | dict(right=row.right) for row in rows], indent=2))
    elif args.markdown:
        print(markdown(rows))
    else:
        wrong = ", ".join(f"{row.library} {row.family}" for row in rows if not row.right) or "none"
        where = "kernels ran" if device == "cuda" else "plain PyTorch ran: kernels need a GPU"
        print(f"{len(rows)} families on {device} ({where}); wrong: {wrong}")
    return 0 if all(row.right for row in rows) else 1


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _lines(row) -> str:
    head = f"{row.library} {row.family}"
    if row.failure:
        return f"{head}: {row.failure}"
    errors = f"error {row.logits:.0e} of the output, {row.gradients:.0e} of the gradients"
    left = f"\n    left: {_counts(row.left)}" if row.left else ""
    return f"{head}: {_counts(row.operations)}; {errors}{left}"


def markdown(rows) -> str:
    """The table of docs/reference/families.md; errors as bounds, so that it is the same on every machine."""
    columns = ("library", "family", "operations of a forward", "error", "the library's own code, and why")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        error = max(row.logits, row.gradients)
        bound = next((f"< {bound:.0e}" for bound in (1e-5, 1e-4) if error < bound), "wrong")
        cells = (row.library, row.family, _counts(row.operations), bound, _counts(row.left))
        lines.append("| " + " | ".join(row.failure or cell for cell in cells) + " |")
    return "\n".join(lines)
