"""What is missing is named with a command that works today: from a checkout, as vitfast is not on PyPI."""

import sys

from vitfast import cli


def test_a_command_without_its_packages(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert cli.main(["pretrain", "--recipe", "digits", "--data", "digits"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vitfast: error: yaml is not installed") and said.count("\n") == 1
    assert "pip install '.[train]' in a checkout of vitfast" in said
