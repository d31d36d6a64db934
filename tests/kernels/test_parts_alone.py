"""Launchers of a part of an operation, which the tuner times alone."""

import torch
import torch.nn.functional as F
from library_cases import SCALE, interpreted, providers, random

from vitfast.kernels import mlp, rows, weight_grad
from vitfast.kernels.attention import (
    attention_bwd,
    attention_bwd_dkdv,
    attention_bwd_dq,
    attention_fwd,
)


@interpreted
def test_halves_of_the_tiled_backward_alone():
    qkv, do = random(2, 70, 2, 32, torch.float32)
    q, k, v = qkv.unbind(2)
    with providers():
        o, lse = attention_fwd(q, k, v, SCALE)
        whole, total = attention_bwd(q, k, v, o, lse, do, SCALE, want_bias_grad=True)
        delta = torch.full_like(lse, float("nan"))
        dq, q_sums = attention_bwd_dq(q, k, v, o, lse, do, SCALE, delta=delta, want_sums=True)
        dk, dv, kv_sums = attention_bwd_dkdv(q, k, v, lse, delta, do, SCALE, want_sums=True)
        assert (
            attention_bwd_dq(q, k, v, o, lse, do, SCALE)[1]
            is attention_bwd_dkdv(q, k, v, lse, delta, do, SCALE)[2]
            is None
        )
    assert torch.equal(torch.stack([dq, dk, dv], 2), whole) and torch.equal(torch.cat([q_sums, kv_sums]), total)
    torch.testing.assert_close(delta, (o * do).sum(-1).transpose(1, 2), atol=1e-5, rtol=1e-5)


@interpreted
def test_small_sums_alone():
    part, out = torch.randn(4, 24, 16), torch.empty(16)
    with providers():
        assert (weight_grad.sum_products(part, None, torch.float32)[0] - part.sum(0)).abs().max() < 1e-5
        rows.column_sums([(part[0], out)], 24, 16, part)
        torch.testing.assert_close(out, part[0].sum(0))
        pre, dy = torch.randn(24, 16, requires_grad=True), torch.randn(24, 16)
        (exact,) = torch.autograd.grad(F.gelu(pre), pre, dy)
        dpre, dbias = mlp.gelu_bwd(dy, pre.detach(), "gelu", True)
    torch.testing.assert_close(dpre, exact, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dbias, exact.sum(0), atol=1e-5, rtol=1e-5)
