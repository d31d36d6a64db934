"""vitfast.batch_invariant: a ViT gives an image the same bits alone, in any batch, in any pack of sizes.

On plain PyTorch, on interpreted kernels and on a GPU; every kind of model, in fp32, fp16 and bf16.
"""

import pytest
import torch
from checks import randomize
from even_dot import even_dot
from same_bits import differing, differing_in_packs

import vitfast
from vitfast import ViT, ops
from vitfast.kernels.launch import INTERPRETED, launches_made

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5, mean=0.4, std=0.3)
AVERAGE = dict(class_token=False, global_pool="avg")
KINDS = {  # the families of presets.py and what else changes a path
    "ViT": {},
    "DINOv3": dict(rope="dinov3", pos_embed="none", reg_tokens=4, init_values=0.5, dynamic_img_size=True),
    "EVA-02": dict(rope="cat", ref_feat_shape=(16, 16), swiglu_mlp=True, scale_mlp_norm=True, global_pool="avg"),
    "CLIP": dict(pre_norm=True, act_layer="quick_gelu"),
    "SigLIP": dict(class_token=False, global_pool="map", act_layer="gelu_tanh"),
    "hybrid": dict(patch_size=4, depth=1, backbone=dict(layers=[1], width=0.5)),
    "average": AVERAGE,
    "representation": dict(representation_size=24, reg_tokens=1),
    "norms everywhere": dict(qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True, residual_in_fp32=True),
    "positions in layers": dict(pos_embed="factorized", pos_embed_at="layers"),
    "relative": dict(pos_embed="relative", **AVERAGE),
    "no pooling": dict(global_pool="", pos_embed="sincos2d"),
}
OF_ONE_SIZE = ("hybrid", "relative")
SIZES = [(16, 16), (24, 8), (16, 16), (40, 32), (16, 16), (8, 8)]
PACKS = [[3, 0, 1, 2, 4], [0, 3], [5, 4, 3, 2, 1, 0], [1]]
FAST = [("ViT", torch.float32), ("EVA-02", torch.float16), ("SigLIP", torch.bfloat16), ("hybrid", torch.float32)]
EVERY = [(kind, dtype) for kind in KINDS for dtype in DTYPES]


def model_of(kind: str, dtype: torch.dtype, device: str = "cpu", **options) -> ViT:
    torch.manual_seed(2)
    return randomize(ViT(**{**SMALL, **KINDS[kind], **options}), std=0.2).eval().to(device, dtype)


def images_of(dtype: torch.dtype, sizes, raw: bool, device: str = "cpu") -> list:
    if raw:
        return [torch.randint(0, 256, (3, *size), dtype=torch.uint8, device=device) for size in sizes]
    return [torch.randn(3, *size, device=device).to(dtype) for size in sizes]


def check(kind, dtype, batches, packs=PACKS, sizes=SIZES, device="cpu", raws=(False, True), **options) -> int:
    """How many outputs differ, of batches and of packs, of floats and uint8."""
    model, count = model_of(kind, dtype, device, **options), 0
    for raw in raws:
        batch = torch.stack(images_of(dtype, [sizes[0]] * 6, raw, device))
        with torch.inference_mode():  # the mode changes no number by more than a few roundings
            with vitfast.batch_invariant(False):
                before = model(batch)
            assert ((model(batch) - before).norm() / before.norm()).item() < 100 * torch.finfo(dtype).eps
        count += differing(model, batch, batches) + differing(model.forward_features, batch, batches[:1])
        if kind not in OF_ONE_SIZE and KINDS[kind].get("global_pool") != "":
            model.dynamic_img_size = True  # each size alone as a batch too
            count += differing_in_packs(model, images_of(dtype, sizes, raw, device), packs)
    return count


@pytest.fixture
def invariant():
    with vitfast.batch_invariant(True):
        yield


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "dtype"), [*FAST, *(pytest.param(*c, marks=pytest.mark.slow) for c in EVERY if c not in FAST)]
)
def test_on_plain_pytorch(invariant, kind, dtype):
    assert check(kind, dtype, batches=(2, 7)) == 0


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), EVERY)
def test_on_plain_pytorch_in_batches_of_2_to_64(invariant, kind, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert check(kind, dtype, (2, 3, 4, 5, 8, 17, 64), sizes=[(48, 32), *SIZES[1:]], img_size=(48, 32)) == 0
    finally:
        torch.set_num_threads(before)


on_kernels = pytest.mark.skipif(not INTERPRETED, reason="the interpreter's; the GPU has a test of its own")


@pytest.mark.slow
@on_kernels
@pytest.mark.parametrize(
    ("kind", "dtype"), [FAST[0], *(pytest.param(*c, marks=pytest.mark.long) for c in EVERY if c != FAST[0])]
)
def test_on_interpreted_kernels(invariant, kind, dtype):
    few = (kind, dtype) == FAST[0]
    before = launches_made()
    with ops.use_kernels("on"), even_dot():
        options = dict(depth=1, packs=PACKS[:1], raws=(True,)) if few else {}
        assert check(kind, dtype, (2,) if few else (2, 3, 5), **options) == 0
    assert launches_made() > before


@on_kernels
@pytest.mark.long
@pytest.mark.parametrize("kind", ["ViT", "EVA-02"])
def test_on_interpreted_kernels_around_the_edges_of_tiles(invariant, kind):
    """Samples of 64, 65, 129 and more tokens, which are more than a block of keys."""
    sizes = [(64, 64), (16, 8), (64, 128), (104, 40), (8, 72), (64, 72)]
    with ops.use_kernels("on"), even_dot():
        assert check(kind, torch.float16, (2, 3), sizes=sizes, img_size=64, raws=(False,)) == 0


@on_kernels
@pytest.mark.slow
def test_without_the_mode_a_pack_of_kernels_has_other_bits():
    with ops.use_kernels("on"), even_dot():
        assert check("ViT", torch.float32, (2,), raws=(False,)) > 0


@pytest.mark.parametrize("planted", ["a sum over the batch", "a product of all rows"])
def test_a_planted_dependence_is_found(invariant, monkeypatch, planted):
    model = model_of("ViT", torch.float32)
    if planted == "a sum over the batch":
        model.norm.register_forward_hook(lambda module, args, x: x + 1e-6 * x.mean())
    else:
        model.head.register_forward_hook(lambda module, args, x: x * (1 + 1e-6 * len(x)))
    assert differing(model, torch.randn(6, 3, 16, 16), (2,)) > 0


def test_autocast_and_tokens_given_to_the_head(invariant):
    model, images = model_of("ViT", torch.float32), torch.randn(5, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert differing(model, images, (2, 5)) == 0
        packed = [images[0], torch.randn(3, 24, 8), images[1]]
        assert differing_in_packs(model, [images[0], images[1]], [[0, 1]]) == 0
        assert torch.equal(model(packed)[2], model(images[1:2])[0])
    tokens = model.forward_features(images)
    assert torch.equal(model.forward_head(tokens), model(images)) and model(images[:0]).shape == (0, 5)
    assert torch.equal(model.forward_head(list(tokens)), model(images))
    assert differing(lambda x: model.forward_intermediates(x, intermediates_only=True), images, (2, 5)) == 0
    assert differing(lambda x: model.attention_maps(x), images, (2, 5)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), EVERY)
def test_on_a_gpu(invariant, kind, dtype, monkeypatch):
    """At a real width, in batches up to 64 and packs of sizes."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the mode takes other convolutions, as rough
    wide = dict(embed_dim=384, num_heads=6, img_size=96, patch_size=16)
    wide |= dict(patch_size=16) if kind == "hybrid" else {}
    sizes = [(96, 96), (160, 64), (224, 224), (384, 128), (32, 48), (96, 96)]
    with ops.use_kernels("on"):
        assert check(kind, dtype, (2, 3, 17, 64), sizes=sizes, device="cuda", **wide) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["B/16", "DINOv3-S/16", "SigLIP2-B/16", "CLIP-B/16"])
def test_presets_on_a_gpu(invariant, preset):
    with torch.device("cuda"):
        model = randomize(ViT.from_preset(preset), std=0.05).eval().bfloat16()
    images = torch.randint(0, 256, (6, 3, *model.patch_embed.img_size), dtype=torch.uint8, device="cuda")
    with ops.use_kernels("on"):
        assert differing(model, images, (2, 3, 64)) == 0
