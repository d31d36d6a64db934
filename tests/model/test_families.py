"""DINOv3, EVA-02, SigLIP, CLIP and other families of the ViT, equal to timm's, and every gradient."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from checks import assert_close, gradients, randomize
from timm.layers import SwiGLUPacked
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitfast import InputError, ViT
from vitfast.ops import use_kernels
from vitfast.positions import rope_tables

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)
TOL = dict(atol=1e-10, rtol=1e-10)
ROTARY_TOL = dict(atol=3e-5, rtol=3e-5)  # timm makes the tables of rotary positions in fp32
NORM5 = partial(nn.LayerNorm, eps=1e-5)
ROTARY = dict(use_rot_pos_emb=True)
# timm's class, its arguments, ours
FAMILIES = {
    "DINOv3": (
        Eva,
        dict(rope_type="dinov3", rope_temperature=100, rope_rotate_half=True, use_abs_pos_emb=False, num_reg_tokens=4)
        | dict(dynamic_img_size=True, init_values=0.5, use_fc_norm=False, norm_layer=NORM5, qkv_bias=False, **ROTARY),
        dict(rope="dinov3", pos_embed="none", reg_tokens=4, dynamic_img_size=True, init_values=0.5, fc_norm=False)
        | dict(norm_eps=1e-5, qkv_bias=False, global_pool="avg"),
    ),
    "DINOv3 H+": (
        Eva,
        dict(rope_type="dinov3", rope_temperature=50, rope_rotate_half=True, use_abs_pos_emb=False, swiglu_mlp=True)
        | dict(swiglu_align_to=8, mlp_ratio=3.2, global_pool="token", **ROTARY),
        dict(rope="dinov3", rope_temperature=50, pos_embed="none", swiglu_mlp=True, mlp_ratio=160 / 48),
    ),
    "EVA-02": (
        Eva,
        dict(swiglu_mlp=True, scale_mlp=True, qkv_fused=False, mlp_ratio=4 * 2 / 3, ref_feat_shape=(3, 5), **ROTARY),
        dict(rope="cat", ref_feat_shape=(3, 5), swiglu_mlp=True, scale_mlp_norm=True, mlp_ratio=4 * 2 / 3)
        | dict(global_pool="avg"),
    ),
    "EVA-02 without a reference": (Eva, dict(qkv_bias=True, **ROTARY), dict(rope="cat", global_pool="avg")),
    "SigLIP": (VisionTransformer, *[dict(class_token=False, global_pool="map", act_layer="gelu_tanh")] * 2),
    "CLIP": (
        VisionTransformer,
        dict(pre_norm=True, act_layer="quick_gelu", norm_layer=NORM5),
        dict(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5),
    ),
    "norms everywhere": (VisionTransformer, *[dict(qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True)] * 2),
    "DINOv2 giant": (
        VisionTransformer,
        dict(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, mlp_ratio=4.0, init_values=0.5),
        dict(swiglu_mlp=True, mlp_ratio=2.0, init_values=0.5),
    ),
    "SiLU": (VisionTransformer, *[dict(act_layer="silu")] * 2),
}


def ours_from(eva: dict) -> dict:
    """Tensors of timm's Eva -> under the names of its VisionTransformer, which are ours."""
    made = {}
    for name, tensor in eva.items():
        name = name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")
        stem, _, last = name.rpartition(".")
        if name.endswith("attn.q_bias"):
            made[f"{stem}.qkv.bias"] = torch.cat([tensor, torch.zeros_like(tensor), eva[f"{stem}.v_bias"]])
        elif stem.endswith("attn.q_proj"):
            layers = [eva.get(f"{stem[:-6]}{i}_proj.{last}") for i in "qkv"]
            made[f"{stem[:-6]}qkv.{last}"] = torch.cat([torch.zeros_like(tensor) if t is None else t for t in layers])
        elif stem.endswith("fc1_g"):
            made[f"{stem[:-2]}.{last}"] = torch.cat([tensor, eva[f"{stem[:-1]}x.{last}"]])
        elif not stem.endswith(("k_proj", "v_proj", "fc1_x")) and last not in ("v_bias", "k_bias"):
            made[name] = tensor
    return made


def pair(family: str, **more):
    """timm's model and ours, of the same random weights, in float64."""
    cls, theirs, ours = FAMILIES[family]
    original = randomize(cls(**{**SIZES, **theirs}), std=0.3).double()
    model = ViT(**{**SIZES, **ours, **more}).double()
    state = original.state_dict()
    model.load_state_dict(ours_from(state) if cls is Eva else state)
    return original.eval(), model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_timms(family):
    original, model = pair(family)
    tolerance = ROTARY_TOL if type(original) is Eva else TOL
    images, upstream = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    logits, theirs = model(images), original(images)
    assert_close(logits, theirs, **tolerance)
    ours = gradients(model, logits, upstream)
    theirs = gradients(original, theirs, upstream)
    if type(original) is Eva:
        whole = ours_from({name: theirs.get(name, torch.zeros_like(p)) for name, p in original.named_parameters()})
        for name in [name for name in whole if name.endswith("qkv.bias")]:
            third = len(whole[name]) // 3  # timm has no bias of k
            whole[name][third : 2 * third] = ours[name][third : 2 * third]
        theirs = whole
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name], **tolerance, name=name)


@pytest.mark.parametrize("family", ["DINOv3", "EVA-02"])
@pytest.mark.parametrize("size", [(48, 24), (32, 64)])
def test_rotary_positions_at_other_sizes_are_timms(family, size):
    original, model = pair(family)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    if family == "EVA-02":
        original.set_input_size(size)
        model.set_input_size(size)
    assert_close(model(images), original(images), **ROTARY_TOL)


@pytest.mark.parametrize("kind", ["dinov3", "cat"])
def test_rotary_positions_of_float64_tokens_are_exact(kind):
    """Two rows and three columns of patches, a head of 8 columns: two frequencies for either."""
    images, x = torch.empty(1, 3, 16, 24), torch.empty(0, dtype=torch.float64)
    tables = rope_tables(kind, images, x, (8, 8), 8, 100.0, None)
    for patch, column in product(range(6), range(4)):
        place, count = ((patch // 3, 2), (patch % 3, 3))[column // 2]
        frequency = 100.0 ** -(column % 2 / 2)
        angle = (2 * math.pi * (2 * (place + 0.5) / count - 1) if kind == "dinov3" else place) * frequency
        for table, exact in zip(tables, (math.cos(angle), math.sin(angle))):
            assert table[patch, column].item() == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize("family", ["DINOv3", "EVA-02", "CLIP", "SigLIP", "norms everywhere", "DINOv2 giant"])
def test_kernels_compute_the_same(family):
    """Interpreted kernels, and compiled code, against float64; in training with checkpointed blocks too."""
    _, model = pair(family)
    images, upstream = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    exact = gradients(model, model(images), upstream)
    model, images, upstream = model.float(), images.float(), upstream.float()
    model.set_grad_checkpointing()
    with use_kernels("on"):
        found = gradients(model, model(images), upstream)
    for name, gradient in found.items():
        size = exact[name].abs().max().item() + 1
        assert_close(gradient.double(), exact[name], atol=2e-4 * size, name=name)


@pytest.mark.parametrize("family", ["DINOv3", "EVA-02", "SigLIP", "norms everywhere"])
def test_compile_export_fx_and_what_is_seen_on_the_way(family):
    _, model = pair(family)
    model = model.float()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(images), expected, atol=1e-5)
    assert_close(torch.fx.symbolic_trace(model)(images), expected, atol=1e-5)
    batch = {"images": {0: torch.export.Dim("batch")}}
    program = torch.export.export(model, (images,), dynamic_shapes=batch)
    assert_close(program.module()(images[:1].expand(5, -1, -1, -1)), expected[:1].expand(5, -1), atol=1e-5)
    rows = model.attention_maps(images)
    assert len(rows) == 2
    for matrix in rows:
        assert_close(matrix.sum(-1), torch.ones(matrix.shape[:-1]), atol=1e-5)


@pytest.mark.parametrize("family", ["DINOv3", "norms everywhere", "CLIP"])
def test_attention_maps_are_those_of_the_layers(family):
    """Weights times values, projected, is the attention of the layer."""
    _, model = pair(family)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    x, layers = model._embed(images)
    block = model.blocks[0]
    h, attn = block.branch_input(x, block.norm1), block.attn
    o = model.attention_maps(images, [0])[0] @ attn.heads(h)[2].transpose(1, 2)
    given = {} if layers[0][2] is None else dict(options=layers[0][2])
    assert_close(attn.proj(o.transpose(1, 2).flatten(2)), attn(h, **given), **TOL)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(rope_temperature=100.0), "rope_temperature is for a rope"),
        (dict(ref_feat_shape=(16, 16)), "ref_feat_shape is for a rope"),
        (dict(rope="dinov3", ref_feat_shape=(16, 16)), "ref_feat_shape is for rope='cat'"),
        (dict(rope="cat", embed_dim=18), "needs a head size by 4 divisible, got 6"),
        (dict(rope="cat", pos_embed="relative"), "pos_embed='relative' has no rope beside it"),
        (dict(swiglu_mlp=True, act_layer="quick_gelu"), "swiglu_mlp=True has the activation 'silu'"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        ViT(**{**SIZES, **arguments})


def test_a_map_head_can_be_replaced_and_not_asked_for_later():
    _, model = pair("SigLIP")
    assert model.reset_classifier(3) is None and model.float()(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    with pytest.raises(InputError, match="cannot pool by 'map'"):
        ViT(**SIZES).reset_classifier(3, "map")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_read_again(family, tmp_path):
    _, model = pair(family)
    model.float().save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path).eval()
    assert again.config == model.config
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("class_token, registers", [(True, 0), (False, 4)])
def test_a_map_head_reads_the_patches_alone(class_token, registers):
    """As timm's, whatever stands before them."""
    sizes = {**SIZES, "class_token": class_token, "reg_tokens": registers, "global_pool": "map"}
    original, model = randomize(VisionTransformer(**sizes), std=0.3).double().eval(), ViT(**sizes).double().eval()
    model.load_state_dict(original.state_dict())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert_close(model(images), original(images), **TOL)
