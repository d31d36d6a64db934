"""One HTML page that opens offline, its pictures inside: a title, facts, and sections."""

import base64
import html

from ...version import __version__

GENERATOR = '<meta name="generator" content="vitfast'  # near the start of every page, to tell that vitfast wrote it

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
h1{margin-bottom:0}h2{margin-top:2.5rem}img{max-width:100%}
table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}p.small{color:#666}
.gallery{display:flex;flex-wrap:wrap;gap:.75rem}figure{margin:0;width:6rem;font-size:.8rem;overflow-wrap:anywhere}
figure img{width:100%;image-rendering:pixelated}.marked{color:#b35900}"""


def picture(png: bytes, alt: str) -> str:
    """An <img> that holds its own bytes."""
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def gallery(pictures: list[tuple[str, str, bool]]) -> str:
    """Small pictures side by side: (`picture`, its caption, whether the caption is marked)."""
    figures = (
        f"<figure>{image}<figcaption{' class=marked' if marked else ''}>{html.escape(text)}</figcaption></figure>"
        for image, text, marked in pictures
    )
    return f'<div class="gallery">{"".join(figures)}</div>'


def table(facts: dict[str, str]) -> str:
    """A <table> of names and values."""
    rows = (f"<tr><td>{html.escape(k)}</td><td class=n>{html.escape(v)}</td></tr>" for k, v in facts.items())
    return f"<table>{''.join(rows)}</table>"


def page(title: str, facts: dict[str, str], sections: dict[str, tuple[str, str]], introduction: str = "") -> str:
    """An HTML document.

    sections: heading -> (note, HTML such as `picture`, `gallery` or `table` make, or "").
    """
    lines = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f'{GENERATOR} {__version__}">',
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n<h1>{html.escape(title)}</h1>",
        _small(introduction),
        table(facts),
    ]
    for heading, (note, image) in sections.items():
        lines += [f"<h2>{html.escape(heading)}</h2>", _small(note), image]
    return "\n".join(line for line in (*lines, "</html>\n") if line)


def _small(text: str) -> str:
    return f'<p class="small">{html.escape(text)}</p>' if text else ""
