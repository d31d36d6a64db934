"""Bugs for the sanitizer to find in rotary positions, biases, lengths of keys and gated layers."""

from mutant import NUMBERS, Mutant

ON_LOGITS = [
    Mutant(
        "a row past the tables",
        "attention_rope.py",
        "& (rows < N)\n    row_ptrs",
        "& (rows <= N)\n    row_ptrs",
        "attention, rotary",
        "out of bounds",
    ),
    Mutant(
        "prefix tokens turned",
        "attention_rope.py",
        "(rows >= rope[3]) &",
        "(rows >= 0) &",
        "attention, rotary",
        "out of bounds",
    ),
    Mutant(
        "gradients turned on",
        "attention_rope.py",
        "a * cos_a + b * sin_b, b * cos_b - a * sin_a, rows",
        "a * cos_a - b * sin_b, b * cos_b + a * sin_a, rows",
        "attention backward, rotary",
        NUMBERS,
    ),
    Mutant(
        "the next head's bias",
        "attention_bias.py",
        "h.to(tl.int64) * strides[1])",
        "(h + 1).to(tl.int64) * strides[1])",
        "attention, bias",
        "out of bounds",
    ),
    Mutant(
        "a bias of one sample",
        "attention_bias.py",
        "in tl.range(0, samples,",
        "in tl.range(0, 1,",
        "attention backward, of a bias",
        NUMBERS,
    ),
    Mutant(
        "keys that do not count",
        "attention_tiled.py",
        "(cols < keys)[None, :], s,",
        "(cols < N)[None, :], s,",
        "attention, key lengths",
        NUMBERS,
    ),
    Mutant(
        "the sums of the gates in those of up",
        "gated.py",
        "sum_ptrs[1] + index_m",
        "sum_ptrs[0] + index_m",
        "dgated",
        "left unwritten",
    ),
]
