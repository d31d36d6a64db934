"""Print the shell code that completes commands, flags and names with TAB."""

import argparse
import os
from collections.abc import Callable

SHELLS = {
    "bash": 'eval "$(vitfast completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(vitfast completion zsh)" in ~/.zshrc, after compinit',
    "fish": "vitfast completion fish | source in ~/.config/fish/config.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="; ".join(f"{k}: {v}" for k, v in SHELLS.items()))


def run(args: argparse.Namespace) -> None:
    import argcomplete

    print(argcomplete.shellcode(["vitfast"], shell=args.shell))


def asked() -> bool:
    """Whether the shell has started this process for what may come next on the command line."""
    return "_ARGCOMPLETE" in os.environ


def complete(parser: argparse.ArgumentParser, commands: dict[str, argparse.ArgumentParser]) -> None:
    """Answers the shell and ends the process."""
    import argcomplete

    for command in commands.values():
        groups = (each for each in command._actions if isinstance(each, argparse._SubParsersAction))
        parsers = [command, *(inner for each in groups for inner in each.choices.values())]
        for action in (each for one in parsers for each in one._actions):
            if action.dest in _NAMES and not action.choices:
                action.completer = _names(_NAMES[action.dest])
    argcomplete.autocomplete(parser, always_complete_options="long")


def _names(known: Callable[[], list[str]]) -> Callable:
    return lambda prefix, **_: [name for name in known() if name.startswith(prefix)]


def _recipes() -> list[str]:
    from ..train.recipes import RECIPES

    return list(RECIPES)


def _models() -> list[str]:
    from ..model.presets import PRESETS, RESNETS

    return [*PRESETS, *RESNETS]


def _gpus() -> list[str]:
    from ..tools.cost import GPUS

    return list(GPUS)


def _settings() -> list[str]:
    from ..run.config import FIELDS

    return [f"{name}=" for name in FIELDS]


_NAMES = {"recipe": _recipes, "model": _models, "gpu": _gpus, "set": _settings}
