"""PyTorch's tools on the operations: its counter of FLOPs, checkpointing by name, its profiler, budgets of memory.

The truth is what torch counts of plain PyTorch and of timm's models, with the formulas of GPUs' fused attention, since
its counter knows none for CPUs'. Tensors are fake where nothing needs their numbers.
"""

import contextlib
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from operations import OFFSETS, OPERATIONS, H
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import vitfast
from vitfast import ViT, ops
from vitfast.kernels import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="counts on CPU tensors; interpreted kernels")

aten = torch.ops.aten
# Before any test runs: the documentation's example registers one of its own.
REGISTERED = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("vitfast::")}
NORMS = ("layer_norm", "add_layer_norm", "rms_norm")  # have no products
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **_: sdpa_flop_count(*qkv[:3]),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *qkv, **_: sdpa_backward_flop_count(*qkv[:4]),
}
SIZES = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=5)
MODELS = {  # timm's arguments, and ours for the same model
    "plain": ({}, {}),
    "layer scale, no bias": (dict(init_values=0.1, qkv_bias=False),) * 2,
    "gated": (dict(mlp_layer=SwiGLUPacked, mlp_ratio=8), dict(swiglu_mlp=True)),
}
FROZEN = {
    "nothing": lambda i, name, p: False,
    "every second": lambda i, name, p: i % 2,
    "the others": lambda i, name, p: not i % 2,
    "matrices": lambda i, name, p: p.dim() > 1,
    "the first half": lambda i, name, p: not name.startswith(("blocks.1", "norm", "head")),
    "all but the head": lambda i, name, p: not name.startswith("head"),
    "all": lambda i, name, p: True,
}
CASES = [*zip(FROZEN, [False] * 6), ("nothing", True), ("every second", True), ("all", True)]  # images need a gradient


def counter(hooks: bool = False) -> FlopCounterMode:
    """Torch's counter; `hooks`: with its hooks on all modules, for which a ViT calls these one by one."""
    found = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    if not hooks:
        found.mod_tracker = contextlib.nullcontext()
        found.mod_tracker.parents = {"Global"}
    return found


def counts(call: Callable, *inputs, hooks: bool = False, **named) -> tuple[FlopCounterMode, FlopCounterMode]:
    """What is counted in a call and in its backward."""
    forward, backward = counter(hooks), counter(hooks)
    with forward:
        out = call(*inputs, **named)
    with backward:
        if out.requires_grad:
            out.sum().backward()
    return forward, backward


def totals(counted: tuple[FlopCounterMode, ...]) -> list[int]:
    return [each.get_total_flops() for each in counted]


def names(counted: FlopCounterMode) -> set[str]:
    return {str(name).removeprefix("vitfast.") for name in counted.get_flop_counts().get("Global", ())}


def drawn(name: str, trained: list[str]) -> dict[str, Tensor]:
    return {key: torch.rand(shape).requires_grad_(key in trained) for key, shape in OPERATIONS[name].shapes.items()}


def freeze(model: nn.Module, frozen: str) -> nn.Module:
    for i, (name, p) in enumerate(model.named_parameters()):
        p.requires_grad_(not FROZEN[frozen](i, name, p))
    return model


def test_every_operation_with_products_has_a_formula():
    assert {name for name in REGISTERED if getattr(torch.ops.vitfast, name[9:]) not in flop_registry} == {
        f"vitfast::{name}{end}" for name in NORMS for end in ("", "_backward")
    }


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in NORMS])
def test_an_operation_counts_as_plain_pytorch_whatever_needs_gradients(name):
    """Each argument alone, all and random ones. Packed samples are true tensors, which have lengths."""
    rng, operation, packed, seen = random.Random(0), OPERATIONS[name], "packed" in name, set()
    # PyTorch's fused attention on CPUs has no gradient of a bias of logits.
    arguments = [key for key in operation.trained if key != "bias" or "cos" not in operation.shapes]
    subsets = [arguments, *([key] for key in arguments)]
    subsets += [rng.sample(arguments, rng.randrange(len(arguments))) for _ in range(12)]
    for trained in rng.sample(subsets, 3) if packed else subsets:
        absent = [key for key in operation.optional if key not in trained and rng.random() < 0.3]
        with contextlib.nullcontext() if packed else FakeTensorMode():
            tensors = drawn(name, trained) | dict.fromkeys(absent)
            with ops.use_kernels("off"):
                truth = totals(counts(operation.function, **tensors))
            with ops.use_kernels("on"):
                found = counts(operation.function, **tensors)
        assert totals(found) == truth, (trained, absent)
        assert names(found[0]) == {name.split(",")[0]} and truth[0] > 0
        seen.add(truth[1])
    assert len(seen) > 1


def test_attention_of_tensors_without_values():
    """Packed samples count with the longest there; a bias that needs a gradient counts as q, k and v do."""
    with FakeTensorMode() as mode, ops.use_kernels("on"):
        qkv = torch.rand(5, 3, H, 16, requires_grad=True)
        packed = counts(ops.attention, qkv, offsets=mode.from_tensor(OFFSETS), longest=3)
        qkv, bias = torch.rand(2, 5, 3, H, 16), torch.rand(H, 5, 5, requires_grad=True)
        biased = counts(ops.attention, qkv, bias=bias)
    one = 2 * H * 16  # of a query and a key
    assert totals(packed) == [2 * one * 5 * 3, 5 * one * 5 * 3]
    assert totals(biased) == [2 * one * 2 * 5 * 5, 5 * one * 2 * 5 * 5]


@pytest.mark.parametrize("name", ["attention_block", "gated_mlp_block", "patch_embed"])
def test_sizes_may_be_symbols(name):
    tensors, found = drawn(name, OPERATIONS[name].trained), []
    for mode in (FakeTensorMode(), FakeTensorMode(shape_env=ShapeEnv())):
        with mode, ops.use_kernels("on"):
            given = {key: mode.from_tensor(t) for key, t in tensors.items()}
            found.append(totals(counts(OPERATIONS[name].function, **given)))
    numbers, symbols = found
    assert [int(n) for n in symbols] == numbers and all(isinstance(n, torch.SymInt) for n in symbols)


@pytest.mark.parametrize("name", MODELS)
def test_a_vit_counts_as_timms(name):
    theirs, mine = (model(**SIZES, **more) for model, more in zip((VisionTransformer, ViT), MODELS[name]))
    for frozen, images_too in CASES:
        freeze(theirs, frozen), freeze(mine, frozen)
        with FakeTensorMode(allow_non_fake_inputs=True), ops.use_kernels("on"):
            images = torch.rand(2, 3, 32, 32, requires_grad=images_too)
            truth, found = counts(theirs, images, hooks=True), counts(mine, images)
        assert totals(found) == totals(truth) and totals(truth)[0] > 0, (frozen, images_too)
        assert {"patch_embed", "attention_block"} < names(found[0])


def test_a_vit_whose_modules_are_called_counts_as_timms():
    """As torch's counter has them called by its hooks."""
    images, models = torch.rand(2, 3, 32, 32), (VisionTransformer(**SIZES), ViT(**SIZES))
    with FakeTensorMode(allow_non_fake_inputs=True), ops.use_kernels("on"):
        truth, found = (counts(model, images, hooks=True) for model in models)
    assert totals(found) == totals(truth) and "attention" in names(found[0])


@pytest.mark.slow
def test_a_base_model_of_the_papers_size():
    """17.6 G multiply-adds an image, as timm's table of results has it for ViT-B/16."""
    model = ViT.from_preset("B/16", num_classes=1000)
    with FakeTensorMode(allow_non_fake_inputs=True), ops.use_kernels("on"):
        forward, backward = totals(counts(model, torch.rand(1, 3, 224, 224)))
    assert forward / 2e9 == pytest.approx(17.6, abs=0.05) and 1.95 < backward / forward < 2.05


# Models that were compiled or accelerated


@pytest.mark.parametrize("name", ["plain", "layer scale", "gated"])
def test_the_operations_of_a_compiled_model_count_as_the_model(name):
    """Those of its graph, half of its parameters frozen. (Called with the counter on, PyTorch would not compile.)"""
    more = {"plain": {}, "layer scale": dict(init_values=0.1), "gated": dict(mlp_layer=SwiGLU)}[name]
    model, images, forward = VisionTransformer(**SIZES, **more), torch.rand(2, 3, 32, 32), counter()
    truth = totals(counts(freeze(model, "every second"), images, hooks=True))

    def inner(graph, _):
        def call(*inputs):
            with forward:
                return graph(*inputs)

        return call

    torch._dynamo.reset()
    with ops.use_kernels("on"):
        out = torch.compile(model, backend="vitfast", options=dict(inner=inner))(images)
        with counter() as backward:
            out.sum().backward()
    assert totals((forward, backward)) == truth
    parts = {"patch_embed", "attention_block", "gated_mlp_block" if name == "gated" else "mlp_block"}
    assert parts < names(forward) and {f"{part}_backward" for part in parts} < names(backward)


def test_an_accelerated_model_counts_as_it_was():
    """With the counter on, PyTorch compiles nothing and the library's code runs; a backward may still be ours."""
    model, images = VisionTransformer(**SIZES), torch.rand(2, 3, 32, 32)
    truth = totals(counts(model, images, hooks=True))
    vitfast.accelerate(model)
    with ops.use_kernels("on"):
        out = model(images)
        with counter() as backward:
            out.sum().backward()
        assert totals(counts(model, images, hooks=True)) == truth
    assert backward.get_total_flops() == truth[1] and "attention_block_backward" in names(backward)


def keep_attention(context, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation is torch.ops.vitfast.attention_block.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("accelerated", [False, True])
def test_checkpointing_keeps_an_operation_by_its_name(accelerated, monkeypatch):
    """Its kernels run once, those of the MLP twice; the gradients have the bits that they have without."""
    model = vitfast.accelerate(VisionTransformer(**SIZES)) if accelerated else ViT(**SIZES)
    tokens, runs = torch.randn(2, 17, 64), Counter()

    def count(function, *args, **options):
        runs[function.__name__] += 1
        return function(*args, **options)

    monkeypatch.setattr(launch, "watched", lambda: True)  # no plans, which would launch without the functions below
    for file, kernel in (("attention_block", "attention_fwd"), ("mlp_block", "linear_gelu")):
        module = sys.modules[f"vitfast.ops.{file}"]  # `ops` has a function of that name
        monkeypatch.setattr(module, kernel, functools.partial(count, getattr(module, kernel)))

    def gradients(call: Callable) -> tuple[list[Tensor], list[int]]:
        runs.clear()
        model.zero_grad()
        x = leaf = tokens.clone().requires_grad_()
        for layer in model.blocks:
            x = call(layer, x)
        x.square().sum().backward()
        return [leaf.grad, *(p.grad.clone() for p in model.blocks.parameters())], sorted(runs.values())

    contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    with ops.use_kernels("on"):
        model.blocks[0](tokens)  # decides what of an accelerated layer is replaced
        truth, once = gradients(lambda layer, x: layer(x))
        found, again = gradients(lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=contexts))
    assert all(map(torch.equal, found, truth))
    assert once == [2, 2] and again == [2, 4] and runs["attention_fwd"] == 2


def test_the_profiler_knows_the_operations():
    with ops.use_kernels("on"), profile(activities=[ProfilerActivity.CPU]) as seen:
        ViT(**SIZES)(torch.rand(1, 3, 32, 32)).sum().backward()
    times = {event.key: event.count for event in seen.key_averages()}
    for name, count in dict(attention_block=2, mlp_block=2, patch_embed=1, layer_norm=1).items():
        assert times[f"vitfast::{name}"] == times[f"vitfast::{name}_backward"] == count


@pytest.mark.slow
def test_a_budget_of_memory_recomputes_what_has_the_fewest_flops():
    """A block of attention keeps as much memory as one of an MLP and has fewer; without formulas both would have 1."""
    graphs = []

    def compiled(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    both = dict(fw_compiler=compiled, bw_compiler=compiled, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    model = torch.compile(VisionTransformer(**SIZES), backend="vitfast", options=dict(inner=aot_autograd(**both)))
    with config.patch(activation_memory_budget=0.7, is_non_builtin_to_include=True), ops.use_kernels("on"):
        model(torch.rand(2, 3, 32, 32)).sum().backward()
    blocks = [f"vitfast.{name}_block.default" for name in ("attention", "mlp")]
    assert [graphs[1].count(name) for name in blocks] == [2, 0]
