"""Wrong paths, pickles, files and configurations spoiled by chance: the same model, or one line that says why."""

import json
import math
import pickle
import random

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from checkpoints import HEADS, SIZE, SMALL, google, made, refused, same, small, small_timm
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT, load_checkpoint


def test_files_of_something_else(tmp_path):
    for suffix in ("pth", "safetensors", "npz"):
        (tmp_path / f"empty.{suffix}").touch()
    (tmp_path / "text.pth").write_text("hello")
    with open(tmp_path / "inside_out.npz", "wb") as file:
        np.save(file, np.zeros(3))
    for path in sorted(tmp_path.iterdir()):
        refused(path, f"^{path}: not a whole|^{path}: holds a ndarray", (load_checkpoint,))


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "npz"])
def test_spoiled_bytes(tmp_path, suffix):
    """Cut off, or with another bit where the format has a sum or a name: the same model, or one error of one line."""
    path, rng, counts = tmp_path / f"w.{suffix}", random.Random(0), [0, 0]
    told = {} if suffix == "npz" else dict(num_heads=HEADS, act_layer="gelu", img_size=SIZE)
    if suffix == "npz":
        np.savez(path, **google())
    else:
        state = small_timm().state_dict()
        safetensors.torch.save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    whole, truth = path.read_bytes(), ViT.from_pretrained(path, **told).state_dict()
    end = dict(npz=len(whole), pth=0, safetensors=8 + int.from_bytes(whole[:8], "little"))[suffix]
    for number in range(40):
        flip = end and number % 4
        at = rng.randrange(end if flip else len(whole))
        rest = bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :] if flip else b""
        path.write_bytes(whole[:at] + rest)
        try:
            found = ViT.from_pretrained(path, **told).state_dict()
        except InputError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error), error
            counts[0] += 1
        else:
            assert flip and same(found, truth), at
            counts[1] += 1
    assert counts[0] >= 10, counts


def test_pickles_are_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return ran.touch, ()

    class Script(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    for name in ("evil.bin", "evil.npz"):
        with open(tmp_path / name, "wb") as file:
            pickle.dump(Evil(), file, protocol=2)
    np.savez(tmp_path / "objects.npz", **google(), extra=np.array([Evil()], dtype=object))
    torch.save(small_timm(), tmp_path / "model.pt")
    for path in sorted(tmp_path.iterdir()):
        refused(path, "Python objects.*save model.state_dict", (load_checkpoint,))
    torch.jit.script(Script()).save(str(tmp_path / "ViT-B-32.pt"))
    refused(tmp_path / "ViT-B-32.pt", "a TorchScript archive, .*convert it: torch.save.torch.jit.load")
    assert not ran.exists()


WRONG = [
    ("vit_base_patch16_224", "of a timm model write hf-hub:timm/vit_base_patch16_224 .and .TAG, as in hf-hub:timm/"),
    ("timm/vit_base_patch16_224.mae", "of a timm model write hf-hub:timm/vit_base_patch16_224.mae$"),
    ("hf_hub:timm/vit_tiny", "did you mean hf-hub:timm/vit_tiny.$"),
    ("hf-hub/owner/name", "did you mean hf-hub:owner/name.$"),
    ("https://huggingface.co/owner/name", "did you mean hf-hub:owner/name.$"),
    ("B/16", "B/16 is the name of a model, not weights: give a file, a folder or hf-hub:owner/name$"),
    ("google/vit-base", "for a repository of the Hugging Face hub write hf-hub:google/vit-base$"),
    ("b16.npy", "did you mean b16.npz.$"),
    ("my_weights", "no such file or folder$"),
    ("two", "several weights files .a.pth, b.pth."),
    ("two/a.pth", "holds a Tensor, expected a dictionary"),
    ("other.h5", "unknown kind of weights file; known are .safetensors, .npz"),
    (5000 * "x", "cannot be read"),
    ("~nobody-is-called-so/x", "cannot be read"),
]


def test_wrong_paths_say_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b16.npz", "other.h5"):
        (tmp_path / name).touch()
    (tmp_path / "two").mkdir()
    for name in ("a.pth", "b.pth"):
        torch.save(torch.zeros(3), tmp_path / "two" / name)
    for source, says in WRONG:
        refused(source, says)
    for source in (None, 3, b"x", " ", ""):
        with pytest.raises(InputError, match="no weights given: give a file, a folder or hf-hub:owner/name"):
            ViT.from_pretrained(source)


# ---- config.json

ODD = (
    *(None, True, False, 0, 1, -1, 3, 10**9, 10**12, 10**30, -0.5, 0.5, 1.0, 1e-300, 1e308, math.nan, math.inf),
    *("", "x", "224", "token", [], [1], [32, 32], [0, -1], [10**9, 10**9], [[1], [2]], [None], ["a"], {}, {"0": "a"}),
    *({"a": {"b": [1]}}, [math.nan] * 3, "x\n" * 100),
)


def places(content, path=()):
    """The paths to every value of nested objects and lists."""
    yield path
    if isinstance(content, (dict, list)):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield from places(content[key], (*path, key))


def spoiled(content, path, value):
    """A copy with another value at a path; a value of ... removes it."""
    if not path:
        return {} if value is ... else value
    copy, (first, *rest) = content.copy(), path
    if rest:
        copy[first] = spoiled(copy[first], rest, value)
    elif value is ...:
        del copy[first]
    else:
        copy[first] = value
    return copy


def load(folder, content):
    """The model, or None for an InputError of one line that begins with the folder."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        return ViT.from_pretrained(folder)
    except InputError as error:
        said = str(error)
        assert said.startswith(str(folder)) and "\n" not in said, said
        return None


@pytest.mark.parametrize("most", [15, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("library", ["vitfast", "timm", "huggingface"])
def test_spoiled_values(tmp_path, library, most):
    """Of a config.json of each library: a model, or one error of one line."""
    if library == "vitfast":
        small(class_names=list("abcde"), init_values=0.1).save_pretrained(tmp_path)
    elif library == "timm":
        save_for_hf(timm.create_model("vit_base_patch16_224", **SMALL), tmp_path, safe_serialization=True)
    else:
        made("Dinov2Model").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert load(tmp_path, content) is not None
    rng = random.Random(0)
    drawn = [(path, value) for path in places(content) for value in (..., *rng.sample(ODD, 6))]
    for path, value in rng.sample(drawn, min(most, len(drawn))):
        load(tmp_path, spoiled(content, path, value))
