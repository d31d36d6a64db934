"""The result files of a command, which only the same command replaces."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError
from .config import changes
from .distributed import is_first_rank
from .files import free_name, not_ours, write_atomically, write_text

logger = logging.getLogger("vitfast")


class Results:
    """The result files of a command in a folder, whose origin stands beside them in COMMAND.origin.json.

    The origin holds the settings and the SHA-256 of each file. A file that is as the command wrote it is replaced if
    the settings are the same, and renamed if not. Any other file raises InputError here, before the work begins.
    names: the names of all files that the command may write. Under torchrun only the first rank reads and writes.
    """

    def __init__(self, folder: Path, command: str, settings: dict, names: Iterable[str]):
        self.folder, self.origin = folder, folder / f"{command}.origin.json"
        self.settings, self.digests = json.loads(json.dumps(settings, default=str)), {}
        if not is_first_rank():
            return
        if os.path.lexists(folder) and not folder.is_dir():
            raise InputError(f"--output {folder} is a file; give a folder")
        before = {}
        try:
            content = json.loads(self.origin.read_text(encoding="utf-8"))
            before, self.digests = dict(content["settings"]), {k: list(v) for k, v in content["files"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise not_ours(self.origin, f"vitfast {command}") from None
        there = [path for path in (folder / name for name in names) if os.path.lexists(path)]
        for path in filter(self._is_foreign, there):
            raise not_ours(path, f"vitfast {command}")
        if there and (other := changes(before, self.settings)):
            logger.warning("%s has results of other settings (%s), which are kept", folder, "; ".join(other[:3]))
            self.digests = {}

    def _is_foreign(self, path: Path) -> bool:
        return not path.is_file() or _digest(path.read_bytes()) not in self.digests.get(path.name, ())

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a whole file. A file that is there but not from these settings gets another name."""
        if not is_first_rank():
            return
        path, content = self.folder / name, content.encode(errors="replace") if isinstance(content, str) else content
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and self._is_foreign(path):
            os.rename(path, kept := free_name(path))
            logger.warning("%s existed already; it was renamed to %s", path, kept.name)
        contents = {content, path.read_bytes() if path.exists() else content}
        self.digests[name] = sorted(map(_digest, contents))  # of both contents: a kill may come between the writes
        write_text(self.origin, json.dumps(dict(settings=self.settings, files=self.digests), indent=2) + "\n")
        write_atomically(path, lambda temporary: temporary.write_bytes(content))

    def remove(self, name: str) -> None:
        """Removes a file that the command wrote before and does not write now."""
        if is_first_rank() and name in self.digests and (self.folder / name).exists():
            (self.folder / name).unlink()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
