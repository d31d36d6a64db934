"""Real JPEG files for the end-to-end benchmark: random crops of photographs in Python packages.

Those of scikit-learn and scikit-image. Nothing is downloaded.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from vitfast.data.images import formats

SKIMAGE = "astronaut.png coffee.png chelsea.png rocket.jpg motorcycle_left.png hubble_deep_field.jpg"
PHOTOS = {
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "skimage": tuple(f"data/{file}" for file in SKIMAGE.split()),
}


def sources() -> dict[str, Image.Image]:
    """Name -> photograph, of installed packages. Raises FileNotFoundError where there is none."""
    found = {}
    for package, files in PHOTOS.items():
        spec = find_spec(package)
        for file in files if spec else ():
            path = Path(spec.origin).parent / file
            if path.is_file():  # what a wheel of another version lacks would have to be downloaded
                found[path.stem] = Image.open(path, formats=formats()).convert("RGB")
    if not found:
        raise FileNotFoundError("no photographs: neither scikit-learn nor scikit-image is installed")
    return found


def write(folder: Path, count: int, size: tuple[int, int], seed: int = 0) -> Path:
    """Writes `count` JPEGs of `size` (width, height) as folder/train/<photograph>/*.jpg.

    Returns the folder. And a tenth as many in folder/val. Each is a crop of a quarter to all of the area, perhaps
    mirrored, resized and compressed at quality 90: about 100 KB at 500 x 375.
    """
    photos = sources()

    def one(job: tuple[str, int]) -> None:
        split, index = job
        name = list(photos)[index % len(photos)]
        rng, photo = random.Random(f"{seed} {split} {index}"), photos[name]
        width, height = (round(side * rng.uniform(0.5, 1)) for side in photo.size)
        left, top = rng.randint(0, photo.width - width), rng.randint(0, photo.height - height)
        crop = photo.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop
        path = folder / split / name / f"{index:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        crop.save(path, quality=90)

    jobs = [("train", i) for i in range(count)] + [("val", i) for i in range(max(len(photos), count // 10))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(one, jobs))
    return folder
