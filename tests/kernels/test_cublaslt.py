"""cuBLASLt's linear_residual: its numbers, what it asks of cuBLASLt; how its library is built.

A stand-in, cublaslt_stub.cpp, computes on the CPU what cuBLASLt's documentation says of the descriptors it is given.
"""

import functools
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layouts import LAYOUTS, LaidOut

from vitfast.kernels import tiles
from vitfast.kernels.launch import INTERPRETED
from vitfast.kernels.libraries import cublaslt
from vitfast.kernels.matmul import linear
from vitfast.ops import reference as ref

CPU = torch.device("cpu")

# One rounding of the result to 16 bit (2^-8, 2^-11), or none; the sums of 40 products are exact to 1e-6.
TOL = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
HALF = [torch.bfloat16, torch.float16]
LIKE_A_GPU = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)


@pytest.fixture
def afresh(monkeypatch):
    """Nothing is known of the cuBLASLt extension."""
    for name in ("_library", "_chosen"):
        monkeypatch.setattr(cublaslt, name, functools.cache(getattr(cublaslt, name).__wrapped__))


def inputs(m, n, k, dtype, out_dtype=None, layout="contiguous", device=CPU):
    draw = LaidOut(dtype, device, torch.Generator(device).manual_seed(m * n + k), layout)
    return draw.values(m, k), draw.weight(n, k), draw.values(n), draw.values(m, n, dtype=out_dtype or dtype)


def truth(x, weight, bias, residual):
    return ref.linear_residual(x.double(), weight.double(), None if bias is None else bias.double(), residual.double())


def check(out, x, weight, bias, residual):
    assert out.shape == residual.shape and out.dtype == residual.dtype and out.is_contiguous()
    tol = TOL[out.dtype]
    torch.testing.assert_close(out.double(), truth(x, weight, bias, residual), atol=tol, rtol=tol)


@pytest.fixture(scope="module")
def compiled_with_the_stub(tmp_path_factory):
    path = tmp_path_factory.mktemp("stub") / "stub.so"
    sources = [cublaslt.SOURCE, Path(__file__).parents[1] / "helpers" / "cublaslt_stub.cpp"]
    # -Bsymbolic: what the extension calls is the stand-in's, whatever torch has loaded under the same names
    flags = ["-Wall", "-Wextra", "-Werror", "-Wl,-Bsymbolic,-z,defs"]
    subprocess.run([*cublaslt.compile_command(sources, path), *flags], check=True)
    return cublaslt.load(path)


@pytest.fixture
def stub(compiled_with_the_stub, afresh, monkeypatch):
    """cublaslt.linear_residual on CPU tensors, by the stand-in."""
    found = SimpleNamespace(library=compiled_with_the_stub, handle=0, stream=0)
    monkeypatch.setattr(cublaslt, "_library", lambda: (compiled_with_the_stub, ""))
    monkeypatch.setattr(cublaslt, "_handle_and_stream", lambda: (found.handle, found.stream))
    monkeypatch.setattr(cublaslt, "unsupported_reason", lambda *_: None)
    return found


@pytest.mark.quick(9)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "channels-last"])
@pytest.mark.parametrize("stream_dtype", [None, torch.float32], ids=["residual in 16 bit", "in fp32"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_linear_residual_matches_ref(dtype, stream_dtype, layout, with_bias, stub):
    for m, n, k in [(6, 24, 40), (1, 24, 40), (6, 1, 40), (6, 24, 1), (33, 17, 39)]:
        x, weight, bias, residual = inputs(m, n, k, dtype, stream_dtype, layout)
        bias = bias if with_bias else None
        before = [t.clone() for t in (x, weight, residual)]
        check(cublaslt.linear_residual(x, weight, bias, residual), x, weight, bias, residual)
        assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, residual)))


def test_linear_residual_takes_any_strides(stub):
    x, weight, bias, residual = inputs(40, 24, 40, torch.bfloat16)
    wide = torch.stack([bias, bias], 1)[:, 0]
    for arguments in [
        (x.t(), weight.t().contiguous().t(), wide, residual[:1].expand(40, 24)),  # rows that lie on one another
        (x[::2], weight, bias, residual[1::2]),
    ]:
        check(cublaslt.linear_residual(*arguments), *arguments)


def test_an_algorithm_is_asked_for_once_for_each_problem(stub, monkeypatch):
    """And for each alignment: one for well-aligned tensors would fail on others."""
    alignment, start = cublaslt._alignment, stub.library.stub_heuristics()
    # beyond 64 bytes the CPU's allocator is at liberty
    monkeypatch.setattr(cublaslt, "_alignment", lambda t: min(64, alignment(t)))
    x, weight, bias, residual = inputs(6, 24, 40, torch.bfloat16)
    shifted = torch.empty(6 * 40 + 4, dtype=torch.bfloat16)[4:].view(6, 40).copy_(x)
    for given, with_bias, asked in [(x, bias, 1), (x, bias, 1), (shifted, bias, 2), (x, None, 3)]:
        arguments = given, weight, with_bias, residual
        check(cublaslt.linear_residual(*arguments), *arguments)
        assert stub.library.stub_heuristics() - start == asked


@pytest.mark.parametrize(
    "handle, k, message",
    [
        (0, 13, "cublasLtMatmulAlgoGetHeuristic finds no algorithm"),
        (0, 11, "cublasLtMatmulAlgoGetHeuristic says CUBLAS_STATUS_NOT_SUPPORTED"),
        (1, 40, "cublasLtMatmul says CUBLAS_STATUS_EXECUTION_FAILED"),
    ],
)
def test_the_stream_is_the_callers_and_a_status_is_told(handle, k, message, stub):
    stub.library.stub_stream.restype, stub.stream = cublaslt.ctypes.c_void_p, 0x5EED + k
    cublaslt.linear_residual(*inputs(6, 24, 40, torch.bfloat16))
    assert stub.library.stub_stream() == stub.stream
    stub.handle = handle
    said = rf"^linear_residual \(cublaslt\): {message}; Problem\(rows=6, columns=24, depth={k}, "
    with pytest.raises(RuntimeError, match=said):
        cublaslt.linear_residual(*inputs(6, 24, k, torch.bfloat16))


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter alone")
def test_factors_are_left_to_the_first_rule(stub):
    """cuBLASLt's epilogue has none: with them the launcher takes what few rows have without it, and says so."""
    x, weight, bias, residual = inputs(6, 24, 40, torch.float16)
    scale, drop = torch.rand(24) + 0.5, torch.tensor([0.0, 1.25])
    with tiles.using("linear_residual_fwd", tiles.config(provider="cublaslt")):
        for layer_scale, drop_path in [(None, None), (scale, None), (None, drop), (scale, drop)]:
            with tiles.using() as used:
                out = linear.linear_residual(x, weight, bias, residual, layer_scale, drop_path, 3)
            plain = layer_scale is None and drop_path is None
            assert [config.provider for config in used.values()] == ["cublaslt" if plain else "cublas"]
            branch = x.double() @ weight.double().t() + bias
            branch = branch if layer_scale is None else branch * layer_scale
            branch = branch if drop_path is None else branch * drop_path.repeat_interleave(3)[:, None]
            torch.testing.assert_close(out.double(), residual + branch, atol=2**-10, rtol=2**-10)


# The extension as users get it


def test_it_is_for_gpus_and_16_bit():
    assert cublaslt.unsupported_reason(torch.empty(0).half()) == "needs an NVIDIA GPU, the tensors are on cpu"
    fp32 = SimpleNamespace(device=LIKE_A_GPU.device, dtype=torch.float32)
    assert cublaslt.unsupported_reason(fp32) == "does not compute in torch.float32"


def test_it_builds_once_loads_and_reaches_cublaslt(tmp_path, afresh, monkeypatch, caplog):
    """The real library, as far as a CPU gets, in a relative folder beside what a killed build leaves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "with a space")
    (tmp_path / "with a space" / ".vitfast-build-killed").mkdir(parents=True)
    with caplog.at_level("INFO", "vitfast"):
        assert cublaslt.unsupported_reason(LIKE_A_GPU) is None
    assert "compiling cublaslt.cpp, once for this torch: 120 s at most" in caplog.text
    assert sorted(path.suffix for path in (tmp_path / "with a space").iterdir()) == ["", ".so"]
    # it has checked the size of each attribute before it misses the handle
    problem = cublaslt.Problem(6, 24, 40, 40, 40, 24, 24, 14, 14, 256, 256, 16, 256, 256)
    with pytest.raises(RuntimeError, match="cublasLtMatmulAlgoGetHeuristic says CUBLAS_STATUS_NOT_INITIALIZED; "):
        cublaslt._chosen(0, problem)
    monkeypatch.setattr(subprocess, "run", None)
    assert cublaslt.build().suffix == ".so"


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("compiler", "no-such-compiler", "no C++ compiler: no-such-compiler is not on PATH"),
        ("cuda", "99.0", f"no libcublasLt.so.99 in the nvidia wheels beside torch {torch.__version__}"),
        ("source", "int main() { return nonsense; }\n", "nonsense"),
        ("compiler", "exec sleep 60", "it took more than 0.5 s"),
    ],
)
def test_a_build_that_fails_is_one_clear_line_and_leaves_nothing(name, value, reason, tmp_path, afresh, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    source, compiler = tmp_path / "cublaslt.cpp", tmp_path / "compiler"
    if name == "cuda":
        monkeypatch.setattr(torch.version, "cuda", value)
    elif name == "source":
        source.write_text(value)
        monkeypatch.setattr(cublaslt, "SOURCE", source)
    else:
        compiler.write_text(f"#!/bin/sh\n{value}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler) if " " in value else value)
        monkeypatch.setattr(cublaslt, "BUILD_SECONDS", 0.5)
    said = cublaslt.unsupported_reason(LIKE_A_GPU)
    assert said.startswith("not built: ") and reason in said and len(said.splitlines()) == 1
    assert not list(tmp_path.glob("extensions/*"))


def test_the_wheels_of_cuda_12_have_a_folder_each(tmp_path, monkeypatch):
    for folder in ("cublas/lib", "cublas/include", "cuda_runtime/include", "cu13/lib"):
        (tmp_path / folder).mkdir(parents=True)
    for library in ("cublas/lib/libcublasLt.so.12", "cu13/lib/libcublasLt.so.13"):
        (tmp_path / library).touch()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(cublaslt.importlib.util, "find_spec", lambda name: found)
    library, headers = cublaslt.find_cublaslt()
    assert library == tmp_path / "cublas/lib/libcublasLt.so.12"
    assert headers[:2] == [tmp_path / "cublas/include", tmp_path / "cuda_runtime/include"]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "shifted"])
@pytest.mark.parametrize("stream_dtype", [None, torch.float32], ids=["residual in 16 bit", "in fp32"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("k", [768, 3072])
def test_linear_residual_matches_ref_on_a_gpu(k, dtype, stream_dtype, layout, with_bias):
    gpu = torch.device("cuda")
    assert cublaslt.unsupported_reason(torch.empty(0, dtype=torch.bfloat16, device=gpu)) is None
    x, weight, bias, residual = inputs(7 * 197, 768, k, dtype, stream_dtype, layout, gpu)
    bias = bias if with_bias else None
    out = cublaslt.linear_residual(x, weight, bias, residual)
    assert out.dtype == residual.dtype and out.is_contiguous()
    product = torch.mm(x, weight.t(), out_dtype=torch.float32) if residual.dtype == torch.float32 else x @ weight.t()
    peer, exact = residual + (product if bias is None else product + bias), truth(x, weight, bias, residual)
    error, allowed = ((t - exact).abs().max() for t in (out, peer))
    assert error <= 2 * allowed, (error, allowed)  # at most twice PyTorch's, which rounds once more in 16 bits
    assert torch.equal(out, cublaslt.linear_residual(x, weight, bias, residual))
