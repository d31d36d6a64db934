"""Implementations and peers compute the same function, or get no time; each is given its best setting."""

import sys
import types

import bench_ops
import bench_packed
import clock
import harness
import peers
import pytest
import torch
from harness import WrongResult
from peers import FLASH, Peer, Setting
from shapes import Mix, Shape

from vitfast.model import activation_memory
from vitfast.tools.verify import run

NANO = Shape("Nano/8", 16, 2)
TIMM = dict(img_size=16, patch_size=8, embed_dim=64, depth=4, num_heads=4)


@pytest.mark.parametrize("name", bench_ops.OPS)
def test_every_operation_is_its_formula_in_the_order_that_is_timed(name):
    """Ours and, where it differs from the formula, the CPU's peer; outputs have the batch first, as Check assumes."""
    case = bench_ops.case_of(name, NANO)
    peer = {"attention": "sdpa math", "attention separate": "sdpa math", "patch_embed uint8": "eager unfold"}
    for impl in ("vitfast", peer.get(name, "eager")):
        check = harness.Check(case, "both")
        assert check.judge(impl, bench_ops.function_of(name, NANO, impl))["error"] < 1e-5
    outputs = run(case.formula, case.make())
    assert all(o.shape[0] == NANO.batch for o in outputs) and case.work.forward[0][1] > 0


@pytest.mark.parametrize("library", [name for name in peers.BUILDERS if name != "vitfast"])
def test_peers_compute_the_same_function(library):
    peer = Peer(Setting(library, "eager", "fp32"), NANO, training=True)
    assert peer.check()["error"] < 1e-5


def test_a_peer_that_computes_something_else_gets_no_time(monkeypatch):
    from timm.models.vision_transformer import VisionTransformer

    setting, eps = Setting("timm", "eager", "fp32"), lambda d, **_: torch.nn.LayerNorm(d, eps=1e-3)
    for training, options in ((False, dict(act_layer="gelu_tanh")), (True, dict(norm_layer=eps))):
        monkeypatch.setitem(peers.BUILDERS, "timm", lambda s, options=options: VisionTransformer(**TIMM, **options))
        with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
            Peer(setting, NANO, training).check()
    monkeypatch.setitem(peers.BUILDERS, "timm", lambda s: VisionTransformer(**TIMM))
    peer = Peer(setting, NANO, training=True)
    peer.model.blocks[2].attn.qkv.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult):
        peer.check()
    make_model = peers.make_model  # an error of 1e-4 of the logits, which bf16 would hide

    def wrong(library, shape):
        model = make_model(library, shape)
        model.head.register_forward_hook(lambda module, inputs, logits: (1 + 1e-4) * logits)
        return model

    peer = Peer(Setting("timm", "eager", "bf16"), NANO, training=False)
    monkeypatch.setattr(peers, "make_model", wrong)
    with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
        peer.check()


def test_a_peer_is_checked_again_with_the_weights_that_it_had():
    """After steps that moved them; and what has turned wrong since is found."""
    peer = Peer(Setting("timm", "eager", "fp32"), NANO, training=True)
    first = peer.check()
    with torch.no_grad():
        for parameter in peer.model.parameters():
            parameter.mul_(1.5)
    assert peer.check_again()["error_after"] == pytest.approx(first["error"], rel=1e-3)
    peer.model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="timm eager fp32 is wrong on .* after timing"):
        peer.check_again()


def test_what_our_compiled_model_keeps_follows_the_memory_as_in_eager_training(monkeypatch):
    """On a device that has memory for all that the blocks may keep."""
    found, settled = [], []
    monkeypatch.setattr(activation_memory, "DEVICES", (clock.DEVICE.type,))
    monkeypatch.setattr(activation_memory, "choose", lambda blocks, weights, rows, *_: settled.append(rows) or "all")
    keeps = lambda model, how, **options: found.append({block.keep for block in model.blocks})  # noqa: E731
    monkeypatch.setattr(peers, "compiled", keeps)
    for training in (True, False):
        Peer(Setting("vitfast", "compile", "fp32"), NANO, training)
    assert found == [{"all"}, {"least"}] and settled == [NANO.batch * NANO.tokens]


def test_hugging_face_makes_no_mask(monkeypatch):
    """Neither eager nor traced: forced flash refuses one, and cuDNN would be slower for it."""
    nodes, masks = [], []

    def keep(graph, _):
        nodes.extend(node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        return graph

    attend = torch.nn.functional.scaled_dot_product_attention
    watched = lambda *args, **options: masks.append(options.get("attn_mask")) or attend(*args, **options)  # noqa: E731
    model, images = peers.make_model("huggingface", NANO).eval(), torch.randn(2, 3, 16, 16)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        model(images)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep)(images)
    torch._dynamo.reset()
    layers = model.config.num_hidden_layers
    assert masks == [None] * layers and len(nodes) == layers
    assert all(node.kwargs.get("attn_mask") is None and len(node.args) <= 3 for node in nodes)


# What the packages promise: (B, N, H, Dh) or packed tensors in and out, with the logsumexp too or without.
FAKE = """
import torch

def flash_attn_func(q, k, v):
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return {result}

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    sizes = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(sizes) and cu_seqlens_q.dtype == torch.int32
    images = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)))
    out = torch.cat([torch.nn.functional.scaled_dot_product_attention(*x) for x in images], 1).transpose(0, 1)
    return {result}
"""


def test_flash_attention_runs_where_installed_and_is_skipped_with_a_reason_where_not(tmp_path, monkeypatch):
    small = Mix("small", "Ti/16", ((32, 48), (16, 16), (80, 64)), 2)
    results = {"flash-attn 3": "out", "flash-attn 4": "out, None"}
    for number, impl in enumerate(results):
        monkeypatch.setitem(FLASH, impl, (f"fake{number}", f"vitfast_fake{number}.cute"))
        for find in (bench_ops.attention_peer, lambda impl: bench_packed.IMPLEMENTATIONS[impl](small)):
            with pytest.raises(pytest.skip.Exception, match=f"fake{number} cannot be imported: No module named"):
                find(impl)
    for number, result in enumerate(results.values()):
        folder = tmp_path / f"vitfast_fake{number}" / "cute"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(FAKE.format(result=result))
    monkeypatch.syspath_prepend(tmp_path)
    packed = harness.Check(bench_packed.case_of(small), "both")
    for impl in results:
        for name in ("attention", "attention separate"):
            check = harness.Check(bench_ops.case_of(name, NANO), "both")
            assert check.judge(impl, bench_ops.function_of(name, NANO, impl))["error"] < 1e-5
        assert packed.judge(impl, bench_packed.IMPLEMENTATIONS[impl](small))["error"] < 1e-5
    with pytest.raises(WrongResult):
        check.judge("swapped", lambda q, k, v: peers.sdpa(q, v, k))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", types.ModuleType("old"))
    with pytest.raises(pytest.skip.Exception, match="torch has no torch.nn.attention.varlen.varlen_attn"):
        bench_packed.IMPLEMENTATIONS["torch varlen"](small)


def test_peers_have_their_best_setting(hooks, gpu, monkeypatch):
    """max-autotune without graphs, which are ours to capture; cuDNN chooses its convolutions by timing them."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    hooks.pytest_configure(None)
    assert torch.backends.cudnn.benchmark
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options))
    for how in ("compile", "max-autotune"):
        harness.compiled(len, how, fullgraph=True)
    assert given == [dict(fullgraph=True), dict(fullgraph=True, mode="max-autotune-no-cudagraphs")]
