"""Finds the fastest tiles on the GPU at hand: `vitfast tune`. It never runs by itself.

Every tile that a training step uses at a model's sizes is one problem. Its candidates are the table's tile, those of
other providers (cuBLAS, cuBLASLt, tensor descriptors) and the neighbours of each, a wave at a time for as long as that
gets faster (search.py). Each candidate is compiled in a process of its own while others are timed
(machine_code/compiler.py), compared with float64 at the size that is timed, and timed from cold caches
(verify/clock.py). A candidate that is faster, and still is when both are tried once more, goes into the user's table
(user_table.py) at once (tuner.py); an interrupted run keeps it, and the next run goes on from there (command.py).
"""

from .command import tune

__all__ = ["tune"]
