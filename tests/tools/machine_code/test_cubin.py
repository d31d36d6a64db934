"""Reading machine code: instructions and waits of toy kernels whose answer is known, compiled without a GPU."""

import json

import pytest
from cubin import Code, programs_per_multiprocessor
from processes import uninterpreted

TOYS = """
import json
import cubin, torch, triton
import triton.language as tl
from vitfast.tools.machine_code import compiler
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


# One loop over steps and blocks, which skips what begins a block and what ends it; the wait for TMA lies apart.
PERSISTENT = """MOV R1, R2
.L_step: @P1 BRA `(.L_same)
IMAD R3, R4, R5
.L_same: SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R8
@!P0 BRA `(.L_wait)
.L_over: HGMMA.64x256x16.F32.BF16 R24, gdesc[UR44], R24
HGMMA.64x256x16.F32.BF16 R24, gdesc[UR44], R24, gsb0
@P2 BRA `(.L_next)
FADD R24, R24, R6
.L_store: STG.E [R2], R24
.L_next: @P3 BRA `(.L_step)
EXIT
.L_wait: SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R8
@!P0 BRA `(.L_wait)
BRA `(.L_over)
.L_trap: BRA `(.L_trap)"""
# A block for each program; if there is no step, other code writes zeros.
ONE_BLOCK = """@P0 BRA `(.L_product)
STG.E [R2], RZ
EXIT
.L_product: MOV R1, R2
.L_step: HMMA.16816.F32.BF16 R4, R8, R12, R4
@P1 BRA `(.L_step)
FADD R4, R4, R6
STG.E [R2], R4
@P2 EXIT
EXIT"""


def code_of(listing: str) -> Code:
    """The code of lines as nvdisasm writes them, labels before their instruction."""
    lines = [line.rpartition(": ") for line in listing.split("\n")]
    return Code(90, 0, tuple(text for *_, text in lines), {label: at for at, (label, *_) in enumerate(lines) if label})


def test_instructions_of_a_step_and_of_the_rest_of_a_block():
    code, one = code_of(PERSISTENT), code_of(ONE_BLOCK)
    assert (code.step, code.once_a_block(True), code.once_a_block(False)) == ({1, 3, 4, 5, 6, 7, 10}, 6, 8)
    assert (one.step, one.once_a_block(False)) == ({4, 5}, 6)
    outer = code_of(ONE_BLOCK.replace("@P2 EXIT", "@P2 BRA `(.L_product)"))  # a loop over blocks around that over steps
    assert (outer.step, outer.once_a_block(True), outer.once_a_block(False)) == ({4, 5}, 4, 6)
    for listing, persistent in ((PERSISTENT, True), (ONE_BLOCK, False)):
        longer = code_of(listing.replace("FADD", "FMUL R7, R7, R7\nFADD"))
        assert longer.once_a_block(persistent) == code_of(listing).once_a_block(persistent) + 1
        assert len(longer.step) == len(code_of(listing).step)
    assert not code_of("MOV R1, R2\nEXIT").step
    with pytest.raises(ValueError, match="instructions 9 to 10 are a loop outside the main loop"):
        code_of(PERSISTENT.replace(".L_next: ", "@P4 BRA `(.L_store)\n.L_next: ")).once_a_block(True)


def test_programs_that_fit_by_registers_warps_and_shared_memory():
    """CUDA's occupancy tables: 168 registers leave room for 3 programs of 4 warps on sm_90, and so on."""
    given = ((168, 4, 0, 90), (128, 8, 0, 90), (32, 4, 100_000, 90), (32, 1, 0, 89))
    assert [programs_per_multiprocessor(*each) for each in given] == [3, 2, 2, 32]
