"""The files that `inspect` writes: figures as PNG, their numbers, and one page with all of it."""

import csv
import io
import json
from pathlib import Path

import numpy as np
from torch import Tensor

from ...model.vit import ViT
from ...run.results import Results
from .figures import as_png, draw_attention, draw_distance, draw_filters, draw_similarity
from .measures import examine, patch_distances, reads_class_token
from .page import page, picture

SHOWN = 16  # images whose rollout is drawn
# File name -> heading, what is to be seen, what is said where the model has nothing to show.
SECTIONS = dict(
    filters=(
        "Patch embedding",
        "The first principal components of the filters that read the patches, as colours; numbers.json has the share "
        "of the variance that each explains.",
        "Not drawn: the patch projection does not read pixels, or its filters are all the same.",
    ),
    positions=(
        "Position embeddings",
        "Each tile is one patch: the cosine similarity of its position embedding to those of all patches.",
        "Not drawn: the model adds no position embeddings to its patches.",
    ),
    distance=(
        "Attention distance",
        "Distance in pixels from query to key patch, averaged with the attention as weights, then over all query "
        "patches and images. Class token and registers are left out as queries and keys, and the rest of the attention "
        "is renormalised.",
        "",
    ),
    rollout=(
        "Attention rollout",
        "How much of each patch reaches what the head reads: attention averaged over heads, the identity added, "
        "renormalised, multiplied through the layers.",
        "",
    ),
)


def write_inspection(model: ViT, images: Tensor, output: str | Path, weights: str = "", data: str = "") -> Path:
    """Draws what a model learned into the folder `output`; returns the path of its report.html.

    images: uint8 (B, C, H, W) of the model's size. weights, data: what the report calls them. Writes report.html,
    numbers.json, distance.csv (layer, head, pixels), arrays.npz (all that was computed), and filters.png,
    positions.png, distance.png and rollout.png, but for what the model does not have: the report says so.
    Each file is whole or absent. The model is set to eval.
    """
    about = dict(weights=weights, data=data, images=len(images), size=list(images.shape[-2:]))
    names = ["report.html", "numbers.json", "distance.csv", "arrays.npz", *(f"{name}.png" for name in SECTIONS)]
    results = Results(Path(output), "inspect", about, names)
    arrays = {name: value.float().cpu().numpy() for name, value in examine(model.eval(), images).items()}
    size, grid = tuple(images.shape[-2:]), arrays["rollout"].shape[1:]
    uniform = patch_distances(size, grid).mean().item()
    figures = dict(
        distance=draw_distance(arrays["distance"], uniform),
        rollout=draw_attention(images[:SHOWN].cpu().numpy(), arrays["rollout"][:SHOWN]),
    )
    if "filters" in arrays:
        figures["filters"] = draw_filters(arrays["filters"])
    if "positions" in arrays:
        figures["positions"] = draw_similarity(arrays["positions"])
    pngs = {name: as_png(figure) for name, figure in figures.items()}
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
        heading: (note, picture(pngs[name], heading)) if name in pngs else (absent, "")
        for name, (heading, note, absent) in SECTIONS.items()
    }
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)
    rows = ((layer + 1, head + 1, f"{pixels:.6g}") for (layer, head), pixels in np.ndenumerate(arrays["distance"]))
    csv.writer(distances := io.StringIO(), lineterminator="\n").writerows([("layer", "head", "pixels"), *rows])
    texts = {
        "distance.csv": distances.getvalue(),
        "numbers.json": json.dumps(numbers, indent=2) + "\n",
        "report.html": page("vitfast inspect", facts | {"rollout from": numbers["rollout_from"]}, sections),
    }
    files = {f"{name}.png": png for name, png in pngs.items()} | {"arrays.npz": archive.getvalue()}
    for name in numbers["not_drawn"]:  # of the weights that had this name before
        results.remove(f"{name}.png")
    for name, content in (files | texts).items():
        results.write(name, content)
    return results.folder / "report.html"
