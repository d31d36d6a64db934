"""The site builds without a warning, and its reference says what the code says."""

import dataclasses
import inspect
import re
import runpy
import xml.etree.ElementTree as xml

import pytest
from doc_blocks import PAGES, ROOT
from test_package import FLOORS

import vitfast
from vitfast import cli, ops
from vitfast.run.config import FIELDS, RUN_ONLY, Config

LONGEST_FILE, WIDEST_LINE = 400, 120


@pytest.mark.long
def test_it_builds_without_a_warning_holds_every_page_and_loads_nothing_from_elsewhere(site):
    for page in PAGES[1:]:
        assert (site / page.removeprefix("docs/")).with_suffix(".html").is_file(), page
    loads = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(https?:[^"]+)"')
    for path in site.rglob("*.html"):
        assert not loads.findall(path.read_text()), path


@pytest.mark.long
def test_the_reference_has_every_public_name(site):
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    methods = [name for name, _ in inspect.getmembers(vitfast.ViT, inspect.isfunction)]
    own = [f"ViT.{name}" for name in methods if not name.startswith("_") and name in vars(vitfast.ViT)]
    names = [name for name in dir(vitfast) if not inspect.ismodule(getattr(vitfast, name)) and name != "__version__"]
    for name in [*(f"ops.{operation}" for operation in ops.__all__), *names, *own]:
        assert re.search(rf'id="vitfast[\w.]*\.{name.split(".")[-1]}"', text), f"{name} is not in the reference"


@pytest.mark.long
def test_every_command_has_its_help_and_every_argument_its_row(site, capsys):
    with pytest.raises(SystemExit):
        cli.main(["no-such-command"])
    names = re.findall(r"[\w-]+", capsys.readouterr().err.partition("choose from")[2])
    text = (site / "reference" / "command-line.html").read_text()
    assert len(names) > 12 and list(dict.fromkeys(re.findall(r"usage: vitfast ([\w-]+) ", text))) == names
    for section in text.split("<h2")[1:]:
        usage = re.search(r"usage: [^<]*", section)[0]
        told = re.findall(r"<td><code>[^<]*?(--[\w-]+)[^<]*</code></td>\s*<td>\S", section)
        options = {option for option in re.findall(r"--[\w-]+", usage) if not option.startswith("--no-")}
        assert {*told} == options | {"--help"} and len(told) == len(options) + 1, usage
    text = (site / "reference" / "vit.html").read_text()
    for name in inspect.signature(vitfast.ViT).parameters:
        assert re.search(rf"<td[^>]*><code>{name}</code></td>", text), name


@pytest.mark.long
def test_every_setting_has_its_row_below_the_heading_of_its_group(site):
    text = (site / "reference" / "settings.html").read_text()
    page = re.findall(r"<h2[^>]*>([^<]+)<|<td data-title=\"setting\"><code>(\w+)</code></td>", text)
    expected, groups = [], runpy.run_path(str(ROOT / "docs" / "hooks.py"))["GROUPS"]
    for name in FIELDS:
        expected += [(groups[name], "")] if name in groups else []
        expected.append(("", name))
    assert page[: len(expected)] == expected and {*groups} <= {*FIELDS}
    free = text.rpartition("What may change")[2]
    assert {*re.findall(r"<code>(\w+)</code>", free)} == RUN_ONLY | {"epochs", "steps"}


def test_every_setting_says_what_it_means():
    meanings = [each.metadata["meaning"] for each in dataclasses.fields(Config)]
    assert len({*meanings}) == len(meanings) and all(len(meaning) > 10 for meaning in meanings)
    assert not [meaning for meaning in meanings if meaning.endswith(".") or "  " in meaning]


@pytest.mark.parametrize(
    "remote, address",
    [
        ("git@example.org:people/vitfast.git\n", "https://example.org/people/vitfast"),
        ("https://name:secret@example.org/people/vitfast.git", "https://example.org/people/vitfast"),
        ("https://name:sec@ret@example.org/people/vitfast.git", "https://example.org/people/vitfast"),
        ("ssh://git@example.org:2222/people/vitfast.git", "https://example.org/people/vitfast"),
        ("http://example.org/vitfast/", "https://example.org/vitfast"),
        ("/home/people/vitfast", None),
        ("", None),
    ],
)
def test_the_repository_is_linked_where_it_has_an_address(remote, address):
    assert runpy.run_path(str(ROOT / "docs" / "address.py"))["web_address"](remote) == address


def test_pictures_have_a_title_both_palettes_and_are_shown():
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        root = xml.parse(picture).getroot()
        names = {child.tag.rpartition("}")[2] for child in root}
        assert "title" in names and "prefers-color-scheme: dark" in picture.read_text(), picture
        assert picture.name in pages and not re.search(r"https?://(?!www\.w3\.org)", picture.read_text()), picture


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
