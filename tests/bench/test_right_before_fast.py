"""Implementations and peers compute the same function, or get no time; each is given its best setting."""

import math
import sys
import types
from collections.abc import Callable
from pathlib import Path

import bench_ops
import bench_packed
import harness
import peers
import pytest
import shapes
import torch
from harness import WrongResult
from peers import FLASH, Peer, Setting
from shapes import Mix, Shape, model_work

from vitfast import ops
from vitfast.kernels import launch
from vitfast.model import activation_memory
from vitfast.model.presets import PRESETS
from vitfast.tools.verify import run

ROOT = Path(__file__).parents[2]
NANO = Shape("Nano/8", 16, 2)
SMALL = Mix("small", "Ti/16", ((32, 48), (16, 16), (80, 64), (32, 48)), 2)  # 7, 2, 21 and 7 tokens
TIMM = dict(img_size=16, patch_size=8, embed_dim=64, depth=4, num_heads=4)


def error(case: harness.Case, impl: str, function: Callable, direction: str = "both") -> float:
    """The error of an implementation, which may raise WrongResult."""
    return harness.Operation(case, impl, function, direction).compare("")["error"]


@pytest.mark.parametrize("name", bench_ops.OPS)
def test_every_operation_is_its_formula_in_the_order_that_is_timed(name):
    """Ours and, where it differs from the formula, the CPU's peer; outputs have the batch first, as is assumed."""
    case = bench_ops.case_of(name, NANO)
    peer = {"attention": "sdpa math", "patch_embed uint8": "eager unfold"}
    for impl in ("vitfast", peer.get(name, "eager")):
        assert error(case, impl, bench_ops.function_of(name, NANO, impl)) < 1e-5
    outputs = run(case.formula, case.draw())
    assert all(o.shape[0] == NANO.batch for o in outputs) and case.work.forward[0][1] > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("library", [name for name in peers.BUILDERS if name != "vitfast"])
def test_peers_compute_the_same_function(library):
    peer = Peer(Setting(library, "eager", "fp32"), NANO, "train")
    assert peer.compare("")["error"] < 1e-5


def test_a_peer_that_computes_something_else_gets_no_time(monkeypatch):
    from timm.models.vision_transformer import VisionTransformer

    def slightly_wrong(s: Shape) -> torch.nn.Module:  # by 1e-4 of the logits, which bf16 would hide
        model = VisionTransformer(**TIMM)
        model.head.register_forward_hook(lambda module, inputs, logits: (1 + 1e-4) * logits)
        return model

    for build in (lambda s: VisionTransformer(**TIMM, act_layer="gelu_tanh"), slightly_wrong):
        monkeypatch.setitem(peers.BUILDERS, "timm", build)
        with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
            Peer(Setting("timm", "eager", "bf16"), NANO, "throughput").compare("")
    monkeypatch.setitem(peers.BUILDERS, "timm", lambda s: VisionTransformer(**TIMM))
    peer = Peer(Setting("timm", "eager", "fp32"), NANO, "train")
    peer.model.blocks[2].attn.qkv.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult):
        peer.compare("")


def test_a_peer_is_checked_again_with_the_weights_that_it_had():
    """After steps that moved them; and what has turned wrong since is found."""
    peer = Peer(Setting("timm", "eager", "fp32"), NANO, "train")
    first = peer.compare("")
    with torch.no_grad():
        for parameter in peer.model.parameters():
            parameter.mul_(1.5)
    assert peer.compare(" after timing")["error"] == pytest.approx(first["error"], rel=1e-3)
    peer.model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="timm eager fp32 is wrong on .* after timing"):
        peer.compare(" after timing")


def test_what_our_compiled_model_keeps_follows_the_memory_as_in_eager_training(monkeypatch):
    """On a device that has memory for all that the blocks may keep."""
    found, settled = [], []
    monkeypatch.setattr(activation_memory, "choose", lambda vit, rows, size: settled.append(rows) or "all")
    keeps = lambda model, how, **options: found.append({block.keep for block in model.blocks})  # noqa: E731
    monkeypatch.setattr(peers, "compiled", keeps)
    for op in ("train", "throughput"):
        Peer(Setting("vitfast", "compile", "fp32"), NANO, op)
    assert found == [{"all"}, {"least"}] and settled == [NANO.batch * NANO.tokens]


@pytest.mark.slow
def test_hugging_face_makes_no_mask():
    """Traced by torch.compile: forced flash refuses one, and cuDNN would be slower for it."""
    nodes = []

    def keep(graph, _):
        nodes.extend(node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        return graph

    model = peers.make_model("huggingface", NANO).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep)(torch.randn(2, 3, 16, 16))
    torch._dynamo.reset()
    assert len(nodes) == model.config.num_hidden_layers
    assert all(node.kwargs.get("attn_mask") is None and len(node.args) <= 3 for node in nodes)


def test_flash_attention_runs_where_installed_and_is_skipped_with_a_reason_where_not(monkeypatch):
    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert max_seqlen_q == max_seqlen_k == SMALL.longest and cu_seqlens_q.dtype == torch.int32
        return ops.attention(q, k, v, offsets=cu_seqlens_k, longest=max_seqlen_k)

    packed = bench_packed.case_of(SMALL)
    with_logsumexp = [lambda *x, f=f, **sizes: (f(*x, **sizes), None) for f in (peers.sdpa, varlen)]
    for impl, functions in zip(FLASH, ((peers.sdpa, varlen), with_logsumexp), strict=True):
        monkeypatch.setitem(FLASH, impl, ("fake", "vitfast_fake"))
        for find in (bench_ops.attention_peer, lambda impl: bench_packed.IMPLEMENTATIONS[impl](SMALL)):
            with pytest.raises(pytest.skip.Exception, match="fake cannot be used: No module named"):
                find(impl)
        with monkeypatch.context() as patch:
            module = types.SimpleNamespace(**dict(zip(("flash_attn_func", "flash_attn_varlen_func"), functions)))
            patch.setitem(sys.modules, "vitfast_fake", module)
            attention = bench_ops.case_of("attention", NANO)
            assert error(attention, impl, bench_ops.function_of("attention", NANO, impl)) < 1e-5
            assert error(packed, impl, bench_packed.IMPLEMENTATIONS[impl](SMALL)) < 1e-5
    with pytest.raises(WrongResult):
        error(attention, "swapped", lambda qkv: peers.sdpa(*qkv[:, :, [0, 2, 1]].unbind(2)))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", types.ModuleType("old"))
    with pytest.raises(pytest.skip.Exception, match="torch cannot be used: .* no attribute 'varlen_attn'"):
        bench_packed.IMPLEMENTATIONS["torch varlen"](SMALL)


def test_peers_have_their_best_setting(hooks, gpu, monkeypatch):
    """max-autotune without graphs, which are ours to capture; cuDNN chooses its convolutions by timing them."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    hooks.pytest_configure(None)
    assert torch.backends.cudnn.benchmark
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options))
    for how in ("compile", "max-autotune"):
        harness.compiled(len, how, fullgraph=True)
    assert given == [dict(fullgraph=True, mode=mode) for mode in (None, "max-autotune-no-cudagraphs")]


# ---- images of many sizes


def test_mixes_and_their_work():
    """As docs/kernels/packed.md has them; of one size the work is what every other benchmark counts."""
    page = (ROOT / "docs" / "kernels" / "packed.md").read_text()
    for m in shapes.MIXES_ON_GPU:
        row = f"| {m.label} | {m.batch} | {m.rows:,} |"
        pairs = 1 - sum(n * n for n in m.lengths) / (m.batch * m.longest**2)
        assert f"{row} {m.padded_tokens:.1%} | {pairs:.1%} |".replace("%", " %") in page
    assert math.isclose(SMALL.padded_tokens, 1 - 37 / 84)
    same, of_shape = Mix("same", "Ti/16", ((224, 224),) * 3), Shape("Ti/16", 224, 3)
    assert model_work(same, 2) == model_work(of_shape, 2)


@pytest.mark.slow
def test_ours_computes_packed_attention():
    case, ours = bench_packed.case_of(SMALL), bench_packed.IMPLEMENTATIONS["vitfast"](SMALL)
    assert error(case, "vitfast", ours) < 1e-6
    if launch.INTERPRETED:
        with ops.use_kernels("on"):
            assert error(case, "vitfast", ours) < 1e-5


@pytest.mark.slow
def test_one_lost_token_among_many_images_gets_no_time():
    """Its share of the whole result's norm would be below the limit of bf16."""
    many = Mix("many", "Ti/16", ((16, 16),) * 2000 + ((16, 32),), 2)
    case, right = bench_packed.case_of(many), bench_packed.IMPLEMENTATIONS["vitfast"](many)
    lost = lambda *qkv: torch.cat([right(*qkv)[:-1], torch.zeros_like(qkv[0][-1:])])  # noqa: E731
    error(case, "vitfast", right, "forward")
    with pytest.raises(WrongResult, match="packed attention Ti/16 many forward"):
        error(case, "vitfast", lost, "forward")


@pytest.mark.parametrize("name", bench_packed.WAYS)
def test_every_way_makes_the_same_step_or_gets_no_time(name, monkeypatch):
    """A way that takes one image for another, or turns wrong in a gradient, is found."""
    monkeypatch.setitem(PRESETS, "Ti/16", PRESETS["Ti/16"] | dict(embed_dim=64, num_heads=2))
    peer = bench_packed.PackedPeer(Setting(name, "eager", "fp32"), SMALL, "train")
    assert peer.compare("")["error"] < 1e-5
    right, images = peer.images, peer.compared
    peer.images = peer.lay_out([images[3], *images[1:3], images[0]])
    with pytest.raises(WrongResult, match="is wrong on Ti/16 small after timing"):
        peer.compare(" after timing")
    peer.images = right
    peer.model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="is wrong on Ti/16 small after timing"):
        peer.compare(" after timing")
