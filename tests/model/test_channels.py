"""Images of other channels than the model's: the error says what helps, and what it says works."""

import re

import numpy as np
import pytest
import torch
from runs import digits

from vitfast import InputError, ViT
from vitfast.eval.predict import predict
from vitfast.train.trainer import Trainer

SIZE = dict(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3)


def vit(chans: int = 3, **options) -> ViT:
    return ViT(**SIZE, in_chans=chans, **options).eval()


def advised(message: str, **names) -> torch.Tensor:
    """The value of the expression on images that a message advises."""
    return eval(re.search(r"(images?\[[^]]*\](\.\w+\([^)]*\))?)(,|$)", message)[1], names)


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
    wanted = images[:, :1] if given < 3 else images[:, :chans]
    assert torch.equal(made, wanted.expand(2, chans, 16, 16))
    image = images[0]
    with pytest.raises(ValueError, match=f"images must have {chans} channels in patches") as caught:
        model([image])
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
            r"images have 7 channels, the model takes 3: .*images\[:, :3\], or make the model",
        ),
        (np.zeros((16, 16, 4), np.uint8), r"vitfast\.transform\(model\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model(images)


def test_weights_of_three_channels_say_how_to_take_others(tmp_path):
    vit().save_pretrained(tmp_path)
    for chans, message in (
        (1, r"repeat the first one with images\[:, :1\].expand\(-1, 3, -1, -1\)"),
        (4, r"images\[:, :3\]"),
    ):
        with pytest.raises(InputError, match=f"in_chans=3 channels, not {chans}; leave in_chans out, .*{message}"):
            ViT.from_pretrained(tmp_path, in_chans=chans)


def test_commands_refuse_weights_that_take_no_rgb(tmp_path):
    vit(1, mean=0.5, std=0.5).save_pretrained(tmp_path / "w")
    message = "takes images of 1 channel, and data is read as RGB: give weights of 3 channels"
    with pytest.raises(InputError, match=message):
        predict(ViT.from_pretrained(tmp_path / "w"), ["x.png"])
    with pytest.raises(InputError, match=f"w {message}"):
        Trainer(digits(task="finetune", weights=str(tmp_path / "w"), output=str(tmp_path / "run")))
