"""The site, built once for the tests that read it."""

import subprocess
import sys

import pytest
from doc_blocks import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site; every warning is an error."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder
