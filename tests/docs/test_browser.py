"""The site in a headless browser, opened from disk, where a browser is installed: nothing is cut off."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = "chromium-headless-shell chrome-headless-shell chromium chromium-browser google-chrome google-chrome-stable"
WIDTHS = (1280, 390)  # pixels: a small laptop, a phone
FLAGS = "--headless --no-sandbox --disable-gpu --allow-file-access-from-files --hide-scrollbars --window-size=1400,1000"
# Each page in a frame of each width. Counted as cut off is what is wider than the frame, and each box whose content is
# wider than the box, whether it scrolls or hides the rest.
MEASURE = """<!doctype html><body><script>
(async () => {
  const found = [];
  for (const width of WIDTHS) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    Object.assign(frame.style, {width: width + "px", height: "900px", border: 0});
    frame.src = page;
    await new Promise(loaded => { frame.onload = loaded; document.body.append(frame); });
    const {document: inside, getComputedStyle: style} = frame.contentWindow;
    if (inside.documentElement.scrollWidth > width) found.push(`${page} at ${width}: the page scrolls sideways`);
    for (const element of inside.querySelectorAll(".md-content *:not(svg *)")) {
      const {right, width: shown} = element.getBoundingClientRect();
      const wider = element.scrollWidth > element.clientWidth + 1 && style(element).overflowX != "visible";
      const spaces = element.tagName == "SPAN" && !element.innerText.trim();
      if (shown && !spaces && (right > width + 1 || wider))
        found.push(`${page} at ${width}: <${element.tagName}> ${element.innerText?.slice(0, 60)}`);
    }
    frame.remove();
  }
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
})();
</script>"""


@pytest.fixture(scope="session")
def browser() -> str:
    """The path of an installed Chromium, Playwright's among them."""
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    own = [str(path) for name in ("headless_shell", "chrome") for path in cache.glob(f"chromium*/*/{name}")]
    found = [path for path in (*map(shutil.which, NAMES.split()), *own) if path]
    if not found:
        pytest.skip("no headless browser is installed")
    return found[0]


def cut_off(browser: str, folder: Path, pages: list[str]) -> list[str]:
    """What of these pages is cut off, at every width."""
    script = folder / "measure.html"
    script.write_text(MEASURE.replace("WIDTHS", json.dumps(WIDTHS)).replace("PAGES", json.dumps(pages)))
    command = [browser, *FLAGS.split(), "--virtual-time-budget=600000", "--dump-dom", script.as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout  # after its scripts have run
    result = re.search(r'<pre id="result">(.*?)</pre>', page, re.DOTALL)
    assert result, "the browser did not come to the end of the pages"
    return json.loads(html.unescape(result[1]))


@pytest.mark.slow
def test_nothing_is_cut_off_on_a_laptop_or_a_phone(browser, site):
    """With the stylesheet left out, help, code and tables are wider than their place: that is found."""
    pages = [str(path.relative_to(site)) for path in site.rglob("*.html") if path.name not in ("404.html", "wide.html")]
    assert len(pages) > 30 and not cut_off(browser, site, sorted(pages))
    page = (site / "reference" / "families.html").read_text()
    (site / "reference" / "wide.html").write_text(page.replace("stylesheets/site.css", "stylesheets/none.css"))
    found = cut_off(browser, site, ["reference/wide.html"])
    assert any("at 390" in text for text in found)
