"""The presets: parameters as the papers and timm's models have them, on the meta device."""

import pytest
import timm
import torch
from timm.models._hub import save_for_hf
from timm_names import small

from vitfast import InputError, ViT
from vitfast.model.presets import PRESETS
from vitfast.train.recipes import resolve
from vitfast.train.setup import new_model, set_up

# timm's name, and how many biases of keys are ours alone: Meta masks them, EVA has none, ours are there to be zero.
TIMM = {
    "DINOv3-S/16": ("vit_small_patch16_dinov3_qkvb", 12 * 384),
    "DINOv3-S+/16": ("vit_small_plus_patch16_dinov3_qkvb", 12 * 384),
    "DINOv3-B/16": ("vit_base_patch16_dinov3_qkvb", 12 * 768),
    "DINOv3-L/16": ("vit_large_patch16_dinov3_qkvb", 24 * 1024),
    "DINOv3-H+/16": ("vit_huge_plus_patch16_dinov3_qkvb", 32 * 1280),
    "DINOv3-7B/16": ("vit_7b_patch16_dinov3", 0),
    "SigLIP2-B/16": ("vit_base_patch16_siglip_224", 0),
    "SigLIP2-L/16": ("vit_large_patch16_siglip_256", 0),
    "SigLIP2-So400m/14": ("vit_so400m_patch14_siglip_224", 0),
    "SigLIP2-So400m/16": ("vit_so400m_patch16_siglip_256", 0),
    "CLIP-B/32": ("vit_base_patch32_clip_quickgelu_224", 0),
    "CLIP-B/16": ("vit_base_patch16_clip_quickgelu_224", 0),
    "CLIP-L/14": ("vit_large_patch14_clip_quickgelu_224", 0),
    "EVA02-Ti/14": ("eva02_tiny_patch14_224", 12 * 192),
    "EVA02-S/14": ("eva02_small_patch14_224", 12 * 384),
    "EVA02-B/14": ("eva02_base_patch14_224", 12 * 768),
    "EVA02-L/14": ("eva02_large_patch14_224", 24 * 1024),
}
PAPERS = {"Ti/16": 5_717_416, "S/16": 22_050_664, "S/32": 22_878_952, "B-half/32": 22_878_952, "B/16": 86_567_656}
PAPERS |= {"S/8": 22_055_272}  # timm's vit_small_patch8_224, 21,670,272 without a head
PAPERS |= {"B/32": 88_224_232, "L/16": 304_326_632, "L/32": 306_535_400, "H/14": 632_045_800}


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", TIMM)
def test_parameters_are_timms(name):
    theirs, key_biases = TIMM[name]
    size = 256 if theirs.endswith("_256") else 224
    with torch.device("meta"):
        ours = ViT.from_preset(name, num_classes=0, img_size=size)
        truth = timm.create_model(theirs, num_classes=0)
    assert parameters(ours) - key_biases == parameters(truth)
    assert ours.num_prefix_tokens == truth.num_prefix_tokens and len(ours.blocks) == len(truth.blocks)


def test_presets_of_the_papers():
    others = {name for name in PRESETS if name.startswith("R")} | {"Nano/8"}  # hybrids: test_hybrid.py
    assert {*PRESETS} - others == {*PAPERS, *TIMM}
    with torch.device("meta"):
        for name, count in PAPERS.items():
            assert parameters(ViT.from_preset(name)) == count, name
        whole, half = ViT.from_preset("B/32"), ViT.from_preset("B-half/32")  # hidden dimensions halved
    for model, width in ((whole, 768), (half, 384)):
        block = model.blocks[0]
        assert (model.embed_dim, block.mlp.fc1.out_features, len(model.blocks)) == (width, 4 * width, 12)
        assert (block.attn.num_heads, model.patch_embed.num_patches) == (12, 49)
    assert ViT.from_preset("Ti/16", num_classes=10, img_size=32, depth=1).head.out_features == 10


@pytest.mark.parametrize("name", ["DINOv3-S+/16", "SigLIP2-B/16", "CLIP-B/32", "EVA02-Ti/14", "EVA02-B/14"])
def test_a_preset_is_timms_function(name, tmp_path):
    """timm's random weights of that name, read from its folder: the arguments are the preset's."""
    save_for_hf(small(TIMM[name][0]), tmp_path, safe_serialization=True)
    found = ViT.from_pretrained(tmp_path).config
    with torch.device("meta"):
        wanted = ViT.from_preset(name, depth=2, embed_dim=found["embed_dim"], num_heads=found["num_heads"]).config
    same = "swiglu_mlp scale_mlp_norm qk_norm norm_layer pre_norm norm_eps rope ref_feat_shape class_token reg_tokens"
    assert {key: found[key] for key in same.split()} == {key: wanted[key] for key in same.split()}


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", TIMM)
def test_training_keeps_what_a_preset_says(name):
    """A recipe's positions, pooling and activation are for the paper's models."""
    with torch.device("meta"):
        found = new_model(resolve("pretrain", dict(model=name)), 10).config
    assert {key: found[key] for key in PRESETS[name]} == PRESETS[name]


def test_a_run_says_what_of_its_recipe_is_not_taken(caplog, tmp_path):
    config = resolve("pretrain", dict(model="CLIP-B/32", data="nowhere"))
    with pytest.raises(InputError, match="nowhere"):
        set_up(config, torch.device("cpu"))
    assert "CLIP-B/32 has its own" in caplog.text and "act_layer='quick_gelu'" in caplog.text
