"""Machine code without a GPU: no shipped tile spills, takes too much shared memory or misses the tensor cores."""

import json
import os
import re
from pathlib import Path

import cubin
import pytest
import triton
from known_configs import known_configs
from processes import uninterpreted

import vitfast.tools.doctor  # noqa: F401  before the script: kernels stay interpreted in this process
from vitfast.kernels import tiles


def measured(row: dict) -> tuple:
    """A row without the call it was met in: calls share kernels."""
    return tuple(sorted((k, v) for k, v in row.items() if k != "case"))


# Programs that are to fit a multiprocessor of sm_90 in 16 bits, whatever the Triton: the tiles launch as many (PER_SM),
# and count on as many.
PROGRAMS = {
    "_attention_fwd_short_kernel": {("B/16 attention", "L/16 attention"): 3},
    "_attention_bwd_dq_kernel": {("B/16 attention backward (tiled)", "L/16 attention backward (tiled)"): 5},
    "_attention_bwd_dkdv_kernel": {("B/16 attention backward (tiled)", "L/16 attention backward (tiled)"): 4},
    "_attention_bwd_resident_kernel": {("B/16 attention backward", "L/16 attention backward"): 2},
    "layer_norm_bwd_kernel": {
        tuple(f"{size} layer_norm backward in a block" for size in ("S/16", "B/16", "L/16", "Dh 32")): 3,
        tuple(f"{size} add + layer_norm backward, factors" for size in ("S/16", "B/16", "L/16", "Dh 32")): 3,
        ("Dh 80 layer_norm backward in a block",): 2,
    },
}


def too_few_programs(rows: list[dict]) -> tuple[set[tuple[str, str]], list[dict]]:
    """(kernel, case) that PROGRAMS names among the rows, and the rows in which fewer programs fit."""
    wanted = {
        (kernel, case): count
        for kernel, by_case in PROGRAMS.items()
        for cases, count in by_case.items()
        for case in cases
    }
    found = [r for r in rows if (r["sm"], r["dtype"]) == (90, "bf16") and (r["kernel"], r["case"]) in wanted]
    few = [r for r in found if r["programs_per_sm"] < wanted[r["kernel"], r["case"]]]
    return wanted.keys() - {(r["kernel"], r["case"]) for r in found}, few


# Most instructions on sm_90 in bf16 with Triton 3.6, and with later ones: of all that a product runs once a block, an
# element; of attention a step of its loop.
LIMITS = {
    ("persistent_kernel", "B/16 linear + gelu"): (14.0, 13.6),
    ("persistent_kernel", "B/16 linear + gelu, tanh, inference"): (11.5, 11.1),
    ("persistent_kernel", "B/16 linear + gelu, slope kept"): (20.0, 19.6),
    ("persistent_kernel", "B/16 dgelu"): (24.6, 23.8),
    ("persistent_kernel", "B/16 dgelu, tanh"): (20.0, 19.2),
    ("persistent_kernel", "B/16 dgelu, quick_gelu"): (17.0, 16.3),
    ("persistent_kernel", "B/16 dgelu, silu"): (17.0, 16.3),
    ("persistent_kernel", "B/16 dgelu, act kept"): (18.9, 18.6),
    ("persistent_kernel", "B/16 dgelu, from the slope"): (5.0, 4.9),
    ("persistent_kernel", "B/16 linear + residual, fc2"): (6.3, 5.9),
    ("persistent_kernel", "B/16 linear + residual, proj"): (6.3, 5.9),
    ("_attention_fwd_short_kernel", "B/16 attention"): (858, 867),
    ("_attention_bwd_resident_kernel", "B/16 attention backward"): (866, 1029),
}


# What a kernel of few rows makes of a norm's or a layer's missing vectors.
WITHOUT_VECTORS = "norm + linear, rms", "split linear, plain"


def too_many_instructions(rows: list[dict], version: str) -> tuple[set[tuple[str, str]], list[dict]]:
    """(kernel, case) of LIMITS that are not among the rows, and the rows with more than half an instruction more."""
    later = not version.startswith("3.6.")
    found = [r for r in rows if (r["sm"], r["dtype"]) == (90, "bf16") and (r["kernel"], r["case"]) in LIMITS]
    counts = [(r, r["step"] if "attention" in r["kernel"] else r["epilogue"]) for r in found if r["step"]]
    above = [r for r, count in counts if count > LIMITS[r["kernel"], r["case"]][later] + 0.5]
    return LIMITS.keys() - {(r["kernel"], r["case"]) for r, _ in counts}, above


@pytest.fixture(scope="module")
def codegen():
    """The script as a module, for what it does not compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "")  # which it drops: put back afterwards
        import codegen
    return codegen


@pytest.mark.long
@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_each_kernel_compiles_well_for(codegen, sm):
    """The same Triton makes of every kernel what the table says, which has more sizes."""
    also = [*WITHOUT_VECTORS, *(case.partition(" ")[2] for _, case in LIMITS if sm == 90)]
    result = json.loads(uninterpreted(codegen.__file__, "--quick", "--processes", 1, "--sm", sm, "--also", *also))
    assert not result["problems"], "\n".join(result["problems"])
    assert not too_few_programs(result["rows"])[1]
    missing, above = too_many_instructions(result["rows"], triton.__version__)
    assert not above and (not missing or sm != 90)
    kernels = {row["kernel"] for row in result["rows"]}
    assert len(kernels) >= 12, kernels
    made = f"# kernels {codegen.archives.source_hash()}, triton {triton.__version__};"
    if codegen.TABLE.read_text().startswith(made):
        committed = {measured(row) for row in codegen.committed()}
        assert not [row for row in result["rows"] if measured(row) not in committed]
    instruction = {90: "HGMMA", 100: "UTCHMMA"}.get(sm, "HMMA")
    assert any(row["tensor_core"] == instruction for row in result["rows"])


def test_a_kernel_that_regresses_is_a_problem(codegen):
    """Serialised wgmma by its waits or by ptxas' notes, mma.sync where more fits, spills, too much shared memory."""
    good = dict.fromkeys(codegen.COLUMNS, 0) | dict(
        kernel="linear_kernel", case="x", sm=90, dtype="bf16", tile="BLOCK_M=64", tensor_core="HGMMA", notes=""
    )
    good |= dict(registers=168, hgmma=37, waits=10, programs_per_sm=1)
    assert codegen.problems([good]) == []
    tcgen05 = dict(sm=100, tensor_core="UTCHMMA", hgmma=0, waits=0)
    for said, change in {
        "serialised wgmma, 37 waits for 37 HGMMA (ptxas says nothing)": dict(waits=37),
        "serialised wgmma, 3 waits for 4 HGMMA (ptxas says nothing)": dict(waits=3, hgmma=4),
        "serialised wgmma, 10 waits for 37 HGMMA (C7515)": dict(notes="C7515"),
        "32 HMMA, mma.sync where wgmma fits": dict(hmma=32),
        "31 HMMA, mma.sync where wgmma fits": dict(hmma=31, tile="SUBTILES=4"),
        "17 HMMA, mma.sync where wgmma fits": dict(hmma=17, kernel="dgelu_matmul_kernel"),
        "16 HMMA, mma.sync where tcgen05 fits": dict(tcgen05, hmma=16, tile="BLOCK_M=32"),
        "45 instructions touch registers that wgmma still uses": dict(hazards=45),
        "8 bytes of stack": dict(stack=8),
        "no program fits a multiprocessor": dict(programs_per_sm=0),
        "3 local loads and stores": dict(spills=3, stack=8),
        "240000 bytes of shared memory, limit 232448": dict(shared=240_000),
        "no tensor-core instruction": dict(tensor_core="", hgmma=0, waits=0),
    }.items():
        (problem,) = codegen.problems([good | change])
        assert problem.endswith(said), problem
    fine = [dict(hmma=32, tile="BLOCK_M=32 BLOCK_N=32"), dict(hmma=32, sm=80), dict(spills=3, stack=8, dtype="fp32")]
    fine += [dict(hgmma=1, waits=1), dict(hgmma=27, waits=14), tcgen05, dict(tcgen05, hmma=16, dtype="fp32")]
    fine += [dict(tcgen05, hmma=16, kernel="column_sums_kernel"), dict(hmma=16, kernel="dgelu_matmul_kernel")]
    assert codegen.problems([good | change for change in fine]) == []


def test_an_instruction_an_element_more_is_seen():
    for later, version in enumerate(("3.6.0", "3.9.0")):
        rows = [
            dict(kernel=kernel, case=case, sm=90, dtype="bf16", step=limit[later], epilogue=limit[later])
            for (kernel, case), limit in LIMITS.items()
        ]
        assert too_many_instructions(rows, version) == (set(), [])
        more = [r | dict(step=r["step"] + 1, epilogue=r["epilogue"] + 1) for r in rows]
        assert too_many_instructions(more, version) == (set(), more)
        assert too_many_instructions([r | dict(step=0) for r in rows], version) == (LIMITS.keys(), [])


def test_elements_of_an_epilogue(codegen):
    """Of 128 x 256 numbers a thread of 8 warps holds 128; a program with a single block runs its outer loop once."""
    body = "MOV R1, R2", "HMMA.16816.F32 R4, R8, R12, R4", "@P0 BRA `(.L_step)", *["FADD R4, R4, R6"] * 320
    code = cubin.Code(90, 0, (*body, "@P1 BRA `(.L_step)", "EXIT"), {".L_step": 1})
    given = dict(GROUP_M=8, BLOCK_M=128, BLOCK_N=256, M=1280, N=3072)
    for programs, count in ((60, 321), (120, 323)):
        launch = codegen.Launch(None, (programs,), given)
        assert codegen.epilogue(launch, code, 8) == round(count / 128, 2)
    assert codegen.epilogue(codegen.Launch(None, (1,), dict(BLOCK_M=128)), code, 8) == ""


def test_rows_of_kernels_that_are_not_named_stay(codegen, tmp_path, monkeypatch):
    """If the same Triton wrote them and the tile is the same."""
    monkeypatch.setattr(codegen, "TABLE", tmp_path / "codegen.csv")
    launch = codegen.Launch(type("one_kernel", (), {}), (1,), dict(BLOCK_M=64, num_warps=8))
    work = {"key": ("a case", 90, "bf16", launch)}
    row = dict.fromkeys(codegen.COLUMNS, 0) | codegen.heading(work["key"]) | dict(warps=8, stages=3, epilogue=2.5)
    row |= dict(tensor_core="", notes="")
    for version, named, kept in (
        (triton.__version__, "other_kernel", {"key": row}),
        (triton.__version__, "one_kernel", {}),
        ("3.5.1", "other_kernel", {}),
    ):
        table = [f"# kernels 0, triton {version}; written", ",".join(row), ",".join(map(str, row.values()))]
        codegen.TABLE.write_text("\n".join(table))
        assert codegen.unchanged(work, [named]) == kept
    launch.arguments["BLOCK_M"] = 128
    assert codegen.unchanged(work, ["other_kernel"]) == {}


AHEAD = """
import dataclasses, json, os, pickle, sys, time, types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import codegen
import torch
from archive import operations
from vitfast.kernels import archives
from vitfast.tools import doctor
from vitfast.tools.machine_code import compiler, packing
from vitfast.tools.machine_code.model_launches import launching_on_meta
from vitfast.tools.tune import tuner as tune


def main(folder):
    with codegen.tiles.using(sm=90), launching_on_meta():
        found = operations(doctor.SMALL_SIZES, [torch.bfloat16], ["attention", "linear_gelu"])
    once = {launch.kernel: compiler.key_of(launch, 90) for launch in found}  # each kernel takes a second to compile
    found = [launch for launch in found if compiler.key_of(launch, 90) == once[launch.kernel]]
    archive, elsewhere = folder / "sm90.tar.xz", folder / "elsewhere"
    count = packing.write_archive(archive, 90, found, ["some operations"], 2)
    archives.install(archive, elsewhere)
    os.environ["TRITON_CACHE_DIR"] = str(elsewhere)

    ours, launch = compiler.Compiler(90, 2), compiler.detached(found[0])
    refused = dataclasses.replace(launch, arguments=launch.arguments | dict(num_warps=3))
    ahead = dict(right=ours.run(launch), refused=ours.run(refused))
    travelled = pickle.loads(ForkingPickler.dumps(launch))
    same = compiler.key_of(travelled, 90) == compiler.key_of(launch, 90) != compiler.key_of(found[-1], 90)
    same = same and ours.submit(launch) is ours.submit(travelled) and len(ours.futures) == 1

    clock = types.SimpleNamespace(now=time.monotonic)
    tune.Judge = lambda *_: None
    tune.Tuner._seconds = lambda *_: 1.0
    tuner = tune.Tuner(torch.bfloat16, torch.device("cpu"), "GPU", clock, ours)
    (problem,) = (p for p in tuner.problems([doctor.SMALL_SIZES]) if p.op == "gelu_bwd")
    tuner.settle(problem, 100)
    tuned = [len(problem.times), list(problem.failures.values()), problem.note, len(ours.futures)]

    ours.close()

    from triton.backends.nvidia.compiler import CUDABackend
    CUDABackend.make_ttir = CUDABackend.make_cubin = lambda *args, **kwargs: sys.exit("something was compiled")
    shared = [compiler.compiled(launch, 90).metadata.shared for launch in found]
    kernels = sorted({launch.kernel.__name__ for launch in found})
    print(json.dumps(dict(count=count, ahead=ahead, same=same, shared=shared, kernels=kernels, tuned=tuned)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
"""


@pytest.mark.long
def test_what_is_compiled_ahead_is_found_where_it_is_installed(tmp_path):
    """Triton finds every kernel of an archive elsewhere; what cannot be compiled is told; the tuner compiles by it."""
    script = tmp_path / "ahead.py"
    script.write_text(AHEAD)
    found = json.loads(uninterpreted(script, tmp_path, TRITON_CACHE_DIR=None).splitlines()[-1])
    attention = ["_attention_bwd_dkdv_kernel", "_attention_bwd_dq_kernel", "_attention_fwd_short_kernel"]
    assert found["kernels"] == [*attention, "column_sums_kernel", "gelu_bwd_kernel", "persistent_kernel"]
    assert found["same"] and len(found["shared"]) > found["count"] == len(found["kernels"])
    assert found["ahead"]["right"] == [found["shared"][0], ""]
    assert "num_warps" in found["ahead"]["refused"][1]
    candidates, failures, note, compilations = found["tuned"]
    assert candidates > 5 and not failures and not note and compilations > 3


def test_the_committed_table_is_whole_and_has_no_problems(codegen):
    rows = codegen.committed()
    assert {row["sm"] for row in rows} == {80, 89, 90, 100, 120} and {row["dtype"] for row in rows} >= {"bf16", "fp32"}
    text = "".join(path.read_text() for path in Path(tiles.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)) == {row["kernel"] for row in rows}
    assert codegen.problems(rows) == [] and too_few_programs(rows) == (set(), [])
    version = re.search(r"triton (\S+);", codegen.TABLE.read_text()).group(1)
    assert too_many_instructions(rows, version) == (set(), [])
    cases = {(row["sm"], row["case"]) for row in rows}
    for sm in tiles.GENERATIONS:
        for size in codegen.HEAD_SIZES:  # of packed samples, all: models of any size come here
            of_size = [case for found, case in cases if found == sm and case.startswith(f"Dh {size} attention")]
            assert sum(", packed" in case for case in of_size) >= 6, (sm, size)
    others = (config for *_, configs in known_configs() for config in configs[1:])
    candidates = {c.provider for c in others if c.blocks or c.provider in ("tiled", "specialized")}
    assert candidates == {word for row in rows for word in re.findall(r" \((\w+)(?: \d+)?\)$", row["case"])}
    resident = [r for r in rows if r["kernel"] == "_attention_bwd_resident_kernel"]
    few = [r | dict(programs_per_sm=r["programs_per_sm"] - 1) for r in resident]
    assert len(too_few_programs(few)[1]) == 2
