"""Prints pip's constraints for the oldest versions that setup.py allows: `make oldest` installs those."""

import re
from pathlib import Path

SETUP = (Path(__file__).parent.parent / "setup.py").read_text()
LATER = {"setuptools", "mkdocs", "mkdocs-material"}  # build the package and the site; no test needs them to be old


def constraints() -> dict[str, str]:
    """torch -> 2.11.*, ...: the newest lower bound of each library, as the extras may ask for a later one."""
    found: dict[str, str] = {}
    for name, floor in re.findall(r'"([\w-]+)>=([\d.]+)', SETUP):
        found[name] = max(found.get(name, "0"), floor, key=lambda version: [*map(int, version.split("."))])
    return {name: f"{floor}.*" for name, floor in found.items() if name not in LATER}


if __name__ == "__main__":
    print(*(f"{name}=={version}" for name, version in constraints().items()), sep="\n")
    print("triton==3.6.*  # torch 2.11's own; its interpreter needs the NumPy of its time\nnumpy<2.4")
