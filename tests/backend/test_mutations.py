"""Changes of a block: replaced and equal, or left; each is looked at in place and in compiled code.

First, changes of several blocks by many edits, at each value on its way. Then, changes that random numbers seldom show,
and those in the state around a block.
"""

import re
from collections import Counter

import pytest
import torch
from checks import slow_but
from compiled import (
    ADD_A,
    ADD_M,
    ATTEND,
    HEADS,
    QKV,
    SDPA,
    SOURCE,
    WEIGHTS,
    A,
    M,
    block,
    change,
    compare,
    halves,
    replaced,
)

from vitfast import backend

# Each line names the values of which a mutant changes one.
MLP = "u = self.fc1(h)\n        g = F.gelu(u)\n        m = self.fc2(g)"
GATED_MLP = (
    "u = self.fc1(h)\n        g = F.silu(u[..., :24])\n        m = F.linear(g * u[..., 24:], self.fc2.weight[:, :24])"
)
ROPE = f"""cos, sin = self.matrix[:7, :8], self.matrix[7:14, :8]
        i = torch.cat([-q[..., 4:], q[..., :4]], -1)
        q = q * cos + i * sin
        j = torch.cat([-k[..., 4:], k[..., :4]], -1)
        k = k * cos + j * sin
        o = {SDPA})"""
THREE = """w1, w2, w3 = self.matrix.chunk(3)
        q = F.linear(h, w1, self.vector).view(B, N, 4, 8).transpose(1, 2)
        k = F.linear(h, w2).view(B, N, 4, 8).transpose(1, 2)
        v = F.linear(h, w3, self.vector).view(B, N, 4, 8).transpose(1, 2)"""
DROP_PATH = """a = a * self.vector
        factor = a.new_empty(a.shape[0], 1, 1).bernoulli_(0.5)
        x = x + factor * a"""
LENGTHS = """keep = torch.arange(7) < torch.tensor([[7], [5], [2]])
        o = F.scaled_dot_product_attention(q, k, v, keep[:, None, None])"""
PATCHES = """        x = F.conv2d(x, self.matrix[:32, :12].reshape(32, 3, 2, 2), self.vector, 2)
        x = x.flatten(2).transpose(1, 2)
        h = self.norm1(x)"""
MODULE = (
    *change("self.module = nn.MultiheadAttention(32, 4, batch_first=True)"),
    A,
    "a = self.module(h, h, h)[0]",
    HEADS,
    "o = v",
)
RMS = "nn.LayerNorm(32), nn.LayerNorm(32)", "nn.RMSNorm(32), nn.RMSNorm(32)"
BASES = {  # texts of SOURCE, each with what is put in its place
    "plain": (M, MLP),
    "gated, rotary, RMSNorm": (*RMS, HEADS, ROPE, M, GATED_MLP),
    "three layers, layer scale, drop path": (QKV, THREE, HEADS, f"o = {SDPA})", ADD_A, DROP_PATH, M, MLP),
    "module": MODULE,
    "key lengths": (HEADS, LENGTHS),
    "relative bias": ("* 8**-0.5", "* 0.3 + self.table", M, MLP),
    "images": ("        h = self.norm1(x)", PATCHES),
}
# What becomes of a value {0}: first what leaves the block as it is for the backend, then what no operation does.
HARMLESS = {
    "copied": "{0} = {0}.clone()",
    "times one": "{0} = {0} * 2 / 2",
    "put together": "{0} = torch.cat([{0}[:, :2], {0}[:, 2:]], 1)",
    "seen from the other side": "{0} = {0}.transpose(0, 1).contiguous().transpose(0, 1)",
}
HARMFUL = {
    "detached": "{0} = {0}.detach()",
    "no_grad": "with torch.no_grad():\n    {0} = {0} * 1.0",
    "returned": "self.seen = {0}",
    "set in part": "{0} = {0}.clone()\n{0}[:, :1] = 0.5",
    "dropout": "{0} = F.dropout({0}, 0.2)",
    "noise": "{0} = {0} + 1e-3 * torch.rand_like({0})",
    "rounded": "{0} = {0}.bfloat16().to({0}.dtype)",
    "quantised": "{0} = {0} + (({0} * 8).round() / 8 - {0}).detach()",
    "half its gradient": "{0} = Halved.apply({0})",
    "clamped": "{0} = {0}.clamp(-1e3, 1e3)",
    "softly clamped": "{0} = 1e4 * torch.tanh({0} / 1e4)",
    "clamped by a root": "{0} = ({0} + 1000 - ({0} - 1000).square().sqrt()) / 2",
    "seldom another": "{0} = torch.where({0} > 50, -{0}, {0})",
    "a switch": "{0} = torch.where(torch.tensor(False), {0}, 2 * {0})",
    "tokens shifted": "{0} = {0}.roll(1, -2)",
    "samples mixed": "{0} = torch.cat([{0}[1:], {0}[:1]])",
    "hook": "{0}.register_hook(lambda g: 2 * g)",
}
OTHERS = {  # which may be another operation, or the same one with other weights
    "scaled": "{0} = {0} * 0.7",
    "negative": "{0} = -{0}",
    "in place": "{0} = {0}.clone().mul_(2.0)",
    "centred": "{0} = {0} - {0}.mean(-1, keepdim=True)",
    "graph break": "torch._dynamo.graph_break()",
    "twice": "{0} = {0} + {0}",
}


EDITS = HARMLESS | HARMFUL | OTHERS
BORDER = "x"  # of two blocks: a change there may leave both
UNCHANGED = ("B", "N", "D", "y", "w1", "w2", "w3", "cos", "sin", "factor", "keep")


def sites(source: str) -> list[tuple[int, str]]:
    """(line, name) of the values that the block computes."""
    lines = source.splitlines()
    methods = {i: line.split()[1].partition("(")[0] for i, line in enumerate(lines) if line.startswith("    def ")}
    called = [i for i, name in methods.items() if name == "forward" or f"self.{name}(" in source and name != "change"]
    found, method = [], None
    for i, line in enumerate(lines):
        method = i if i in methods else method
        if method in called and (names := re.match(r" +((?:\w+, )*\w+) = ", line)):
            found += [(i, name) for name in names[1].split(", ") if name not in UNCHANGED]
    return found


def changed(source: str, line: int, name: str, text: str) -> str:
    """The source with a text after a line, indented as that is."""
    lines = source.splitlines()
    indent = re.match(" *", lines[line])[0]
    lines[line] += "".join(f"\n{indent}{t}" for t in text.format(name).splitlines())
    seen = "return torch.cat([y.flatten(), self.seen.flatten()])" if "seen" in text else "return y"
    return "\n".join(lines).replace("return y", seen)


def inputs(base: str) -> torch.Tensor:
    shape = (3, 3, 4, 6) if base == "images" else (3, 7, 32)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


SOURCES = {base: replaced(SOURCE, *texts) for base, texts in BASES.items()}
GRID = [(base, *site, edit) for base in BASES for site in sites(SOURCES[base]) for edit in EDITS]
CASES = GRID[::17]  # no multiple of the edits: each comes at many values


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_both_halves_are_replaced(base):
    assert halves(compare(block(source=SOURCES[base]), inputs(base), tolerance=1e-9)) == "am"


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_changed_value_is_respected(case):
    base, line, name, edit = case
    model = block(source=changed(SOURCES[base], line, name, EDITS[edit]))
    done = len(halves(compare(model, inputs(base), tolerance=1e-9)))
    assert edit not in HARMLESS or done == 2
    equal = (name, edit) == ("weights", "softly clamped")  # of what is at most 1: the difference is 3e-9
    assert edit not in HARMFUL or name == BORDER or equal or done < 2


GATED = "g, u = self.fc1(h).chunk(2, -1); m = F.linear({}, self.fc2.weight[:, :24])"
NORM = "h = self.norm1(x)"
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


def logits(text: str) -> tuple[str, str]:
    return WEIGHTS, f"weights = {text}.softmax(-1)"


COS = "(f.cos(), f.sin())"
# name: (a text of SOURCE, what is put in its place, the next one, ..., which of a(ttention) and m(lp) is replaced).
MUTANTS = {
    "scaled before": ("(q @ k.transpose(-2, -1)) * 8**-0.5", "(q * 0.5) @ (k / 3).transpose(-2, -1)", "am"),
    "softmax in 32 bits": (WEIGHTS, "weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)", None),
    "softmax over queries": ("softmax(-1)", "softmax(-2)", "m"),
    "swapped q and k": ("q, k, v = self", "k, q, v = self", "am"),
    "max subtracted": (WEIGHTS, "weights = (logits - logits.amax(-1, keepdim=True)).softmax(-1)", "am"),
    "head, three": (QKV, "q, k, v = self.qkv(h).reshape(B, N, 4, 3, 8).permute(3, 0, 2, 1, 4).unbind(0)", "am"),
    "heads mixed up": ("o.transpose(1, 2).reshape", "o.reshape", "m"),
    "over the samples": (A, "a = self.attention(h.transpose(0, 1)).transpose(0, 1)", "am"),
    "dropout of rate 0": (ATTEND, "return F.dropout(weights, 0.0) @ v", "am"),
    "drop path of tokens": (ADD_A, "x = x + a * a.new_empty(1, a.shape[1], 1).bernoulli_(0.5)", "m"),
    "layer scale of tokens": (ADD_A, "x = x + self.vector[:7, None] * a", "m"),
    "norm without weight": ("h = self.norm1(x)", "h = F.layer_norm(x, (32,), eps=1e-3)", "am"),
    "quick gelu": (M, "u = self.fc1(h); m = self.fc2(u * torch.sigmoid(1.702 * u))", "am"),
    "nearly quick gelu": (M, "u = self.fc1(h); m = self.fc2(u * torch.sigmoid(1.70 * u))", "a"),
    "gated, other half": (M, GATED.format("g * F.gelu(u)"), "am"),
    "bias missing": (*change("self.qkv.bias = self.fc2.bias = None"), "am"),
    "residual in place, used": (ADD_A, "x = old = x * 1.0; x += a; x = x + old", "m"),
    "branch in place": (ADD_A, "a += x; x = a", "am"),
    "activation in place": (M, "m = self.fc2(F.silu(self.fc1(h), inplace=True))", "am"),
    "changed in between": (ADD_A, "w = x * 1.0; a = self.attention(self.norm1(w)); w.data.mul_(2); x = w + a", None),
    "parametrised": (*change("parametrize.register_parametrization(self.qkv, 'weight', nn.Tanh())"), "am"),
    "lora": ("= self.qkv(h)", "= (self.qkv(h) + h @ self.matrix[:8].t() @ self.matrix.t()[:8])", "m"),
    "numbers mended": (M, "m = self.fc2(torch.nan_to_num(F.gelu(self.fc1(h))))", "a"),
    "two masks": (*mlp("p, r = torch.arange(32) > 3, torch.arange(32) > 9; h = h.where(p, h.where(r, 2 * h))"), "a"),
    "switched by sample": (*mlp("h = torch.where(torch.arange(3)[:, None, None] > 1, h, 2 * h)"), "a"),
    "two eps": (NORM, "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7 + 1e-8) * self.vector", "m"),
    "number that the tokens hide": (*mlp("h = h * ((h * 0 + 1).sum(1, keepdim=True) / 11.0)"), "a"),
    "inference mode ends inside": (
        "h = self.norm2(x)",
        "with torch.inference_mode(): h = self.norm2(x)\n        h = h.clone()",
        "a",
    ),
    "branch far below rounding": (ADD_A, "x = x + 1e-13 * a", HEADS, f"k = q; o = {SDPA})", "m"),
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
    "rotary, changed": (
        *rotary("p", "r", f"f = self.matrix[:7, :8].detach() * 1.0; p = {COS}; f[0] = 2.0; r = {COS}"),
        "m",
    ),
    "rotary, random": (*rotary("(torch.poisson(f), f)", "(torch.poisson(f), f)", "f = torch.ones(7, 8).double()"), "m"),
    "rotary, pairs": (*rotary(COS, COS), "t[..., 4:], t[..., :4]], -1)", "t[..., 1::2], t[..., ::2]], -1)", "m"),
    "rotary without gradient": (
        *(
            NORM,
            f"f = self.matrix[:7, :8]; self.p = {COS}\n        with torch.no_grad(): self.r = {COS}\n        {NORM}",
        ),
        *(*rotary("self.p", "self.r", ""), "m"),
    ),
    "bias of queries, whose gradient is zero but for rounding": (
        *logits("(logits + self.table[..., :1])"),
        *(HEADS, "o = self.attend(q, k, q)"),  # the bias is the last input of the region
        "m",
    ),
    "square weight transposed": (
        "return self.proj(o)",
        "return F.linear(o, self.proj.weight.t(), self.proj.bias)",
        "am",
    ),
    "hidden in place": (*logits("logits.masked_fill_(torch.ones(7, 7).triu(1) > 0, float('-inf'))"), "am"),
    "scale is a switch": (*logits("(logits * torch.tensor(True))"), "am"),
    "scale divides": (*logits("(logits / self.vector[0].exp() * self.vector[1])"), "am"),
    "scale of q, sdpa": (HEADS, f"q = q * self.vector[0]; o = {SDPA})", "am"),
    "backward hook": (*change("self.fc1.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))"), None),
    "hook of a parameter": (*change("self.fc1.weight.register_hook(lambda g: g * 2)"), "am"),
    "checkpointed half": (A, "a = torch.utils.checkpoint.checkpoint(self.attention, h, use_reentrant=False)", "m"),
    "under autocast of 16 bits": (M, f"with torch.autocast('cpu', torch.bfloat16): {M}", None),
    "result changed in place": ("return y", "y.mul_(2.0); return y + x", "am"),
}

ALONE = {"lora", "layer scale of tokens"}  # attention without its block
ROWS = torch.randn(8, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INPUTS = {
    "one token": ROWS[:3, :1],
    "expanded": ROWS[:1, :7].expand(3, 7, 32),
    "samples as many as tokens": ROWS,
    "samples as many as columns": ROWS.repeat(4, 1, 1)[:, :7],
    "40 tokens": ROWS.repeat(1, 5, 1),
}
LENGTHS = {  # what depends on a length that may be another one in the next call
    "factor": (ADD_A, "x = x + a * (x.shape[0] - 1)"),
    "power": (ADD_M, "y = x + m.pow(x.shape[0] - 1)"),
    "samples mixed by a view": (A, "a = self.attention(h.view(2, -1, 7, 32).transpose(0, 1).reshape(h.shape))"),
    "samples rolled": (A, "B = h.shape[0]; a = self.attention(torch.cat([h[B - 2 :], h[: B - 2]]))"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_block_is_replaced_and_equal_or_left(name):
    *texts, expected = MUTANTS[name]
    tokens = 40 if "tokens hide" in name else 7
    x = torch.randn(3, tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tolerance = 2e-2 if "autocast" in name else 1e-5 if "32 bits" in name else 1e-9
    done = compare(block(*texts), x, tolerance=tolerance)
    assert expected is None or halves(done) == expected
    assert done["attention"] or name not in ALONE


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", slow_but(["samples as many as tokens"], INPUTS))
@pytest.mark.parametrize("over", ["tokens", "samples"])
def test_inputs_of_many_kinds(name, over):
    texts = () if over == "tokens" else (A, "a = self.attention(h.transpose(0, 1)).transpose(0, 1)")
    assert halves(compare(block(*texts), INPUTS[name], tolerance=1e-8)) == "am"


@pytest.mark.parametrize("name", slow_but(["factor"], LENGTHS))
def test_a_length_that_changes_is_no_number(name):
    torch._dynamo.reset()
    model = block(*LENGTHS[name])
    compiled = backend.compile(model, options={"inner": "eager"})
    for batch in (6, 8):
        x = ROWS[:batch, :7].clone()
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-9, rtol=1e-9)
    assert halves(Counter(entry.kind for entry in backend.report().replaced)) == ("a" if name == "power" else "m")


NUMBERS = {  # that dynamic=True makes inputs
    "scale": ("* 8**-0.5", "* self.number"),
    "eps": (NORM, "h = F.layer_norm(x, (32,), self.vector, eps=self.number)"),
    "eps written out": (NORM, "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.number) * self.vector"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_dynamic_true_makes_inputs(name):
    torch._dynamo.reset()
    model, x = block(*change("self.number = 0.3"), *NUMBERS[name]), ROWS[:3, :7]
    compiled = backend.compile(model, dynamic=True, options={"inner": "eager"})
    for model[0].number in (0.3, 0.7):
        with torch._dynamo.config.patch(error_on_recompile=name == "scale" and model[0].number == 0.7):
            torch.testing.assert_close(compiled(x), model(x), atol=1e-9, rtol=1e-9)
        assert halves(Counter(entry.kind for entry in backend.report().replaced)) == "am"


@pytest.mark.quick(1)
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
