"""How many training images a data SPEC has, counted without opening the data for training."""

from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ..errors import InputError
from ..run.config import Config
from .datasets import open_named
from .folders import LABELS, TRAINING
from .image_files import PassedOver, image_files, suffix
from .lists import read_table
from .shards import tar_images

# How many training images torchvision's data sets have: none is downloaded to count them.
TORCHVISION = dict(cifar10=50_000, cifar100=50_000, mnist=60_000, kmnist=60_000, fashion_mnist=60_000, qmnist=60_000)
TORCHVISION |= dict(imagenet=1_281_167, places365=1_803_460, inaturalist=2_686_843, inat=2_686_843)


def count_images(config: Config, most: int) -> int:
    """How many training images a config's data has; files are counted up to `most` + 1.

    Returns 0 for files that cannot be listed. Raises InputError where a library cannot open its data set.
    """
    library, _, name = config.data.partition("/")
    if library == "torch" and name.lower() in TORCHVISION:
        count = TORCHVISION[name.lower()]
    elif library in ("hfds", "hfids", "tfds") and name:
        count = _of_library(config.data, config.data_dir)
    else:
        root, count = Path(config.data_dir or name or library if library in ("torch", "wds") else config.data), 0
        with suppress(InputError, OSError):
            count = sum(1 for _ in islice(_in_shards(root) if library == "wds" else _in_folder(root), most + 1))
    return min(count, config.train_images or count)


def _of_library(spec: str, data_dir: str) -> int:
    """How many training images a library's data set has; the hub's are not downloaded if a card says it."""
    with suppress(InputError):
        if spec.startswith("hfds/"):
            return _of_library(f"hfids/{spec[5:]}", data_dir)
    dataset = open_named(spec, data_dir, "train", is_training=True, batch_size=1)
    return getattr(getattr(dataset, "reader", None), "num_samples", None) or len(dataset)


def _in_shards(root: Path) -> Iterable:
    for path in [*root.glob("train*.tar"), *root.glob("train*/*.tar")] or root.glob("*.tar"):
        yield from tar_images(path, PassedOver(), lambda _, member: suffix(member.name) == ".cls")


def _in_folder(root: Path) -> Iterable:
    folder = next((root / name for name in TRAINING if (root / name).is_dir()), root)
    table = next((folder / name for name in LABELS if (folder / name).exists()), None)
    return read_table(table, say=False) if table else image_files(folder, say=False)
