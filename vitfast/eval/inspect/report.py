"""The images that `inspect` reads, and the files that it writes: figures, numbers, and a page of all."""

import io
import json
import logging
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...data.datasets import open_sources
from ...data.folders import ImageFiles
from ...data.image_files import image_files
from ...data.images import Unreadable
from ...errors import InputError
from ...model.vit import ViT
from ...run.config import Config
from ...run.files import as_csv
from ...run.results import Results
from ..answers import evenly
from .figures import as_png, draw_attention, draw_distance, draw_filters, draw_similarity
from .measures import examine, patch_distances, reads_class_token
from .page import page, picture

logger = logging.getLogger("vitfast")
SHOWN = 16  # images whose rollout is drawn
# File name -> heading, what the figure shows, and the note if the model has nothing to show.
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


def read_images(spec: str, count: int, size: tuple[int, int], chans: int = 3) -> tuple[Tensor, int]:
    """At most `count` images, evenly spread over the source, as uint8 (B, chans, *size); how many failed.

    The images are scaled to cover the size and cut at the centre. Those that cannot be read are left out, with a
    warning; the second result is their number. spec: a folder with image files at any depth, or a name that `vitfast
    eval --data` takes ("digits", "torch/..."), of which it reads the validation split. Raises InputError if no image
    exists or can be read, and for `chans` other than 1 and 3.
    """
    if chans not in (1, 3):
        raise InputError(f"--data {spec}: the model reads {chans} channels; images have 1 or 3")
    if count < 1:
        raise InputError(f"--images must be at least 1, got {count}")
    if not spec:
        raise InputError("no data given: --data takes a folder of images, 'digits', or a name such as torch/cifar10")
    if Path(spec).is_dir():
        files = list(image_files(spec))
        source = ImageFiles(files, [0] * len(files), [])
    elif Path(spec).exists():
        raise InputError(f"--data {spec} is a file; give a folder of images")
    else:
        train, val = open_sources(spec, "", size, (1, 1), Config(task="eval"))
        source = val or train
    fitted, unreadable = [], []
    for i in evenly(len(source), count):
        try:
            image, _ = source[i]
        except Unreadable as error:
            unreadable.append(error)
            continue
        image = Image.fromarray(image.transpose(1, 2, 0)) if source.transformed else image
        image = image.convert("RGB" if chans == 3 else "L")
        fitted.append(ImageOps.fit(image, size[::-1], Image.Resampling.BICUBIC))
    if not fitted:
        raise InputError(f"none of {len(unreadable)} images of {spec!r} could be read; the first: {unreadable[0]}")
    for error in unreadable:
        logger.warning("left out: %s", error)
    pixels = np.stack([np.asarray(image).reshape(*size, chans) for image in fitted])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), len(unreadable)


def write_inspection(model: ViT, images: Tensor, output: str | Path, weights: str = "", data: str = "") -> Path:
    """Draws what a model learned into the folder `output`; returns the path of its report.html.

    images: uint8 (B, C, H, W) of the model's size. weights, data: their names in the report. Writes report.html,
    numbers.json, distance.csv (layer, head, pixels), arrays.npz (all results), and filters.png, positions.png,
    distance.png and rollout.png. If the model has no filters or positions to show, the report says so instead.
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
        heading: (note, picture(pngs[name], heading, chart=name == "distance")) if name in pngs else (absent, "")
        for name, (heading, note, absent) in SECTIONS.items()
    }
    np.savez_compressed(archive := io.BytesIO(), **arrays)
    cells = ((layer + 1, head + 1, f"{pixels:.6g}") for (layer, head), pixels in np.ndenumerate(arrays["distance"]))
    columns = ("layer", "head", "pixels")
    files = {f"{name}.png": png for name, png in pngs.items()} | {
        "arrays.npz": archive.getvalue(),
        "distance.csv": as_csv(columns, (dict(zip(columns, row)) for row in cells)),
        "numbers.json": json.dumps(numbers, indent=2) + "\n",
        "report.html": page("vitfast inspect", facts | {"rollout from": numbers["rollout_from"]}, sections),
    }
    for name in numbers["not_drawn"]:  # figures of other weights that an earlier call wrote
        results.remove(f"{name}.png")
    for name, content in files.items():
        results.write(name, content)
    return results.folder / "report.html"
