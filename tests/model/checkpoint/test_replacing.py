"""What is there before a save or a conversion: replaced whole, or left whole with one error that names it."""

import os

import pytest
import safetensors.torch
import timm
import torch
import transformers
from checkpoints import CLASSES, SMALL, D, agree, images, logits, made, small, small_timm
from timm_names import images as timm_images
from timm_names import small as named
from torch.nn.utils import prune

from vitfast import InputError, ViT, cli
from vitfast.model.convert import FORMATS, convert, write


def run(capsys, *args):
    """Exit code and the line of the error."""
    code = cli.main([str(a) for a in args])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1, lines
    return code, lines[0] if lines else ""


# ---- conversions


@pytest.mark.parametrize("form", ["timm", "huggingface", "vitfast"])
def test_nothing_of_the_replaced_checkpoint_is_read(tmp_path, form):
    """Its pixel statistics, its shards; what is no checkpoint's stays."""
    model, old = small(mean=(0.1, 0.2, 0.3), std=0.3), tmp_path / "old"
    made("ViTForImageClassification").save_pretrained(old)
    transformers.ViTImageProcessor(image_mean=[0.9] * 3, image_std=[0.9] * 3).save_pretrained(old)
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "README.md"):
        (old / name).write_text("old")
    model.save_pretrained(tmp_path / "from")
    assert convert(tmp_path / "from", old, form, force=True) == []
    again = ViT.from_pretrained(old)
    assert (again.mean, again.std) == (model.mean, model.std)
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(logits(again.eval(), raw), logits(model, raw))
    convert(tmp_path / "from", tmp_path / "new", form)
    assert {p.name for p in old.iterdir()} == {p.name for p in (tmp_path / "new").iterdir()} | {"README.md"}


TARGETS = [
    ("{}/file/x.safetensors", "timm", "{}/file/x.safetensors: cannot be made (Not a directory)"),
    ("{}/file/x", "huggingface", "{}/file/x: cannot be made (Not a directory)"),
    ("{}/file", "vitfast", "{}/file: a file is in the way"),
    ("{}/folder.npz", "npz", "{}/folder.npz: a folder is in the way"),
    ("{}/pipe.npz", "npz", "{}/pipe.npz: a device or pipe is in the way"),
    ("{}/link", "timm", "{}/link: a dangling link is in the way"),
    ("{}/json/model.safetensors", "timm", "model.safetensors: config.json beside it would be read with it"),
    ("{}/pixels/model.safetensors", "timm", "safetensors: preprocessor_config.json beside it would be read with it"),
    ("{}/w.pth", "npz", "w.pth: the format npz is written as .npz"),
    ("{}/w.npz", "huggingface", "the format huggingface is written as a folder"),
    ("{}/w.bin", "timm", "w.bin: the format timm is written as a folder or .safetensors or .pth"),
    ("{}/w.npz", "hugging", "unknown format 'hugging'; did you mean huggingface"),
    ("", "timm", "nothing can be written to ''"),
    ("/", "timm", "nothing can be written to '/'"),
    ("/dev/null", "timm", "/dev/null: a device or pipe is in the way"),
    ("/proc/xx", "timm", "/proc/xx: cannot be made ("),
    ("{}/" + 300 * "x", "timm", "x: cannot be made (File name too long)"),
    ("a\0b", "vitfast", "cannot be made (embedded null byte)"),
    ("~nobody-is-called-so/x", "timm", "is no path to write to"),
]


@pytest.mark.quick(12)
@pytest.mark.parametrize("target, form, says", TARGETS, ids=lambda value: repr(value)[:25])
def test_targets_where_nothing_can_be(tmp_path, monkeypatch, capsys, target, form, says):
    """Of conversions, and of saves where a folder is wanted; whatever is there stays as it was."""
    small().save_pretrained(tmp_path / "in")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder, name in (("json", "config.json"), ("pixels", "preprocessor_config.json")):  # of another model
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    before = {p: (p.lstat().st_ino, p.lstat().st_mode) for p in tmp_path.rglob("*")}
    with pytest.raises(InputError) as caught:
        write(small(), target.format(tmp_path), form, force=True)
    assert says.format(tmp_path) in str(caught.value)
    if form in FORMATS:
        code, line = run(capsys, "convert", tmp_path / "in", target.format(tmp_path), "--format", form, "--force")
        assert code == 2 and line.startswith("vitfast: error: ") and says.format(tmp_path) in line
    if not target.startswith(("{}/w", "{}/folder", "{}/json", "{}/pixels", "~", "/")):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError):
            small().save_pretrained(target.format(tmp_path))
    assert before == {p: (p.lstat().st_ino, p.lstat().st_mode) for p in tmp_path.rglob("*")}


def test_the_current_folder_is_a_target(tmp_path, capsys, monkeypatch):
    model = small()
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert run(capsys, "convert", tmp_path / "in", ".", "--format", "timm") == (0, "")
    agree(model, timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval())


# ---- flags that the errors ask for

# timm's model, what the error says to pass first, and the flags with which it is timm's
BARE = dict(class_token=False, global_pool="avg")
ASKED = [
    (lambda: small_timm(**BARE, act_layer="gelu_tanh"), "act_layer=", "--act-layer gelu_tanh"),
    (lambda: small_timm(**BARE, pos_embed="none"), "pos_embed=", "--pos-embed none --act-layer gelu"),
    (lambda: named("eva02_tiny_patch14_224"), "rope='cat'", "--rope cat --ref-feat-shape 16 16 --act-layer silu"),
    (lambda: named("eva_giant_patch14_224"), "rope=None", "--rope none --act-layer gelu"),
    (lambda: named("vit_small_patch16_dinov3"), "rope='dinov3'", "--rope dinov3 --act-layer gelu --norm-eps 1e-5"),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("make, asked, flags", ASKED, ids=[flags for *_, flags in ASKED])
def test_arguments_that_errors_ask_for_are_flags(tmp_path, capsys, caplog, make, asked, flags):
    """What errors and log ask for, of bare files: on the command line as from Python."""
    truth = make()
    safetensors.torch.save_file(truth.state_dict(), tmp_path / "w.safetensors")
    heads = next(m.num_heads for m in truth.modules() if isinstance(getattr(m, "num_heads", None), int))
    x = timm_images(truth)
    files = f"convert {tmp_path}/w.safetensors {tmp_path}/out --format vitfast --num-heads {heads}".split()
    command = (*files, "--img-size", *x.shape[2:], "--global-pool", "avg")
    code, line = run(capsys, *command)
    assert code == 2 and f"pass {asked}" in line, line
    caplog.clear()
    told = f"--norm-eps 1e-6 --mean 0.1 0.2 0.3 --std 0.4 {flags}".split()
    assert run(capsys, *command, *told) == (0, "")
    assert not caplog.records
    model = ViT.from_pretrained(tmp_path / "out")
    agree(model, truth, x)
    assert (model.mean, model.std) == ((0.1, 0.2, 0.3), (0.4,) * 3)


# ---- saves


def content(folder):
    return {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("fails", ["weights", "config", "attribute", "folder"])
def test_a_save_that_fails_leaves_the_old_folder_whole(tmp_path, monkeypatch, fails):
    small().save_pretrained(tmp_path)
    if fails == "folder":
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").mkdir()
    before, model = content(tmp_path), small(depth=1)
    if fails == "attribute":
        model.crop_mode = object()
    elif fails != "folder":
        names = dict(weights="write_safetensors", config="_write_json")

        def fail(content, path, *_):
            path.write_text("half")
            raise OSError("disk full")

        monkeypatch.setattr(f"vitfast.model.checkpoint.writers.{names[fails]}", fail)
    with pytest.raises((OSError, InputError)):
        model.save_pretrained(tmp_path)
    assert content(tmp_path) == before
    if fails == "folder":
        with pytest.raises(InputError, match="config.json: a folder is in the way"):
            write(model, tmp_path, "timm", force=True)
        assert content(tmp_path) == before


def test_arrays_as_attributes_are_saved_as_numbers(tmp_path):
    model, mean = small(), torch.tensor([0.1, 0.2, 0.3])
    for number, model.mean in enumerate((mean, mean.numpy(), mean.view(1, 3, 1, 1))):
        model.save_pretrained(tmp_path / str(number))
        assert ViT.from_pretrained(tmp_path / str(number)).mean == pytest.approx((0.1, 0.2, 0.3))


# ---- models that are no longer what their arguments make


def replaced_mlp(model):
    model.blocks[0].mlp.fc1 = torch.nn.Sequential(model.blocks[0].mlp.fc1)


CHANGES = {
    "norm": lambda model: model.prune_intermediate_layers(1, prune_norm=True),
    "norm after pooling": lambda model: model.prune_intermediate_layers(1),
    "head": lambda model: setattr(model, "head", torch.nn.Linear(D, 7)),
    "LoRA": replaced_mlp,
    "pruning": lambda model: prune.l1_unstructured(model.blocks[0].mlp.fc1, "weight", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_could_not_be_read_back_is_not_written(tmp_path, change):
    model = small(global_pool="avg" if "pooling" in change else "token")
    model.save_pretrained(tmp_path)
    before = content(tmp_path)
    CHANGES[change](model)
    with pytest.raises(InputError, match="not those that its arguments make .*state_dict"):
        model.save_pretrained(tmp_path)
    assert content(tmp_path) == before


def test_attributes_that_change_the_function_are_kept(tmp_path):
    model = small()
    model.global_pool, model.dynamic_img_size = "avg", True
    model.save_pretrained(tmp_path / "w")
    write(model, tmp_path / "timm", "timm")
    x = images(32, 48)
    agree(ViT.from_pretrained(tmp_path / "w"), model, x)
    agree(model, timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval(), x)
    with pytest.raises(InputError, match="another pooling than the class token"):
        write(model, tmp_path / "hf", "huggingface")


@pytest.mark.parametrize("name", ["norm", "mlp", "ls1", "norm1"])
def test_layers_that_come_back_as_others_are_told(tmp_path, name, caplog):
    model = small()
    model.save_pretrained(tmp_path)
    assert not caplog.records
    if name == "norm":
        model.norm.eps = 0.5
    elif name == "mlp":
        model.blocks[0].mlp.activation = "gelu_tanh"
    else:
        setattr(model.blocks[0], name, torch.nn.Tanh() if name == "ls1" else torch.nn.LayerNorm(D))
    model.save_pretrained(tmp_path)
    place = name if name == "norm" else f"blocks.0.{name}"
    assert f"from_pretrained will not make {place} as it is now" in caplog.text


def test_classes_with_a_constructor_of_their_own(tmp_path):
    class Reads(ViT):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.total = float(self.head.weight.detach().sum())

    class Fixed(ViT):
        def __init__(self):
            super().__init__(**SMALL)

    Reads(**SMALL).save_pretrained(tmp_path / "reads")
    Fixed().save_pretrained(tmp_path / "fixed")
    assert ViT.from_pretrained(tmp_path / "reads").num_classes == CLASSES
    with pytest.raises(InputError, match="Fixed must take the arguments of ViT"):
        Fixed.from_pretrained(tmp_path / "fixed")
