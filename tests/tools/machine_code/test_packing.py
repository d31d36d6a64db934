"""Kernels compiled ahead: models that run compile nothing; what does not fit is refused; Triton's cache stays whole."""

import io
import json
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from commands import refuses, run_cli
from processes import uninterpreted

from vitfast.kernels import archives
from vitfast.run.files import write_tar
from vitfast.tools.machine_code import packing

# Those of the paper and its code without hybrids, and one each of DINOv3 and SigLIP 2.
MAIN = "Ti/16 S/32 S/16 B/32 B/16 L/32 L/16 H/14 DINOv3-B/16 SigLIP2-B/16".split()
MOST_BYTES = 10 * 2**20  # for a model


def compiled_ahead(folder: Path, gpu: str, *models: str) -> dict:
    """What tests/helpers/compiled_ahead.py prints."""
    script = Path(__file__).parents[2] / "helpers" / "compiled_ahead.py"
    return json.loads(uninterpreted(script, folder, gpu, *models, CUDA_VISIBLE_DEVICES="").splitlines()[-1])


@pytest.mark.slow
def test_a_model_compiles_nothing_after_its_kernels_were_packed(tmp_path):
    """An inference of a small model, on a stub GPU whose compiler raises, as it does for another dtype."""
    found = compiled_ahead(tmp_path, "sm_80")["found"]
    assert {"patch_embed_fwd_kernel", "norm_linear_kernel", "split_linear_kernel"} < found["Nano/8"].keys()
    assert found["float16"] == "Triton compiles a kernel"


@pytest.mark.long
@pytest.mark.parametrize("gpu, models", [("sm_90", [*MAIN, "B/16 384"]), ("sm_86", ["S/16"])], ids=["sm_90", "sm_86"])
def test_the_main_models_compile_nothing(tmp_path, gpu, models):
    """Forward, a training step and an embedding, in bf16 and under autocast, whatever the batch."""
    result = compiled_ahead(tmp_path, gpu, *models)
    assert list(result["found"]) == models and result["bytes"] < MOST_BYTES  # all of them in one archive
    wanted = {"patch_embed_fwd_kernel", "patch_embed_dweight_kernel", "layer_norm_bwd_kernel", "resize_pass_kernel"}
    assert all(wanted < launched.keys() for launched in result["found"].values())
    assert not any(result["unknown"].values()), result["unknown"]


# ---- archives that hold no machine code


def archive(folder: Path, name: str = "a.tar.xz", files=("K/k.cubin", "K/k.json"), link="", **changes) -> Path:
    """An archive for sm_90 of one kernel, made here but for the changes. link: what the last of the files links to."""
    made = archives.fingerprint(90) | dict(models=["B/16"], count=1) | changes
    group = json.dumps({"child_paths": {"k.cubin": "/elsewhere/k.cubin", "k.ptx": "/elsewhere/k.ptx"}})
    with tarfile.open(folder / name, "w:xz") as tar:
        contents = {"vitfast.json": json.dumps(made), **dict.fromkeys(files, "new"), "K/__grp__k.json": group}
        for path, text in contents.items():
            member = tarfile.TarInfo(path)
            member.size = len(text)
            if link and path == files[-1]:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, link, 0
            tar.addfile(member, io.BytesIO(text.encode()))
    return folder / name


@pytest.mark.parametrize("before", ["nothing", "empty", "half"])
def test_install_completes_a_kernel_and_names_its_files_where_they_are(tmp_path, monkeypatch, capsys, before):
    """Triton makes a folder when it looks for a kernel; a process that died leaves one half full."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    if before != "nothing":
        (cache / "K").mkdir(parents=True)
    if before == "half":
        (cache / "K" / "k.cubin").write_text("old")
    code, out, _ = run_cli(capsys, "kernels", "install", archive(tmp_path))
    assert code == 0 and out.startswith(f"added 1 kernels of B/16 for sm_90 to {cache}\n")
    paths = json.loads((cache / "K" / "__grp__k.json").read_text())["child_paths"]
    assert paths == {name: str(cache / "K" / name) for name in ("k.cubin", "k.json")}
    assert all(Path(path).read_text() == "new" for path in paths.values())
    assert len([*cache.iterdir()]) == 2  # K and the note that the archive is there


REFUSED = {
    "it is for sm_80, and the GPU here is sm_90": dict(gpu="sm_80"),
    "it was made with Triton 1.2.3": dict(triton="1.2.3", key="0123"),
    "hash 0123; here are Triton": dict(key="0123"),
    "it was made from other kernels (hash 0123, here ": dict(kernels="0123"),
    "its machine code needs a driver for CUDA 13, and the driver here is for CUDA 12.4": dict(ptxas="13.1"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_another_gpu_triton_source_or_driver_is_refused(tmp_path, monkeypatch, capsys, reason):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(archives, "driver_version", lambda: (12, 4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    path = archive(tmp_path, **REFUSED[reason])
    code, out, err = run_cli(capsys, "kernels", "install", path)
    assert code == 2 and err.startswith(f"vitfast: error: {path} is not installed: ") and reason in err and not out
    assert err.count("\n") == 1 and not (tmp_path / "cache").exists()
    assert run_cli(capsys, "kernels", "install", archive(tmp_path, ptxas="12.9"))[0] == 0


def test_the_commands_refuse_wrong_input_in_one_line(tmp_path, capsys):
    (text := tmp_path / "text").write_text("no archive")
    with tarfile.open(empty := tmp_path / "empty.tar.xz", "w:xz"):
        pass
    whole = archive(tmp_path)
    (cut := tmp_path / "cut.tar.xz").write_bytes(whole.read_bytes()[:40])
    (late := tmp_path / "late.tar.xz").write_bytes(whole.read_bytes()[:-100])
    (flipped := bytearray(whole.read_bytes()))[-100] ^= 1
    (flip := tmp_path / "flip.tar.xz").write_bytes(flipped)
    lacks = archive(tmp_path, "lacks.tar.xz", gpu="H100")
    for path in (text, empty, cut, late, flip, lacks):
        refuses(capsys, f"{path} is no archive of kernels", "kernels", "install", path)
    refuses(capsys, f"there is no file {tmp_path / 'none'}", "kernels", "install", tmp_path / "none")
    pack = ("kernels", "pack", "--gpu", "sm_90", "--output")
    for said, options in {
        "exists; --force replaces it": [text],
        "did you mean B/16": [tmp_path / "new", "--model", "B/15"],
        "comes the side of the images in pixels": [tmp_path / "new", "--model", "B/16 large"],
        "is a folder; give the path": [tmp_path, "--force"],
        "--jobs must be 1 at least": [tmp_path / "new", "--jobs", -1],
    }.items():
        refuses(capsys, said, *pack, *options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../k.cubin", "/k.cubin", "K/k.so", "K/../../k.json", "K/k.cubin -> /etc/passwd"])
def test_only_files_of_kernels_are_installed(tmp_path, monkeypatch, capsys, name):
    """No path outside Triton's cache, no link, and no launcher, which Triton would load into its process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = archive(tmp_path, files=("K/k.json", name.partition(" ")[0]), link=name.partition(" -> ")[2])
    refuses(capsys, "is not a file of a kernel", "kernels", "install", path)
    assert {*tmp_path.iterdir()} == {path, tmp_path / "cache"} and not [*(tmp_path / "cache").iterdir()]


def test_pack_writes_what_others_can_read_and_checks_first_that_it_can_write(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "Compiler", lambda *_: pytest.fail("compiles before it looks at the output"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        packing.write_archive(tmp_path / "file" / "a.tar.xz", 90, [], [])
    write_tar(tmp_path / "a.tar.xz", {"K/k.cubin": b"code"}, "xz")
    with tarfile.open(tmp_path / "a.tar.xz") as tar:
        assert {(file.mode, file.uid, file.uname, file.mtime) for file in tar} == {(0o644, 0, "", 0)}


def test_the_first_launch_adds_the_archives_that_a_variable_names(tmp_path, monkeypatch):
    """Once for each GPU; of a folder those that fit, and what does not is told where none does."""
    cache, folder = tmp_path / "cache", tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device))
    monkeypatch.setattr(archives, "_looked_at", set())
    monkeypatch.setenv("VITFAST_KERNELS_CACHE", str(folder))
    with pytest.warns(UserWarning, match="there is no .tar.xz in"):
        archives.add_named(0)
    archive(folder, "a.tar.xz", gpu="sm_80")
    monkeypatch.setattr(archives, "_looked_at", set())
    with pytest.warns(UserWarning, match="a.tar.xz is not used: it is for sm_80, .* Triton compiles the kernels"):
        archives.add_named(0)
    assert not cache.exists()
    archive(folder, "b.tar.xz")
    monkeypatch.setattr(archives, "_looked_at", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        archives.add_named(0)
    assert (cache / "K" / "k.cubin").read_text() == "new"
    (cache / "K" / "k.cubin").write_text("used")  # neither this process nor the next one adds it again
    archives.add_named(0)
    monkeypatch.setattr(archives, "_looked_at", set())
    archives.add_named(0)
    assert (cache / "K" / "k.cubin").read_text() == "used"
    cache.rename(moved := tmp_path / "moved")  # Triton notes absolute paths, so the archive is added again
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    archives.add_named(0)  # the same process: Inductor, too, sets the variable
    assert str(moved) in (moved / "K" / "__grp__k.json").read_text()
    monkeypatch.setattr(archives, "_looked_at", set())
    (folder / "0.tar.xz").write_text("damaged")  # it does not hide those after it
    with pytest.warns(UserWarning, match="0.tar.xz is not used: [^;]*$"):
        archives.add_named(0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="b.tar.xz is not used: .*File exists"):
        archives.add_named(0)
    monkeypatch.setenv("VITFAST_KERNELS_CACHE", str(tmp_path / "none.tar.xz"))
    with pytest.warns(UserWarning, match="none.tar.xz"):
        archives.add_named(1)
