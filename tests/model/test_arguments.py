"""Every argument of ViT: its type, its range; images of other channels: what the error says works."""

import inspect
import math
import pickle
import re

import numpy as np
import pytest
import torch
import torchvision
from runs import digits

from vitfast import InputError, ViT
from vitfast.eval.predict import predict
from vitfast.model.config import ARGUMENTS, ViTConfig
from vitfast.train.trainer import Trainer

SMALL = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3)

NO_VALUES = torch.zeros(3, device="meta")
TYPES = (0.5, 0.5), "0.5", (0.5, None, 0.5), math.nan, [], True
BACKBONES = dict(layers=5), dict(layers=[1], width="2"), dict(layers=[1], width=1e9), dict(layers=[0])

WRONG = {
    "img_size": (0, -16, 16.0, True, "16", None, (16,), (16, 16, 16), (16, "16"), 10**9),
    "patch_size": (0, 8.0, False, (8, 0)),
    "in_chans": (0, True, 3.0, 10**12),
    "num_classes": (-1, True, 2.5, math.nan, "3", None, 10**12),
    "global_pool": ("max", None, 0, ["avg"]),
    "embed_dim": (0, 16.0, 10**12),
    "depth": (0, -1, True, 10**9),
    "num_heads": (0, 1.5, 10**9),
    "mlp_ratio": (0, -4, math.nan, math.inf, True, "4", 1e300),
    "qkv_bias": (1, None, "yes"),
    "proj_bias": (0,),
    "init_values": (-0.1, math.nan, True, 1e300, 10**400),
    "class_token": (1, None),
    "pos_embed": ("rope", None, 1, {}),
    "no_embed_class": (0,),
    "reg_tokens": (-1, True, 10**9),
    "fc_norm": (1, "avg"),
    "dynamic_img_size": (1,),
    "drop_rate": (-0.1, 1.1, math.nan, True, "0.1"),
    "pos_drop_rate": (2,),
    "proj_drop_rate": (-1,),
    "drop_path_rate": (2, math.inf, None),
    "drop_path_mode": ["", "zero", 1],
    "weight_init": ("kaiming", None),
    "head_init_bias": (math.nan, "0", True, 1e300, -1e300),
    "representation_size": (0, -1, True, 10**9),
    "act_layer": ("relu", None, torch.nn.GELU, []),
    "norm_eps": (-1, 1e300, math.nan, math.inf, True),
    "mean": (*TYPES, 1e300, NO_VALUES, torch.eye(3)[0].to_sparse()),
    "std": (0, -1, (1, 1, 0), math.inf, 1e-40, 1e-300, 1e300, NO_VALUES),
    "residual_in_fp32": (1,),
    "pos_embed_at": ("head", None),
    "backbone": ("r51", 5, {}, *BACKBONES),
    "norm_layer": ("batchnorm", None, torch.nn.LayerNorm),
    "pre_norm": (1,),
    "qk_norm": (None,),
    "swiglu_mlp": ("yes",),
    "scale_mlp_norm": (0,),
    "rope": ("axial", True, 1, {}),
    "pos_resample": ("nearest", True, None, ["bicubic"]),
    "rope_temperature": (0, -1, "100", True, math.nan, 1e10),
    "ref_feat_shape": (16, (16,), (16, 0), "16", (16.0, 16.0)),
    "crop_mode": ("middle", 1, []),
    "crop_pct": (0, 0.01, 1.1, "1", True, math.nan),
    "interpolation": ("cubic", 3, []),
    "class_names": ("abc", ["a", "b"], ["a", "b", 3], 3, ["a"] * 4),
    "keep": ("none", None, 1),
}


def test_every_argument_is_there():
    assert {*WRONG} == {*ARGUMENTS, "class_names", "keep"}
    assert {*WRONG} == {*inspect.signature(ViT).parameters}
    assert inspect.signature(ViT) == inspect.signature(ViTConfig)  # whose fields have the types and the checks
    for name, p in inspect.signature(ViT).parameters.items():
        row = re.search(rf"^{name} +(.*?)  +{re.escape(repr(p.default))}  +(.+)", ViT.__doc__, flags=re.MULTILINE)
        assert row and row[2] in inspect.getdoc(ViT) and (p.annotation is not int or row[1] == "int"), name


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values], ids=str)
def test_what_means_nothing_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=name) as caught:
        ViT(**{**SMALL, name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(depth=1000, embed_dim=2**17, num_heads=1),
        dict(num_classes=2**24, embed_dim=2**16, num_heads=1),
        dict(img_size=2**16, patch_size=1, pos_embed_at="layers", depth=900),
        dict(patch_size=2**15, img_size=2**15, embed_dim=64),
        dict(reg_tokens=2**16, representation_size=2**17, embed_dim=2**17),
    ],
    ids=str,
)
def test_sizes_that_are_too_much_together_are_refused_before_they_are_made(sizes):
    with pytest.raises(InputError, match="the sizes must leave at most 1e.11 parameters"):
        ViT(**{**SMALL, **sizes})


# What each argument allows by itself, and not together, or not of this model, and what the error says.
TOGETHER = [
    (dict(img_size=30), "no multiple of the patch size"),
    (dict(img_size=4), "no multiple of the patch size"),
    (dict(num_heads=5), "multiple of num_heads"),
    (dict(class_token=False), "needs class_token"),
    (dict(mean=(0.5, 0.5)), "one for each of the 3 channels"),
    (dict(std=0.0), "std must be positive"),
    (dict(pos_embed="sincos2d", pos_embed_at="layers"), "pos_embed_at='layers' is for .* got pos_embed='sincos2d'"),
    (dict(pos_embed="relative", pos_embed_at="layers_shared"), "got pos_embed='relative'"),
    (dict(pos_embed="learn2d", embed_dim=27, num_heads=1), "embed_dim must be even, got 27"),
    (dict(rope_temperature=100.0), "rope_temperature is for a rope"),
    (dict(ref_feat_shape=(16, 16)), "ref_feat_shape is for a rope"),
    (dict(rope="dinov3", ref_feat_shape=(16, 16)), "ref_feat_shape is for rope='cat'"),
    (dict(rope="cat", embed_dim=12), "needs a head size by 4 divisible, got 6"),
    (dict(rope="cat", pos_embed="relative"), "pos_embed='relative' has no rope beside it"),
    (dict(swiglu_mlp=True, act_layer="quick_gelu"), "swiglu_mlp=True has the activation 'silu'"),
    (dict(backbone="r51"), "unknown backbone 'r51'; did you mean r50"),
    (dict(backbone="r50"), "'r50' makes patches of 16 or 32 pixels, got patch_size 8 x 8"),
    (dict(backbone=dict(layers=(1, 1, 1))), "3 stages make a map 16 times smaller, no divisor of patch_size 8 x 8"),
    (dict(backbone=dict(layers=(1, 0))), "layers .the units of one to 4 stages"),
    (dict(backbone=dict(layers=(1, 1), width=0.3)), "width 0.3 does not fit"),
    (dict(backbone=dict(units=(1, 1))), "a dict with layers"),
]


@pytest.mark.parametrize("options, says", TOGETHER, ids=str)
def test_what_does_not_go_together_is_refused(options, says):
    with pytest.raises(InputError, match=says):
        ViT(**{**SMALL, **options})


HALF = "write B/32 for ViT-B, B-half/32 for the half as wide ViT-b"  # ViT-B/32 or, in the paper's Figure 4, its half
CALLS = [
    *(
        (lambda m, v=v: m.reset_classifier(v), "num_classes must be a whole")
        for v in (-1, True, 2.0, "3", None, 10**12)
    ),
    *((lambda m, v=v: m.set_input_size(v), "img_size must be a whole") for v in (0, True, "16", None, (16,), 10**9)),
    (lambda m: m.reset_classifier(3, "max"), "cannot pool"),
    (lambda m: m.reset_classifier(3, "map"), "cannot pool by 'map'"),
    (lambda m: setattr(m, "class_names", "abc"), "class_names must .*list of strings"),
    (lambda m: setattr(m, "class_names", ["a"]), "class_names must .*each of the 3 classes, got 1"),
    (lambda m: setattr(m, "class_names", [1, 2, 3]), "class_names must .*strings"),
    *((lambda m, v=v: ViT.from_preset(v), "a preset is a name such as 'B/16', got ") for v in (None, 16, ["B/16"], {})),
    *((lambda m, v=v: ViT.from_preset(v), HALF) for v in ("b/32", "ViT-b/32", "ViT-B/32")),
    (lambda m: ViT.from_preset("R50-B/16"), "did you mean R50.B/16"),
    (lambda m: ViT.from_preset("b-16"), "did you mean.*B/16"),
]


@pytest.mark.parametrize("call, says", CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_calls_that_mean_nothing_are_refused_and_change_nothing(call, says):
    model = ViT(**SMALL)
    with pytest.raises(InputError, match=says):
        call(model)
    assert model.num_classes == 3 and model.patch_embed.img_size == (16, 16)


def test_a_subclass_says_how_images_are_prepared():
    class Ours(ViT):
        mean, class_names = (0.25,) * 3, ("cat", "dog")

        @property
        def crop_pct(self):
            return 0.9

    model = Ours(**SMALL | dict(num_classes=2), crop_mode="squash")
    assert (model.mean, model.crop_pct, model.crop_mode) == ((0.25,) * 3, 0.9, "squash")
    assert model.pretrained_cfg["crop_pct"] == 0.9 and model.class_names == ("cat", "dog")


def test_a_model_of_numpy_numbers_is_the_same_model():
    numbers = dict(img_size=np.int64(16), patch_size=np.int32(8), num_heads=np.int64(2), norm_eps=np.float32(1e-3))
    numbers |= dict(embed_dim=np.int16(16), depth=np.uint8(1), num_classes=np.int64(3), mlp_ratio=np.float64(2))
    plain = {name: value.item() for name, value in numbers.items()}
    ours, truth = ViT(**numbers, mean=[np.float64(0.1)] * 3), ViT(**plain, mean=0.1)
    assert ours.config == truth.config | dict(mean=(0.1, 0.1, 0.1)) and type(ours.config["depth"]) is int
    truth.load_state_dict(ours.state_dict())
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(ours(images), truth(images))


# ---- images of other channels than the model's


SIZE = dict(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3)


def vit(chans: int = 3, **options) -> ViT:
    return ViT(**SIZE, in_chans=chans, **options).eval()


def advised(message: str, **names) -> torch.Tensor:
    """The value of the expression on images that a message advises."""
    found = re.search(r"(torchvision\.[\w.]+\(images\)|images?(\[[^]]*\])?(\.\w+\([^)]*\))?)(,|$)", message)
    return eval(found[1], dict(torchvision=torchvision, **names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("given, chans", [(1, 3), (2, 3), (4, 3), (2, 1), (3, 1)])
def test_the_advice_makes_images_of_the_models_channels(given, chans, dtype):
    images, model = torch.randint(0, 256, (2, given, 16, 16)).to(dtype), vit(chans)
    with pytest.raises(ValueError, match=rf"got \(2, {given}, 16, 16\); images have {given} channel") as caught:
        model(images)
    message = str(caught.value).partition("; ")[2]
    assert f"or make the model with in_chans={given}" in message
    made = advised(message.partition(": ")[2], images=images)
    assert model(made).shape == (2, 3)
    wanted = images[:, :1] if given < 3 else images[:, :3]
    if chans == 1 and given == 3:
        wanted = torchvision.transforms.functional.rgb_to_grayscale(images)
    assert torch.equal(made, wanted.expand(2, chans, 16, 16))
    image = images[0]
    with pytest.raises(ValueError, match=f"images must have {chans} channels in patches") as caught:
        model([image])
    if (given, chans) != (3, 1):
        assert torch.equal(advised(str(caught.value).partition("; ")[2], image=image), made[0])


def test_other_shapes_have_other_advice():
    model, image = vit(), torch.randn(3, 16, 16)
    for images, message in (
        (image, r"got \(3, 16, 16\); one image is a batch as images\[None\]"),
        (image[0], "a batch has these four axes"),
        (image.permute(1, 2, 0)[None], r"channels come before height and width: images.permute\(0, 3, 1, 2\)"),
        (torch.randn(1, 3, 24, 16), "set_input_size or dynamic_img_size=True takes other sizes"),
        (
            torch.randn(1, 7, 16, 16),
            "images have 7 channels, the model takes 3: choose 3 of them, or make the model",
        ),
        (np.zeros((16, 16, 4), np.uint8), r"vitfast\.transform\(model\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model(images)


def test_commands_refuse_weights_that_take_no_rgb(tmp_path):
    vit(1, mean=0.5, std=0.5).save_pretrained(tmp_path / "w")
    message = "takes images of 1 channel, and data is read as RGB: give weights of 3 channels"
    with pytest.raises(InputError, match=message):
        predict(ViT.from_pretrained(tmp_path / "w"), ["x.png"])
    with pytest.raises(InputError, match=f"w {message}"):
        Trainer(digits(task="finetune", weights=str(tmp_path / "w"), output=str(tmp_path / "run")))


def test_a_pickled_model_whose_config_holds_every_argument_runs():
    """As whole models that were saved before do; attributes decide over what is held twice."""
    model = ViT(img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    model._config = dict(model.config, mean=(0.1,) * 3)
    again, x = pickle.loads(pickle.dumps(model)), torch.rand(2, 3, 32, 32)
    assert again.config == model.config and again.config["mean"] == (0.5,) * 3
    assert torch.equal(again(x), model(x))
