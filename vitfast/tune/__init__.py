"""Finding the fastest tiles on the GPU at hand: `vitfast tune`. Never runs by itself.

Every tile that a training step or a single operation uses at a model's sizes is one problem. Its candidates are the
tile of the table, other providers (cuBLAS, tensor descriptors, another path of attention, the libraries that are
installed) and the neighbours of each (one number doubled or halved, more or fewer warps and stages), a wave at a time
for as long as that gets faster (search.py). A candidate is compiled in a process of its own while others are timed
(machine_code/compiler.py), then compared with float64 at the size that is timed (one that is wrong gets no time; a
provider of tiles.UNCHECKED is compared many times, at a larger size too), then timed: its launcher alone, the caches
flushed (trial.py). What is faster, and still is when both are tried once more, goes into the user's own table
(user_table.py) at once, and the operations use it from then on (tuner.py); a run that is interrupted keeps what it
found, and the next one goes on from there (command.py).
"""

from .command import tune

__all__ = ["tune"]
