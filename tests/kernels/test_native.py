"""The C++ extension for cuBLASLt as users get it: it builds and loads, or says why it cannot."""

import ctypes
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import build

from vitfast.kernels import launch
from vitfast.kernels.libraries import cublaslt, native

like_a_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)


@pytest.mark.long
def test_it_builds_loads_and_reaches_cublaslt(tmp_path, afresh, monkeypatch, caplog):
    """Two builds at once, beside what killed ones leave; then the real library, as far as a CPU gets.

    In an environment whose path has a space, into a relative folder.
    """
    before = torch.cuda.is_initialized()
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
    assert one == other and [path for path in tmp_path.iterdir() if path.is_file()] == [one]
    assert [path.name for path in tmp_path.glob(".vitfast-build-*")] == [".vitfast-build-killed"]
    monkeypatch.setattr(native, "build", lambda *_: pytest.fail("it is there"))
    assert cublaslt.unsupported_reason(like_a_gpu) is None
    for align_bias in (16, 0):
        # it has checked the size of each attribute before it misses the handle
        problem = cublaslt.Problem(6, 24, 40, 40, 40, 24, 24, 14, 14, 256, 256, align_bias, 256, 256)
        says = r"^linear_residual \(cublaslt\): cublasLtMatmulAlgoGetHeuristic says CUBLAS_STATUS_NOT_INITIALIZED; "
        with pytest.raises(RuntimeError, match=says):
            cublaslt._chosen(0, problem)
    assert torch.cuda.is_initialized() == before


@pytest.fixture
def pretended(afresh, tmp_path, monkeypatch):
    """The paths of what is built, in the place of a build; what is loaded is the path."""
    builds = []

    def build(source, path):
        builds.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("good")

    monkeypatch.setattr(native, "build", build)
    monkeypatch.setattr(cublaslt, "load", lambda path: path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return builds


def test_a_damaged_file_is_built_again_once(pretended, monkeypatch):
    path = native.built(cublaslt.SOURCE)
    path.write_bytes(b"")
    with pytest.raises(OSError):  # what the real loader says of it
        ctypes.CDLL(str(path))

    def load(path):
        if path.read_text() != "good":
            raise OSError("file too short")
        return path

    monkeypatch.setattr(cublaslt, "load", load)
    assert cublaslt._library() == (path, "") and pretended == [path] * 2
    cublaslt._library.cache_clear()
    assert cublaslt._library() == (path, "") and len(pretended) == 2
    cublaslt._library.cache_clear()
    path.write_bytes(b"")
    monkeypatch.setattr(native, "build", lambda source, path: pretended.append(path))  # in vain
    assert cublaslt._library() == (None, "not built: file too short") and len(pretended) == 3


def test_what_another_user_could_have_written_is_not_loaded(pretended, monkeypatch):
    path = native.built(cublaslt.SOURCE)
    path.chmod(0o755)
    assert native.built(cublaslt.SOURCE) == path
    for mode, user in ((0o757, 0), (0o775, 0), (0o755, 1)):
        path.chmod(mode)
        monkeypatch.setattr(native.os, "geteuid", lambda user=user: path.stat().st_uid + user)
        if user and not path.stat().st_uid:  # root's libraries are everybody's
            os.chown(path, 12345, -1)
            monkeypatch.setattr(native.os, "geteuid", lambda: 54321)
        cublaslt._library.cache_clear()
        reason = f"not built: {path} belongs to another user, or others may write it; remove it"
        assert cublaslt._library() == (None, reason), oct(mode)
    assert pretended == [path]


def test_what_triton_lacks_to_build_a_launcher_is_said_where_it_cannot(monkeypatch, tmp_path):
    """Triton's own build fails where something is said to be missing, and there alone."""
    source = tmp_path / "launcher.c"
    source.write_text("#include <Python.h>\n")
    include = sysconfig.get_paths()["include"]

    def missing(folder: str) -> str | None:
        monkeypatch.setattr(sysconfig, "get_paths", lambda **_: dict(include=folder))
        if hasattr(build, "_find_compiler"):  # in Triton 3.6 nothing remembers the compiler
            build._find_compiler.cache_clear()
        said, builds = launch.missing_for_launchers(), True
        try:
            build._build("launcher", str(source), str(tmp_path), [], [], [], [])
        except (RuntimeError, OSError, subprocess.CalledProcessError):
            builds = False
        assert builds == (said is None), said
        return said

    monkeypatch.delenv("CC", raising=False)
    assert missing(include) is None
    version = f"python3.{sys.version_info.minor}-dev"
    assert missing(str(tmp_path)) == (
        f"there is no Python.h in {tmp_path}; install Python's headers (on Debian: apt install {version})"
    )
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing(include) == "CC is 'no-such-compiler', which is not a program"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing(include) == "there is no C compiler; install gcc (on Debian: apt install gcc), or name one in CC"
    # so a launch that fails says that, and one that fails otherwise what it says itself
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "settle", lambda kernel: None)

    class Kernel:
        def __getitem__(self, grid):
            raise failure

    failure = RuntimeError("Failed to find C compiler.")  # Triton's own
    says = "^Triton cannot build what launches kernels: there is no C compiler; install gcc"
    with pytest.raises(RuntimeError, match=says):
        launch.launch(Kernel(), (1,), x=torch.empty(1))
    failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"):
        launch.launch(Kernel(), (1,), x=torch.empty(1))


def only(folder, *names):
    """A folder for PATH that holds these commands alone."""
    for name in names:
        path = folder / name
        path.write_text("#!/bin/sh\nexit 1\n")
        path.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    "commands, missing",
    [
        ((), r"ninja is not installed \(pip install vitfast\[native\]\)"),
        (("ninja",), r"no C\+\+ compiler: c\+\+ is not on PATH"),
    ],
)
def test_a_missing_tool_is_one_clear_line(commands, missing, tmp_path, afresh, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", only(tmp_path, *commands))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.sysconfig, "get_path", lambda name: "")
    with pytest.raises(RuntimeError, match=f"^{missing}$"):
        native.built(cublaslt.SOURCE)
    reason = cublaslt.unsupported_reason(like_a_gpu)
    assert reason.startswith("not built: ") and "\n" not in reason
    assert not (tmp_path / "empty").exists()


def test_the_wheels_of_cuda_12_have_a_folder_each(tmp_path, monkeypatch):
    for folder in ("cublas/lib", "cublas/include", "cuda_runtime/include", "cu13/lib"):
        (tmp_path / folder).mkdir(parents=True)
    for library in ("cublas/lib/libcublasLt.so.12", "cu13/lib/libcublasLt.so.13"):
        (tmp_path / library).touch()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(
        native.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    )
    library, headers = native._cublaslt()
    assert library == tmp_path / "cublas/lib/libcublasLt.so.12"
    assert headers[:2] == [tmp_path / "cublas/include", tmp_path / "cuda_runtime/include"]
    assert (headers[2] / "crt" / "host_defines.h").is_file()


def test_what_the_compiler_says_is_told_in_a_line(tmp_path):
    source = tmp_path / "cublaslt.cpp"
    source.write_text("int main() { return nonsense; }\n")
    with pytest.raises(RuntimeError, match=r"cublaslt.cpp:1:\d+: error: .*nonsense") as failure:
        native.build(source, tmp_path / "out" / "target.so")
    assert "\n" not in str(failure.value) and len(str(failure.value)) < 420
    assert list((tmp_path / "out").iterdir()) == []


def test_a_build_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    started = tmp_path / "pid"
    hang = "import subprocess; p = subprocess.Popen(['sleep', '600']); open({!r}, 'w').write(str(p.pid)); p.wait()"
    monkeypatch.setattr(native, "_BUILD", hang.format(str(started)))
    monkeypatch.setattr(native, "BUILD_SECONDS", 1.5)
    with pytest.raises(RuntimeError, match="^it took more than 1.5 s$"):
        native.build(cublaslt.SOURCE, tmp_path / "out" / "target.so")
    stat = Path(f"/proc/{started.read_text()}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler outlived the build")
    assert list((tmp_path / "out").iterdir()) == []
