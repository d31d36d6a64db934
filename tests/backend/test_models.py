"""Models of timm, transformers and torchvision through the backend: blocks replaced, outputs and gradients equal."""

from collections import Counter

import pytest
import timm
import torch
import torchvision
import transformers
from checks import randomize
from compiled import AROUND, compare, run

from vitfast import backend


def of_timm(name="vit_tiny_patch16_224", **options):
    return timm.create_model(name, **dict(embed_dim=32, depth=2, num_heads=2, img_size=32, num_classes=3) | options)


def of_transformers(name: str, **options):
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    return getattr(transformers, f"{name}Model")(config)


BOTH, GATED = ({"attention block": 2, mlp: 2} | AROUND for mlp in ("MLP block", "gated MLP block"))
MODELS = {
    "timm vit": (of_timm, BOTH),
    "timm drop path, layer scale": (lambda: of_timm(drop_path_rate=0.5, init_values=0.1), BOTH),
    "timm deit3": (lambda: of_timm("deit3_small_patch16_224"), BOTH),
    "timm dinov2": (lambda: of_timm("vit_small_patch14_reg4_dinov2", patch_size=16), BOTH),
    "timm eva02": (lambda: of_timm("eva02_tiny_patch14_224", patch_size=16), GATED),
    "timm beit": (lambda: of_timm("beit_base_patch16_224"), BOTH),
    "timm checkpointed": (lambda: [m := of_timm(), m.set_grad_checkpointing()][0], BOTH),
    "timm qk norm": (lambda: of_timm(qk_norm=True), AROUND | {"attention": 2, "MLP block": 2, "LayerNorm": 7}),
    "transformers vit": (lambda: of_transformers("ViT", intermediate_size=64), BOTH),
    "transformers vit, eager attention": (lambda: of_transformers("ViT", attn_implementation="eager"), BOTH),
    "transformers dinov2": (lambda: of_transformers("Dinov2", mlp_ratio=2, drop_path_rate=0.3), BOTH),
    "transformers dinov2, swiglu": (lambda: of_transformers("Dinov2", mlp_ratio=2, use_swiglu_ffn=True), GATED),
    "transformers dinov3": (lambda: of_transformers("DINOv3ViT", intermediate_size=64), BOTH),
    "torchvision vit": (lambda: torchvision.models.VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=3), BOTH),
}
QUICK = ("timm drop path, layer scale", "timm eva02", "transformers vit, eager attention", "torchvision vit")
CASES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CASES)
def test_all_blocks_are_replaced(name):
    make, expected = MODELS[name]
    torch.manual_seed(0)
    tolerance = 1e-5 if "eager" in name else 1e-9  # its softmax is in fp32
    model = randomize(make()).double().train()
    assert compare(model, IMAGES.double(), tolerance=tolerance, fullgraph=True) == expected


@pytest.mark.parametrize("where", ["inside", "around", pytest.param("weights", marks=pytest.mark.slow)])
def test_outputs_keep_their_dtype(where):
    """Under autocast timm's residual stream is fp32; of a model in bf16 it is bf16."""
    torch.manual_seed(0)
    model, images = randomize(of_timm(init_values=0.1)), IMAGES
    if where == "weights":
        model, images = model.bfloat16(), images.bfloat16()

    def call(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside"):
            return model.forward_features(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
        torch._dynamo.reset()
        expected, wanted = run(call, model, [images])
        found, given = run(backend.compile(call, options={"inner": "eager"}), model, [images])
    assert found.dtype == expected.dtype == (torch.bfloat16 if where == "weights" else torch.float32)
    assert len(backend.report().replaced) == 6 and given.keys() == wanted.keys()
    truth, right = run(model.double().forward_features, model, [images.double()])
    error = lambda a, b: (a.double() - b).norm().item()  # noqa: E731
    assert error(found, truth) <= 2 * error(expected, truth)
    most = max(g.norm().item() for g in right.values())
    for name, g in right.items():
        assert given[name].dtype == wanted[name].dtype
        assert error(given[name], g) <= 2 * error(wanted[name], g) + 1e-4 * most, name


@torch.no_grad()
def test_dynamic_shapes_leave_the_numbers_of_a_model_constant():
    """dynamic=True makes inputs of eps and of dropout's rates, which operations take as numbers."""
    torch.manual_seed(0)
    model = randomize(of_timm())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="vitfast", dynamic=True, options={"inner": "eager"})
    for eps in (1e-6, 0.5):
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = eps
        torch.testing.assert_close(compiled(IMAGES), model(IMAGES), atol=1e-5, rtol=1e-5)
        assert len(backend.report().replaced) == 6 and not backend.report().left


@torch.inference_mode()
def test_a_residual_changed_in_place_is_replaced_where_nobody_sees_it():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = of_timm(depth=2).eval(), False

        def forward(self, x):
            x = first = self.inner.patch_embed(x)
            for block in self.inner.blocks:
                x += block.attn(block.norm1(x))
                x += block.mlp(block.norm2(x))
            return x + first if self.seen else x

    model = randomize(Model())
    for seen, replaced in ((False, 4), (True, 0)):
        torch._dynamo.reset()
        model.seen = seen
        found = backend.compile(model, options={"inner": "eager"})(IMAGES)
        torch.testing.assert_close(found, model(IMAGES), atol=1e-5, rtol=1e-5)
        assert sum("block" in entry.kind for entry in backend.report().replaced) == replaced


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_the_dtype_of_the_residual_stream_can_be_chosen_under_autocast(in_fp32, inner):
    torch.manual_seed(0)
    options = {} if in_fp32 is False else dict(pos_embed="none", class_token=False, global_pool="avg")
    model = randomize(of_timm(init_values=0.1, **options))
    call = lambda images: model.forward_features(images)  # noqa: E731
    truth, wanted = run(call, model, [IMAGES])
    seen = {}
    for chosen in (None, in_fp32):
        torch._dynamo.reset()
        compiled = backend.compile(call, options={"inner": inner, "residual_in_fp32": chosen})
        with torch.autocast("cpu", torch.bfloat16):
            seen[chosen] = run(compiled, model, [IMAGES])
        assert sum("block" in entry.kind for entry in backend.report().replaced) == 4
    dtypes = {torch.float32 if in_fp32 else torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        expected, theirs = run(call, model, [IMAGES])
    found, given = seen[in_fp32]
    assert {found.dtype} == dtypes and seen[None][0].dtype == expected.dtype
    error = lambda a, b: (a.float() - b).norm() / b.norm()  # noqa: E731
    assert error(found, truth) < 2 * error(expected, truth) + 1e-2
    assert all(
        error(given[name], g) < 2 * error(theirs[name], g) + 5e-2 for name, g in wanted.items() if g.norm() > 0.1
    )


def test_what_backward_computes_again_can_be_kept_and_other_choices_are_refused():
    torch.manual_seed(0)
    model = randomize(of_timm())
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


def test_the_eps_of_a_norm_that_is_written_out_is_constant_in_dynamic_shapes():
    torch.manual_seed(0)
    model = of_transformers("PixtralVision", intermediate_size=64, head_dim=16, patch_size=16).double()
    torch._dynamo.reset()
    layer, x = model.transformer.layers[0], torch.randn(1, 5, 32).double()
    tables = torch.randn(2, 1, 5, 16).double()
    call = lambda x: layer(x, attention_mask=None, position_embeddings=tuple(tables))  # noqa: E731
    compiled = torch.compile(call, backend="vitfast", dynamic=True, options={"inner": "eager"})
    for eps in (1e-5, 0.5):
        layer.attention_norm.variance_epsilon = layer.ffn_norm.variance_epsilon = eps
        torch.testing.assert_close(compiled(x), call(x), atol=1e-9, rtol=1e-9)
        assert {e.kind for e in backend.report().replaced} == {"attention block", "gated MLP block"}


@torch.no_grad()
@pytest.mark.parametrize("prefix", [1, 3])
def test_rotary_positions_of_images_of_any_size(prefix):
    """How many tokens come before those that are turned, and how many are turned, only a call knows."""
    torch.manual_seed(0)
    model = (
        randomize(of_transformers("DINOv3ViT", intermediate_size=64, num_register_tokens=prefix - 1)).double().eval()
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="vitfast", dynamic=True, options={"inner": "eager"})
    for sizes in ((2, 32, 48), (3, 64, 32), (5, 16, 96)):
        x = torch.randn(sizes[0], 3, *sizes[1:]).double()
        torch.testing.assert_close(compiled(x)[0], model(x)[0], atol=1e-9, rtol=1e-9)
        kinds = Counter(e.kind for e in backend.report().replaced)
        assert kinds["attention block"] == kinds["MLP block"] == 2 and not backend.report().left
