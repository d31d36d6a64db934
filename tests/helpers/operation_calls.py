"""Counts the operations that a model calls, below every claim."""

from collections import Counter

import pytest
import torch

from vitfast import ops

# Of each part in a report, the public operations that may do it.
PART_OF = {
    "attention_block": "attention block",
    "mlp_block": "MLP block",
    "gated_mlp_block": "MLP block",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "mlp": "MLP",
    "gated_mlp": "MLP",
    "patch_embed": "patch projection",
    "attention": "attention",
}


def calls(model, *args, **kwargs) -> Counter:
    """The public operations that one forward calls, by part, those with no kernel yet too."""
    seen = Counter()

    def counting(name, function):
        return lambda *a, **k: (seen.update([PART_OF[name]]), function(*a, **k))[1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name in PART_OF:
            patch.setattr(ops, name, counting(name, getattr(ops, name)))
        model(*args, **kwargs)
    return seen


def claimed(report) -> Counter:
    """The same from a report: attention without its block runs beside a norm."""
    found = Counter()
    for entry in report.replaced:
        if "set_attn_implementation" in entry.part:
            found["attention"] += 1
        elif ", around " in entry.part and "attention" in entry.part:
            found.update(["attention", "norm"])
        else:
            found[entry.part] += 1
    return found
