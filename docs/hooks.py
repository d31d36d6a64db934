"""Pages that `mkdocs build` completes: the help of every command, and the arguments of a ViT."""

import contextlib
import dataclasses
import io
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # this checkout's vitfast, wherever mkdocs is run from

from vitfast.cli import main  # noqa: E402
from vitfast.model.config import ViTConfig  # noqa: E402


def help_of(*argv: str) -> str:
    """What `vitfast ARGV --help` prints, at most 100 columns wide and without colours."""
    saved, text = dict(os.environ), io.StringIO()
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main([*argv, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(saved)
    return text.getvalue()


def commands() -> list[str]:
    """The names of the commands, in the order of `vitfast --help`."""
    return re.findall(r"^ {4}([a-z]+)", help_of(), flags=re.MULTILINE)


def commands_as_markdown() -> str:
    """A section for every command."""
    return "\n".join(f"## vitfast {name}\n\n```text\n{help_of(name)}```\n" for name in commands())


def arguments_as_markdown() -> str:
    """A table of a ViT's arguments."""
    rows = ["| argument | default | values | meaning |", "|---|---|---|---|"]
    for f in dataclasses.fields(ViTConfig):
        cells = f"`{f.name}`", f"`{f.default!r}`", f.metadata["check"].text, f.metadata["text"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


PLACES = {
    "reference/command-line.md": ("<!-- the commands -->", commands_as_markdown),
    "reference/vit.md": ("<!-- the arguments -->", arguments_as_markdown),
}


def on_page_markdown(markdown: str, page, **_) -> str:
    """mkdocs calls this with every page before it is rendered."""
    place, written = PLACES.get(page.file.src_uri, ("", None))
    return markdown.replace(place, written()) if written else markdown
