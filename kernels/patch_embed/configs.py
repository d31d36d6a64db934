"""Launch configurations of patch embedding. Shape classes: "u8-even-large", see patches.patch_class."""

from ..tiles import KernelConfig, config, configures, first

CUBLAS = config(provider="cublas")


def _config(warps: int, stages: int, m: int, d: int, k: int, **more: int) -> KernelConfig:
    return config(warps, stages, BLOCK_M=m, BLOCK_D=d, BLOCK_K=k, **more)


@configures("patch_embed_fwd")
def _fwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    large, raw = shape.endswith("large"), shape.startswith("u8")
    best = first(
        (bits == "32" and shape.startswith("f32-even"), _config(4, 3, 64, 64, 16)),
        (bits == "32", _config(4, 3, 32, 64, 16 if raw else 32)),
        (shape.endswith("few"), _config(4, 3, 32, 32, 64)),  # compiled, not timed
        (not large, _config(4, 3, 64, 64, 64)),
        (sm == 90 and shape == "f32-odd-large", _config(8, 4, 128, 256, 32)),
        (sm in (90, 100), _config(8, 3, 128, 256, 64)),
        (True, _config(8, 4 if sm == 80 else 3, 128, 128, 32)),
    )
    # On sm_90 each block of columns converts raw pixels again. The main loop takes 15.1 instructions per element of the
    # result with 128 x 256 x 64, 26.3 with 128 x 128, and with the two configurations below 11.1 and 19.1 (counted with
    # Triton 3.6 at B/16, not timed). Two programs of the second one fit a multiprocessor.
    even = [_config(8, 2, 128, 256, 128)] if shape == "u8-even-large" else []
    return [best, CUBLAS, *(even + [_config(4, 3, 64, 256, 64)] if sm == 90 and raw and large else [])]


@configures("patch_embed_dweight")
def _dweight(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """PROGRAMS: the number of programs that splitting the rows aims at."""
    few_rows = bits == "32" or sm in (80, 89, 120)
    best = first(
        (bits == "32" and shape.startswith("u8"), _config(4, 3, 16, 64, 64, PROGRAMS=264)),
        (bits == "32" or not shape.endswith("large"), _config(4, 3, 32 if few_rows else 64, 64, 64, PROGRAMS=264)),
        (few_rows, _config(8, 3, 32, 128, 128, PROGRAMS=132)),
        (True, _config(8, 3 if sm == 90 else 2, 64, 256, 128, PROGRAMS=132)),
    )
    return [best, CUBLAS]


@configures("patch_embed_dimages")
def _dimages(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    best = first(
        (bits == "32", _config(4, 3, 64, 32, 64)),
        (not shape.endswith("large"), _config(4, 3, 64, 64, 32 if sm in (80, 89, 120) else 64)),
        (True, _config(8, 3, 128, 32 if sm == 89 else 64, 64 if sm == 120 else 128)),
    )
    return [best, CUBLAS]
