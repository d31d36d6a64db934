"""WebDataset shards of small pictures."""

import io
import tarfile
from pathlib import Path

import pictures


def files(count: int) -> list[bytes]:
    """The contents of so many image files."""
    return [pictures.encoded(pictures.smooth(i, 24, 24)) for i in range(count)]


def write(path: Path, members: list[tuple[str, bytes]]) -> None:
    """A tar file of these names and contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def shards(root: Path, contents: list[bytes], splits=("train", "val"), suffix: str = "png") -> Path:
    """Two shards a split, three classes in turn."""
    for split in splits:
        for shard in range(2):
            pairs = [(f"s/{i:03d}", contents[i], b"%d" % (i % 3)) for i in range(shard, len(contents), 2)]
            members = [m for key, image, label in pairs for m in ((f"{key}.cls", label), (f"{key}.{suffix}", image))]
            write(root / f"{split}-{shard}.tar", members)
    return root
