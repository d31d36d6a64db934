"""Reads every weight format of the field into a ViT, and writes a ViT in most of them.

`load` and `save` are the ways in and out; the names of the other formats become ours in `formats` and ours become theirs in `writers`;
what a checkpoint says about its model is found in `config`; bytes are in `files`.
"""

from .load import build, load_checkpoint, read
from .save import save

__all__ = ["build", "load_checkpoint", "read", "save"]
