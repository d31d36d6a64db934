"""Each inner value of several blocks is changed in each of many ways: replaced and equal, or left, wherever it is."""

import re

import pytest
import torch
from compiled import ADD_A, HEADS, QKV, SOURCE, A, M, block, change, compare, halves, replaced

# Each line names the values of which a mutant changes one.
MLP = "u = self.fc1(h)\n        g = F.gelu(u)\n        m = self.fc2(g)"
GATED = (
    "u = self.fc1(h)\n        g = F.silu(u[..., :24])\n        m = F.linear(g * u[..., 24:], self.fc2.weight[:, :24])"
)
SDPA = "o = F.scaled_dot_product_attention(q, k, v)"
ROPE = f"""cos, sin = self.matrix[:7, :8], self.matrix[7:14, :8]
        i = torch.cat([-q[..., 4:], q[..., :4]], -1)
        q = q * cos + i * sin
        j = torch.cat([-k[..., 4:], k[..., :4]], -1)
        k = k * cos + j * sin
        {SDPA}"""
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
    "gated, rotary, RMSNorm": (*RMS, HEADS, ROPE, M, GATED),
    "three layers, layer scale, drop path": (QKV, THREE, HEADS, SDPA, ADD_A, DROP_PATH, M, MLP),
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


@pytest.mark.parametrize("base", BASES)
def test_both_halves_are_replaced(base):
    assert halves(compare(block(source=SOURCES[base]), inputs(base), tolerance=1e-9)) == "am"


@pytest.mark.parametrize(
    ("base", "line", "name", "edit"),
    [pytest.param(*case, marks=[pytest.mark.slow] if i % 16 else []) for i, case in enumerate(CASES)],
)
def test_a_changed_value_is_respected(base, line, name, edit):
    model = block(source=changed(SOURCES[base], line, name, EDITS[edit]))
    done = len(halves(compare(model, inputs(base), tolerance=1e-9)))
    assert edit not in HARMLESS or done == 2
    equal = (name, edit) == ("weights", "softly clamped")  # of what is at most 1: the difference is 3e-9
    assert edit not in HARMFUL or name == BORDER or equal or done < 2
