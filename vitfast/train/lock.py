"""One process for each run folder: a file says which one, on which machine."""

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
_held: set[str] = set()  # the folders of this process, which the system would let lock the same file twice


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds the run folder, which is made where there is none.

    Raises InputError where another process holds it.

    The system's lock on the file ends with its process, however that ends: a file that was left behind on this machine
    is taken over. From one machine to another that lock may not reach, and what the file says decides.
    """
    run.mkdir(parents=True, exist_ok=True)
    path, key = run / LOCK, os.path.realpath(run)
    if key in _held:
        raise InputError(f"{run} is in use by this process already; choose another --output")
    if path.is_dir():
        raise InputError(f"{path} is a folder, and has to be a file; remove it")
    handle = _acquire(path)
    _held.add(key)
    try:
        yield
    finally:
        _held.discard(key)
        with suppress(OSError):  # on a disk that has become read-only the file stays, but not the lock
            if _is_same(path, handle):
                path.unlink()
        os.close(handle)


def _acquire(path: Path) -> int:
    """The file, open and locked, with this process in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            free, holder = _lock(handle), _read(handle)
            if _is_same(path, handle):
                _check(path, free, holder)
                try:
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(dict(host=socket.gethostname(), pid=os.getpid())).encode(), 0)
                except OSError:  # a full disk
                    path.unlink()
                    raise
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner removed the file between the two lines above


def _lock(handle: int) -> bool | None:
    """Whether the system's lock is this process's now; None on a file system that has none."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _check(path: Path, free: bool | None, holder: dict) -> None:
    """Raises InputError where the folder is held, and says so where it was left behind."""
    host, pid = holder.get("host"), holder.get("pid")
    name = f"process {pid} on {host}" if pid else "another process"
    here = host == socket.gethostname()
    if free is False or (free is None and here and _is_alive(pid)):
        raise InputError(f"{path.parent} is in use by {name}; wait for it or choose another --output")
    if pid and not here:
        gone = f"if that is not so, remove {path}"
        raise InputError(f"{path.parent} is in use by {name}; {gone}, else choose another --output")
    if pid:
        logger.info("took %s over from %s, which holds it no longer", path.parent, name)


def _read(handle: int) -> dict:
    """Host and process in a lock file; nothing where it does not say."""
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    whole = isinstance(holder, dict) and isinstance(holder.get("pid"), int) and isinstance(holder.get("host"), str)
    return holder if whole else {}


def _is_same(path: Path, handle: int) -> bool:
    """Whether the name still belongs to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
