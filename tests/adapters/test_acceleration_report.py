"""acceleration_report against the operations that really ran, counted below it by PyTorch's dispatcher."""

import logging
from collections import Counter
from functools import partial

import pytest
import torch
import transformers
from adapter_models import (
    HF,
    IMAGES,
    SMALL,
    hf_deit,
    hf_dinov2,
    hf_vit,
    timm_deit_distilled,
    timm_vit,
    tv_vit,
)
from checks import randomize
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import vitfast
from vitfast import ViT, ops
from vitfast.adapters import fallbacks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")

OPERATION = {
    "attention block": "attention_block_fwd",
    "MLP block": "mlp_block_fwd",
    "norm": "layer_norm",
    "patch projection": "patch_embed",
    "attention only (set_attn_implementation)": "attention_separate",
    "attention": "attention_packed",
    "linear layer and GELU": "linear_gelu",
    "MLP": "mlp",
}
AROUND = ("layer_norm", "attention_separate", "linear_residual")  # norms of q and k are called


class Counting(TorchDispatchMode):
    """Counts vitfast's operations by name."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "vitfast":
            self.seen[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def operations(model, *args, **kwargs) -> Counter:
    """The operations of one forward on the kernels."""
    with ops.use_kernels("on"), torch.no_grad(), Counting() as counting:
        model(*args, **kwargs)
    return counting.seen


def claimed(model) -> Counter:
    """The operations that the report says run."""
    found = Counter()
    for entry in vitfast.acceleration_report(model).replaced:
        found.update(AROUND if ", around " in entry.part else [OPERATION[entry.part]])
    return found


def eva(**options):
    from timm.models.eva import Eva

    return vitfast.accelerate(Eva(**{**SMALL, "qkv_fused": True, **options}))


def naflex():
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    sizes = dict(patch_size=8, embed_dim=32, depth=2, num_heads=2, pos_embed_grid_size=(2, 2))
    return vitfast.accelerate(NaFlexVit(NaFlexVitCfg(**sizes, global_pool="avg"), num_classes=5))


def swin():
    from timm.models.swin_transformer import SwinTransformer

    sizes = dict(img_size=16, patch_size=2, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(1, 2))
    return vitfast.accelerate(SwinTransformer(**sizes, num_classes=5))


def clip(accelerate=False, model="CLIPVision", **options):
    sizes = {**HF, "num_labels": 2, "intermediate_size": 64, "hidden_act": "gelu", **options}
    made = getattr(transformers, f"{model}Model")(getattr(transformers, f"{model}Config")(**sizes))
    return vitfast.accelerate(made) if accelerate else with_attention(made)


def with_attention(model):
    model.set_attn_implementation("vitfast")
    return model


def causal_text(attention="vitfast"):
    config = transformers.CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=99,
        hidden_act="gelu",
        attn_implementation=attention,
    )
    return transformers.CLIPTextModel(config)


def hf_swin(attention="vitfast"):
    sizes = dict(image_size=16, patch_size=2, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(1, 2))
    return transformers.SwinModel(transformers.SwinConfig(**sizes, attn_implementation=attention))


def hybrid():
    spec = dict(layers=(1,), width=0.5)
    return ViT(**{**SMALL, "img_size": 32, "patch_size": 16}, backbone=spec)


def changed():
    model = ViT(**SMALL)
    prune.l1_unstructured(model.patch_embed.proj, "weight", 0.5)
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)
    model.blocks[1].mlp.fc1 = nn.Sequential(model.blocks[1].mlp.fc1)
    return model


class Wrapped(nn.Module):
    """As a user has one of ours in a model of their own."""

    def __init__(self):
        super().__init__()
        self.backbone = ViT(**{**SMALL, "num_classes": 0})

    def forward(self, x):
        return self.backbone(x)


GRID = torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]] * 2)
PADDED = dict(patch_coord=GRID, patch_valid=torch.tensor([[True] * 4, [True] * 3 + [False]]))
PATCHES = torch.randn(2, 4, 192, generator=torch.manual_seed(0))
TOKENS = torch.tensor([[1, 2, 3, 98]])

# name: (model, its input, keyword arguments, a word of each reason why a part is left)
FAMILIES = {
    "timm ViT": (lambda: vitfast.accelerate(timm_vit()), IMAGES, {}, []),
    "timm DeiT distilled": (lambda: vitfast.accelerate(timm_deit_distilled()), IMAGES, {}, []),
    "timm DINOv2 with registers": (
        lambda: vitfast.accelerate(timm_vit(reg_tokens=4, init_values=0.5, no_embed_class=True)),
        IMAGES,
        {},
        [],
    ),
    "timm SigLIP": (
        lambda: vitfast.accelerate(timm_vit(global_pool="map", class_token=False)),
        IMAGES,
        {},
        ["one learned query"],
    ),
    "timm ReLU": (lambda: vitfast.accelerate(timm_vit(act_layer="relu")), IMAGES, {}, ["ReLU"] * 2),
    "timm dropout in training": (
        lambda: vitfast.accelerate(timm_vit(proj_drop_rate=0.1)).train(),
        IMAGES,
        {},
        ["active in training"] * 4,
    ),
    "timm EVA with rope": (partial(eva, use_rot_pos_emb=True), IMAGES, {}, []),
    "timm EVA without rope": (eva, IMAGES, {}, []),
    "timm EVA with norms of q and k": (partial(eva, qk_norm=True), IMAGES, {}, []),
    "timm EVA, norm after": (partial(eva, use_post_norm=True), IMAGES, {}, ["normalises after"] * 2),
    "timm NaFlexViT": (naflex, IMAGES, {}, ["a linear layer"]),
    "timm NaFlexViT, padded": (naflex, PATCHES, PADDED, ["a linear layer"]),
    "timm Swin": (swin, IMAGES, {}, ["windows"] * 2),
    "HF ViT": (lambda: vitfast.accelerate(hf_vit()), IMAGES, {}, []),
    "HF ViT, masked": (
        lambda: vitfast.accelerate(hf_vit()),
        IMAGES,
        dict(attention_mask=torch.tensor([[1] * 4 + [0]] * 2)),
        [],
    ),
    "HF ViT, vitfast attention alone": (lambda: with_attention(hf_vit()), IMAGES, {}, ["was not called"] * 4),
    "HF DeiT": (lambda: vitfast.accelerate(hf_deit()), IMAGES, {}, []),
    "HF DINOv2": (lambda: vitfast.accelerate(hf_dinov2()), IMAGES, {}, []),
    "HF CLIP": (partial(clip, accelerate=True), IMAGES, {}, []),
    "HF CLIP, vitfast attention": (clip, IMAGES, {}, ["was not called"] * 5),
    "HF CLIP, vitfast attention, dropout": (
        partial(clip, attention_dropout=0.1),
        IMAGES,
        {},
        ["not called"] * 2 + ["not called", "dropout is active"] * 2 + ["not called"],
    ),
    "HF CLIP text, causal": (causal_text, TOKENS, {}, ["not called", "causal"] * 2 + ["not called"]),
    "HF CLIP text, accelerated": (
        lambda: vitfast.accelerate(causal_text("sdpa")),
        TOKENS,
        {},
        ["in its last call: the call has is_causal"] * 2,
    ),
    "HF SigLIP, vitfast attention": (
        partial(clip, model="SiglipVision"),
        IMAGES,
        {},
        ["not called"] * 4 + ["one learned query"],
    ),
    "HF Swin, vitfast attention": (hf_swin, IMAGES, {}, []),
    "torchvision": (lambda: vitfast.accelerate(tv_vit()), IMAGES, {}, []),
    "ours": (lambda: ViT(**SMALL, init_values=0.1, reg_tokens=1), IMAGES, {}, []),
    "ours, average pooling": (lambda: ViT(**SMALL, global_pool="avg"), IMAGES, {}, []),
    "ours, hybrid": (hybrid, torch.randn(1, 3, 32, 32), {}, []),
    "ours, in a model of the user's": (Wrapped, IMAGES, {}, []),
    "ours, relative positions": (lambda: ViT(**SMALL, pos_embed="relative"), IMAGES, {}, ["relative"] * 4),
    "ours, dropout in training": (
        lambda: ViT(**SMALL, proj_drop_rate=0.1).train(),
        IMAGES,
        {},
        ["active in training"] * 4,
    ),
    "ours, pruned and hooked": (changed, IMAGES, {}, ["proj has hooks", "attn.qkv has hooks", "fc1 is", "mlp.fc1 is"]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_report_claims_what_runs(name):
    make, inputs, kwargs, left = FAMILIES[name]
    torch.manual_seed(0)
    model = randomize(make())
    model.train("training" in name or "dropout" in name)
    ran = operations(model, inputs, **kwargs)
    report = vitfast.acceleration_report(model)
    assert claimed(model) == ran, report
    assert len(report.left) == len(left) and all(word in e.why for word, e in zip(left, report.left)), report
    assert bool(ran) == ("replaced" in str(report)) and f"{len(report.replaced)} parts on vitfast" in str(report)


def test_the_last_call_counts(caplog):
    """Causal, then not: and the log says once what the library's own code ran for."""
    fallbacks._said.clear()
    model = vitfast.accelerate(timm_vit()).eval()
    assert len(vitfast.acceleration_report(model).replaced) == 6, "nothing was called yet"
    rest = Counter(mlp_block_fwd=2, layer_norm=1, patch_embed=1)
    with caplog.at_level(logging.WARNING, "vitfast"):
        for _ in range(2):
            assert operations(model, IMAGES, is_causal=True) == claimed(model) == rest
    said = [record.message for record in caplog.records]
    assert said == ["Block, attention block: the call has is_causal; the library's own code runs"]
    assert operations(model, IMAGES) == claimed(model) == Counter(attention_block_fwd=2, **rest)


def test_the_log_does_not_repeat_what_accelerate_said(caplog):
    fallbacks._said.clear()
    with caplog.at_level(logging.INFO, "vitfast"):
        model = vitfast.accelerate(timm_vit(act_layer="relu"))
        model(IMAGES)
        assert len(caplog.records) == 1 and "ReLU" in caplog.text
        model.blocks[0].attn.register_forward_hook(lambda *_: None)
        model(IMAGES)
        model(IMAGES)
    assert [record.message for record in caplog.records[1:]] == [
        "Block, attention block: attn has hooks; the library's own code runs"
    ]


def graph_operations(graph: torch.fx.GraphModule) -> Counter:
    names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return Counter(name.split(".")[1] for name in names if name.startswith("vitfast."))


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_models(causal, caplog):
    """One graph, its operations are those that the report claims; the log says while it is compiled what is left."""
    fallbacks._said.clear()
    torch._dynamo.reset()
    graphs = []
    inner = vitfast.accelerate(timm_vit()) if causal else ViT(**SMALL)
    model = torch.compile(inner.eval(), fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    kwargs = dict(is_causal=True) if causal else {}
    with ops.use_kernels("on"), torch.no_grad(), caplog.at_level(logging.WARNING, "vitfast"):
        model(IMAGES, **kwargs)
        model(IMAGES, **kwargs)
    assert len(graphs) == 1
    if causal:
        assert caplog.text.count("the call has is_causal") == 1
    else:
        assert graph_operations(graphs[0]) == claimed(model) and not vitfast.acceleration_report(model).left
        assert not caplog.records


def test_a_model_in_ddp_has_nothing_left(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for inner in (ViT(**SMALL), vitfast.accelerate(timm_vit())):
            model = nn.parallel.DistributedDataParallel(inner)
            assert claimed(model) == operations(inner, IMAGES) and not vitfast.acceleration_report(model).left
    finally:
        torch.distributed.destroy_process_group()


def test_attention_is_set_where_layers_stay_transformers_own():
    """And put back; what the user has chosen stays, and the report says what can be done."""
    for chosen in ("sdpa", "eager"):
        model = hf_swin(chosen)
        vitfast.accelerate(model)
        report = str(vitfast.acceleration_report(model))
        if chosen == "sdpa":
            assert model.config._attn_implementation == "vitfast" and "left" not in report.partition(" left")[2]
            assert operations(model, IMAGES) == claimed(model) == Counter(attention_separate=2)
        else:
            assert model.config._attn_implementation == "eager" and not operations(model, IMAGES)
            assert '; model.set_attn_implementation("vitfast") runs its attention' in report
        state = list(model.state_dict()), model.config.to_dict()
        vitfast.restore(model)
        assert model.config._attn_implementation == chosen and not operations(model, IMAGES)
        assert (list(model.state_dict()), model.config.to_dict()) == state
    model = hf_swin("sdpa")
    other = type(model)(model.config).eval()
    vitfast.accelerate(model)
    assert other.config._attn_implementation == "sdpa" and not operations(other, IMAGES), "of the same config"
    vitfast.accelerate(other)
    vitfast.restore(model)
    assert model.config._attn_implementation == "sdpa" and not operations(model, IMAGES)
    assert operations(other, IMAGES) == Counter(attention_separate=2)
    other.set_attn_implementation("eager")
    assert vitfast.restore(other).config._attn_implementation == "eager", "the last choice is the user's"
    assert model.config._attn_implementation == "sdpa" and not operations(model, IMAGES)


def test_attention_of_a_decoder_is_not_set():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
    model = vitfast.accelerate(transformers.LlamaModel(transformers.LlamaConfig(**sizes)))
    assert model.config._attn_implementation == "sdpa"


def test_a_forward_set_on_the_instance_decides():
    for made, names in (
        (vitfast.accelerate(timm_vit()), ("blocks.0", "norm", "patch_embed.proj")),
        (ViT(**SMALL), ("blocks.0", "norm", "patch_embed")),
    ):
        before = claimed(made)
        for name in names:
            module = made.get_submodule(name)
            module.forward = lambda x, *_, **__: x
            (entry,) = vitfast.acceleration_report(made).left
            assert entry.name == name and "a forward of its own" in entry.why
            del module.forward
        assert claimed(made) == before


def test_dropout_counts_before_the_first_call():
    model = with_attention(hf_vit(attention_probs_dropout_prob=0.1)).train()
    parts = [entry for entry in vitfast.acceleration_report(model) if "set_attn_implementation" in entry.part]
    assert len(parts) == 2 and all(entry.why == fallbacks.DROPOUT for entry in parts)
    assert not [e for e in vitfast.acceleration_report(model.eval()).left if "set_attn_implementation" in e.part]


def test_our_heads_without_a_kernel_are_left():
    model = ViT(**{**SMALL, "embed_dim": 20, "num_heads": 2})
    left = vitfast.acceleration_report(model).left
    assert [entry.part for entry in left] == ["attention block"] * SMALL["depth"] and "head size 10" in left[0].why
    with pytest.raises(RuntimeError, match="head size 10"), ops.use_kernels("on"):
        model(IMAGES)


def test_no_hint_once_it_was_taken():
    model = clip(model="SiglipVision")
    assert not [e for e in vitfast.acceleration_report(model).left if "set_attn_implementation" in e.why]


def test_the_report_says_where_no_kernel_runs():
    model = ViT(**SMALL)
    for mode, why in (("auto", "the weights are on cpu"), ("off", "use_kernels('off')")):
        with ops.use_kernels(mode):
            report = vitfast.acceleration_report(model)
        assert f"the operations run plain PyTorch, not kernels: {why}" in str(report)
    with ops.use_kernels("on"):
        assert vitfast.acceleration_report(model).plain is None
        assert "torch.float64" in vitfast.acceleration_report(model.double()).plain


def test_export_says_nothing(caplog):
    fallbacks._said.clear()
    with caplog.at_level(logging.WARNING, "vitfast"):
        torch.export.export(vitfast.accelerate(timm_vit()).eval(), (IMAGES,))
    assert not caplog.records
