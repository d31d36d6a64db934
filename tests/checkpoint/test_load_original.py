"""DINOv3 as Meta writes it, CLIP as OpenAI and open_clip do: timm's conversion and open_clip judge."""

import logging
import re

import open_clip
import pytest
import timm
import torch
import transformers
from checkpoints import HEADS, IMAGENET, agree, images, pick, randomised
from timm.models import eva

from vitfast import InputError, ViT

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=HEADS, num_classes=0)
DINOV3 = {
    "vit_small_patch16_dinov3_qkvb": {},
    "vit_small_plus_patch16_dinov3_qkvb": {},
    "vit_7b_patch16_dinov3": dict(qkv_bias=False),  # without any bias of qkv
}


def of_timm(name):
    return randomised(timm.create_model(name, **SMALL, global_pool="token"))


def meta(truth, base=100.0):
    """The tensors of timm's DINOv3 as Meta's code names them, with all that stands beside them there."""
    state = {}
    for name, tensor in truth.state_dict().items():
        name = (
            name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma").replace("reg_token", "storage_tokens")
        )
        for ours, theirs in (("fc1_g", "w1"), ("fc1_x", "w2"), ("fc2", "w3")):
            name = name.replace(ours, theirs) if "blocks.0.mlp.fc1_g.weight" in truth.state_dict() else name
        if name.endswith("attn.q_bias"):
            stem = name.removesuffix("q_bias") + "qkv."
            whole = torch.cat([tensor, torch.randn_like(tensor), truth.state_dict()[stem[:-4] + "v_bias"]])
            mask = torch.ones_like(whole)
            mask[len(tensor) : 2 * len(tensor)] = 0  # what stands there for k is not read
            state |= {f"{stem}bias": whole, f"{stem}bias_mask": mask}
        elif not name.endswith("v_bias"):
            state[name] = tensor
    exponent = torch.arange(0, 16, 4) / 16
    state |= {"mask_token": torch.randn(1, 48), "rope_embed.periods": (base**exponent).bfloat16()}
    return state | {f"local_cls_norm.{name}": torch.randn(48) for name in ("weight", "bias")}


@pytest.mark.parametrize("name", DINOV3)
def test_metas_dinov3(tmp_path, name, caplog):
    truth = of_timm(name)
    state = meta(truth)
    again = timm.create_model(name, **SMALL, global_pool="token").eval()
    again.load_state_dict(eva.checkpoint_filter_fn(dict(state), again), strict=True)
    torch.save({"teacher": 0, "model": state}, tmp_path / "dinov3.pth")
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path / "dinov3.pth")  # the periods tell the heads
    for size in ((32, 32), (16, 48)):
        agree(model, again, images(*size))
    assert re.search(
        r"rope_embed.periods are rounded, by up to [\d.]+e-0[34]: the ViT takes the exact ones", caplog.text
    )
    assert pick(model.config, *IMAGENET) == IMAGENET and model.config["rope_temperature"] == 100
    plain = {key: value for key, value in state.items() if not key.startswith("rope_embed")}
    torch.save(plain, tmp_path / "without.pth")
    agree(ViT.from_pretrained(tmp_path / "without.pth", num_heads=HEADS), again)


def test_periods_of_another_base(tmp_path):
    truth = randomised(timm.create_model("vit_small_patch16_dinov3_qkvb", **SMALL, rope_temperature=50))
    torch.save(meta(truth, base=50.0), tmp_path / "w.pth")
    agree(ViT.from_pretrained(tmp_path / "w.pth", global_pool="avg"), truth)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"rope_embed.periods": torch.tensor([1.0, 5.0, 6.0, 7.0])}, "no powers of one base"),
        ({"rope_embed.periods": torch.zeros(2, 2)}, "periods of shape"),
        ({"cls_norm.weight": torch.ones(48), "cls_norm.bias": torch.ones(48)}, "another last norm of its class token"),
        ({"blocks.0.mlp.w3.weight": torch.ones(48, 48)}, "two names of the same tensor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_files_of_metas_that_are_refused(tmp_path, change, says):
    torch.save(meta(of_timm("vit_small_patch16_dinov3_qkvb")) | change, tmp_path / "w.pth")
    with pytest.raises(InputError, match=f"w.pth: .*{says}"):
        ViT.from_pretrained(tmp_path / "w.pth")


def test_a_norm_of_the_class_token_that_is_the_same(tmp_path):
    truth = of_timm("vit_small_patch16_dinov3_qkvb")
    state = meta(truth)
    torch.save(state | {f"cls_{key}": state[key] for key in ("norm.weight", "norm.bias")}, tmp_path / "w.pth")
    agree(ViT.from_pretrained(tmp_path / "w.pth"), truth)


# ---- CLIP


def open_clips(act="quick_gelu"):
    """open_clip's model of images and texts, OpenAI's code with OpenAI's names, random."""
    vision = dict(layers=2, width=48, head_width=16, patch_size=8, image_size=32)
    text = dict(context_length=9, vocab_size=99, width=24, heads=2, layers=1)
    return randomised(open_clip.CLIP(40, vision, text, quick_gelu=act == "quick_gelu"))


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("layout", ["whole", "half precision", "wrapped", "tower"])
def test_openais_clip(tmp_path, act, layout, caplog):
    truth, x = open_clips(act), images()
    state = truth.state_dict() | {"input_resolution": torch.tensor(32), "vocab_size": torch.tensor(99)}
    if layout == "half precision":  # OpenAI's files hold it
        state = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
        truth.load_state_dict({key: value for key, value in state.items() if value.dim() or key == "logit_scale"})
    if layout == "tower":
        state = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    elif layout == "wrapped":  # of open_clip's training
        state = {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in state.items()}}
    torch.save(state, tmp_path / "clip.pth")
    with caplog.at_level(logging.WARNING, "vitfast"):
        chosen = {} if act == "quick_gelu" else dict(act_layer=act)
        model = ViT.from_pretrained(tmp_path / "clip.pth", num_heads=HEADS, **chosen)
    agree(model, truth.encode_image, x)
    said = "nothing here says act_layer='quick_gelu', global_pool='token', norm_eps=1e-05: assumed; pass those"
    assert (said in caplog.text) == (act == "quick_gelu")
    assert ("left out" in caplog.text and "text_projection" not in model.state_dict()) == (layout != "tower")
    features = ViT.from_pretrained(tmp_path / "clip.pth", num_heads=HEADS, num_classes=0, **chosen)
    truth.visual.proj = None
    agree(features, truth.encode_image, x)
    assert model.mean == tuple(transformers.CLIPImageProcessor().image_mean)
    assert model.std == tuple(transformers.CLIPImageProcessor().image_std)


def test_torchscript_is_not_run(tmp_path):
    class Evil(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.jit.script(Evil()).save(str(tmp_path / "ViT-B-32.pt"))
    with pytest.raises(InputError, match="ViT-B-32.pt: a TorchScript archive, .*convert it: torch.save.torch.jit.load"):
        ViT.from_pretrained(tmp_path / "ViT-B-32.pt")
