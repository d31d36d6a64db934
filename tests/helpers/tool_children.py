"""What the processes that tests of the tools start do: here, both of pytest's programs find it."""

import importlib
import os
import signal
import time

import torch

from vitfast.kernels import launch, tiles
from vitfast.tools import doctor
from vitfast.tools.tune import user_table

CANDIDATE = tiles.to_record("linear_gelu_fwd", "GPU", "16", "64x96", tiles.config(16, 1, BLOCK_M=16))


def deadly(task) -> doctor.Result:
    """Work for the doctor that ends its own process."""
    if task[0] == "exits":
        os._exit(3)
    if task[0] == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    return doctor.Result(*task, 0.0, 0.0, True)


def dies(send, *_) -> None:
    """The tuner's worker, which ends in a candidate."""
    send("kept", "a")
    send("trying", CANDIDATE)
    os._exit(3)


def hangs(send, *_) -> None:
    signal.alarm(1)  # as the worker asks for before each candidate
    send("trying", None)
    send("trying", CANDIDATE)
    time.sleep(60)


def writes(path: str, name: str, count: int) -> None:
    """Puts `count` tiles of a GPU into a user's table."""
    os.environ["VITFAST_TILES"] = path
    for i in range(count):
        user_table.keep(tiles.to_record("x", name, "16", str(i), tiles.config(4, 2, BLOCK_M=16)))


def asks_for_bfloat16_twice() -> None:
    from vitfast import ops
    from vitfast.tools import interpreter

    x = torch.ones(1, 3, 3, 1, 16, dtype=torch.bfloat16)
    with ops.use_kernels("on"):
        try:
            ops.attention(x)
        except RuntimeError as error:
            print(error)
        interpreter.mend_bfloat16()
        interpreter.mend_bfloat16()  # the second time does nothing
        print(ops.attention(x).unique().tolist())


def reads_the_environment() -> None:
    import triton

    for value in ("", "0", "1", "true", "True", "false", "off", "on", "no", "2"):
        os.environ["TRITON_INTERPRET"] = value
        print(importlib.reload(launch).INTERPRETED == triton.knobs.runtime.interpret)
