"""Ways to compile a model: Inductor's modes, regions, graph breaks, checkpointing, inference, dynamic batches."""

from collections import Counter

import pytest
import timm
import torch
from checks import assert_close, randomize
from compiled import AROUND, compare
from compiled import block as plain_block
from processes import Child, done
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from vitfast import backend

SIZES = dict(img_size=32, embed_dim=32, num_heads=2, num_classes=3)
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def of_timm(depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return randomize(timm.create_model("vit_tiny_patch16_224", depth=depth, **SIZES))


PADDING = torch.arange(7) >= torch.tensor([4, 7, 2])[:, None]
CAUSAL = torch.ones(7, 7, dtype=torch.bool).triu(1)
FUSED = {
    "gelu": ({}, {}, {"attention block": 2, "MLP block": 2}),
    "relu": (dict(activation="relu"), {}, {"attention block": 2, "LayerNorm": 2}),
    "padding": ({}, dict(src_key_padding_mask=PADDING), {"attention block": 2, "MLP block": 2}),
    "causal": ({}, dict(mask=CAUSAL), {"attention block": 2, "MLP block": 2}),
    "causal, padding": ({}, dict(mask=CAUSAL, src_key_padding_mask=PADDING), {"attention block": 2, "MLP block": 2}),
    "post norm": (dict(norm_first=False), {}, {"LayerNorm": 4, "MLP": 2, "attention": 2}),
    "autocast": (dict(dtype=torch.float32), {}, {}),  # the call gives bf16 there, of which the graph knows nothing
}


@torch.no_grad()
@pytest.mark.parametrize("name", FUSED)
def test_the_parts_of_pytorchs_fused_encoder_layer_are_replaced(name, monkeypatch):
    options, masks, expected = FUSED[name]
    called, fused = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: called.append(a) or fused(*a))
    kinds = dict(activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64) | options
    layer = nn.TransformerEncoderLayer(32, 4, 64, **kinds)
    model = randomize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    x = torch.randn(3, 7, 32, dtype=kinds["dtype"])
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
        wanted = model(x, **masks)
        assert len(called) == 2
        monkeypatch.undo()
        torch._dynamo.reset()
        found = torch.compile(model, backend="vitfast", options={"inner": "eager"}, fullgraph=True)(x, **masks)
    assert found.dtype == wanted.dtype
    assert_close(found, wanted, atol=1e-9)
    assert Counter(entry.kind for entry in backend.report().replaced) == expected


@pytest.fixture
def graphs(monkeypatch) -> list:
    """The graphs that the backend compiles, in front of "eager" unless told otherwise."""
    seen, real = [], backend.compile_graph

    def compile_graph(graph, inputs, options=None):
        seen.append(graph)
        return real(graph, inputs, options=options or {"inner": "eager"})

    monkeypatch.setattr(backend, "compile_graph", compile_graph)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_reach_inductor(mode, monkeypatch):
    seen, real = [], GraphLowering.run

    def run(self, *inputs):
        seen.append((config.triton.cudagraphs, config.max_autotune, config.shape_padding))
        return real(self, *inputs)

    monkeypatch.setattr(GraphLowering, "run", run)
    model = of_timm(depth=1)
    asked = (dict(options={"mode": mode, "shape_padding": False}), dict(mode=mode))
    with torch.no_grad(), config.patch(fx_graph_cache=False):
        for given in asked:
            torch._dynamo.reset()
            assert_close(torch.compile(model, backend="vitfast", **given)(IMAGES), model(IMAGES), atol=1e-5)
            assert len(backend.report().replaced) == 4
    assert seen == [(True, mode == "max-autotune", padding) for padding in (False, config.shape_padding)]


def test_equal_regions_are_compiled_once(graphs):
    model, blocks = of_timm(depth=3), []
    for block in model.blocks:
        block.compile(backend=backend.compile_graph)
        blocks.append(block._compiled_call_impl)

    def compiled(x):
        for block, call in zip(model.blocks, blocks):
            block._compiled_call_impl = call
        return model(x)

    for block in model.blocks:
        block._compiled_call_impl = None
    assert compare(model, IMAGES, compiled=compiled) == {"attention block": 1, "MLP block": 1} and len(graphs) == 1


def test_each_graph_between_breaks_is_rewritten(graphs):
    model = of_timm()

    def broken(x):
        x = model.blocks[0](model.patch_embed(x))
        torch._dynamo.graph_break()
        return model.norm(model.blocks[1](x))

    model.forward = broken
    compare(model, IMAGES, compiled=backend.compile(broken))
    assert len(graphs) == 2 and [len(backend.report(n).replaced) for n in (1, 2)] == [3, 6]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_checkpointed_blocks_are_rewritten(inner, reentrant):
    model = of_timm()

    def forward(x):
        x = model.patch_embed(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.norm(x)

    model.forward = forward
    compiled = backend.compile(forward, options={"inner": inner}, fullgraph=True)
    assert compare(model, IMAGES, compiled=compiled) == AROUND | {"attention block": 2, "MLP block": 2}


@pytest.mark.parametrize("around", [True, False])
def test_a_checkpointed_block_has_the_autocast_of_its_call(around):
    model = plain_block("", "").float()

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not around):
            return checkpoint(model, x, use_reentrant=False)

    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        found, expected = backend.compile(forward, options={"inner": "eager"})(x), forward(x)
    assert_close(found, expected, atol=1e-5 if around else 0.1)
    assert {entry.kind for entry in backend.report().replaced} == {"attention block", "MLP block"}


def vmapped(model, x):
    parameters = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in model.named_parameters()}
    return torch.vmap(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)


def differentiated(model, x):
    return torch.func.grad(lambda x: model(x).square().sum())(x)


@pytest.mark.parametrize("transform", [vmapped, differentiated])
def test_blocks_inside_transforms_are_left(transform, caplog):
    model, x = plain_block("", ""), torch.randn(3, 7, 32, dtype=torch.float64)
    torch._dynamo.reset()
    assert_close(backend.compile(transform, options={"inner": "eager"})(model, x), transform(model, x), atol=1e-9)
    report = backend.report()
    assert not report.replaced and {entry.why for entry in report.left} == {"it is inside a transform of torch.func"}
    assert "error in recognition" not in caplog.text


def test_blocks_of_tensor_subclasses_are_left():
    """Those of distributed or quantised weights keep their values elsewhere, where no kernel looks."""
    model, x = plain_block("", ""), torch.randn(3, 7, 32, dtype=torch.float64)
    torch._dynamo.reset()
    given = TwoTensor(x, 2 * x)
    found, expected = backend.compile(model, options={"inner": "aot_eager"})(given), model(given)
    assert_close(found.a, expected.a, atol=1e-9)
    assert_close(found.b, expected.b, atol=1e-9)
    assert not backend.report().replaced and "a tensor in it is a TwoTensor" in str(backend.report())


def test_a_model_without_values_is_left(caplog):
    torch._dynamo.reset()
    model, x = plain_block("", "").to("meta"), torch.randn(3, 7, 32, dtype=torch.float64, device="meta")
    assert backend.compile(model, options={"inner": "eager"})(x).shape == x.shape
    assert "error in recognition" not in caplog.text and "on the device meta" in str(backend.report())


@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode])
def test_inference(state, graphs):
    model = of_timm(depth=1).eval()
    with state():
        compiled = backend.compile(model, fullgraph=True)
        assert_close(compiled(IMAGES), model(IMAGES), atol=1e-5)
        torch._dynamo.mark_dynamic(images := torch.cat([IMAGES, IMAGES]), 0)
        for batch in (images, IMAGES, images[:4]):
            assert_close(compiled(batch), model(batch), atol=1e-5)
    assert len(graphs) == 2 and len(backend.report(2).replaced) == 8


def with_cache() -> None:
    """In a process of its own: prints Inductor's hits, and whether AOTAutograd's cache was passed by."""
    model = of_timm(depth=1)
    compare(model, IMAGES, inner="inductor", tolerance=1e-4)
    hits, passed = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"]
    print(f"{len(backend.report().replaced)} replaced, {hits} hits, {passed} bypassed")


@pytest.mark.slow
def test_another_process_finds_the_compiled_code_in_inductors_cache(tmp_path):
    """AOTAutograd's cache knows nothing of our functions in the graph, and leaves it alone."""
    for hits in (0, 2):
        (said,) = done([Child(with_cache, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))])
        assert f"4 replaced, {hits} hits, 1 bypassed" in said
