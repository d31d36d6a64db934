"""The settings of a run, its device, its processes, its files and its results."""
