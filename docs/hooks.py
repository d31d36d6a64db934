"""What `mkdocs build` writes itself: the help of every command, as the command line prints it."""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # this checkout's vitfast, wherever mkdocs is run from

from vitfast.cli import main  # noqa: E402

PAGE, PLACE = "reference/command-line.md", "<!-- the commands -->"


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


def as_markdown() -> str:
    """A section for every command."""
    return "\n".join(f"## vitfast {name}\n\n```text\n{help_of(name)}```\n" for name in commands())


def on_page_markdown(markdown: str, page, **_) -> str:
    """mkdocs calls this with every page before it is rendered."""
    return markdown.replace(PLACE, as_markdown()) if page.file.src_uri == PAGE else markdown
