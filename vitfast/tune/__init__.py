"""Finding the fastest tiles on the GPU at hand: `vitfast tune`."""
