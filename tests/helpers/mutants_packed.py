"""Bugs for the sanitizer to find in packed samples, and in what attention writes over its inputs."""

from mutant import NUMBERS, Mutant

PACKED = [
    Mutant(
        "two samples in the same tiles",
        "attention_packed.py",
        "(others < sample))",
        "(others > sample + 1))",
        "attention, packed",
        "left unwritten",
    ),
    Mutant(
        "the second tile of a sample for the first",
        "attention_packed.py",
        "tl.store(ptrs + 2, index, mask=mask)",
        "tl.store(ptrs + 2, index + 1, mask=mask)",
        "attention, packed",
        "left unwritten",
    ),
    Mutant(
        "a sample that begins with the batch",
        "attention_tiled.py",
        "heads = head_of(k, b, h, HEAD, first, PACKED)",
        "heads = head_of(k, b, h, HEAD, first * 0, PACKED)",
        "attention, packed",
        NUMBERS,
    ),
    Mutant(
        "keys of the next sample",
        "attention_packed.py",
        "return first, end - first",
        "return first, tl.minimum(end - first + 1, tokens - first)",
        "attention, packed",
        "write-write race",
    ),
    Mutant(
        "a whole block without a mask",
        "attention_bias.py",
        "return tl.maximum(count - 1, 0) // BLOCK * BLOCK",
        "return tl.cdiv(count, BLOCK) * BLOCK",
        "attention backward, packed",
        "out of bounds",
    ),
    Mutant(
        "tables of the first sample",
        "attention_rope.py",
        "first.to(tl.int64) * strides[2]",
        "first.to(tl.int64) * 0",
        "attention, packed, rotary",
        NUMBERS,
    ),
    Mutant(
        "sums of a program that is left over",
        "attention_tiled_bwd.py",
        "store_sums(sums_ptr, zero_head_rows(16, QK), tile_of(b, index, N, H, BLOCK_M, PACKED), h, H, QK)",
        "pass",
        "attention backward, packed",
        "left unwritten",
    ),
    Mutant(
        "patches without the prefix before them",
        "patches.py",
        "tl.load(packed[0] + row, mask=mask, other=0)",
        "row",
        "patch embedding, packed",
        "write-write race",
    ),
    Mutant(
        "dQ over K",
        "attention.py",
        "o, do, dq, logits",
        "o, do, k, logits",
        "attention backward, dq",
        "read-write race",
    ),
    Mutant(
        "o over V",
        "attention.py",
        "_arguments(scale, q, k, v, o, logits",
        "_arguments(scale, q, k, v, v, logits",
        "attention",
        "read-write race",
    ),
    # A program reads or writes again what its other threads wrote.
]
