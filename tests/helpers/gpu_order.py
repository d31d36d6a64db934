"""The order of the tests that need a GPU."""

# On a GPU: first what a run that is cut off must not miss, last what compiles for long.
GPU_ORDER = ("_same_bits", "_computes_the_same", "_around_tile_edges", "kernels/test_gpu.py", "tests/kernels/")
GPU_ORDER += ("tests/adapters/", "test_export")


def urgency(nodeid: str) -> int:
    """The place of a gpu test in GPU_ORDER."""
    return next((place for place, part in enumerate(GPU_ORDER) if part in nodeid), len(GPU_ORDER) - 2)
