"""One process for each folder of results: a file says which one, on which machine."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InputError

LOCK = "vitfast.lock"
logger = logging.getLogger("vitfast")
_held: set[str] = set()  # the folders that this process holds: the system would let it lock the same file twice


@contextmanager
def locked(run: Path, name: str = LOCK) -> Iterator[None]:
    """Holds a folder, making it where there is none. Raises InputError where it is held already.

    name: the file's; processes with different names do not exclude each other. The system's lock on the file ends with
    its process, however that ends: a file that was left behind on this machine is taken over. That lock may not reach
    from one machine to another: there the content of the file decides.
    """
    run.mkdir(parents=True, exist_ok=True)
    path, key = run / name, os.path.realpath(run / name)
    if key in _held:
        raise InputError(f"{run} is in use by this process already; choose another --output")
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
        _take(path, file.fileno())
        _held.add(key)
        try:
            file.truncate(0)
            os.pwrite(file.fileno(), json.dumps(dict(host=socket.gethostname(), pid=os.getpid())).encode(), 0)
            yield
        finally:
            _held.discard(key)
            with suppress(OSError):  # on a disk that has become read-only the file stays, but not the lock
                if _is_same(path, file.fileno()):
                    path.unlink()


def _take(path: Path, handle: int) -> None:
    """Locks the open file. Raises InputError where it is held; logs that a file was left behind."""
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        host, pid = str(holder["host"]), int(holder["pid"])
    except (ValueError, TypeError, KeyError):  # the file names no holder
        host, pid = socket.gethostname(), None
    name = f"process {pid} on {host}" if pid else "another process"
    here = host == socket.gethostname()
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = _is_same(path, handle)  # else its owner removed the file after it was opened here
    except OSError as error:  # held, or on a file system that has no locks
        free = error.errno not in (errno.EACCES, errno.EAGAIN) and not (pid and here and _is_alive(pid))
    if not free or not here:
        advice = f"if that is not so, remove {path}, else" if free else "wait for it or"
        raise InputError(f"{path.parent} is in use by {name}; {advice} choose another --output")
    if pid:
        logger.info("took %s over from %s, which no longer runs", path.parent, name)


def _is_same(path: Path, handle: int) -> bool:
    """Whether the name still belongs to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
