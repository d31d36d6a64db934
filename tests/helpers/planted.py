"""Bugs that the tests are to find in a copy of the package: planted.txt lists them by the exact text of the sources.

Each has three lines: its name, its file, and what finds it; then the text, and what that becomes where it first occurs,
with \\n for the end of a line. A comment names the kind of those below it. A test in tests/ finds most: it fails. In
kernels/ the sanitizer finds those that name a launcher, in the plan of edges; those of the kind "wrong numbers" show in
the results alone. Of those marked "silent" all results stay right, so that no test of numbers sees them.
"""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = "wrong numbers"
# What edges.py in tests/tools/verify needs beside the kernels, and its files: a copy imports the copy's kernels.
_EDGES = ("edges.py", "every_launcher.py", "layouts.py")
_OF_THE_COPY = re.compile(r"^from (?:vitfast\.|(?=every_launcher|layouts))", re.MULTILINE)
_BESIDE = ("tools/verify", "ops/reference.py", "ops/checks.py", "ops/packed.py", "model/presets.py", "errors.py")


@dataclass(frozen=True)
class Planted:
    """`old` becomes `new` where it first occurs in a file of kernels/ or of vitfast/.

    name: the launcher that shows it, or the test that fails.
    """

    kind: str
    what: str
    file: str
    name: str
    silent: bool
    old: str
    new: str

    @property
    def path(self) -> Path:
        return ROOT / ("" if self.file.startswith("kernels/") else "vitfast") / self.file

    def copied(self, package: Path, *parts: str) -> None:
        """Copies parts of vitfast, and the kernels, into a folder, with the bug."""
        for part in parts:
            source, target = ROOT / "vitfast" / part, package / part
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        shutil.copytree(ROOT / "kernels", package / "kernels", dirs_exist_ok=True)
        text = (package / self.file).read_text()
        assert self.old in text, f"{self.what}: {self.file} has changed"
        (package / self.file).write_text(text.replace(self.old, self.new, 1))

    @contextlib.contextmanager
    def made(self, folder: Path) -> Iterator[ModuleType]:
        """edges.py on a copy of the kernels in `folder`, beside the vitfast of this process."""
        package = "mutant_" + re.sub(r"\W+", "_", self.what)
        self.copied(folder / package, *_BESIDE)
        for name in _EDGES:
            text = (ROOT / "tests" / "tools" / "verify" / name).read_text()
            (folder / package / name).write_text(_OF_THE_COPY.sub("from .", text))
        sys.path.insert(0, str(folder))
        try:
            yield importlib.import_module(f"{package}.edges")
        finally:
            sys.path.remove(str(folder))
            for module in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[module]

    def run(self, folder: Path) -> subprocess.CompletedProcess:
        """The test, against a copy of the package in `folder`."""
        self.copied(folder / "vitfast", "")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment["PYTHONPATH"] = str(folder)  # before the installed package, as pytest's own program leaves it
        pytest = str(Path(sys.executable).with_name("pytest"))
        tests = (f"tests/{word}" if word.endswith(".py") else word for word in self.name.split())
        command = [pytest, "-q", "-x", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def listed(bugs: str) -> Iterator[Planted]:
    """The bugs of a list."""
    kind, lines = "", [line for line in bugs.splitlines() if line]
    while lines:
        if lines[0].startswith("# "):
            kind = lines.pop(0)[2:]
        what, file, name, *silent = lines.pop(0).split(" | ")
        old, new = (lines.pop(0)[2:].replace("\\n", "\n") for _ in range(2))
        yield Planted(kind, what, file, name, bool(silent), old, new)


PLANTED = list(listed(Path(__file__).with_suffix(".txt").read_text()))
MUTANTS = [bug for bug in PLANTED if ".py" not in bug.name]  # for the sanitizer
