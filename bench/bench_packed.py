"""Images of many sizes: attention, and training steps of a ViT; packed, padded, one size at a time, and by others.

The mixes are those of mixes.py. FLOPs and bytes are of what is needed, without padding, for everybody; `padded_share`
is the share of the pairs of a query and a key, or of a step's FLOPs, that an implementation computes for padding
(padding.py), None where its tiles are not known. Truth is float64 of each image alone, compared image by image.

Attention: q, k and v come apart, each way in the layout that it wants, so that no way pays for another's. "vitfast":
packed, ops.attention with offsets. "vitfast padded": (S, longest, H, Dh) with key_lengths, all queries computed.
"vitfast one size at a time": a call for each group of images of equal height and width. The peers take packed tensors.
A step is forward and backward, in bf16 weights on a GPU and fp32 on a CPU; the optimiser is everybody's own. "vitfast
padded" and NaFlexVit run on patches padded to the longest image, the first with the keys of each image ended in
attention, the second with a mask of every pair.
"""

import functools

import clock
import harness
import padding
import pytest
import torch
from clock import allocated, peak_bytes, warm_up
from harness import Case, bench, describe, measure, values
from mixes import MIXES, Mix
from packed import PEERS, WAYS, check_of, offsets_of, upstream_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vitfast import ops
from vitfast.ops import reference as ref

LAYOUTS = {"vitfast": "packed", "vitfast padded": "padded", "vitfast one size at a time": "one size at a time"}
ON_CPU = (*LAYOUTS, "torch nested")  # the others are for GPUs alone
HOW = ("compile", "eager") if clock.GPU or clock.REHEARSED else ("eager",)
STEPS = 3 if clock.GPU else 1  # calls per timed round


def alone(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Plain attention of (B, N, H, Dh), whose logits are made again for backward: not all would fit."""
    return checkpoint(functools.partial(ref.attention, **options), q, k, v, use_reentrant=False)


def plain_packed(mix: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    images = zip(*(x.split(mix.lengths) for x in (q, k, v)))
    return torch.cat([alone(*(x[None] for x in image))[0] for image in images])


def plain_padded(lengths: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    images = zip(*(x.split(1) for x in (q, k, v)), lengths.split(1))
    return torch.cat([alone(*image, key_lengths=n) for *image, n in images])


def by_group(attention, *tensors: Tensor) -> tuple[Tensor, ...]:
    """tensors: q, k and v of the first group of images, then of the next."""
    return tuple(attention(*tensors[i : i + 3]) for i in range(0, len(tensors), 3))


def case_of(mix: Mix, layout: str) -> Case:
    """A mix in a layout; its shape's name is the same in all."""
    heads, head = mix.sizes["heads"], mix.sizes["head"]
    if layout == "packed":
        formula, cut, shapes = functools.partial(plain_packed, mix), lambda x: x.split(mix.lengths), [(mix.tokens,)] * 3
    elif layout == "padded":
        formula = functools.partial(plain_padded, offsets_of(mix).diff())
        cut, shapes = lambda x: x.unbind(0), [(len(mix.lengths), mix.longest)] * 3
    else:
        formula, cut = functools.partial(by_group, alone), lambda x: x.unbind(0)
        shapes = [shape for shape in mix.uniform for _ in "qkv"]
    make = lambda: [values(*shape, heads, head) for shape in shapes]  # noqa: E731
    return Case("packed attention", mix.shape, formula, make, 0, mix.attention_work(harness.DTYPE.itemsize), cut)


def function_of(impl: str, mix: Mix):
    """The function of a name; skips the case where it is somebody's who is not installed."""
    if impl in PEERS:
        return PEERS[impl](mix)
    offsets = offsets_of(mix)
    if impl == "vitfast":
        return functools.partial(ops.attention, offsets=offsets, longest=mix.longest)
    if impl == "vitfast padded":
        return functools.partial(ops.attention, key_lengths=offsets.diff())
    return functools.partial(by_group, ops.attention)


def wanted() -> list:
    """(mix, direction, impl) of attention's cases; on a CPU both directions at once, and forward of ours."""
    found = [
        (mix, direction, impl)
        for mix in MIXES
        for direction in ("forward", "backward", "both")
        for impl in (*LAYOUTS, *PEERS)
        if clock.GPU or (impl in ON_CPU and direction != "backward")
    ]
    return [pytest.param(*case, id="-".join(case)) for case in found]


@pytest.mark.parametrize("mix, direction, impl", wanted())
def test_attention_packed(benchmark, mix, direction, impl):
    mix = MIXES[mix]
    share = padding.flex_share(mix) if impl.startswith("flex") else None
    share = padding.attention_share(mix, LAYOUTS[impl], direction) if impl in LAYOUTS else share
    facts = dict(padded_share=share, images=len(mix.images), tokens=mix.tokens)
    bench(benchmark, case_of(mix, LAYOUTS.get(impl, "packed")), impl, function_of(impl, mix), direction, **facts)


TRAINED = list(MIXES) if clock.GPU or clock.REHEARSED else list(MIXES)[:1]
STEP_CASES = [pytest.param(m, way, how, id=f"{m}-{way} {how}") for m in TRAINED for how in HOW for way in WAYS]


@pytest.mark.parametrize("mix, way, how", STEP_CASES)
def test_train_packed(benchmark, mix, way, how):
    mix, impl, dtype = MIXES[mix], f"{way} {how}", torch.bfloat16 if clock.GPU else torch.float32
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
    needed = mix.model_work(dtype.itemsize).of("both")  # without padding
    describe(benchmark, impl, needed, seconds, dtype, peak, **facts)
