"""`ViT.from_pretrained("runs/p1")` finds the last checkpoint of a run, whatever `last` is."""

import shutil

import pytest
from checkpoints import SMALL, agree, randomised

from vitfast import InputError, ViT, cli, load_checkpoint
from vitfast.checkpoint.files import last_checkpoint


@pytest.fixture(params=["link", "text", "folder"])
def run(request, tmp_path):
    """A run folder with two checkpoints, and the model of the last one."""
    checkpoints, model = tmp_path / "p1" / "checkpoints", randomised(ViT(**SMALL))
    randomised(ViT(**SMALL)).save_pretrained(checkpoints / "step-00000002")
    last = "last" if request.param == "folder" else "step-00000010"
    model.save_pretrained(checkpoints / last)
    (tmp_path / "p1" / "config.yaml").write_text("task: pretrain\n")
    if request.param == "link":
        (checkpoints / "last").symlink_to("step-00000010")
    elif request.param == "text":
        (checkpoints / "last").write_text("step-00000010\n")
    return tmp_path / "p1", model


def test_the_last_checkpoint_of_a_run(run, capsys, monkeypatch):
    folder, model = run
    for source in (folder, f"{folder}/", folder / "checkpoints" / "last"):
        agree(ViT.from_pretrained(source), model)
    assert load_checkpoint(folder).keys() == model.state_dict().keys()
    monkeypatch.chdir(folder.parent)
    agree(ViT.from_pretrained("p1"), model)
    monkeypatch.chdir(folder / "checkpoints")
    agree(ViT.from_pretrained("last"), model)
    assert cli.main(["convert", str(folder), str(folder.parent / "w.safetensors"), "--format", "timm"]) == 0
    agree(ViT.from_pretrained(folder.parent / "w.safetensors", num_heads=SMALL["num_heads"]), model)


def test_runs_without_a_checkpoint(tmp_path):
    (tmp_path / "p1" / "checkpoints").mkdir(parents=True)
    last = tmp_path / "p1" / "checkpoints" / "last"
    assert last_checkpoint(last.parent) is None
    with pytest.raises(InputError, match=f"^{tmp_path / 'p1'}: no weights in this folder"):
        ViT.from_pretrained(tmp_path / "p1")
    with pytest.raises(InputError, match=f"^{last}: no such file or folder"):
        ViT.from_pretrained(last)
    for text in (b"step-3", b"", b"../../secret", b"\xff\x00", b"/etc", b"."):
        last.write_bytes(text)
        with pytest.raises(InputError, match=f"^{last}: names no checkpoint beside it; give the path of one of "):
            ViT.from_pretrained(tmp_path / "p1")
    last.unlink()
    last.symlink_to("step-3")
    assert last_checkpoint(last.parent) is None


def test_weights_of_a_folder_go_before_its_checkpoints(tmp_path):
    model = randomised(ViT(**SMALL))
    randomised(ViT(**SMALL)).save_pretrained(tmp_path / "checkpoints" / "last")
    model.save_pretrained(tmp_path)
    agree(ViT.from_pretrained(tmp_path), model)
    shutil.rmtree(tmp_path / "checkpoints")
    agree(ViT.from_pretrained(tmp_path), model)
