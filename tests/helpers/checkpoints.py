"""One small model in every library's words, random weights, a comparison of logits, and one of refusals."""

import re

import numpy as np
import pytest
import torch
from timm.models import vision_transformer as timm_vit

from vitfast import InputError, ViT, load_checkpoint

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


def same(state, truth):
    """Whether two state dicts have the same names and the same bits."""
    return state.keys() == truth.keys() and all(torch.equal(state[name], tensor) for name, tensor in truth.items())


def pick(config, *names):
    return {name: config[name] for name in names}


def small(**changes):
    """Our small model, random in every parameter."""
    return randomised(ViT(**{**SMALL, **changes}))


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


VISION = {name: HF[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
VISION |= dict(image_size=32, patch_size=8)
TEXT = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=96, vocab_size=99)
TEXT |= dict(max_position_embeddings=9, bos_token_id=0, eos_token_id=1, pad_token_id=2)
WHOLE = ["CLIPModel", "SiglipModel", "SiglipForImageClassification"]


def made(name, **changes):
    """A small model of transformers with random weights; only the fields that its configuration has."""
    import transformers

    cls = getattr(transformers, name)
    if name in WHOLE:
        more = dict(projection_dim=40) if name == "CLIPModel" else {}
        config = cls.config_class(vision_config=VISION | changes, text_config=TEXT, num_labels=5, **more)
    else:
        known = {*cls.config_class().to_dict(), "num_labels"}
        fields = HF | dict(projection_dim=40, num_register_tokens=2)
        config = cls.config_class(**{k: v for k, v in fields.items() if k in known} | changes)
    config._attn_implementation = "eager"
    return randomised(cls(config))


WITHOUT_HEAD = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=HEADS, num_classes=0)


def meta(truth, base=100.0):
    """The tensors of timm's DINOv3 as Meta's code names them, with all that stands beside them there."""
    state, theirs = {}, truth.state_dict()
    for name, tensor in theirs.items():
        name = name.replace("gamma_", "ls").replace("reg_token", "storage_tokens")
        name = name + ".gamma" if name.endswith((".ls1", ".ls2")) else name
        if "blocks.0.mlp.fc1_g.weight" in theirs:
            name = name.replace("fc1_g", "w1").replace("fc1_x", "w2").replace("fc2", "w3")
        if name.endswith("attn.q_bias"):
            stem = name.removesuffix("q_bias") + "qkv."
            whole = torch.cat([tensor, torch.randn_like(tensor), theirs[stem[:-4] + "v_bias"]])
            mask = torch.ones_like(whole)
            mask[len(tensor) : 2 * len(tensor)] = 0  # what stands there for k is not read
            state |= {f"{stem}bias": whole, f"{stem}bias_mask": mask}
        elif not name.endswith("v_bias"):
            state[name] = tensor
    exponent = torch.arange(0, 16, 4) / 16
    state |= {"mask_token": torch.randn(1, 48), "rope_embed.periods": (base**exponent).bfloat16()}
    return state | {f"local_cls_norm.{name}": torch.randn(48) for name in ("weight", "bias")}


def refused(source, says, calls=(ViT.from_pretrained,), **known):
    """Each call raises an InputError of one line that begins with the source and matches `says`."""
    for call in calls:
        with pytest.raises(InputError) as caught:
            call(source, **(known if call is not load_checkpoint else {}))
        said = str(caught.value)
        assert (
            re.match(f"{re.escape(str(source))}(/config.json)?: ", said) and "\n" not in said and re.search(says, said)
        ), said
