"""A config.json of another model, or one that something or somebody spoiled: a model, or one error that names it."""

import argparse
import functools
import json
import math
import shutil

import pytest
import safetensors.torch
import timm
import torch
import transformers
from checkpoints import HEADS, SMALL, VISION, made, randomised, refused, small_timm
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models._hub import save_for_hf
from timm_names import small

from vitfast import InputError, ViT
from vitfast.model.convert import write


def numbered(rows):
    """Names for the rows of a table: their number and what they say."""
    return [f"{i}-{row[-1][:24]}" for i, row in enumerate(rows)]


@functools.cache
def template(root, name):
    """A folder with a small checkpoint of that library or class, made once."""
    folder = root / name
    if name == "vitfast":
        ViT(**SMALL, class_names=list("abcde"), init_values=0.1).save_pretrained(folder)
    elif name.startswith(("vit_", "deit_")):
        model = timm.create_model(name, **SMALL) if "base_patch16_224" in name else small(name, act_layer="gelu")
        save_for_hf(model, folder, safe_serialization=True)
    elif name == "torchvision":
        folder.mkdir()
        write(randomised(ViT(**SMALL)), folder / "w.safetensors", "torchvision")
    else:
        more = dict(decoder_num_hidden_layers=1, decoder_hidden_size=16, decoder_num_attention_heads=2)
        more |= dict(use_gated_mlp=True) if name.endswith(", gated") else {}
        name = name.removesuffix(", gated")
        known = set(getattr(transformers, name).config_class().to_dict())
        made(name, **{k: v for k, v in more.items() if k in known}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("templates")


TIMM, VIT, DINOV3 = "vit_base_patch16_224", "ViTForImageClassification", "DINOv3ViTModel"
OTHERS = """ViTMAEModel ViTMAEForPreTraining ViTMSNModel ViTMSNForImageClassification IJepaModel BeitModel
    Data2VecVisionModel CLIPTextModel ASTModel VideoMAEModel DPTModel VitDetModel VitPoseBackbone""".split()


def args(**model_args):
    return lambda c: c | dict(model_args=c["model_args"] | model_args)


def pretrained(**fields):
    return lambda c: c | dict(pretrained_cfg=c["pretrained_cfg"] | fields)


CONFIGS = [
    *((name, {}, "config.json: model_type '.*' is not this ViT; known are vit") for name in OTHERS),
    *(
        (name, {}, f"config.json: architecture '{name}' is not this ViT; known are D.*Model")
        for name in ("Dinov2Backbone", "Dinov2WithRegistersBackbone", "DINOv3ViTBackbone")
    ),
    # fields of another function
    (VIT, dict(hidden_act="relu"), "activation 'relu' is not supported"),
    (VIT, dict(use_swiglu_ffn=True), "swiglu_mlp"),
    (VIT, dict(qkv_bias=False), "qkv_bias"),
    (VIT, dict(hidden_size=64), "embed_dim"),
    (VIT, dict(num_hidden_layers=3), "depth"),
    (VIT, dict(intermediate_size=64), "intermediate_size"),
    (VIT, dict(num_channels=1), "in_chans"),
    (VIT, dict(patch_size=16), "patch_size"),
    (VIT, dict(image_size=64), "images of 64 x 64, and a position table"),
    (VIT, dict(image_size=dict(height=32)), "image_size must be a whole number of pixels"),
    (VIT, dict(pruned_heads={"0": [1]}), "pruned_heads"),
    (VIT, dict(is_decoder=True), "is_decoder"),
    (VIT, dict(position_embedding_type="rotary"), "position_embedding_type"),
    (VIT, dict(use_rope=False), "use_rope"),
    (VIT, dict(model_type="deit", architectures=["DeiTModel"]), "model_type"),
    (VIT, dict(model_type="vit_mae"), "model_type"),
    (VIT, dict(architectures=["ViTHybridModel"]), "architecture 'ViTHybridModel'"),
    (VIT, dict(architectures="ViTModel"), "architectures must be a list of names, got 'ViTModel'"),
    (VIT, dict(architectures={}), "architectures must be a list of names, got {}"),
    (VIT, dict(id2label={"0": "a", "00": "b", "1": "c"}), "id2label names class 0 twice"),
    (VIT, dict(id2label=dict(a="b")), "id2label must be names of classes"),
    (VIT, dict(num_attention_heads=True), "num_attention_heads must be a whole number"),
    (VIT, dict(layer_norm_eps="1e-6"), "layer_norm_eps must be a number from 0 to 3.4e.38, got '1e-6'"),
    (VIT, dict(hidden_size=10**9), "hidden_size must be a whole number"),
    (VIT, dict(warp=9), "has 'warp', which vitfast .* does not know"),
    ("CLIPModel", dict(vision_config=dict(VISION, hidden_act="relu")), "vision_config: activation 'relu'"),
    ("CLIPModel", dict(vision_config=dict(VISION, warp=1)), "vision_config has 'warp'"),
    ("CLIPModel", dict(vision_config=3), "vision_config must be an object, got 3"),
    ("CLIPModel", dict(architectures=["CLIPForImageClassification"]), "architecture 'CLIPForImageClassification'"),
    ("CLIPModel", dict(model_type="siglip", architectures=["SiglipModel"]), "the tensors are those of .* CLIP"),
    ("SiglipModel", dict(vision_config=dict(VISION, num_hidden_layers=3)), "depth=3, the tensors depth=2"),
    (DINOV3, dict(use_gated_mlp=True, hidden_act="silu"), "swiglu_mlp=True, the tensors swiglu_mlp=F"),
    (DINOV3, dict(rope_theta=-1), "rope_theta must be "),
    (f"{DINOV3}, gated", {}, "act_layer='gelu', and the ViT's gated MLP has 'silu' alone"),  # transformers' default
    (DINOV3, dict(num_register_tokens=3), "reg_tokens=3, the tensors reg_tokens=2"),
    # timm's
    *(
        (TIMM, args(**{name: value}), word or name)
        for name, value, word in (
            ("act_layer", "relu", "activation"),
            ("qk_norm", True, ""),
            ("scale_mlp_norm", True, ""),
            ("pre_norm", True, ""),
            ("final_norm", False, ""),
            ("pool_include_prefix", True, ""),
            ("norm_layer", "rmsnorm", ""),
            ("attn_layer", "diff", ""),
            ("use_naflex", True, ""),
            ("global_pool", "avgmax", ""),
            ("rope_type", "cat", ""),
            ("embed_dim", 64, ""),
            ("class_token", False, "class_token|position table"),
            ("img_size", 64, "position table"),
            ("warp", 9, "model_args has 'warp'"),
        )
    ),
    (TIMM, dict(warp=9), "has 'warp', which vitfast .* does not know"),
    (TIMM, pretrained(warp=9), "pretrained_cfg has 'warp'"),
    (
        TIMM,
        lambda c: c | dict(pretrained_cfg=c["pretrained_cfg"] | dict(std=[0.1, 0.2])),
        "std must be .* 3 channels, got 2",
    ),
    (TIMM, pretrained(input_size=224), "input_size must be .channels, height, width., got 224"),
    (TIMM, dict(model_args=3), "model_args must be an object, got 3"),
    (TIMM, dict(global_pool="max", model_args={}), "global_pool='max' is not supported"),
    (TIMM, dict(architecture="vit_base_patch16_rpn_224"), "timm's 'vit_base_patch16_rpn_224' has its norms after"),
    ("vit_giant_patch14_dinov2", {}, "act_layer='gelu', and the ViT's gated MLP has 'silu' alone"),
    # ours
    ("vitfast", "{not json", "config.json: not readable as JSON"),
    ("vitfast", "[1]", "config.json: expected a JSON object, got a list"),
    ("vitfast", dict(warp=9), "has 'warp', which vitfast .* does not know"),
    *(
        ("vitfast", lambda c, n=n: {k: v for k, v in c.items() if k != n}, f"lacks {n}; copy the folder again")
        for n in ("num_heads", "norm_eps", "act_layer", "global_pool", "pos_embed_at", "mean")
    ),
    ("vitfast", dict(depth=10**9), "depth must be a whole number from 1 to 1000, got 1000000000"),
    ("vitfast", dict(embed_dim=10**12), "embed_dim must be a whole number"),
    ("vitfast", dict(img_size=10**9), "img_size must be a whole number of pixels"),
    ("vitfast", dict(reg_tokens=60_000), "reg_tokens=60000, the tensors reg_tokens=0"),
    ("vitfast", dict(num_classes=10**7), "num_classes=10000000, the tensors num_classes=5"),
    ("vitfast", dict(depth=900), "depth=900, the tensors depth=2"),
    ("vitfast", dict(norm_eps=-1), "norm_eps must be a number from 0 to 3.4e.38, got -1"),
    ("vitfast", dict(drop_rate=math.nan), "drop_rate must be a number from 0 to 1, got nan"),
    ("vitfast", dict(class_names=["a"]), "class_names must name each of the 5 classes, got 1 names"),
    ("vitfast", dict(class_token=1), "class_token must be True or False, got 1"),
]


@pytest.mark.parametrize("name, change, says", CONFIGS, ids=numbered(CONFIGS))
def test_configurations_of_another_model(tmp_path, root, name, change, says):
    folder = shutil.copytree(template(root, name), tmp_path / "w")
    path = folder / "config.json"
    if isinstance(change, str):
        path.write_text(change)
    else:
        content = json.loads(path.read_text())
        path.write_text(json.dumps(change(content) if callable(change) else content | change))
    refused(folder, says)


LOST = [
    *((name, "position_embeddings") for name in (VIT, "ViTModel", "DeiTModel", "Dinov2ForImageClassification")),
    ("Dinov2WithRegistersModel", "position_embeddings"),
    *((name, "vision_model.embeddings.position_embedding.weight") for name in ("CLIPModel", "SiglipModel")),
    (TIMM, "pos_embed"),
    ("torchvision", "encoder.pos_embedding"),
]


@pytest.mark.parametrize("name, lost", LOST)
def test_a_lost_position_table(tmp_path, root, name, lost):
    """Of a folder, and of its tensors alone, whoever claims that there was none."""
    (weights,) = template(root, name).glob("*.safetensors")
    state = {k: v for k, v in safetensors.torch.load_file(weights).items() if not k.endswith(lost)}
    folder = shutil.copytree(template(root, name), tmp_path / "w")
    for path in (folder / weights.name, tmp_path / "bare.safetensors"):
        safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    source = folder if name != "torchvision" else folder / weights.name
    says = "there is no position table.*" + ("always has one" if name != TIMM else "pass pos_embed='none'")
    refused(source, says, num_classes=0, num_heads=HEADS)
    if name != TIMM:
        refused(tmp_path / "bare.safetensors", says, num_classes=0, pos_embed="none", num_heads=HEADS)


def test_a_norm_after_pooling_that_the_name_has_not(tmp_path):
    """timm fails on its names; what it pools nobody says."""
    save_for_hf(timm.create_model(TIMM, **SMALL, global_pool="avg"), tmp_path, safe_serialization=True)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["global_pool"]
    (tmp_path / "config.json").write_text(json.dumps(content | dict(model_args=SMALL)))
    with pytest.raises(RuntimeError, match="fc_norm"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    refused(tmp_path, "config.json says nothing of fc_norm, .*global_pool='token'")


def test_statistics_of_another_number_of_channels(tmp_path, root):
    folder = shutil.copytree(template(root, "ViTModel"), tmp_path / "w")
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(image_mean=[0.1, 0.2], image_std=[0.5] * 3)))
    refused(folder, "preprocessor_config.json: image_mean must be one number or one for each of the 3 channels, got 2")


TRAINING = [
    (TIMM, dict(mean=[0.1, 0.2]), "mean must be one number or one for each of the 3 channels, got 2"),
    (TIMM, dict(std=[0, 0, 0]), "std must be "),
    (TIMM, dict(model_kwargs=dict(warp=1)), "model_kwargs has 'warp'"),
    (TIMM, dict(model_kwargs=3), "model_kwargs must be an object, got 3"),
    (TIMM, dict(gp="max"), "gp='max' is not supported"),
    (TIMM, dict(model_kwargs=dict(act_layer="relu")), "activation 'relu' is not supported"),
    (TIMM, dict(model_kwargs=dict(qk_norm=True)), "qk_norm=True, the tensors qk_norm=False"),
    (TIMM, dict(model_kwargs=dict(depth=7)), "depth=7, the tensors depth=2"),
    (TIMM, dict(model_kwargs=dict(img_size=64)), "images of 64 x 64"),
    ("vit_small_patch16_rope_ape_224", {}, "timm's 'vit_small_patch16_rope_ape_224' has rotary"),
    ("my_vit", {}, "does not know that timm's 'my_vit'"),
]


@pytest.mark.parametrize("kind", [argparse.Namespace, dict])
@pytest.mark.parametrize("name, options, says", TRAINING, ids=numbered(TRAINING))
def test_arguments_of_a_training_checkpoint_are_named(tmp_path, kind, name, options, says):
    """There is no config.json to speak of."""
    given = kind(**dict(model_kwargs=dict(num_heads=HEADS)) | options)
    torch.save(dict(state_dict=small_timm().state_dict(), arch=name, args=given), tmp_path / "w.pth")
    refused(tmp_path / "w.pth", f"(?!.*config.json).*(the checkpoint's field args)?.*{says}")


# ---- spoiled by chance

ODD = (
    *(None, True, False, 0, 1, -1, 3, 10**9, 10**12, 10**30, -0.5, 0.5, 1.0, 1e-300, 1e308, math.nan, math.inf),
    *("", "x", "224", "token", [], [1], [32, 32], [0, -1], [10**9, 10**9], [[1], [2]], [None], ["a"], {}, {"0": "a"}),
    *({"a": {"b": [1]}}, [math.nan] * 3, "x\n" * 100),
)


@pytest.fixture(scope="module")
def saved(root, tmp_path_factory):
    """A small checkpoint of each library, and the content of its config.json."""
    folder = tmp_path_factory.mktemp("odd")
    made = {"vitfast": "vitfast", "timm": TIMM, "huggingface": "Dinov2Model"}
    copies = {library: shutil.copytree(template(root, name), folder / library) for library, name in made.items()}
    return {name: (copy, json.loads((copy / "config.json").read_text())) for name, copy in copies.items()}


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
