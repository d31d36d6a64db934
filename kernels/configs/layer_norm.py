"""Tiles of LayerNorm, and of the row operations that other kernels share (rows.py)."""

from .tiles import Rule, config

RULES: dict[str, tuple[Rule, ...]] = {
    # Shape classes of LayerNorm: chunks x BLOCK_D of the row (rows.layer_norm_class), with an "a" where a residual
    # (backward: its gradient) is added, an "s" where backward sums for a layer scale.
    "layer_norm_fwd": (
        Rule(config(8, 1, BLOCK_M=1), shape="?x2048*"),
        Rule(config(4, 1, BLOCK_M=1), shape="?x1024*"),
        Rule(config(4, 1, BLOCK_M=2), shape="?x512*"),
        Rule(config(4, 1, BLOCK_M=4), shape="?x256*"),
        Rule(config(4, 1, BLOCK_M=8), shape="?x128*"),
        Rule(config(4, 1, BLOCK_M=16)),
    ),
    # Backward: two warps share 768 or 1024 numbers of a row, so that the accumulators of three column sums leave room
    # for PER_SM programs. Loads of dy, z and dz in flight take (STAGES - 1) * BLOCK_M * D * 6 bytes * PER_SM = 81, 108
    # and 90 KiB of a multiprocessor's shared memory at D = 768, 1024 and 1280; with 99 KiB, wide rows get a stage less.
    # Every program writes a row of each workspace, so many small programs would write more.
    "layer_norm_bwd": (
        Rule(config(8, 1, BLOCK_M=1, STAGES=1, PER_SM=1), bits="32", shape="?x2048*"),
        Rule(config(8, 1, BLOCK_M=1, STAGES=2, PER_SM=1), shape="?x2048*"),
        Rule(config(8, 1, maxnreg=128, BLOCK_M=1, STAGES=3, PER_SM=2), bits="16", shape="3x1024*"),
        Rule(config(8, 1, BLOCK_M=1, STAGES=2, PER_SM=1), shape="?x1024*"),
        Rule(config(4, 1, BLOCK_M=1, STAGES=2, PER_SM=2), bits="32", shape="?x512*"),
        Rule(config(4, 1, BLOCK_M=2, STAGES=2, PER_SM=2), bits="32", shape="?x256*"),
        Rule(config(4, 1, BLOCK_M=4, STAGES=2, PER_SM=2), bits="32", shape="?x128*"),
        Rule(config(4, 1, BLOCK_M=8, STAGES=2, PER_SM=2), bits="32"),
        Rule(config(4, 1, BLOCK_M=1, STAGES=3, PER_SM=2), shape="5x512*"),
        Rule(config(4, 1, BLOCK_M=2, STAGES=4, PER_SM=2), shape="5x*"),
        Rule(config(4, 1, maxnreg=168, BLOCK_M=1, STAGES=3, PER_SM=3), sm=(89, 120), shape="?x512*"),
        Rule(config(4, 1, maxnreg=168, BLOCK_M=1, STAGES=4, PER_SM=3), shape="?x512*"),
        Rule(config(4, 1, maxnreg=168, BLOCK_M=2, STAGES=3, PER_SM=3), sm=(89, 120), shape="4x256*"),
        Rule(config(4, 1, maxnreg=168, BLOCK_M=2, STAGES=4, PER_SM=3), shape="?x256*"),
        Rule(config(4, 1, maxnreg=168, BLOCK_M=4, STAGES=4, PER_SM=3), shape="?x128*"),
        Rule(config(4, 1, maxnreg=168, BLOCK_M=8, STAGES=4, PER_SM=3), shape="?x64*"),
        Rule(config(4, 1, maxnreg=168, BLOCK_M=16, STAGES=4, PER_SM=3)),
    ),
    "scale_rows": (Rule(config(4, 1, BLOCK_M=8, BLOCK_D=256, STAGES=3, PER_SM=6)),),
    "column_sums": (Rule(config(8, 1, BLOCK_P=256, BLOCK_D=16)),),
}
CANDIDATES: dict[str, tuple[Rule, ...]] = {}  # nothing else does these
