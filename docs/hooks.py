"""Pages that `mkdocs build` completes: the help of every command, settings, arguments."""

import contextlib
import dataclasses
import io
import itertools
import os
import re
import runpy
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # this checkout's vitfast, wherever mkdocs is run from

from vitfast.cli import main  # noqa: E402
from vitfast.model.config import ViTConfig, check_of  # noqa: E402
from vitfast.run.config import FIELDS, RUN_ONLY, Config, values  # noqa: E402
from vitfast.version import __version__  # noqa: E402


def help_of(*argv: str) -> str:
    """What `vitfast ARGV --help` prints, without colours, each usage, option and meaning in one line."""
    saved, text = dict(os.environ), io.StringIO()
    os.environ.update(COLUMNS="10000", NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main([*argv, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(saved)
    return text.getvalue()


def names_in(text: str) -> list[str]:
    """The commands that a help lists."""
    return re.findall(r"^ {4}([a-z][a-z-]*)", text, flags=re.MULTILINE)


def commands() -> list[str]:
    """The names of the commands, in the order of `vitfast --help`."""
    return names_in(help_of())


OPTION = re.compile(r"^  (\S.*?)(?:\n {9,}| {2,})(\S.*)$", re.MULTILINE)  # the meaning may begin in the next line


def cell(text: str) -> str:
    """Text as a cell of a table takes it."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def command_as_markdown(name: str) -> str:
    """A section for a command: usage, description and a table of its arguments."""
    usage, about, options = help_of(*name.split()).split("\n\n", 2)
    rows = [f"| `{option}` | {cell(meaning)} |" for option, meaning in OPTION.findall(options)]
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows])
    return f"## vitfast {name}\n\n{about}\n\n```text\n{usage}\n```\n\n{table}\n"


def actions(command: str) -> list[str]:
    """The command, and the commands within it: "kernels", "kernels pack", ..."""
    return [command, *(f"{command} {name}" for name in names_in(help_of(command)))]


def commands_as_markdown() -> str:
    """A section for every command."""
    return "\n".join(command_as_markdown(name) for command in commands() for name in actions(command))


TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "none"}


def type_of(hint) -> str:
    """The type of a setting, in words."""
    if typing.get_origin(hint) is tuple:
        return "numbers" if ... in typing.get_args(hint) else "two numbers"
    options = typing.get_args(hint) or (hint,)
    return ", or ".join(TYPES[option] for option in options)


def shown(default) -> str:
    """A default as --set takes it."""
    if isinstance(default, tuple):
        return ",".join(f"{number:.4g}" for number in default)
    return default if isinstance(default, str) else str(default).lower()


# The headings of the settings' page, each above the field that begins its group.
GROUPS = {
    "name": "Model and length",
    "optimizer": "Optimiser",
    "objective": "Loss",
    "sizes": "Images of many sizes",
    "train_crop_mode": "Augmentation",
    "crop_mode": "How evaluations cut images",
    "dropout": "The model's parts",
    "task": "Data",
    "output": "Files, device and speed",
}


def settings_as_markdown() -> str:
    """A section for each group of a run's settings, with a table."""
    lines, hints = [], typing.get_type_hints(Config)
    for each in dataclasses.fields(Config):
        if each.name in GROUPS:
            lines += ["", f"## {GROUPS[each.name]}", "", "| setting | type | default | values | meaning |"]
            lines.append("|---|---|---|---|---|")
        default = f"`{shown(each.default)}`" if each.default not in ("", ()) else ""
        meaning = cell(each.metadata["meaning"])
        lines.append(f"| `{each.name}` | {type_of(hints[each.name])} | {default} | {cell(values(each))} | {meaning} |")
    return "\n".join(lines)


def free_settings() -> str:
    """The names of the settings that may change when a run continues."""
    return ", ".join(f"`{name}`" for name in FIELDS if name in RUN_ONLY)


def arguments_as_markdown() -> str:
    """A table of a ViT's arguments."""
    rows = ["| argument | default | values | meaning |", "|---|---|---|---|"]
    for f in dataclasses.fields(ViTConfig):
        cells = f"`{f.name}`", f"`{f.default!r}`", check_of(f).text, f.metadata["text"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


PLACES = {
    "<!-- the commands -->": commands_as_markdown,
    "<!-- the arguments -->": arguments_as_markdown,
    "<!-- the settings -->": settings_as_markdown,
    "<!-- the free settings -->": free_settings,
}


WIDE = 3  # columns of a table that becomes a list on a phone


def titled(table: re.Match) -> str:
    """A table whose cells have the titles of their columns, as stylesheets/site.css shows them on a phone."""
    titles = [re.sub(r"<.*?>", "", title) for title in re.findall(r"<th.*?>(.*?)</th>", table[0])]
    if len(titles) < WIDE:
        return table[0]
    columns = itertools.cycle(titles)
    return re.sub("<td", lambda _: f'<td data-title="{next(columns)}"', table[0])


def on_config(config):
    """mkdocs calls this once: every page has the version beside the name, and links the repository of this clone."""
    config.site_name += f" {__version__}"
    if address := runpy.run_path(str(Path(__file__).with_name("address.py")))["links"]().get("Source"):
        config.repo_url, config.repo_name = address, "/".join(address.split("/")[-2:])
    return config


def on_page_content(html: str, **_) -> str:
    """mkdocs calls this with every page after it is rendered: a picture links itself, as it is small on a phone."""
    html = re.sub(r'<img [^>]*src="([^"]+\.svg)"[^>]*>', r'<a href="\1">\g<0></a>', html)
    return re.sub(r"<table>.*?</table>", titled, html, flags=re.DOTALL)


def on_page_markdown(markdown: str, **_) -> str:
    """mkdocs calls this with every page before it is rendered."""
    return re.sub("|".join(PLACES), lambda place: PLACES[place[0]](), markdown)
