"""One HTML page that opens offline, its pictures inside: a title, facts, and sections."""

import base64
import html
from collections.abc import Iterable, Sequence

import numpy as np

from ...version import __version__

GENERATOR = '<meta name="generator" content="vitfast'  # near the start of every page, to tell that vitfast wrote it

# Figures are drawn on white: in the dark their lightness is inverted, their hues stay, and black becomes the page.
STYLE = """:root{color-scheme:light dark;--page:#fff;--code:#f4f4f4;--line:#ddd;
--text:#1a1a1a;--quiet:#5c5c5c;--mark:#a85400}
@media (prefers-color-scheme:dark){:root{--page:#141618;--code:#22262a;--line:#3a3d40;
--text:#e6e6e6;--quiet:#a3a3a3;--mark:#f2a65a}
img.chart{filter:invert(1) hue-rotate(180deg);mix-blend-mode:screen}}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:var(--text);background:var(--page)}
h1{margin-bottom:0;overflow-wrap:anywhere}h2{margin-top:2.5rem}img{max-width:100%}a{color:inherit}
table{border-collapse:collapse}th{color:var(--quiet);font-weight:normal}
td,th{padding:.25rem .9rem .25rem 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}
td.n{text-align:right;font-variant-numeric:tabular-nums}p.small{color:var(--quiet);overflow-wrap:anywhere}
.scroll{overflow-x:auto}.scroll td,.scroll th{overflow-wrap:normal}summary{cursor:pointer;color:var(--quiet)}
pre{background:var(--code);padding:.75rem;border-radius:.3rem;white-space:pre-wrap;overflow-wrap:anywhere}
.matrix{font-size:.75rem}.matrix td{min-width:1.5rem;padding:.15rem .25rem;text-align:center}
.matrix td+td,.matrix th+td{border:1px solid var(--line)}
.matrix th{padding:.15rem .4rem;max-width:9rem;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.matrix thead th{writing-mode:vertical-rl;transform:rotate(180deg);max-width:none;max-height:9rem;padding:.4rem 0}
@media (max-width:30rem){td,th{padding-right:.5rem}.scroll{font-size:.85rem}}
.gallery{display:flex;flex-wrap:wrap;gap:.75rem}
figure{margin:0;width:6rem;font-size:.8rem;overflow-wrap:anywhere;white-space:pre-line}
figure img{width:100%;image-rendering:pixelated}.marked{color:var(--mark)}"""


def picture(content: bytes, alt: str, chart: bool = False) -> str:
    """An <img> that holds its own bytes, PNG or JPEG. chart: dark text and lines on white."""
    kind = "jpeg" if content.startswith(b"\xff\xd8") else "png"
    data = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return f'<img{" class=chart" * chart} alt="{html.escape(alt)}" src="{data}">'


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


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, marked: int | None = None) -> str:
    """A <table> with a header; its first `left` columns are text, and row `marked` is coloured."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = []
    for number, row in enumerate(rows):
        cells = (f"<td{' class=n' * (i >= left)}>{html.escape(text)}</td>" for i, text in enumerate(row))
        lines.append(f"<tr{' class=marked' * (number == marked)}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{"".join(lines)}</table></div>'


def matrix(counts: np.ndarray, names: Sequence[str]) -> str:
    """A confusion matrix (K, K) of true classes (rows) and answers (columns), coloured by shares of rows."""
    heads = [f'<th title="{html.escape(name)}">{html.escape(name)}</th>' for name in names]
    rows = []
    for i, row in enumerate(counts.tolist()):
        colours = ("60 130 220" if i == j else "230 120 20" for j in range(len(row)))
        shades = (f"rgb({colour}/{0.1 + 0.5 * n / sum(row):.2f})" if n else "none" for colour, n in zip(colours, row))
        cells = (f'<td style="background:{shade}">{n or ""}</td>' for shade, n in zip(shades, row))
        rows.append(f"<tr>{heads[i]}{''.join(cells)}</tr>")
    head = f"<thead><tr><td></td>{''.join(heads)}</tr></thead>"
    return f'<div class="scroll"><table class="matrix">{head}{"".join(rows)}</table></div>'


def sentences(*texts: str) -> str:
    """A <p> of the texts that are not empty; "" where all are empty."""
    text = " ".join(filter(None, texts))
    return f"<p>{html.escape(text)}</p>" if text else ""


def fold(summary: str, content: str) -> str:
    """Content that is folded until its summary is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


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
