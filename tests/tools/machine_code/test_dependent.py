"""Kernels that begin while the one before them ends: in PTX, memory is touched after the wait alone."""

import json
import re

import pytest
from processes import uninterpreted

import vitfast.tools.doctor  # noqa: F401  before the script: kernels stay interpreted in this process

SCRIPT = """
import json, sys
import torch
from vitfast.kernels import tiles
from vitfast.kernels.dependent import wait_for_kernel_before
from vitfast.kernels.launch import record
from vitfast.tools.machine_code import compiler
from vitfast.tools.machine_code.model_launches import launching_on_meta, model, step

found = []
with tiles.using(sm=90), launching_on_meta():
    short = [config for config in tiles.operations()["attention_fwd"]("d64n256s", "16", 90)]
    for config in [None, *short]:
        vit = model("B/16", 224, train=False, amp=False, depth=1)
        for images in (torch.bfloat16, torch.uint8):
            with tiles.using("attention_fwd" if config else "", config):
                found += step(vit, 1, images)
    gated = model("B/16", 224, train=False, amp=False, depth=1, swiglu_mlp=True, norm_layer="rmsnorm")
    found += step(gated, 1)
    found += step(model("B/16", 224, train=False, amp=False, depth=1, embed_dim=32, num_heads=2), 1)
    many = [each.kernel.__name__ for each in step(vit, 64) if each.arguments.get("PDL")]
code = {(each.kernel.__name__, compiler.key_of(each, 90)): each for each in found}
told = [(name, each.arguments.get("launch_pdl", False), compiler.compiled(each, 90).asm["ptx"])
        for (name, _), each in code.items()]
print(json.dumps(dict(told=told, many=many)))
"""
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
# Of global memory; a prefetch writes and reads nothing.
TOUCHES = re.compile(r"\b(ld|st|red|atom)\.(\w+\.)*global|\bcp\.async|\bld\.volatile|\bcp\.reduce|\bmultimem")
DEPENDENT = {"norm_linear_kernel", "split_linear_kernel", "patch_embed_fwd_kernel"}
DEPENDENT |= {"_attention_fwd_short_kernel", "_attention_fwd_tiled_kernel"}


def order(ptx: str) -> list[str]:
    """What a kernel does with the kernels beside it and with global memory, in the order of its code."""
    found = []
    for line in (line.partition("//")[0].strip() for line in ptx.splitlines()):
        if "griddepcontrol" in line or TOUCHES.search(line):
            found.append(line.rstrip(";") if "griddepcontrol" in line else "memory")
        elif re.match(r"(@!?%p\d+ )?(ret|exit)\b", line):
            found.append("end")
    return found


def wrong(ptx: str) -> str | None:
    """Why the kernel may not begin while the one before it ends; None if it may."""
    steps = order(ptx)
    if steps.count(WAIT) != 1 or steps.count(LAUNCH) != 1:
        return f"{steps.count(WAIT)} waits, {steps.count(LAUNCH)} launches"
    if steps[0] != WAIT:
        return f"{steps[0]} before the wait"
    return None if steps[1] == LAUNCH else "the next kernel begins late"


@pytest.mark.slow
def test_memory_is_touched_after_the_wait_alone(tmp_path):
    script = tmp_path / "dependent.py"
    script.write_text(SCRIPT)
    found = json.loads(uninterpreted(script).splitlines()[-1])
    dependent = {name for name, launched, _ in found["told"] if launched}
    assert dependent == DEPENDENT and found["many"] == ["norm_linear_kernel"], "of 64 images the head has few rows"
    for name, launched, ptx in found["told"]:
        assert (wrong(ptx) is None) == launched, (name, wrong(ptx))
        assert ("prefetch.global.L2" in ptx) == (name in ("norm_linear_kernel", "split_linear_kernel"))


def test_what_is_wrong_is_seen():
    """In code that begins too early, never, twice, or lets the next kernel begin before it has waited itself."""
    load, wait, launch = "ld.global.v4.b32 {%r1}, [%rd1];", f"{WAIT};", f"{LAUNCH};"
    right = ["prefetch.global.L2 [%rd1];", wait, launch, load, "ret;"]
    assert wrong("\n".join(right)) is None
    for lines in ([load, wait, launch], [wait, load, launch], [launch, wait, load], [load], [wait, wait, launch, load]):
        assert wrong("\n".join([*lines, "ret;"]))
    for early in (
        "@%p1 ret;",
        "cp.async.cg.shared.global [%r1], [%rd1], 16;",
        "@%p2 st.relaxed.gpu.global.b32 [%rd1], %r2;",
    ):
        assert wrong("\n".join([early, *right[1:]]))
