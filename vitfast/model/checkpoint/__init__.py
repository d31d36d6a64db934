"""Reads every weight format of the field into a ViT, and writes a ViT in most of them.

`load` and `writers` are the ways in and out; `names` has the names of the other formats and ours, `formats` how the
others are recognised and read; what a checkpoint says about its model is found in `config`; bytes are in `files`.
"""

from .load import load_checkpoint, load_model, read
from .writers import save

__all__ = ["load_checkpoint", "load_model", "read", "save"]
