"""`vitfast completion`: TAB in real shells, on a terminal."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("argcomplete")

STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(vitfast completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(vitfast completion zsh)"'),
}
CASES = [  # a line, and what TAB makes of it
    ("vitfast pretr", "vitfast pretrain "),
    ("vitfast cost --ef", "vitfast cost --efficiency "),
    ("vitfast cost --gpu H100-", "vitfast cost --gpu H100-PCIe "),
    ("vitfast cost --model DINOv3-7", "vitfast cost --model DINOv3-7B/16 "),
    ("vitfast kernels pack --model DINOv3-7", "vitfast kernels pack --model DINOv3-7B/16 "),
    ("vitfast pretrain --set weight_d", "vitfast pretrain --set weight_decay="),
    ("vitfast finetune --recipe finetune/ci", "vitfast finetune --recipe finetune/cifar10"),
    ("vitfast convert weights_of_", "vitfast convert weights_of_mine.npz "),
]


@pytest.fixture
def environment(tmp_path):
    """A folder on the path with the command `vitfast`, and the shells' environment; there is one file of weights."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "vitfast"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m vitfast "$@"\n')
    script.chmod(0o755)
    (tmp_path / "weights_of_mine.npz").touch()
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join((root, *sys.path))
    more = dict(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=path, HOME=str(tmp_path), TERM="dumb")
    return os.environ | more | dict(PS1="$ ", PROMPT="$ ", INPUTRC="/dev/null")


def read_until(terminal: int, wanted: str, seconds: float = 30.0) -> str:
    """What the terminal shows until `wanted` is in it; all of it where that never comes."""
    shown, end = "", time.monotonic() + seconds
    while wanted not in shown and (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            shown += os.read(terminal, 4096).decode().replace("\a", "")
    return shown


@pytest.mark.parametrize("shell", STARTS)
def test_tab_completes(shell, environment, tmp_path):
    command, setting = STARTS[shell]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{shell} is not installed")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe(command[0], command, environment)
    try:
        os.write(terminal, f"{setting}; echo re''ady\n".encode())
        assert "ready" in read_until(terminal, "ready\r")
        for line, wanted in CASES:
            os.write(terminal, f"{line}\t".encode())
            assert wanted in read_until(terminal, wanted), wanted
            os.write(terminal, b"\x15")  # clears the line
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(environment, tmp_path):
    for line, wanted in CASES:
        ask = ["fish", "-c", f"vitfast completion fish | source; complete -C '{line}'"]
        run = subprocess.run(ask, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert wanted.split()[-1] in run.stdout, (run.stdout, run.stderr)
