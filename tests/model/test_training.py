"""The ViT in training and compiled: drop path, dropout, what blocks keep, autocast, what Dynamo and FX make of it."""

import copy
import functools
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from checks import assert_close, gradients, randomize
from timm.models.vision_transformer import VisionTransformer
from torch._subclasses.fake_tensor import FakeTensorMode

from vitfast import ViT
from vitfast.kernels import tiles

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7)
TOL = dict(atol=1e-5)  # fp32: the same formula in another order of sums


def test_drop_path_rates_rise_linearly_like_timms():
    options = {**SMALL, "depth": 5, "drop_path_rate": 0.2}
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in VisionTransformer(**options).blocks]
    assert [block.drop_path_rate for block in ViT(**options).blocks] == pytest.approx(rates)


def test_dropout_sits_where_the_paper_says():
    """With p = 0.5 timm (same seed, same order of draws) gives the same training-mode output."""
    options = dict(pos_drop_rate=0.5, proj_drop_rate=0.5, drop_rate=0.5, init_values=0.5)
    ours, theirs = ViT(**SMALL, **options), VisionTransformer(**SMALL, **options)
    theirs.load_state_dict(randomize(ours).state_dict())
    x = torch.randn(4, 3, 32, 32)
    torch.manual_seed(1)
    a = ours.train()(x)
    torch.manual_seed(1)
    b = theirs.train()(x)
    assert_close(a, b, **TOL)
    assert_close(ours.eval()(x), theirs.eval()(x), **TOL)


@pytest.fixture
def settled(monkeypatch):
    """Settles keep="auto" on this device as on a GPU with room for 100 tokens.

    The list holds (tokens, bytes of a number).
    """
    asked = []

    def choose(vit, rows, size):
        asked.append((rows, size))
        return "all" if rows <= 100 else "least"

    monkeypatch.setattr("vitfast.model.activation_memory.choose", choose)
    return asked


def kept_by(model: ViT) -> str:
    (keep,) = {block.keep for block in model.blocks}
    return keep


def test_auto_is_settled_by_who_asks(settled):
    model, images = ViT(**SMALL), torch.randn(3, 3, 32, 32)
    tokens = model.patch_embed.num_patches + 1
    assert 3 * tokens <= 100 < 6 * tokens
    model(images).sum().backward()
    assert kept_by(model) == "least" and not settled  # a forward decides nothing
    assert model.decide_keep(3, torch.bfloat16) == kept_by(model) == "all" and model.keep == "auto"
    model(images).sum().backward()
    assert model.decide_keep(6) == kept_by(model) == "least" and settled == [(3 * tokens, 2), (6 * tokens, 4)]
    for keep in ("least", "all"):
        model.set_keep(keep)
        assert model.decide_keep(6) == kept_by(model) == keep and len(settled) == 2


def test_auto_keeps_the_least_while_blocks_are_checkpointed(settled):
    model, images = ViT(**SMALL), torch.randn(2, 3, 32, 32)
    assert model.decide_keep(2) == "all"
    model.set_grad_checkpointing()
    model(images).sum().backward()
    assert kept_by(model) == model.decide_keep(2) == "least" and len(settled) == 1
    model.set_grad_checkpointing(False)
    assert model.decide_keep(2) == "all" and len(settled) == 2
    model.set_grad_checkpointing(False)  # nothing changes
    assert kept_by(model) == "all"
    model.set_keep("all")
    model.set_grad_checkpointing()
    assert kept_by(model) == "all"  # as it was told to


@pytest.mark.parametrize(
    "positions", [{}, dict(pos_embed="learn2d", pos_embed_at="layers"), dict(pos_embed="relative")], ids=str
)
def test_autocast_and_fp32_residual(positions):
    """Of raw pixels: the stream has its dtype, and the error of 16 bits is small, of an fp32 stream smaller."""
    raw, truth, errors = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8), None, {}
    for fp32 in (False, True):
        model = ViT(**{**SMALL, "depth": 6}, residual_in_fp32=fp32, **positions)
        torch.manual_seed(2)
        randomize(model)
        exact = copy.deepcopy(model).double()
        truth = exact((raw / 255 * 2 - 1).double()).detach() if truth is None else truth
        streams = []
        hook = lambda module, args, output, streams=streams: streams.append(output.dtype)  # noqa: E731
        model.blocks[3].register_forward_hook(hook)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(raw)
        assert out.dtype == torch.bfloat16 and streams == [torch.float32 if fp32 else torch.bfloat16]
        errors[fp32] = (out.double() - truth).norm() / truth.norm()
        out.float().square().mean().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
        assert copy.deepcopy(model).bfloat16()(raw).dtype == torch.bfloat16
    assert errors[True] < errors[False] < 0.05


# ---- torch.compile and FX


@pytest.mark.slow
@torch._inductor.config.patch(fallback_random=True)
def test_compiled_code_of_uint8_in_training_equals_eager():
    """Inductor's own code, with eager's random numbers, in one graph."""
    model = randomize(ViT(**{**SMALL, "depth": 1}, drop_path_rate=0.5, proj_drop_rate=0.1))
    raw, upstream, results = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), torch.randn(4, 7), []
    torch._dynamo.reset()
    for run in (torch.compile(model, fullgraph=True), model):
        torch.manual_seed(1)
        out = run(raw)
        results.append(gradients(model, out, upstream) | {"logits": out})
    for key, value in results[1].items():
        assert_close(results[0][key], value, atol=1e-4, rtol=1e-4, name=key)
    assert not torch.equal(results[1]["logits"], model.eval()(raw))


@pytest.mark.slow
def test_compile_is_one_graph_and_recompiles_once():
    model = randomize(ViT(**SMALL | dict(depth=1), pos_embed="relative")).eval()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in (4, 6, 3):
        x, upstream = torch.randn(batch, 3, 32, 32), torch.randn(batch, 7)
        a, b = gradients(model, compiled(x), upstream), gradients(model, model(x), upstream)
        for key in b:
            assert_close(a[key], b[key], atol=1e-4, rtol=1e-4, name=key)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_for_a_gpu_the_model_is_one_graph_of_operations_and_dynamo_warns_of_nothing(monkeypatch):
    """On fake tensors: Dynamo traces what it would on a GPU, which kernel can run there too."""
    monkeypatch.setattr(tiles, "_generation", functools.cache(lambda index: 90))  # a cache, as on a GPU
    names = []

    def backend(module, inputs):
        names.extend(str(node.target) for node in module.graph.nodes if str(node.target).startswith("vitfast."))
        return module

    with torch.device("meta"):
        model = ViT(**SMALL).bfloat16()
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        images = torch.empty(2, 3, 32, 32, dtype=torch.bfloat16, device="cuda:0")
        torch.compile(model.to_empty(device="cuda:0"), fullgraph=True, backend=backend)(images)
    wanted = ["patch_embed", *["attention_block", "mlp_block"] * 2, "layer_norm"]
    assert names == [f"vitfast.{name}.default" for name in wanted]


@pytest.mark.parametrize("options", [dict(proj_drop_rate=0.5), dict(pos_embed="relative", dynamic_img_size=True)])
def test_traced_in_eval_it_keeps_its_dropout_and_says_nothing(options, capfd):
    """By FX, for which operations are leaves, bit for bit; torch.export warns of no dropout."""
    model, x = randomize(ViT(**SMALL, **options)).eval(), torch.randn(2, 3, 32, 32)
    traced = torch.fx.symbolic_trace(model)
    assert_close(traced(x), model(x), atol=0)
    if "proj_drop_rate" in options:
        assert_close(torch.export.export(model, (x,)).module()(x), model(x), **TOL)
    assert "fx" not in capfd.readouterr().err


@pytest.mark.slow
def test_training_at_sizes_that_change():
    """Positions are resampled to a size that the compiled code does not know, forward and backward."""
    model = ViT(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3, dynamic_img_size=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in ((16, 24), (24, 32), (32, 24)):
        images, grads = torch.randn(2, 3, *size), []
        for call in (model, compiled):
            call(images).square().sum().backward()
            grads.append([p.grad for p in model.parameters()])
            model.zero_grad()
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)
