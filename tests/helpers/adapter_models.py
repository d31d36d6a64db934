"""Small models of timm, transformers and torchvision, and their comparison with accelerated ones."""

import copy
from functools import partial

import torch
from checks import assert_close, gradients, randomize
from torch import nn

import vitfast

SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
HF = dict(image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=5)
TV = dict(image_size=16, patch_size=8, hidden_dim=32, num_layers=2, num_heads=2, mlp_dim=64, num_classes=5)


def timm_vit(**options) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**{**SMALL, **options})


def timm_clip(act: str) -> nn.Module:
    return timm_vit(
        pre_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-5), act_layer=act, global_pool="avg", fc_norm=False
    )


def timm_deit_distilled() -> nn.Module:
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled(**SMALL)


def timm_swiglu() -> nn.Module:
    from timm.layers import SwiGLU

    return timm_vit(mlp_layer=SwiGLU)


def timm_resnet_hybrid() -> nn.Module:
    from timm.layers import HybridEmbed

    stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
    stem.num_features = 8
    return timm_vit(
        embed_layer=lambda **options: HybridEmbed(stem, feature_size=(4, 4), **{**options, "patch_size": 2})
    )


def hf_vit(model: str = "ViTForImageClassification", **options) -> nn.Module:
    import transformers

    config = transformers.ViTConfig(**{**HF, "intermediate_size": 64, **options})
    return getattr(transformers, model)(config)


def hf_deit(model: str = "DeiTForImageClassificationWithTeacher", **options) -> nn.Module:
    import transformers

    return getattr(transformers, model)(transformers.DeiTConfig(**HF, intermediate_size=64, **options))


def hf_dinov2(model: str = "Dinov2ForImageClassification", **options) -> nn.Module:
    import transformers

    config = transformers.Dinov2WithRegistersConfig if "Registers" in model else transformers.Dinov2Config
    return getattr(transformers, model)(config(**{**HF, "mlp_ratio": 2, **options}))


def tv_vit(**options) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(**{**TV, **options})
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def tv_conv_stem() -> nn.Module:
    from torchvision.models.vision_transformer import ConvStemConfig

    return tv_vit(conv_stem_configs=[ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(16, 3, 2)])


# name: (constructor, image size, reasons that `left` must have, in words that each contains)
MODELS = {
    "timm": (timm_vit, (16, 16), []),
    "timm average pooling, norm after it": (partial(timm_vit, global_pool="avg"), (16, 16), []),
    "timm MAP head": (partial(timm_vit, global_pool="map", class_token=False), (16, 16), ["one learned query"]),
    "timm maximum pooling, no class token, no position of it": (
        partial(timm_vit, global_pool="avgmax", class_token=False, no_embed_class=True),
        (16, 16),
        [],
    ),
    "timm no pooling, no norm, no biases, no positions": (
        partial(timm_vit, global_pool="", final_norm=False, qkv_bias=False, proj_bias=False, pos_embed="none"),
        (16, 16),
        [],
    ),
    "timm DINOv2: registers, layer scale, no embed class": (
        partial(timm_vit, reg_tokens=4, init_values=0.5, no_embed_class=True),
        (16, 16),
        [],
    ),
    "timm dynamic size": (partial(timm_vit, dynamic_img_size=True), (24, 32), []),
    "timm dynamic size, padded": (partial(timm_vit, dynamic_img_size=True, dynamic_img_pad=True), (21, 30), []),
    "timm CLIP, quick GELU": (partial(timm_clip, "quick_gelu"), (16, 16), []),
    "timm CLIP, tanh GELU": (partial(timm_clip, "gelu_tanh"), (16, 16), []),
    "timm q and k norm": (partial(timm_vit, qk_norm=True, init_values=0.5, drop_path_rate=0.5), (16, 16), []),
    "timm norms inside": (partial(timm_vit, scale_attn_norm=True, scale_mlp_norm=True), (16, 16), []),
    "timm SwiGLU": (timm_swiglu, (16, 16), []),
    "timm drop path, patch dropout": (
        partial(timm_vit, img_size=(32, 16), drop_path_rate=0.5, patch_drop_rate=0.3, init_values=0.5),
        (32, 16),
        [],
    ),
    "timm dropout": (
        partial(timm_vit, proj_drop_rate=0.2, pos_drop_rate=0.1, drop_rate=0.1),
        (16, 16),
        ["active in training"] * 4,
    ),
    "timm attention dropout": (partial(timm_vit, attn_drop_rate=0.2), (16, 16), ["active in training"] * 2),
    "timm DeiT distilled": (timm_deit_distilled, (16, 16), []),
    "timm hybrid": (timm_resnet_hybrid, (16, 16), []),
    "HF ViT": (hf_vit, (16, 16), []),
    "HF ViTModel, no qkv bias, tanh GELU": (
        partial(hf_vit, "ViTModel", qkv_bias=False, hidden_act="gelu_pytorch_tanh"),
        (16, 16),
        [],
    ),
    "HF ViT, ReLU": (partial(hf_vit, hidden_act="relu"), (16, 16), ["activation_fn"] * 2),
    "HF ViT, eager attention": (partial(hf_vit, attn_implementation="eager"), (16, 16), []),
    "HF ViT dropout": (
        partial(hf_vit, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1),
        (16, 16),
        ["active in training"] * 4,
    ),
    "HF ViT attention dropout": (
        partial(hf_vit, attention_probs_dropout_prob=0.1),
        (16, 16),
        ["attention dropout is active in training"] * 2,
    ),
    "HF DeiT with teacher": (hf_deit, (16, 16), []),
    "HF DINOv2, drop path": (partial(hf_dinov2, drop_path_rate=0.4), (24, 16), []),
    "HF DINOv2, SwiGLU": (partial(hf_dinov2, use_swiglu_ffn=True), (16, 16), []),
    "HF DINOv2 with registers": (partial(hf_dinov2, "Dinov2WithRegistersForImageClassification"), (16, 16), []),
    "torchvision": (tv_vit, (16, 16), []),
    "torchvision, hidden layer in the head": (partial(tv_vit, representation_size=12), (16, 16), []),
    "torchvision, convolutional stem": (tv_conv_stem, (16, 16), ["Sequential is nothing"]),
    "torchvision attention dropout": (
        partial(tv_vit, attention_dropout=0.1),
        (16, 16),
        ["attention dropout is active in training"] * 2,
    ),
    "torchvision dropout": (partial(tv_vit, dropout=0.2, attention_dropout=0.1), (16, 16), ["active in training"] * 4),
}


def tensor(output) -> torch.Tensor:
    """The tensor among a model's outputs that the tests differentiate."""
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if "logits" in output else output.last_hidden_state


def accelerated_pair(make):
    """(accelerated, original) with the same random weights."""
    model = randomize(make())
    return vitfast.accelerate(copy.deepcopy(model)), model


def run_both(pair, images, upstream=None):
    """Logits, gradients of every parameter, and the images' gradient, of each on the same random numbers."""
    results = []
    for model in pair:
        x = images.clone().requires_grad_()
        torch.manual_seed(1)
        out = tensor(model(x))
        upstream = torch.randn_like(out) if upstream is None else upstream
        results.append((out, {**gradients(model, out, upstream), "images": x.grad}))
    return results


def assert_same(results, atol=1e-5, rtol=1e-5):
    (out, grads), (expected, wanted) = results
    assert out.dtype == expected.dtype
    assert_close(out, expected, atol=atol, rtol=rtol, name="output")
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert_close(grads[name], grad, atol=atol, rtol=rtol, name=name)


def snapshot(model):
    """Everything that accelerate must not touch."""
    parameters = [(name, id(p), p.data_ptr(), p.requires_grad, p.stride()) for name, p in model.named_parameters()]
    buffers = [(name, id(b)) for name, b in model.named_buffers()]
    return parameters, buffers, list(model.state_dict()), [(name, id(m)) for name, m in model.named_modules()]


def classes(model):
    return [(type(m), sorted(m.__dict__)) for m in model.modules()]


BLOCKS = ("Block", "ViTLayer", "Dinov2Layer", "EncoderBlock")


IMAGES = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16).sin()


MAKERS = {"timm": timm_vit, "Hugging Face": hf_vit, "torchvision": tv_vit}


ALL_PARTS = 6  # of a model with two layers: the patch projection, four fused blocks, the last norm


def running(model) -> int:
    """How many parts run on vitfast now."""
    return len(vitfast.acceleration_report(model).replaced)


def assert_equal_models(model, original, atol=1e-5):
    out, expected = tensor(model(IMAGES)), tensor(original(IMAGES))
    assert_close(out, expected, atol=atol)
    upstream = torch.randn(out.shape, generator=torch.manual_seed(5))
    mine, theirs = gradients(model, out, upstream), gradients(original, expected, upstream)
    assert mine.keys() == theirs.keys() and mine
    for name, grad in theirs.items():
        assert_close(mine[name], grad, atol=atol, rtol=1e-5, name=name)
