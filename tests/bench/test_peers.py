"""The peers compute the same function, or get no time; each is given its best setting."""

from pathlib import Path

import bench_attention
import clock
import harness
import peers
import pytest
import torch
from harness import WrongResult
from shapes import Shape

ROOT = Path(__file__).parents[2]


NANO = Shape("Nano/8", 16, 2)


@pytest.mark.parametrize("library", [name for name in peers.BUILDERS if name != "vitfast"])
def test_peers_compute_the_same_function(library):
    peer = peers.Peer(peers.Setting(library, "eager", "fp32"), NANO, training=True)
    assert peer.check()["error"] < 1e-5


def test_what_our_compiled_model_keeps_follows_the_memory_as_in_eager_training(settled, monkeypatch):
    found = []
    monkeypatch.setattr(peers, "compiled", lambda model, how: found.append({block.keep for block in model.blocks}))
    for training in (True, False):
        peers.Peer(peers.Setting("vitfast", "compile", "fp32"), NANO, training)
    assert found == [{"all"}, {"least"}] and settled == [NANO.batch * NANO.tokens]


def test_a_peer_that_computes_something_else_gets_no_time(monkeypatch):
    from timm.models.vision_transformer import VisionTransformer

    setting, size = (
        peers.Setting("timm", "eager", "fp32"),
        dict(img_size=16, patch_size=8, embed_dim=64, depth=4, num_heads=4),
    )
    for training, options in (
        (False, dict(act_layer="gelu_tanh")),
        (True, dict(norm_layer=lambda d, **_: torch.nn.LayerNorm(d, eps=1e-3))),
    ):
        monkeypatch.setitem(peers.BUILDERS, "timm", lambda s, options=options: VisionTransformer(**size, **options))
        with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
            peers.Peer(setting, NANO, training).check()
    monkeypatch.setitem(peers.BUILDERS, "timm", lambda s: VisionTransformer(**size))
    peer = peers.Peer(setting, NANO, training=True)
    peer.model.blocks[2].attn.qkv.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult):
        peer.check()


def test_a_peer_is_checked_again_with_the_weights_that_it_had():
    """After steps that moved them; and what has turned wrong since is found."""
    peer = peers.Peer(peers.Setting("timm", "eager", "fp32"), NANO, training=True)
    first = peer.check()
    with torch.no_grad():
        for parameter in peer.model.parameters():
            parameter.mul_(1.5)
    assert peer.check_again()["error_after"] == pytest.approx(first["error"], rel=1e-3)
    peer.model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="timm eager fp32 is wrong on .* after timing"):
        peer.check_again()


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_a_check_runs_no_backward_in_vain_and_builds_the_plain_model_once_on_the_device(monkeypatch):
    """Backward for the truth, for PyTorch's own error in that precision, and for what is timed: three."""
    backward, built = torch.Tensor.backward, []
    counted = []

    def counting(self, *arguments):
        counted.append(self.dtype)
        backward(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "backward", counting)
    plain = peers.ViT.from_preset
    monkeypatch.setattr(peers.ViT, "from_preset", lambda *a, **k: (built.append(a), plain(*a, **k))[1])
    peer = peers.Peer(peers.Setting("timm", "eager", "bf16"), NANO, training=True)
    peer.check()
    assert counted == [torch.float64, torch.bfloat16, torch.bfloat16] and len(built) == 1
    peer = peers.Peer(peers.Setting("timm", "eager", "bf16"), NANO, training=True)
    monkeypatch.setattr(clock, "DEVICE", torch.device("meta"))
    assert {p.device.type for p in peer._plain().parameters()} == {"meta"}


def test_wrong_logits_in_fp32_are_found_whatever_is_timed(monkeypatch):
    """An error of 1e-4 in the last layer, which bf16 would hide."""
    make_model = peers.make_model

    def wrong(library, shape):
        model = make_model(library, shape)
        model.head.weight.data.mul_(1 + 1e-4)
        return model

    peer = peers.Peer(peers.Setting("timm", "eager", "bf16"), NANO, training=False)
    monkeypatch.setattr(peers, "make_model", wrong)
    with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
        peer.check()


def test_hugging_face_makes_no_mask(monkeypatch):
    """Neither eager nor traced: forced flash refuses one, and cuDNN would be slower for it."""
    nodes, masks = [], []

    def keep(graph, _):
        nodes.extend(node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        return graph

    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **options):
        masks.append(options.get("attn_mask"))
        return attend(*args, **options)

    model = peers.make_model("huggingface", Shape("Nano/8", 16, 2)).eval()
    assert model.model.config._attn_implementation == "sdpa_plain"
    images = torch.randn(2, 3, 16, 16)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        expected = model(images)
    torch._dynamo.reset()
    with torch.no_grad():
        traced = torch.compile(model, backend=keep)(images)
    torch._dynamo.reset()
    layers = model.model.config.num_hidden_layers
    assert masks == [None] * layers and len(nodes) == layers
    assert all(node.kwargs.get("attn_mask") is None and len(node.args) <= 3 for node in nodes)
    torch.testing.assert_close(traced, expected)


# What the packages promise: (B, N, H, Dh) in and out, with the logsumexp too or without.
FLASH = """
import torch

def flash_attn_func(q, k, v):
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return {result}
"""


def test_flash_attention_is_used_where_installed_and_skipped_with_a_reason_where_not(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.FLASH_ATTENTION, "flash-attn 3", ("flash_attn_3", "vitfast_fake_flash"))
    monkeypatch.setitem(peers.FLASH_ATTENTION, "flash-attn 4", ("flash_attn_4", "vitfast_fake.cute"))
    for impl, package in (("flash-attn 3", "flash_attn_3"), ("flash-attn 4", "flash_attn_4")):
        with pytest.raises(pytest.skip.Exception, match=f"{package} is not installed"):
            bench_attention.function_of(impl, packed=True)
    (tmp_path / "vitfast_fake" / "cute").mkdir(parents=True)
    (tmp_path / "vitfast_fake" / "cute" / "__init__.py").write_text(FLASH.format(result="out, None"))
    (tmp_path / "vitfast_fake_flash.py").write_text(FLASH.format(result="out"))
    monkeypatch.syspath_prepend(tmp_path)
    shape = Shape("Ti/16", 32, 2)
    for impl in peers.FLASH_ATTENTION:
        for packed, case in (
            (True, bench_attention.case_of(shape)),
            (False, bench_attention.case_of(shape, packed=False)),
        ):
            for direction in ("forward", "both"):
                function = bench_attention.function_of(impl, packed)
                assert harness.Check(case, direction).judge(impl, function)["error"] < 1e-5
    for direction in ("forward", "both"):
        check = harness.Check(bench_attention.case_of(shape, packed=False), direction)
        assert check.judge("sdpa math", bench_attention.function_of("sdpa math", packed=False))["error"] < 1e-5
        with pytest.raises(WrongResult):
            check.judge("swapped", lambda q, k, v: peers.sdpa_separate(q, v, k))


def test_max_autotune_takes_every_backend_that_is_there(monkeypatch):
    from torch._inductor import config

    assert set(harness.unsupported_gemm_backends()) == {"NVGEMM", "CUTEDSL", "CUTLASS"}
    reasons = dict(NVGEMM="", CUTEDSL="too old", CUTLASS="no sources")
    monkeypatch.setattr(harness, "unsupported_gemm_backends", lambda: reasons)
    assert harness.gemm_backends("max-autotune") == config.max_autotune_gemm_backends
    harness.compiled(len, "max-autotune all")  # torch knows the options that it is given: it refuses others
    with monkeypatch.context() as patch, config.patch(max_autotune_gemm_backends="ATEN,TRITON"):
        given = {}
        patch.setattr(torch, "compile", lambda function, **options: given.update(options))
        for how, backends in (("max-autotune", "ATEN,TRITON"), ("max-autotune all", "ATEN,TRITON,NVGEMM")):
            harness.compiled(len, how, fullgraph=True)
            mode = dict(max_autotune=True, coordinate_descent_tuning=True)
            assert given.pop("options") == dict(mode, max_autotune_gemm_backends=backends)
        harness.compiled(len, "compile", fullgraph=True)
        assert given == dict(fullgraph=True)
    reasons["NVGEMM"] = "not installed"
    with pytest.raises(pytest.skip.Exception, match="NVGEMM: not installed; CUTEDSL: too old; CUTLASS: no sources"):
        harness.implementation("max-autotune all", len, len)
