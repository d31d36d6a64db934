"""Ways to compile a model: regions, graph breaks, checkpointing, dtypes, sizes; models that run operations already."""

from collections import Counter

import pytest
import timm
import torch
import transformers
from attention_cases import interpreted
from checks import assert_close, randomize, results, slow_but
from compiled import AROUND, compare
from compiled import block as plain_block
from processes import Child, done
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import vitfast
from vitfast import ViT, backend, ops

SIZES = dict(img_size=32, embed_dim=32, num_heads=2, num_classes=3)
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def of_timm(depth: int = 2, **options) -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return randomize(timm.create_model("vit_tiny_patch16_224", depth=depth, **SIZES, **options))


PADDING = torch.arange(7) >= torch.tensor([4, 7, 2])[:, None]
CAUSAL = torch.ones(7, 7, dtype=torch.bool).triu(1)
FUSED = {
    "relu": (dict(activation="relu"), {}, {"attention block": 2, "LayerNorm": 2}),
    "padding": ({}, dict(src_key_padding_mask=PADDING), {"attention block": 2, "MLP block": 2}),
    "causal, padding": ({}, dict(mask=CAUSAL, src_key_padding_mask=PADDING), {"attention block": 2, "MLP block": 2}),
    "post norm": (dict(norm_first=False), {}, {"LayerNorm": 4, "MLP": 2, "attention": 2}),
    "autocast": (dict(dtype=torch.float32), {}, {}),  # the call gives bf16 there, of which the graph knows nothing
}


@pytest.mark.quick(1)
@torch.no_grad()
@pytest.mark.parametrize("name", slow_but(["causal, padding", "post norm", "autocast"], FUSED))
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


@pytest.mark.slow
def test_each_graph_between_breaks_is_rewritten(graphs):
    model = of_timm()

    def broken(x):
        x = model.blocks[0](model.patch_embed(x))
        torch._dynamo.graph_break()
        return model.norm(model.blocks[1](x))

    model.forward = broken
    compare(model, IMAGES, compiled=backend.compile(broken))
    assert len(graphs) == 2 and [len(backend.report(n).replaced) for n in (1, 2)] == [3, 6]


@pytest.mark.parametrize("reentrant", slow_but([False], [False, True]))
@pytest.mark.parametrize("inner", slow_but(["eager"], ["eager", "inductor"]))
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("transform", [vmapped, differentiated])
def test_blocks_inside_transforms_are_left(transform, caplog):
    model, x = plain_block("", ""), torch.randn(3, 7, 32, dtype=torch.float64)
    torch._dynamo.reset()
    assert_close(backend.compile(transform, options={"inner": "eager"})(model, x), transform(model, x), atol=1e-9)
    report = backend.report()
    assert not report.replaced and {entry.why for entry in report.left} == {"it is inside a transform of torch.func"}
    assert "error in recognition" not in caplog.text


@pytest.mark.slow
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


@pytest.mark.slow
def test_inference(graphs):
    model = of_timm(depth=1).eval()
    with torch.inference_mode():
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


OURS = {"patch embed": 1, "attention block": 2, "MLP block": 2, "layer norm": 1}


def already() -> Counter:
    return Counter(entry.kind for entry in backend.report().already)


# On kernels, interpreted, an operation is one node of the graph; elsewhere it is plain PyTorch.
MODES = pytest.mark.parametrize("kernels", ["auto", pytest.param("on", marks=[interpreted, pytest.mark.slow])])


@pytest.mark.slow
@MODES
def test_operations_are_not_replaced_again(kernels):
    torch.manual_seed(0)
    with ops.use_kernels(kernels):
        assert not compare(randomize(ViT(patch_size=16, depth=2, **SIZES)), IMAGES, fullgraph=True)
    assert not backend.report().left and already() == OURS
    assert "6 vitfast's already" in str(backend.report()) and "already   2 x MLP block" in str(backend.report())


@pytest.mark.slow
def test_accelerated_models_are_replaced_once():
    """The graph around accelerated layers is the library's, and the backend replaces it as any other."""
    torch.manual_seed(0)
    model = vitfast.accelerate(of_timm())
    model(IMAGES)
    assert compare(model, IMAGES, fullgraph=True) == {"attention block": 2, "MLP block": 2} | AROUND
    assert not backend.report().left and not already()


@pytest.mark.slow
@MODES
def test_a_block_around_an_operation_is_left_on_every_device(kernels):
    """Where the operation's kernel runs, the graph has nothing to prove the block by."""
    torch.manual_seed(0)
    twice = "(torch.cat([x, x], -1).transpose(1, 2) for x in (q, k, v))"  # no kernel has heads of 8 columns
    ours = f"import vitfast; o = vitfast.ops.attention(*{twice}).transpose(1, 2)[..., :8]"
    model = plain_block("o = self.attend(q, k, v)", ours)
    with ops.use_kernels(kernels):
        assert compare(model.float(), torch.randn(2, 7, 32)) == {"MLP block": 1, "LayerNorm": 1}
    assert [entry.why for entry in backend.report().left] == ["attention in it is vitfast's already"]
    assert already() == {"attention": 1}


WHERE = ["inside", "around", "weights", "stream in bf16", "stream in fp32"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", WHERE)
def test_outputs_keep_their_dtype_or_have_the_chosen_one(where):
    """Under autocast timm's residual stream is fp32, and bf16 without positions; of a model in bf16 it is bf16."""
    torch.manual_seed(0)
    without = dict(pos_embed="none", class_token=False, global_pool="avg") if where == "stream in fp32" else {}
    model, images, bf16 = of_timm(init_values=0.1, **without), IMAGES, torch.bfloat16
    if where == "weights":
        model, images = model.bfloat16(), images.bfloat16()

    def call(x):
        with torch.autocast("cpu", bf16, enabled=where != "around" and where != "weights"):
            return model.forward_features(x)

    options = {"inner": "eager"} | ({"residual_in_fp32": "fp32" in where} if "stream" in where else {})
    with torch.autocast("cpu", bf16, enabled=where == "around"):
        torch._dynamo.reset()
        (expected,), wanted = results(call, model, [images])
        (found,), given = results(backend.compile(call, options=options), model, [images])
    assert found.dtype == (bf16 if where in ("weights", "stream in bf16") else torch.float32)
    assert "stream" in where or found.dtype == expected.dtype
    assert len(backend.report().replaced) >= 5 and given.keys() == wanted.keys()
    (truth,), right = results(model.double().forward_features, model, [images.double()])
    error = lambda a, b: (a.double() - b).norm().item()  # noqa: E731
    assert error(found, truth) <= 2 * error(expected, truth) + 1e-2 * ("stream" in where) * truth.norm()
    most = max(g.norm().item() for g in right.values() if g is not None)
    for name, g in right.items():
        if g is not None:
            assert given[name].dtype == wanted[name].dtype
            floor = 5e-2 * g.norm() if "stream" in where else 0
            assert error(given[name], g) <= 2 * error(wanted[name], g) + 1e-4 * most + floor, name


@pytest.mark.slow
def test_what_backward_computes_again_can_be_kept_and_other_choices_are_refused():
    model = of_timm()
    graphs: list = []
    inner = lambda graph, _: [graphs.append(graph), graph.forward][1]  # noqa: E731
    for keep in ("least", "all"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="vitfast", options={"inner": inner, "keep": keep})
        torch.testing.assert_close(compiled(IMAGES), model(IMAGES), atol=1e-5, rtol=1e-5)
        blocks = [node for node in graphs[-1].graph.nodes if getattr(node.target, "__name__", "").endswith("_block")]
        assert len(blocks) == 4 and {node.kwargs.get("keep", "least") for node in blocks} == {keep}
    for options, words in (
        ({"keep": "some"}, "keep must be"),
        ({"residual_in_fp32": "yes"}, "residual_in_fp32 must be"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            torch.compile(model, backend="vitfast", options=options)(IMAGES)


def dinov3() -> nn.Module:
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, intermediate_size=64)
    return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes, num_register_tokens=2))


@pytest.mark.slow
@torch.no_grad()
def test_rotary_positions_of_images_of_any_size():
    """How many tokens come before those that are turned, and how many are turned, only a call knows."""
    torch.manual_seed(0)
    model = randomize(dinov3()).double().eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="vitfast", dynamic=True, options={"inner": "eager"})
    for sizes in ((2, 32, 48), (3, 64, 32), (5, 16, 96)):
        x = torch.randn(sizes[0], 3, *sizes[1:]).double()
        torch.testing.assert_close(compiled(x)[0], model(x)[0], atol=1e-9, rtol=1e-9)
        kinds = Counter(e.kind for e in backend.report().replaced)
        assert kinds["attention block"] == kinds["MLP block"] == 2 and not backend.report().left


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
