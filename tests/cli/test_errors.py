"""Bad input and settings drawn at random: exit code 2, one line that names the thing, and nothing is written."""

import dataclasses
import random
import shutil

import numpy as np
import pytest
import torch
import yaml
from commands import CLASSES, RUN, make_folder, run_cli, works
from frozen import save_tiny, tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitfast import InputError, cli
from vitfast.data.transforms import transforms
from vitfast.run.config import AUTO_AUGMENT, FIELDS, Config, as_plain
from vitfast.train.recipes import resolve

DIGITS, FINETUNE = "pretrain --recipe digits --data digits", "finetune --data digits"


def pretrain(kind: str) -> str:
    """The command on a data set of some kind."""
    return f"pretrain --recipe digits --data {kind} {' '.join(map(str, RUN))}"


def write(name: str, text: str):
    return lambda root: (root / name).write_text(text)


def one_class(root):
    for split in (make_folder(root / "data")).iterdir():
        for other in CLASSES[1:]:
            shutil.rmtree(split / other)


# What is made in the folder ROOT, the command, what the error must name.
BAD = [
    (None, pretrain("ROOT/data"), "no folder ROOT/data"),
    (None, f"pretrain --recipe digits {' '.join(map(str, RUN))}", "no data given"),
    (lambda root: (root / "data").mkdir(), pretrain("ROOT/data"), "no images in ROOT/data"),
    (write("data", "x"), pretrain("ROOT/data"), "is a file"),
    (None, f"{DIGITS} --model B/17", "unknown preset 'B/17'; did you mean B/16"),
    (None, f"{DIGITS} --img-size 30", "image size 30 x 30 is no multiple of the patch size 8 x 8"),
    (None, f"{DIGITS} --img-size 4", "image size 4 x 4"),
    (write("c.yaml", "[1, 2"), "pretrain --config ROOT/c.yaml", "c.yaml cannot be read as YAML"),
    (None, f"{DIGITS} --steps 3 --epochs 2", "epochs 2 and steps 3 are two lengths of one run; give one of them"),
    (None, f"{DIGITS} --steps 3 --set epochs=2", "epochs 2 and steps 3 are two lengths of one run"),
    (write("both.yaml", "epochs: 4\nsteps: 5\n"), f"{DIGITS} --config ROOT/both.yaml", "epochs 4 and steps 5 are two"),
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
    (None, pretrain("tfds/mnist"), "--data tfds/mnist: streamed data sets are not read; take hfds/NAME, or shards"),
    (None, pretrain("hfids/a/b"), "--data hfids/a/b: streamed data sets are not read; take hfds/NAME, or shards"),
    (None, "pretrain --recipe digits --data wds/ROOT", "no shards"),
    (None, FINETUNE, "add --weights"),
    (None, f"{FINETUNE} --weights ROOT/w.safetensors", "w.safetensors"),
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
    weights = save_tiny(tmp_path / "w")
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        out = works(capsys, "eval", "--weights", weights, "--data", "digits", "--device", "cpu")
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


@pytest.mark.parametrize(
    "args",
    [["tune", "--seconds", "many"], ["pretrain", "--steps", ""], ["train"], ["pretrain", "--set", "lr"], []],
    ids=str,
)
def test_wrong_usage_exits_2(capsys, args):
    code, _, err = run_cli(capsys, *args)
    assert code == 2 and "usage: vitfast" in err


# Flags of commands that are no settings of a run: each of these values is wrong for each of these flags.
NUMBERS = {
    "cost": ("cost --model Ti/16", "--img-size --batch-size --gpus --reached", "-1 0 nan inf x"),
    "length": ("cost --model Ti/16 --images 10", "--epochs", "-1 nan inf x"),
    "fewshot": ("fewshot --weights W --data digits --device cpu", "--shots --seeds --l2", "-1 0 nan inf x"),
    "inspect": ("inspect --weights W --data digits --output O", "--images --img-size --num-heads", "-1 0 0.5 x"),
    "vtab": ("vtab --weights W --tasks T --output O --method ridge", "--examples --l2 --img-size", "-1 0 nan inf x"),
    "convert": ("convert W O --format timm", "--num-heads --num-classes --img-size", "-1 0.5 x"),
    "export": ("export --weights W --output O.pt2 --format torch", "--num-heads --img-size", "-1 0 x"),
    "predict": ("predict W --weights W", "--top-k --batch-size --img-size", "-1 0 0.5 x"),
    "embed": ("embed W --weights W --output O", "--shard-size --batch-size --img-size", "-1 0 0.5 x"),
    "demo": ("demo --output O", "--seed", "-1 0.5 x"),
    "positions": ("positions --recipe digits --data digits --device cpu --output O", "--seeds", "-1 0 x"),
    "doctor": ("doctor --only layer_norm", "--jobs", "-1 0 0.5 x"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_mean_nothing_are_one_line(name, tmp_path, capsys):
    tiny().save_pretrained(tmp_path / "W")
    (tmp_path / "T").write_text("- {name: a, data: digits}\n")
    command, flags, values = NUMBERS[name]
    words = [str(tmp_path / word) if word[0] in "WOT" and word[:2] != "Ti" else word for word in command.split()]
    for flag in flags.split():
        for value in values.split():
            code, out, err = run_cli(capsys, *words, flag, value)
            said = err.strip().splitlines()[-1]
            assert code == 2 and "error: " in said and len(said) < 400, (flag, value, err)
            assert not (tmp_path / "O").exists() and not (tmp_path / "O.pt2").exists(), (flag, value)


# ---- settings drawn at random: they are taken, or one line says why not


EDGES = ["", "a\0b", "9" * 5000, *"-1 0 1 2 0.5 0.999 1e-3 1e400 nan inf none true x 1,1 0.5,1 0,0,0 2,3".split()]
VALUES = st.one_of(
    st.sampled_from(EDGES),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    st.lists(st.floats() | st.integers() | st.text(max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
# How long a run is, is given: what it does with a length is not the question.
SHORT = dict(recipe="digits", data="digits", steps=1, batch_size=4, device="cpu", train_images=20)
RUN_FIELDS = sorted(set(FIELDS) - {"steps", "epochs", "output", "device"})


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(FIELDS), VALUES)
def test_a_field_takes_a_value_or_names_itself(name, value):
    layer = {"recipe": "digits", name: value}
    try:
        config = resolve("pretrain", layer)
    except InputError as error:
        asked = "recipe" if name == "name" else "length" if name in ("epochs", "steps") and value is None else name
        assert asked in str(error) or "no length" in str(error), error
        assert len(str(error)) < 4000
        return
    again = yaml.safe_load(yaml.safe_dump(as_plain(config)))
    assert resolve("pretrain", {k: v for k, v in again.items() if k != "name"}, {"recipe": "digits"} | again) == config


@settings(max_examples=200, deadline=None, derandomize=True)
@given(VALUES, VALUES)
def test_a_config_file_takes_any_names_and_recipes(name, recipe):
    layer = {"recipe": recipe, (str(name) if isinstance(name, (list, dict)) else name): 1}
    try:
        resolve("pretrain", layer)
    except InputError as error:
        assert "unknown" in str(error) or "must" in str(error)


def test_no_config_holds_a_wrong_value_however_it_is_made():
    config = resolve("pretrain", dict(recipe="digits"))
    with pytest.raises(InputError, match="ema_decay must lie in"):
        dataclasses.replace(config, ema_decay=2)
    with pytest.raises(InputError, match="label_smoothing must be a finite number"):
        Config(label_smoothing="much")
    assert Config(seed="9007199254740993").seed == 9007199254740993  # not by way of float


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.from_regex(AUTO_AUGMENT, fullmatch=True).filter(bool))
@example("augmix-m20")  # draws posterize with 0 bits
def test_every_policy_that_is_taken_is_one_of_timm(policy):
    train, _ = transforms(resolve("pretrain", dict(recipe="digits", auto_augment=policy)), (16, 16))
    random.seed(0)
    np.random.seed(0)
    assert train(Image.new("RGB", (16, 16), (10, 200, 90))).shape == (3, 16, 16)


def one_step(capsys, output, name: str, value: str) -> None:
    """Trains one step with a setting; it works, or one line names what is wrong."""
    given = {**SHORT, "output": output}
    given = {k: v for k, v in given.items() if k != name}
    train_images = f"train_images={given.pop('train_images', 20)}"
    flags = [text for k, v in given.items() for text in (f"--{k.replace('_', '-')}", v)]
    code, _, err = run_cli(capsys, "pretrain", *flags, "--set", train_images, f"{name}={value}")
    assert code in (0, 1, 2) and "Traceback" not in err, (name, value, err)
    if code:
        assert err.strip().splitlines()[-1].startswith("vitfast: error: "), (name, value, err)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(RUN_FIELDS), st.sampled_from(EDGES))
def test_one_step_runs_or_one_line_says_why_not(capsys, tmp_path_factory, name, value):
    one_step(capsys, tmp_path_factory.mktemp("run"), name, value)


@pytest.mark.long
@pytest.mark.parametrize("name", RUN_FIELDS)
def test_one_step_with_every_field_at_every_edge(capsys, tmp_path_factory, name):
    for value in [*EDGES, "1e9", "1000000000", "999999999999"]:
        one_step(capsys, tmp_path_factory.mktemp("run"), name, value)
