"""Attention of packed images, piece by piece: replaced by one call, equal for other lengths, or left."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from checks import assert_equal, results, slow_but
from torch import nn

from vitfast import backend, ops
from vitfast.backend.packed import lengths_as_symbols, split_pieces


class Layer(nn.Module):
    """A layer of Qwen2-VL's kind; pieces(q, k, v, lengths) of (1, H, tokens, Dh) gives (1, tokens, H, Dh)."""

    def __init__(self, pieces, norm=None):
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.pieces, self.norm = pieces, norm

    def forward(self, x, angles, offsets):
        q, k, v = self.qkv(self.norm1(x)).reshape(-1, 3, 2, 16).permute(1, 0, 2, 3).unbind(0)
        q, k = (t * angles.cos()[:, None] + rotated(t) * angles.sin()[:, None] for t in (q, k))
        q = q if self.norm is None else self.norm(q)
        o = self.pieces(*(t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)), offsets[1:] - offsets[:-1])
        x = x + self.proj(o.reshape(*x.shape[:-1], -1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def rotated(t):
    return torch.cat([-t[..., 8:], t[..., :8]], -1)


def split(tensors, lengths):
    return zip(*(torch.split(t, lengths.tolist(), dim=2) for t in tensors))


def attend(q, k, v, **options):
    o = F.scaled_dot_product_attention(q, k, v, **options)
    return o.reshape(1, -1, q.shape[2], 16).transpose(1, 2).contiguous()


def plain(q, k, v, lengths):
    return torch.cat([attend(*three) for three in split((q, k, v), lengths)], 1)


def heads_first(q, k, v, lengths):
    o = [F.scaled_dot_product_attention(*three, scale=0.3) for three in split((q, k, v), lengths)]
    return torch.cat(o, dim=2).transpose(1, 2)


def other_keys(q, k, v, lengths):
    pieces = list(split((q, k, v), lengths))
    return torch.cat([attend(q, k, v) for (q, _, _), (_, k, v) in zip(pieces, pieces[::-1])], 1)


def other_lengths(q, k, v, lengths):
    keys = split((k, v), lengths.flip(0))
    return torch.cat([attend(*q, *kv) for q, kv in zip(split((q,), lengths), keys)], 1)


def masked(q, k, v, lengths):
    mask = torch.tensor([1.0, 0.0]).double().view(2, 1, 1)
    return torch.cat([attend(*three, attn_mask=mask) for three in split((q, k, v), lengths)], 1)


def dropped(q, k, v, lengths):
    return torch.cat([attend(*three, dropout_p=1.0) for three in split((q, k, v), lengths)], 1)


def lengths_changed_before(q, k, v, lengths):
    sizes = lengths.tolist()
    lengths[0] += 1
    lengths[1] -= 1
    pieces = zip(torch.split(q, sizes, dim=2), *(torch.split(t, lengths.tolist(), dim=2) for t in (k, v)))
    return torch.cat([attend(*three) for three in pieces], 1)


def other_order(q, k, v, lengths):
    sizes = lengths.tolist()[::-1]
    return torch.cat([attend(*t) for t in zip(*(torch.split(t, sizes, dim=2) for t in (q, k, v)))], 1)


LEFT = [other_keys, other_lengths, masked, dropped, lengths_changed_before, other_order]


def compared(model, *offsets, **options) -> tuple[Counter, list]:
    """(what is replaced, the rewritten graphs): outputs and gradients are compared for each packing."""
    graphs = []

    def inner(module, inputs):
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    compiled = backend.compile(model, options={"inner": inner}, fullgraph=True, **options)
    for each in offsets:
        inputs = torch.randn(each[-1], 32).double(), torch.randn(each[-1], 16).double(), torch.tensor(each).int()
        expected = results(model, model, inputs)
        with lengths_as_symbols(), mock.patch.object(torch, "split", split_pieces):
            assert_equal(results(compiled, model, inputs), expected, 1e-9)
    return Counter(entry.kind for entry in backend.report().replaced), graphs


def model_of(pieces, layers=1, norm=None) -> nn.Module:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(pieces, norm) for _ in range(layers))

        def forward(self, x, angles, offsets):
            for layer in self.layers:
                x = layer(x, angles, offsets)
            return x

    torch.manual_seed(0)
    return Model().double()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("pieces", [plain, heads_first])
def test_layers_are_replaced_for_all_lengths(pieces, dynamic):
    packings = [[0, 5, 14], [0, 11, 14], [0, 2, 14]]
    done, graphs = compared(model_of(pieces, layers=2), *packings, dynamic=dynamic)
    assert done == {"attention block": 2, "MLP block": 2}
    (graph,) = graphs  # one compilation serves all lengths
    calls = [node for node in graph.nodes if node.target is ops.attention_block]
    assert len(calls) == 2 and len({call.kwargs["offsets"] for call in calls}) == 1
    assert len({call.kwargs["longest"] for call in calls}) == 1
    assert sum(node.target == "item" for node in graph.nodes) == 2  # the host waits for each


@pytest.mark.slow
def test_one_axis_of_samples_is_kept():
    model = model_of(plain)
    model.forward = lambda x, angles, offsets, layers=model.layers: layers[0](x[None], angles, offsets)[0]
    done, _ = compared(model, [0, 5, 14], [0, 11, 14])
    assert done == {"attention block": 1, "MLP block": 1}


@pytest.mark.slow
def test_attention_is_replaced_alone_where_its_block_is_none():
    done, _ = compared(model_of(plain, norm=nn.LayerNorm(16)), [0, 5, 14], [0, 11, 14])
    assert done["attention"] == 1 and done["MLP block"] == 1 and not done["attention block"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("pieces", slow_but([masked, other_order], LEFT))
def test_what_is_no_attention_of_packed_samples_is_left(pieces):
    offsets = [0, 5, 14], [0, 7, 14]
    done, graphs = compared(model_of(pieces), *offsets)
    assert not done["attention block"] and done["MLP block"] == 1
    assert not any("offsets" in node.kwargs for graph in graphs for node in graph.nodes)


def test_pieces_of_one_token_are_refused():
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        compared(model_of(plain), [0, 5, 14], [0, 1, 14])
