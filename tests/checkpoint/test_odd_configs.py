"""A config.json that something or somebody spoiled: a model, or one error that names the file. Nothing else."""

import json
import math

import pytest
import timm
import transformers
from checkpoints import HF, SMALL, randomised
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT

ODD = (
    *(None, True, False, 0, 1, -1, 3, 10**9, 10**12, 10**30, -0.5, 0.5, 1.0, 1e-300, 1e308, math.nan, math.inf),
    *("", "x", "224", "token", [], [1], [32, 32], [0, -1], [10**9, 10**9], [[1], [2]], [None], ["a"], {}, {"0": "a"}),
    *({"a": {"b": [1]}}, [math.nan] * 3, "x\n" * 100),
)


def folders(root):
    """A small checkpoint of each library, and the content of its config.json."""
    made = {name: root / name for name in ("vitfast", "timm", "huggingface")}
    ViT(**SMALL, class_names=list("abcde"), init_values=0.1).save_pretrained(made["vitfast"])
    truth = timm.create_model("vit_base_patch16_224", **SMALL, init_values=0.1)
    save_for_hf(truth, made["timm"], safe_serialization=True, model_config=dict(label_names=list("abcde")))
    config = transformers.Dinov2Config(**{**HF, "num_labels": 0})
    randomised(transformers.Dinov2Model(config)).save_pretrained(made["huggingface"])
    return {name: (folder, json.loads((folder / "config.json").read_text())) for name, folder in made.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("odd"))


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


VALUES = st.one_of(
    st.sampled_from((..., *ODD)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=4,
    ),
)


@pytest.mark.parametrize("library", ["vitfast", "timm", "huggingface"])
def test_spoiled_values(saved, library):
    folder, content = saved[library]
    assert load(folder, content) is not None
    every = list(places(content))

    @settings(derandomize=True, deadline=None, max_examples=100, database=None)
    @given(st.lists(st.tuples(st.sampled_from(every), VALUES), min_size=1, max_size=3))
    def spoil(changes):
        odd = content
        for path, value in changes:
            try:
                odd = spoiled(odd, path, value)
            except (AttributeError, KeyError, IndexError, TypeError):
                pass  # an earlier change took the place away
        load(folder, odd)

    spoil()


@pytest.mark.long
@pytest.mark.parametrize("library", ["vitfast", "timm", "huggingface"])
def test_every_odd_value_everywhere(saved, library):
    folder, content = saved[library]
    for path in places(content):
        for value in (..., *ODD):
            load(folder, spoiled(content, path, value))


@pytest.mark.parametrize(
    "library, path",
    [
        ("vitfast", ("warp",)),
        ("huggingface", ("warp",)),
        ("timm", ("warp",)),
        ("timm", ("model_args", "warp")),
        ("timm", ("pretrained_cfg", "warp")),
    ],
)
def test_unknown_fields_are_refused_by_name(saved, library, path):
    folder, content = saved[library]
    (folder / "config.json").write_text(json.dumps(spoiled(content, path, 9)))
    with pytest.raises(InputError, match="has 'warp', which vitfast .* does not know"):
        ViT.from_pretrained(folder)


@pytest.mark.parametrize("name", ["num_heads", "norm_eps", "act_layer", "global_pool", "pos_embed_at", "mean"])
def test_ours_lacks_nothing(saved, name):
    """A default in the place of a lost field would be a guess."""
    folder, content = saved["vitfast"]
    (folder / "config.json").write_text(json.dumps(spoiled(content, (name,), ...)))
    with pytest.raises(InputError, match=f"^{folder}: config.json lacks {name}; copy the folder again"):
        ViT.from_pretrained(folder)


@pytest.mark.parametrize(
    "library, field, value, says",
    [
        ("vitfast", "depth", 10**9, "depth must be a whole number from 1 to 1000, got 1000000000"),
        ("vitfast", "embed_dim", 10**12, "embed_dim must be a whole number"),
        ("vitfast", "img_size", 10**9, "img_size must be a whole number of pixels"),
        ("vitfast", "reg_tokens", 60_000, "reg_tokens=60000, the tensors reg_tokens=0"),
        ("vitfast", "num_classes", 10**7, "num_classes=10000000, the tensors num_classes=5"),
        ("vitfast", "depth", 900, "depth=900, the tensors depth=2"),
        ("vitfast", "norm_eps", -1, "norm_eps must be a number from 0 to 3.4e+38, got -1"),
        ("vitfast", "drop_rate", math.nan, "drop_rate must be a number from 0 to 1, got nan"),
        ("vitfast", "class_names", ["a"], "class_names must name each of the 5 classes, got 1 names"),
        ("vitfast", "class_token", 1, "class_token must be True or False, got 1"),
        ("huggingface", "num_attention_heads", True, "num_attention_heads must be a whole number"),
        ("huggingface", "layer_norm_eps", "1e-6", "layer_norm_eps must be a number from 0 to 3.4e+38, got '1e-6'"),
        ("huggingface", "hidden_size", 10**9, "hidden_size must be a whole number"),
        ("huggingface", "image_size", 64, "images of 64 x 64, and a position table"),
        ("timm", "model_args", 3, "model_args must be an object, got 3"),
    ],
)
def test_spoiled_values_are_named(saved, library, field, value, says):
    folder, content = saved[library]
    (folder / "config.json").write_text(json.dumps(content | {field: value}))
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    assert str(caught.value).startswith(f"{folder}: ") and says in str(caught.value)
