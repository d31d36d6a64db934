"""Work on kernels and plans of runs: doctor, verify, tune, cost, machine code."""
