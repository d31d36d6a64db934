"""Masks in a graph: which become lengths of keys, which a bias, and the same numbers with each."""

import pytest
import torch
import torch.nn.functional as F
from checks import slow_but
from compiled import Spelled, compare

from vitfast.backend.arguments import shown_keys

INF = float("inf")


def shown(lengths, tokens=7):
    return torch.arange(tokens) < lengths[:, None]


def sdpa(mask):
    return lambda s, x, n: s.add(x, F.scaled_dot_product_attention(*s.heads(x), mask(s, n)))


def softmax(fill):
    def forward(s, x, n):
        q, k, v = s.heads(x)
        return s.add(x, fill(s, q @ k.transpose(-2, -1) * 8**-0.5, n).softmax(-1) @ v)

    return forward


def changed(s, lengths):
    mask = shown(lengths)
    mask[:, 5] = True
    return mask[:, None, None]


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
    "sdpa, negated": sdpa(lambda s, n: ~(torch.arange(0, 7) >= n.view(3, 1, 1, 1))),
    "masked_fill": softmax(lambda s, l, n: l.masked_fill(~shown(n)[:, None, None], -INF)),
    "where": softmax(lambda s, l, n: torch.where(shown(n)[:, None, None], l, -INF)),
    "method where": softmax(lambda s, l, n: l.where(shown(n)[:, None, None], -INF)),
    "module": lambda s, x, n: s.attend(x, key_padding_mask=n[:, None] <= torch.arange(7)),
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
    "changed in place": sdpa(changed),
    "truth values changed in place": sdpa(truths_changed),
    "places changed in place": sdpa(counted_twice),
    "each second key": sdpa(lambda s, n: (torch.arange(0, 14, 2) % 5 < n[:, None])[:, None, None]),
    "numbers, not hidden": sdpa(lambda s, n: torch.zeros(3, 7).double().masked_fill(~shown(n), -2.0)[:, None, None]),
    "numbers, shown ones are 1": sdpa(
        lambda s, n: torch.ones(3, 7).double().masked_fill(~shown(n), -INF)[:, None, None]
    ),
}
LEFT = {
    "fills by a tensor": softmax(lambda s, l, n: torch.where(shown(n)[:, None, None], l, torch.tensor(-INF).double())),
    "fills by a small number": softmax(lambda s, l, n: l.masked_fill(~shown(n)[:, None, None], -2.0)),
}
QUICK = ("masked_fill", "module", "hides the first ones", "places changed in place", "fills by a small number")


@pytest.mark.slow
def test_lengths_of_samples_prove_nothing_for_lengths_of_queries():
    """Both masks are (B, H, N, N) and computed alike; one is expanded, the other has a length for each query."""
    x, queries = torch.randn(3, 7, 32, dtype=torch.float64), torch.randint(1, 8, (3, 4, 7, 1))
    samples = torch.tensor([4, 7, 2])[:, None, None, None]
    for lengths, expand in ((samples, True), (queries, False), (samples, True)):
        mask = sdpa(lambda s, n, e=expand: (torch.arange(7) < n).expand(3, 4, 7, 7) if e else torch.arange(7) < n)
        done = compare(Spelled(mask), x, lengths, inner="eager", tolerance=1e-9)
        assert done["attention block"] == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", slow_but(QUICK, [*LENGTHS, *BIAS, *LEFT]))
def test_a_mask_is_lengths_where_it_is_computed_as_such(name):
    used = []

    def inner(module, inputs):
        used.append(sum(node.target is shown_keys for node in module.graph.nodes))
        return module.forward

    torch.manual_seed(0)
    attend = (LENGTHS | BIAS | LEFT)[name]
    x = torch.randn(3, 7, 32, dtype=torch.float64)
    done = compare(Spelled(attend), x, torch.tensor([4, 7, 2]), inner=inner, tolerance=1e-9)
    assert done["attention block"] == (name not in LEFT)
    assert sum(used) == (name in LENGTHS)
