"""Parts of a ViT in the spellings that models have: replaced by the operation that is named, and equal."""

import pytest
import torch
import torch.nn.functional as F
from checks import slow_but
from compiled import Spelled, block, compare
from torch import nn

from vitfast import backend


def layer_norm(s, x):
    x = x * 2.0
    root = torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    return (x - x.mean(-1, keepdim=True)) / root * s.weight + s.bias


def einsum_tokens_first(s, x):
    q, k, v = (t.transpose(1, 2) for t in s.heads(x))
    weights = torch.einsum("bihd,bjhd->bhij", q * 8**-0.5, k).softmax(-1)
    return s.add(x, torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2))


def einsum_alone(s, x):
    q, k, v = (t.transpose(1, 2) for t in s.heads(x))
    weights = torch.einsum("bihd,bjhd->bhij", q * 8**-0.5, k).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def bmm_alone(s, x):
    q, k, v = (t.flatten(0, 1) for t in s.heads(x))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.3, -1), v)


def module_by_place(s, x):
    m, h = s.module, s.m.norm1(x := x.transpose(0, 1).contiguous())
    given = m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias
    x = x + F.multi_head_attention_forward(h, h, h, 32, 4, *given, True, None, False, s.m.table[0])[0]
    return x.view(7, 6, 16)


def heads_as_samples(s, x):
    """Attention of (B H, N, Dh) with a bias that is computed from q, as SAM has it."""
    q, k, v = (t.flatten(0, 1) for t in s.heads(x))
    return F.scaled_dot_product_attention(q, k, v, q @ s.m.matrix[:8, :7] * s.bias[:7])


def gated(s, x):
    """Branches that a learnt number scales, as Mllama has it."""
    x = x + s.gate.tanh() * s.m.attention(s.m.norm1(x))
    return x + s.gate.tanh() * s.mlp(s.m.norm2(x))


def rotary_axes(s, x):
    """Each third of a head rotated by a table of its own, the rest left."""

    def rotated(t):
        parts = [t[..., i : i + 2] for i in (0, 2, 4)]
        parts = [p * c + torch.stack([-p[..., 1], p[..., 0]], -1) * s for p, (c, s) in zip(parts, tables)]
        return torch.cat([*parts, t[..., 6:]], -1)

    angles = [s.weight[i : i + 7, None].repeat(1, 2) for i in (0, 7, 14)]
    tables = [(a.cos(), a.sin()) for a in angles]
    q, k, v = s.heads(x.to(x.device))
    q, k = rotated(q).type_as(v), rotated(k).type_as(v)
    return s.add(x.to(torch.float64), F.scaled_dot_product_attention(q, k, v))


def attention_on_a_grid(s, x):
    B, H, W, D = x.shape
    q, k, v = s.m.qkv(s.m.norm1(x)).reshape(B, H * W, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return x + s.m.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, H, W, D))


def keywords(s, x):
    """Arguments by name, operands of einsum as a list."""
    q, k, v = s.heads(x)
    weights = torch.softmax(input=torch.matmul(input=q, other=k.mT) * 8**-0.5, dim=-1)
    x = torch.add(input=x, other=s.m.proj(torch.einsum("bhij,bhjd->bihd", [weights, v]).flatten(2)))
    h = F.layer_norm(input=x, normalized_shape=(32,), weight=s.m.norm2.weight, bias=s.m.norm2.bias)
    u = F.gelu(input=F.linear(input=h, weight=s.m.fc1.weight, bias=s.m.fc1.bias))
    return x.add(other=F.linear(input=u, weight=s.m.fc2.weight, bias=s.m.fc2.bias))


def padding(x):
    return torch.arange(x.shape[1])[None] >= torch.arange(x.shape[0])[:, None] + 4


def separate(s, x):
    h = s.m.norm1(x)
    return x + s.separate(h, h, h, need_weights=False)[0]


def parallel(s, x):
    h = s.m.norm1(x)
    return x + s.m.attention(h) + s.mlp(h)


def post_norm(s, x):
    x = s.m.norm1(x + s.m.attention(x))
    return s.m.norm2(x + s.mlp(x))


CASES = {
    "layer norm written out": (layer_norm, "LayerNorm"),
    "tokens without samples": (lambda s, x: s.mlp_half(x), "MLP block"),
    "einsum, tokens first": (einsum_tokens_first, "attention block"),
    "einsum alone": (einsum_alone, "LayerNorm, attention"),
    "heads as samples": (heads_as_samples, "LayerNorm, attention"),
    "bmm alone": (bmm_alone, "LayerNorm, attention"),
    "module, bias": (lambda s, x: s.attend(x, attn_mask=s.m.table[0]), "attention block"),
    "module, mask": (lambda s, x: s.attend(x, attn_mask=torch.eye(7, dtype=torch.bool)), "attention block"),
    "module, mask of each head": (lambda s, x: s.attend(x, attn_mask=s.m.table.repeat(3, 1, 1)), "attention block"),
    "module, padding": (lambda s, x: s.attend(x, key_padding_mask=padding(x)), "attention block"),
    "module, separate layers": (separate, "attention block"),
    "module by place": (module_by_place, "attention block"),
    "gated": (gated, "MLP block, attention block"),
    "keywords": (keywords, "MLP block, attention block"),
    "rotary axes": (rotary_axes, "attention block"),
    "attention on a grid": (attention_on_a_grid, "attention block"),
    "parallel": (parallel, "LayerNorm, MLP, attention"),
    "post norm": (post_norm, "2 LayerNorm, MLP, attention"),
}
SHAPES = {"attention on a grid": (2, 3, 4, 32), "tokens without samples": (21, 32)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CASES)
def test_a_part_is_replaced_and_equal(name):
    forward, expected = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(SHAPES.get(name, (3, 7, 32)), dtype=torch.float64)
    done = compare(Spelled(forward), x, tolerance=1e-9)
    assert ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in sorted(done.items())) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_without_eps_has_that_of_its_dtype(dtype):
    model = block("nn.LayerNorm(32), nn.LayerNorm(32)", "nn.RMSNorm(32), nn.RMSNorm(32)").to(dtype)
    x = 1e-3 * torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))  # so small that eps is seen
    done = compare(model, x.to(dtype), tolerance=1e-5 if dtype == torch.float32 else 3e-2)
    assert done == {"attention block": 1, "MLP block": 1}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", slow_but(["module, padding"], ["module, padding", "bias", "norm without weight"]))
def test_masks_and_constants_have_the_dtype_of_the_call(name, autocast):
    forward = CASES[name][0] if name in CASES else lambda s, x: s.m.inner(x)
    torch.manual_seed(0)
    model = Spelled(forward).to(torch.float32 if autocast else torch.bfloat16)
    if name == "bias":
        model.m.attend = lambda q, k, v: (q @ k.mT * 8**-0.5 + model.m.table).softmax(-1) @ v
    if name == "norm without weight":
        model.m.norm1 = nn.LayerNorm(32, elementwise_affine=False)
    model.m.inner = lambda x: x + model.m.attention(model.m.norm1(x))
    torch._dynamo.reset()
    x = torch.randn(3, 7, 32, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        found, expected = backend.compile(model, options={"inner": "eager"})(x), model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=0.1, rtol=2e-2)
    assert [entry.kind for entry in backend.report().replaced] == ["attention block"]
