"""Patch embedding: patches, their projection, positions and prefix tokens."""
