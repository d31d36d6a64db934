"""`python -m vitfast.timm_models SCRIPT ...` runs a script with the vit_fast_* models known to timm."""

import runpy
import sys
from pathlib import Path

import vitfast.timm_models  # noqa: F401 - registers

if len(sys.argv) < 2:
    sys.exit("usage: python -m vitfast.timm_models SCRIPT [ARGUMENT ...]")
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
