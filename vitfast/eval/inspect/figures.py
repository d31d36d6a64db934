"""The figures of `inspect` (Figures 6, 7, 10 and 11 of the ViT paper), and the curves of runs."""

import io

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

DPI = 110


def as_png(figure: Figure, transparent: bool = False) -> bytes:
    """The figure as a PNG file. transparent: its background is transparent, not white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight", transparent=transparent)
    return buffer.getvalue()


def mosaic(tiles: np.ndarray) -> np.ndarray:
    """Lays tiles (rows, columns, h, w, ...) side by side: (rows (h+1) - 1, columns (w+1) - 1, ...).

    NaN lies between the tiles, and is not drawn.
    """
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
    """Draws components (n, C, P, Q) as tiles of full contrast, seven in a row. C is 1 or 3."""
    n, _, height, width = components.shape
    columns, rows = min(7, n), -(-n // 7)
    low, high = (reduce(components, axis=(1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
    scaled = np.ones((rows * columns, *components.shape[1:]))
    scaled[:n] = (components - low) / np.maximum(high - low, 1e-30)
    colours = scaled.transpose(0, 2, 3, 1).repeat(3 // components.shape[1], axis=-1)
    tiles = colours.reshape(rows, columns, height, width, 3)
    figure = Figure(figsize=(columns, rows * height / width))
    _blank(figure)[0, 0].imshow(np.nan_to_num(mosaic(tiles), nan=1.0), interpolation="nearest")
    return figure


def draw_similarity(similarity: np.ndarray, pixels: int | None = None) -> Figure:
    """Draws a grid of grids from (h, w, h, w): the cosine similarity of each position to all others.

    pixels: if a side would have more values, only every second, third, ... row and column of patches is drawn.
    """
    grid = np.array(similarity.shape[:2])
    step = 1 if pixels is None else -(-grid.max() // max(1, pixels // (grid.max() + 1)))
    similarity = similarity[step // 2 :: step, step // 2 :: step]
    rows, columns = similarity.shape[:2]
    picture = mosaic(similarity)
    # Each value has at least one pixel within the margins, or gaps would vanish.
    side = max(5.4, 1.7 * max(picture.shape) / DPI)
    figure = Figure(figsize=(side * min(1, columns / rows) + 1, side * min(1, rows / columns)))
    axis = figure.subplots()
    shown = axis.imshow(picture, vmin=-1, vmax=1, interpolation="nearest")
    for count, side, set_ticks in ((columns, grid[1], axis.set_xticks), (rows, grid[0], axis.set_yticks)):
        every = np.arange(0, count, -(-count // 16))
        set_ticks(every * (side + 1) + (side - 1) / 2, step // 2 + every * step + 1, fontsize=8)
    axis.set(xlabel="column of the patch", ylabel="row of the patch")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.colorbar(shown, shrink=0.7, label="cosine similarity")
    return figure


def draw_distance(distance: np.ndarray, uniform: float) -> Figure:
    """Draws distances (L, H) in pixels as dots above their layers; even attention's is a line."""
    layers, heads = distance.shape
    figure = Figure(figsize=(7, 4.5))
    axis = figure.subplots()
    for head in range(heads):
        color = colormaps["viridis"](head / max(1, heads - 1))
        axis.scatter(np.arange(1, layers + 1), distance[:, head], s=18, label=f"head {head + 1}", color=color)
    axis.axhline(uniform, color="0.5", linewidth=1, linestyle="--", label="spread evenly")
    axis.set(xlabel="layer", ylabel="mean attention distance (pixels)", ylim=(0, 1.05 * max(uniform, distance.max())))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8, ncols=-(-(heads + 1) // 17), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_attention(images: np.ndarray, maps: np.ndarray) -> Figure:
    """Draws images (n, C, H, W) above how much of each patch reaches the output, (n, h, w)."""
    columns, rows = min(8, len(images)), -(-len(images) // 8)
    height, width = images.shape[2:]
    figure = Figure(figsize=(1.25 * columns, 2.6 * rows * height / width))
    axes = _blank(figure, 2 * rows, columns)
    for i, (image, weights) in enumerate(zip(images.transpose(0, 2, 3, 1), maps)):
        above, below = axes[i // 8 * 2 : i // 8 * 2 + 2, i % 8]
        above.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray")
        below.imshow(image.mean(-1), cmap="gray")
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        below.imshow(weights, cmap="inferno", alpha=0.65, extent=extent, interpolation="bicubic")
    figure.subplots_adjust(wspace=0.05, hspace=0.05)
    return figure


def draw_rows(images: np.ndarray) -> Figure:
    """Draws images (rows, columns, h, w, C) of 0 to 255; the first of a row stands a little apart."""
    rows, columns, h, w, chans = images.shape
    apart = np.insert(images.astype(float) / 255, 1, np.nan, axis=1)[:, :, :, :, :3]
    picture = np.delete(mosaic(apart), slice(w + 1, 2 * w - w // 8), axis=1)
    figure = Figure(figsize=(picture.shape[1] / DPI, picture.shape[0] / DPI))
    figure.add_axes((0, 0, 1, 1), frameon=False, xticks=[], yticks=[]).imshow(np.nan_to_num(picture, nan=1.0))
    return figure


def draw_curves(runs: dict[str, list[dict]], best: dict[str, float] | None = None) -> Figure:
    """Draws loss, accuracy, k-NN, rank and learning rate of runs against epochs, as metrics.csv has them.

    Numbers that are missing or not finite leave a gap. best: the epochs of the runs' best evaluations, which a line
    marks.
    """
    known = {key for each in runs.values() for m in each for key, value in m.items() if value is not None}
    keys = [key for key in ("loss", "accuracy", "knn", "rank", "lr") if key in known] or ["loss"]
    figure = Figure(figsize=(max(6, 5 * len(runs)), 1 + 2 * len(keys)), layout="constrained")
    axes = figure.subplots(len(keys), len(runs), squeeze=False, sharex="col")
    for column, (name, metrics) in enumerate(runs.items()):
        for axis, key in zip(axes[:, column], keys):
            for split, label, color in (("train", "training", "#3366aa"), ("val", "validation", "#dd7722")):
                points = np.array([(m["epoch"], m.get(key)) for m in metrics if m["split"] == split], float).reshape(
                    -1, 2
                )
                axis.plot(*np.where(np.isfinite(points), points, np.nan).T, color=color, label=label, linewidth=1.4)
            axis.set_ylabel(dict(lr="learning rate", knn="k-NN accuracy", rank="effective rank").get(key, key))
            axis.grid(alpha=0.3)
            if name in (best or {}):
                axis.axvline(best[name], color="#444444", linestyle=":", linewidth=1.2)
        axes[0][column].set_title(name)
        axes[0][column].legend(frameon=False)
        axes[-1][column].set_xlabel("epoch")
    return figure


def draw_counts(counts: dict[int, int], across: str, up: str) -> Figure:
    """Draws counts by number as bars. across, up: the labels of the axes."""
    figure = Figure(figsize=(5.4, 2.6))
    axis = figure.subplots()
    apart = min((b - a for a, b in zip(sorted(counts), sorted(counts)[1:])), default=1)
    axis.bar(list(counts), list(counts.values()), width=0.8 * apart)
    axis.set(xlabel=across, ylabel=up)
    return figure
