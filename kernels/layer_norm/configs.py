"""Launch configurations of LayerNorm, and of the row operations that other kernels share (rows.py).

Shape classes of LayerNorm: chunks x BLOCK_D of the row (rows.layer_norm_class), with an "a" where a residual (backward:
its gradient) is added, an "s" where backward sums for a layer scale.
"""

import re

from ..tiles import KernelConfig, config, first


def layer_norm_fwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    block = int(re.search(r"x(\d+)", shape)[1])
    return [config(8 if block == 2048 else 4, 1, BLOCK_M=min(16, max(1, 1024 // block)))]


def layer_norm_bwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """Programs of several rows, whose sums of three columns leave room for PER_SM programs.

    Two warps share 768 or 1024 numbers of a row. Loads of dy, z and dz in flight take (STAGES - 1) * BLOCK_M * D * 6
    bytes * PER_SM = 81, 108 and 90 KiB of a multiprocessor's shared memory at D = 768, 1024 and 1280; with 99 KiB, wide
    rows get a stage less. Every program writes a row of each workspace, so many small programs would write more.
    """
    chunks, block = map(int, re.match(r"(\d)x(\d+)", shape).groups())
    fp32, tight = bits == "32", sm in (89, 120) and (block == 512 or shape.startswith("4x256"))
    warps, stages, per_sm, registers, most_rows = first(
        (block == 2048, (8, 1 if fp32 else 2, 1, 0, 1)),
        (block == 1024 and chunks == 3 and not fp32, (8, 3, 2, 128, 1)),
        (block == 1024, (8, 2, 1, 0, 1)),
        (fp32, (4, 2, 2, 0, 8)),
        (chunks == 5, (4, 3 if block == 512 else 4, 2, 0, 2)),
        (True, (4, 3 if tight else 4, 3, 168, 16)),
    )
    rows = min(most_rows, max(1, 512 // block))
    return [config(warps, 1, maxnreg=registers, BLOCK_M=rows, STAGES=stages, PER_SM=per_sm)]


OPERATIONS = {
    "layer_norm_fwd": layer_norm_fwd,
    "layer_norm_bwd": layer_norm_bwd,
    "scale_rows": lambda *_: [config(4, 1, BLOCK_M=8, BLOCK_D=256, STAGES=3, PER_SM=6)],
    "column_sums": lambda *_: [config(8, 1, BLOCK_P=256, BLOCK_D=16)],
}
