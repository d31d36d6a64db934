"""Bad input: exit code 2, one line that names the thing, and nothing is written."""

from pathlib import Path

import pytest
import torch
import yaml
from commands import CLASSES, RUN, make_folder, picture, run_cli
from processes import Child, command_line, done

from vitfast import ViT


def spoil(name: str, root: Path) -> tuple[list, str]:
    """Arguments that are wrong in one way, and what the error must name."""
    data = root / "data"
    base = ["pretrain", "--recipe", "digits", "--data", data, *RUN]
    digits = ["pretrain", "--recipe", "digits", "--data", "digits"]
    if name == "missing data folder":
        return [*base], f"no folder {data}"
    if name == "no data":
        return ["pretrain", "--recipe", "digits", *RUN], "no data given"
    if name == "empty data folder":
        data.mkdir()
        return base, f"no images in {data}"
    if name == "data is a file":
        data.write_text("x")
        return base, "is a file"
    if name == "unknown preset":
        return [*digits, "--model", "B/17"], "unknown preset 'B/17'; did you mean B/16"
    if name == "unknown recipe":
        return ["pretrain", "--recipe", "digitz", "--data", "digits"], "unknown recipe 'digitz'; did you mean digits"
    if name == "image size":
        return [*digits, "--img-size", "30"], "image size 30 x 30 is no multiple of the patch size 8 x 8"
    if name == "image smaller than a patch by size":
        return [*digits, "--img-size", "4"], "image size 4 x 4"
    if name == "unknown setting":
        return [*digits, "--set", "learning_rat=1"], "unknown setting 'learning_rat'"
    if name == "config file":
        (root / "c.yaml").write_text("[1, 2")
        return ["pretrain", "--config", root / "c.yaml"], "c.yaml cannot be read as YAML"
    if name == "cuda":
        return [*digits, "--device", "cuda"], "no CUDA device"
    if name == "unknown data set":
        return ["pretrain", "--recipe", "digits", "--data", "torch/nothing"], "data set 'torch/nothing'"
    if name == "no shards":
        return ["pretrain", "--recipe", "digits", "--data", f"wds/{root}"], "no shards"
    if name == "no weights":
        return ["finetune", "--data", "digits"], "add --weights"
    if name == "missing weights":
        return ["finetune", "--data", "digits", "--weights", root / "w.safetensors"], "w.safetensors"
    if name == "truncated weights":
        ViT.from_preset("Nano/8", img_size=32, num_classes=3).save_pretrained(root / "w")
        path = root / "w" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
        return ["finetune", "--data", "digits", "--weights", root / "w"], "model.safetensors"
    if name == "another architecture":
        import torchvision

        torch.save(torchvision.models.resnet18().state_dict(), root / "resnet.pth")
        return ["finetune", "--data", "digits", "--weights", root / "resnet.pth"], "resnet.pth"
    if name == "pickle":
        torch.save({"model": ViT.from_preset("Nano/8", img_size=32, num_classes=3)}, root / "p.pth")
        return ["finetune", "--data", "digits", "--weights", root / "p.pth"], "p.pth"
    make_folder(data)
    if name == "no image of a class":
        for file in (data / "train" / "cat").iterdir():
            file.write_text("not a picture")
        return base, "no image of the class 'cat' can be read, the first: "
    if name == "broken image":
        path = data / "train" / "cat" / "0.png"
        path.write_bytes(path.read_bytes()[:200])
        return [*base, "--set", "workers=1", "max_unreadable=0"], "0.png is a broken image"
    if name == "fewer classes in validation":
        for file in (data / "val" / "eel").iterdir():
            file.unlink()
        return base, "missing in validation: eel"
    if name == "other class names":
        (data / "val" / "eel").rename(data / "val" / "fox")
        return base, "missing in validation: eel; only in validation: fox"
    if name == "one class":
        for split in ("train", "val"):
            for other in CLASSES[1:]:
                (data / split / other).rename(root / f"{split}{other}")
        return base, "one class only ('cat')"
    assert name == "tiny images"
    for file in (data / "val" / "cat").iterdir():
        picture(1, 3).save(file)
    return base, "0.png has 3 x 7 pixels, less than one patch (8 x 8)"


BAD = [
    "missing data folder",
    "no data",
    "empty data folder",
    "data is a file",
    "unknown preset",
    "unknown recipe",
    "image size",
    "image smaller than a patch by size",
    "unknown setting",
    "config file",
    "cuda",
    "unknown data set",
    "no shards",
    "no weights",
    "missing weights",
    "truncated weights",
    "another architecture",
    "pickle",
    "no image of a class",
    "fewer classes in validation",
    "other class names",
    "one class",
    "cuda",
    "broken image",
    "tiny images",
]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_2(capsys, tmp_path, name):
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    args, message = spoil(name, tmp_path)
    code, out, err = run_cli(capsys, *args, "--output", tmp_path / "run")
    lines = [line for line in err.splitlines() if line.startswith("vitfast: error: ")]
    assert code == 2 and message in err and len(lines) == 1 and "Traceback" not in err, err
    if name == "broken image":  # found when it is read: the run has begun, and no half checkpoint lies there
        assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    else:
        assert not (tmp_path / "run").exists()


PRETRAIN = ("pretrain", "--recipe", "digits", "--data", "digits")
SAID = [
    ((*PRETRAIN, "--steps", 3, "--epochs", 2), "epochs 2.0 and steps 3 are two lengths of one run; give one of them"),
    ((*PRETRAIN, "--steps", 3, "--set", "epochs=2"), "epochs 2 and steps 3 are two lengths of one run"),
    ((*PRETRAIN, "--config", "CONFIG"), "epochs 4 and steps 5 are two lengths of one run"),
    (
        (*PRETRAIN, "--set", "num_classes=7"),
        "num_classes=7, and data set 'digits' has 10 classes: leave num_classes out",
    ),
    ((*PRETRAIN, "--lr", "1e300"), "lr must be positive, and at most 1e9, got 1e+300"),
    ((*PRETRAIN, "--set", "init_values=1e300"), "init_values must be positive, and at most 1e9, got '1e300'"),
    ((*PRETRAIN, "--set", "head_init_bias=1e300"), "head_init_bias must lie in [-1e+09, 1e+09], got '1e300'"),
    ((*PRETRAIN, "--set", "crop_pct=0.0001"), "crop_pct must lie in [0.1, 1], got '0.0001'"),
    (
        (*PRETRAIN, "--data", "hfds/"),
        "--data hfds/ names no data set; write its name or folder after it, such as hfds/",
    ),
    (
        (*PRETRAIN, "--data", "wds/"),
        "--data wds/ names no data set; write its name or folder after it, such as wds/DIR",
    ),
    (("eval", "--data", "digits", "--weights", ""), "no weights given: give a file, a folder or hf-hub:owner/name"),
    (("predict", "IMAGE", "--weights", ""), "no weights given: give a file, a folder or hf-hub:owner/name"),
    (("convert", "", "OUT", "--format", "timm"), "no weights given: give a file, a folder or hf-hub:owner/name"),
    (("finetune", "--data", "digits", "--weights", ""), "finetune starts from weights: add --weights FILE_OR_FOLDER"),
    (
        ("fewshot", "--data", "digits", "--weights", "W", "--shots", "x"),
        "argument --shots: give whole numbers of images a class, or all; got 'x'",
    ),
]


@pytest.mark.parametrize("args, message", SAID, ids=str)
def test_one_line_says_what_and_what_to_do(capsys, tmp_path, args, message):
    picture(0).save(tmp_path / "image.png")
    (tmp_path / "both.yaml").write_text("epochs: 4\nsteps: 5\n")
    places = dict(IMAGE=tmp_path / "image.png", CONFIG=tmp_path / "both.yaml", OUT=tmp_path / "out")
    output = () if args[0] in ("convert", "eval") else ("--output", tmp_path / "out.csv")
    code, _, err = run_cli(capsys, *(places.get(word, word) for word in args), *output)
    *usage, said = err.splitlines()
    assert code == 2 and message in said and not (tmp_path / "out").exists() and not (tmp_path / "out.csv").exists()
    assert not usage or "--shots" in args  # argparse shows the usage before it


def test_a_length_of_the_user_takes_the_place_of_a_recipes_or_a_files(tmp_path, capsys):
    (tmp_path / "file.yaml").write_text("recipe: digits\nsteps: 7\nepochs: null\n")
    for flags, length in (
        (["--recipe", "digits", "--steps", 3], (3, None)),
        (["--config", tmp_path / "file.yaml"], (7, None)),
        (["--config", tmp_path / "file.yaml", "--epochs", 2], (None, 2.0)),
        (["--recipe", "digits", "--set", "steps=none"], (None, 44.0)),
    ):
        code, out, _ = run_cli(capsys, "pretrain", "--data", "digits", "--print-config", *flags)
        settings = yaml.safe_load(out)
        assert code == 0 and (settings["steps"], settings["epochs"]) == length


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


def test_debug_shows_the_traceback(tmp_path):
    (said,) = done(
        [
            Child(
                command_line,
                ["pretrain", "--recipe", "nope", "--data", "digits", "--output", str(tmp_path / "r"), "--debug"],
            )
        ],
        code=1,
    )
    assert "Traceback" in said and "unknown recipe" in said


@pytest.mark.parametrize("args", [["pretrain", "--steps", "many"], ["train"], ["pretrain", "--set", "lr"], []], ids=str)
def test_wrong_usage_exits_2(capsys, args):
    code, _, err = run_cli(capsys, *args)
    assert code == 2 and "usage: vitfast" in err


# Flags of commands that are no settings of a run: each of these values is wrong for each of these flags.
NUMBERS = {
    "cost": ("cost --model Ti/16", "--img-size --batch-size --gpus --efficiency", "-1 0 nan inf x"),
    "length": ("cost --model Ti/16 --images 10", "--epochs", "-1 nan inf x"),
    "fewshot": ("fewshot --weights W --data digits --device cpu", "--shots --seeds --l2", "-1 0 nan x"),
    "inspect": ("inspect --weights W --data digits --output O", "--images --img-size --num-heads", "-1 0 0.5 x"),
    "vtab": ("vtab --weights W --tasks T --output O --method ridge", "--examples --l2 --img-size", "-1 0 nan x"),
    "convert": ("convert W O --format timm", "--num-heads --num-classes --img-size", "-1 0.5 x"),
    "export": ("export --weights W --output O.pt2 --format torch", "--num-heads --img-size", "-1 0 x"),
    "predict": ("predict W --weights W", "--top-k --batch-size --img-size", "-1 0 0.5 x"),
    "demo": ("demo --output O", "--seed", "-1 0.5 x"),
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
