"""`vitfast.ref`, the public name of ops/reference.py: that module itself, not a copy."""

import sys

from .ops import reference

sys.modules[__name__] = reference
