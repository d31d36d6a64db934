"""The ViT under torch.compile, and what Dynamo and FX make of it."""

import functools
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from checks import assert_close, gradients, randomize
from torch._subclasses.fake_tensor import FakeTensorMode

from vitfast import ViT
from vitfast.kernels import tiles

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7)
TOL = dict(atol=1e-5)  # fp32: the same formula in another order of sums


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
