"""The signals that ask a run to stop: SIGTERM and Ctrl-C."""

import contextlib
import os
import signal
import sys


class Stopper:
    """Makes SIGTERM and the first Ctrl-C a request to stop after the step.

    The second Ctrl-C stops at once. This lasts until `stack` closes. told: whether this process confirms a request at
    once on standard error.
    """

    def __init__(self, stack: contextlib.ExitStack, told: bool):
        self.wanted, self.interrupted, self.told, self.hook = False, False, told, sys.unraisablehook
        with contextlib.suppress(ValueError):  # only the main thread may handle signals
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, self._stop))
            stack.callback(setattr, sys, "unraisablehook", self.hook)
            sys.unraisablehook = self._unraisable

    def _stop(self, number, frame):
        if self.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.told and (number == signal.SIGINT or not self.wanted):
            again = "; Ctrl-C again to stop now" if number == signal.SIGINT else ""
            # Not by `print`, which may be what the signal interrupted.
            os.write(2, f"\nvitfast: stopping after this step{again}\n".encode())
        self.wanted, self.interrupted = True, self.interrupted or number == signal.SIGINT

    def _unraisable(self, told):
        if told.exc_type is not KeyboardInterrupt:  # a second Ctrl-C while the loader processes end: Python drops it
            self.hook(told)
