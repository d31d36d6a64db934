"""vitfast's models under timm's names; importing this package registers them with timm.

`timm.create_model("vit_fast_base_patch16_224")` works from then on. timm looks for no Python entry points of other
packages, so something has to import this package before timm is asked for a model. For a script that does not, such as
timm's own train.py, `python -m vitfast.timm_models train.py --model vit_fast_base_patch16_224 ...` (or
`torchrun --nproc-per-node 8 -m vitfast.timm_models train.py ...`) does it and then runs the script.
"""

try:
    from . import vision_transformer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("timm", "torchvision"):
        raise
    needs = f"vitfast.timm_models needs timm and torchvision ({error}): pip install timm torchvision"
    raise ImportError(needs, name=error.name) from None
from .vision_transformer import *  # noqa: F403 - the entry points, as in timm.models

__all__ = vision_transformer.__all__
