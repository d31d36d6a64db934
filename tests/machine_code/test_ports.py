"""The port model: work counted in machine code against counts by hand, predictions against the rules of the model."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from listings import code
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast import cost
from vitfast.kernels.launch import Launch
from vitfast.machine_code import ports, trace
from vitfast.machine_code.ports import H100, H200, RATES, PortLoad, Span, predict

TESTS = Path(__file__).parents[1]


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
    """Four warps: 16 bytes a lane from one tensor to another, a small third tensor, an exponential, a product."""
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
        name: Span(size, i, 0, size) for i, (name, size) in enumerate({"x": 10**6, "y": 2 * 10**6, "w": 1000}.items())
    }
    work = ports.count(found, runs, tensors, ["x", "y", "w"], PortLoad(100, 4, 4))
    assert (work.issue, work.mufu, work.flops) == (4 * 10 / 4, 4 * 2, 2 * 64 * 64 * 16)
    assert (work.tensor, work.operands, work.accesses, work.fills) == (32, 32, 16, 0)
    assert (work.l2, work.l2_waited, work.once) == (2 * 2048, 2048, 1000)
    assert (work.hbm, work.hbm_waited) == (3_001_000, 1_001_000)
    with pytest.raises(trace.Untraceable, match="reaches"):
        ports.count(
            found, [dataclasses.replace(runs[0], moved={(3, -1): 1})], tensors, ["x", "y", "w"], PortLoad(100, 4, 4)
        )


def test_views_of_one_memory_count_once():
    """q, k and v interleaved in one tensor, which a descriptor reaches whole; their gradients in another."""
    qkv = torch.empty(2, 7, 3, 4, 16, dtype=torch.bfloat16, device="meta")
    packed = qkv.permute(0, 2, 3, 1, 4).flatten(1, 2)
    u = 2 * 2 * 7 * 4 * 16
    q, k, v = (Span.of(x) for x in qkv.unbind(2))
    box = Span.of(
        TensorDescriptor(packed, list(packed.shape), list(packed.stride()), [1, 1, 4, 16]).base, [1, 1, 4, 16]
    )
    assert (q.bytes, box.bytes, box.box) == (u, 3 * u, 4 * 16 * 2)
    for found, wanted in (
        ((q,), u),
        ((q, q), u),
        ((q, k, v), 3 * u),
        ((q, k, v, box), 3 * u),
        ((box, k), 3 * u),
        ((q, Span.of(torch.empty_like(qkv))), 4 * u),
    ):
        assert ports.distinct(found) == wanted
    part, rest = (Span.of(x) for x in torch.empty(10, device="meta").split([4, 6]))
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
    """One tensor is written, then read, one read, then written, both by loads; a descriptor stores its boxes."""
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
    own, again = Span(10**6, 0, 0, 10**6), Span(3 * 10**6, 1, 0, 3 * 10**6)
    work = ports.count(found, runs, dict(own=own, again=again), ["own", "again"], PortLoad(100, 4, 4))
    assert (work.hbm, work.hbm_waited) == (10**6 + 2 * 3 * 10**6, 3 * 10**6)
    stored = code("UTMASTG.3D [UR8], [UR4]\n EXIT")
    run = dataclasses.replace(runs[0], counts=Counter(), moved=Counter({(0, 0): 6}))
    for size, wanted in ((10**6, 6 * 1024), (10**5, 1000)):  # the second: a box hangs over the edge
        view = Span(size, 0, 0, size, box=1024)
        assert ports.count(stored, [run], dict(y=view), ["y"], PortLoad(100, 4, 4)).l2 == wanted


def test_rates_are_those_of_the_data_sheet():
    for gpu in RATES:
        assert gpu.flops * gpu.multiprocessors * 1.83e9 == pytest.approx(989.4e12, rel=0.005)
        sheet = cost.GPUS[gpu.name]
        assert 0.85 < gpu.memory_bytes_per_second / (sheet.gigabytes_per_second * 1e9) < 0.95
        assert 0 < gpu.library_flops_per_second < sheet.teraflops * 1e12
        assert all(value > 0 for name, value in dataclasses.asdict(gpu).items() if name != "name")


WORKS = {
    "tensor": PortLoad(1320, 2, 8, tensor=10_000, issue=4000, operands=6000),
    "mufu": PortLoad(1320, 2, 4, tensor=2000, mufu=9000, issue=3000),
    "issue": PortLoad(1320, 4, 4, mufu=900, issue=9000),
    "shared": PortLoad(1320, 3, 8, tensor=3000, issue=900, operands=4000, accesses=4000, fills=4000),
    "l2": PortLoad(1320, 2, 8, tensor=1000, issue=500, l2=400_000, hbm=10**6),
    "hbm": PortLoad(1320, 8, 4, issue=1000, l2=100, l2_waited=100, hbm=10**9),
    "latency": PortLoad(1320, 1, 4, tensor=3000, issue=3000, accesses=3000, hbm=10**8, hbm_waited=10**8),
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
    work = PortLoad(132 * 10, 1, 8, tensor=2 * 64 * 128 * 16 * 1000 / H100.flops)
    seconds = predict(work, H100).total - H100.launch
    assert 132 * 10 * 2 * 64 * 128 * 16 * 1000 / seconds == pytest.approx(H100.clock * H100.flops * 132)


def test_one_program_more_than_multiprocessors_is_one_round_more():
    one, more = (predict(PortLoad(n, 1, 4, issue=1000), H100).total - H100.launch for n in (132, 133))
    assert more == pytest.approx(2 * one) and predict(PortLoad(133, 1, 4, issue=1), H100).waves == pytest.approx(
        133 / 132
    )


REAL = """
import contextlib, dataclasses, json, sys

sys.path.insert(0, {tests!r})
import predict
from predict import codegen, ports, tiles, torch
from vitfast.kernels.launch import record


def main():
    sizes = codegen.Sizes.of_preset("B/16", batch=32)
    product = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=4)
    head = dict(BLOCK_M=64, BLOCK_N=64, STAGES=2, PER_SM=3, EXACT=0)
    wanted = dict([
        ("linear + gelu", ("linear_gelu_fwd", tiles.tile(8, 3, **product))),
        ("linear + gelu, descriptors", ("linear_gelu_fwd", tiles.tile(8, 3, "tma", **product))),
        ("attention", ("attention_fwd", tiles.tile(4, 1, "rows", BLOCK_M=64))),
        ("attention backward", ("attention_bwd", tiles.tile(4, 1, "head", 168, **head))),
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
        with contextlib.ExitStack() as stack:
            for op in ("linear_fwd", "linear_gelu_fwd", "linear_residual_fwd"):
                stack.enter_context(tiles.override(op, cublas))
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
        work = PortLoad(**found[name])
        assert work.programs == programs and work.flops == 2 * 128 * 128 * d, name
        assert work.tensor == pytest.approx(work.flops / 4096), name
        assert work.fills * 128 == (128 + 128) * d * bf16, name  # both operands once into shared memory
        assert work.l2 == work.fills * 128 + 2 * 128 * 128 * bf16, name  # and two tiles written
        assert work.hbm == (m * d + f * d + f + 2 * m * f) * bf16, name
        assert work.hbm_waited == f * bf16 and work.once == f * bf16, name  # the bias alone is loaded into registers
    descriptors, pointers = found["linear + gelu, descriptors"]["issue"], found["linear + gelu"]["issue"]
    assert 0.5 * pointers < descriptors < pointers

    attention = PortLoad(**found["attention"])
    keys = 128 + 64 + 16
    heads, weights = 32 * 12, 32 * 12 * 256 * keys
    assert attention.programs * attention.flops == 2 * weights * 2 * 64
    assert (
        weights <= attention.programs * attention.mufu * 16 <= 1.1 * weights
    )  # an exponential a weight; a reciprocal and a logarithm a row
    assert attention.hbm == 4 * m * d * bf16 + heads * 197 * 4

    backward = PortLoad(**found["attention backward"])
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

    norm = PortLoad(**found["layer_norm"])
    assert norm.programs == m // 4 and norm.flops == norm.tensor == 0
    assert norm.hbm == 2 * m * d * bf16 + 2 * d * bf16 + 2 * m * 4
    assert (
        norm.l2_waited == 4 * d * bf16 and 0 <= norm.l2 - 2 * 4 * d * bf16 <= 2 * 4 * 128
    )  # statistics: every lane of a warp counts

    m, d, f = 8 * 197, 384, 1536
    assert found["library"] == 12 * 2 * m * d * (3 * d + d + 2 * f) + 2 * 8 * d * 1000
    assert sum("attention" in name for name in found["launches"]) == 12
