"""Vision transformers as research repositories write them, for the page of families.

Each block has the arithmetic of a popular style in code of its own: no library's classes, no two blocks spelled alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H = 32, 2  # width and heads


class HandwrittenViT(nn.Module):
    """Patches by a convolution, learned positions, two blocks of one style, a norm."""

    def __init__(self, block: type[nn.Module]):
        super().__init__()
        self.patches = nn.Conv2d(3, D, 8, 8)
        self.positions = nn.Parameter(torch.zeros(1, 16, D))
        self.blocks = nn.ModuleList([block(), block()])
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class NormInside(nn.Module):
    """vit-pytorch's style: the norm belongs to the branch, q, k, v by chunk, softmax as a module."""

    def __init__(self):
        super().__init__()
        self.norm, self.to_qkv, self.attend = nn.LayerNorm(D), nn.Linear(D, 3 * D, bias=False), nn.Softmax(dim=-1)
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.0))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(D), nn.Linear(D, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, D), nn.Dropout(0.0)
        )

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).movedim(2, 1) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        weights = self.attend(torch.matmul(q, k.transpose(-1, -2)) * (D // H) ** -0.5)
        return self.to_out(torch.matmul(weights, v).movedim(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x) + x
        return self.feed_forward(x) + x


class WrittenOut(nn.Module):
    """The style of MAE's repository: qkv in one layer, indexed, the softmax written out."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)
        self.qkv, self.proj, self.drop = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Dropout(0.0)
        self.fc1, self.act, self.fc2 = nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, H, width // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = self.drop(((q @ k.transpose(-2, -1)) * (width // H) ** -0.5).softmax(dim=-1))
        return self.drop(self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.fc2(self.drop(self.act(self.fc1(self.norm2(x))))))


class Scaled(nn.Module):
    """The style of DINOv2's repository: q scaled first, layer scale, a gated MLP of one layer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.w12, self.w3 = nn.Linear(D, 96), nn.Linear(48, D)
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, H, D // H)
        q, k, v = torch.unbind(qkv, 2)
        q = q.transpose(1, 2) * (D // H) ** -0.5
        o = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), scale=1.0)
        x = x + self.proj(o.transpose(1, 2).reshape(x.shape)) * self.gamma1
        gate, up = self.w12(self.norm2(x)).chunk(2, dim=-1)
        return x + self.w3(F.silu(gate) * up) * self.gamma2


class TokensFirst(nn.Module):
    """The style of CLIP's repository: nn.MultiheadAttention, tokens first, norms in fp32, quick GELU."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.fc, self.proj = nn.MultiheadAttention(D, H), nn.Linear(D, 64), nn.Linear(64, D)

    def norm(self, layer: nn.LayerNorm, x: Tensor) -> Tensor:
        return layer(x.float()).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 2)
        h = self.norm(self.ln_1, x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        h = self.fc(self.norm(self.ln_2, x))
        return (x + self.proj(h * torch.sigmoid(1.702 * h))).permute(1, 0, 2)


class Modern(nn.Module):
    """ViT-5's style without q and k norm: RMSNorm written out, rotary positions, layer scale, SwiGLU."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in ((D, 48), (D, 48), (48, D)))
        self.scale1, self.scale2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        angle = torch.outer(torch.arange(16.0), 100.0 ** -torch.linspace(0, 1, D // H // 2)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def turn(self, t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x, self.norm1)).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v).transpose(1, 2).flatten(2)
        x = x + self.scale1 * self.out(o)
        h = self.norm(x, self.norm2)
        return x + self.scale2 * self.down(F.silu(self.gate(h)) * self.up(h))


class Sequentials(nn.Module):
    """MobileCLIP's style: branches as nn.Sequential, q scaled before the product, softmax in fp32."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv_proj, self.out_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            qkv = self.qkv_proj(x).reshape(batch, tokens, 3, H, -1).transpose(1, 3).contiguous()
            q, k, v = qkv[:, :, 0] * (D // H) ** -0.5, qkv[:, :, 1], qkv[:, :, 2]
            weights = F.softmax(torch.matmul(q, k.transpose(-1, -2)).float(), dim=-1).to(q.dtype)
            return self.out_proj(torch.matmul(weights, v).transpose(1, 2).reshape(batch, tokens, -1))

    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(D), self.Attention(), nn.Dropout(0.0))
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 64), nn.SiLU(), nn.Linear(64, D), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Einsums(nn.Module):
    """The style of JAX code: q, k and v by einsum with three-axis weights, tanh GELU written out."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Parameter(torch.zeros(D, H, D // H)) for _ in range(3))
        self.out, self.wi, self.wo = (nn.Parameter(torch.zeros(*size)) for size in ((H, D // H, D), (D, 64), (64, D)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (torch.einsum("bnd,dhk->bnhk", h, w) for w in (self.q, self.k, self.v))
        weights = (torch.einsum("bnhk,bmhk->bhnm", q, k) / (D // H) ** 0.5).softmax(dim=-1)
        x = x + torch.einsum("bnhk,hkd->bnd", torch.einsum("bhnm,bmhk->bnhk", weights, v), self.out)
        h = torch.einsum("bnd,df->bnf", self.norm2(x), self.wi)
        h = 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))
        return x + torch.einsum("bnf,fd->bnd", h, self.wo)


class Separate(nn.Module):
    """A textbook's style: one layer each for q, k and v, heads by view, logits divided, GELU by erf."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.key, self.query, self.value, self.proj = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 64), nn.Linear(64, D)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), H, x.size(2) // H).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        k, q, v = self.heads(self.key(h)), self.heads(self.query(h)), self.heads(self.value(h))
        weights = F.softmax(q @ k.transpose(-2, -1) / k.size(-1) ** 0.5, dim=-1)
        x = x + self.proj((weights @ v).transpose(1, 2).contiguous().view(x.size()))
        h = self.up(self.ln2(x))
        return x + self.down(h * 0.5 * (1.0 + torch.erf(h / 2**0.5)))


STYLES = {
    "as in vit-pytorch": NormInside,
    "as in MAE's repository": WrittenOut,
    "as in DINOv2's repository": Scaled,
    "as in CLIP's repository": TokensFirst,
    "as ViT-5": Modern,
    "as in MobileCLIP": Sequentials,
    "as in JAX": Einsums,
    "as in a textbook": Separate,
}
