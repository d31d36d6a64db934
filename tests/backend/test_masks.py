"""Masks in a graph: which become lengths of keys, which a bias, and the same numbers with each."""

import pytest
import torch
import torch.nn.functional as F
from compiled import block, compare
from torch import nn

from vitfast.backend.arguments import shown_keys

INF = float("inf")


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.m, self.attend = block("", "")[0], attend
        self.module = nn.MultiheadAttention(32, 4, batch_first=True)
        self.double()

    def forward(self, x, lengths):
        h = self.m.norm1(x)
        if self.attend is module:
            return x + module(self, h, lengths)
        q, k, v = self.m.qkv(h).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.m.proj(self.attend(self, q, k, v, lengths).transpose(1, 2).flatten(2))


def shown(lengths, tokens=7):
    return torch.arange(tokens) < lengths[:, None]


def sdpa(mask):
    return lambda s, q, k, v, n: F.scaled_dot_product_attention(q, k, v, mask(s, n))


def softmax(fill):
    return lambda s, q, k, v, n: fill(s, q @ k.transpose(-2, -1) * 8**-0.5, n).softmax(-1) @ v


def module(s, h, lengths):
    return s.module(h, h, h, key_padding_mask=lengths[:, None] <= torch.arange(7), need_weights=False)[0]


def changed(s, lengths):
    mask = shown(lengths)
    mask[:, 5] = True
    return mask[:, None, None]


def changed_by_a_view(s, lengths):
    mask = shown(lengths)
    mask[:, None, None][..., 5] = True
    return mask[:, None, None]


def zeros_changed(s, lengths):
    zeros = torch.zeros(3, 7).double()
    zeros[:, 0] = 2.0
    return zeros.masked_fill(~shown(lengths), -INF)[:, None, None]


def truths_changed(s, lengths):
    mask = shown(lengths)
    mask[:, 5] = True
    return torch.zeros(3, 7).double().masked_fill(~mask, -INF)[:, None, None]


def counted_twice(s, lengths):
    places = torch.arange(7)
    places[2:4] = 0
    return (places < lengths[:, None])[:, None, None]


LENGTHS = {
    "sdpa": sdpa(lambda s, n: shown(n)[:, None, None]),
    "sdpa, expanded": sdpa(lambda s, n: shown(n).view(3, 1, 1, 7).expand(3, 4, 7, 7)),
    "sdpa, negated": sdpa(lambda s, n: ~(torch.arange(0, 7) >= n.view(3, 1, 1, 1))),
    "sdpa, another order": sdpa(lambda s, n: (n.unsqueeze(-1) > torch.arange(7)[None]).unsqueeze(1).unsqueeze(1)),
    "masked_fill": softmax(lambda s, l, n: l.masked_fill(~shown(n)[:, None, None], -INF)),
    "where": softmax(lambda s, l, n: torch.where(shown(n)[:, None, None], l, -INF)),
    "where, the other way": softmax(lambda s, l, n: torch.where(shown(n)[:, None, None].logical_not(), -INF, l)),
    "method where": softmax(lambda s, l, n: l.where(shown(n)[:, None, None], -INF)),
    "module": module,
    "numbers": sdpa(lambda s, n: torch.zeros(3, 7).double().masked_fill(~shown(n), -INF)[:, None, None]),
    "numbers, where": softmax(lambda s, l, n: l + torch.where(shown(n), 0.0, -INF).double()[:, None, None]),
    "with a bias": softmax(lambda s, l, n: (l + s.m.table).masked_fill(~shown(n)[:, None, None], -INF)),
}
BIAS = {
    "mask of each query": sdpa(
        lambda s, n: torch.arange(7) < (n[:, None, None, None] - torch.arange(7)[:, None]).clip(1)
    ),
    "hides the first ones": sdpa(lambda s, n: torch.arange(7) >= n[:, None, None, None] - 1),
    "fills what is shown": softmax(lambda s, l, n: l.masked_fill(torch.arange(7) < n[:, None, None, None] - 1, -INF)),
    "another order of keys": sdpa(lambda s, n: shown(n)[:, [3, 1, 0, 2, 4, 6, 5]][:, None, None]),
    "flipped": sdpa(lambda s, n: shown(n).flip(-1)[:, None, None]),
    "changed in place": sdpa(changed),
    "changed by a view of it": sdpa(changed_by_a_view),
    "zeros changed in place": sdpa(zeros_changed),
    "truth values changed in place": sdpa(truths_changed),
    "places changed in place": sdpa(counted_twice),
    "each second key": sdpa(lambda s, n: (torch.arange(0, 14, 2) % 5 < n[:, None])[:, None, None]),
    "numbers, not hidden": sdpa(lambda s, n: torch.zeros(3, 7).double().masked_fill(~shown(n), -2.0)[:, None, None]),
    "numbers, shown ones are 1": sdpa(
        lambda s, n: torch.ones(3, 7).double().masked_fill(~shown(n), -INF)[:, None, None]
    ),
    "no lengths": sdpa(lambda s, n: torch.ones(7, 7, dtype=torch.bool).tril()),
    "another mask": softmax(lambda s, l, n: l.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -INF)),
}
LEFT = {
    "fills by a tensor": softmax(lambda s, l, n: torch.where(shown(n)[:, None, None], l, torch.tensor(-INF).double())),
    "fills by a small number": softmax(lambda s, l, n: l.masked_fill(~shown(n)[:, None, None], -2.0)),
}


def test_lengths_of_samples_prove_nothing_for_lengths_of_queries():
    """Both masks are (B, H, N, N) and computed alike; one is expanded, the other has a length for each query."""
    x, queries = torch.randn(3, 7, 32, dtype=torch.float64), torch.randint(1, 8, (3, 4, 7, 1))
    samples = torch.tensor([4, 7, 2])[:, None, None, None]
    for lengths, expand in ((samples, True), (queries, False), (samples, True)):
        mask = sdpa(lambda s, n, e=expand: (torch.arange(7) < n).expand(3, 4, 7, 7) if e else torch.arange(7) < n)
        done = compare(Model(mask), x, lengths, inner="eager", tolerance=1e-9)
        assert done["attention block"] == 1


@pytest.mark.parametrize("name", [*LENGTHS, *BIAS, *LEFT])
def test_a_mask_is_lengths_where_it_is_computed_as_such(name):
    used = []

    def inner(module, inputs):
        used.append(sum(node.target is shown_keys for node in module.graph.nodes))
        return module.forward

    torch.manual_seed(0)
    attend = (LENGTHS | BIAS | LEFT)[name]
    x = torch.randn(3, 7, 32, dtype=torch.float64)
    done = compare(Model(attend), x, torch.tensor([4, 7, 2]), inner=inner, tolerance=1e-9)
    assert done["attention block"] == (name not in LEFT)
    assert sum(used) == (name in LENGTHS)
