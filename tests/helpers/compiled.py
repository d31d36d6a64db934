"""A model compiled by the backend, and accelerated, beside the same model as it is: outputs and gradients."""

from collections import Counter

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from checks import assert_equal, results
from torch import nn
from torch.nn.utils import parametrizations, parametrize  # noqa: F401, for SOURCE

import vitfast
from vitfast import backend


class Halved(torch.autograd.Function):
    """Itself, with half its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2


@torch._dynamo.allow_in_graph
def doubled_in_place(x):
    return x.mul_(2).sum()


SOURCE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.fc1, self.fc2 = nn.Linear(32, 48), nn.Linear(48, 32)
        self.vector = nn.Parameter(torch.randn(32))
        self.matrix = nn.Parameter(torch.randn(96, 32) / 6)
        self.table = nn.Parameter(torch.randn(4, 7, 7))
        self.change()

    def change(self):
        pass

    def attention(self, h):
        B, N, D = h.shape
        q, k, v = self.qkv(h).reshape(B, N, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        o = self.attend(q, k, v)
        o = o.transpose(1, 2).reshape(B, N, D)
        return self.proj(o)

    def attend(self, q, k, v):
        logits = (q @ k.transpose(-2, -1)) * 8**-0.5
        weights = logits.softmax(-1)
        return weights @ v

    def forward(self, x):
        h = self.norm1(x)
        a = self.attention(h)
        x = x + a
        h = self.norm2(x)
        m = self.fc2(F.gelu(self.fc1(h)))
        y = x + m
        return y
"""


# Texts of SOURCE.
WEIGHTS, SDPA = "weights = logits.softmax(-1)", "F.scaled_dot_product_attention(q, k, v"
ATTEND = "return weights @ v"
QKV = "q, k, v = self.qkv(h).reshape(B, N, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)"
ADD_A, ADD_M, M, A = "x = x + a", "y = x + m", "m = self.fc2(F.gelu(self.fc1(h)))", "a = self.attention(h)"
HEADS = "o = self.attend(q, k, v)"


def change(text: str) -> tuple[str, str]:
    """A text of SOURCE and another one, which changes the block after it is made."""
    return "def change(self):\n        pass", f"def change(self):\n        {text}"


def replaced(source: str, *texts: str) -> str:
    """A source with texts replaced: one, by what, the next one, by what, ..."""
    for old, new in zip(texts[::2], texts[1::2]):
        assert old in source, old
        source = source.replace(old, new, 1)
    return source


def block(*texts: str, source: str = SOURCE) -> nn.Module:
    """A block in float64 from a source with texts replaced."""
    source = replaced(source, *texts)
    scope = dict(globals())
    exec(compile(source, "<mutant>", "exec"), scope)
    torch.manual_seed(0)
    model = nn.Sequential(scope["Block"](), nn.Identity()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class Spelled(nn.Module):
    """A model whose forward is forward(self, *inputs), with layers and functions to spell it with."""

    def __init__(self, forward):
        super().__init__()
        self.m, self.call = block("", "")[0], forward
        self.weight, self.bias = (nn.Parameter(torch.randn(32)) for _ in range(2))
        self.gate = nn.Parameter(torch.randn(1))
        self.module, self.separate = nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4, kdim=32, vdim=32)
        self.module.batch_first = self.separate.batch_first = True
        self.double()

    def forward(self, *inputs):
        return self.call(self, *inputs)

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


AROUND = {"patch embedding": 1, "LayerNorm": 1}  # what is replaced around the blocks of most models


def compare(model, *inputs, inner="eager", tolerance=1e-5, compiled=None, **options) -> Counter:
    """Compares a model with itself accelerated and compiled; returns how many blocks of each kind were replaced."""
    torch._dynamo.reset()
    expected, eager = results(model, model, inputs), 0
    ours = any(hasattr(module, "report_entries") for module in model.modules())
    if inner == "eager" and compiled is None and not ours:
        eager = accelerated_blocks(model, inputs, expected, tolerance)
        torch._dynamo.reset()
    compiled = backend.compile(model, options={"inner": inner}, **options) if compiled is None else compiled
    assert_equal(results(compiled, model, inputs), expected, tolerance)
    done = Counter(entry.kind for entry in backend.report().replaced)
    assert eager <= sum(done[kind] for kind in BLOCKS), "in place more is replaced than in the graph of the whole"
    return done


BLOCKS = ("attention block", "MLP block", "gated MLP block")


def accelerated_blocks(model, inputs, expected, tolerance) -> int:
    """Compares a model with itself accelerated in place; returns how many blocks were replaced."""
    vitfast.accelerate(model)
    try:
        assert_equal(results(model, model, inputs), expected, tolerance)
        report = vitfast.acceleration_report(model)
        in_pieces = "pieces are compiled" in str(report)  # between which blocks are found that a whole graph hides
        return 0 if in_pieces else sum(entry.part in BLOCKS for entry in report.replaced)
    finally:
        vitfast.restore(model)


def halves(done: Counter) -> str:
    """The halves of a block that were replaced: a(ttention), m(lp)."""
    return "a" * done["attention block"] + "m" * (done["MLP block"] + done["gated MLP block"])
