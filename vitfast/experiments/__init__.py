"""Runs of runs: sweeps, accuracy against compute, position embeddings, VTAB, and the demo."""
