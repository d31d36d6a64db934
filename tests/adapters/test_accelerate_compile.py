"""accelerate under torch.compile, checkpointing, export, torch.func, DDP and FSDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from adapter_models import (
    ALL_PARTS,
    IMAGES,
    MAKERS,
    accelerated_pair,
    hf_vit,
    running,
    tensor,
    timm_vit,
    tv_vit,
)
from checks import assert_close, gradients, randomize
from processes import Child, done
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import vitfast
import vitfast.adapters.attention_interface  # noqa: F401  registers "vitfast"
from vitfast import ops
from vitfast.kernels.launch import launches_made

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")


SHALLOW = {
    "timm": lambda: timm_vit(depth=1),
    "Hugging Face": lambda: hf_vit(num_hidden_layers=1),
    "torchvision": lambda: tv_vit(num_layers=1),
}


@pytest.mark.slow(10)
@pytest.mark.parametrize("library", MAKERS)
@torch.no_grad()
def test_compile_before_and_after(library):
    """Without a break in the graph; and a compiled model sees that it was accelerated."""
    model = randomize(SHALLOW[library]()).eval()
    expected = tensor(model(IMAGES))
    if library == "Hugging Face":
        model.set_attn_implementation("vitfast")  # under torch 2.11 transformers would write out a mask of ones
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(tensor(compiled(IMAGES)), expected, atol=1e-5)
    vitfast.accelerate(model)
    before = launches_made()
    with ops.use_kernels("on"):
        assert_close(tensor(compiled(IMAGES)), expected, atol=1e-5)
    assert launches_made() - before == 8


@pytest.mark.slow(10)
def test_compiled_gradients_equal_the_originals():
    model, original = accelerated_pair(lambda: timm_vit(init_values=0.5, depth=1))
    out = original(IMAGES)
    upstream = torch.randn_like(out)
    wanted = gradients(original, out, upstream)
    torch._dynamo.reset()
    with ops.use_kernels("on"):
        before = launches_made()
        mine = gradients(model, torch.compile(model, fullgraph=True, backend="aot_eager")(IMAGES), upstream)
    assert launches_made() - before >= 20
    for name, grad in wanted.items():
        assert_close(mine[name], grad, atol=1e-5, rtol=1e-5, name=name)


def test_a_compiled_model_sees_a_replaced_layer():
    model = vitfast.accelerate(randomize(timm_vit(depth=1))).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        compiled(IMAGES)
        for _ in range(2):
            model.blocks[0].mlp.fc1 = nn.Sequential(model.blocks[0].mlp.fc1, nn.ReLU())
            assert_close(compiled(IMAGES), model(IMAGES), atol=1e-5)
        model.train()
        model.blocks[0].mlp.drop2.p = 0.5
        torch.manual_seed(0)
        dropped = model(IMAGES)
        torch.manual_seed(0)
        assert_close(compiled(IMAGES), dropped, atol=1e-5)


def test_checkpointing_gives_the_same_bits():
    timm_model = timm_vit(drop_path_rate=0.5)
    hf_model = hf_vit()
    for model, enable in (
        (timm_model, timm_model.set_grad_checkpointing),
        (hf_model, hf_model.gradient_checkpointing_enable),
    ):
        randomize(model).train()
        results = []
        for step in range(3):
            if step == 1:
                enable()
            vitfast.restore(model) if step == 2 else vitfast.accelerate(model)
            torch.manual_seed(4)
            out = tensor(model(IMAGES))
            results.append(gradients(model, out, torch.ones_like(out)))
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
        for name, grad in results[2].items():
            assert_close(results[0][name], grad, atol=1e-5, rtol=1e-5, name=name)


@pytest.mark.parametrize("library", MAKERS)
def test_export_with_a_dynamic_batch(library):
    model = vitfast.accelerate(randomize(MAKERS[library]())).eval()
    batch = {0: torch.export.Dim("batch")}
    shapes = {"pixel_values": batch} if library == "Hugging Face" else (batch,)
    arguments = dict(kwargs={"pixel_values": IMAGES}) if library == "Hugging Face" else {}
    with ops.use_kernels("on"):
        program = torch.export.export(model, () if arguments else (IMAGES,), **arguments, dynamic_shapes=shapes)
    assert not any("vitfast" in str(node.target) for node in program.graph.nodes)
    x = torch.cat([IMAGES, IMAGES.flip(0), IMAGES])
    run = program.module()
    assert_close(tensor(run(pixel_values=x) if arguments else run(x)), tensor(model(x)), atol=1e-5)


def test_attention_weights_of_hugging_face_models():
    """output_attentions installs hooks that stay: later calls run on vitfast again, compiled ones too."""
    pair = [model.eval() for model in accelerated_pair(lambda: hf_vit(attn_implementation="eager"))]
    outs = [model(IMAGES, output_attentions=True, output_hidden_states=True) for model in pair]
    for kind in ("attentions", "hidden_states"):
        mine, theirs = (out[kind] for out in outs)
        assert len(mine) == len(theirs) >= 2
        for i, (a, b) in enumerate(zip(mine, theirs)):
            assert_close(a, b, atol=1e-5, name=f"{kind}[{i}]")
    before = launches_made()
    with ops.use_kernels("on"), torch.no_grad():
        out = pair[0](IMAGES, output_hidden_states=True)
    assert launches_made() - before == 14 and running(pair[0]) == ALL_PARTS
    assert_close(out.hidden_states[1], outs[1].hidden_states[1], atol=1e-5)
    for model in pair:
        model.config.output_attentions = True
    outs = [model(IMAGES) for model in pair]
    assert_close(outs[0].attentions[1], outs[1].attentions[1], atol=1e-5)
    pair[0].config.output_attentions = False
    torch._dynamo.reset()
    compiled = torch.compile(pair[0], fullgraph=True, backend="eager")
    assert_close(compiled(IMAGES).logits, outs[1].logits, atol=1e-5)
    pair[0].vit.layers[0].attention.register_forward_hook(lambda *_: None)
    assert running(pair[0]) == ALL_PARTS - 1


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_torch_func_and_meta_tensors():
    """Per-sample gradients go through PyTorch's modules: no kernel has a rule for them."""
    pair = accelerated_pair(lambda: timm_vit(depth=1))
    results = []
    for model in pair:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, image, model=model):
            return torch.func.functional_call(model, weights, (image[None],)).square().sum()

        with ops.use_kernels("on"):
            results.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, IMAGES))
    for name, grad in results[1].items():
        assert_close(results[0][name], grad, atol=1e-6, name=name)
    assert pair[0].to("meta")(IMAGES.to("meta")).shape == (2, 5)


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for module in model.modules():
        if type(module).__name__ in ("Block", "ViTLayer"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for make in (timm_vit, hf_vit):
        model = randomize(make())
        expected = tensor(model(IMAGES))
        upstream = torch.randn_like(expected)
        wanted = gradients(model, expected, upstream)
        types = [type(m) for m in shard(copy.deepcopy(model)).modules()]
        wrapped = {
            "FSDP after": shard(vitfast.accelerate(copy.deepcopy(model))),
            "FSDP before": vitfast.accelerate(shard(copy.deepcopy(model))),
            "DDP": vitfast.accelerate(nn.parallel.DistributedDataParallel(copy.deepcopy(model))),
        }
        for name, run in wrapped.items():
            before = launches_made()
            with ops.use_kernels("on"), torch.no_grad():
                assert_close(tensor(run(IMAGES)), expected, atol=1e-5, name=name)
            assert launches_made() - before == 14, name
            tensor(run(IMAGES)).backward(upstream)
            assert running(run) == ALL_PARTS, name
            for key, p in run.named_parameters():
                grad = p.grad.full_tensor() if name != "DDP" else p.grad
                assert_close(grad, wanted[key.removeprefix("module.")], atol=1e-5, rtol=1e-5, name=f"{name} {key}")
        sharded = vitfast.restore(wrapped["FSDP before"])
        assert [type(m) for m in sharded.modules()] == types
        sharded = vitfast.restore(wrapped["FSDP after"])
        assert all(isinstance(m, FSDPModule) == issubclass(t, FSDPModule) for m, t in zip(sharded.modules(), types))
        assert_close(tensor(sharded(IMAGES)), expected, atol=1e-5)
    dist.destroy_process_group()
    print("all equal")


@pytest.mark.slow(7)
def test_ddp_and_fsdp2_before_and_after():
    (said,) = done([Child(wrap)])
    assert "all equal" in said
