"""The port model: traces of machine code against counts by hand, predictions against the rules of the model, the tables against the kernels."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import vitfast.doctor  # noqa: F401  before the script: kernels stay interpreted in this process
from vitfast import ViT, cost
from vitfast.cli import main
from vitfast.cost import predicted
from vitfast.kernels.launch import Launch
from vitfast.machine_code import ports, trace
from vitfast.machine_code.cubin import Code
from vitfast.machine_code.ports import GPUS, H100, H200, View, Work, predict

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    """tests/predict.py as a module, for what it does not compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "")  # which it drops: put back afterwards
        import predict
    return predict


def code(text: str) -> Code:
    """Instructions, one a line; "NAME:" is a label."""
    instructions, labels = [], {}
    for line in text.strip().splitlines():
        if line.strip().endswith(":"):
            labels[line.strip()[:-1]] = len(instructions)
        else:
            instructions.append(line.strip())
    return Code(64, 0, tuple(instructions), labels)


def traced(
    text: str, constants: bytes = b"", program: tuple = (0,), grid: tuple = (8,), warps: int = 4
) -> dict[str, int]:
    found = code(text)
    return dict(trace.named(found, trace.Tracer(found, constants, grid, warps).run(*program)))


# ---- traces


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


# ---- work


@pytest.mark.parametrize(
    "instruction, flops, operands",
    [
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0", 2 * 64 * 128 * 16 // 4, 2 * 16 * (64 + 128) // 4),
        ("HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8], R24", 2 * 64 * 64 * 16 // 4, 2 * 16 * 64 // 4),
        ("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", 2 * 64 * 16 * 16 // 4, 2 * 16 * 80 // 4),
        ("HMMA.16816.F32.BF16 R4, R8, R10, R4", 2 * 16 * 8 * 16, 0),
    ],
)
def test_products_by_hand(instruction, flops, operands):
    assert ports.product_of(instruction) == (flops, operands)


@pytest.mark.parametrize(
    "instruction, size",
    [
        ("LDG.E.128 R4, desc[UR4][R2.64]", 16),
        ("STS.64 [R2], R4", 8),
        ("LDS R2, [R4]", 4),
        ("LDG.E.U16 R4, desc[UR4][R2.64]", 2),
    ]
    + [
        ("LDSM.16.M88.4 R4, [R2]", 16),
        ("LDSM.16.MT88.2 R4, [R2]", 8),
        ("LDSM.16.M88 R4, [R2]", 4),
        ("LDGSTS.E.BYPASS.128 [R2], desc[UR4][R2.64], P0", 16),
    ],
)
def test_widths_by_hand(instruction, size):
    assert ports.width(instruction) == size


def test_the_work_of_a_small_kernel_by_hand():
    """Four warps: 16 bytes a lane read from one tensor and written to another, a small third, an exponential, a product."""
    found = code("""
    LDC.64 R2, c[0x0][0x210]
    LDC.64 R4, c[0x0][0x218]
    LDC.64 R6, c[0x0][0x220]
    LDG.E.128 R8, desc[UR4][R2.64]
    LDG.E R12, desc[UR4][R6.64]
    MUFU.EX2 R13, R13
    STS.128 [R14], R8
    HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0
    STG.E.128 desc[UR4][R4.64], R8
    EXIT
    """)
    constants = b"".join((i + 1 << trace.TENSOR).to_bytes(8, "little") for i in range(3))
    runs = [trace.Tracer(found, constants, (100,), 4).run(program) for program in (50, 51)]
    tensors = {
        name: View(size, i, 0, size) for i, (name, size) in enumerate({"x": 10**6, "y": 2 * 10**6, "w": 1000}.items())
    }
    work = ports.count(found, runs, tensors, ["x", "y", "w"], Work(100, 4, 4))
    assert (work.issue, work.mufu, work.flops) == (4 * 10 / 4, 4 * 2, 2 * 64 * 64 * 16)
    assert (work.tensor, work.operands, work.accesses, work.fills) == (32, 32, 16, 0)
    assert (work.l2, work.l2_waited, work.once) == (2 * 2048, 2048, 1000)
    assert (work.hbm, work.hbm_waited) == (3_001_000, 1_001_000)
    with pytest.raises(trace.Untraceable, match="reaches"):
        ports.count(
            found, [dataclasses.replace(runs[0], moved={(3, -1): 1})], tensors, ["x", "y", "w"], Work(100, 4, 4)
        )


def test_views_of_one_memory_count_once():
    """q, k and v lie between one another in one tensor, which a descriptor reaches whole; their gradients in another."""
    qkv = torch.empty(2, 7, 3, 4, 16, dtype=torch.bfloat16, device="meta")
    packed = qkv.permute(0, 2, 3, 1, 4).flatten(1, 2)
    u = 2 * 2 * 7 * 4 * 16
    q, k, v = (View.of(x) for x in qkv.unbind(2))
    box = View.of(
        TensorDescriptor(packed, list(packed.shape), list(packed.stride()), [1, 1, 4, 16]).base, [1, 1, 4, 16]
    )
    assert (q.bytes, box.bytes, box.box) == (u, 3 * u, 4 * 16 * 2)
    for found, wanted in (
        ((q,), u),
        ((q, q), u),
        ((q, k, v), 3 * u),
        ((q, k, v, box), 3 * u),
        ((box, k), 3 * u),
        ((q, View.of(torch.empty_like(qkv))), 4 * u),
    ):
        assert ports.distinct(found) == wanted
    part, rest = (View.of(x) for x in torch.empty(10, device="meta").split([4, 6]))
    assert ports.distinct([part, rest]) == 40 and not part.meets(rest) and q.meets(k) and ports.distinct([]) == 0
    launch = Launch(
        None,
        (1,),
        dict(
            q=(qkv[:, :, 0], 1, 2),
            box=TensorDescriptor(packed, list(packed.shape), list(packed.stride()), [1, 1, 4, 16]),
            n=7,
        ),
    )
    assert ports.views(launch) == {"q[0]": q, "box": box}


def test_what_a_kernel_wrote_is_no_input():
    """A tensor is written and then read, one is read and then written, both by loads; a descriptor's boxes are what it stores."""
    found = code("""
    LDC.64 R2, c[0x0][0x210]
    LDC.64 R4, c[0x0][0x218]
    STG.E.128 desc[UR4][R2.64], R8
    LDG.E.128 R8, desc[UR4][R2.64]
    LDG.E.128 R8, desc[UR4][R4.64]
    STG.E.128 desc[UR4][R4.64], R8
    EXIT
    """)
    constants = b"".join((i + 1 << trace.TENSOR).to_bytes(8, "little") for i in range(2))
    runs = [trace.Tracer(found, constants, (100,), 4).run(50)]
    own, again = View(10**6, 0, 0, 10**6), View(3 * 10**6, 1, 0, 3 * 10**6)
    work = ports.count(found, runs, dict(own=own, again=again), ["own", "again"], Work(100, 4, 4))
    assert (work.hbm, work.hbm_waited) == (10**6 + 2 * 3 * 10**6, 3 * 10**6)
    stored = code("UTMASTG.3D [UR8], [UR4]\n EXIT")
    run = dataclasses.replace(runs[0], counts=Counter(), moved=Counter({(0, 0): 6}))
    for size, wanted in ((10**6, 6 * 1024), (10**5, 1000)):  # the second: a box hangs over the edge
        view = View(size, 0, 0, size, box=1024)
        assert ports.count(stored, [run], dict(y=view), ["y"], Work(100, 4, 4)).l2 == wanted


# ---- predictions


def test_rates_are_those_of_the_data_sheet():
    for gpu in GPUS:
        assert gpu.flops * gpu.multiprocessors * 1.83e9 == pytest.approx(989.4e12, rel=0.005)
        sheet = cost.GPUS[gpu.name]
        assert 0.85 < gpu.memory_bytes_per_second / (sheet.gigabytes_per_second * 1e9) < 0.95
        assert 0 < gpu.library_flops_per_second < sheet.teraflops * 1e12
        assert all(value > 0 for name, value in dataclasses.asdict(gpu).items() if name != "name")


WORKS = {
    "tensor": Work(1320, 2, 8, tensor=10_000, issue=4000, operands=6000),
    "mufu": Work(1320, 2, 4, tensor=2000, mufu=9000, issue=3000),
    "issue": Work(1320, 4, 4, mufu=900, issue=9000),
    "shared": Work(1320, 3, 8, tensor=3000, issue=900, operands=4000, accesses=4000, fills=4000),
    "l2": Work(1320, 2, 8, tensor=1000, issue=500, l2=400_000, hbm=10**6),
    "hbm": Work(1320, 8, 4, issue=1000, l2=100, l2_waited=100, hbm=10**9),
    "latency": Work(1320, 1, 4, tensor=3000, issue=3000, accesses=3000, hbm=10**8, hbm_waited=10**8),
}


@pytest.mark.parametrize("port", WORKS)
def test_what_binds_sets_the_time(port):
    work = WORKS[port]
    found, faster = predict(work, H100), predict(work, H200)
    assert found.binds == port
    assert found.total >= H100.launch + max(found.ports.values()) * (1 - 1e-12)
    assert faster.total <= found.total and (faster.total < found.total) == (port in ("hbm", "latency"))
    twice = dataclasses.replace(work, programs=2 * work.programs, hbm=2 * work.hbm, hbm_waited=2 * work.hbm_waited)
    assert predict(twice, H100).total - H100.launch == pytest.approx(2 * (found.total - H100.launch))
    for name in ("tensor", "mufu", "issue", "operands", "accesses", "fills", "l2", "l2_waited", "hbm", "hbm_waited"):
        more = dataclasses.replace(work, **{name: 3 * getattr(work, name) + 1})
        assert predict(more, H100).total >= found.total, name
    totals = [predict(dataclasses.replace(work, resident=n), H100).total for n in (1, 2, 3, 4, 8)]
    assert totals == sorted(totals, reverse=True)


def test_a_product_that_only_fills_the_tensor_cores_runs_at_their_rate():
    work = Work(132 * 10, 1, 8, tensor=2 * 64 * 128 * 16 * 1000 / H100.flops)
    seconds = predict(work, H100).total - H100.launch
    assert 132 * 10 * 2 * 64 * 128 * 16 * 1000 / seconds == pytest.approx(H100.clock * H100.flops * 132)


def test_one_program_more_than_multiprocessors_is_one_round_more():
    one, more = (predict(Work(n, 1, 4, issue=1000), H100).total - H100.launch for n in (132, 133))
    assert more == pytest.approx(2 * one) and predict(Work(133, 1, 4, issue=1), H100).waves == pytest.approx(133 / 132)


# ---- real kernels

REAL = """
import dataclasses, json, sys

sys.path.insert(0, {tests!r})
import predict
from predict import codegen, ports, tiles, torch
from vitfast.kernels.launch import record


def main():
    sizes = codegen.Sizes(batch=32, tokens=197, width=768, heads=12, hidden=3072, image=224, patch=16)
    wanted = dict([
        ("linear + gelu", ("linear_gelu_fwd", tiles.tile(8, 3, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=4))),
        ("linear + gelu, descriptors", ("linear_gelu_fwd", tiles.tile(8, 3, "tma", BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=4))),
        ("attention", ("attention_fwd", tiles.tile(4, 1, "rows", BLOCK_M=64))),
        ("attention backward", ("attention_bwd", tiles.tile(4, 1, "head", 168, BLOCK_M=64, BLOCK_N=64, STAGES=2, PER_SM=3, EXACT=0))),
        ("layer_norm", ("layer_norm_fwd", tiles.tile(4, 1, BLOCK_M=4))),
    ])
    found = {{}}
    with tiles.targeting(90):
        calls = codegen.launcher_calls(sizes, torch.bfloat16, False)
        for name, (op, tile) in wanted.items():
            with tiles.override(op, tile):
                (launch,) = record(calls[name.partition(", descriptors")[0]])
            found[name] = dataclasses.asdict(ports.measure(launch))
        cublas = tiles.tile(provider="cublas")
        with tiles.override("linear_fwd", cublas), tiles.override("linear_gelu_fwd", cublas), tiles.override("linear_residual_fwd", cublas):
            launches, libraries = predict.step("S/16", 224, 8, False)
    found["library"] = sum(flops for _, flops, _ in libraries)
    found["launches"] = [launch.kernel.__name__ for launch in launches]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow(15)
def test_real_kernels_do_what_their_formulas_say():
    """FLOPs with padding, bytes of operands and bytes of memory, counted in machine code and by hand."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", REAL.format(tests=str(TESTS))], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    m, d, f, bf16 = 32 * 197, 768, 3072, 2
    programs = math.ceil(m / 128) * math.ceil(f / 128)
    for name in ("linear + gelu", "linear + gelu, descriptors"):
        work = Work(**found[name])
        assert work.programs == programs and work.flops == 2 * 128 * 128 * d, name
        assert work.tensor == pytest.approx(work.flops / 4096), name
        assert work.fills * 128 == (128 + 128) * d * bf16, name  # both operands once into shared memory
        assert work.l2 == work.fills * 128 + 2 * 128 * 128 * bf16, name  # and two tiles written
        assert work.hbm == (m * d + f * d + f + 2 * m * f) * bf16, name
        assert work.hbm_waited == f * bf16 and work.once == f * bf16, name  # the bias alone is loaded into registers
    descriptors, pointers = found["linear + gelu, descriptors"]["issue"], found["linear + gelu"]["issue"]
    assert 0.5 * pointers < descriptors < pointers

    attention = Work(**found["attention"])
    keys = 128 + 64 + 16
    heads, weights = 32 * 12, 32 * 12 * 256 * keys
    assert attention.programs * attention.flops == 2 * weights * 2 * 64
    assert (
        weights <= attention.programs * attention.mufu * 16 <= 1.1 * weights
    )  # an exponential a weight; a reciprocal and a logarithm a row
    assert attention.hbm == 4 * m * d * bf16 + heads * 197 * 4

    backward = Work(**found["attention backward"])
    padded, u = 256, m * d * bf16
    statistics = (
        heads * 4 * (197 + 2 * padded + 3 * 64)
    )  # lse is read; -lse / scale and -delta, read again here, and sums are written
    scratch = heads * 197 * 64 * 4  # of dQ, one for each program, of which there are no more than heads here
    assert backward.programs == heads and backward.hbm == 8 * u + statistics + scratch  # qkv, o, do -> dqkv
    assert backward.hbm_waited < 6 * u and backward.l2 * heads >= backward.hbm
    assert (
        backward.resident * 132 * 4 * 197 * 64 * bf16 < 50e6
    )  # q, do and dQ's scratch of those that run at a time, which are read again, stay in L2

    norm = Work(**found["layer_norm"])
    assert norm.programs == m // 4 and norm.flops == norm.tensor == 0
    assert norm.hbm == 2 * m * d * bf16 + 2 * d * bf16 + 2 * m * 4
    assert (
        norm.l2_waited == 4 * d * bf16 and 0 <= norm.l2 - 2 * 4 * d * bf16 <= 2 * 4 * 128
    )  # statistics: every lane of a warp counts

    m, d, f = 8 * 197, 384, 1536
    assert found["library"] == 12 * 2 * m * d * (3 * d + d + 2 * f) + 2 * 8 * d * 1000
    assert sum("attention" in name for name in found["launches"]) == 12


# ---- tables and the command


def test_the_committed_predictions_are_of_these_kernels(script):
    for path in (script.KERNELS, script.STEPS):
        first = path.read_text().partition("\n")[0]
        assert first.startswith("# predicted, nothing in it was measured; "), path
        assert f"kernels {script.codegen.cache.source_hash()}," in first, f"{path.name} is stale: run make codegen"


def test_the_table_of_kernels_is_whole_and_consistent(script):
    rows = script.read(script.KERNELS)
    assert {r["preset"] for r in rows} == {
        name + (f" {size}" if size != 224 else "") for name, size in script.PRESETS.values()
    }
    for r in rows:
        if not r[
            "predicted_h100_us"
        ]:  # the reason stands where the port would: a rival whose control flow cannot be followed
            assert "Untraceable" in r["binds"] and r["case"].endswith(")"), r
            continue
        on_ports = {port: float(r[f"{port}_us"]) for port in ("tensor", "mufu", "issue", "shared", "l2", "hbm")}
        total, h200 = float(r["predicted_h100_us"]), float(r["predicted_h200_us"])
        assert 0 < h200 <= total and total >= max(on_ports.values()) + 2.9, r
        assert r["binds"] == "latency" or on_ports[r["binds"]] >= max(on_ports.values()) - 0.11, r
        assert int(r["programs"]) > 0 and int(r["resident"]) > 0 and float(r["waves"]) >= 0


def test_predicted_steps_add_up_and_stay_above_their_floor(script):
    rows = script.read(script.STEPS)
    for r in (row for row in rows if row["what"] == "step"):
        same = [
            x
            for x in rows
            if all(x[k] == r[k] for k in ("preset", "img_size", "gpu", "direction")) and x["what"] != "step"
        ]
        assert sum(float(x["predicted_us"]) for x in same) == pytest.approx(float(r["predicted_us"]), rel=1e-3)
        with torch.device("meta"):
            model = ViT.from_preset(r["preset"], img_size=int(r["img_size"]))
        floors = [op.row(cost.rates(r["gpu"])) for op in cost.operations(model, int(r["batch_size"]))]
        directions = ("forward", "backward") if r["direction"] == "training" else ("forward",)
        floor = sum(row["times"] * row[f"{direction}_floor"] for row in floors for direction in directions)
        assert 1 < float(r["predicted_us"]) * 1e-6 / floor < 4, r


def test_a_step_with_a_kernel_that_has_no_prediction_is_not_written(script, capsys, monkeypatch, tmp_path):
    """Nor is it a success: its time would lack that kernel's."""

    @dataclasses.dataclass
    class Named:
        __name__: str

    recorded = {
        ("Nano/8", 32, 4, train): ([Launch(Named(name), (1,), {}) for name in names], [("aten::mm", 1e9, 10**6)])
        for train, names in ((False, ["a"]), (True, ["a", "b"]))
    }
    works = {
        script.key_of(launch): Work(1320, 2, 4, issue=1000) for launches, _ in recorded.values() for launch in launches
    }
    for name, path in (("KERNELS", tmp_path / "ports.csv"), ("STEPS", tmp_path / "predicted.csv")):
        monkeypatch.setattr(script, name, path)
    for name, value in (
        ("PRESETS", {}),
        ("all_steps", lambda: recorded),
        ("measured", lambda launches, processes: works),
    ):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(sys, "argv", ["predict.py"])

    def written() -> Counter:
        return Counter((row["direction"], row["what"]) for row in script.read(script.STEPS))

    assert script.main() == 0 and written()["training", "step"] == written()["training", "b"] == 2
    works[script.key_of(recorded["Nano/8", 32, 4, True][0][1])] = "b: Untraceable"
    assert script.main() == 1 and "b: Untraceable" in capsys.readouterr().out
    assert {direction for direction, _ in written()} == {"inference"} and written()["inference", "step"] == 2


def run_cost(capsys, *args) -> str:
    assert main(["cost", *args]) == 0
    return capsys.readouterr().out


def test_cost_shows_predicted_steps_and_calls_them_so(capsys):
    found = json.loads(run_cost(capsys, "--model", "B/16", "--gpu", "H100", "--json"))["port_model"]
    assert 0 < found["inference"] < found["training"]
    assert all(
        words in found["source"] for words in ("predicted", "not measured", "keep='least'", "kernels ", "triton ")
    )
    line = next(
        line for line in run_cost(capsys, "--model", "B/16", "--gpu", "H100").splitlines() if "port model" in line
    )
    assert line.count("predicted") == 2 and f"{1e3 * found['training']:,.1f} ms a training step" in line
    for other in (
        ["--model", "B/16", "--gpu", "A100"],
        ["--model", "B/16", "--dtype", "fp32"],
        ["--model", "B/16", "--dtype", "fp16"],
        ["--model", "B/16", "--img-size", "288"],
        ["--model", "B/16", "--batch-size", "127"],
        ["--model", "B/16", "--batch-size", "513"],
        ["--model", "R50+B/16"],
        ["--recipe", "finetune/cifar10"],
    ):
        assert "port model" not in run_cost(capsys, *other), other


def test_a_prediction_grows_with_the_images_but_for_launches_and_the_update(script):
    rows = [
        r
        for r in script.read(script.STEPS)
        if (r["preset"], r["img_size"], r["gpu"], r["direction"]) == ("B/16", "224", "H100", "training")
    ]
    table = {r["what"]: (1e-6 * float(r["predicted_us"]), int(r["times"])) for r in rows}
    whole, update = table.pop("step")[0], table[predicted.UPDATE][0]
    model = preset()
    at = {batch: predicted.step(model, "H100", batch)["training"] for batch in (128, 256, 512)}
    launches = 3e-6 * sum(times for what, (_, times) in table.items() if what != predicted.UPDATE)
    assert at[256] == pytest.approx(whole, rel=1e-4) and launches > 1e-4 < update
    for batch in (128, 512):
        assert at[batch] == pytest.approx(update + launches + (whole - update - launches) * batch / 256, rel=1e-4)
    assert predicted.step(model, "H100", 256, micro_batches=3)["training"] == pytest.approx(
        3 * (whole - update) + update, rel=1e-4
    )
    assert predicted.step(model, "H100", 1) is predicted.step(model, "H100", 600) is None
    parts = cost.estimate(
        preset(), dataclasses.replace(cost.rates("H100"), memory_bytes=30 * cost.GIB), batch_size=8 * 1024, gpus=8
    )
    micro, several = parts["micro_batch"], parts["accumulate"]
    assert parts["port_model"]["training"] == predicted.step(model, "H100", micro, several)["training"] and several > 1


def preset(**options) -> ViT:
    with torch.device("meta"):
        return ViT.from_preset("B/16", **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_classes=10),
        dict(init_values=0.1),
        dict(drop_path_rate=0.1),
        dict(act_layer="gelu_tanh"),
        dict(residual_in_fp32=True),
        dict(global_pool="avg"),
        dict(qkv_bias=False),
        dict(in_chans=1),
        dict(num_heads=8),
        dict(proj_drop_rate=0.1),
    ],
    ids=str,
)
def test_no_prediction_for_other_models_than_the_presets(options):
    assert predicted.step(preset(**options), "H100", 256) is None


def test_no_prediction_for_other_optimizers():
    for options, wanted in (
        ({}, True),
        (dict(mean=0.4), True),
        (dict(optimizer="sgd"), False),
        (dict(averaged=True), False),
    ):
        model = preset(mean=options.pop("mean", 0.5))
        assert bool(cost.estimate(model, cost.rates("H100"), **options)["port_model"]) == wanted, options


def test_no_prediction_lies_below_the_floor(monkeypatch):
    monkeypatch.setattr(predicted, "step", lambda *_: dict(training=1e-9, inference=1e-9, source="predicted"))
    found = cost.estimate(preset(), cost.rates("H100"))
    forward = sum(row["times"] * row["forward_floor"] for row in found["operations"])
    assert found["port_model"]["training"] == found["floor"]["step_seconds"]
    assert found["port_model"]["inference"] == pytest.approx(forward) and forward < found["floor"]["step_seconds"]


def test_a_stale_table_says_so(script, monkeypatch, tmp_path):
    first, _, rest = predicted.STEPS.read_text().partition("\n")
    other = re.sub("kernels [0-9a-f]+", "kernels {}", first)
    monkeypatch.setattr(predicted, "STEPS", tmp_path / "predicted.csv")
    for kernels, stale in ((predicted.source_hash(), False), ("0123", True)):
        predicted.STEPS.write_text(other.format(kernels) + "\n" + rest)
        source = predicted.step(preset(), "H100", 256)["source"]
        assert f"kernels {kernels}," in source and ("stale" in source) == stale


def test_everything_printed_says_predicted(script):
    assert all("predicted" in line for line in script.notes().splitlines() if line.startswith("|") and "µs" in line)
    assert script.notes().count("predicted") >= 3
