"""The door of the backend: entry point, options, errors in recognition, the report, the state of the user."""

import logging
import math
import subprocess
import sys
from collections import Counter

import pytest
import timm
import torch
from checks import slow_but
from compiled import ADD_M, ATTEND, WEIGHTS, A, M, block, compare, halves

from vitfast import backend, ops
from vitfast.backend import proof, rewrite

X = torch.randn(3, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_fresh_process_finds_the_backend_by_its_name(tmp_path):
    script = """
import sys, torch
layer = torch.nn.Linear(4, 4)
torch.compile(layer, backend="vitfast", options={"inner": "eager"})(torch.ones(2, 4))
print(sys.modules["vitfast"].backend.report().summary())
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.startswith("nothing replaced, 0 left"), found.stderr


def test_options_reach_the_inner_compiler(monkeypatch):
    seen = []

    def inner(graph, inputs, **given):
        seen.append((given, [node.target for node in graph.graph.nodes]))
        return graph.forward

    torch._dynamo.reset()
    backend.compile(block("", ""), options={"inner": inner, "mode": "fast", "other": 3})(X)
    assert seen[0][0] == {"mode": "fast", "options": {"other": 3}}
    assert {ops.attention_block, ops.mlp_block} <= set(seen[0][1])
    patches = backend._inner_compiler("inductor", "max-autotune-no-cudagraphs", {"shape_padding": False}).config
    assert patches["max_autotune"] and patches["shape_padding"] is False


@pytest.mark.slow
def test_options_that_mean_nothing_are_refused():
    for inner, word in (("vitfast", "another backend"), ("nobody", "nobody"), (None, "or a callable, got None")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=word):
            backend.compile(block("", ""), options={"inner": inner})(X)
    with pytest.raises(RuntimeError, match="no_such_option"):
        backend._inner_compiler("inductor", None, {"no_such_option": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prove", "additions", "parts_of"])
def test_an_error_in_recognition_breaks_no_compilation(name, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("broken on purpose")

    monkeypatch.setattr(rewrite, name, broken)
    with caplog.at_level(logging.WARNING, "vitfast"):
        assert not any("block" in kind for kind in compare(block("", ""), X, tolerance=1e-9))
    assert "error in recognition" in caplog.text
    assert any("broken on purpose" in entry.why for entry in backend.report().left)


def test_a_root_that_is_no_norm_is_no_error(caplog):
    for function in (
        lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True)),
        lambda x: (1.0 - x) / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5),
        lambda x: 2.0 / torch.sqrt(1 + x.square()),
    ):
        torch._dynamo.reset()
        torch.testing.assert_close(backend.compile(function, options={"inner": "eager"})(X), function(X))
    assert "error in recognition" not in caplog.text and not backend.report(3)


@pytest.mark.slow
def test_an_error_while_writing_leaves_the_graph_as_it_was(monkeypatch):
    monkeypatch.setattr(rewrite._Rewriter, "_value_free_users", lambda *_: 1 / 0)
    assert not compare(block("", ""), X, tolerance=1e-12)


@pytest.mark.slow
def test_the_report_says_what_was_done():
    compare(torch.nn.Sequential(*(block("", "")[0] for _ in range(2))).double(), X, tolerance=1e-9)
    report = backend.report()
    assert len(report) == len(report.replaced) == 4 and report.recognition > 0 and report.proof > 0
    assert "2 x attention block" in str(report) and "replaced" in str(report)
    compare(block("F.gelu", "F.relu"), X, tolerance=1e-9)
    assert [left.why for left in backend.report().left] == ["relu is in none of the operations"]
    compare(block("F.gelu", "torch.tanh"), X, tolerance=1e-9)
    (left,) = backend.report().left
    assert left.kind == "MLP block" and "not the same numbers" in left.why and left.name == "0.norm2"
    assert len(backend.report(graphs=5)) == 16  # each model but the first was captured in place too
    with pytest.raises(ValueError, match="graphs"):
        backend.report(0)


REASONS = {
    "dropout": (("F.gelu(self.fc1(h))", "F.dropout(F.gelu(self.fc1(h)), 0.1)"), "dropout"),
    "returned": ((ATTEND, "self.seen = weights; return weights @ v"), "an inner value (softmax) is used"),
    "rounded": (("F.gelu(self.fc1(h))", "F.gelu(self.fc1(h)).half().double()"), "a value is rounded to torch.float16"),
    "clamp": (("F.gelu(self.fc1(h))", "F.gelu(self.fc1(h)).clamp(-9, 9)"), "clamp is in none of the operations"),
    "norm behind": ((ADD_M, "y = x + self.norm1(m)"), "a norm after the branch"),
    "causal": ((ATTEND, "return F.scaled_dot_product_attention(q, k, v, is_causal=True)"), "causal attention"),
    "-1e9": ((WEIGHTS, "weights = logits.masked_fill(self.table > 1, -1e9).softmax(-1)"), "logits that are not -inf"),
}


@pytest.mark.parametrize("name", slow_but(["dropout", "causal"], REASONS))
def test_the_reason_names_the_obstacle(name):
    texts, reason = REASONS[name]
    torch._dynamo.reset()
    torch.compile(block(*texts), backend="vitfast", options={"inner": "eager"})(X)
    assert any(reason in entry.why for entry in backend.report().left), backend.report()


@pytest.mark.slow
def test_equal_layers_are_proven_once(monkeypatch):
    proven = []
    monkeypatch.setattr(proof, "_prove", lambda *a, real=proof._prove: [proven.append(a), real(*a)][1])
    monkeypatch.setattr(proof, "_proofs", type(proof._proofs)())
    compare(torch.nn.Sequential(*(block("", "")[0] for _ in range(4))).double(), X, tolerance=1e-9)
    assert len(proven) == 4 and len(backend.report().replaced) == 8  # in place, operators are captured as methods


@pytest.mark.quick(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_proofs_of_a_b16_layer_draw_its_attention_three_times_and_its_mlp_once(dynamic, monkeypatch):
    drawn, real, width = [], proof._random, 768
    monkeypatch.setattr(proof, "_random", lambda shape, generator: [drawn.append(shape), real(shape, generator)][1])
    layer = timm.models.vision_transformer.Block(width, 12, qkv_bias=True)
    torch._dynamo.reset()
    proof._proofs.clear()
    compiled = torch.compile(layer, backend="vitfast", dynamic=dynamic, options={"inner": "eager"})
    compiled(torch.randn(2, 197, width)).sum().backward()
    assert len(backend.report().replaced) == 2
    weights = Counter(math.prod(shape) // width**2 for shape in drawn)  # in squares of the width
    assert weights.pop(0) and weights == {3: 3, 1: 3, 4: 2}
    assert sum(map(math.prod, drawn)) < 21 * width**2  # 20 of them are weights


def units_of(model, monkeypatch, *, whole: bool) -> tuple[set, Counter]:
    """The lengths of units that proofs replaced, and what was replaced; whole: whether one run has all units."""
    others, units, real = [numbers._replace(whole=whole and numbers.whole) for numbers in proof.OTHERS], [], proof._run
    monkeypatch.setattr(proof, "OTHERS", others)
    monkeypatch.setattr(proof, "_run", lambda *given: [units.append(given[1].units), real(*given)][1])
    proof._proofs.clear()
    done = compare(model, X, tolerance=1e-9)
    return {n for lengths in units for n in lengths}, done


HALVES = "u, g = self.fc1(h).chunk(2, -1); m = F.linear(F.silu(u) * g, self.fc2.weight[:, :24])"
ACTIVE = "u = self.fc1(h); g = F.gelu(u)"
OF_PLACE = {  # hidden units of which some are not as others, in places where a proof may have no units
    "another activation": "g = torch.cat([g[..., :40], F.silu(u[..., 40:])], -1)",
    "narrowed": "g = torch.cat([g.narrow(-1, 0, 40), 2 * g.narrow(-1, 40, 8)], -1)",
    "other places by a view": "g = g.view(3, 7, 2, 24).transpose(2, 3).reshape(3, 7, 48)",
    "swapped halves": "g = torch.cat(g.chunk(2, -1)[::-1], -1)",
    "shown or not": "g = g.masked_fill(torch.arange(48) >= 40, 0.0)",
    "a norm": "g = F.layer_norm(g, (48,))",
}


def test_proofs_take_few_units_of_hidden_layers(monkeypatch):
    units, done = units_of(block(M, HALVES), monkeypatch, whole=True)
    assert units == {24, 48} and halves(done) == "am"


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", slow_but(["narrowed", "a norm"], OF_PLACE))
@pytest.mark.parametrize("whole", slow_but([False], [True, False]))
def test_units_that_are_not_alike_are_all_there(name, whole, monkeypatch):
    units, done = units_of(block(M, f"{ACTIVE}; {OF_PLACE[name]}; m = self.fc2(g)"), monkeypatch, whole=whole)
    assert not units and halves(done) == "a"


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_tokens_that_are_not_alike_are_all_there(dynamic):
    text = "a = self.attention(h); a = torch.cat([a[:, :20], 2 * a[:, 20:]], 1)"
    assert halves(compare(block(A, text), X.repeat(1, 6, 1), tolerance=1e-9, dynamic=dynamic)) == "m"


@pytest.mark.slow
@torch.inference_mode()
def test_the_users_state_is_left_alone():
    torch._dynamo.reset()
    proof._proofs.clear()
    compiled = backend.compile(block("", "").float().eval(), options={"inner": "eager"})
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), ops.use_kernels("off"):
            before = torch.get_rng_state()
            compiled(X.float())
            assert torch.equal(before, torch.get_rng_state()) and torch.get_default_dtype() == torch.float64
            assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(backend.report().replaced) == 2
