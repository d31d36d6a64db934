"""accelerate on layers as other versions of a library build them."""

import pytest
import torch
import transformers
from adapter_models import HF, accelerated_pair, randomize, run_both
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
from vitfast.ops._dispatch import counting


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
    options = dict(HF, intermediate_size=64, hidden_act=hidden_act)
    both = accelerated_pair(lambda: transformers.ViTModel(transformers.ViTConfig(**options)))
    assert any("intermediate.dense" in name for name in both[1].state_dict())
    with counting() as ran:
        (out, grads), (expected, truth) = run_both(both, torch.randn(2, 3, 16, 16))
    assert_close(out, expected, atol=1e-5)
    for name, value in truth.items():
        assert_close(grads[name], value, atol=1e-5, name=name)
    layers = HF["num_hidden_layers"]
    assert ran["attention_block"] == layers and ran["mlp_block"] == (layers if hidden_act == "gelu" else 0)
    assert len(vitfast.acceleration_report(both[0]).left) == (0 if hidden_act == "gelu" else layers)


def test_a_beit_of_transformers_before_5_10(monkeypatch):
    """Its layers are those of Data2Vec, which return a tuple."""
    as_before(monkeypatch, "beit", "BeitLayer", Data2VecVisionLayer)
    modeling = transformers.models.beit.modeling_beit
    config = transformers.BeitConfig(
        **HF, intermediate_size=64, use_relative_position_bias=True, attn_implementation="sdpa"
    )
    layer = randomize(modeling.BeitLayer(config, window_size=(2, 2), drop_path_rate=0.0)).eval()
    x, upstream, given = torch.randn(2, 5, HF["hidden_size"]), torch.randn(2, 5, HF["hidden_size"]), (16, 16)
    expected = layer(x, resolution=given)
    truth = torch.autograd.grad(expected[0], layer.lambda_1, upstream, retain_graph=True)
    ours = registry._class_for(type(layer))
    assert isinstance(ours, type), ours
    layer.__class__ = ours
    with counting() as ran:
        out = layer(x, resolution=given)
    assert isinstance(out, tuple) and ran["attention_block"] == ran["mlp_block"] == 1
    assert_close(out[0], expected[0], atol=1e-5)
    assert_close(torch.autograd.grad(out[0], layer.lambda_1, upstream)[0], truth[0], atol=1e-5)


def test_a_clip_of_transformers_4(monkeypatch):
    """Its layers want a second mask and return a tuple."""

    def forward(self, hidden_states, attention_mask, causal_attention_mask, output_attentions=False):
        mask = attention_mask if causal_attention_mask is None else causal_attention_mask
        return (CLIPEncoderLayer.forward(self, hidden_states, mask),)

    as_before(monkeypatch, "clip", "CLIPEncoderLayer", CLIPEncoderLayer, forward=forward)
    modeling = transformers.models.clip.modeling_clip
    config = transformers.CLIPVisionConfig(**HF, intermediate_size=64, attn_implementation="sdpa")
    layer = randomize(modeling.CLIPEncoderLayer(config)).eval()
    x, mask = torch.randn(2, 5, HF["hidden_size"]), torch.randn(2, 1, 5, 5)
    calls = ((x, None, None), (x, mask, None), (x, None, mask))
    expected = [layer(*call)[0] for call in calls]
    layer.__class__ = registry._class_for(type(layer))
    for call, truth, ran_ours in zip(calls, expected, (1, 1, 0)):
        with counting() as ran:
            (out,) = layer(*call)
        assert_close(out, truth, atol=1e-5)
        assert ran["attention_block"] == ran["mlp_block"] == ran_ours


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
    model = getattr(modeling, f"{name}Model")
    old = type(f"{name}Transformer", (model,), dict(__module__=modeling.__name__))
    sizes = {key: value for key, value in HF.items() if name != "Siglip2Vision" or key != "image_size"}
    tower = old(getattr(modeling, f"{name}Config")(**sizes, intermediate_size=64))
    replaced = {entry.name for entry in vitfast.acceleration_report(vitfast.accelerate(tower)).replaced}
    assert replaced >= set(norms.split()), replaced


def test_qwens_merger_of_transformers_before_5_1():
    """Its norm was that of the model of texts."""
    merger = Qwen2_5_VLPatchMerger(32, 32)
    merger.ln_q = randomize(Qwen2RMSNorm(32))
    x = torch.randn(4, 32)
    expected = merger(x)
    vitfast.accelerate(merger)
    with counting() as ran:
        assert_close(merger(x), expected, atol=1e-5)
    assert ran["layer_norm"] + ran["rms_norm"] == 1, ran


def test_a_layer_asked_for_more_gives_the_library_its_mask(monkeypatch):
    """Of tokens that our towers packed, in versions whose layers return the weights of attention."""
    forward = PixtralAttentionLayer.forward

    def old(self, hidden_states, attention_mask, position_embeddings=None, output_attentions=False, **kwargs):
        y = forward(self, hidden_states, attention_mask, position_embeddings, **kwargs)
        return (y, torch.zeros(1)) if output_attentions else (y,)

    try:
        registry._checked.pop(PixtralAttentionLayer, None)
        monkeypatch.setattr(PixtralAttentionLayer, "forward", old)
        config = transformers.PixtralVisionConfig(**HF, intermediate_size=32, attn_implementation="sdpa")
        layer = randomize(PixtralAttentionLayer(config)).eval()
        x, rope = (
            torch.randn(2, 5, HF["hidden_size"]),
            tuple(torch.randn(2, 5, HF["hidden_size"] // HF["num_attention_heads"])),
        )
        valid = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
        mask = torch.zeros(2, 1, 5, 5).masked_fill(~valid[:, None, None], torch.finfo(torch.float32).min)
        expected = layer(x, mask, rope, output_attentions=True)
        layer.__class__ = registry._class_for(PixtralAttentionLayer)
        packed = UnpaddedTokens(valid, 8, 5, lambda: mask)
        out = layer(packed.pack(x), packed, rope, output_attentions=True)
        assert len(out) == len(expected) == 2
        assert_close(out[0], packed.pack(expected[0]), atol=1e-5)
    finally:
        monkeypatch.undo()
        registry._checked.pop(PixtralAttentionLayer, None)
