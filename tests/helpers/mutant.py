"""Copies of the kernels with one bug each, for the sanitizer to find; mutants.py lists the bugs."""

import contextlib
import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


NUMBERS = "wrong numbers"


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` where it first occurs in a file of kernels/; the launcher `name` shows `kind`.

    Of kind NUMBERS it gives no finding but wrong results, where the plan reaches what is wrong.
    silent: all results stay right, so that no test of numbers sees the bug.
    """

    what: str
    file: str
    old: str
    new: str
    name: str
    kind: str
    silent: bool = False

    @contextlib.contextmanager
    def made(self, folder: Path) -> Iterator[ModuleType]:
        """edges.py on a copy of the kernels in `folder` that has the bug."""
        package = "mutant_" + re.sub(r"\W+", "_", self.what)
        copy = folder / package
        shutil.copytree(ROOT / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        # What edges.py needs beside the kernels: copied too, so that it imports the copy's kernels.
        verify = copy / "tools" / "verify"
        shutil.copytree(ROOT / "vitfast" / "tools" / "verify", verify, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("ops/reference.py", "ops/packed.py", "model/presets.py", "errors.py"):
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / "vitfast" / name, copy / name)
        of_the_copy = re.compile(r"^from (?:vitfast\.|(?=every_launcher|layouts))", re.MULTILINE)
        for name in ("edges.py", "every_launcher.py", "layouts.py"):
            text = (ROOT / "tests" / "tools" / "verify" / name).read_text()
            (copy / name).write_text(of_the_copy.sub("from .", text))
        path = copy / "kernels" / self.file
        text = path.read_text()
        assert self.old in text, f"{self.what}: {self.file} has changed"
        path.write_text(text.replace(self.old, self.new, 1))
        sys.path.insert(0, str(folder))
        try:
            yield importlib.import_module(f"{package}.edges")
        finally:
            sys.path.remove(str(folder))
            for module in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[module]


def listed(bugs: str) -> Iterator[tuple[str, list[str], str, str]]:
    """(the comment above it, the fields of its first line, the text, what that becomes) of each bug in a list."""
    kind, lines = "", [line for line in bugs.splitlines() if line]
    while lines:
        if lines[0].startswith("# "):
            kind = lines.pop(0)[2:]
        fields = lines.pop(0).split(" | ")
        old, new = (lines.pop(0)[2:].replace("\\n", "\n") for _ in range(2))
        yield kind, fields, old, new
