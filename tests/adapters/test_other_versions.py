"""accelerate on layers as other versions of a library build them."""

import pytest
import torch
import transformers
from adapter_models import IMAGES, assert_same, calls, left, pair, report
from checks import assert_close
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.data2vec.modeling_data2vec_vision import Data2VecVisionLayer
from transformers.models.pixtral.modeling_pixtral import PixtralAttentionLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPatchMerger
from transformers.models.yolos.modeling_yolos import YolosLayer

import vitfast
from vitfast.adapters import registry
from vitfast.adapters.masks import UnpaddedTokens

HF = dict(image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
HF |= dict(intermediate_size=64, attn_implementation="sdpa")
BOTH = {"attention block": 1, "MLP block": 1}
X = torch.randn(2, 5, 32, generator=torch.manual_seed(0))


def as_before(monkeypatch, module: str, name: str, layer: type, **members) -> None:
    """transformers' module with the layer of another family, which still is what this one was."""
    module = getattr(transformers.models, module)
    modeling = getattr(module, f"modeling_{module.__name__.rpartition('.')[2]}")
    old = type(name, (layer,), dict(__module__=modeling.__name__, **members))
    monkeypatch.setattr(modeling, name, old)


@pytest.mark.parametrize("hidden_act", ["gelu", "relu"])
def test_a_vit_of_transformers_before_5_10(monkeypatch, hidden_act):
    """Its modules have BERT's names: attention.attention.query, intermediate.dense, output.dense."""

    def forward(self, hidden_states, head_mask=None):
        return YolosLayer.forward(self, hidden_states)

    as_before(monkeypatch, "vit", "ViTLayer", YolosLayer, forward=forward)
    model, original = pair(transformers.ViTModel(transformers.ViTConfig(**HF, hidden_act=hidden_act)))
    assert any("intermediate.dense" in name for name in original.state_dict())
    assert_same(model, original, dict(pixel_values=IMAGES))
    mlps = {"MLP block": 2} if hidden_act == "gelu" else {}
    assert calls(model, IMAGES) == {"attention block": 2, "norm": 1, "patch projection": 1, **mlps}
    assert len(left(model)) == (0 if mlps else 2)


def test_a_beit_of_transformers_before_5_10(monkeypatch):
    """Its layers are those of Data2Vec, which return a tuple."""
    as_before(monkeypatch, "beit", "BeitLayer", Data2VecVisionLayer)
    config = transformers.BeitConfig(**HF, use_relative_position_bias=True)
    layer = transformers.models.beit.modeling_beit.BeitLayer(config, window_size=(2, 2), drop_path_rate=0.0)
    model, original = pair(layer.eval())
    batch = dict(hidden_states=X, resolution=(16, 16))
    assert_same(model, original, batch)
    assert isinstance(model(**batch), tuple) and calls(model, **batch) == BOTH


def test_a_clip_of_transformers_4(monkeypatch):
    """Its layers want a second mask and return a tuple."""

    def forward(self, hidden_states, attention_mask, causal_attention_mask, output_attentions=False):
        mask = attention_mask if causal_attention_mask is None else causal_attention_mask
        return (CLIPEncoderLayer.forward(self, hidden_states, mask),)

    as_before(monkeypatch, "clip", "CLIPEncoderLayer", CLIPEncoderLayer, forward=forward)
    config = transformers.CLIPVisionConfig(**HF)
    model, original = pair(transformers.models.clip.modeling_clip.CLIPEncoderLayer(config).eval())
    mask = torch.randn(2, 1, 5, 5)
    for call, expected in (((X, None, None), BOTH), ((X, mask, None), BOTH), ((X, None, mask), {})):
        (out,), (truth,) = (each(*call) for each in (model, original))
        assert_close(out, truth, atol=1e-5)
        assert calls(model, *call) == expected


TOWERS = [
    ("clip", "CLIPVision", "pre_layrnorm post_layernorm"),
    ("metaclip_2", "MetaClip2Vision", "pre_layrnorm post_layernorm"),
    ("siglip", "SiglipVision", "post_layernorm"),
    ("siglip2", "Siglip2Vision", "post_layernorm"),
    ("clip", "CLIPText", "final_layer_norm"),
    ("siglip", "SiglipText", "final_layer_norm"),
]


@pytest.mark.parametrize("module, name, norms", TOWERS, ids=lambda value: value)
def test_norms_of_towers_of_transformers_before_5_8(module, name, norms):
    """The model that has them was called ...Transformer."""
    modeling = getattr(getattr(transformers.models, module), f"modeling_{module}")
    old = type(f"{name}Transformer", (getattr(modeling, f"{name}Model"),), dict(__module__=modeling.__name__))
    sizes = {key: value for key, value in HF.items() if name != "Siglip2Vision" or key != "image_size"}
    tower = vitfast.accelerate(old(getattr(modeling, f"{name}Config")(**sizes)))
    assert {entry.name for entry in report(tower).replaced} >= set(norms.split()), report(tower)


def test_qwens_merger_of_transformers_before_5_1():
    """Its norm was that of the model of texts."""
    merger = Qwen2_5_VLPatchMerger(32, 32)
    merger.ln_q = Qwen2RMSNorm(32)
    model, original = pair(merger)
    assert_same(model, original, dict(x=X[0, :4]))
    assert calls(model, X[0, :4]) == {"norm": 1}


def test_a_layer_asked_for_more_gives_the_library_its_mask(monkeypatch):
    """Of tokens that our towers packed, in versions whose layers return the weights of attention."""
    forward = PixtralAttentionLayer.forward

    def old(self, hidden_states, attention_mask, position_embeddings=None, output_attentions=False, **kwargs):
        y = forward(self, hidden_states, attention_mask, position_embeddings, **kwargs)
        return (y, torch.zeros(1)) if output_attentions else (y,)

    try:
        registry._checked.pop(PixtralAttentionLayer, None)
        monkeypatch.setattr(PixtralAttentionLayer, "forward", old)
        model, original = pair(PixtralAttentionLayer(transformers.PixtralVisionConfig(**HF)).eval())
        rope, valid = tuple(torch.randn(2, 5, 16)), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
        mask = torch.zeros(2, 1, 5, 5).masked_fill(~valid[:, None, None], torch.finfo(torch.float32).min)
        expected = original(X, mask, rope, output_attentions=True)
        packed = UnpaddedTokens(valid, 8, 5, lambda: mask)
        out = model(packed.pack(X), packed, rope, output_attentions=True)
        assert len(out) == len(expected) == 2
        assert_close(out[0], packed.pack(expected[0]), atol=1e-5)
    finally:
        monkeypatch.undo()
        registry._checked.pop(PixtralAttentionLayer, None)
