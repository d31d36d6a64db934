"""The version, which setup.py reads."""

__version__ = "0.1.0"
