"""Measuring trained weights: accuracy on a validation set, and what frozen features can do."""
