"""accelerate with the tools of others: LoRA, parametrisations, hooks, quantisation, copies, compile, checkpointing, export, DDP, FSDP."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from adapter_models import hf_vit, tensor, timm_vit, tv_vit
from checks import assert_close, gradients, randomize
from processes import Child, done
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules import module as torch_module

import vitfast
import vitfast.adapters.attention_interface  # noqa: F401  registers "vitfast"
from vitfast import ops
from vitfast.kernels.launch import launches_made

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
IMAGES = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16).sin()
MAKERS = {"timm": timm_vit, "Hugging Face": hf_vit, "torchvision": tv_vit}
SHALLOW = {
    "timm": lambda: timm_vit(depth=1),
    "Hugging Face": lambda: hf_vit(num_hidden_layers=1),
    "torchvision": lambda: tv_vit(num_layers=1),
}
ALL_PARTS = 6  # of a model with two layers: the patch projection, four halves, the last norm


def running(model) -> int:
    """How many parts run on vitfast now."""
    return len(vitfast.acceleration_report(model).replaced)


def pair_of(make):
    model = randomize(make())
    return vitfast.accelerate(copy.deepcopy(model)), model


def assert_equal_models(model, original, atol=1e-5):
    out, expected = tensor(model(IMAGES)), tensor(original(IMAGES))
    assert_close(out, expected, atol=atol)
    upstream = torch.randn(out.shape, generator=torch.manual_seed(5))
    mine, theirs = gradients(model, out, upstream), gradients(original, expected, upstream)
    assert mine.keys() == theirs.keys() and mine
    for name, grad in theirs.items():
        assert_close(mine[name], grad, atol=atol, rtol=1e-5, name=name)


# ---- modules of others in the place of the library's


@pytest.mark.parametrize("order", ["accelerate first", "LoRA first"])
@pytest.mark.parametrize(
    "library, targets",
    [("timm", ["qkv"]), ("timm", ["qkv", "proj", "fc1", "fc2"]), ("Hugging Face", ["q_proj", "v_proj"])],
)
def test_lora(library, targets, order):
    peft = pytest.importorskip("peft")
    base = randomize(MAKERS[library]())

    def adapted(model):
        torch.manual_seed(2)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
        )

    original = adapted(copy.deepcopy(base))
    if order == "accelerate first":
        model = adapted(vitfast.accelerate(copy.deepcopy(base)))
    else:
        model = vitfast.accelerate(adapted(copy.deepcopy(base)))
    assert_equal_models(model, original)
    without = tensor(base(IMAGES))
    assert (tensor(model(IMAGES)) - without).abs().max() > 1e-3, "the adapters act"
    halves = 2 if len(targets) < 4 else 4
    left = [e.why for e in vitfast.acceleration_report(model).left if e.part]
    assert len(left) == halves and all("peft.tuners.lora" in why for why in left)
    with model.disable_adapter():
        assert_close(tensor(model(IMAGES)), without, atol=1e-5)
    expected = tensor(original(IMAGES))
    merged = vitfast.accelerate(model.merge_and_unload())
    assert running(merged) == ALL_PARTS
    assert_close(tensor(merged(IMAGES)), expected, atol=1e-4)


def test_lora_on_the_patch_projection():
    peft = pytest.importorskip("peft")
    model = vitfast.accelerate(randomize(timm_vit()))
    before = model(IMAGES)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["patch_embed.proj"], init_lora_weights=True)
    )
    assert_close(model(IMAGES), before, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("library", MAKERS)
def test_parametrisation_and_hooks_after_accelerate(library):
    pair = pair_of(MAKERS[library])
    linears = [
        [m for m in model.modules() if type(m) is nn.Linear and m.out_features == (128 if library == "timm" else 64)]
        for model in pair
    ]
    for fc1, *_ in linears:
        nn.utils.parametrizations.weight_norm(fc1)
        fc1.parametrizations.weight.original0.data.mul_(1.5)
    assert running(pair[0]) == ALL_PARTS - 1
    assert_equal_models(*pair)
    for fc1, second in linears:
        nn.utils.parametrize.remove_parametrizations(fc1, "weight")
        nn.utils.weight_norm(second)
    assert running(pair[0]) == ALL_PARTS - 1, "PyTorch's old weight norm works by a hook"
    assert_equal_models(*pair)


def test_a_parametrised_leaf_is_restored():
    model, original = pair_of(timm_vit)
    for m in (model, original):
        nn.utils.parametrizations.weight_norm(m.patch_embed.proj)
    assert running(model) == ALL_PARTS
    assert_equal_models(model, original)
    vitfast.restore(model)
    assert type(model.patch_embed.proj) is not type(original.patch_embed.proj) and isinstance(
        model.patch_embed.proj, nn.Conv2d
    )
    for m in (model, original):
        nn.utils.parametrize.remove_parametrizations(m.patch_embed.proj, "weight")
    assert type(model.patch_embed.proj) is nn.Conv2d
    assert_equal_models(model, original)


def test_every_kind_of_hook_is_called():
    pair = pair_of(timm_vit)
    seen = {id(pair[0]): [], id(pair[1]): []}
    handles = []
    for model in pair:
        log, block = seen[id(model)], model.blocks[1]
        handles += [
            block.attn.attn_drop.register_forward_hook(lambda m, i, out, log=log: log.append(("dropout", out.shape))),
            block.attn.register_forward_pre_hook(lambda m, i, log=log: log.append(("attention", i[0].shape))),
            block.mlp.fc1.register_full_backward_hook(lambda m, gi, go, log=log: log.append(("fc1", go[0].shape))),
            block.register_forward_hook(lambda m, i, out, log=log: log.append(("block", out.shape))),
            model.patch_embed.proj.register_forward_hook(lambda m, i, out, log=log: log.append(("patches", out.shape))),
            model.norm.register_forward_hook(lambda m, i, out, log=log: 2 * out),
        ]
    assert running(pair[0]) == ALL_PARTS - 2
    assert_equal_models(*pair)
    logs = list(seen.values())
    assert logs[0] == logs[1] and {kind for kind, _ in logs[0]} == {
        "attention",
        "fc1",
        "block",
        "patches",
    }  # dropout is not called with fused attention
    for handle in handles:
        handle.remove()
    assert running(pair[0]) == ALL_PARTS
    assert_equal_models(*pair)


def test_global_hooks_see_every_module():
    counts = []
    for model in pair_of(hf_vit):
        calls = []
        with torch_module.register_module_forward_hook(lambda m, i, o, calls=calls: calls.append(type(m).__name__)):
            model(IMAGES)
        counts.append(calls)
    assert counts[0] == counts[1] and counts[0].count("Linear") == 13


def test_a_forward_set_on_the_instance():
    """What Hugging Face Accelerate and many recipes do."""
    model = randomize(timm_vit())
    before, seen = model(IMAGES), []
    vitfast.accelerate(model)
    mlp, block = model.blocks[0].mlp, model.blocks[1]
    forward = mlp.forward
    mlp.forward = lambda x: (seen.append(x.shape), forward(x))[1]
    block.forward = lambda x, old=block.forward: old(x)
    assert_close(model(IMAGES), before, atol=1e-5)
    assert len(seen) == 1 and running(model) == ALL_PARTS - 1
    vitfast.restore(model)
    types = [type(m) for m in model.modules()]
    vitfast.accelerate(model)
    assert type(block) is types[[id(m) for m in model.modules()].index(id(block))], (
        "a block that brings its own forward keeps its class"
    )
    assert "set on the instance" in str(vitfast.acceleration_report(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per")
def test_dynamic_quantisation_and_tensor_subclasses():
    pair = pair_of(timm_vit)
    quantised = [torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8) for model in pair]
    assert running(quantised[0]) == 2 and running(pair[0]) == ALL_PARTS
    assert torch.equal(quantised[0](IMAGES), quantised[1](IMAGES))

    class Marked(torch.Tensor):
        pass

    weight = pair[0].blocks[0].mlp.fc1
    weight.weight = nn.Parameter(weight.weight.detach().as_subclass(Marked))
    assert running(pair[0]) == ALL_PARTS - 1 and "Marked" in str(vitfast.acceleration_report(pair[0]))
    assert_close(pair[0](IMAGES).as_subclass(torch.Tensor), pair[1](IMAGES), atol=1e-5)


# ---- copies and files


@pytest.mark.parametrize("library", MAKERS)
def test_copies_pickles_and_state(library):
    model = randomize(MAKERS[library]()).eval()
    expected = tensor(model(IMAGES))
    vitfast.accelerate(model, residual_in_fp32=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert running(twin) == ALL_PARTS and {id(p) for p in twin.parameters()}.isdisjoint(
            id(p) for p in model.parameters()
        )
        assert_close(tensor(twin(IMAGES)), expected, atol=1e-5)
        with torch.no_grad():
            next(twin.parameters()).add_(1)
        assert_close(tensor(model(IMAGES)), expected, atol=1e-5, name="a copy stands alone")
        vitfast.restore(twin)
        assert not running(twin) and all(type(m).__module__.partition(".")[0] != "vitfast" for m in twin.modules())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = MAKERS[library]().eval()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_close(tensor(fresh(IMAGES)), expected, atol=1e-5)
    with torch.device("meta"):
        assert running(vitfast.accelerate(MAKERS[library]())) == ALL_PARTS


def test_an_average_of_weights_follows_an_accelerated_model():
    from timm.utils import ModelEmaV3

    model = vitfast.accelerate(randomize(timm_vit()))
    ema = ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    ema.update(model)
    weights = dict(model.named_parameters())
    assert running(ema.module) == ALL_PARTS and all(
        torch.allclose(p, weights[name] * 0.75) for name, p in ema.module.named_parameters()
    )


# ---- compile, checkpointing, export


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
    model, original = pair_of(lambda: timm_vit(init_values=0.5, depth=1))
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
    pair = [model.eval() for model in pair_of(lambda: hf_vit(attn_implementation="eager"))]
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
    pair = pair_of(lambda: timm_vit(depth=1))
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


# ---- wrappers


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
