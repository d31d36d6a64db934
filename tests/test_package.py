"""The package as users get it, a core that needs the core dependencies only, and the order of its parts."""

import ast
import functools
import graphlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A wheel and an sdist built from a copy of the tracked sources."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    files = "setup.py pyproject.toml README.md LICENSE CHANGELOG.md MANIFEST.in Makefile mkdocs.yml"
    for name in (*files.split(), ".src", "vitfast", "kernels", "bench", "tests", "docs", "examples"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    script = "from setuptools import build_meta as b; b.build_wheel('..'); b.build_sdist('..')"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    script = "from setuptools import build_meta as b; b.build_editable('../editable')"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(dist):
    """Runs Python with the wheel and what it depends on: an editable install of the checkout is not on the path.

    The interpreter below a virtual environment does not read the .pth files there.
    """
    site, environment = str(dist / "site"), {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site]
    subprocess.run([*install, str(next(dist.glob("*.whl")))], check=True)
    environment["PYTHONPATH"] = os.pathsep.join([site, sysconfig.get_paths()["purelib"]])

    def run(folder: Path, *arguments: str, **changes: str) -> str:
        """What the run in this folder prints."""
        command = [getattr(sys, "_base_executable", sys.executable), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment | changes, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()

    run.site = site
    return run


@pytest.mark.slow
def test_wheel_works_in_a_clean_environment(dist, installed, tmp_path):
    wheel = next(dist.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    inits = [*(ROOT / "vitfast").rglob("__init__.py"), *(ROOT / "kernels").rglob("__init__.py")]
    packages = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in inits}
    packages = {f"vitfast.{name}" if name.startswith("kernels") else name for name in packages}
    for package in packages:
        assert f"{package.replace('.', '/')}/__init__.py" in names, package
    more = {"kernels/libraries/cublaslt.cpp", "py.typed", "tools/cost/measured.csv", "_bench/gpu.sh"}
    assert {f"vitfast/{name}" for name in more} <= {*names} and len({*names}) == len(names)
    assert not any(name.startswith(("kernels/", "tests/", "bench/")) for name in names)
    script = """
import sys, torch, triton, safetensors.torch
before = set(sys.modules)
import vitfast, vitfast.kernels
assert vitfast.__file__.startswith(sys.argv[1]) and vitfast.kernels.__file__.startswith(sys.argv[1]), vitfast.__file__
model = vitfast.ViT(img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3, num_classes=5)
print(tuple(model(torch.zeros(2, 3, 32, 32)).shape))
extras = "timm torchvision transformers matplotlib sklearn yaml tqdm huggingface_hub tensorboard"
optional = set(extras.split()) & (set(sys.modules) - before)
assert not optional, f"the core imports {optional}"
"""
    assert installed(tmp_path, "-c", script, installed.site) == "(2, 5)"


@pytest.mark.slow
def test_commands_of_the_wheel_need_nothing_of_the_checkout(installed, tmp_path):
    """Every module, every command's help, and what `doctor` checks on this machine."""
    script = """
import importlib, pkgutil, sys
import vitfast
from vitfast import cli
for module in pkgutil.walk_packages(vitfast.__path__, "vitfast."):
    if "vitfast._bench" not in module.name and not module.name.endswith("__main__"):  # scripts
        importlib.import_module(module.name)
for command in cli.COMMANDS:
    try:
        cli.main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
ours = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
assert not [file for file in ours if file.startswith(tuple(sys.argv[2:]))] and vitfast.__file__.startswith(sys.argv[1])
"""
    checkout = [f"{ROOT / name}/" for name in (".src", "vitfast", "kernels", "bench", "tests")]
    installed(tmp_path, "-c", script, installed.site, *checkout)
    said = installed(tmp_path, "-m", "vitfast", "doctor", "--untimed", "--dtype", "float16")
    assert said.endswith("29 of 29 passed"), said


@pytest.mark.slow
def test_an_editable_install_is_a_folder_that_type_checkers_read(dist):
    """It puts a folder on the path, with the package alone: `kernels` is another's name."""
    archive = zipfile.ZipFile(next((dist / "editable").glob("*.whl")))
    folder = Path(archive.read(next(name for name in archive.namelist() if name.endswith(".pth"))).decode().strip())
    assert [path.name for path in folder.iterdir() if path.suffix != ".egg-info"] == ["vitfast"]
    script = "import vitfast.kernels.launch, vitfast.data.resize; print(vitfast.__file__)"
    python = [sys.executable, "-S", "-c", f"import sys; sys.path += {[str(folder), *sys.path]!r}; {script}"]
    run = subprocess.run(python, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}, cwd=dist)
    assert run.stdout.strip() == str(folder / "vitfast/__init__.py") and (folder / "vitfast/py.typed").exists(), run


@pytest.mark.slow
def test_sdist_holds_the_kernels_and_the_documentation(dist):
    names = tarfile.open(next(dist.glob("*.tar.gz"))).getnames()
    assert not any("vitfast/kernels" in name or "/.src/" in name for name in names)
    held = "kernels/__init__.py kernels/libraries/cublaslt.cpp vitfast/py.typed docs/images/mlp.svg mkdocs.yml"
    for path in held.split():
        assert any(name.endswith(f"/{path}") for name in names), path


@pytest.mark.long
def test_tests_and_benchmarks_run_from_an_unpacked_sdist(dist, tmp_path):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    root, site = next(tmp_path.iterdir()), tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*install, str(root)], check=True, capture_output=True)
    pytest_ = str(Path(sys.executable).with_name("pytest"))  # python -m pytest would put the folder itself on the path
    few = "layer_norm and (kernels_match_float64 or bench_ops)"  # these run; every file is read
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | dict(PYTHONPATH=str(site))
    command = [pytest_, "-q", "tests", "bench", "-k", few]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and re.search(r"\d\d passed", run.stdout), run.stdout[-2000:] + run.stderr


@pytest.mark.long
def test_report_gpu_rehearses_from_an_installed_wheel(installed, tmp_path):
    command = "-m vitfast report-gpu --rehearse --output out".split()
    installed(tmp_path, *command, VITFAST_SECONDS="6000")
    with tarfile.open(next((tmp_path / "out").glob("*.tar.gz"))) as archive:
        read = lambda name: json.load(archive.extractfile(name))  # noqa: E731
        assert {step["state"] for step in read("steps_decide.json")["steps"]} == {"ok"}
        assert read("manifest.json")["commit"] is None and len(read("backend_train_bf16.json")["benchmarks"]) == 4


@pytest.mark.slow
def test_metadata_has_the_extras(dist):
    archive = zipfile.ZipFile(next(dist.glob("*.whl")))
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata or "License: Apache-2.0" in metadata
    for extra in ("train", "bench", "native", "docs", "lint", "test", "all"):
        assert f"Provides-Extra: {extra}" in metadata
    core = {
        line.split(":")[1].strip().split(">")[0].split(";")[0].strip()
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra" not in line
    }
    assert core == {"torch", "triton", "numpy", "safetensors"}


# From the ground up: a file imports only from floors below its own, and from its own room.
FLOORS = (
    {"errors", "version", "kernels"},
    {"ops", "run"},
    {"model", "ref"},
    {"backend", "data"},
    {"adapters"},
    {"eval", "tools"},
    {"train"},
    {"experiments", "timm_models"},
    {"cli"},
    {"__init__", "__main__"},  # the public names, and the program: nothing below imports them
)


@functools.cache
def modules() -> dict[str, Path]:
    """The files of the package and of the benchmarks by their modules."""
    return {**_modules("vitfast", "vitfast"), **_modules("kernels", "vitfast.kernels"), **_modules("bench", "")}


def _modules(folder: str, package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        names = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
        found[".".join(name for name in names if name not in ("", "__init__"))] = path
    return found


@functools.cache
def named(module: str) -> dict[str, str]:
    """The full names of what a file imports, inside functions too, by the names that it gives them."""
    path, package, found = modules()[module], module.split("."), {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + (path.name == "__init__.py") - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
            homes = {base, *(f"{base}.{alias.name}" for alias in node.names)}
            assert not node.level or homes & modules().keys(), f"{module} imports {homes}"
    return found


def imports() -> dict[str, set[str]]:
    """The modules that each file imports: "vitfast.train.step" -> {"vitfast.model.vit", ...}."""
    paths, found = modules(), {}
    for name in paths:
        homes = {full if full in paths else full.rpartition(".")[0] for full in named(name).values()}
        found[name] = {home for home in homes if home in paths and home != name}
    return found


def room(module: str) -> str:
    """The folder or file of vitfast/ that a module lies in; "bench" for the benchmarks."""
    if module == "vitfast":
        return "__init__"
    return module.split(".")[1] if module.startswith("vitfast.") else "bench"


@pytest.mark.slow
def test_imports_go_down_the_floors():
    heights = {place: i for i, floor in enumerate(FLOORS) for place in floor} | {"bench": len(FLOORS)}
    found = {(a, b) for a, targets in imports().items() for b in targets}
    arrows = {(room(a), room(b)) for a, b in found if room(a) != room(b)}
    assert {name for arrow in arrows for name in arrow} == heights.keys() and len(heights) <= 19
    assert not {(a, b) for a, b in found if room(a) != room(b) and heights[room(a)] <= heights[room(b)]}
    assert len([arrow for arrow in arrows if "__init__" not in arrow]) <= 71, arrows
    assert {room(b) for a, b in found if room(a) == "kernels"} == {"kernels"}


@pytest.mark.slow
def test_no_room_uses_a_private_name_of_another_one():
    """No private file, nothing that a file defines for itself, no such attribute. A family of kernels is a room."""
    place = lambda name: name.split(".")[1 : 3 if ".kernels." in name else 2]  # noqa: E731
    wrong = []
    for name, path in modules().items():
        given = named(name)
        tree = ast.walk(ast.parse(path.read_text()))
        nodes = [n for n in tree if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        taken = [f"{given[n.value.id]}.{n.attr}" for n in nodes if given.get(n.value.id) in modules()]
        private = [full for full in (*given.values(), *taken) if re.match(r"vitfast\..*\b_(?!_)", full)]
        wrong += [f"{name}: {full}" for full in private if place(full) != place(name)]
    assert not wrong


def test_names_say_what_a_thing_is():
    """Not how it was obtained, where kernels, operations, models and the backend are written."""
    files = [path for name, path in modules().items() if room(name) in ("kernels", "ops", "model", "backend")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    names = {getattr(node, field, None) for node in nodes for field in ("id", "arg", "attr", "name")}
    assert len(files) > 80 and not names & {"found", "own", "given", "told", "made", "asked", "known"}


def test_an_operation_is_read_in_one_sitting():
    """The files in which it runs from the call to the kernel and back, in a process that nothing else has used."""
    limits = {"layer_norm": (8, 1900), "mlp_block": (13, 3000)}
    command = [sys.executable, ROOT / "tests" / "reading.py", *limits]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    totals = [line.split() for line in lines if not line.startswith(" ")]
    assert [name for name, *_ in totals] == list(limits)
    for name, files, _, count, _ in totals:
        assert int(files) <= limits[name][0] and int(count) <= limits[name][1], lines


@pytest.mark.slow
def test_the_reference_has_a_public_name():
    """It is the module itself, not a copy."""
    ways = (
        "import vitfast.ref as one; from vitfast import ref as two; import vitfast; from vitfast.ops import reference"
    )
    subprocess.run([sys.executable, "-c", f"{ways}; assert one is two is vitfast.ref is reference"], check=True)


def test_what_users_install_imports_nothing_of_the_tests():
    tools = {path.stem for path in sources("tests")} - {"conftest"}
    for path in sources("vitfast", "kernels", "bench"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        assert not {name.partition(".")[0] for name in named} & {*tools, "tests"}, path


def test_no_files_import_each_other_in_a_circle():
    try:
        list(graphlib.TopologicalSorter(imports()).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def sources(*folders: str) -> list[Path]:
    return [
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts
    ]


def test_no_file_is_longer_than_one_reads_in_one_sitting():
    lines = {str(path): path.read_text().splitlines() for path in sources("vitfast", "kernels", "bench", "tests")}
    assert not {path: len(of) for path, of in lines.items() if len(of) > 400}
    assert not {path: wide for path, of in lines.items() if (wide := [line for line in of if len(line) > 120])}


def test_no_function_is_longer_than_a_screen_or_two():
    wrong = []
    for path in sources("vitfast", "kernels", "bench"):
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        lengths = [(node.name, node.end_lineno - node.lineno + 1) for node in functions]
        wrong += [f"{path.relative_to(ROOT)}: {name}, {length}" for name, length in lengths if length > 80]
    assert not wrong


@pytest.mark.slow
def test_docstrings_say_in_one_short_line_what_a_thing_is():
    wrong = []
    for path in sources("vitfast", "kernels", "bench"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                first = text.splitlines()[0]
                if len(first) >= 100 or first.startswith("What "):
                    wrong.append(f"{path.relative_to(ROOT)}: {first}")
    assert not wrong
