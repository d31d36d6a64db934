"""How many processes read images, within the cores and the memory of this machine."""

import logging
import os
import signal
import threading
from multiprocessing import parent_process
from pathlib import Path

from ..errors import InputError
from ..run.config import Config
from ..run.distributed import Ranks

PREFETCH = 4  # batches that each process reads ahead
A_CORE = 4  # processes at most for each core: more wait for each other
DEFAULT = 8  # processes at most, where the settings name no number
logger = logging.getLogger("vitfast")


def loader_processes(
    config: Config, img_size: tuple[int, int], evaluated: int, ranks: Ranks, step_bytes: int | None = None
) -> int:
    """How many loader processes each rank has: by default 0 for data in memory, else one a core up to 8.

    `config.workers` is lowered, with a warning, to four for each core and to as many as half of the memory holds with
    the batches that they read ahead; ranks on one machine share both. Raises InputError for a batch that the memory
    does not hold. evaluated: how many images evaluations read. step_bytes: the bytes of a training step's images or of
    an evaluation's batch, which are computed from batch_size and eval_batch_size unless given.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    image, memory, cores = 3 * img_size[0] * img_size[1], total_memory() // here, len(os.sched_getaffinity(0))
    sizes = {"eval_batch_size": min(config.eval_batch_size, -(-evaluated // ranks.world)) * image}
    if config.task == "eval" and step_bytes:
        sizes = {"tokens_per_step": step_bytes}
    elif config.task != "eval":
        name = "tokens_per_step" if step_bytes and config.tokens_per_step else "batch_size"
        sizes[name] = -(-(step_bytes or config.batch_size * image) // ranks.world)
    name, largest = max(sizes.items(), key=lambda item: item[1])
    if 2 * largest > memory:  # the single images, and the batch that is made of them
        gib = f"{2 * largest / 2**30:,.1f} GiB while it is read, and there are {memory / 2**30:,.1f}"
        raise InputError(f"{name}={getattr(config, name)} is too large: a batch takes {gib}; lower it")
    by_cores, by_memory = max(1, A_CORE * cores // here), memory // 2 // max(1, PREFETCH * largest)
    if config.workers is None:
        return 0 if config.data in ("digits", "synthetic") else min(DEFAULT, max(1, cores // here), by_memory)
    allowed = min(config.workers, by_cores, by_memory)
    if allowed < config.workers:
        half = f"half of the memory holds no more of the {PREFETCH} batches that each reads ahead"
        why = half if by_memory < by_cores else f"at most {A_CORE} for each of {cores} cores"
        logger.warning("workers=%d is lowered to %d: %s", config.workers, allowed, why)
    return allowed


def leave_signals(worker: int) -> None:
    """Leaves Ctrl-C and SIGTERM to the main process, which ends its loader processes itself.

    Terminals and schedulers send both to every process of a run, which saves first. Python does not tell a handler who
    sent a signal, so that a thread waits for SIGTERM.
    """

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent_process().pid:
            pass
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=wait, daemon=True).start()


def total_memory() -> int:
    """Bytes of memory of this machine, or of the container that this process is in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return total
