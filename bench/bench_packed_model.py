"""Training steps of a ViT on images of many sizes: packed, padded, one size at a time, NaFlexVit.

A step is forward and backward, of the mixes of mixes.py, in bf16 weights on a GPU and fp32 on a CPU; the optimiser is
everybody's own. Logits and gradients are compared with float64 before anything is timed and again after it
(packed_models.py). "vitfast padded" and NaFlexVit run on patches padded to the longest image, the first with the keys
of each image ended in attention, the second with a mask of every pair. FLOPs and bytes are of what is needed, without
padding, for everybody; `padded_share` is the share of the FLOPs that an implementation computes for padding.
"""

import clock
import pytest
import torch
from clock import allocated, peak_bytes, warm_up
from harness import describe, measure
from mixes import MIXES
from packed_models import WAYS, check_of, needed, upstream_of

from vitfast import ops

HOW = ("compile", "eager") if clock.GPU else ("eager",)
CASES = {f"{way} {how}": (way, how) for how in HOW for way in WAYS}
TRAINED = list(MIXES) if clock.GPU else list(MIXES)[:1]
STEPS = 3 if clock.GPU else 1  # calls per timed round


@pytest.mark.parametrize("mix, impl", [pytest.param(m, i, id=f"{m}-{i}") for m in TRAINED for i in CASES])
def test_train_packed(benchmark, mix, impl):
    mix, (way, how) = MIXES[mix], CASES[impl]
    dtype = torch.bfloat16 if clock.GPU else torch.float32
    benchmark.group = f"train packed {mix.shape}"
    with ops.use_kernels("on" if clock.GPU and way.split()[0] == "vitfast" else "auto"):
        check, before = check_of(mix, dtype), allocated()
        runner = WAYS[way](mix, how, dtype)
        errors = check.judge(impl, runner)
        upstream = upstream_of(mix)

        def run():
            for _ in range(STEPS):
                runner(upstream)
                runner.model.zero_grad(set_to_none=True)

        warm_up(run, seconds=clock.WARM_SECONDS)
        peak = peak_bytes(run, before)
        seconds = measure(benchmark, run, calls=STEPS, rounds=max(3, clock.ROUNDS // 3))
        errors["error_after"] = check.judge(impl, runner, " after timing")["error"]
    facts = dict(op="train packed", shape=mix.shape, direction="both", padded_share=runner.share(), **errors)
    facts |= dict(images=len(mix.images), tokens=mix.tokens, steps_per_second=1 / seconds)
    describe(benchmark, impl, needed(mix, dtype).of("both"), seconds, dtype, peak, **facts)
