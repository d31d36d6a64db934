"""Small image files of every kind, and folders of them."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFilter


def smooth(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    """A blurred RGB picture: two resamplers agree on it but for rounding."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """The content of an image file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def exif(orientation: int) -> Image.Exif:
    """Metadata that say how an image is to be turned."""
    made = Image.Exif()
    made[ExifTags.Base.Orientation] = orientation
    return made


def bomb(height: int, width: int) -> bytes:
    """A PNG of few bytes with many pixels, all black; beyond a million bytes of them the end is missing."""
    return _png(height, width, 1, 0, bytes(min(1_000_000, height * (1 + -(-width // 8)))))


def _png(height: int, width: int, bits: int, colours: int, lines: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def folder(root: Path, splits=("train", "val"), classes=("a", "b"), count: int = 4, size: int = 32) -> Path:
    """Class folders of JPEG files of one size."""
    for split in splits:
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                smooth(100 * number + i, size, size).save(root / split / name / f"{i}.jpg", quality=95)
    return root


def later(path: Path, data: bytes | None = None) -> None:
    """The time of modification of a file one second later; and other content."""
    before = path.stat()
    if data is not None:
        path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def truncate(path: Path) -> Path:
    """Cuts off the end of a file: its header is whole, its pixels are not."""
    path.write_bytes(path.read_bytes()[:-60])
    return path
