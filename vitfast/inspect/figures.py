"""The figures of `inspect` (Figures 6, 7, 10 and 11 of the ViT paper) as PNG files and one page that opens offline, the numbers beside them."""

import base64
import html
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..errors import InputError
from ..files import write_atomically
from ..model import ViT
from .measures import examine, patch_distances, reads_class_token

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
h1{margin-bottom:0}h2{margin-top:2.5rem}img{max-width:100%}table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}p.small{color:#666}"""
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
SHOWN = 16  # images whose rollout is drawn
DPI = 110


# ---- reading


def read_images(spec: str, count: int, size: tuple[int, int], chans: int = 3) -> Tensor:
    """At most `count` images, evenly spread over what there is, as uint8 (B, chans, *size): scaled to cover the size, cut at the centre.

    spec: a folder with image files at any depth, or what `vitfast eval --data` takes by name ("digits", "torch/..."; validation split).
    Raises InputError where there are none, where one is broken, and for `chans` other than 1 and 3.
    """
    if chans not in (1, 3):
        raise InputError(f"--data {spec}: the model reads {chans} channels; images have 1 or 3")
    if count < 1:
        raise InputError(f"--images must be at least 1, got {count}")
    length, opened = _folder(Path(spec)) if Path(spec).exists() else _named(spec, size)
    chosen = np.unique(np.linspace(0, length - 1, min(count, length)).round().astype(int))
    fitted = [
        ImageOps.fit(opened(i).convert("RGB" if chans == 3 else "L"), size[::-1], Image.Resampling.BICUBIC)
        for i in chosen
    ]
    pixels = np.stack([np.asarray(image).reshape(*size, chans) for image in fitted])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _folder(root: Path) -> tuple[int, Callable[[int], Image.Image]]:
    if not root.is_dir():
        raise InputError(f"--data {root} is a file; give a folder of images")
    files = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    if not files:
        raise InputError(f"no images in {root}; known are files that end in {', '.join(sorted(SUFFIXES))}")

    def opened(index: int) -> Image.Image:
        try:
            with Image.open(files[index]) as image:
                image.load()
                return image
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
            raise InputError(f"{files[index]} cannot be read as an image ({error}); remove or replace it") from None

    return len(files), opened


def _named(spec: str, size: tuple[int, int]) -> tuple[int, Callable[[int], Image.Image]]:
    from ..data.datasets import open_sources

    source = open_sources(spec, "", size, (1, 1), 1, 0)[1]
    if not hasattr(source, "__getitem__"):
        raise InputError(
            f"--data {spec} is read in order only; give a folder of images, 'digits', torch/... or hfds/..."
        )

    def opened(index: int) -> Image.Image:
        image = source[int(index)][0]
        return image if isinstance(image, Image.Image) else Image.fromarray(image.transpose(1, 2, 0))

    return len(source), opened


# ---- drawing


def as_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
    return buffer.getvalue()


def embed(png: bytes, alt: str) -> str:
    """A picture as an <img> that holds its own bytes."""
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def mosaic(tiles: np.ndarray) -> np.ndarray:
    """Tiles (rows, columns, h, w, ...) side by side with NaN, which is drawn as nothing, between them: (rows (h+1) - 1, columns (w+1) - 1, ...)."""
    rows, columns, h, w = tiles.shape[:4]
    picture = np.full((rows, h + 1, columns, w + 1, *tiles.shape[4:]), np.nan)
    picture[:, :h, :, :w] = tiles.swapaxes(1, 2)
    return picture.reshape(rows * (h + 1), columns * (w + 1), *tiles.shape[4:])[:-1, :-1]


def _blank(figure: Figure, rows: int = 1, columns: int = 1) -> np.ndarray:
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    return axes


def draw_filters(components: np.ndarray) -> Figure:
    """Components (n, C, P, Q) as tiles, seven in a row, each scaled to the whole range of brightness by itself. C is 1 or 3."""
    n, _, height, width = components.shape
    columns, rows = min(7, n), -(-n // 7)
    low, high = (reduce(components, axis=(1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
    scaled = np.ones((rows * columns, *components.shape[1:]))
    scaled[:n] = (components - low) / np.maximum(high - low, 1e-30)
    tiles = (
        scaled.transpose(0, 2, 3, 1).repeat(3 // components.shape[1], axis=-1).reshape(rows, columns, height, width, 3)
    )
    figure = Figure(figsize=(columns, rows * height / width))
    _blank(figure)[0, 0].imshow(np.nan_to_num(mosaic(tiles), nan=1.0), interpolation="nearest")
    return figure


def draw_similarity(similarity: np.ndarray) -> Figure:
    """A grid of grids from (h, w, h, w): the tile of each patch shows its position's cosine similarity to all others."""
    rows, columns = similarity.shape[:2]
    picture = mosaic(similarity)
    side = max(
        5.4, 1.7 * max(picture.shape) / DPI
    )  # beside the margins a pixel for each number at least, or gaps would vanish
    figure = Figure(figsize=(side * min(1, columns / rows) + 1, side * min(1, rows / columns)))
    axis = figure.subplots()
    shown = axis.imshow(picture, vmin=-1, vmax=1, interpolation="nearest")
    for count, set_ticks in ((columns, axis.set_xticks), (rows, axis.set_yticks)):
        every = np.arange(0, count, -(-count // 16))
        set_ticks(every * (count + 1) + (count - 1) / 2, every + 1, fontsize=8)
    axis.set(xlabel="column of the patch", ylabel="row of the patch")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.colorbar(shown, shrink=0.7, label="cosine similarity")
    return figure


def draw_distance(distance: np.ndarray, uniform: float) -> Figure:
    """A dot for each head of (L, H) in pixels above its layer; a line at what attention spread evenly would give."""
    layers, heads = distance.shape
    figure = Figure(figsize=(7, 4.5))
    axis = figure.subplots()
    for head in range(heads):
        axis.scatter(
            np.arange(1, layers + 1),
            distance[:, head],
            s=18,
            label=f"head {head + 1}",
            color=colormaps["viridis"](head / max(1, heads - 1)),
        )
    axis.axhline(uniform, color="0.5", linewidth=1, linestyle="--", label="spread evenly")
    axis.set(xlabel="layer", ylabel="mean attention distance (pixels)", ylim=(0, 1.05 * max(uniform, distance.max())))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8, ncols=-(-(heads + 1) // 17), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_attention(images: np.ndarray, maps: np.ndarray) -> Figure:
    """Images (n, C, H, W) above the attention (n, h, w) that reaches the output from each of their patches; eight in a row."""
    columns, rows = min(8, len(images)), -(-len(images) // 8)
    height, width = images.shape[2:]
    figure = Figure(figsize=(1.25 * columns, 2.6 * rows * height / width))
    axes = _blank(figure, 2 * rows, columns)
    for i, (image, weights) in enumerate(zip(images.transpose(0, 2, 3, 1), maps)):
        above, below = axes[i // 8 * 2 : i // 8 * 2 + 2, i % 8]
        above.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray")
        below.imshow(image.mean(-1), cmap="gray")
        below.imshow(
            weights, cmap="inferno", alpha=0.65, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="bicubic"
        )
    figure.subplots_adjust(wspace=0.05, hspace=0.05)
    return figure


# ---- the page


def table(facts: dict[str, str]) -> str:
    """Names and values as rows."""
    return (
        "<table>"
        + "".join(f"<tr><td>{html.escape(k)}</td><td class=n>{html.escape(v)}</td></tr>" for k, v in facts.items())
        + "</table>"
    )


def page(title: str, facts: dict[str, str], sections: dict[str, tuple[str, str]]) -> str:
    """An HTML document. sections: heading -> (what is to be seen, an <img> or "")."""
    body = "".join(
        f'<h2>{html.escape(name)}</h2>\n<p class="small">{html.escape(text)}</p>\n{image}\n'
        for name, (text, image) in sections.items()
    )
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f'<!doctype html><html lang="en">{head}\n<style>{STYLE}</style>\n<h1>{html.escape(title)}</h1>\n{table(facts)}\n{body}</html>\n'


def write_inspection(model: ViT, images: Tensor, output: str | Path, weights: str = "", data: str = "") -> Path:
    """Draws what there is to see in a model, into the folder `output`; returns the path of its report.html.

    images: uint8 (B, C, H, W) of the model's size. weights, data: what the report calls them. Writes report.html, numbers.json,
    distance.csv (layer, head, pixels), arrays.npz (all that was computed), and filters.png, positions.png, distance.png and
    rollout.png, but for what the model does not have: the report says so. Each file is whole or absent. The model is set to eval.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output} is a file; give a folder")
    arrays = {name: value.float().cpu().numpy() for name, value in examine(model.eval(), images).items()}
    size, grid = tuple(images.shape[-2:]), arrays["rollout"].shape[1:]
    uniform = patch_distances(size, grid).mean().item()
    pngs = {name: as_png(figure) for name, figure in _draw(arrays, images.cpu().numpy(), uniform).items()}
    facts = dict(
        weights=weights,
        images=f"{len(images)} of {data}" if data else str(len(images)),
        size=f"{size[0]} x {size[1]} pixels, {grid[0]} x {grid[1]} patches",
        model=f"{len(model.blocks)} layers, width {model.embed_dim}, {arrays['distance'].shape[1]} heads",
    )
    numbers = dict(
        **facts,
        rollout_from="class token" if reads_class_token(model) else "mean of the patches",
        filters_variance_share=arrays["share"].tolist() if "share" in arrays else None,
        distance_pixels=arrays["distance"].tolist(),
        distance_pixels_spread_evenly=uniform,
        not_drawn=[name for name in SECTIONS if name not in pngs],
    )
    sections = {
        heading: (text, embed(pngs[name], heading)) if name in pngs else (absent, "")
        for name, (heading, text, absent) in SECTIONS.items()
    }
    files = {f"{name}.png": png for name, png in pngs.items()}
    files["distance.csv"] = _csv(arrays["distance"]).encode()
    files["arrays.npz"] = _npz(arrays)
    files["numbers.json"] = (json.dumps(numbers, indent=2) + "\n").encode()
    files["report.html"] = page("vitfast inspect", facts | {"rollout from": numbers["rollout_from"]}, sections).encode()
    output.mkdir(parents=True, exist_ok=True)
    for name in numbers["not_drawn"]:  # an earlier model's
        (output / f"{name}.png").unlink(missing_ok=True)
    for name, content in files.items():
        write_atomically(output / name, lambda temporary, content=content: temporary.write_bytes(content))
    return output / "report.html"


# File name -> heading, what is to be seen, what is said where the model has nothing to show.
SECTIONS = dict(
    filters=(
        "Patch embedding",
        "The first principal components of the filters that read the patches, as colours; numbers.json has the share of the variance that each explains.",
        "Not drawn: the patch projection does not read pixels, or its filters are all the same.",
    ),
    positions=(
        "Position embeddings",
        "Each tile is one patch: the cosine similarity of its position embedding to those of all patches.",
        "Not drawn: the model adds no position embeddings to its patches.",
    ),
    distance=(
        "Attention distance",
        "Distance in pixels from query to key patch, averaged with the attention as weights, then over all query patches and images. Class token and "
        "registers are left out as queries and keys, and the rest of the attention is renormalised.",
        "",
    ),
    rollout=(
        "Attention rollout",
        "How much of each patch reaches what the head reads: attention averaged over heads, the identity added, renormalised, multiplied through the layers.",
        "",
    ),
)


def _draw(arrays: dict[str, np.ndarray], images: np.ndarray, uniform: float) -> dict[str, Figure]:
    figures = dict(
        distance=draw_distance(arrays["distance"], uniform),
        rollout=draw_attention(images[:SHOWN], arrays["rollout"][:SHOWN]),
    )
    if "filters" in arrays:
        figures["filters"] = draw_filters(arrays["filters"])
    if "positions" in arrays:
        figures["positions"] = draw_similarity(arrays["positions"])
    return figures


def _csv(distance: np.ndarray) -> str:
    rows = (
        f"{layer},{head},{pixels:.6g}" for layer, row in enumerate(distance, 1) for head, pixels in enumerate(row, 1)
    )
    return "\n".join(("layer,head,pixels", *rows, ""))


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()
