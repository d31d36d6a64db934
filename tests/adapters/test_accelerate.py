"""accelerate, one contract for all families: numbers, parameters, reports, copies, restore."""

import copy
import pickle
from functools import partial

import pytest
import torch
from adapter_models import (
    IMAGES,
    MAKERS,
    NAFLEX,
    NAMED,
    PIXTRAL,
    assert_same,
    calls,
    causal_text,
    claimed,
    classes,
    dtypes,
    family,
    hf_vit,
    left,
    outputs,
    pair,
    report,
    run,
    said,
    snapshot,
    swin,
    timm_vit,
    tv_vit,
)
from checks import assert_close, randomize
from torch import nn

import vitfast
from vitfast import ops
from vitfast.adapters import fallback_log
from vitfast.adapters.families import Family, hugging_face_model, naflexvit, timm_model, torchvision_model
from vitfast.kernels.launch import launches_made

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
GRIDS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])
PADDED = dict(
    x=torch.randn(3, 6, 192, generator=torch.manual_seed(0)),
    patch_coord=GRIDS.expand(3, 6, 2),
    patch_valid=torch.arange(6) < torch.tensor([5, 6, 2])[:, None],
)
TOKENS = torch.randn(2, 5, 32, generator=torch.manual_seed(1))
ENCODED, CAUSAL = dict(src=TOKENS), torch.full((5, 5), float("-inf")).triu(1)
ACTIVE, NOT_CALLED = "active in training", "in its last call: the call has is_causal"


def hybrid() -> nn.Module:
    from timm.layers import HybridEmbed

    stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
    stem.num_features = 8
    return timm_vit(
        embed_layer=lambda **options: HybridEmbed(stem, feature_size=(4, 4), **{**options, "patch_size": 2})
    )


def conv_stem() -> nn.Module:
    from torchvision.models.vision_transformer import ConvStemConfig

    return tv_vit(conv_stem_configs=[ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(16, 3, 2)])


def encoder_layer(**options) -> nn.Module:
    given = dict(dropout=0.0, activation="gelu", norm_first=True, batch_first=True)
    return nn.TransformerEncoderLayer(32, 2, 64, **given | options)


def open_clip_block() -> nn.Module:
    return pytest.importorskip("open_clip.transformer").ResidualAttentionBlock(32, 2, 2.0, 0.5)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.neck = timm_vit(num_classes=0, global_pool=""), nn.Conv2d(32, 4, 1)

    def forward(self, x):
        return self.neck(self.backbone.forward_intermediates(x, 1, norm=True, intermediates_only=True)[0])


EVA = partial(timm_model, "eva:Eva", dynamic_img_size=False)
HF = partial(hugging_face_model, "ViTForImageClassification", num_labels=5)
NO_BIASES, DYNAMIC = dict(qkv_bias=False, proj_bias=False), dict(dynamic_img_size=True, dynamic_img_pad=True)
TV, DINOV2 = torchvision_model, partial(hugging_face_model, "Dinov2Model", mlp_ratio=2)
IN_ATTENTION = (f"dropout is {ACTIVE}",) * 2
# What no family has: the maker, words of what is left (of dropout: in training alone), the input where it is another.
VARIANTS = {
    "timm pooled, norm after it": (timm_model(global_pool="avgmax", class_token=False, no_embed_class=True), ()),
    "timm bare": (timm_model(global_pool="", final_norm=False, **NO_BIASES, pos_embed="none"), ()),
    "timm dynamic size, padded": (timm_model(**DYNAMIC), (), dict(x=torch.randn(3, 3, 21, 30))),
    "timm tanh GELU": (timm_model(act_layer="gelu_tanh", reg_tokens=1), ()),
    "timm ReLU": (timm_model(act_layer="relu"), ("ReLU",) * 2),
    "timm q and k norm, drop path": (timm_model(qk_norm=True, init_values=0.5, drop_path_rate=0.5), ()),
    "timm norms inside": (timm_model(scale_attn_norm=True, scale_mlp_norm=True), ()),
    "timm drop path, patch dropout": (timm_model(drop_path_rate=0.5, patch_drop_rate=0.3, init_values=0.5), ()),
    "timm dropout": (timm_model(proj_drop_rate=0.2, pos_drop_rate=0.1, drop_rate=0.1), (ACTIVE,) * 4),
    "timm attention dropout": (timm_model(attn_drop_rate=0.2), (ACTIVE,) * 2),
    "timm hybrid": (hybrid, ()),
    "timm in a model of the user's": (Segmenter, ()),
    "timm EVA, drop path": (EVA(drop_path_rate=0.5, init_values=0.5, qk_norm=True), ()),
    "timm EVA, norm after": (EVA(use_post_norm=True), ("normalises after",) * 2),
    "timm Swin": (partial(swin, "timm"), ("windows",) * 2),
    "HF ViT, no biases, tanh GELU": (HF(qkv_bias=False, hidden_act="gelu_pytorch_tanh"), ()),
    "HF ViT, ReLU": (HF(hidden_act="relu"), ("activation_fn",) * 2),
    "HF ViT, eager attention": (HF(attn_implementation="eager"), ()),
    "HF ViT, masked": (HF(), (), dict(pixel_values=IMAGES, attention_mask=torch.tensor([[1] * 4 + [0]] * 2))),
    "HF ViT, dropout": (HF(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1), (ACTIVE,) * 4),
    "HF ViT, attention dropout": (HF(attention_probs_dropout_prob=0.1), IN_ATTENTION),
    "HF DINOv2, drop path": (DINOV2(drop_path_rate=0.4), ()),
    "HF CLIP text, causal": (causal_text, (NOT_CALLED,) * 2, dict(input_ids=torch.tensor([[1, 2, 3, 98]]))),
    "HF Swin": (partial(swin, "sdpa"), ()),
    "torchvision, convolutional stem": (conv_stem, ("Sequential is nothing",), dict(x=torch.randn(4, 3, 16, 16))),
    "torchvision, dropout": (TV(dropout=0.2, attention_dropout=0.1), (ACTIVE,) * 4),
    "open_clip's block, causal": (open_clip_block, (), dict(q_x=TOKENS, attn_mask=CAUSAL)),
    "torch's layer without biases": (partial(encoder_layer, bias=False), (), ENCODED),
    "torch's layer, dropout": (partial(encoder_layer, dropout=0.1), (ACTIVE,) * 2, ENCODED),
    "torch's layer, ReLU": (partial(encoder_layer, activation="relu"), ("activation is",), ENCODED),
    "torch's layer, norm after": (partial(encoder_layer, norm_first=False), ("norm_first=False",) * 2, ENCODED),
    "torchvision, attention dropout": (TV(attention_dropout=0.1), IN_ATTENTION),
}
# Padded batches, whose padding goes before the layers.
NAFLEXES = {
    "prefix tokens, layer scale, drop path": dict(class_token=True, reg_tokens=2, init_values=0.5, drop_path_rate=0.4),
    "class token": dict(class_token=True, global_pool="token"),
    "maximum": dict(global_pool="max"),
    "one learned query": dict(global_pool="map", class_token=True),
    "norms of q and k": dict(qk_norm=True),
    "masks of keys": dict(use_key_only_attn_mask=True),
    "rotary positions": dict(rope_type="axial", pos_embed="none", class_token=True),
    "rotary positions in halves": dict(rope_type="dinov3", rope_rotate_half=True),
    "rotary positions of each layer": dict(rope_type="mixed", class_token=True, reg_tokens=1),
    "SwiGLU": dict(swiglu_mlp=True, attn_type="eva"),
}
CUT, QUERY = NAMED[NAFLEX].left, ("one learned query",)


def case(name: str, make, words=(), batch=None) -> Family:
    library = "transformers" if name.startswith("HF") else "timm"
    images = dict(pixel_values=IMAGES) if library == "transformers" else {"x": IMAGES}
    return Family(library, name, make, lambda: batch or images, words)


CASES = {
    **NAMED,
    **{name: case(name, *row) for name, row in VARIANTS.items()},
    **{
        f"NaFlexViT, {kind}": case(kind, naflexvit(**options), CUT + QUERY * ("query" in kind), PADDED)
        for kind, options in NAFLEXES.items()
    },
}


def same_reasons(model: nn.Module, words: tuple[str, ...]) -> bool:
    reasons = left(model)
    return len(reasons) == len(words) and all(word in why for word, why in zip(words, reasons))


@pytest.mark.parametrize("name", CASES)
def test_contract(name, caplog):
    found = CASES[name]
    pytest.importorskip(found.library)
    model = randomize(found.make())
    original, batch = copy.deepcopy(model), found.batch()
    before, types, text = snapshot(model), classes(model), repr(model)
    fallback_log.said.clear()
    assert vitfast.accelerate(model) is model
    ours = classes(model)
    assert snapshot(model) == before and repr(model) == text
    assert all(issubclass(mine, theirs) for (mine, _), (theirs, _) in zip(ours, types))
    vitfast.accelerate(model)
    assert classes(model) == ours, "again is no more than once"
    caplog.clear()
    for training in (True, False):
        words = tuple(word for word in found.left if training or "active" not in word)
        assert_same(model.train(training), original.train(training), batch, found.valid)
        assert same_reasons(model, words), report(model)
        assert calls(copy.deepcopy(model), **batch) == claimed(model), report(model)  # batch norm counts its calls
        assert f"{len(report(model).replaced)} parts on vitfast" in str(report(model))
    assert all("active" in each or "is_causal" in each for each in said(caplog)), (
        "accelerate has said what else is left"
    )
    assert name not in NAMED or sum(claimed(model).values()) >= 5
    expected = outputs(original, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert calls(twin, **batch) == claimed(twin) == claimed(model) and classes(twin) == classes(model)
        assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in model.parameters())
        vitfast.restore(twin)
        for out, truth in zip(outputs(twin, batch), expected, strict=True):
            assert torch.equal(out, truth)
    assert vitfast.restore(model) is model
    assert snapshot(model) == before and [cls for cls, _ in classes(model)] == [cls for cls, _ in types]


DOUBLE = ("timm EVA-02", "timm BEiT", NAFLEX, "transformers DINOv3 H+", "timm AIMv2", "timm q and k norm")


@pytest.mark.parametrize("name", DOUBLE)
def test_in_double_precision(name):
    model = family(name).make()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in NAMED[name].batch().items()}
    assert_same(*pair(model.double()), batch, atol=1e-11, rtol=1e-9)


# On the interpreted kernels, with the launches at least of one forward and backward.
ON_KERNELS = {
    "timm": (timm_model(init_values=0.5, reg_tokens=1, drop_path_rate=0.5, act_layer="gelu_tanh"), 34),
    "torchvision": (torchvision_model(), 34),
    "transformers DINOv2": (NAMED["transformers DINOv2"].make, 34),
    "timm EVA-02": (NAMED["timm EVA-02"].make, 20),
    "timm q and k norm": (NAMED["timm q and k norm"].make, 20),
    NAFLEX: (NAMED[NAFLEX].make, 20),
    PIXTRAL: (NAMED[PIXTRAL].make, 20),
}


@interpreted
@pytest.mark.parametrize("name", ON_KERNELS)
def test_kernels_run_and_equal_the_original(name):
    make, launches = ON_KERNELS[name]
    model, original = pair(make())
    batch = NAMED[name].batch() if name in NAMED else dict(x=IMAGES)
    before = launches_made()
    with ops.use_kernels("on"):
        assert_same(model.train(), original.train(), batch)
    assert launches_made() - before >= launches


WITHOUT = dict(pos_embed="none", class_token=False, global_pool="avg")
DTYPE_MODELS = {
    "timm": timm_vit,
    "timm without positions": lambda: timm_vit(**WITHOUT),  # the stream starts in autocast's dtype
    "timm layer scale without positions": lambda: timm_vit(**WITHOUT, init_values=0.5),
    "HF ViT": hf_vit,
    "HF DINOv2": NAMED["transformers DINOv2"].make,
    "torchvision": tv_vit,
    **{name: NAMED[name].make for name in ("timm EVA-02", "timm q and k norm", "transformers AIMv2", NAFLEX)},
}


@pytest.mark.parametrize("name", DTYPE_MODELS)
def test_autocast_gives_the_originals_dtypes_and_accuracy(name):
    model, original = pair(DTYPE_MODELS[name]())
    batch = NAMED[name].batch() if name in NAMED else {"pixel_values" if "HF" in name else "x": IMAGES}
    in_double = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    truth, wanted = run(copy.deepcopy(original).double(), in_double)
    if name not in NAMED:
        with torch.autocast("cpu", torch.bfloat16):
            assert dtypes(model, IMAGES) == dtypes(original, IMAGES)
    errors = []
    for each in (model, original):
        with torch.autocast("cpu", torch.bfloat16):
            outs, grads = run(each, batch)
        assert all(grads[key] is None or grads[key].dtype == torch.float32 for key in wanted)
        missed = sum((grads[key] - g).norm() for key, g in wanted.items() if g is not None)
        out = (outs[0].double() - truth[0]).norm() / truth[0].norm()
        errors.append((out, missed / sum(g.norm() for g in wanted.values() if g is not None), outs[0].dtype))
    (mine, my_gradients, dtype), (theirs, their_gradients, their_dtype) = errors
    # bf16 has 8 bits: both lie at about 1e-2 of the truth.
    assert dtype == their_dtype and mine < 2 * theirs + 1e-3 and theirs < 0.05
    assert my_gradients < 2 * their_gradients + 1e-3


def test_residual_dtype_can_be_chosen_under_autocast():
    bf16, fp32 = torch.bfloat16, torch.float32

    def seen(model):
        with torch.autocast("cpu", bf16):
            return dtypes(model, IMAGES)

    assert seen(vitfast.accelerate(timm_vit())) == [fp32, fp32, bf16]
    assert seen(vitfast.accelerate(timm_vit(), residual_in_fp32=False)) == [bf16, bf16, bf16]
    assert seen(vitfast.accelerate(timm_vit(**WITHOUT), residual_in_fp32=True))[:2] == [fp32, fp32]
    model = vitfast.accelerate(vitfast.accelerate(timm_vit(), residual_in_fp32=False))
    assert seen(model)[0] == fp32, "the last call decides"
    model = vitfast.restore(vitfast.accelerate(timm_vit(), residual_in_fp32=False, keep="all"))
    assert not {"residual_in_fp32", "vitfast_keep"} & {name for module in model.modules() for name in module.__dict__}


@interpreted
def test_what_backward_would_compute_again_can_be_kept():
    """Of each layer two norms' outputs and the input of the MLP's last layer; results are the same."""
    model, original = pair(timm_vit())

    def numbers(**options) -> int:
        kept = {}
        remember = lambda t: kept.update({t.data_ptr(): t.numel()}) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t), ops.use_kernels("on"):
            run(vitfast.accelerate(model, **options), dict(x=IMAGES))
        with ops.use_kernels("on"):
            assert_same(model, original, dict(x=IMAGES))
        return sum(kept.values())

    tokens, (block, *_) = 2 * 5, model.blocks
    more = len(model.blocks) * tokens * (2 * block.norm1.weight.numel() + block.mlp.fc1.out_features)
    assert numbers(keep="all") - numbers() == more, "the last call decides"
    with pytest.raises(vitfast.InputError, match="keep must be 'least' or 'all', got 'auto'"):
        vitfast.accelerate(model, keep="auto")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("library", MAKERS)
def test_a_model_in_one_dtype(library, dtype):
    model, original = (each.to(dtype) for each in pair(MAKERS[library]()))
    images = IMAGES.to(dtype)
    assert dtypes(model, images) == dtypes(original, images) == [dtype] * 3
    batch = {"pixel_values" if library == "Hugging Face" else "x": images}
    atol = 0.05 if dtype == torch.bfloat16 else 1e-12
    assert_close(outputs(model, batch)[0], outputs(original, batch)[0], atol=atol)
