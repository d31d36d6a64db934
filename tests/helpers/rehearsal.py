"""Runs of bench/gpu.sh against stand_in.sh, which does nothing, or fails as it is told to."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


FIRST = "prepare smoke doctor train attention blocks norm_and_patches accelerate inference".split()


FIRST += ["gpu_tests", "attention_separate"]


HANG = "trap '' INT TERM; setsid sleep 300 & echo $! > $REHEARSAL/orphan; echo hangs; while :; do sleep 1; done"


ILLEGAL = "echo 'RuntimeError: CUDA error: an illegal memory access was encountered'; exit 1"


class Stage:
    """One run of bench/gpu.sh in a copy of its tree, and what came of it."""

    def __init__(self, folder: Path):
        self.folder, self.out, self.besides = folder, folder / "out", []
        for name in ("tree/bench", "tree/vitfast", "tree/kernels", "plan", "home", "tmp"):
            (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "bench" / "gpu.sh", folder / "tree" / "bench")
        steps = (ROOT / "bench" / "steps.sh").read_text()
        assert "sleep 0.2\n" in steps  # between two looks at a step: here most have ended by then
        (folder / "tree" / "bench" / "steps.sh").write_text(steps.replace("sleep 0.2\n", "sleep 0.03\n"))
        shutil.copy(ROOT / "tests" / "helpers" / "stand_in.sh", folder / "python")
        (folder / "python").chmod(0o755)
        (folder / "installed").write_text("vitfast is installed\n")
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("VITFAST_", "TRITON_", "XDG_", "PYTEST_"))
        }
        self.environment |= dict(PYTHON=str(folder / "python"), REAL_PYTHON=sys.executable, REHEARSAL=str(folder))
        self.environment |= dict(HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"))

    def plan(self, **steps: str) -> None:
        for name, text in steps.items():
            (self.folder / "plan" / name).write_text(text)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        command = ["bash", str(self.folder / "tree" / "bench" / "gpu.sh"), *arguments]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(command, env=self.environment | environment, **pipes)

    def run(self, stage: str, *options: str, **environment: str) -> int:
        """Its exit code.

        Whatever happened: OUT has two files, nothing is left in the temporary folder, or running.
        """
        start = time.monotonic()
        process = self.start(stage, str(self.out), *options, **environment)
        return self.end(process, start)

    def end(self, process: subprocess.Popen, start: float, patience: float = 60) -> int:
        self.text, _ = process.communicate(timeout=patience)
        self.took = time.monotonic() - start
        assert sorted(os.listdir(self.out)) == [*self.besides, "report.md", "results.tar.gz"]
        assert os.listdir(self.folder / "tmp") == []
        for line in (self.folder / "listings").read_text().splitlines():
            assert len(line.split()) <= 8
        assert left_running(self.folder) == []
        with tarfile.open(self.out / "results.tar.gz") as archive:
            self.files = {
                m.name.removeprefix("./"): archive.extractfile(m).read().decode() for m in archive if m.isfile()
            }
        return process.returncode

    @property
    def calls(self) -> dict[str, str]:
        """The arguments of each step's call, in order."""
        return dict(line.split("\t") for line in (self.folder / "calls").read_text().splitlines())

    def states(self, stage: str = "first") -> dict[str, str]:
        return {s["name"]: s["state"] for s in json.loads(self.files[f"steps_{stage}.json"])["steps"]}


def left_running(folder: Path) -> list[str]:
    """Processes whose environment has the rehearsal's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"REHEARSAL={folder}\0".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
        except OSError:  # it has ended, or is not ours
            continue
    return found
