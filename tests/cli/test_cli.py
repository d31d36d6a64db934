"""The command line: help, precedence of settings, data of every kind, and one clear line for bad input."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from processes import SERVER, Child, command_line, done

from vitfast import ViT, doctor
from vitfast.cli import main
from vitfast.data.datasets import Subset, known_labels, open_sources

CLASSES = ("cat", "dog", "eel")


def picture(seed: int, size: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size + 4, 3), dtype=np.uint8))


def make_folder(root: Path, splits=("train", "val"), classes=CLASSES, count: int = 6) -> Path:
    for split in splits:
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture(100 * number + i).save(folder / f"{i}.png")
    return root


def run_cli(capsys, *args) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


RUN = ("--model", "Nano/8", "--img-size", 16, "--steps", 2, "--batch-size", 4, "--device", "cpu", "--set", "workers=0")


@pytest.mark.parametrize("command", ["pretrain", "finetune", "eval", "demo", "recipes"])
def test_help_explains_every_option(capsys, command):
    code, out, _ = run_cli(capsys, command, "--help")
    assert code == 0
    options = [line for line in out.splitlines() if line.strip().startswith("--")]
    assert len(options) >= 2 and "--debug" in out
    code, out, _ = run_cli(capsys, "--help")
    assert code == 0 and command in out and "examples:" in out


def test_module_and_script_are_the_same():
    for command in ([sys.executable, "-m", "vitfast"], [str(Path(sys.executable).parent / "vitfast")]):
        run = subprocess.run([*command, "--version"], capture_output=True, text=True)
        assert run.returncode == 0 and run.stdout.startswith("vitfast 0.")


def test_flags_win_over_the_config_file(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("recipe: digits\nlr: 0.5\nseed: 7\nbetas: [0.8, 0.9]\n")
    code, out, _ = run_cli(
        capsys,
        "pretrain",
        "--config",
        path,
        "--lr",
        0.25,
        "--set",
        "warmup_steps=3",
        "hflip=0.5",
        "--set",
        "seed=9",
        "--print-config",
    )
    config = yaml.safe_load(out)
    assert code == 0
    assert (config["lr"], config["seed"], config["warmup_steps"], config["hflip"], config["betas"]) == (
        0.25,
        9,
        3,
        0.5,
        [0.8, 0.9],
    )
    path.write_text(out)
    assert run_cli(capsys, "pretrain", "--config", path, "--print-config")[1] == out


def test_recipes_as_json(capsys):
    rows = json.loads(run_cli(capsys, "recipes", "--json")[1])
    fields = (
        "name model batch_size lr lr_decay warmup_steps weight_decay dropout optimizer momentum betas clip_norm "
        "img_size label_smoothing ema_decay sweep_lr"
    )
    for row in rows:
        assert set(fields.split()) <= set(row) and isinstance(row["lr"], float) and isinstance(row["img_size"], int)
        assert not any(isinstance(value, dict) for value in row.values())
    assert "digits" in run_cli(capsys, "recipes")[1]


def test_folder_pretrain_finetune_eval(capsys, tmp_path):
    data = make_folder(tmp_path / "data")
    code, out, err = run_cli(capsys, "pretrain", "--recipe", "digits", "--data", data, "--output", tmp_path / "a", *RUN)
    assert code == 0 and "accuracy" in out, err
    last = tmp_path / "a" / "checkpoints" / "last"
    code, out, err = run_cli(
        capsys, "finetune", "--weights", last, "--data", data, "--output", tmp_path / "b", "--img-size", 24, *RUN[4:]
    )
    assert code == 0, err
    code, out, err = run_cli(
        capsys,
        "eval",
        "--weights",
        tmp_path / "b" / "checkpoints" / "last",
        "--data",
        data,
        "--device",
        "cpu",
        "--json",
    )
    assert code == 0, err
    result = json.loads(out)
    rows = list(csv.DictReader(open(tmp_path / "b" / "metrics.csv")))
    assert (
        result["images"] == 18
        and result["accuracy"] == float(rows[-1]["accuracy"])
        and result["loss"] == pytest.approx(float(rows[-1]["loss"]))
    )
    assert ViT.from_pretrained(tmp_path / "b" / "checkpoints" / "last").patch_embed.img_size == (24, 24)
    code, _, err = run_cli(capsys, "eval", "--weights", last, "--data", "digits")
    assert code == 2 and "3 classes" in err and "10" in err


def test_a_tenth_is_held_out_without_val(capsys, tmp_path):
    make_folder(tmp_path, splits=("train",), count=20)
    train, val = open_sources(str(tmp_path), "", (16, 16), (8, 8), 4, 0)
    names = {split: {source.name(i) for i in range(len(source))} for split, source in (("train", train), ("val", val))}
    assert len(names["val"]) == 6 and len(names["train"]) == 54 and not names["train"] & names["val"]
    assert sorted(val[i][1] for i in range(6)) == [0, 0, 1, 1, 2, 2]
    again = open_sources(str(tmp_path / "train"), "", (16, 16), (8, 8), 4, 5)[1]
    assert {again.name(i) for i in range(len(again))} == names["val"]


def test_webdataset_shards(capsys, tmp_path):
    for split, count in (("train", 12), ("val", 6)):
        for shard in range(2):
            with tarfile.open(tmp_path / f"{split}-{shard:04d}.tar", "w") as tar:
                for i in range(count // 2):
                    buffer = io.BytesIO()
                    picture(i).save(buffer, "png")
                    for extension, content in (("png", buffer.getvalue()), ("cls", str(i % 3).encode())):
                        info = tarfile.TarInfo(f"{shard}{i:03d}.{extension}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"wds/{tmp_path}", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 3 and summary["train_images"] == 12 and summary["val_images"] == 6


def test_hugging_face_dataset_on_disk(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = make_folder(tmp_path / "data", splits=("train", "test"))
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"hfds/{data}", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 3 and summary["train_images"] == summary["val_images"] == 18
    source = open_sources(f"hfds/{data}", "", (8, 8), (8, 8), 4, 0)[0]
    assert known_labels(Subset(source, [5, 17, 0])) == [
        source[i][1] for i in (5, 17, 0)
    ]  # from the column, no image is read


CARD = """---
dataset_info:
  features:
  - {name: image, dtype: image}
  - {name: label, dtype: {class_label: {names: {'0': a, '1': b, '2': c}}}}
  splits:
  - {name: train, num_bytes: 1, num_examples: 18}
  - {name: validation, num_bytes: 1, num_examples: 18}
---
"""


def test_streamed_hugging_face_dataset(capsys, tmp_path, monkeypatch):
    """Streams have no length of their own: it comes from the data set's card."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = make_folder(tmp_path / "data", splits=("train", "validation"))
    (data / "README.md").write_text(CARD)
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"hfids/{data}", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 3 and summary["val_images"] == 18
    assert summary["train_images"] == 20  # timm rounds an epoch of a stream up to whole batches
    (data / "README.md").unlink()
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"hfids/{data}", "--output", tmp_path / "other", *RUN
    )
    assert code == 2 and "length is unknown" in err and err.count("\n") == 1 and not (tmp_path / "other").exists()


def test_tensorflow_dataset_without_tensorflow(capsys, tmp_path):
    """The reader is timm's; where its library is not installed the one line says which."""
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", "tfds/mnist", "--output", tmp_path / "run", *RUN
    )
    assert code == 2 and "tfds/mnist" in err and "tensorflow" in err and err.count("\n") == 1


def test_torchvision_dataset_on_disk(capsys, tmp_path, monkeypatch):
    import torchvision

    class Tiny(torchvision.datasets.FakeData):
        """CIFAR-10's interface without its download."""

        def __init__(self, root, train, download):
            super().__init__(24 if train else 10, (3, 32, 32), 10)
            self.class_to_idx = {str(i): i for i in range(10)}

    monkeypatch.setitem(__import__("timm.data.dataset_factory", fromlist=["x"])._TORCH_BASIC_DS, "cifar10", Tiny)
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", "torch/cifar10", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 10 and summary["train_images"] == 24 and summary["val_images"] == 10


# ---- bad input: exit code 2, one line that names the thing, nothing written


def spoil(name: str, root: Path) -> tuple[list, str]:
    """Arguments that are wrong in one way, and what the error must name."""
    data = root / "data"
    base = ["pretrain", "--recipe", "digits", "--data", data, *RUN]
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
        return [
            "pretrain",
            "--recipe",
            "digits",
            "--data",
            "digits",
            "--model",
            "B/17",
        ], "unknown preset 'B/17'; did you mean B/16"
    if name == "unknown recipe":
        return ["pretrain", "--recipe", "digitz", "--data", "digits"], "unknown recipe 'digitz'; did you mean digits"
    if name == "image size":
        return [
            "pretrain",
            "--recipe",
            "digits",
            "--data",
            "digits",
            "--img-size",
            "30",
        ], "image size 30 x 30 is no multiple of the patch size 8 x 8"
    if name == "image smaller than a patch by size":
        return ["pretrain", "--recipe", "digits", "--data", "digits", "--img-size", "4"], "image size 4 x 4"
    if name == "unknown setting":
        return [
            "pretrain",
            "--recipe",
            "digits",
            "--data",
            "digits",
            "--set",
            "learning_rat=1",
        ], "unknown setting 'learning_rat'"
    if name == "config file":
        (root / "c.yaml").write_text("[1, 2")
        return ["pretrain", "--config", root / "c.yaml"], "c.yaml cannot be read as YAML"
    if name == "cuda":
        return ["pretrain", "--recipe", "digits", "--data", "digits", "--device", "cuda"], "no CUDA device"
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
    if name == "no image":
        (data / "train" / "cat" / "bad.jpg").write_text("not a picture")
        return base, "bad.jpg cannot be read as an image"
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
    assert name == "tiny image"
    picture(1, 3).save(data / "train" / "cat" / "tiny.png")
    return base, "tiny.png has 3 x 7 pixels, less than one patch (8 x 8)"


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
    "no image",
    "fewer classes in validation",
    "other class names",
    "one class",
    "cuda",
    "broken image",
    "tiny image",
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


# ---- doctor


def test_doctor_takes_an_operation_in_all_its_forms_or_a_part_of_names():
    names = lambda *only: list(dict.fromkeys(name for name, _ in doctor.tasks(only)))  # noqa: E731
    assert names("attention") == ["attention", "attention, N = 300"]
    assert names("attention, N = 300", "mlp") == ["attention, N = 300", "mlp"]
    assert names("_block", "patch") == ["patch_embed", "patch_embed, uint8", "attention_block", "mlp_block"]
    assert names() == list(doctor.cases(doctor.SMALL_SIZES, doctor.ops)) and len(doctor.tasks()) == 3 * len(names())
    assert doctor.tasks(["layer_norm"], "float16") == [("layer_norm", "float16")]
    both = [("layer_norm", d) for d in ("bfloat16", "float16", "float32")]
    both += [
        (name, d) for name in ("edges of layer_norm", "edges of add + layer_norm") for d in ("bfloat16", "float32")
    ]
    assert set(both) <= set(doctor.tasks(["layer_norm"], interpreted=True))
    assert doctor.tasks(["column sums, gelu"], "float16", interpreted=True) == [
        ("edges of column sums, gelu", "float16")
    ]
    assert len(doctor.tasks(interpreted=True)) == 3 * len(names()) + 2 * len(doctor.edges.names())


def test_doctor_refuses_what_does_not_exist_here(capsys, monkeypatch):
    code, out, err = run_cli(capsys, "doctor", "--only", "mlp", "--only", "nothing")
    assert code == 2 and not out and "no operation has 'nothing' in its name; there are layer_norm;" in err
    monkeypatch.setattr(doctor.interpreter, "bfloat16_mended", False)
    monkeypatch.setattr(doctor, "prepare", lambda: None)
    code, _, err = run_cli(capsys, "doctor", "--dtype", "bfloat16")
    assert code == 2 and "no bfloat16 here, only float16 and float32" in err and "ml_dtypes" in err
    code, _, err = run_cli(capsys, "doctor", "--interpreted")
    assert (
        code == 2
        and "doctor --interpreted needs ml_dtypes for bfloat16: pip install ml_dtypes, or give --dtype float16" in err
    )
    assert (
        run_cli(capsys, "doctor", "--interpreted", "--dtype", "float32", "--only", "column sums, gelu", "--jobs", "1")[
            0
        ]
        == 0
    )


def test_doctor_refuses_no_process_and_no_name(capsys):
    for given, said in (
        (["--jobs", "0"], "--jobs must be 1 at least, got 0"),
        (["--only", ""], "no operation has '' in its name"),
    ):
        code, _, err = run_cli(capsys, "doctor", *given)
        assert code == 2 and said in err


def test_what_fp32_is_judged_by_is_fp32(monkeypatch):
    """On a GPU PyTorch's convolutions take TF32 unless they are told not to."""
    seen = []

    def embed(*tensors):
        seen.append((doctor.ops._dispatch._mode, torch.backends.cudnn.allow_tf32))
        return doctor.ops.patch_embed(*tensors)

    before = torch.backends.cudnn.allow_tf32
    inputs = doctor.cases(doctor.SMALL_SIZES, doctor.ops)["patch_embed"][1]
    assert doctor.examine("patch_embed", embed, inputs, torch.float32, torch.device("cpu"), timed=False).passed
    assert [tf32 for mode, tf32 in seen if mode == "off"] == [False] * 3 and torch.backends.cudnn.allow_tf32 == before


def test_doctor_hands_its_options_to_the_process_with_the_interpreter(monkeypatch, capsys):
    from vitfast.kernels import launch

    commands = []
    monkeypatch.setattr(launch, "INTERPRETED", False)
    answer = SimpleNamespace(returncode=7)
    monkeypatch.setattr(subprocess, "run", lambda command, env: commands.append((command, env)) or answer)
    given = [
        "--jobs=3",
        "--only=mlp",
        "--only=layer_norm",
        "--dtype=float16",
        "--json",
        "--untimed",
        "--debug",
        "--interpreted",
    ]
    assert run_cli(capsys, "doctor", *given)[0] == 7
    assert commands[0][0][3:] == ["doctor", *given] and commands[0][1]["TRITON_INTERPRET"] == "1"


def test_doctor_keeps_both_ends_of_a_failure_and_shows_the_first_traceback(monkeypatch, capsys):
    from vitfast.kernels import attention

    def broken(*args):
        raise ValueError("where it starts" + 400 * " and so on" + " what is wrong")

    monkeypatch.setattr(attention, "attention_fwd", broken)
    code, out, err = run_cli(
        capsys, "doctor", "--only", "attention, N = 300", "--only", "layer_norm", "--debug", "--json"
    )
    rows = {(r["op"], r["dtype"]): r for r in json.loads(out)["results"]}
    bad = rows["attention, N = 300", "float16"]
    assert code == 1 and len(rows) == 6 and rows["layer_norm", "float32"]["passed"]
    assert bad["failure"].startswith("ValueError: where it starts") and bad["failure"].endswith("what is wrong")
    assert len(bad["failure"]) <= 400 and "in broken" in bad["traceback"]
    assert err.count("Traceback") == 1 and "The first failure, attention, N = 300 in bfloat16:" in err
    assert "3 of 6 passed" in err


def test_doctor_says_what_an_interruption_left_out(monkeypatch, capsys):
    def interrupted(task, timed, watched):
        if task[1] == "float32":
            raise KeyboardInterrupt
        return doctor.Result(*task, 0.0, 0.0, True)

    monkeypatch.setattr(doctor, "perform", interrupted)
    code, out, err = run_cli(capsys, "doctor", "--only", "layer_norm", "--json")
    assert (
        code == 130
        and json.loads(out)["not_examined"] == 1
        and "2 of 3 passed, 1 not examined: interrupted in layer_norm in float32" in err
    )


def test_doctor_watches_what_is_interpreted(monkeypatch, capsys):
    """Right numbers are not enough: a row too many is read of a workspace, and a sum goes where nobody reads."""
    from vitfast.kernels import rows

    given = [
        "doctor",
        "--interpreted",
        "--jobs",
        "1",
        "--only",
        "scaled rows",
        "--only",
        "sum of rows",
        "--only",
        "linear_gelu",
    ]
    code, out, _ = run_cli(capsys, *given)
    assert code == 0 and "edges of scaled rows" in out and " runs" in out
    right = rows.column_sums
    monkeypatch.setattr(rows, "column_sums", lambda pairs, programs, D, x: right(pairs, programs + 1, D, x))
    code, out, err = run_cli(capsys, *given, "--json")
    result = json.loads(out)
    found = {r["op"] for r in result["results"] if r["findings"]}
    assert code == 1 and result["not_examined"] == 0
    assert found == {"edges of scaled rows", "edges of scaled rows, layer scale", "edges of sum of rows"}
    assert all(r["passed"] == (r["op"] not in found) for r in result["results"])
    text = next(r for r in result["results"] if r["op"] == "edges of sum of rows")["findings"][0]
    assert (
        "sum of rows, 3 x 5 x 100, 72, bfloat16, odd: out of bounds: column_sums_kernel, program (0, 0, 0), rows.py:"
        in text
    )
    assert "reads ws_ptrs[0][2, 0] of (2, 100)" in text and "other runs)" in text and text in err
    assert next(r for r in result["results"] if r["op"] == "linear_gelu")["passed"]


def test_doctor_says_where_a_kernel_raises_and_what_is_of_another_kind(monkeypatch, capsys):
    from vitfast.kernels import layer_norm, rows

    def raises(*args):
        return undefined_name  # noqa: F821

    given = ["doctor", "--interpreted", "--jobs", "1", "--json", "--only", "edges of sum of rows", "--dtype", "float32"]
    with monkeypatch.context() as patch:
        patch.setattr(rows, "column_sums", raises)
        code, out, err = run_cli(capsys, *given, "--debug")
    (row,) = json.loads(out)["results"]
    assert code == 1 and row["error"] is None and row["torch_error"] is not None  # JSON knows no infinity
    assert "NameError: name 'undefined_name' is not defined at test_cli.py:" in row["findings"][0]
    assert "in column_sums" not in err and "in raises" in row["traceback"] and row["traceback"] in err
    forward = layer_norm.layer_norm_fwd
    with monkeypatch.context() as patch:
        patch.setattr(
            layer_norm,
            "layer_norm_fwd",
            lambda x, *rest, **options: (forward(x, *rest, **options)[0].double(), *forward(x, *rest, **options)[1:]),
        )
        assert run_cli(capsys, "doctor", "--only", "layer_norm", "--dtype", "float16")[0] == 1
        code, out, _ = run_cli(capsys, "doctor", "--only", "layer_norm", "--dtype", "float16")
    assert code == 1 and "result 0 is float64 (2, 5, 64), PyTorch's float16 (2, 5, 64)" in out


def test_an_overwritten_input_a_wrong_number_and_no_kernel_fail_at_the_edges(monkeypatch):
    from vitfast.kernels import rows, tiles
    from vitfast.verify import edges

    case = next(edges.cases("sum of rows"))
    assert edges.examine(case).passed
    right = rows.scale_rows
    with monkeypatch.context() as patch:
        patch.setattr(rows, "scale_rows", lambda x, *rest, **options: (right(x, *rest, **options), x.neg_())[0])
        assert "input 0 is overwritten" in edges.examine(case).wrong[0]
        patch.setattr(rows, "scale_rows", lambda x, *rest, **options: (None, 1.02 * right(x, *rest, **options)[1]))
        report = edges.examine(case)
        assert not report.passed and 0.019 < report.error < 0.021 and "error of a row 2.0e-02" in report.wrong[0]
        patch.setattr(
            rows, "scale_rows", lambda x, *rest, **options: (tiles.lookup("scale_rows", x, "d100"), x.float().sum(0))[1]
        )
        assert "no kernel ran" in edges.examine(case).wrong[0]


@pytest.mark.slow(12)
def test_doctor_interprets_in_processes_of_its_own():
    """Where the environment says nothing of the interpreter, and whatever GPU there is."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "vitfast",
        "doctor",
        "--interpreted",
        "--only",
        "column sums",
        "--only",
        "gelu backward",
        "--jobs",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "6 of 6 passed" in done.stdout and done.stdout.count(" run") == 6, (
        done.stdout + done.stderr
    )


def deadly(task) -> doctor.Result:
    """What a worker of the doctor can do to itself."""
    if task[0] == "exits":
        os._exit(3)
    if task[0] == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    return doctor.Result(*task, 0.0, 0.0, True)


@pytest.mark.slow(8)
def test_a_process_of_the_doctor_that_dies_is_a_failed_row(monkeypatch):
    """The others go on, each task is done once, and no more processes run than asked for."""
    monkeypatch.setattr(doctor.multiprocessing, "get_context", lambda kind: SERVER)
    todo = [(name, "float16") for name in ("exits", "a", "crashes", "b", "c", "d")]
    found = {r.op: r for r in doctor.in_processes(deadly, todo, jobs=2)}
    assert len(found) == 6 and {name for name, r in found.items() if r.passed} == set("abcd")
    assert found["exits"].failure == "its process died with exit code 3"
    assert found["crashes"].failure == "its process died by signal 11 (SIGSEGV)"


def test_a_worker_whose_gpu_has_failed_makes_room_for_another(monkeypatch):
    def illegal():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Pipe:
        sent, tasks = [], [("fine", "float16"), ("wrong", "float16"), ("never", "float16")]
        recv, send = (lambda self: self.tasks.pop(0)), (lambda self, what: self.sent.append(what))

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", illegal)
    doctor._serve(Pipe(), lambda task: doctor.Result(*task, 0.0, 0.0, task[0] == "fine"))
    assert [(result.op, goes_on) for result, goes_on in Pipe.sent] == [("fine", True), ("wrong", False)]
