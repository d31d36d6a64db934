"""Images of five sizes, in patches of 4 x 4."""

import torch

SIZES = [(32, 24), (16, 24), (4, 4), (40, 12), (8, 64)]


def images_of(raw=False, sizes=SIZES):
    if raw:
        return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    return [torch.randn(3, *size) for size in sizes]
