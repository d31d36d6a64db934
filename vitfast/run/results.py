"""The result files of a command, which only the same command replaces."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import InputError, both_ends
from .distributed import is_first_rank
from .files import free_name, write_atomically, write_text

logger = logging.getLogger("vitfast")


class Results:
    """The result files of a command in a folder, and beside them COMMAND.origin.json: whose they are.

    That holds the settings and the SHA-256 of each file. A file is replaced where it is as the command wrote it with
    the same settings; with other settings it gets another name. Anything else is an InputError here, before the work
    begins. names: of all files that the command may write. Under torchrun the first rank alone looks and writes.
    """

    def __init__(self, folder: Path, command: str, settings: dict, names: Iterable[str]):
        self.folder, self.origin = folder, folder / f"{command}.origin.json"
        self.settings, self.digests = json.loads(json.dumps(settings, default=str)), {}
        if not is_first_rank():
            return
        if os.path.lexists(folder) and not folder.is_dir():
            raise InputError(f"--output {folder} is a file; give a folder")
        settings, self.digests = self._read()
        there = [folder / name for name in names if os.path.lexists(folder / name)]
        for path in there:
            if self._is_foreign(path):
                advice = "move it away, or choose another --output"
                raise InputError(f"{path} is damaged, or vitfast {command} did not write it; {advice}")
        if there and (changes := list(_changes(settings, self.settings))):
            logger.warning("%s has results of other settings (%s), which are kept", folder, "; ".join(changes[:3]))
            self.digests = {}

    def _read(self) -> tuple[dict, dict]:
        """The settings and the digests in the origin file."""
        try:
            content = json.loads(self.origin.read_text(encoding="utf-8"))
            return dict(content["settings"]), {name: list(known) for name, known in content["files"].items()}
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{self.origin} is damaged, or vitfast did not write it; move it away") from None

    def _is_foreign(self, path: Path) -> bool:
        return not path.is_file() or _digest(path.read_bytes()) not in self.digests.get(path.name, ())

    def write(self, name: str, content: str | bytes) -> None:
        """Puts a file in its place, whole. What is there, but from these settings, gets another name."""
        if not is_first_rank():
            return
        path, content = self.folder / name, content.encode(errors="replace") if isinstance(content, str) else content
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and self._is_foreign(path):
            os.rename(path, kept := free_name(path))
            logger.warning("%s was there; it is %s now", path, kept.name)
        contents = {content, path.read_bytes() if path.exists() else content}
        self.digests[name] = sorted(map(_digest, contents))  # of both: a kill may come between the two files
        write_text(self.origin, json.dumps(dict(settings=self.settings, files=self.digests), indent=2) + "\n")
        write_atomically(path, lambda temporary: temporary.write_bytes(content))

    def remove(self, name: str) -> None:
        """Removes a file that the command wrote before and has none of now."""
        if is_first_rank() and name in self.digests and (self.folder / name).exists():
            (self.folder / name).unlink()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _changes(before: dict, now: dict, inside: str = "") -> Iterator[str]:
    """The settings that differ, as text; those of a part under its name."""
    for name in dict.fromkeys((*before, *now)):
        a, b = before.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _changes(a, b, f"{inside}{name}.")
        elif a != b:
            yield f"{inside}{name}: {both_ends(str(a), 60)} there, {both_ends(str(b), 60)} now"
