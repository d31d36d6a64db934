"""Accelerated models under torch.compile, checkpointing, exports, torch.func, modes, threads, DDP and FSDP2."""

import copy
import itertools
import threading

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from adapter_models import ALL_PARTS, IMAGES, assert_same, counted, hf_vit, left, pair, report, tensor, timm_vit
from checks import assert_close, assert_equal, outputs, randomize, results, slow_but
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import vitfast
from vitfast import backend
from vitfast.backend import eager
from vitfast.backend import inductor as passes

X, TINY = dict(x=IMAGES), dict(depth=1, init_values=0.5)
FOUND = {"attention block", "MLP block", "LayerNorm"}


@pytest.fixture(autouse=True)
def no_earlier_models():
    """Models of other tests would hold Inductor's pass."""
    for model in (*list(passes._models), nn.Identity()):
        vitfast.restore(model)
    torch._dynamo.reset()
    assert inductor.pre_grad_custom_pass is None


@pytest.fixture
def rewritten():
    """The reports on graphs since the last look."""
    backend._reports.clear()

    def look() -> set[str]:
        found = {entry.kind for each in backend._reports for entry in each.replaced}
        backend._reports.clear()
        return found

    return look


@pytest.mark.slow
def test_compiled_before_and_after_accelerate():
    model = randomize(timm_vit(**TINY))
    original = copy.deepcopy(model)
    before = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(before(IMAGES), original(IMAGES), atol=1e-5)
    vitfast.accelerate(model)
    after = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (before, after, model):
        assert_equal(results(call, model, [IMAGES]), results(original, original, [IMAGES]), 2e-5)
    assert counted(model, X)["attention_block"] == 1


@pytest.mark.slow
def test_inductor_rewrites_accelerated_models_and_leaves_others(rewritten):
    """Equal graphs of both: Inductor's cache of graphs keeps them apart."""
    model, other = pair(timm_vit(**TINY))
    second = vitfast.accelerate(copy.deepcopy(other))
    wanted = results(other, other, [IMAGES])
    for each, found in ((model, True), (other, False), (second, True), (other, False)):
        torch._dynamo.reset()
        assert_equal(results(torch.compile(each, fullgraph=True), each, [IMAGES]), wanted, 2e-5)
        assert (rewritten() >= FOUND) == found
    vitfast.restore(model)
    assert inductor.pre_grad_custom_pass is not None, "of the second model"
    for layer in second.blocks:
        layer.compile()
    vitfast.accelerate(second)
    assert_equal(results(second, second, [IMAGES]), wanted, 2e-5)
    assert rewritten() >= {"attention block", "MLP block"}
    vitfast.restore(second)
    torch._dynamo.reset()
    torch.compile(model)(IMAGES)
    assert not rewritten()


class Own(CustomGraphPass):
    """A pass of the user's."""

    seen = 0

    def __call__(self, graph):
        Own.seen += 1

    def uuid(self):
        return "own"


def test_a_pass_of_the_users_stays():
    model = vitfast.restore(timm_vit(**TINY))
    own = inductor.pre_grad_custom_pass = Own()
    try:
        vitfast.accelerate(model)
        both = inductor.pre_grad_custom_pass
        assert "vitfast" in str(both.uuid()) and "own" in both.uuid()
        both(torch.fx.Graph())
        assert Own.seen == 1
        vitfast.restore(model)
        assert inductor.pre_grad_custom_pass is own
    finally:
        inductor.pre_grad_custom_pass = None


def test_the_pass_comes_and_goes_with_the_models():
    first, second = timm_vit(**TINY), timm_vit(**TINY)
    vitfast.accelerate(vitfast.accelerate(first))
    vitfast.accelerate(second)
    assert "vitfast" in str(inductor.pre_grad_custom_pass.uuid())
    vitfast.restore(vitfast.restore(first))
    assert inductor.pre_grad_custom_pass is not None
    vitfast.restore(second)
    assert inductor.pre_grad_custom_pass is None


@pytest.mark.skipif(not hasattr(inductor, "pre_grad_pass_timing"), reason="torch 2.11 has one pass, and runs it early")
def test_a_list_of_passes_and_their_timing_are_put_back():
    own = [Own(), Own()]
    with inductor.patch(pre_grad_custom_pass=own, pre_grad_pass_timing="late"):
        vitfast.restore(nn.Linear(3, 3))
        assert inductor.pre_grad_custom_pass is own and inductor.pre_grad_pass_timing == "late"
        model = vitfast.accelerate(timm_vit(**TINY))
        assert inductor.pre_grad_pass_timing == "early"
        vitfast.restore(model)
        assert inductor.pre_grad_custom_pass == own and inductor.pre_grad_pass_timing == "late"


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")
@pytest.mark.parametrize("make", slow_but([], [lambda: timm_vit(drop_path_rate=0.5), hf_vit]))
def test_checkpointing_gives_the_same_bits(make):
    model, original = (each.train() for each in pair(make()))
    found = []
    for each in (model, model, original):
        found.append(results(each, each, [IMAGES]))
        model.set_grad_checkpointing() if make is not hf_vit else model.gradient_checkpointing_enable()
    once, again, expected = found
    assert all(torch.equal(grad, again[1][name]) for name, grad in once[1].items())
    assert_equal(again, expected, 1e-5)
    assert not left(model)


@pytest.mark.slow
@pytest.mark.parametrize("called", [False, True])
def test_export_sees_the_librarys_code(called):
    models = [each.eval() for each in pair(timm_vit(**TINY))]
    if called:
        models[0](IMAGES)
    batch = ({0: torch.export.Dim("batch")},)
    program, plain = (torch.export.export(each, (IMAGES,), dynamic_shapes=batch) for each in models)
    assert [str(n.target) for n in program.graph.nodes] == [str(n.target) for n in plain.graph.nodes]
    x = torch.cat([IMAGES, IMAGES.flip(0), IMAGES])
    assert torch.equal(program.module()(x), plain.module()(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_jit_and_symbolic_tracing_see_the_librarys_code():
    model, original = (each.eval() for each in pair(timm_vit()))
    traced = torch.jit.trace(model, IMAGES, check_trace=False)
    assert torch.equal(traced(IMAGES), torch.jit.trace(original, IMAGES)(IMAGES))
    assert {*left(model)} == {"in its last call: torch.jit.trace is at work"}
    tokens = torch.randn(2, 5, 32)
    assert torch.equal(torch.fx.symbolic_trace(model.blocks[0])(tokens), original.blocks[0](tokens))
    assert sum(counted(model, X).values()) == ALL_PARTS and not left(model)
    with pytest.raises(NotImplementedError, match="torch.jit.trace cannot record it; torch.export.export"):
        torch.jit.trace(vitfast.ViT(32, 16, embed_dim=32, num_heads=2, depth=1), torch.randn(1, 3, 32, 32))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_torch_func_and_meta_tensors():
    """Per-sample gradients go through the library's code: no kernel has a rule for them."""
    models, results = pair(timm_vit(depth=1)), []
    for model in models:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, image, model=model):
            return torch.func.functional_call(model, weights, (image[None],)).square().sum()

        results.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, IMAGES))
    assert {*left(models[0])} == {"in its last call: a transform of torch.func is at work"}
    for name, grad in results[1].items():
        assert_close(results[0][name], grad, atol=1e-6, name=name)
    assert_same(*models, X)
    doubled = {name: 2 * p.detach() for name, p in models[0].named_parameters()}
    calls = [torch.func.functional_call(model, doubled, (IMAGES,)) for model in models]
    assert_close(*calls, atol=1e-4, rtol=1e-4)
    assert models[0].to("meta")(IMAGES.to("meta")).shape == (2, 5)


@pytest.mark.slow
def test_modes_follow_one_another():
    """Each mode has graphs of its own, and the next call in an earlier one its old ones."""
    models = pair(timm_vit(drop_path_rate=0.5, **TINY))
    modes = torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()
    for mode, training in (*itertools.product(modes, (False, True)), *itertools.product(modes, (True,))):
        with mode:
            mine, theirs = (outputs(each.train(training), [IMAGES])[0] for each in models)
        assert mine.requires_grad == theirs.requires_grad
        assert_close(mine, theirs, atol=0.05 if theirs.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.slow
def test_threads_share_a_model():
    model, original = (each.eval() for each in pair(timm_vit()))
    inputs, found = torch.randn(4, 2, 3, 16, 16), {}

    def work(i: int) -> None:
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                found[i] = model(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for i, x in enumerate(inputs):
        assert_close(found[i], original(x), atol=1e-5)


@pytest.mark.slow
def test_attention_weights_of_hugging_face_models():
    """output_attentions installs hooks that stay."""
    models = pair(hf_vit(attn_implementation="eager").eval())
    for asked in ({}, dict(output_attentions=True, output_hidden_states=True), {}, dict(output_hidden_states=True)):
        outs = [each(IMAGES, **asked) for each in models]
        for kind in outs[1]:
            for a, b in zip(*((out[kind],) if kind == "logits" else out[kind] for out in outs), strict=True):
                assert_close(a, b, atol=1e-5, name=kind)
    # torch 2.11 does not see in.
    assert counted(models[0], dict(pixel_values=IMAGES))["attention_block"] == 2 * eager._HAS_LIMIT


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for module in model.modules():
        if type(module).__name__ in ("Block", "ViTLayer"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("make", [timm_vit, hf_vit])
def test_ddp_and_fsdp2_before_and_after(one_process, make):
    model = randomize(make())
    expected = results(model, model, [IMAGES])
    wrapped = {
        "FSDP after": shard(vitfast.accelerate(copy.deepcopy(model))),
        "FSDP before": vitfast.accelerate(shard(copy.deepcopy(model))),
        "DDP before": vitfast.accelerate(nn.parallel.DistributedDataParallel(copy.deepcopy(model))),
        "DDP after": nn.parallel.DistributedDataParallel(vitfast.accelerate(copy.deepcopy(model))),
    }
    for name, run in wrapped.items():
        with torch.no_grad():
            assert_close(tensor(run(IMAGES)), expected[0][0], atol=1e-5, name=name)
        outs, given = results(run, run, [IMAGES])
        given = {k.removeprefix("module."): g.full_tensor() if isinstance(g, DTensor) else g for k, g in given.items()}
        assert_equal((outs, given), expected, 2e-5)
        assert len(report(run).replaced) == ALL_PARTS and not left(run), f"{name}: {report(run)}"
        vitfast.restore(run)
        assert_close(tensor(run(IMAGES)), expected[0][0], atol=1e-5)
        assert isinstance(run, FSDPModule) == ("FSDP" in name)
