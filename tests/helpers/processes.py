"""Processes in milliseconds: children of a server that has imported torch, timm and vitfast once, not of pytest.

A child is a process like any other (signals, exit codes, gloo ranks), but what Python and Triton read when they start
is the server's: PYTHONPATH, the hash seed, TRITON_INTERPRET. Tests of these, and one of torchrun, start Python itself.
"""

import atexit
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile

import torch

# The server takes vitfast from where pytest has it, a copy with a planted bug perhaps, and not from the folder that it
# is started in.
os.environ["PYTHONSAFEPATH"] = "1"
SERVER = multiprocessing.get_context("forkserver")
PRELOAD = "pytest sklearn.datasets sklearn.model_selection torch.distributed.fsdp torch.utils.tensorboard"
SERVER.set_forkserver_preload([*PRELOAD.split(), "vitfast.train.trainer"])


class Child:
    """function(*args) in a process of its own, with the interface of subprocess.Popen.

    The function is found by its module's name.
    """

    def __init__(self, function, *args, **environment):
        self.files = [tempfile.NamedTemporaryFile("r+"), tempfile.NamedTemporaryFile("r+")]
        self.process = SERVER.Process(
            target=_run, args=([file.name for file in self.files], environment, function, args)
        )
        self.process.start()
        self.pid = self.process.pid
        atexit.register(self.process.kill)  # multiprocessing would wait for one that a failed test has left

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float = 180) -> tuple[str, str]:
        """Its (stdout, stderr), once it has ended."""
        self.process.join(timeout)
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.process.join()
            raise subprocess.TimeoutExpired(str(self.process), timeout, *(file.read() for file in self.files))
        return tuple(file.read() for file in self.files)


def _run(names, environment, function, args) -> None:
    for descriptor, name in enumerate(names, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.exit(function(*args))


def uninterpreted(*arguments, **environment) -> str:
    """What `python arguments` prints in a process that compiles kernels.

    environment: changes of it, None for what it is not to have.
    """
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": None, **environment}
    env = {name: value for name, value in found.items() if value is not None}
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


def command_line(argv: list[str]) -> int:
    """`vitfast ...` in a child."""
    from vitfast.cli import main

    sys.argv = ["vitfast", *argv]
    return main()


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def ranks(count: int, function, *args) -> list[Child]:
    """The function on gloo ranks of this machine, as torchrun starts them."""
    where = dict(MASTER_ADDR="localhost", MASTER_PORT=free_port(), WORLD_SIZE=str(count))
    return [Child(function, *args, RANK=str(rank), LOCAL_RANK=str(rank), **where) for rank in range(count)]


def done(processes: list, code: int = 0) -> list[str]:
    """The output of each process, once all have ended with this exit code."""
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), outputs
    return [out + err for out, err in outputs]
