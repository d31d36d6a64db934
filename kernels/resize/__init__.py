"""Resizing of 8-bit images in fixed-point numbers."""
