"""The door of the backend: entry point, options, errors in recognition, the report, the state of the user."""

import logging
import subprocess
import sys

import pytest
import torch
from compiled import ADD_M, ATTEND, WEIGHTS, block, compare

from vitfast import backend, ops
from vitfast.backend import proof, rewrite

X = torch.randn(3, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_fresh_process_finds_the_backend_by_its_name(tmp_path):
    script = """
import sys, torch
layer = torch.nn.Linear(4, 4)
torch.compile(layer, backend="vitfast", options={"inner": "eager"})(torch.ones(2, 4))
print(sys.modules["vitfast"].backend.report().summary())
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.startswith("nothing replaced, 0 left"), found.stderr


@pytest.mark.slow
def test_the_package_loads_the_backend_when_it_is_asked_for():
    script = "import sys, vitfast; print('vitfast.backend' in sys.modules, vitfast.backend)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("False <module 'vitfast.backend'")


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


def test_options_that_mean_nothing_are_refused():
    for inner, word in (("vitfast", "another backend"), ("nobody", "nobody"), (None, "or a callable, got None")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=word):
            backend.compile(block("", ""), options={"inner": inner})(X)
    with pytest.raises(RuntimeError, match="no_such_option"):
        backend._inner_compiler("inductor", None, {"no_such_option": 1})


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


def test_an_error_while_writing_leaves_the_graph_as_it_was(monkeypatch):
    monkeypatch.setattr(rewrite._Rewriter, "_value_free_users", lambda *_: 1 / 0)
    assert not compare(block("", ""), X, tolerance=1e-12)


def test_the_report_says_what_was_done():
    compare(torch.nn.Sequential(*(block("", "")[0] for _ in range(3))).double(), X, tolerance=1e-9)
    report = backend.report()
    assert len(report) == len(report.replaced) == 6 and report.recognition > 0 and report.proof > 0
    assert "3 x attention block" in str(report) and "replaced" in str(report)
    compare(block("F.gelu", "F.relu"), X, tolerance=1e-9)
    assert [left.why for left in backend.report().left] == ["relu is in none of the operations"]
    compare(block("F.gelu", "torch.tanh"), X, tolerance=1e-9)
    (left,) = backend.report().left
    assert left.kind == "MLP block" and "not the same numbers" in left.why and left.name == "0.norm2"
    assert len(backend.report(graphs=3)) == 12
    with pytest.raises(ValueError, match="graphs"):
        backend.report(0)


REASONS = {
    "dropout": (("F.gelu(self.fc1(h))", "F.dropout(F.gelu(self.fc1(h)), 0.1)"), "dropout"),
    "a value that is returned": (
        (ATTEND, "self.seen = weights; return weights @ v"),
        "an inner value (softmax) is used",
    ),
    "rounded": (
        ("F.gelu(self.fc1(h))", "F.gelu(self.fc1(h)).bfloat16().double()"),
        "a value is rounded to torch.bfloat16",
    ),
    "clamp": (("F.gelu(self.fc1(h))", "F.gelu(self.fc1(h)).clamp(-9, 9)"), "clamp is in none of the operations"),
    "norm behind": ((ADD_M, "y = x + self.norm1(m)"), "a norm after the branch"),
    "causal": ((ATTEND, "return F.scaled_dot_product_attention(q, k, v, is_causal=True)"), "causal attention"),
    "-1e9": ((WEIGHTS, "weights = logits.masked_fill(self.table > 1, -1e9).softmax(-1)"), "logits that are not -inf"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_names_the_obstacle(name):
    texts, reason = REASONS[name]
    torch._dynamo.reset()
    torch.compile(block(*texts), backend="vitfast", options={"inner": "eager"})(X)
    assert any(reason in entry.why for entry in backend.report().left), backend.report()


def test_equal_layers_are_proven_once(monkeypatch):
    proven = []
    monkeypatch.setattr(proof, "_prove", lambda *a, real=proof._prove: [proven.append(a), real(*a)][1])
    monkeypatch.setattr(proof, "_known", type(proof._known)())
    compare(torch.nn.Sequential(*(block("", "")[0] for _ in range(4))).double(), X, tolerance=1e-9)
    assert len(proven) == 2 and len(backend.report().replaced) == 8


@torch.inference_mode()
def test_the_users_state_is_left_alone():
    torch._dynamo.reset()
    proof._known.clear()
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
