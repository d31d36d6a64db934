"""One change each in a block that is replaced: it is replaced and equal, or left; never a wrong output or gradient."""

import pytest
import torch
from compiled import ADD_A, ADD_M, ATTEND, HEADS, QKV, SDPA, WEIGHTS, A, M, block, change, compare, halves

GATED = "g, u = self.fc1(h).chunk(2, -1); m = F.linear({}, self.fc2.weight[:, :24])"


def sdpa(rest: str) -> tuple[str, str]:
    return HEADS, f"o = {SDPA}{rest})"


# name: (a text of SOURCE, what is put in its place, the halves that are replaced: a(ttention), m(lp), s(dpa alone)).
MUTANTS = {
    "none": ("", "", "am"),
    "sdpa": (*sdpa(""), "am"),
    "another scale": ("* 8**-0.5", "* 0.2", "am"),
    "another scale, sdpa": (*sdpa(", scale=0.2"), "am"),
    "scaled before": ("(q @ k.transpose(-2, -1)) * 8**-0.5", "(q * 0.5) @ (k / 3).transpose(-2, -1)", "am"),
    "scale of zero": ("* 8**-0.5", "* 0.0", None),
    "softmax in 32 bits": (WEIGHTS, "weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)", None),
    "softmax over queries": ("softmax(-1)", "softmax(-2)", "m"),
    "max subtracted": (WEIGHTS, "weights = (logits - logits.amax(-1, keepdim=True)).softmax(-1)", "am"),
    "sigmoid": (WEIGHTS, "weights = logits.sigmoid()", "m"),
    "causal": (*sdpa(", is_causal=True"), "m"),
    "causal, written out": (WEIGHTS, "weights = (logits + torch.ones(7, 7).triu(1) * -1e9).softmax(-1)", "am"),
    "bias": (WEIGHTS, "weights = (logits + self.table).softmax(-1)", "am"),
    "bias, sdpa": (*sdpa(", self.table[None]"), None),
    "mask": (*sdpa(", self.table[0] > -1"), "am"),
    "mask the other way": (WEIGHTS, "weights = logits.masked_fill(self.table > 1, -1e9).softmax(-1)", None),
    "swapped q and k": ("q, k, v = self", "k, q, v = self", "am"),
    "swapped q and v": ("q, k, v = self", "v, k, q = self", "am"),
    "k is q": (HEADS, "o = self.attend(q, q, v)", "m"),
    "head, three": (QKV, "q, k, v = self.qkv(h).reshape(B, N, 4, 3, 8).permute(3, 0, 2, 1, 4).unbind(0)", "am"),
    "head size first": (QKV, "q, k, v = self.qkv(h).reshape(B, N, 3, 8, 4).permute(2, 0, 4, 1, 3).unbind(0)", "m"),
    "q normalised": (HEADS, "o = self.attend(F.layer_norm(q, (8,)), k, v)", "m"),
    "heads mixed up": ("o.transpose(1, 2).reshape", "o.reshape", "m"),
    "two heads in another order": (HEADS, "o = self.attend(q, k, v).flip(1)", "m"),
    "over the samples": (A, "a = self.attention(h.transpose(0, 1)).transpose(0, 1)", "am"),
    "causal shift": (A, "a = self.attention(h).roll(1, 1)", "m"),
    "dropout on": (ATTEND, "return F.dropout(weights, 0.2) @ v", "m"),
    "dropout on, sdpa": (*sdpa(", dropout_p=0.1"), "m"),
    "dropout of rate 0": (ATTEND, "return F.dropout(weights, 0.0) @ v", "am"),
    "dropout on, mlp": (M, "m = self.fc2(F.dropout(F.gelu(self.fc1(h)), 0.1))", "a"),
    "noise": (ADD_A, "x = x + a * torch.rand(1, 1, 32, dtype=x.dtype)", None),
    "drop path": (ADD_A, "x = x + a * a.new_empty(a.shape[0], 1, 1).bernoulli_(0.5).div_(0.5)", "am"),
    "drop path of tokens": (ADD_A, "x = x + a * a.new_empty(1, a.shape[1], 1).bernoulli_(0.5)", "m"),
    "layer scale": (ADD_A, "x = x + self.vector * a", "am"),
    "layer scale of tokens": (ADD_A, "x = x + self.vector[:7, None] * a", "m"),
    "layer scale on both": (ADD_A, "x = (x + a) * self.vector", "am"),
    "post norm": (ADD_A, "x = self.norm1(x + self.attention(x))", "m"),
    "norm after": (A, "a = self.norm1(self.attention(x))", "m"),
    "two norms": (A, "a = self.attention(self.norm2(h))", "m"),
    "no norm": (A, "a = self.attention(x)", "m"),
    "norm without weight": ("h = self.norm1(x)", "h = F.layer_norm(x, (32,), eps=1e-3)", "am"),
    "rms norm": ("h = self.norm1(x)", "h = F.rms_norm(x, (32,), self.vector, 1e-4)", "am"),
    "rms norm written out": (
        "h = self.norm1(x)",
        "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4) * self.vector",
        "am",
    ),
    "norm over tokens": ("h = self.norm2(x)", "h = F.layer_norm(x.transpose(1, 2), (7,)).transpose(1, 2)", "a"),
    "another residual": (ADD_A, "x = h + a", "m"),
    "residual twice": (ADD_A, "x = x + x + a", "m"),
    "residual scaled": (ADD_A, "x = torch.add(x, a, alpha=0.5)", "m"),
    "subtracted": (ADD_A, "x = x - a", "m"),
    "tanh for erf": (M, "m = self.fc2(F.gelu(self.fc1(h), approximate='tanh'))", "am"),
    "quick gelu": (M, "u = self.fc1(h); m = self.fc2(u * torch.sigmoid(1.702 * u))", "am"),
    "nearly quick gelu": (M, "u = self.fc1(h); m = self.fc2(u * torch.sigmoid(1.70 * u))", "a"),
    "gelu written out": (M, "u = self.fc1(h); m = self.fc2(u * 0.5 * (1 + torch.erf(u / 2**0.5)))", "am"),
    "relu": (M, "m = self.fc2(F.relu(self.fc1(h)))", "a"),
    "gated": (M, GATED.format("F.silu(g) * u"), "am"),
    "gated, other half": (M, GATED.format("g * F.gelu(u)"), "am"),
    "gated twice": (M, GATED.format("F.silu(g) * F.silu(u)"), "a"),
    "bias missing": (*change("self.qkv.bias = self.fc2.bias = None"), "am"),
    "bias negative": (M, "m = F.linear(F.gelu(self.fc1(h)), self.fc2.weight, -self.fc2.bias)", "am"),
    "matmul": (M, "m = F.gelu(h @ self.fc1.weight.t() + self.fc1.bias) @ self.fc2.weight.T", "am"),
    "three layers": (
        QKV,
        "q, k, v = (F.linear(h, w).view(B, N, 4, 8).transpose(1, 2) for w in self.matrix.chunk(3))",
        "am",
    ),
    "detached branch": (A, "a = self.attention(h).detach()", "m"),
    "detached weight": (M, "m = F.linear(F.gelu(self.fc1(h)), self.fc2.weight.detach(), self.fc2.bias)", "am"),
    "detached input": ("h = self.norm2(x)", "h = self.norm2(x.detach())", "a"),
    "detached keys": (HEADS, "o = self.attend(q, k.detach(), v)", "m"),
    "straight through": (M, "m = self.fc2(F.gelu(self.fc1(h))); m = m + (m.round() - m).detach()", "a"),
    "no_grad inside": (M, "with torch.no_grad():\n            h = h * 1.0\n        " + M, "a"),
    "branch used elsewhere": (ADD_M, "y = x + m + a.mean()", "m"),
    "norm used elsewhere": (ADD_M, "y = x + m + h", "a"),
    "weights used elsewhere": (ATTEND, "self.seen = weights; return weights @ v", "m"),
    "residual in place, used": (ADD_A, "x = old = x * 1.0; x += a; x = x + old", "m"),
    "branch in place": (ADD_A, "a += x; x = a", "am"),
    "activation in place": (M, "m = self.fc2(F.silu(self.fc1(h), inplace=True))", "am"),
    "changed in between": (ADD_A, "w = x * 1.0; a = self.attention(self.norm1(w)); w.data.mul_(2); x = w + a", None),
    "aliased weights": (M, "m = F.linear(F.gelu(F.linear(h, self.matrix[:48])), self.matrix[:48].t())", "am"),
    "tied norms": (*change("self.norm2 = self.norm1"), "am"),
    "tied layers": (M, "m = F.linear(F.gelu(F.linear(h, self.proj.weight)), self.proj.weight)", "am"),
    "weight norm": (*change("parametrizations.weight_norm(self.fc1)"), "am"),
    "parametrised": (*change("parametrize.register_parametrization(self.qkv, 'weight', nn.Tanh())"), "am"),
    "lora": ("= self.qkv(h)", "= (self.qkv(h) + h @ self.matrix[:8].t() @ self.matrix.t()[:8])", "m"),
    "lora merged": (
        M,
        "m = F.linear(F.gelu(self.fc1(h)), self.fc2.weight + self.matrix[:32] @ self.matrix[:48].t())",
        "am",
    ),
    "quantised": (M, "w = (self.fc2.weight * 8).round() / 8; m = F.linear(F.gelu(self.fc1(h)), w)", "am"),
    "activations rounded": (M, "m = self.fc2((F.gelu(self.fc1(h)) * 8).round() / 8)", "a"),
    "clamped": (M, "m = self.fc2(F.gelu(self.fc1(h)).clamp(max=0.5))", "a"),
    "clamped far away": (M, "m = self.fc2(F.gelu(self.fc1(h)).clamp(max=1e4))", "a"),
    "numbers mended": (M, "m = self.fc2(torch.nan_to_num(F.gelu(self.fc1(h))))", "a"),
    "another branch far away": (M, "h = torch.where(h > 50, h * 2, h); " + M, "a"),
    "constant added": (M, "m = self.fc2(F.gelu(self.fc1(h))) + 1e-3", "a"),
    "vector added": (M, "m = self.fc2(F.gelu(self.fc1(h))) + self.vector", None),
    "token dropped": (HEADS, "o = self.attend(q, k.index_fill(2, torch.tensor([3]), 0.0), v)", "m"),
}


ALONE = {"q normalised", "two norms", "lora", "layer scale of tokens", "residual scaled"}  # attention without its block
QUICK = [pytest.param(name, marks=[pytest.mark.slow] if i % 9 else []) for i, name in enumerate(MUTANTS)]


@pytest.mark.parametrize("name", QUICK)
def test_a_changed_block_is_replaced_and_equal_or_left(name):
    old, new, expected = MUTANTS[name]
    model = block(old, new)
    tolerance = 1e-5 if "32 bits" in name else 1e-9
    done = compare(model, torch.randn(3, 7, 32, dtype=torch.float64), tolerance=tolerance)
    assert expected is None or halves(done) == expected
    assert done["attention"] or name not in ALONE
