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

    Returns 0 for files that cannot be listed. Raises InputError where Hugging Face's library cannot open its data set.
    """
    library, _, name = config.data.partition("/")
    if library == "torch" and name.lower() in TORCHVISION:
        count = TORCHVISION[name.lower()]
    elif library == "hfds" and name:
        count = _of_hugging_face(name, config.data_dir)
    else:
        root, count = Path(config.data_dir or name or library if library in ("torch", "wds") else config.data), 0
        with suppress(InputError, OSError):
            count = sum(1 for _ in islice(_in_shards(root) if library == "wds" else _in_folder(root), most + 1))
    return min(count, config.train_images or count)


def _of_hugging_face(name: str, data_dir: str) -> int:
    """How many training images a data set of Hugging Face has; it is not downloaded if its card says it."""
    with suppress(InputError):  # timm's reader of streams opens the card alone
        return open_named(f"hfids/{name}", data_dir, "train").reader.num_samples
    return len(open_named(f"hfds/{name}", data_dir, "train"))


def _in_shards(root: Path) -> Iterable:
    for path in [*root.glob("train*.tar"), *root.glob("train*/*.tar")] or root.glob("*.tar"):
        yield from tar_images(path, PassedOver(), lambda _, member: suffix(member.name) == ".cls")


def _in_folder(root: Path) -> Iterable:
    folder = next((root / name for name in TRAINING if (root / name).is_dir()), root)
    table = next((folder / name for name in LABELS if (folder / name).exists()), None)
    return read_table(table, say=False) if table else image_files(folder, say=False)
