"""Traces of machine code against counts by hand."""

import pytest
from listings import code, traced

from vitfast.machine_code import trace

LOOP = """
    ULDC UR4, c[0x0][0x210]
    MOV R0, RZ
    .L_x_0:
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0
    VIADD R0, R0, 0x40
    ISETP.GE.AND P0, PT, R0, UR4, PT
    @!P0 BRA `(.L_x_0)
    EXIT
"""


@pytest.mark.parametrize("length, turns", [(1, 1), (64, 1), (65, 2), (3072, 48)])
def test_a_loop_turns_as_often_as_its_parameter_says(length, turns):
    found = traced(LOOP, length.to_bytes(4, "little"))
    assert found["HGMMA"] == 4 * turns and found["EXIT"] == 4 and found["ULDC"] == 4


def test_warps_take_their_own_way():
    text = """
    S2R R0, SR_TID.X
    ISETP.GT.U32.AND P0, PT, R0, 0x3f, PT
    @P0 EXIT
    FADD R1, R1, R1
    EXIT
    """
    assert traced(text, warps=8) == {"S2R": 8, "ISETP": 8, "FADD": 2, "EXIT": 8}


@pytest.mark.parametrize("program, by", [(0, 7), (6, 7), (7, 7), (1000, 13), (12_287, 4)])
def test_the_quotient_that_a_compiler_makes_of_reciprocals(program, by):
    """pid // groups, as ptxas writes it; the loop turns quotient + 1 times."""
    text = """
    ULDC UR9, c[0x0][0x210]
    S2R R4, SR_CTAID.X
    I2F.RP R0, UR9
    MUFU.RCP R0, R0
    VIADD R2, R0, 0xffffffe
    F2I.FTZ.U32.TRUNC.NTZ R3, R2
    MOV R2, RZ
    IMAD.MOV R5, RZ, RZ, -R3
    IMAD R5, R5, UR9, RZ
    IMAD.HI.U32 R3, R3, R5, R2
    IMAD.HI.U32 R3, R3, R4, RZ
    IMAD.MOV R6, RZ, RZ, -R3
    IMAD R6, R6, UR9, R4
    ISETP.GE.U32.AND P0, PT, R6, UR9, PT
    @P0 IADD3 R6, R6, -UR9, RZ
    @P0 VIADD R3, R3, 0x1
    ISETP.GE.U32.AND P1, PT, R6, UR9, PT
    @P1 VIADD R3, R3, 0x1
    .L_x_0:
    NOP
    VIADD R3, R3, 0xffffffff
    ISETP.GE.AND P2, PT, R3, RZ, PT
    @P2 BRA `(.L_x_0)
    EXIT
    """
    assert traced(text, by.to_bytes(4, "little"), (program,), (20_000,), warps=1)["NOP"] == program // by + 1


def test_pointers_of_64_bits_carry_and_name_their_tensor():
    """The second tensor, reached through a sum that carries into the upper word; a masked copy moves nothing."""
    text = """
    LDC.64 R2, c[0x0][0x218]
    IADD3 R4, P0, R2, 0xffffffff, RZ
    IADD3.X R5, R3, RZ, RZ, P0, !PT
    IADD3 R4, P0, R4, 0x11, RZ
    IADD3.X R5, R5, RZ, RZ, P0, !PT
    ISETP.NE.AND P1, PT, RZ, RZ, PT
    LDGSTS.E.BYPASS.128 [R9], desc[UR4][R4.64], !P1
    LDGSTS.E.BYPASS.128 [R9], desc[UR4][R4.64], P1
    STG.E desc[UR4][R2.64+0x10], R7
    EXIT
    """
    found = code(text)
    constants = (1 << trace.TENSOR).to_bytes(8, "little") + (2 << trace.TENSOR).to_bytes(8, "little")
    run = trace.Tracer(found, constants, (1,), 1).run(0)
    assert dict(run.moved) == {(6, 1): 1, (8, 1): 1}


@pytest.mark.parametrize("text", ["LDG.E R0, desc[UR4][R2.64]", "MUFU.EX2 R0, R0", "FADD R0, R0, R1"])
def test_a_branch_on_data_ends_the_trace(text):
    with pytest.raises(trace.Untraceable, match="data"):
        traced(f"{text}\n ISETP.NE.AND P0, PT, R0, RZ, PT\n @P0 BRA `(.L_x_0)\n NOP\n .L_x_0:\n EXIT")


def test_a_warp_whose_end_depends_on_data_goes_on():
    assert traced("MUFU.EX2 R0, R0\n ISETP.NE.AND P0, PT, R0, RZ, PT\n @P0 EXIT\n NOP\n EXIT", warps=1)["NOP"] == 1


def test_an_endless_loop_ends(monkeypatch):
    monkeypatch.setattr(trace, "STEPS", 1000)
    with pytest.raises(trace.Untraceable, match="steps"):
        traced(".L_x_0:\n NOP\n BRA `(.L_x_0)", warps=1)
