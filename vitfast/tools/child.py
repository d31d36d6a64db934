"""Runs functions in processes of their own, so that one that dies or hangs does no other harm."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..errors import InputError


class Lost(Exception):
    """A process that gave no result: "died with exit code 3", "took longer than 25 s".

    A function may raise it, with words of its own, where its process has become useless.
    """


class Children:
    """Processes forked from a server process, which has imported `module` and has touched no GPU.

    at_once: how many of those that are submitted run at a time.
    """

    def __init__(self, module: str, at_once: int = 1):
        self.threads = ThreadPoolExecutor(at_once)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([module])
        self.running: set = set()

    def run(self, seconds: float | None, function: Callable, *arguments, hear: Callable | None = None):
        """Returns function(*arguments), computed in a new process. Any thread may call this.

        hear: if given, the function gets a further first argument, `send`, and each `send(*what)` calls hear(*what)
        here. Raises an InputError or Lost that the function raises, and Lost where the process ends without a result
        or is silent for longer than `seconds`.
        """
        receiver, sender = self.context.Pipe(duplex=False)
        sends = hear is not None
        process = self.context.Process(target=_serve, args=(sender, sends, function, *arguments))
        process.daemon = not sends  # a daemon ends with its parent, but may not start processes of its own
        process.start()
        self.running.add(process)
        sender.close()  # only the process still holds this end, so that the pipe ends when it dies
        try:
            while True:
                if not receiver.poll(seconds):
                    raise Lost(f"took longer than {seconds} s")
                kind, value = receiver.recv()
                if kind == "result":
                    return value
                if kind == "error":
                    raise value
                hear(*value)
        except EOFError:
            process.join()
            code = process.exitcode
            how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
            raise Lost(f"died {how}") from None
        finally:
            self.running.discard(process)
            _end(process)
            process.join()

    def submit(self, *arguments) -> Future:
        """The future of `run`."""
        return self.threads.submit(self.run, *arguments)

    def close(self) -> None:
        """Drops the functions that have not begun, and ends the processes that run."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self.running):
            _end(process)


def _serve(connection, sends: bool, function: Callable, *arguments) -> None:
    os.setsid()  # processes that it starts, such as ptxas, then end with it, and Ctrl-C reaches its parent alone
    send = (lambda *what: connection.send(("sent", what)),) if sends else ()
    try:
        connection.send(("result", function(*send, *arguments)))
    except (InputError, Lost) as error:
        connection.send(("error", error))


def _end(process) -> None:
    """Kills a process and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
