"""What a run on a GPU launches, recorded on meta tensors: by doctor, the gpu tests and the benchmarks."""

from collections.abc import Iterable

import torch

from vitfast import ops
from vitfast.kernels.configs import tiles
from vitfast.kernels.launch import Launch, record
from vitfast.tools import doctor
from vitfast.tools.machine_code.model_launches import META, launching_on_meta, resize, training_step
from vitfast.tools.verify import cases, run
from vitfast.tools.verify.draw import Draw, Sizes
from vitfast.tools.verify.launcher import candidates


def operations(
    s: Sizes, dtypes: list[torch.dtype], names: list[str] | None = None, others: bool = False
) -> list[Launch]:
    """What doctor's cases launch at these sizes: forward without gradients, and forward and backward with them.

    others: with every other tile too that could do what they do.
    """
    found = []
    for name, (function, inputs) in cases(s, ops).items():
        for dtype in dtypes if names is None or name in names else ():
            tensors = Draw(dtype, META).leaves(inputs)

            def both_ways(function=function, tensors=tensors):
                with torch.no_grad():
                    function(*tensors)
                return run(function, tensors, [torch.empty_like(o) for o in run(function, tensors)])

            with tiles.using() as used:
                found += record(both_ways)
            for override in candidates(used, dtype, META) if others else ():
                with tiles.using(*override):
                    found += record(both_ways)
    return found


def fp32_stream(s: Sizes) -> list[Launch]:
    """What the two blocks launch where `accelerate` keeps timm's fp32 residual stream under autocast."""
    found = []
    for name, function in (("attention_block", ops.attention_block), ("mlp_block", ops.mlp_block)):
        x, w, b, *matrices = Draw(torch.bfloat16, META).leaves(cases(s, ops)[name][1])[:7]
        stream = [t.detach().float().requires_grad_() for t in (x, w, b)]
        options = dict(num_heads=s.heads) if name == "attention_block" else {}

        def run(function=function, tensors=(*stream, *matrices), options=options):
            out = function(*tensors, residual_in_fp32=True, **options)
            out.backward(torch.empty_like(out))

        found += record(run)
    return found


def everything(sm: int, sizes: Iterable[Sizes]) -> list[Launch]:
    """What doctor, the gpu tests, and the benchmarks of operations and models launch on a GPU of this generation."""
    import test_gpu

    bf16 = [torch.bfloat16]
    half = [torch.float16, *bf16]
    wanted = [torch.float32, *half]
    marks = test_gpu.test_attention_around_tile_edges.pytestmark
    edges = {mark.args[0]: mark.args[1] for mark in marks if mark.name == "parametrize"}
    presets = (("B/16", 224, 256), ("S/16", 224, 512), ("L/16", 224, 128), ("H/14", 224, 64), ("B/16", 384, 64))
    with tiles.using(sm=sm), launching_on_meta():
        found = operations(doctor.GPU_SIZES, wanted)
        for s in sizes:
            found += operations(s, bf16)
            found += fp32_stream(s)
        for name, s in test_gpu.SIZES.items():
            found += operations(s, wanted)
            found += operations(s, half, others=True) if name in ("B/16 224", "H/14 224") else []
        for tokens in edges["tokens"]:
            for head in edges["head"]:
                s = Sizes(batch=2, tokens=tokens, width=3 * head, heads=3, hidden=64, image=32, patch=16)
                found += operations(s, bf16, ["attention"])
        for preset, image, batch in presets:
            for amp in (False, True):
                found += training_step(preset, image, batch, True, amp)
                for count in (1, 64, 128, 256, 512):
                    found += training_step(preset, image, count, False, amp)
        return [*found, *resize().values()]
