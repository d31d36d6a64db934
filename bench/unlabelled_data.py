"""Real pictures that package registries ship, as data folders of vitfast with a fixed split.

stamps: the PNG files of Debian's package tuxpaint-stamps-default, photographs and drawings. The subject is the folder
below tuxpaint/stamps. X_mirror.png is a mirrored X.png, so both are of one group.

emoji: the pictures of 64 pixels of the npm package emoji-datasource-google. The subject is the category in emoji.json.
Component, and the variants of skin tone, which are near copies of others, are left out. A person, a man and a woman of
one kind are of one group.

digits: the scans of `--data digits`, with its split, enlarged from 8 to 32 pixels as its evaluation enlarges them, so
that crops may begin between pixels.

The pictures of a group are all on one side of the split. A quarter of each subject is for testing, a fifth of the
training pictures for choosing settings. A subject of fewer than 20 pictures, of which fewer than 5 would be tested, is
left out. Pictures are transparent, and what PNG files hold where nothing is to be seen is black or worse, so they are
put onto white, in the middle of a square, and reduced to 64 pixels.
"""

import json
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

DEBIAN, NPM = "tuxpaint-stamps-default", "emoji-datasource-google@16.0.0"
TEST, HELD_OUT, LEAST = 0.25, 0.2, 20
SIDE = 64
NAMES = ("digits", "stamps", "emoji")


class Picture(NamedTuple):
    """A file, or an image in memory, with its name in the data folder."""

    name: str
    content: Path | Image.Image
    subject: str
    group: str


class Unavailable(Exception):
    """A package cannot be fetched."""


def fetch(cache: Path) -> None:
    """Fetches and unpacks the two packages, unless the cache has them. Raises Unavailable."""
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "stamps").is_dir():
        archive = _fetched(["apt-get", "download", DEBIAN], cache, f"{DEBIAN}_*.deb")
        _run(["dpkg-deb", "-x", archive.name, "stamps.part"], cache)
        (cache / "stamps.part").rename(cache / "stamps")
    if not (cache / "package").is_dir():
        with tarfile.open(_fetched(["npm", "pack", NPM], cache, NPM.replace("@", "-") + ".tgz")) as archive:
            wanted = re.compile(r"package/(emoji\.json|package\.json|img/google/64/[\w-]+\.png)")
            members = [each for each in archive if each.isfile() and wanted.fullmatch(each.name)]
            archive.extractall(cache / "package.part", members)
        (cache / "package.part" / "package").rename(cache / "package")
        (cache / "package.part").rmdir()


def _fetched(command: list[str], cache: Path, pattern: str) -> Path:
    """The archive that a command leaves in the cache, which may have it already."""
    if not any(cache.glob(pattern)):
        _run(command, cache)
    if not (found := sorted(cache.glob(pattern))):
        raise Unavailable(f"{' '.join(command)} left no {pattern} in {cache}")
    return found[-1]


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise Unavailable(f"{' '.join(command)} failed, so there are no pictures to learn from: {said}") from None


def stamps(cache: Path) -> list[Picture]:
    """The pictures of Debian's package."""
    root, found = cache / "stamps/usr/share/tuxpaint/stamps", []
    for path in sorted(root.rglob("*.png")):
        inside = path.relative_to(root).with_suffix("")
        name = "-".join(inside.parts)
        found.append(Picture(name, path, inside.parts[0], name.removesuffix("_mirror")))
    return found


def emoji(cache: Path) -> list[Picture]:
    """The pictures of the npm package, in the order of its table."""
    found = []
    for each in json.loads((cache / "package/emoji.json").read_text()):
        if each["has_img_google"] and each["category"] != "Component":
            path, subject = cache / "package/img/google/64" / each["image"], each["category"].replace(" & ", "-and-")
            found.append(Picture(path.stem, path, subject, re.sub(r"-200d-264[02](-fe0f)?", "", path.stem)))
    return found


def digits(train: bool) -> list[Picture]:
    """scikit-learn's scans of one side of the split of `--data digits`."""
    from vitfast.data.datasets import Digits

    source = Digits(train)
    names = [f"scan-{number:04}" for number in source.indices]
    enlarged = [source[i][0].resize((32, 32), Image.Resampling.BICUBIC) for i in range(len(names))]
    return [Picture(name, image, str(label), name) for name, image, label in zip(names, enlarged, source.labels)]


def large_subjects(pictures: list[Picture]) -> list[Picture]:
    """Leaves out the subjects that have fewer than LEAST pictures."""
    counts = Counter(each.subject for each in pictures)
    return [each for each in pictures if counts[each.subject] >= LEAST]


def split(pictures: list[Picture], share: float, seed: int = 0) -> tuple[list[Picture], list[Picture]]:
    """(kept, held out): whole groups of each subject, drawn until `share` of its pictures are held out."""
    chosen, generator = set(), np.random.default_rng(seed)
    for subject in sorted({each.subject for each in pictures}):
        of_subject = [each for each in pictures if each.subject == subject]
        sizes, wanted, drawn = Counter(each.group for each in of_subject), round(share * len(of_subject)), 0
        for group in generator.permutation(sorted(sizes)).tolist():
            if drawn + sizes[group] <= wanted:
                chosen.add((subject, group))
                drawn += sizes[group]
    held = [each for each in pictures if (each.subject, each.group) in chosen]
    return [each for each in pictures if (each.subject, each.group) not in chosen], held


def both_sides(name: str, cache: Path, choosing: bool) -> tuple[list[Picture], list[Picture]]:
    """(training, test) pictures of a data set of NAMES.

    choosing: the test pictures are left unseen; a share of the training pictures takes their place.
    """
    if name == "digits":
        train, test = digits(True), digits(False)
    else:
        train, test = split(large_subjects(dict(stamps=stamps, emoji=emoji)[name](cache)), TEST)
    return split(train, HELD_OUT, seed=1) if choosing else (train, test)


def on_white(image: Image.Image) -> Image.Image:
    """A picture on white, in the middle of a square of at most SIDE pixels."""
    image = image.convert("RGBA")
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    square = square.convert("RGB")
    return square.resize((SIDE, SIDE), Image.Resampling.LANCZOS) if side > SIDE else square


def write_folder(folder: Path, sides: tuple[list[Picture], list[Picture]]) -> None:
    """Writes train/SUBJECT/, val/SUBJECT/, and train.txt, the training pictures without subjects."""
    shutil.rmtree(folder, ignore_errors=True)
    for side, pictures in zip(("train", "val"), sides):
        for each in pictures:
            path = folder / side / each.subject / f"{each.name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(each.content, Image.Image):
                each.content.save(path)
                continue
            with Image.open(each.content) as image:
                on_white(image).save(path)
    listed = [f"train/{each.subject}/{each.name}.png" for each in sides[0]]
    (folder / "train.txt").write_text("\n".join(listed) + "\n")
