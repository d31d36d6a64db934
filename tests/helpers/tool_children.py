"""What the processes that tests of the tools start do: here, both of pytest's programs find it."""

import importlib
import os
import signal

import torch

from vitfast.kernels import launch
from vitfast.tools import doctor


def deadly(task) -> doctor.Result:
    """Work for the doctor that ends its own process."""
    if task[0] == "exits":
        os._exit(3)
    if task[0] == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    return doctor.Result(*task, 0.0, 0.0, True)


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
