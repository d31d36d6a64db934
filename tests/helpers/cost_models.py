"""Models and rates for the tests of costs."""

import torch

from vitfast import ViT
from vitfast.tools.cost.gpus import GIB, Rates

# The rates that the budget of a B/16 step was made with: a product of 8192^3 and a copy, measured on an H200.
MEASURED = Rates("H200", 790e12, 4.3e12, 141 * GIB)
TINY = dict(img_size=(16, 24), patch_size=8, num_classes=7, embed_dim=32, depth=2, num_heads=2)


def on_meta(name: str, **options) -> ViT:
    with torch.device("meta"):
        return ViT.from_preset(name, **options)
