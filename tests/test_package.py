"""The package as users get it: a wheel and an sdist that hold the kernels, and a core that needs the core dependencies only."""

import os
import subprocess
import sys
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
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "MANIFEST.in",
        "vitfast",
        "kernels",
    ):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    script = "from setuptools import build_meta as b; b.build_wheel('..'); b.build_sdist('..')"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    return folder


@pytest.mark.slow(6)
def test_wheel_works_in_a_clean_environment(dist, tmp_path):
    wheel = next(dist.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    packages = {
        str(path.parent.relative_to(ROOT)).replace("/", ".") for path in (ROOT / "vitfast").rglob("__init__.py")
    } | {"vitfast.kernels"}
    for package in packages:
        assert f"{package.replace('.', '/')}/__init__.py" in names, package
    assert "vitfast/kernels/cublaslt.cpp" in names
    assert not any(name.startswith(("kernels/", "tests/", "bench/")) for name in names)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)],
        check=True,
    )
    script = """
import sys, torch, triton, safetensors.torch
before = set(sys.modules)
import vitfast, vitfast.kernels
assert vitfast.__file__.startswith(sys.argv[1]) and vitfast.kernels.__file__.startswith(sys.argv[1]), vitfast.__file__
model = vitfast.ViT(img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3, num_classes=5)
print(tuple(model(torch.zeros(2, 3, 32, 32)).shape))
optional = {"timm", "torchvision", "transformers", "matplotlib", "sklearn", "yaml", "tqdm", "huggingface_hub", "tensorboard"} & (set(sys.modules) - before)
assert not optional, f"the core imports {optional}"
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "site")], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "(2, 5)"


def test_sdist_holds_the_kernels(dist):
    names = tarfile.open(next(dist.glob("*.tar.gz"))).getnames()
    for path in ("kernels/__init__.py", "kernels/cublaslt.cpp", "vitfast/train/loop.py"):
        assert any(name.endswith(f"/{path}") for name in names), path


def test_metadata_has_the_extras(dist):
    archive = zipfile.ZipFile(next(dist.glob("*.whl")))
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata or "License: Apache-2.0" in metadata
    for extra in ("train", "bench", "native", "test", "all"):
        assert f"Provides-Extra: {extra}" in metadata
    core = {
        line.split(":")[1].strip().split(">")[0].split(";")[0].strip()
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra" not in line
    }
    assert core == {"torch", "triton", "numpy", "safetensors"}


def test_imports_go_down_the_floors():
    """The house of the architecture: a file imports from floors below its own only, and kernels never import vitfast."""
    import ast

    floors = [
        "errors",
        "interpreter",
        "shadow",
        "sanitizer",
        "kernels",
        "ref",
        "positions",
        "ops",
        "layers",
        "hybrid",
        "adapters",
        "model",
        "checkpoint",
        "inspect",
        "predicted",
        "cost",
        "export",
        "figures",
        "train",
        "timm_models",
        "launchers",
        "more_launchers",
        "trial",
        "edges",
        "doctor",
        "offline",
        "sass",
        "trace",
        "ports",
        "tuned",
        "search",
        "tune",
        "cli",
    ]
    height = {name: i for i, name in enumerate(floors)} | {
        "adapters": floors.index("layers"),
        "checkpoint": floors.index("inspect"),
        "predicted": floors.index("inspect"),
        "cost": floors.index("inspect"),
    }
    wrong = []
    for path in sorted((ROOT / "vitfast").rglob("*.py")):
        place = path.relative_to(ROOT / "vitfast").parts[0].removesuffix(".py")
        if place in ("__init__", "__main__"):
            continue
        tree = ast.parse(path.read_text())
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or id(node) in inside:  # late imports in functions may point up
                continue
            depth = len(path.relative_to(ROOT / "vitfast").parts)
            if node.level == depth:
                targets = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                wrong += [
                    f"{path.name} -> {t}" for t in targets if t in height and t != place and height[t] > height[place]
                ]
    assert not wrong
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not any(name.split(".")[0] == "vitfast" for name in names), path


def test_lint():
    run = subprocess.run([sys.executable, "-m", "ruff", "check", str(ROOT)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
