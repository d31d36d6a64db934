"""Images of many shapes, and small models of transformers with their processors and the output that counts."""

import pictures
import timm
import torch
import transformers
from checks import randomize
from torch import nn

IMAGES = [pictures.smooth(i, 30 + 17 * i, 151 - 20 * i) for i in range(7)]  # wide, square, high
CLOSE = dict(atol=2e-6, rtol=2e-5)  # fp32 sums in another order
SIDE = dict(height=48, width=48)
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, patch_size=8)
TINY |= dict(image_size=48)
TEXT = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def drawn(model: nn.Module) -> nn.Module:
    """The model in eval mode, with weights that let every part count."""
    return randomize(model, 0.2).eval()


def as_timm_does(model: nn.Module, images: list, **told) -> torch.Tensor:
    """The vectors of images by timm alone. told: what differs from the configuration that timm has of the model."""
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model) | told, is_training=False)
    with torch.inference_mode():
        return model.forward_head(model.forward_features(torch.stack([transform(i) for i in images])), pre_logits=True)


def processors() -> dict:
    """By name, what makes (model, the processor's class, its options, the output that counts)."""
    cut = dict(size=dict(shortest_edge=56), crop_size=SIDE)
    clip = transformers.CLIPVisionConfig(**TINY, projection_dim=24)
    both = transformers.CLIPConfig(vision_config=TINY, text_config=dict(TEXT), projection_dim=24)
    dinov2 = transformers.Dinov2WithRegistersConfig(**{k: v for k, v in TINY.items() if k != "intermediate_size"})
    naflex = transformers.Siglip2VisionConfig(**{k: v for k, v in TINY.items() if k != "image_size"}, num_patches=36)
    pooled, states = (lambda output: output.pooler_output), (lambda output: output.last_hidden_state)
    return {
        "vit": lambda: (transformers.ViTModel(transformers.ViTConfig(**TINY)), "ViT", dict(size=SIDE), pooled),
        "classifier": lambda: (
            transformers.ViTForImageClassification(transformers.ViTConfig(**TINY)),
            "ViT",
            dict(size=SIDE, resample=3),
            lambda output: output.hidden_states[-1],
        ),
        "clip": lambda: (transformers.CLIPVisionModel(clip), "CLIP", cut, pooled),
        "projected": lambda: (transformers.CLIPVisionModelWithProjection(clip), "CLIP", cut, lambda o: o.image_embeds),
        "clip of both": lambda: (transformers.CLIPModel(both), "CLIP", cut, pooled),
        "siglip": lambda: (
            transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TINY)),
            "Siglip",
            dict(size=SIDE),
            pooled,
        ),
        "siglip2": lambda: (
            transformers.Siglip2VisionModel(naflex),
            "Siglip2",
            dict(patch_size=8, max_num_patches=40),
            pooled,
        ),
        "dinov2": lambda: (transformers.Dinov2WithRegistersModel(dinov2), "Bit", cut, pooled),
        "dinov3": lambda: (
            transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**TINY, num_register_tokens=2)),
            "ViT",
            dict(size=SIDE),
            lambda output: states(output)[:, 3:].mean(1),
        ),
    }
