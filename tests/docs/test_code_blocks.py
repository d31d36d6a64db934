"""README.md and docs/: every block of Python runs, every command is one that the command line takes.

Python runs page by page, in order, in a temporary folder, on the CPU, with random weights in place of downloads.
"""

import argparse
import ast
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from doc_blocks import PAGES, ROOT, Block, blocks
from torch.distributed import run as torchrun
from wandb_file import history

from vitfast import cli, ops
from vitfast.kernels import tiles
from vitfast.ops.operation import Registered
from vitfast.train.log import read_metrics

LANGUAGES = ("python", "bash", "text")
PYTHON = [page for page in PAGES if any(block.language == "python" or block.mark == "run" for block in blocks(page))]
BASH = [block for page in PAGES for block in blocks(page) if block.language == "bash"]
NEEDING = [block for page in PYTHON for block in blocks(page) if block.mark == "needs"]
COMMANDS = [(block, command) for block in BASH for command in block.commands()]
# These run for seconds each: `make long` runs them, `make test` compiles them and runs their imports.
SLOW_TUTORIALS = ("embeddings", "from-scratch", "serving", "torchvision", "training-loops", "without-labels")
SLOW = {"README.md", *(f"docs/tutorials/{page}.md" for page in SLOW_TUTORIALS)}
PROGRAMS = ("pytest", "python", "sbatch")  # that a page may name, beside vitfast, make, pip and our own scripts


class _Parsed(Exception):
    """Carries what the command line made of its arguments, in place of running them."""


def parse(argv: list[str]) -> argparse.Namespace:
    """What `vitfast ARGV` is told. SystemExit where the command line does not take it."""
    real = argparse.ArgumentParser.parse_args

    def stop(self, *args, **kwargs):
        raise _Parsed(real(self, *args, **kwargs))

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), pytest.raises(_Parsed) as parsed:
        cli.main(argv)
    return parsed.value.args[0]


def words(command: str) -> list[str]:
    """The words of a command, without variables that are set before it and without what follows a pipe."""
    found = shlex.split(command, comments=True)
    while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
        found = found[1:]
    return found[: found.index("|")] if "|" in found else found


def vitfast_arguments(found: list[str]) -> list[str] | None:
    """What comes after `vitfast`, `python -m vitfast` or `torchrun ... -m vitfast`; None for other commands."""
    if found[0] == "vitfast":
        return found[1:]
    if found[0] in ("python", "torchrun") and "-m" in found and found[found.index("-m") + 1] == "vitfast":
        return found[found.index("-m") + 2 :]
    return None


def problem(found: list[str]) -> str:
    """What is wrong with a command that is not vitfast's; "" where nothing is."""
    program, arguments = found[0], [word for word in found[1:] if not word.startswith("-")]
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return "" if set(arguments) <= set(targets) else f"make has {targets}"
    if program == "pip":
        extras = set(re.findall(r"(?:\.|vitfast)\[([a-z,]+)\]", " ".join(found)))
        known = re.findall(r'^        "([a-z]+)": ', (ROOT / "setup.py").read_text(), flags=re.MULTILINE)
        return "" if {name for extra in extras for name in extra.split(",")} <= set(known) else f"extras: {known}"
    paths = [word.partition("::")[0] for word in found if word.startswith(("bench/", "tests/", "examples/"))]
    missing = [path for path in paths if not (ROOT / path).exists() and "results" not in path]
    if missing:
        return f"there is no {', '.join(missing)}"
    return "" if program in PROGRAMS or (ROOT / program).is_file() else f"{program} is not looked at by any test"


@pytest.fixture
def _no_downloads(monkeypatch):
    """Pretrained models come with random weights, those of Hugging Face with two layers."""
    import timm
    import torchvision
    from transformers import PreTrainedModel

    create, vit_b_16 = timm.create_model, torchvision.models.vit_b_16
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: create(*a, **{**k, "pretrained": False}))
    monkeypatch.setattr(torchvision.models, "vit_b_16", lambda weights=None, **k: vit_b_16(**k))

    def from_pretrained(cls, name, attn_implementation=None, **options):
        config = cls.config_class(num_hidden_layers=2, **options)
        return cls._from_config(config, attn_implementation=attn_implementation)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))


def execute(block: Block, file: Path, names: dict) -> str:
    """What the block prints. It runs from a file, at its line of the page: so tracebacks and Triton find the source."""
    file.write_text("\n" * (block.line - 1) + block.code)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(file.read_text(), str(file), "exec"), names)
    return printed.getvalue()


@contextmanager
def _leaving_nothing() -> Iterator[None]:
    """A page's operations, their configurations and its choice of kernels leave with it: other tests list them all."""
    with mock.patch.dict(Registered.all), mock.patch.dict(tiles.operations()), ops.use_kernels("auto"):
        yield


@pytest.mark.quick(1)
@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.long if p in SLOW else ()) for p in PYTHON])
def test_python_runs_and_so_do_the_commands_marked_to_run(page, tmp_path, monkeypatch, capsys, _no_downloads):
    monkeypatch.chdir(tmp_path)
    names, printed = {"__name__": "page"}, ""
    with _leaving_nothing():
        for number, block in enumerate(blocks(page)):
            if block.mark in ("not run", "needs"):
                compile(block.code, str(block), "exec")
            elif block.language == "python":
                printed = execute(block, tmp_path / f"block_{number}.py", names)
            elif block.mark == "output":
                assert printed == block.code, f"{block}: this is not what the block before it prints"
            elif block.mark == "run":
                for command in block.commands():
                    code = cli.main(vitfast_arguments(words(command)))
                    assert code == 0, f"{block}: {command}: {capsys.readouterr().err}"


@pytest.mark.long
@pytest.mark.parametrize("needing", NEEDING, ids=str)
def test_python_runs_where_the_library_that_it_needs_is_installed(needing, tmp_path, monkeypatch, _no_downloads):
    """After the blocks before it, of which some may need the same library."""
    library = pytest.importorskip(needing.reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = {"__name__": "page"}
    with _leaving_nothing():
        for block in blocks(needing.page):
            if block.language == "python" and (not block.mark or block.reason == needing.reason):
                execute(block, tmp_path / f"line_{block.line}.py", names)
            if block == needing:
                break
    if needing.reason == "wandb":
        library.teardown()  # its other process writes the file
        [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
        logged = [(row["_step"], name, row[name]) for row in history(file) for name in row if name[0] != "_"]
    elif needing.reason == "mlflow":
        [run] = library.search_runs(output_format="list")
        metrics = [library.MlflowClient().get_metric_history(run.info.run_id, name) for name in run.data.metrics]
        logged = [(point.step, point.key, point.value) for points in metrics for point in points]
    else:
        return
    rows = read_metrics(tmp_path / "runs" / needing.reason)
    written = [(row["step"], f"{row['split']}/{name}", row[name]) for row in rows for name in [*row][1:]]
    written = [one for one in written if one[2] is not None and not one[1].endswith("/split")]
    assert len(written) > 0 and sorted(logged) == sorted(written)


def test_every_block_compiles_and_finds_what_it_imports():
    for block in (block for page in PAGES for block in blocks(page) if block.language == "python"):
        tree = ast.parse(block.code, str(block))
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        compile(block.code, str(block), "exec")
        if block.mark not in ("not run", "needs"):
            exec(compile(tree, str(block), "exec"), {})


@pytest.mark.slow
def test_commands_are_ones_that_their_program_takes(capsys):
    for block, command in COMMANDS:
        found = words(command)
        arguments = vitfast_arguments(found)
        if arguments is None:
            assert not problem(found), f"{block}: {command}: {problem(found)}"
            continue
        try:
            if found[0] == "torchrun":
                torchrun.parse_args(found[1:])
            told = parse(arguments)
        except SystemExit:
            pytest.fail(f"{block}: {command}: {capsys.readouterr().err}")
        if told.command in ("pretrain", "finetune"):  # the recipe and every field of --set exist
            arguments.append("--print-config")
        if told.command in ("pretrain", "finetune", "recipes"):
            assert cli.main(arguments) == 0, f"{block}: {command}: {capsys.readouterr().err}"


def test_blocks_say_their_language_and_why_they_are_not_run():
    assert len(PAGES) > 20 and len(BASH) > 20 and len(PYTHON) > 10
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.language in LANGUAGES, f"{block}: language {block.language!r}"
        assert block.mark != "not run" or len(block.reason) > 10, f"{block}: not run without a reason"
        assert block.mark != "needs" or block.reason.isidentifier(), f"{block}: it needs {block.reason!r}"
        meant_for = {"run": "bash", "not run": "python", "needs": "python", "output": "text"}
        meant_for = meant_for.get(block.mark, block.language)
        assert block.language == meant_for, f"{block}: a block of {block.language} cannot be marked {block.mark!r}"
