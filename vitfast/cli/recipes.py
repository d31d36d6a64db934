"""List the recipes, or show one with all its settings."""

import argparse
import dataclasses
import json

from .options import add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="NAME", nargs="?", default=None)
    add_shared(parser, "--json", help="print a list of objects with every field")


def run(args: argparse.Namespace) -> None:
    from ..train.recipes import RECIPES, get

    if args.recipe:
        recipe = dataclasses.asdict(get(args.recipe))
        about = recipe.pop("about")
        lines = [about, *(f"  {k}: {v}" for k, v in recipe.items())]
        print(json.dumps(recipe | dict(about=about), indent=2) if args.json else "\n".join(lines))
    elif args.json:
        print(json.dumps([dataclasses.asdict(recipe) for recipe in RECIPES.values()], indent=2))
    else:
        for r in RECIPES.values():
            length = f"{r.steps} steps" if r.steps else f"{r.epochs:g} epochs"
            size = f"{r.img_size} px" if r.img_size else "any px"  # 0: the size of the weights
            sizes = f"{r.model:<8} {size:>7}  batch {r.batch_size:<5} {length:<12}"
            print(f"{r.name:<26} {sizes} {r.optimizer:<6} lr {r.lr:g}")
