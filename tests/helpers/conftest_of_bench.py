"""bench/conftest.py under a name of its own."""

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parents[2] / "bench" / "conftest.py"
_spec = importlib.util.spec_from_file_location(__name__, _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules[__name__] = _module
