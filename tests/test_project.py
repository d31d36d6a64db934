"""Workflows, forms, citation and changelog: what they name is in the repository, and versions agree."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from doc_blocks import ROOT

import vitfast

yaml = pytest.importorskip("yaml")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = {*re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)}


def jobs(workflow: Path) -> dict:
    """The jobs of a workflow by their names."""
    return yaml.safe_load(workflow.read_text())["jobs"]


def missing(command: str) -> str | None:
    """What a command of a workflow or of .ci/run calls, if it is not in the repository."""
    program, *words = shlex.split(command)
    if program == "make":
        return next((word for word in words if "=" not in word and word not in TARGETS), None)
    return None if (ROOT / program).is_file() else program


def test_a_command_that_calls_what_is_not_there_is_found():
    assert missing("make tests") == "tests" and missing("bench/gpus.sh first") == "bench/gpus.sh"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_is_there_and_pins_its_actions(workflow):
    text = yaml.safe_load(workflow.read_text())
    assert text["permissions"] == {"contents": "read"} and text[True]  # YAML 1.1 reads `on` as true
    for job in jobs(workflow).values():
        assert job["timeout-minutes"]
        lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
        assert lines and not [line for line in lines if missing(line)]
    actions = re.findall(r"uses: (.+)", workflow.read_text())
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)


def test_the_workflows_check_what_a_change_must_pass():
    found = {name: job for workflow in WORKFLOWS for name, job in jobs(workflow).items()}
    assert {"lint", "test", "oldest", "docs", "build", "gpu"} <= found.keys()
    assert found["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.13"]
    gpu = next(workflow for workflow in WORKFLOWS if "gpu" in jobs(workflow))
    assert "self-hosted" in found["gpu"]["runs-on"]
    assert [*yaml.safe_load(gpu.read_text())[True]] == ["workflow_dispatch"]  # never the code of a stranger
    commands = (ROOT / ".ci" / "run").read_text().splitlines()[3:]
    assert commands and not [line for line in commands if missing(line)]


def test_the_form_for_bugs_asks_what_doctor_says():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text())
    (doctor,) = (part for part in form["body"] if part.get("id") == "doctor")
    assert doctor["validations"]["required"] and "`vitfast doctor`" in doctor["attributes"]["label"]


def test_the_citation_has_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == vitfast.__version__ and citation["cff-version"] == "1.2.0"
    assert len(citation["references"][0]["authors"]) == 12


def test_the_changelog_begins_with_this_version():
    heading = r"^## (\S+) - (?:unreleased|\d{4}-\d\d-\d\d)$"
    newest, *_ = re.findall(heading, (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest == vitfast.__version__


def test_the_oldest_versions_are_the_lower_bounds_of_setup():
    found = runpy.run_path(str(ROOT / "tests" / "oldest.py"))["constraints"]()
    setup = (ROOT / "setup.py").read_text()
    assert {"torch", "timm", "transformers", "safetensors"} <= found.keys()
    for name, version in found.items():
        floors = [[*map(int, floor.split("."))] for floor in re.findall(rf'"{name}>=([\d.]+)', setup)]
        assert version == ".".join(map(str, max(floors))) + ".*", name


def test_links_are_those_of_the_origin_or_of_the_sdist(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/address.py").write_text((ROOT / "docs/address.py").read_text())
    links = lambda: runpy.run_path(str(tmp_path / "docs/address.py"))["links"]()  # noqa: E731
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert links() == {}
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", "git@example.org:people/vitfast.git"], check=True)
    assert links()["Issues"] == "https://example.org/people/vitfast/issues"
    head = "Name: vitfast\nProject-URL: Source, https://example.org/a, b\n"
    (tmp_path / "PKG-INFO").write_text(f"{head}\nProject-URL: Not, in the head")
    assert links() == {"Source": "https://example.org/a, b"}


def test_the_types_of_every_public_name_are_checked():
    """Of `make lint`: `tests/public_api.py` uses them all."""
    used = {*re.findall(r"\w+", (ROOT / "tests/public_api.py").read_text())}
    methods = [name for name, value in vars(vitfast.ViT).items() if callable(getattr(value, "__func__", value))]
    names = [*dir(vitfast), *vitfast.ops.__all__, *vitfast.adapters.__all__, *vitfast.backend.__all__, *methods]
    assert {name for name in names if not name.startswith("_")} - used <= {
        "forward",
        "compile_graph",
    }
    assert (
        "pyright" in (ROOT / "Makefile").read_text() and "tests/public_api.py" in (ROOT / "pyproject.toml").read_text()
    )
