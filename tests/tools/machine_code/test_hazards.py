"""Registers that wgmma still uses: listings whose answer is known, and a product that Triton before 3.9 gets wrong."""

import json

import pytest
import triton
from cubin import Code
from hazards import hazards
from processes import uninterpreted

GROUP = "HGMMA.64x8x16.F32.BF16 R24, R20, gdesc[UR8], R24, gsb0"  # operand R20 to R23, accumulator R24 to R27
SHARED = "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4].tnspB, R24, gsb0"
WAIT, ONE_RUNS = (f"WARPGROUP.DEPBAR.LE gsb0, {count}" for count in ("0x0", "0x1"))


@pytest.mark.parametrize(
    "body, found",
    [
        ((GROUP, WAIT, "MOV R21, R3", "STG.E.64 desc[UR6][R2.64], R24"), []),
        ((GROUP, "MOV R3, R21"), []),  # the operand may be read
        ((GROUP, "MOV R21, R3", WAIT), [1]),
        ((GROUP, "@P0 LDS.128 R18, [R3]", WAIT), [1]),  # R18 to R21
        ((GROUP, "LDS.64 R18, [R3]", WAIT), []),
        ((GROUP, "SHFL.BFLY PT, R22, R3, 0x1, 0x1f"), [1]),
        ((GROUP, "CS2R R26, SRZ"), [1]),
        ((GROUP, "BAR.SYNC R20, R21"), []),
        ((SHARED, "FADD R3, R27, R2"), [1]),  # an accumulator may be neither read
        ((SHARED, "STG.E.64 desc[UR6][R2.64], R26"), [1]),  # nor stored
        ((SHARED, "STG.E desc[UR6][R2.64], R28"), []),
        ((SHARED, SHARED), []),  # but added to
        ((SHARED, "HGMMA.64x8x16.F32.BF16 R40, R24, gdesc[UR8], R40, gsb0"), [1]),  # and be no operand
        ((GROUP, SHARED, ONE_RUNS, "MOV R21, R3"), []),  # the group before the last is over
        ((SHARED, GROUP, ONE_RUNS, "MOV R21, R3"), [3]),
        ((GROUP, "ATOMG.E.ADD.STRONG.GPU PT, R21, desc[UR4][R2.64], R9"), [1]),
        (("QGMMA.64x8x32.F32.E4M3.E4M3 R24, R20, gdesc[UR8], R24, gsb0", "MOV R23, R3"), [1]),
        ((GROUP, "@P0 WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R21, R3"), [2]),
        ((GROUP, "BRA.DIV UR4, `(.L_x_1)", "MOV R20, R3", "NOP", WAIT), [2]),
        (("NOP", "MOV R20, R3", GROUP, ONE_RUNS, "@P0 BRA `(.L_x_0)", WAIT), [1]),  # in the next turn of the loop
        (("NOP", "MOV R20, R3", GROUP, WAIT, "@P0 BRA `(.L_x_0)", ONE_RUNS), []),
        ((GROUP, "BRA `(.L_x_1)", "MOV R20, R3", "NOP", WAIT, "MOV R20, R3"), []),  # what is skipped is not run
        ((GROUP, "@P0 BRA `(.L_x_1)", WAIT, "NOP", "MOV R20, R3"), [4]),  # a wait on one of two ways
        (("BRX R2 -0x40", "NOP", "EXIT", GROUP, "MOV R21, R3", WAIT), [4]),  # a jump by a table reaches every role
    ],
)
def test_what_may_not_be_touched(body, found):
    assert sorted(hazards(Code(90, 0, body, {".L_x_0": 1, ".L_x_1": 4}))) == found


def test_a_product_that_no_path_reaches_is_an_error():
    with pytest.raises(ValueError, match="1 products of this program are reached by no path, the first at 1$"):
        hazards(Code(90, 0, ("EXIT", GROUP, WAIT), {}))


PRODUCT = """
import dataclasses, json
import cubin, torch, triton
import triton.language as tl
from hazards import hazards
from vitfast.kernels.launch import Launch
from vitfast.tools.machine_code import compiler

@triton.jit
def product(a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    i, j, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + i * K + (start + k)[None, :]).to(tl.bfloat16)
        acc = tl.dot(a, tl.load(b_ptr + (start + k)[:, None] * N + j), acc)
    tl.store(out_ptr + i * N + j, acc)

a, b, out = (torch.empty(1, dtype=d, device="meta") for d in (torch.int8, torch.bfloat16, torch.float32))
sizes = dict(M=64, N=128, BLOCK_K=128, num_warps=4, num_stages=3)
launch = Launch(product, (1,), dict(a_ptr=a, b_ptr=b, out_ptr=out, K=4096, **sizes))
code = cubin.read(compiler.compiled(launch, 90).asm["cubin"])
waits = [i for i in code.instructions if "WARPGROUP.DEPBAR" in i]
never = dataclasses.replace(code, instructions=tuple("NOP" if i in waits else i for i in code.instructions))
print(json.dumps([code.count("HGMMA"), len(hazards(code)), len(hazards(never))]))
"""


@pytest.mark.long
def test_a_product_whose_operand_is_made_in_registers(tmp_path):
    """triton-lang/triton#9433: int8 times bf16. Without its waits any Triton's has hazards."""
    script = tmp_path / "product.py"
    script.write_text(PRODUCT)
    products, found, without_waits = json.loads(uninterpreted(script))
    mended = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    assert products == 8 and (found == 0) == mended and without_waits > max(100, found)
