"""Parts of a ViT in the spellings that models have: replaced by the operation that is named, and equal."""

import pytest
import torch
import torch.nn.functional as F
from compiled import block, compare
from torch import nn

from vitfast import backend


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.m, self.call = block("", "")[0], forward
        self.weight, self.bias = (nn.Parameter(torch.randn(32)) for _ in range(2))
        self.gate = nn.Parameter(torch.randn(1))
        self.module, self.separate = nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4, kdim=32, vdim=32)
        self.module.batch_first = self.separate.batch_first = True
        self.double()

    def forward(self, x):
        return self.call(self, x)

    def heads(self, x):
        """q, k and v (B, H, N, Dh)."""
        return self.m.qkv(self.m.norm1(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)

    def add(self, x, o):
        """The output layer for o (B, H, N, Dh), and the residual."""
        return x + self.m.proj(o.transpose(1, 2).flatten(2))

    def mlp(self, x):
        return self.m.fc2(F.gelu(self.m.fc1(x)))

    def mlp_half(self, x):
        return x + self.mlp(self.m.norm2(x))

    def attend(self, x, **masks):
        h = self.m.norm1(x)
        return x + self.module(h, h, h, need_weights=False, **masks)[0]


def layer_norm(s, x):
    x = x * 2.0
    root = torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    return (x - x.mean(-1, keepdim=True)) / root * s.weight + s.bias


def centred_first(s, x):
    x = x * 2.0
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt((d**2).mean(-1, keepdim=True) + 1e-5) * s.weight + s.bias


def rms_norm(s, x):
    x = (x * 2.0).float()
    return s.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).double()


def einsum(s, x):
    q, k, v = s.heads(x)
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(8**-0.5).softmax(-1)
    return s.add(x, torch.einsum("bhij,bhjd->bhid", weights, v))


def einsum_tokens_first(s, x):
    q, k, v = (t.transpose(1, 2) for t in s.heads(x))
    weights = torch.einsum("bihd,bjhd->bhij", q * 8**-0.5, k).softmax(-1)
    return s.add(x, torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2))


def einsum_alone(s, x):
    q, k, v = (t.transpose(1, 2) for t in s.heads(x))
    weights = torch.einsum("bihd,bjhd->bhij", q * 8**-0.5, k).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def bmm(s, x):
    q, k, v = (t.flatten(0, 1) for t in s.heads(x))
    return s.add(x, torch.bmm(torch.softmax(torch.bmm(q, k.mT) * 8**-0.5, -1), v).unflatten(0, (-1, 4)))


def bmm_alone(s, x):
    q, k, v = (t.flatten(0, 1) for t in s.heads(x))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.3, -1), v)


def tokens_first(s, x):
    x = x.transpose(0, 1)
    q, k, v = s.m.qkv(s.m.norm1(x)).unflatten(-1, (3, 4, 8)).permute(2, 1, 3, 0, 4).unbind(0)
    o = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
    return (x + s.m.proj(o)).transpose(0, 1)


def module_tokens_first(s, x):
    s.module.batch_first = False
    h = s.m.norm1(x := x.transpose(0, 1).contiguous())
    x = x + s.module(h, h, h, need_weights=False)[0]
    return x.view(7, 6, 16)


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


def layers_as_einsum(s, x):
    h, qkv, proj = s.m.norm1(x), s.m.qkv.weight.unflatten(0, (3, 4, 8)), s.m.proj.weight.unflatten(1, (4, 8))
    q, k, v = (torch.einsum("bnd,hed->bnhe", h, w) for w in qkv)
    q = (q + s.bias.view(4, 8)) * 8**-0.5
    o = torch.einsum("bhqk,bkhe->bqhe", torch.einsum("bqhe,bkhe->bhqk", q, k).softmax(-1), v)
    x = x + torch.einsum("bqhe,dhe->bqd", o, proj) + s.m.proj.bias
    h = torch.einsum("...d,fd->...f", s.m.norm2(x), s.m.fc1.weight) + s.m.fc1.bias
    return x + s.m.fc2(F.gelu(h))


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
    "layer norm, centred first": (centred_first, "LayerNorm"),
    "rms norm written out": (rms_norm, "RMSNorm"),
    "mlp alone": (lambda s, x: s.mlp(x), "MLP"),
    "tokens on a grid": (lambda s, x: s.mlp_half(x), "MLP block"),
    "tokens without samples": (lambda s, x: s.mlp_half(x), "MLP block"),
    "einsum": (einsum, "attention block"),
    "einsum, tokens first": (einsum_tokens_first, "attention block"),
    "einsum alone": (einsum_alone, "LayerNorm, attention"),
    "bmm": (bmm, "attention block"),
    "heads as samples": (heads_as_samples, "LayerNorm, attention"),
    "bmm alone": (bmm_alone, "LayerNorm, attention"),
    "module": (lambda s, x: s.attend(x), "attention block"),
    "module, bias": (lambda s, x: s.attend(x, attn_mask=s.m.table[0]), "attention block"),
    "module, mask": (lambda s, x: s.attend(x, attn_mask=torch.eye(7, dtype=torch.bool)), "attention block"),
    "module, mask of each head": (lambda s, x: s.attend(x, attn_mask=s.m.table.repeat(3, 1, 1)), "attention block"),
    "module, padding": (lambda s, x: s.attend(x, key_padding_mask=padding(x)), "attention block"),
    "module, separate layers": (separate, "attention block"),
    "sdpa, padding": (
        lambda s, x: s.add(x, F.scaled_dot_product_attention(*s.heads(x), ~padding(x)[:, None, None])),
        "attention block",
    ),
    "tokens first": (tokens_first, "attention block"),
    "module, tokens first": (module_tokens_first, "attention block"),
    "module by place": (module_by_place, "attention block"),
    "gated": (gated, "MLP block, attention block"),
    "layers as einsum": (layers_as_einsum, "MLP block, attention block"),
    "keywords": (keywords, "MLP block, attention block"),
    "rotary axes": (rotary_axes, "attention block"),
    "attention on a grid": (attention_on_a_grid, "attention block"),
    "parallel": (parallel, "LayerNorm, MLP, attention"),
    "post norm": (post_norm, "2 LayerNorm, MLP, attention"),
}
SHAPES = {"tokens on a grid": (2, 3, 4, 32), "attention on a grid": (2, 3, 4, 32), "tokens without samples": (21, 32)}


@pytest.mark.parametrize("name", CASES)
def test_a_part_is_replaced_and_equal(name):
    forward, expected = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(SHAPES.get(name, (3, 7, 32)), dtype=torch.float64)
    done = compare(Model(forward), x, tolerance=1e-5 if "rms" in name else 1e-9)
    assert ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in sorted(done.items())) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_without_eps_has_that_of_its_dtype(dtype):
    model = block("nn.LayerNorm(32), nn.LayerNorm(32)", "nn.RMSNorm(32), nn.RMSNorm(32)").to(dtype)
    x = 1e-3 * torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))  # so small that eps is seen
    done = compare(model, x.to(dtype), tolerance=1e-5 if dtype == torch.float32 else 3e-2)
    assert done == {"attention block": 1, "MLP block": 1}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["module, padding", "sdpa, padding", "relative bias", "norm without weight"])
def test_masks_and_constants_have_the_dtype_of_the_call(name, autocast):
    forward = CASES[name][0] if name in CASES else lambda s, x: s.m.inner(x)
    torch.manual_seed(0)
    model = Model(forward).to(torch.float32 if autocast else torch.bfloat16)
    if name == "relative bias":
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
