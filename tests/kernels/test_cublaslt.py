"""cuBLASLt's linear_residual: what it refuses, where it is offered, what it asks of cuBLASLt; how its library is built.

A stand-in, cublaslt_stub.cpp, computes on the CPU what cuBLASLt's documentation says of the descriptors it is given.
"""

import os
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import build

from vitfast.kernels import launch
from vitfast.kernels.configs import tiles
from vitfast.kernels.launch import INTERPRETED
from vitfast.kernels.libraries import cublaslt, native
from vitfast.kernels.matmul import linear
from vitfast.ops import reference as ref
from vitfast.tools.verify.draw import LAYOUTS, Draw

CPU = torch.device("cpu")

# One rounding of the result to 16 bit (2^-8, 2^-11), or none; the sums of 40 products are exact to 1e-6.
TOL = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
HALF = [torch.bfloat16, torch.float16]
LIKE_A_GPU = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)


@pytest.fixture
def afresh():
    """Nothing is known of the cuBLASLt extension, before and after."""
    cublaslt._library.cache_clear()
    cublaslt._chosen.cache_clear()
    yield
    cublaslt._library.cache_clear()
    cublaslt._chosen.cache_clear()


def inputs(m, n, k, dtype, out_dtype=None, layout="contiguous", device=CPU):
    draw = Draw(dtype, device, torch.Generator(device).manual_seed(m * n + k), layout)
    return draw.values(m, k), draw.weight(n, k), draw.values(n), draw.values(m, n, dtype=out_dtype or dtype)


def check(out, x, weight, bias, residual):
    truth = ref.linear_residual(x.double(), weight.double(), None if bias is None else bias.double(), residual.double())
    assert out.shape == residual.shape and out.dtype == residual.dtype and out.is_contiguous()
    tol = TOL[out.dtype]
    torch.testing.assert_close(out.double(), truth, atol=tol, rtol=tol)


WRONG = [
    (dict(x=(2, 3, 40)), ValueError, r"x must be \(M, K\), got \(2, 3, 40\)"),
    (dict(x=torch.float32), TypeError, "x must be torch.float16 or torch.bfloat16, got torch.float32"),
    (dict(weight=(24, 48)), ValueError, r"weight must be \(N, 40\), got \(24, 48\)"),
    (dict(weight=torch.float16), TypeError, "weight must be torch.bfloat16, got torch.float16"),
    (dict(bias=(25,)), ValueError, r"bias must be \(24,\), got \(25,\)"),
    (dict(bias="meta"), ValueError, "bias must be on cpu like x, got meta"),
    (dict(residual=(24,)), ValueError, r"residual must be \(6, 24\), got \(24,\)"),
    (dict(residual=torch.float16), TypeError, "residual must be torch.bfloat16 or torch.float32, got torch.float16"),
    (dict(), ValueError, "x must be on an NVIDIA GPU, got cpu"),
]


@pytest.mark.parametrize(
    "change, error, message", WRONG, ids=[message.partition(", got")[0] for _, _, message in WRONG]
)
def test_wrong_arguments_are_refused(change, error, message):
    given = dict(x=(6, 40), weight=(24, 40), bias=(24,), residual=(6, 24))
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in given.items()}
    for name, value in change.items():
        tensors[name] = (
            torch.zeros(value, dtype=torch.bfloat16) if isinstance(value, tuple) else tensors[name].to(value)
        )
    with pytest.raises(error, match=rf"^linear_residual \(cublaslt\): {message}$"):
        cublaslt.linear_residual(**tensors)


def test_it_is_a_candidate_where_it_can_run(afresh, monkeypatch):
    half, single = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    offered = lambda x: [tile.provider for tile in tiles.candidates("linear_residual_fwd", x, "768x768")]  # noqa: E731
    assert offered(half) == ["cublas", "tma", "triton", "tma"]  # and wide tiles of both
    assert tiles.absent("linear_residual_fwd", half, "768x768") == {
        "cublaslt": "needs an NVIDIA GPU, the tensors are on cpu"
    }
    assert tiles.absent("linear_residual_fwd", single, "768x768") == tiles.absent("linear_fwd", half, "768x768") == {}
    monkeypatch.setattr(cublaslt, "unsupported_reason", lambda *_: None)
    assert offered(half) == ["cublas", "cublaslt", "tma", "triton", "tma"] and offered(single) == ["cublas"]
    monkeypatch.undo()
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    assert cublaslt.unsupported_reason(on_gpu) == "does not compute in torch.float32"


@pytest.fixture(scope="module")
def compiled_with_the_stub(tmp_path_factory):
    path = tmp_path_factory.mktemp("stub") / "stub.so"
    sources = [str(cublaslt.SOURCE), str(Path(__file__).parents[1] / "helpers" / "cublaslt_stub.cpp")]
    headers = [part for folder in native._cublaslt()[1] for part in ("-isystem", str(folder))]
    compiler = os.environ.get("CXX", "c++")
    # -Bsymbolic: what the extension calls is the stand-in's, whatever torch has loaded under the same names
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic,-z,defs"]
    subprocess.run([compiler, *flags, *headers, *sources, "-o", str(path)], check=True)
    return cublaslt.load(path)


@pytest.fixture
def stub(compiled_with_the_stub, afresh, monkeypatch):
    """cublaslt.linear_residual on CPU tensors, by the stand-in."""
    found = SimpleNamespace(library=compiled_with_the_stub, handle=0, stream=0)
    monkeypatch.setattr(cublaslt, "_library", lambda: (compiled_with_the_stub, ""))
    monkeypatch.setattr(cublaslt, "_handle_and_stream", lambda x: (found.handle, found.stream))
    monkeypatch.setattr(cublaslt, "unsupported_reason", lambda *_: None)
    yield found
    monkeypatch.undo()  # before `afresh` clears the cache of what was replaced


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
        (x.t(), weight, bias, residual),
        (x, weight.t().contiguous().t(), bias, residual),
        (x, weight, wide, residual),
        (x, weight, bias, residual[:1].expand(40, 24)),  # rows that lie on one another
        (x[::2], weight, bias, residual[1::2]),
    ]:
        check(cublaslt.linear_residual(*arguments), *arguments)


def test_an_algorithm_is_asked_for_once_for_each_problem(stub, monkeypatch):
    """And for each alignment: one for well-aligned tensors would fail on others."""
    alignment, start = cublaslt._alignment, stub.library.stub_heuristics()
    monkeypatch.setattr(
        cublaslt, "_alignment", lambda t: min(64, alignment(t))
    )  # beyond it the CPU's allocator is at liberty
    x, weight, bias, residual = inputs(6, 24, 40, torch.bfloat16)
    shifted = torch.empty(6 * 40 + 4, dtype=torch.bfloat16)[4:].view(6, 40).copy_(x)
    calls = [((x, weight, bias, residual), 1)] * 3 + [
        ((shifted, weight, bias, residual), 2),
        ((x, weight, None, residual), 3),
    ]
    for arguments, asked in calls:
        check(cublaslt.linear_residual(*arguments), *arguments)
        assert stub.library.stub_heuristics() - start == asked
    assert cublaslt._chosen.cache_info().maxsize == 1024


def test_the_stream_is_the_callers_and_a_status_is_told(stub):
    stub.library.stub_stream.restype = cublaslt.ctypes.c_void_p
    stub.stream = 0x5EED
    arguments = inputs(6, 24, 40, torch.bfloat16)
    check(cublaslt.linear_residual(*arguments), *arguments)
    assert stub.library.stub_stream() == 0x5EED
    for k, message in [
        (13, "AlgoGetHeuristic finds no algorithm"),
        (11, "AlgoGetHeuristic says CUBLAS_STATUS_NOT_SUPPORTED"),
    ]:
        with pytest.raises(
            RuntimeError,
            match=rf"linear_residual \(cublaslt\): cublasLtMatmul{message}; Problem\(rows=6, columns=24, depth={k}, ",
        ):
            cublaslt.linear_residual(*inputs(6, 24, k, torch.bfloat16))
    stub.handle = 1
    with pytest.raises(
        RuntimeError, match=r"linear_residual \(cublaslt\): cublasLtMatmul says CUBLAS_STATUS_EXECUTION_FAILED; Problem"
    ):
        cublaslt.linear_residual(*inputs(6, 24, 40, torch.bfloat16))


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter alone")
def test_factors_are_left_to_the_first_rule(stub):
    """cuBLASLt's epilogue has none: with them the launcher takes our kernel, and says so."""
    x, weight, bias, residual = inputs(6, 24, 40, torch.float16)
    scale, drop = torch.rand(24) + 0.5, torch.tensor([0.0, 1.25])
    with tiles.override("linear_residual_fwd", tiles.tile(provider="cublaslt")):
        for layer_scale, drop_path in [(None, None), (scale, None), (None, drop), (scale, drop)]:
            with tiles.watching() as used:
                out = linear.linear_residual(x, weight, bias, residual, layer_scale, drop_path, 3)
            plain = layer_scale is None and drop_path is None
            assert [tile.provider for tile in used.values()] == ["cublaslt" if plain else "triton"]
            branch = x.double() @ weight.double().t() + bias
            branch = branch if layer_scale is None else branch * layer_scale
            branch = branch if drop_path is None else branch * drop_path.repeat_interleave(3)[:, None]
            torch.testing.assert_close(out.double(), residual + branch, atol=2**-10, rtol=2**-10)


# The extension as users get it


@pytest.mark.long
def test_it_builds_loads_and_reaches_cublaslt(tmp_path, afresh, monkeypatch, caplog):
    """Two builds at once, beside what killed ones leave; then the real library, as far as a CPU gets.

    In an environment whose path has a space, into a relative folder.
    """
    packages, environment = Path(torch.__file__).parents[1], tmp_path.with_name("an environment")
    environment.symlink_to(packages)
    library, headers = native._cublaslt()
    spaced = lambda path: environment / path.relative_to(packages)  # noqa: E731
    monkeypatch.setattr(native, "_cublaslt", lambda: (spaced(library), [spaced(path) for path in headers]))
    monkeypatch.setenv("PYTHONPATH", str(environment))
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", tmp_path.name)
    for name in (".vitfast-build-killed", "extension", "vitfast_cublaslt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with ThreadPoolExecutor(2) as both, caplog.at_level("INFO", "vitfast"):
        one, other = both.map(native.built, [cublaslt.SOURCE] * 2)
    assert "compiling cublaslt.cpp, once for this torch: 120 s at most" in caplog.text
    assert one == other and [path for path in tmp_path.iterdir() if path.is_file()] == [one] and one.is_absolute()
    assert [path.name for path in tmp_path.glob(".vitfast-build-*")] == [".vitfast-build-killed"]
    assert cublaslt.unsupported_reason(LIKE_A_GPU) is None
    # it has checked the size of each attribute before it misses the handle
    problem = cublaslt.Problem(6, 24, 40, 40, 40, 24, 24, 14, 14, 256, 256, 16, 256, 256)
    with pytest.raises(RuntimeError, match="cublasLtMatmulAlgoGetHeuristic says CUBLAS_STATUS_NOT_INITIALIZED; "):
        cublaslt._chosen(0, problem)


@pytest.fixture
def pretended(afresh, tmp_path, monkeypatch):
    """The paths of what is built, in the place of a build; what is loaded is the path of a good file."""
    builds = []

    def build(source, path):
        builds.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("good")

    def load(path):
        if path.read_text() != "good":
            raise OSError("file too short")
        return path

    monkeypatch.setattr(native, "build", build)
    monkeypatch.setattr(cublaslt, "load", load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return builds


def test_a_damaged_file_is_built_again_once(pretended, monkeypatch):
    path = native.built(cublaslt.SOURCE)
    path.write_bytes(b"")
    assert cublaslt._library() == (path, "") and pretended == [path] * 2
    cublaslt._library.cache_clear()
    assert cublaslt._library() == (path, "") and len(pretended) == 2
    cublaslt._library.cache_clear()
    path.write_bytes(b"")
    monkeypatch.setattr(native, "build", lambda source, path: pretended.append(path))  # in vain
    assert cublaslt._library() == (None, "not built: file too short") and len(pretended) == 3


@pytest.mark.parametrize("mode, user", [(0o757, 0), (0o775, 0), (0o755, 1)])
def test_what_another_user_could_have_written_is_not_loaded(pretended, monkeypatch, mode, user):
    path = native.built(cublaslt.SOURCE)
    path.chmod(mode)
    if user and not path.stat().st_uid:  # root's libraries are everybody's
        os.chown(path, 12345, -1)
    owner = path.stat().st_uid
    monkeypatch.setattr(native.os, "geteuid", lambda: owner + user)
    reason = f"not built: {path} belongs to another user, or others may write it; remove it"
    assert cublaslt._library() == (None, reason) and pretended == [path]


def test_what_triton_lacks_to_build_a_launcher_is_said_where_it_cannot(monkeypatch, tmp_path):
    """Triton's own build fails where something is said to be missing, and there alone; a launch then says it."""
    source, include = tmp_path / "launcher.c", sysconfig.get_paths()["include"]
    source.write_text("#include <Python.h>\n")

    def missing(folder: str) -> str:
        monkeypatch.setattr(sysconfig, "get_paths", lambda **_: dict(include=folder))
        if hasattr(build, "_find_compiler"):  # in Triton 3.6 nothing remembers the compiler
            build._find_compiler.cache_clear()
        said, builds = launch.missing_for_launchers(), True
        try:
            build._build("launcher", str(source), str(tmp_path), [], [], [], [])
        except (RuntimeError, OSError, subprocess.CalledProcessError):
            builds = False
        assert builds == (said is None), said
        return said or ""

    monkeypatch.delenv("CC", raising=False)
    assert missing(include) == ""
    assert missing(str(tmp_path)).startswith(f"there is no Python.h in {tmp_path}; install Python's headers")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing(include) == "CC is 'no-such-compiler', which is not a program"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing(include) == "there is no C compiler; install gcc (on Debian: apt install gcc), or name one in CC"
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "settle", lambda kernel: None)

    class Kernel:
        def __getitem__(self, grid):
            raise failure

    for failure, says in (
        (RuntimeError("Failed to find C compiler."), "^Triton cannot build what launches kernels: there is no C comp"),
        (torch.OutOfMemoryError("CUDA out of memory"), "^CUDA out of memory$"),  # what it says itself
    ):
        with pytest.raises(type(failure), match=says):
            launch.launch(Kernel(), (1,), x=torch.empty(1))


@pytest.mark.parametrize(
    "commands, missing",
    [
        ((), r"ninja is not installed \(pip install vitfast\[native\]\)"),
        (("ninja",), r"no C\+\+ compiler: c\+\+ is not on PATH"),
    ],
)
def test_a_missing_tool_is_one_clear_line(commands, missing, tmp_path, afresh, monkeypatch):
    for name in commands:
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.sysconfig, "get_path", lambda name: "")
    with pytest.raises(RuntimeError, match=f"^{missing}$"):
        native.built(cublaslt.SOURCE)
    reason = cublaslt.unsupported_reason(LIKE_A_GPU)
    assert reason.startswith("not built: ") and "\n" not in reason and not (tmp_path / "empty").exists()


def test_the_wheels_of_cuda_12_have_a_folder_each(tmp_path, monkeypatch):
    for folder in ("cublas/lib", "cublas/include", "cuda_runtime/include", "cu13/lib"):
        (tmp_path / folder).mkdir(parents=True)
    for library in ("cublas/lib/libcublasLt.so.12", "cu13/lib/libcublasLt.so.13"):
        (tmp_path / library).touch()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: found)
    library, headers = native._cublaslt()
    assert library == tmp_path / "cublas/lib/libcublasLt.so.12"
    assert headers[:2] == [tmp_path / "cublas/include", tmp_path / "cuda_runtime/include"]


def test_a_build_that_fails_or_hangs_is_told_in_a_line_and_leaves_nothing(tmp_path, monkeypatch):
    source, started, out = tmp_path / "cublaslt.cpp", tmp_path / "pid", tmp_path / "out"
    source.write_text("int main() { return nonsense; }\n")
    with pytest.raises(RuntimeError, match=r"cublaslt.cpp:1:\d+: error: .*nonsense") as failure:
        native.build(source, out / "target.so")
    assert "\n" not in str(failure.value) and len(str(failure.value)) < 420 and list(out.iterdir()) == []
    hang = "import subprocess; p = subprocess.Popen(['sleep', '600']); open({!r}, 'w').write(str(p.pid)); p.wait()"
    monkeypatch.setattr(native, "_BUILD", hang.format(str(started)))
    monkeypatch.setattr(native, "BUILD_SECONDS", 1.5)
    with pytest.raises(RuntimeError, match="^it took more than 1.5 s$"):
        native.build(cublaslt.SOURCE, out / "target.so")
    stat = Path(f"/proc/{started.read_text()}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler outlived the build")
    assert list(out.iterdir()) == []


# On a GPU


@pytest.fixture
def gpu():
    reason = cublaslt.unsupported_reason(torch.empty(0, dtype=torch.bfloat16, device="cuda"))
    assert reason is None, reason
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "shifted"])
@pytest.mark.parametrize("stream_dtype", [None, torch.float32], ids=["residual in 16 bit", "in fp32"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("k", [768, 3072])
def test_linear_residual_matches_ref_on_a_gpu(k, dtype, stream_dtype, layout, with_bias, gpu):
    x, weight, bias, residual = inputs(7 * 197, 768, k, dtype, stream_dtype, layout, gpu)
    bias = bias if with_bias else None
    out = cublaslt.linear_residual(x, weight, bias, residual)
    truth = ref.linear_residual(x.double(), weight.double(), None if bias is None else bias.double(), residual.double())
    tol = max(TOL[out.dtype], 1e-5)  # 3,072 products added up in fp32
    torch.testing.assert_close(out.double(), truth, atol=tol, rtol=tol)
    assert torch.equal(out, cublaslt.linear_residual(x, weight, bias, residual))
