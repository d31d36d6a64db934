"""accelerate under torch.compile, checkpointing, export, torch.func, DDP and FSDP."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from adapter_models import ALL_PARTS, IMAGES, assert_same, hf_vit, pair, running, said, tensor, timm_vit
from checks import assert_close, gradients, randomize
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import vitfast
import vitfast.adapters.attention_interface  # noqa: F401  registers "vitfast"
from vitfast import ops
from vitfast.adapters import fallback_log
from vitfast.kernels.launch import launches_made

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")


@pytest.mark.slow
def test_compiled_before_and_after_accelerate(caplog):
    """One graph; a compiled model sees that it was accelerated, and the log says while it is compiled what is left."""
    fallback_log.said.clear()
    original = randomize(timm_vit(init_values=0.5, depth=1))
    model = copy.deepcopy(original)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(IMAGES), original(IMAGES), atol=1e-5)
    vitfast.accelerate(model)
    before = launches_made()
    with ops.use_kernels("on"):
        assert_same(compiled, original, dict(x=IMAGES), atol=1e-5, rtol=1e-5)
    assert launches_made() - before >= 20 and not said(caplog)
    with caplog.at_level(logging.WARNING, "vitfast"):
        for _ in range(2):
            assert_close(compiled(IMAGES, is_causal=True), original(IMAGES, is_causal=True), atol=1e-5)
    assert caplog.text.count("the call has is_causal") == 1


@torch.no_grad()
def test_a_compiled_model_sees_a_replaced_layer():
    model = vitfast.accelerate(randomize(timm_vit(depth=1))).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(IMAGES)
    for _ in range(2):
        model.blocks[0].mlp.fc1 = nn.Sequential(model.blocks[0].mlp.fc1, nn.ReLU())
        assert_close(compiled(IMAGES), model(IMAGES), atol=1e-5)
    model.train().blocks[0].mlp.drop2.p = 0.5
    torch.manual_seed(0)
    dropped = model(IMAGES)
    torch.manual_seed(0)
    assert_close(compiled(IMAGES), dropped, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")
@pytest.mark.parametrize("make", [lambda: timm_vit(drop_path_rate=0.5), hf_vit], ids=["timm", "Hugging Face"])
def test_checkpointing_gives_the_same_bits(make):
    model, original = pair(make().train())
    results = []
    for each in (model, model, original):
        torch.manual_seed(4)
        out = tensor(each(IMAGES))
        results.append(gradients(each, out, torch.ones_like(out)))
        model.set_grad_checkpointing() if make is not hf_vit else model.gradient_checkpointing_enable()
    once, again, expected = results
    for name, grad in expected.items():
        assert torch.equal(once[name], again[name])
        assert_close(once[name], grad, atol=1e-5, rtol=1e-5, name=name)


def test_export_with_a_dynamic_batch(caplog):
    model = vitfast.accelerate(randomize(timm_vit())).eval()
    fallback_log.said.clear()
    with ops.use_kernels("on"), caplog.at_level(logging.WARNING, "vitfast"):
        program = torch.export.export(model, (IMAGES,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert not any("vitfast" in str(node.target) for node in program.graph.nodes) and not said(caplog)
    x = torch.cat([IMAGES, IMAGES.flip(0), IMAGES])
    assert_close(program.module()(x), model(x), atol=1e-5)


def test_attention_weights_of_hugging_face_models():
    """output_attentions installs hooks that stay: later calls run on vitfast again, compiled ones too."""
    models = pair(hf_vit(attn_implementation="eager").eval())
    model = models[0]
    outs = [each(IMAGES, output_attentions=True, output_hidden_states=True) for each in models]
    for kind in ("attentions", "hidden_states"):
        for i, (a, b) in enumerate(zip(*(out[kind] for out in outs), strict=True)):
            assert_close(a, b, atol=1e-5, name=f"{kind}[{i}]")
    assert len(outs[1].attentions) == 2
    before = launches_made()
    with ops.use_kernels("on"), torch.no_grad():
        out = model(IMAGES, output_hidden_states=True)
    assert launches_made() - before == 14 and running(model) == ALL_PARTS
    assert_close(out.hidden_states[1], outs[1].hidden_states[1], atol=1e-5)
    model.config.output_attentions = True
    assert_close(model(IMAGES).attentions[1], outs[1].attentions[1], atol=1e-5)
    model.config.output_attentions = False
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(IMAGES).logits, outs[1].logits, atol=1e-5)
    model.vit.layers[0].attention.register_forward_hook(lambda *_: None)
    assert running(model) == ALL_PARTS - 1


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_torch_func_and_meta_tensors():
    """Per-sample gradients go through PyTorch's modules: no kernel has a rule for them."""
    models, results = pair(timm_vit(depth=1)), []
    for model in models:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, image, model=model):
            return torch.func.functional_call(model, weights, (image[None],)).square().sum()

        with ops.use_kernels("on"):
            results.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, IMAGES))
    for name, grad in results[1].items():
        assert_close(results[0][name], grad, atol=1e-6, name=name)
    assert models[0].to("meta")(IMAGES.to("meta")).shape == (2, 5)


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


@pytest.mark.parametrize("make", [timm_vit, hf_vit])
def test_ddp_and_fsdp2_before_and_after(one_process, make):
    model = randomize(make())
    expected = tensor(model(IMAGES))
    upstream = torch.randn_like(expected)
    wanted = gradients(model, expected, upstream)
    types = [type(m) for m in shard(copy.deepcopy(model)).modules()]
    wrapped = {
        "FSDP after": shard(vitfast.accelerate(copy.deepcopy(model))),
        "FSDP before": vitfast.accelerate(shard(copy.deepcopy(model))),
        "DDP before": vitfast.accelerate(nn.parallel.DistributedDataParallel(copy.deepcopy(model))),
        "DDP after": nn.parallel.DistributedDataParallel(vitfast.accelerate(copy.deepcopy(model))),
    }
    for name, run in wrapped.items():
        before = launches_made()
        with ops.use_kernels("on"), torch.no_grad():
            assert_close(tensor(run(IMAGES)), expected, atol=1e-5, name=name)
        assert launches_made() - before == 14, name
        tensor(run(IMAGES)).backward(upstream)
        assert running(run) == ALL_PARTS and not vitfast.acceleration_report(run).left, name
        for key, p in run.named_parameters():
            grad = p.grad if "DDP" in name else p.grad.full_tensor()
            assert_close(grad, wanted[key.removeprefix("module.")], atol=1e-5, rtol=1e-5, name=f"{name} {key}")
    sharded = vitfast.restore(wrapped["FSDP before"])
    assert [type(m) for m in sharded.modules()] == types
    sharded = vitfast.restore(wrapped["FSDP after"])
    assert all(isinstance(m, FSDPModule) == issubclass(t, FSDPModule) for m, t in zip(sharded.modules(), types))
    assert_close(tensor(sharded(IMAGES)), expected, atol=1e-5)
