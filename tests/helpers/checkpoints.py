"""One small model in every library's words, random weights, and a comparison of logits."""

import numpy as np
import torch
from timm.models import vision_transformer as timm_vit

# fp32 on both sides, logits of size ~1; erf in the place of tanh moves them by more than 1e-4
TOL = dict(atol=1e-5, rtol=1e-5)
D, DEPTH, HEADS, F, P, SIZE, CLASSES = 48, 2, 3, 96, 8, 32, 5
N = (SIZE // P) ** 2
SMALL = dict(
    img_size=SIZE, patch_size=P, embed_dim=D, depth=DEPTH, num_heads=HEADS, mlp_ratio=F / D, num_classes=CLASSES
)
HF = dict(
    hidden_size=D, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=F, image_size=SIZE,
    patch_size=P, num_labels=CLASSES, attn_implementation="eager", mlp_ratio=2,
)  # fmt: skip
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def randomised(model):
    """The model in eval mode with every parameter random, norms and positions too."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.3)
            if p.dim() == 1 and name.endswith(("weight", "gamma", "lambda1")):
                p.add_(1)
    return model.eval()


def images(*size, chans=3):
    return torch.randn(2, chans, *(size or (SIZE, SIZE)))


def logits(model, x):
    with torch.no_grad():
        out = model(x)
    return getattr(out, "logits", out)


def agree(model, truth, x=None):
    """Our logits are the other library's."""
    x = images() if x is None else x
    torch.testing.assert_close(logits(model.eval(), x), logits(truth, x), **TOL)


def pick(config, *names):
    return {name: config[name] for name in names}


def small_timm(**changes):
    return randomised(timm_vit.VisionTransformer(**{**SMALL, **changes}))


def google(big_vision=False, cls=True, table=True):
    """Random arrays as Flax's ViT (the paper's code), or big_vision's, names and shapes them."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(scale=0.3, size=shape).astype(np.float32)

    a, m, n = (0, 0, 1) if big_vision else (1, 3, 2)
    mha, mlp, second = f"MultiHeadDotProductAttention_{a}", f"MlpBlock_{m}", f"LayerNorm_{n}"
    w = {
        "embedding/kernel": array(P, P, 3, D),
        "embedding/bias": array(D),
        "head/kernel": array(D, CLASSES),
        "head/bias": array(CLASSES),
    }
    w |= {"Transformer/encoder_norm/scale": 1 + array(D), "Transformer/encoder_norm/bias": array(D)}
    if cls:
        w["cls"] = array(1, 1, D)
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}/"
        for norm in ("LayerNorm_0", second):
            w |= {f"{block}{norm}/scale": 1 + array(D), f"{block}{norm}/bias": array(D)}
        for name in ("query", "key", "value"):
            w |= {
                f"{block}{mha}/{name}/kernel": array(D, HEADS, D // HEADS),
                f"{block}{mha}/{name}/bias": array(HEADS, D // HEADS),
            }
        w |= {f"{block}{mha}/out/kernel": array(HEADS, D // HEADS, D), f"{block}{mha}/out/bias": array(D)}
        w |= {f"{block}{mlp}/Dense_0/kernel": array(D, F), f"{block}{mlp}/Dense_0/bias": array(F)}
        w |= {f"{block}{mlp}/Dense_1/kernel": array(F, D), f"{block}{mlp}/Dense_1/bias": array(D)}
    if table:
        w["pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"] = array(
            1, N if big_vision else N + 1, D
        )
    return w


def stacked(w):
    """All layers under one `encoderblock`, as big_vision's scan over layers keeps them."""
    first = "Transformer/encoderblock_0/"
    layers = {
        k[len(first) :]: np.stack([w[k.replace("block_0/", f"block_{i}/")] for i in range(DEPTH)])
        for k in w
        if k.startswith(first)
    }
    return {k: v for k, v in w.items() if "encoderblock_" not in k} | {
        f"Transformer/encoderblock/{k}": v for k, v in layers.items()
    }
