"""The site builds without a warning, which a link that leads nowhere is, and its pages are short and narrow."""

import inspect
import re
import runpy

import pytest
from doc_blocks import PAGES, ROOT
from test_package import FLOORS

import vitfast
from vitfast import ops

LONGEST_FILE, WIDEST_LINE = 400, 120


@pytest.mark.long
def test_it_builds_without_a_warning_holds_every_page_and_loads_nothing_from_elsewhere(site):
    for page in PAGES[1:]:
        assert (site / page.removeprefix("docs/")).with_suffix(".html").is_file(), page
    loads = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(https?:[^"]+)"')
    for path in site.rglob("*.html"):
        assert not loads.findall(path.read_text()), path


@pytest.mark.parametrize(
    "remote, address",
    [
        ("git@example.org:people/vitfast.git\n", "https://example.org/people/vitfast"),
        ("https://name:sec@ret@example.org/people/vitfast.git", "https://example.org/people/vitfast"),
        ("ssh://git@example.org:2222/people/vitfast.git", "https://example.org/people/vitfast"),
        ("/home/people/vitfast", None),
    ],
)
def test_the_repository_is_linked_where_it_has_an_address(remote, address):
    assert runpy.run_path(str(ROOT / "docs" / "address.py"))["web_address"](remote) == address


def test_the_reference_has_every_public_name():
    """Without building the site: `::: vitfast.ops.mlp.mlp` is where its documentation stands."""
    names = [name for page in PAGES for name in re.findall(r"^::: (\S+)", (ROOT / page).read_text(), re.MULTILINE)]
    public = [name for name in dir(vitfast) if not inspect.ismodule(getattr(vitfast, name)) and name != "__version__"]
    assert {*public, *ops.__all__} <= {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_pages_are_short_and_narrow_and_link_files_that_are_there(page):
    """Short and narrow except for tables, what bench/report.py writes into README.md, and pages that GitHub shows."""
    text = (ROOT / page).read_text()
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert not [path for path in linked if not ((ROOT / page).parent / path).exists()]
    plain = re.sub(r"<!-- speed -->.*<!-- /speed -->", "", text, flags=re.DOTALL)
    wide = [line for line in plain.splitlines() if not line.lstrip().startswith("|") and len(line) > WIDEST_LINE]
    assert page not in PAGES or (len(plain.splitlines()) <= LONGEST_FILE and not wide), wide


def test_every_place_of_the_architecture_stands_on_its_floor():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(?:vitfast/)?(\w+)(?:/|\.py)` \| .+ \|$", text, re.MULTILINE)
    floors = [int(floor) for floor, _ in rows]
    assert sorted(rows) == sorted((str(i), place) for i, floor in enumerate(FLOORS, 1) for place in floor)
    assert floors == sorted(floors, reverse=True) and len(text.splitlines()) <= 60
