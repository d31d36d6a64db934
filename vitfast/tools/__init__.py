"""Tools that check, tune and inspect kernels, and that work out the cost of a run."""
