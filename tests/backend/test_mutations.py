"""Changes of a block, also such as random numbers seldom show, or in the state around it: replaced and equal, or left.

What happens to a value on its way is changed by test_mutations_everywhere.py.
"""

from collections import Counter

import pytest
import torch
from compiled import ADD_A, ADD_M, ATTEND, HEADS, QKV, SDPA, WEIGHTS, A, M, block, change, compare, halves

from vitfast import backend

GATED = "g, u = self.fc1(h).chunk(2, -1); m = F.linear({}, self.fc2.weight[:, :24])"
NORM = "h = self.norm1(x)"
CROSS = "q, k, v = (F.linear(*t).view(B, N, 4, 8).transpose(1, 2) for t in zip((h, g, g), self.matrix.chunk(3)))"
COMPLEX = """f = torch.polar(self.table[0, :, :4].exp(), self.table[1, :, :4])
        turn = lambda t: torch.view_as_real(torch.view_as_complex(t.reshape(B, 4, N, 4, 2)) * f).flatten(3)
        q, k = q * 1.0, k * 1.0"""
HALF_TURN = "turn = lambda t: torch.cat([-t[..., 4:], t[..., :4]], -1)"
IN_PLACE = "w = x * 1.0; a = self.attention(self.norm1(w)); {}; x = w + a"


@torch.library.custom_op("mutants::softmax", mutates_args=())
def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=3)


@torch.library.custom_op("mutants::change", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


softmax.register_fake(torch.clone)
softmax.register_autograd(lambda ctx, g: g)


def rotary(q: str, k: str, before: str = "f = self.table[0, :, :1] * self.matrix[:7, :8]") -> tuple[str, ...]:
    """Rotary positions by tables of their own for q and k, which `before` computes."""
    turned = f"q = q * c + turn(q) * s; k = k * d + turn(k) * e; o = {SDPA})"
    return HEADS, f"{before}\n        {HALF_TURN}; (c, s), (d, e) = {q}, {k}; {turned}"


def mlp(text: str) -> tuple[str, str]:
    """A text in front of the MLP, whose input is h."""
    return M, f"{text}; {M}"


def whole(call: str, state: str = "") -> tuple[str, str]:
    """What is called in place of the block, which is self.inner."""
    return "def forward(self, x):", f"def forward(self, x):\n        {state}return {call}\n\n    def inner(self, x):"


def hook(text: str) -> tuple[str, str]:
    return change(f"self.{text}")


def logits(text: str) -> tuple[str, str]:
    return WEIGHTS, f"weights = {text}.softmax(-1)"


def sdpa(rest: str) -> tuple[str, str]:
    return HEADS, f"o = {SDPA}{rest})"


COS = "(f.cos(), f.sin())"
FROZEN = ["norm1.weight", "norm1.bias", "qkv.weight", "qkv.bias", "proj.weight", "fc1.weight", "fc2.bias"]
# name: (a text of SOURCE, what is put in its place, the next one, ..., which of a(ttention) and m(lp) is replaced).
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
    "causal, written out": (WEIGHTS, "weights = (logits + torch.ones(7, 7).triu(1) * -1e9).softmax(-1)", "am"),
    "bias": (WEIGHTS, "weights = (logits + self.table).softmax(-1)", "am"),
    "bias, sdpa": (*sdpa(", self.table[None]"), None),
    "mask": (*sdpa(", self.table[0] > -1"), "am"),
    "swapped q and k": ("q, k, v = self", "k, q, v = self", "am"),
    "k is q": (HEADS, "o = self.attend(q, q, v)", "m"),
    "head, three": (QKV, "q, k, v = self.qkv(h).reshape(B, N, 4, 3, 8).permute(3, 0, 2, 1, 4).unbind(0)", "am"),
    "head size first": (QKV, "q, k, v = self.qkv(h).reshape(B, N, 3, 8, 4).permute(2, 0, 4, 1, 3).unbind(0)", "m"),
    "q normalised": (HEADS, "o = self.attend(F.layer_norm(q, (8,)), k, v)", "m"),
    "heads mixed up": ("o.transpose(1, 2).reshape", "o.reshape", "m"),
    "two heads in another order": (HEADS, "o = self.attend(q, k, v).flip(1)", "m"),
    "over the samples": (A, "a = self.attention(h.transpose(0, 1)).transpose(0, 1)", "am"),
    "causal shift": (A, "a = self.attention(h).roll(1, 1)", "m"),
    "dropout on, sdpa": (*sdpa(", dropout_p=0.1"), "m"),
    "dropout of rate 0": (ATTEND, "return F.dropout(weights, 0.0) @ v", "am"),
    "noise": (ADD_A, "x = x + a * torch.rand(1, 1, 32, dtype=x.dtype)", None),
    "drop path": (ADD_A, "x = x + a * a.new_empty(a.shape[0], 1, 1).bernoulli_(0.5).div_(0.5)", "am"),
    "drop path of tokens": (ADD_A, "x = x + a * a.new_empty(1, a.shape[1], 1).bernoulli_(0.5)", "m"),
    "layer scale": (ADD_A, "x = x + self.vector * a", "am"),
    "layer scale of tokens": (ADD_A, "x = x + self.vector[:7, None] * a", "m"),
    "layer scale on both": (ADD_A, "x = (x + a) * self.vector", "am"),
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
    "detached weight": (M, "m = F.linear(F.gelu(self.fc1(h)), self.fc2.weight.detach(), self.fc2.bias)", "am"),
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
    "numbers mended": (M, "m = self.fc2(torch.nan_to_num(F.gelu(self.fc1(h))))", "a"),
    "vector added": (M, "m = self.fc2(F.gelu(self.fc1(h))) + self.vector", None),
    "token dropped": (HEADS, "o = self.attend(q, k.index_fill(2, torch.tensor([3]), 0.0), v)", "m"),
    "two switches": (*mlp("h = torch.where(x[0, 0, 0].detach() > 9, h, h * 2) + 0 * h"), "a"),
    "two masks": (*mlp("p, r = torch.arange(32) > 3, torch.arange(32) > 9; h = h.where(p, h.where(r, 2 * h))"), "a"),
    "switched by sample": (*mlp("h = torch.where(torch.arange(3)[:, None, None] > 1, h, 2 * h)"), "a"),
    "masked by a switch": (*mlp("h = h.masked_fill(torch.tensor(True), 0.0)"), "a"),
    "soft clamp of logits": (*logits("(1e4 * torch.tanh(logits / 1e4))"), "m"),
    "clamped by amax": (*mlp("h = -torch.stack([-h, h * 0 - 1e3]).amax(0)"), "a"),
    "two eps": (NORM, "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7 + 1e-8) * self.vector", "m"),
    "number that the tokens hide": (*mlp("h = h * ((h * 0 + 1).sum(1, keepdim=True) / 11.0)"), "a"),
    "inference mode ends inside": (
        "h = self.norm2(x)",
        "with torch.inference_mode(): h = self.norm2(x)\n        h = h.clone()",
        "a",
    ),
    "branch far below rounding": (ADD_A, "x = x + 1e-13 * a", HEADS, f"k = q; o = {SDPA})", "m"),
    "16 bits of a branch": (ADD_M, "y = x + m.half().double()", "a"),
    "16 bits of another tensor": (*mlp("h = h.type_as(x.new_ones(1, dtype=torch.bfloat16)).type_as(x)"), "a"),
    "named as a known function": (*mlp("h = torch.ops.mutants.softmax(h)"), "a"),
    "changed in between, list": (ADD_A, IN_PLACE.format("torch._foreach_mul_([w.data], 2.0)"), "m"),
    "changed in between, custom": (ADD_A, IN_PLACE.format("torch.ops.mutants.change(w.data)"), "m"),
    "changed in between, view": (ADD_A, IN_PLACE.format("w.data[0, 0].fill_(2.0)"), "m"),
    "changed in between, out": (ADD_A, IN_PLACE.format("torch.mul(x.data, 2.0, out=w.data)"), "m"),
    "changed in between, unknown function": (ADD_A, IN_PLACE.format("doubled_in_place(w.data)"), "m"),
    "changed in between, method": (ADD_A, IN_PLACE.format("w.data.__imul__(2.0)"), "m"),
    "changed in between, NumPy": (ADD_A, IN_PLACE.format("n = w.data.numpy(); n *= 2.0"), "m"),
    "running statistics": (
        *change("self.bn = nn.BatchNorm1d(32)"),
        *(
            A,
            "self.bn.running_mean.fill_(0.5); " + A,
            ADD_A,
            "a = a * self.bn.running_mean; self.bn(self.matrix); x = x + a",
        ),
        "m",
    ),
    "rotary": (*rotary(COS, COS), "am"),
    "rotary, other sign": (*rotary("(f.cos(), -f.sin())", "(f.cos(), -f.sin())"), "am"),
    "rotary, sign of k": (*rotary(COS, "(f.cos(), -f.sin())"), "m"),
    "rotary of q alone": (*rotary(COS, "(1.0, 0.0)"), "m"),
    "rotary of k alone": (*rotary("(1.0, 0.0)", COS), "m"),
    "rotary, other frequencies": (*rotary(COS, "((2 * f).cos(), (2 * f).sin())"), "m"),
    "rotary, shifted": (*rotary(COS, "(f.roll(1, 0).cos(), f.roll(1, 0).sin())"), "m"),
    "rotary, detached": (*rotary(COS, "(f.detach().cos(), f.detach().sin())"), "m"),
    "rotary, changed": (
        *rotary("p", "r", f"f = self.matrix[:7, :8].detach() * 1.0; p = {COS}; f[0] = 2.0; r = {COS}"),
        "m",
    ),
    "rotary, random": (*rotary("(torch.poisson(f), f)", "(torch.poisson(f), f)", "f = torch.ones(7, 8).double()"), "m"),
    "rotary, pairs": (*rotary(COS, COS), "t[..., 4:], t[..., :4]], -1)", "t[..., 1::2], t[..., ::2]], -1)", "m"),
    "rotary of the tokens": (*rotary(COS, COS, "f = h.mean((0, 2))[:, None] * self.matrix[:7, :8]"), "m"),
    "rotary without gradient": (
        *(
            NORM,
            f"f = self.matrix[:7, :8]; self.p = {COS}\n        with torch.no_grad(): self.r = {COS}\n        {NORM}",
        ),
        *(*rotary("self.p", "self.r", ""), "m"),
    ),
    "complex rotary": (HEADS, f"{COMPLEX}; q, k = turn(q), turn(k); o = {SDPA})", None),
    "sink": (
        WEIGHTS,
        "weights = torch.cat([logits, self.vector[:4, None, None].expand(3, 4, 7, 1)], -1).softmax(-1)[..., :7]",
        "m",
    ),
    "zero key": (HEADS, "z = 0 * q[:, :, :1]; o = self.attend(q, torch.cat([k, z], 2), torch.cat([v, z], 2))", "m"),
    "talking heads": (WEIGHTS, "weights = torch.einsum('bhnm,hg->bgnm', logits, self.matrix[:4, :4]).softmax(-1)", "m"),
    "q and k normalised": (HEADS, "o = self.attend(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)", "m"),
    "soft caps": (*logits("(5 * torch.tanh(logits / 5))"), "m"),
    "bias of a sample": (*logits("(logits + self.matrix[:3, None, None, :7])"), None),
    "bias transposed": (*logits("(logits + self.table.mT)"), "am"),
    "bias of queries, whose gradient is zero but for rounding": (
        *logits("(logits + self.table[..., :1])"),
        *(HEADS, "o = self.attend(q, k, q)"),  # the bias is the last input of the region
        "m",
    ),
    "bias of the tokens": (*logits("(logits + k[..., None, :, 0])"), "m"),
    "shared keys": (HEADS, "o = self.attend(q, k[:, :1].expand(q.shape), v[:, :1].expand(q.shape))", "m"),
    "grouped keys": (HEADS, "o = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)", "m"),
    "other tokens": (QKV, f"g = h.flip(1); {CROSS}", "m"),
    "other source": (QKV, f"g = self.matrix[:21].view(3, 7, 32); {CROSS}", "m"),
    "values are the tokens": (HEADS, "o = self.attend(q, k, h.view(B, N, 4, 8).transpose(1, 2))", "m"),
    "windows": (
        A,
        "a = self.attention(torch.cat([h[:, :3], h[:, 3:6]])); a = torch.cat([a[:3], a[3:], h[:, 6:]], 1)",
        "m",
    ),
    "registers": (A, "a = self.attention(torch.cat([self.matrix[:1].expand(3, 1, 32), h], 1))[:, 1:]", "m"),
    "tokens shifted": (*mlp("h = torch.cat([h[:, 1:, :16], h[:, :1, :16]], 1); h = torch.cat([h, h], -1)"), "a"),
    "heads in another order": (HEADS, "o = self.attend(q[:, [1, 0, 2, 3]], k[:, [1, 0, 2, 3]], v)", "m"),
    "square weight transposed": (
        "return self.proj(o)",
        "return F.linear(o, self.proj.weight.t(), self.proj.bias)",
        "am",
    ),
    "hidden by -inf": (*logits("logits.masked_fill(torch.ones(7, 7).triu(1) > 0, float('-inf'))"), "am"),
    "hidden in place": (*logits("logits.masked_fill_(torch.ones(7, 7).triu(1) > 0, float('-inf'))"), "am"),
    "hidden by where": (*logits("torch.where(torch.ones(7, 7).tril() > 0, logits + self.table, float('-inf'))"), "am"),
    "hidden by its method": (*logits("logits.where(torch.ones(7, 7).tril() > 0, float('-inf'))"), "am"),
    "hidden and seen again": (
        *logits("logits.masked_fill((g := torch.ones(7, 7).triu(1) > 0), float('-inf')).masked_fill(g, 0.0)"),
        "m",
    ),
    "scale is a tensor": (*logits("(logits * self.vector[0])"), "am"),
    "scale is a switch": (*logits("(logits * torch.tensor(True))"), "am"),
    "scale divides": (*logits("(logits / self.vector[0].exp() * self.vector[1])"), "am"),
    "scale after a bias": (*logits("((logits + self.table) * self.vector[0])"), "m"),
    "scale of q, sdpa": (HEADS, f"q = q * self.vector[0]; o = {SDPA})", "am"),
    "scale of v": (HEADS, f"v = v * self.vector[0]; o = {SDPA})", "m"),
    "scale of a head": (*logits("(logits * self.vector[:4, None, None])"), "m"),
    "probabilities twice": (ATTEND, "return weights @ (weights @ v)", "m"),
    "squared probabilities": (ATTEND, "return weights.square() @ v", "m"),
    "forward hook": (*hook("fc1.register_forward_hook(lambda m, i, o: o * 2)"), "a"),
    "backward hook": (*hook("fc1.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))"), None),
    "hook of a parameter": (*hook("fc1.weight.register_hook(lambda g: g * 2)"), "am"),
    "hook of the input": (NORM, f"x.register_hook(lambda g: g * 2); {NORM}", None),
    "checkpointed half": (A, "a = torch.utils.checkpoint.checkpoint(self.attention, h, use_reentrant=False)", "m"),
    "checkpointed": (*whole("torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)"), "am"),
    "called twice": (*whole("self.inner(x) + self.inner(2 * x)"), "aamm"),
    "called on itself": (*whole("self.inner(self.inner(x))"), "aamm"),
    "under autocast of 16 bits": (*whole("self.inner(x)", "with torch.autocast('cpu', torch.bfloat16): "), None),
    "view of what comes out": (HEADS, "o = self.attend(q, k, v).view(B, 28, 8).view(B, 4, 7, 8)", NORM, "h = x", "m"),
    "noise on what comes out": (HEADS, "o = self.attend(q, k, v); o = o + torch.rand_like(o)", NORM, "h = x", "m"),
    "strides of what comes out": (ADD_M, "y = x + m; y = y * y.stride(0)", "am"),
    "result changed in place": ("return y", "y.mul_(2.0); return y + x", "am"),
    "x changed afterwards": ("return y", "x.data.mul_(2.0); return y + x", None),
    **{f"frozen {name}": (*hook(f"{name}.requires_grad_(False)"), "am") for name in FROZEN},
}

ALONE = {"q normalised", "two norms", "lora", "layer scale of tokens", "residual scaled"}  # attention without its block
ROWS = torch.randn(8, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INPUTS = {
    "one sample": ROWS[:1, :7],
    "one token": ROWS[:3, :1],
    "transposed": ROWS[:7, :3].transpose(0, 1),
    "columns first": ROWS[:3, :7].mT.contiguous().mT,
    "expanded": ROWS[:1, :7].expand(3, 7, 32),
    "samples, tokens and heads are as many": ROWS[:4, :4],
    "samples as many as tokens": ROWS,
    "samples as many as columns": ROWS.repeat(4, 1, 1)[:, :7],
    "40 tokens": ROWS.repeat(1, 5, 1),
    "tiny": ROWS[:3, :7] * 1e-4,
    "large": ROWS[:3, :7] * 1e4,
}
LENGTHS = {  # what depends on a length that may be another one in the next call
    "factor": (ADD_A, "x = x + a * (x.shape[0] - 1)"),
    "power": (ADD_M, "y = x + m.pow(x.shape[0] - 1)"),
    "samples mixed by a view": (A, "a = self.attention(h.view(2, -1, 7, 32).transpose(0, 1).reshape(h.shape))"),
    "samples rolled": (A, "B = h.shape[0]; a = self.attention(torch.cat([h[B - 2 :], h[: B - 2]]))"),
    "samples turned by fours": (A, "B = h.shape[0]; a = self.attention(torch.cat([h[B - 4 :], h[: B - 4]]))"),
}


def quick(names, every: int) -> list:
    """All but each `every`th are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if i % every else []) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", quick(MUTANTS, 11))
def test_a_changed_block_is_replaced_and_equal_or_left(name):
    *texts, expected = MUTANTS[name]
    tokens = 40 if "tokens hide" in name else 7
    x = torch.randn(3, tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tolerance = 2e-2 if "autocast" in name else 1e-5 if "32 bits" in name else 1e-9
    done = compare(block(*texts), x, tolerance=tolerance)
    assert expected is None or halves(done) == expected
    assert done["attention"] or name not in ALONE


@pytest.mark.parametrize("name", quick(INPUTS, 6))
@pytest.mark.parametrize("over", ["tokens", "samples"])
def test_inputs_of_many_kinds(name, over):
    texts = () if over == "tokens" else (A, "a = self.attention(h.transpose(0, 1)).transpose(0, 1)")
    assert halves(compare(block(*texts), INPUTS[name], tolerance=1e-8)) == "am"


@pytest.mark.parametrize("name", quick(LENGTHS, 5))
def test_a_length_that_changes_is_no_number(name):
    torch._dynamo.reset()
    model = block(*LENGTHS[name])
    compiled = backend.compile(model, options={"inner": "eager"})
    for batch in (6, 8):
        x = ROWS[:batch, :7].clone()
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-9, rtol=1e-9)
    assert halves(Counter(entry.kind for entry in backend.report().replaced)) == ("a" if name == "power" else "m")


def test_scales_that_dynamic_true_makes_inputs():
    torch._dynamo.reset()
    model, x = block(*change("self.scale = 0.3"), "* 8**-0.5", "* self.scale"), ROWS[:3, :7]
    compiled = backend.compile(model, dynamic=True, options={"inner": "eager"})
    for model[0].scale in (0.3, 0.7):
        with torch._dynamo.config.patch(error_on_recompile=model[0].scale == 0.7):
            torch.testing.assert_close(compiled(x), model(x), atol=1e-9, rtol=1e-9)
    assert halves(Counter(entry.kind for entry in backend.report().replaced)) == "am"


@pytest.mark.parametrize("equal", [False, True])
def test_lengths_that_are_equal_by_chance_are_two(equal):
    """Dynamo gives equal lengths one symbol, unless told not to."""
    torch._dynamo.reset()
    attend = lambda q, k: torch.nn.functional.scaled_dot_product_attention(q, k, k)  # noqa: E731
    with torch.fx.experimental._config.patch(use_duck_shape=equal):
        compiled = backend.compile(attend, dynamic=True, options={"inner": "eager"})
        for queries, keys in ((7, 7), (8, 5)):
            q, k = (ROWS[:, :n].unflatten(-1, (4, 8)).transpose(1, 2) for n in (queries, keys))
            torch.testing.assert_close(compiled(q, k), attend(q, k))
            assert len(backend.report().replaced) == (equal and queries == keys)
