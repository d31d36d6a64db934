"""Pages, forms and docstrings name nothing that is gone: no module, file, command, flag, target or variable."""

import ast
import contextlib
import functools
import io
import pkgutil
import re

import pytest
from doc_blocks import PAGES, ROOT

from vitfast import cli

PLACES = (
    ".github/**/*.md",
    ".github/**/*.yml",
    "bench/results/**/*.md",
    "examples/*.md",
    "*.md",
    "*.cff",
    "mkdocs.yml",
)
CODE = [
    path
    for folder in ("vitfast", "kernels", "bench", "examples", "docs", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
FILES = {"/" + str(path.relative_to(ROOT)) for path in CODE}
TARGETS = {*re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)}
FOLDERS = r"(?:vitfast|kernels|tests|bench|docs|examples|\.github|\.ci)"
# Files of a run, of the example in "How to add a kernel", of timm and of the paper's authors.
ELSEWHERE = re.compile(
    r"vitfast\.lock|bench/cache|.*(squared_relu|NAME|input_pipeline|data_loader|vit_\w*i\w*1k)\.py|train\.py"
)
FORMER = re.compile(r"`[\w./]+`(?:, which| at) commit \w+")  # what the history keeps


@functools.cache
def texts() -> dict[str, str]:
    """The pages and forms, and the docstrings of each file but the tests."""
    paths = {str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place)}
    found = {name: FORMER.sub("", (ROOT / name).read_text()) for name in (*PAGES, *paths)}
    for path in (path for path in CODE if path.relative_to(ROOT).parts[0] != "tests"):
        nodes = ast.walk(ast.parse(path.read_text()))
        named = [node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        found[str(path.relative_to(ROOT))] = "\n".join(filter(None, map(ast.get_docstring, named)))
    return found


@functools.cache
def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@functools.cache
def options(command: str) -> set[str] | None:
    """The flags of a command and of the commands within it; None where there is no such command."""
    if command not in cli.COMMANDS:
        return None
    found, todo = set(), [[command]]
    for argv in todo:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            cli.main([*argv, "--help"])
        found |= {*re.findall(r"--[a-z][\w-]*", text.getvalue())}
        todo += [[*argv, name] for name in re.findall(r"^ {4}([a-z][a-z-]*)", text.getvalue(), re.MULTILINE)]
    return found


def gone_names(text: str) -> set[str]:
    """`vitfast.backend.report`, `from vitfast import ViT`, `ops.attention`."""
    found = re.findall(r"(?<![\w./@-])vitfast(?:\.[A-Za-z_]\w*)+(?![\w/])", text)
    found += [f"vitfast.{name}" for name in re.findall(r"`((?:ops|ref)\.(?!py\b)\w+)", text)]
    for module, names in re.findall(r"from (vitfast[\w.]*) import ([\w, ]+)", text):
        found += [f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip()]
    return {name for name in found if not ELSEWHERE.fullmatch(name) and not is_there(name)}


def gone_files(text: str) -> set[str]:
    """`tests/codegen.csv`, or in any place a file of Python by its name."""
    found = re.findall(rf"(?<![\w./<>*-])({FOLDERS}/[\w./-]*\w)", text)
    missing = {path for path in found if not (ROOT / path).exists() and not (ROOT / "docs" / path).exists()}
    named = {path for path in re.findall(r"(?<![\w/.<>*-])([\w/]+\.py)\b", text) if not (ROOT / path).exists()}
    missing |= {path for path in named if not any(file.endswith(f"/{path}") for file in FILES)}
    return {path for path in missing if not ELSEWHERE.match(path)}


def gone_commands(text: str) -> set[str]:
    """`vitfast doctor --json`, `bench/gpu.sh decide`, `make test`; and `VITFAST_KERNELS`."""
    lines = re.findall(r"`vitfast ([a-z][^`]*)`|^\s*vitfast ([a-z-]+ .*--.*)$", text, re.MULTILINE)
    wrong = set()
    for command, *words in ("".join(line).split() for line in lines):
        flags = {word for word in words if re.match(r"--[a-z]", word)}
        if options(command) is None or flags - options(command):
            wrong.add(" ".join(["vitfast", command, *words]))
    named = [word for line in re.findall(r"`make ([a-z ]+)`", text) for word in line.split()]
    wrong |= {f"make {word}" for word in named if word not in TARGETS}
    stages = re.findall(r"(?:^ *|`)bench/gpu\.sh ([a-z]+)(?=`|$| OUT| --)", text, re.MULTILINE)
    wrong |= {f"gpu.sh {stage}" for stage in stages if stage != "decide"}
    return wrong | ({*re.findall(r"\bVITFAST_[A-Z_]+\b", text)} - variables())


@functools.cache
def variables() -> set[str]:
    """Those that the code reads: in quotes in Python, and in scripts after a $."""
    read = [path.read_text() for path in CODE if path.relative_to(ROOT).parts[0] != "tests"]
    read += [(ROOT / name).read_text() for name in ("Makefile", "bench/gpu.sh")]
    return {name for source in read for name in re.findall(r"(?:[\"']|\$\{?)(VITFAST_[A-Z_]+)", source)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("gone", [gone_names, gone_files, gone_commands])
def test_nothing_that_is_named_is_gone(gone):
    wrong = {name: sorted(gone(text)) for name, text in texts().items()}
    assert not {name: missing for name, missing in wrong.items() if missing}


def test_what_is_gone_is_found():
    assert gone_names("`vitfast.MOVED`, vitfast.ops.attention, ::: vitfast.ops.mlp.nothing") == {
        "vitfast.MOVED",
        "vitfast.ops.mlp.nothing",
    }
    assert gone_names("from vitfast import ViT, verify; `ops.sdpa`") == {"vitfast.verify", "vitfast.ops.sdpa"}
    assert gone_files("`vitfast/tools/nothing.py`, tests/codegen.csv, bench/counting.txt, layers.py, rows_of.py") == {
        "vitfast/tools/nothing.py",
        "bench/counting.txt",
        "rows_of.py",
    }
    text = "`vitfast families`, `vitfast doctor\n--json --times`, `make test slow tea`, VITFAST_KERNELS, VITFAST_TEA"
    assert gone_commands(f"{text}\n    vitfast tune --deterministic\n    bench/gpu.sh ceilings OUT") == {
        "vitfast families",
        "vitfast doctor --json --times",
        "vitfast tune --deterministic",
        "gpu.sh ceilings",
        "make tea",
        "VITFAST_TEA",
    }
