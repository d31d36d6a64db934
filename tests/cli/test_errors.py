"""Bad input: exit code 2, one line that names the thing, and nothing is written."""

import shutil

import pytest
import torch
import torchvision
from commands import CLASSES, RUN, make_folder, run_cli

from vitfast import InputError, ViT, cli

DIGITS, FINETUNE = "pretrain --recipe digits --data digits", "finetune --data digits"


def pretrain(kind: str) -> str:
    """The command on a data set of some kind."""
    return f"pretrain --recipe digits --data {kind} {' '.join(map(str, RUN))}"


def config_file(root):
    (root / "c.yaml").write_text("[1, 2")


def two_lengths(root):
    (root / "both.yaml").write_text("epochs: 4\nsteps: 5\n")


def resnet(root):
    torch.save(torchvision.models.resnet18().state_dict(), root / "resnet.pth")


def other_classes(root):
    (make_folder(root / "data") / "val" / "eel").rename(root / "data" / "val" / "fox")


def one_class(root):
    for split in (make_folder(root / "data")).iterdir():
        for other in CLASSES[1:]:
            shutil.rmtree(split / other)


# What is made in the folder ROOT, the command, what the error must name.
BAD = [
    (None, pretrain("ROOT/data"), "no folder ROOT/data"),
    (None, f"pretrain --recipe digits {' '.join(map(str, RUN))}", "no data given"),
    (lambda root: (root / "data").mkdir(), pretrain("ROOT/data"), "no images in ROOT/data"),
    (lambda root: (root / "data").write_text("x"), pretrain("ROOT/data"), "is a file"),
    (None, f"{DIGITS} --model B/17", "unknown preset 'B/17'; did you mean B/16"),
    (None, f"{DIGITS} --img-size 30", "image size 30 x 30 is no multiple of the patch size 8 x 8"),
    (None, f"{DIGITS} --img-size 4", "image size 4 x 4"),
    (config_file, "pretrain --config ROOT/c.yaml", "c.yaml cannot be read as YAML"),
    (None, f"{DIGITS} --steps 3 --epochs 2", "epochs 2 and steps 3 are two lengths of one run; give one of them"),
    (None, f"{DIGITS} --steps 3 --set epochs=2", "epochs 2 and steps 3 are two lengths of one run"),
    (two_lengths, f"{DIGITS} --config ROOT/both.yaml", "epochs 4 and steps 5 are two lengths of one run"),
    (None, f"{DIGITS} --set num_classes=7", "num_classes=7, and data set 'digits' has 10 classes: leave"),
    (None, f"{DIGITS} --lr 1e300", "lr must be positive, and at most 1e9, got '1e300'"),
    (None, f"{DIGITS} --set crop_pct=0.0001", "crop_pct must lie in [0.1, 1], got '0.0001'"),
    (None, "pretrain --recipe digits --data hfds/", "--data hfds/ names no data set; write its name or folder"),
    (None, "pretrain --recipe digits --data wds/", "--data wds/ names no data set; write its name or folder after it"),
    (None, "finetune --data digits --weights=", "finetune starts from weights: add --weights FILE_OR_FOLDER"),
    (None, "fewshot --data digits --weights W --shots x", "argument --shots: give whole numbers of images a class, or"),
    pytest.param(
        *(None, f"{DIGITS} --device cuda", "no CUDA device"),
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    ),
    (None, "pretrain --recipe digits --data torch/nothing", "data set 'torch/nothing'"),
    (None, "pretrain --recipe digits --data wds/ROOT", "no shards"),
    (None, FINETUNE, "add --weights"),
    (None, f"{FINETUNE} --weights ROOT/w.safetensors", "w.safetensors"),
    (resnet, f"{FINETUNE} --weights ROOT/resnet.pth", "resnet.pth"),
    (other_classes, pretrain("ROOT/data"), "missing in validation: eel; only in validation: fox"),
    (one_class, pretrain("ROOT/data"), "one class only ('cat')"),
]


@pytest.mark.parametrize("make, command, says", BAD)
def test_bad_input_is_one_line_and_exit_2(capsys, tmp_path, make, command, says):
    if make is not None:
        make(tmp_path)
    words = command.replace("ROOT", str(tmp_path)).split()
    code, out, err = run_cli(capsys, *words, "--output", tmp_path / "run")
    *usage, line = err.splitlines()
    assert code == 2 and line.startswith("vitfast") and " error: " in line and "Traceback" not in err, err
    assert not any(" error: " in each for each in usage) and not (usage and "--shots" not in command)
    assert says.replace("ROOT", str(tmp_path)) in err
    assert not (tmp_path / "run").exists()


def test_an_evaluation_under_torchrun_is_printed_once(tmp_path, capsys, monkeypatch):
    model = ViT(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=10)
    model.save_pretrained(tmp_path / "w")
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        code, out, err = run_cli(capsys, "eval", "--weights", tmp_path / "w", "--data", "digits", "--device", "cpu")
        assert code == 0, err
        printed.append(out.count("accuracy"))
    assert printed == [1, 0]


def test_a_loader_process_that_was_killed_is_one_line(monkeypatch, capsys, tmp_path):
    def killed(*args):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr("vitfast.train.trainer.train", killed)
    code, _, err = run_cli(capsys, "pretrain", "--recipe", "digits", "--data", "digits", "--output", tmp_path / "run")
    said = "a process that loads images has ended (DataLoader worker (pid 7) is killed by signal: Killed.)"
    assert code == 1 and err.startswith(f"vitfast: error: {said}; where memory ran out") and err.count("\n") == 1


def test_debug_raises_what_is_else_one_line():
    with pytest.raises(InputError, match="unknown recipe 'nope'"):
        cli.main(["pretrain", "--recipe", "nope", "--data", "digits", "--output", "r", "--debug"])


@pytest.mark.parametrize("args", [["tune", "--seconds", "many"], ["train"], ["pretrain", "--set", "lr"], []], ids=str)
def test_wrong_usage_exits_2(capsys, args):
    code, _, err = run_cli(capsys, *args)
    assert code == 2 and "usage: vitfast" in err


# Flags of commands that are no settings of a run: each of these values is wrong for each of these flags.
NUMBERS = {
    "cost": ("cost --model Ti/16", "--img-size --batch-size --gpus --efficiency", "-1 0 nan inf x"),
    "length": ("cost --model Ti/16 --images 10", "--epochs", "-1 nan inf x"),
    "fewshot": ("fewshot --weights W --data digits --device cpu", "--shots --seeds --l2", "-1 0 nan inf x"),
    "inspect": ("inspect --weights W --data digits --output O", "--images --img-size --num-heads", "-1 0 0.5 x"),
    "vtab": ("vtab --weights W --tasks T --output O --method ridge", "--examples --l2 --img-size", "-1 0 nan inf x"),
    "convert": ("convert W O --format timm", "--num-heads --num-classes --img-size", "-1 0.5 x"),
    "export": ("export --weights W --output O.pt2 --format torch", "--num-heads --img-size", "-1 0 x"),
    "predict": ("predict W --weights W", "--top-k --batch-size --img-size", "-1 0 0.5 x"),
    "demo": ("demo --output O", "--seed", "-1 0.5 x"),
    "positions": ("positions --recipe digits --data digits --device cpu --output O", "--seeds", "-1 0 x"),
    "doctor": ("doctor --only layer_norm", "--jobs", "-1 0 0.5 x"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_mean_nothing_are_one_line(name, tmp_path, capsys):
    model = ViT(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=10)
    model.save_pretrained(tmp_path / "W")
    (tmp_path / "T").write_text("- {name: a, data: digits}\n")
    command, flags, values = NUMBERS[name]
    words = [str(tmp_path / word) if word[0] in "WOT" and word[:2] != "Ti" else word for word in command.split()]
    for flag in flags.split():
        for value in values.split():
            code, out, err = run_cli(capsys, *words, flag, value)
            said = err.strip().splitlines()[-1]
            assert code == 2 and "error: " in said and len(said) < 400, (flag, value, err)
            assert not (tmp_path / "O").exists() and not (tmp_path / "O.pt2").exists(), (flag, value)
