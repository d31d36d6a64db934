"""A GPU's stand-in: the CPU answers, at tiny sizes under real names.

    python tests/helpers/stand_in.py SOCKET CLIENT

starts a server that has imported everything, and writes CLIENT, a $PYTHON for bench/gpu.sh. CLIENT takes Python's
command line (-c, -m, a script) and runs it in a child that the server forks: the caller's process group, files, folder
and environment, so that signals reach it and its exit code comes back, but no seconds of imports.
In each child torch.cuda is a stand-in, and "kernels on" means plain PyTorch on the CPU. Nothing compiles, and no time
means anything; what runs is every line of Python around it. VITFAST_PLANT plants what can go wrong: "wrong" (our MLP
half is off by a tenth), "memory" (SDPA's efficient backend runs out of it).

As a pytest plugin (-p stand_in, in those children) it shrinks the sizes once the tests have been collected.
"""

import array
import atexit
import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BATCH, IMAGE = 3, 32

CLIENT = """#!{python} -SE
import array, json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child has it too, and decides
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = []
for fd in range(64):
    try:
        os.fstat(fd)
    except OSError:
        continue
    if fd != server.fileno():
        files.append(fd)
request = dict(argv=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ), group=os.getpgrp(), files=files)
text = json.dumps(request).encode()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
server.sendmsg([len(text).to_bytes(8, "little")], rights)
server.sendall(text)
code = int(server.recv(16) or b"-9")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


# ---- the server


def serve(address: str, client: str) -> None:
    """Forks a child for each client, and tells the client how it ended.

    A client that is gone takes its child along.
    """
    preload()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    Path(client).write_text(CLIENT.format(python=sys.executable, address=address))
    os.chmod(client, 0o755)
    children: dict[int, socket.socket] = {}
    parent = os.getppid()
    while os.getppid() == parent:  # the tests that started it are still there
        ready, _, _ = select.select([listener, *children.values()], [], [], 0.02)
        for pid, connection in list(children.items()):
            if connection in ready:  # it says nothing more: it is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                children.pop(pid).close()
        if listener in ready:
            connection, _ = listener.accept()
            request, files = receive(connection)
            pid = os.fork()
            if pid == 0:
                for other in (listener, connection, *children.values()):
                    other.close()
                os._exit(child(request, files, client))
            for file in files:
                os.close(file)
            children[pid] = connection
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """The request of a client, and the files that it has open."""
    header, rights, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(64 * struct.calcsize("i")))
    files = array.array("i")
    for _, _, data in rights:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    size, text = int.from_bytes(header, "little"), b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    return json.loads(text), list(files)


def child(request: dict, files: list[int], client: str) -> int:
    """The client's program, to its end; returns its exit code."""
    try:
        os.setpgid(0, request["group"])
    except (PermissionError, ProcessLookupError):  # the caller has been killed meanwhile
        return 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 200) for file in files]  # out of the way of the numbers that they get
    os.closerange(0, 200)
    for file, number in zip(moved, request["files"]):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = client
    multiprocessing.set_executable(client)
    plant(os.environ.get("VITFAST_PLANT", ""))
    try:
        code = python(request["argv"])
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def python(argv: list[str]) -> int:
    """What Python does with this command line."""
    while argv[0].startswith("-") and argv[0] not in ("-c", "-m"):
        argv = argv[1:]
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], os.getcwd()
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
    return 0


# ---- the GPU


class Event:
    def __init__(self, enable_timing: bool = False):
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return max(1e3 * (end.time - self.time), 1e-3)


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


class CUDAGraph:
    def replay(self) -> None:
        pass


@contextlib.contextmanager
def entered(thing):
    """torch.cuda.stream and torch.cuda.graph."""
    yield


NAME = "NVIDIA H100 80GB HBM3"
PROPERTIES = types.SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132, L2_cache_size=50 * 2**20
)


def preload() -> None:
    """Imports everything once, and puts the stand-ins where the GPU would be."""
    sys.path[1:1] = [str(ROOT), *(str(ROOT / folder) for folder in ("bench", "tests", "tests/helpers"))]
    import pytest_benchmark.plugin  # noqa: F401
    import timm.models.vision_transformer  # noqa: F401
    import torch
    import torch._dynamo
    import xdist.plugin  # noqa: F401

    torch.set_num_threads(1)
    used = itertools.count(2**30, 2**20)
    answers = dict(
        is_available=lambda: True,
        get_device_name=lambda *_: NAME,
        get_device_properties=lambda *_: PROPERTIES,
        get_device_capability=lambda *_: (9, 0),
        current_device=lambda: 0,
        is_bf16_supported=lambda *_: True,
        is_current_stream_capturing=lambda: False,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        current_stream=lambda *_: Stream(),
        mem_get_info=lambda *_: (2**36, 2**36),
        memory_allocated=lambda *_: 2**30,
        memory_reserved=lambda *_: 2**30,
        max_memory_allocated=lambda *_: next(used) + 2**30,
        reset_peak_memory_stats=lambda *_: None,
        _sleep=lambda cycles: None,
        Event=Event,
        Stream=Stream,
        CUDAGraph=CUDAGraph,
        stream=entered,
        graph=entered,
    )
    for name, answer in answers.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, answer)
    torch.compile = lambda function, **options: function
    for kind in ("accelerator", "cuda"):  # of torch 2.15, of 2.11
        setattr(torch.optim.Optimizer, f"_{kind}_graph_capture_health_check", lambda self: None)

    import clock

    clock.DEVICE, clock.ROUNDS, clock.WARMUP = torch.device("cpu"), 3, 1
    clock.WARM_SECONDS = clock.CASE_WARM_SECONDS = 0.0
    clock._flush_buffer = lambda: torch.empty(2, 0)

    import machine
    import packed_peers
    import peers
    import shapes

    from vitfast import doctor
    from vitfast.ops import _mode
    from vitfast.tune import command, trial

    shapes.Shape.name = property(lambda s: f"{s.model} {224 if s.image == IMAGE else s.image} B{s.batch}")
    runs = dict.fromkeys(("bfloat16", "float16", "float32"), (lambda: lambda: None, 1e9, 0.0))
    machine.ceiling_runs = lambda: {"copy": (lambda: lambda: None, 0.0, 1e9), **runs}
    for name in ("torch varlen", "flex compile", "flex max-autotune"):  # whose kernels are for GPUs alone
        packed_peers.PEERS[name] = packed_peers.nested
    peers.BACKENDS.update(dict.fromkeys(peers.BACKENDS, peers.SDPBackend.MATH))
    _mode._checked = lambda mode, checked=_mode._checked: "auto" if checked(mode) == "on" else mode
    doctor.device = lambda: torch.device("cpu")
    doctor.launches_made = itertools.count().__next__
    doctor.GPU_SIZES = doctor.SMALL_SIZES
    command.MODELS["B/16"] = doctor.SMALL_SIZES
    command.machine = lambda: (torch.device("cpu"), NAME, clock_of_the_tuner(), Compiler())
    trial.Trial.run = lambda self: self.problem.launcher.formula(*self.inputs)


class Compiler:
    """Compiles what the tuner's candidates launch in no time."""

    def __init__(self):
        self.compilations = 0

    def submit(self, launch) -> Future:
        self.compilations += 1
        future = Future()
        future.set_result((0, ""))
        return future

    def close(self) -> None:
        pass


def clock_of_the_tuner():
    """Its own, without the second in which it warms the GPU up."""
    import torch

    from vitfast.tune.trial import DeviceClock

    found = DeviceClock.__new__(DeviceClock)
    found.rounds, found.flushed = 3, torch.empty(2, 0)
    return found


def plant(what: str) -> None:
    """Faults, by name."""
    import torch

    if "wrong" in what:
        import vitfast.block
        import vitfast.model
        from vitfast import ops
        from vitfast.ops._mode import current_mode

        right = ops.mlp_block
        off = lambda *args, **options: right(*args, **options) * (1 if current_mode() == "off" else 1.1)  # noqa: E731
        ops.mlp_block = vitfast.block.mlp_block = off
    if "memory" in what:
        import peers

        def out_of_memory(*args):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 78 GiB")

        forced = peers.forced
        peers.forced = lambda f, backend: out_of_memory if backend == "efficient" else forced(f, backend)


# ---- the plugin


def pytest_collection_modifyitems(items):
    """Real names, tiny sizes: everything has been parametrised by now."""
    import pytest
    import torch

    from vitfast.presets import PRESETS

    for name in ("B/16", "H/14"):
        PRESETS[name].update(embed_dim=32, depth=2, num_heads=2)
    tiny = lambda shape: replace(shape, batch=min(shape.batch, BATCH), image=IMAGE)  # noqa: E731
    for name, module in list(sys.modules.items()):
        if name == "shapes":
            module.SHAPES.update({key: tiny(shape) for key, shape in module.SHAPES.items()})
        if name == "mixes":
            few = lambda mix: replace(mix, images=mix.images[:BATCH])  # noqa: E731
            module.MIXES.update({key: few(mix) for key, mix in module.MIXES.items()})
        if name == "bench_model":
            module.MODELS.update({key: tiny(shape) for key, shape in module.MODELS.items()})
            module.BATCHES = (2, BATCH)
        if name == "test_gpu":
            module.GPU = torch.device("cpu")
            small = dict(batch=2, tokens=5, width=32, heads=2, hidden=48, image=32, patch=16)
            module.SIZES.update({key: replace(s, **small) for key, s in module.SIZES.items()})
    for item in items:
        if "training_follows" in item.name:
            item.add_marker(pytest.mark.skip(reason="200 steps are too long for a rehearsal"))


if __name__ == "__main__":
    serve(*sys.argv[1:])
