"""The user's own table of launch configurations: $VITFAST_TILES, or ~/.cache/vitfast/tiles.json.

`vitfast tune` writes it (vitfast/tools/tune/user_table.py). Its entries come before the configurations in the code.
"""

import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

Config = TypeVar("Config")  # KernelConfig of tiles.py, which imports this file


def path() -> Path:
    """The path of the table, whether or not the file exists."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("VITFAST_TILES") or cache / "vitfast" / "tiles.json")


@functools.cache
def read(gpu: int, config_of: Callable[[dict], Config]) -> dict[tuple[str, str, str], Config]:
    """The table's entries for a GPU: (operation, shape class, bits) -> config_of(entry).

    Raises ValueError if the table is damaged.
    """
    if not path().is_file():
        return {}
    try:
        name, entries = torch.cuda.get_device_name(gpu), json.loads(path().read_text())["tiles"]
        return {(e["op"], e["shape"], e["bits"]): config_of(e) for e in entries if e["gpu"] == name}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the tile table {path()} is damaged ({error}); remove it") from None


def _wrong_number(row) -> str:
    """The first number of a configuration that no kernel runs with, as "BLOCK_M = 0", or ""."""
    for name, number in {"maxnreg": row.maxnreg, **row.meta}.items():
        whole = type(number) is int and number >= (0 if name in ("maxnreg", "AHEAD") else 1)
        power_of_two = name.startswith("BLOCK") or name in ("num_warps", "SUBTILES")
        if not whole or (power_of_two and number & (number - 1)):
            return f"{name} = {number!r}"
    return ""


@functools.cache
def fits(row, case: tuple, configs: tuple) -> bool:
    """Whether launchers take the configuration `row`, as they take `configs`; warns once if not."""
    form, *forms = ((each.provider, *dict(each.blocks)) for each in (row, *configs))
    if wrong := " ".join(form) if form not in forms else _wrong_number(row):
        text = f"{'{} at {}, {} bits,'.format(*case)} takes no {wrong}; run vitfast tune again, or remove the row"
        warnings.warn(f"the tile table {path()}: {text}", stacklevel=2)
    return not wrong
