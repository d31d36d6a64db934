"""Reading machine code: instructions and waits of toy kernels whose answer is known, compiled without a GPU."""

import json

import pytest
from processes import uninterpreted

from vitfast.tools.machine_code.cubin import Code, programs_per_multiprocessor

TOYS = """
import json
import torch, triton
import triton.language as tl
from vitfast.tools.machine_code import compiler, cubin
from vitfast.kernels.launch import Launch

@triton.jit
def step(acc, most, q, k_ptr, v_ptr, start, SIZE: tl.constexpr):
    i, j = start + tl.arange(0, SIZE)[:, None], tl.arange(0, 64)[None, :]
    s = tl.dot(q, tl.trans(tl.load(k_ptr + i * 64 + j)))
    higher = tl.maximum(most, tl.max(s, 1))
    acc = acc * tl.exp2(most - higher)[:, None]
    return tl.dot(tl.exp2(s - higher[:, None]).to(tl.bfloat16), tl.load(v_ptr + i * 64 + j), acc), higher

@triton.jit
def whole_then_last(q_ptr, k_ptr, v_ptr, out_ptr, N, LAST_FIRST: tl.constexpr):
    # what ptxas serialises: a short block after a pipelined loop that carries an accumulator
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    q = tl.load(q_ptr + i * 64 + j)
    acc = tl.zeros((64, 64), tl.float32)
    most = tl.full((64,), float("-inf"), tl.float32)
    if LAST_FIRST:
        acc, most = step(acc, most, q, k_ptr, v_ptr, N, 16)
    for start in range(0, N, 64):
        acc, most = step(acc, most, q, k_ptr, v_ptr, start, 64)
    if not LAST_FIRST:
        acc, most = step(acc, most, q, k_ptr, v_ptr, N, 16)
    tl.store(out_ptr + i * 64 + j, acc)

def read(kernel, **arguments):
    compiled = compiler.compiled(Launch(kernel, (1,), arguments | dict(num_warps=4, num_stages=3)), 90)
    code = cubin.read(compiled.asm["cubin"])
    notes = cubin.assembler_notes(compiled.asm["ptx"], 90)
    found = dict(hgmma=code.count("HGMMA"), hmma=code.count("HMMA"), mufu=code.count("MUFU"), core=code.tensor_core)
    found |= dict(waits=code.waits, notes=notes, spills=code.spills, registers=code.registers)
    return found

x, y = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
attention = [read(whole_then_last, q_ptr=x, k_ptr=x, v_ptr=x, out_ptr=y, N=197, LAST_FIRST=f) for f in (True, False)]
print(json.dumps(attention))
"""


@pytest.mark.long
def test_waits_and_notes_of_known_kernels(tmp_path):
    script = tmp_path / "toys.py"
    script.write_text(TOYS)
    clean, serialised = json.loads(uninterpreted(script))
    for row in (clean, serialised):
        assert row["hgmma"] >= 8 and row["core"] == "HGMMA" and row["hmma"] == row["spills"] == 0
    assert clean["waits"] <= clean["hgmma"] / 2 and clean["notes"] == []
    assert serialised["waits"] == serialised["hgmma"] and serialised["notes"] == ["C7515"]


def test_names_and_spills_of_a_listing():
    body = "MOV R1, c[0x0][0x28]", "STL [R1], R4", "@!P0 LDL.64 R2, [R1]"
    body += "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0", "@P0 BRA `(.L_x_0)", "BRA `(.L_x_1)"
    code = Code(90, 8, body, {})
    assert (code.spills, code.waits, code.count("LDL", "MOV"), code.tensor_core) == (2, 1, 2, "HGMMA")


def test_a_group_is_no_wait_where_some_run_on():
    """As Triton 3.6 has it where wgmma reads registers, and as ptxas serialises."""
    group = ("WARPGROUP.ARRIVE", "HGMMA.64x256x16.F32.BF16 R24, R164, gdesc[UR8], R24, gsb0", "I2F R3, R4")
    left = {count: f"WARPGROUP.DEPBAR.LE gsb0, 0x{count:x}" for count in (0, 1, 3)}
    inside = ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24",)
    for body, waits in [
        ((*group, left[3]) * 4, 0),
        ((*group, left[3]) * 3 + (*group, left[0]), 1),
        ((*group, left[0]) * 4, 4),
        ((*group, left[1], left[0]) * 2, 0),  # the first wait counts: what follows it runs beside the rest
        (group * 2, 2),  # nothing said: a wait
        ((*inside, *inside, *group, left[0]), 1),
    ]:
        assert Code(90, 0, body, {}).waits == waits, body


def test_programs_that_fit_by_registers_warps_and_shared_memory():
    """CUDA's occupancy tables: 168 registers leave room for 3 programs of 4 warps on sm_90, and so on."""
    given = ((168, 4, 0, 90), (128, 8, 0, 90), (32, 4, 100_000, 90), (32, 1, 0, 89))
    assert [programs_per_multiprocessor(*each) for each in given] == [3, 2, 2, 32]
