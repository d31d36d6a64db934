"""accelerate with LoRA, parametrisations, hooks, quantisation, copies, moving averages."""

import copy
import functools
import io
import pickle

import pytest
import torch
from adapter_models import (
    ALL_PARTS,
    IMAGES,
    MAKERS,
    accelerated_pair,
    assert_equal_models,
    hf_vit,
    running,
    tensor,
    timm_vit,
    tv_vit,
)
from checks import assert_close, randomize
from operation_calls import calls
from torch import nn
from torch.nn.modules import module as torch_module

import vitfast
import vitfast.adapters.attention_interface  # noqa: F401  registers "vitfast"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")


@pytest.mark.parametrize("order", ["accelerate first", "LoRA first"])
@pytest.mark.parametrize(
    "library, targets",
    [("timm", ["qkv"]), ("timm", ["qkv", "proj", "fc1", "fc2"]), ("Hugging Face", ["q_proj", "v_proj"])],
)
def test_lora_layers_run_the_librarys_code(library, targets, order):
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
    blocks = 2 if len(targets) < 4 else 4
    left = [e.why for e in vitfast.acceleration_report(model).left if e.part]
    assert len(left) == blocks and all("peft.tuners.lora" in why for why in left)
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
    pair = accelerated_pair(MAKERS[library])
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
    model, original = accelerated_pair(timm_vit)
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
    pair = accelerated_pair(timm_vit)
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
    for model in accelerated_pair(hf_vit):
        calls = []
        with torch_module.register_module_forward_hook(lambda m, i, o, calls=calls: calls.append(type(m).__name__)):
            model(IMAGES)
        counts.append(calls)
    assert counts[0] == counts[1] and counts[0].count("Linear") == 13


def test_a_forward_set_on_the_instance():
    """As Hugging Face Accelerate and many recipes do."""
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
    pair = accelerated_pair(timm_vit)
    quantised = [torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8) for model in pair]
    assert running(quantised[0]) == 2 and running(pair[0]) == ALL_PARTS
    assert torch.equal(quantised[0](IMAGES), quantised[1](IMAGES))

    class Marked(torch.Tensor):
        pass

    weight = pair[0].blocks[0].mlp.fc1
    weight.weight = nn.Parameter(weight.weight.detach().as_subclass(Marked))
    assert running(pair[0]) == ALL_PARTS - 1 and "Marked" in str(vitfast.acceleration_report(pair[0]))
    assert_close(pair[0](IMAGES).as_subclass(torch.Tensor), pair[1](IMAGES), atol=1e-5)


def test_the_report_knows_leaves_before_a_call():
    """A MAP head's MLP whose layers are another's, a norm without weights."""
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(32, 16, 3, 5, "map", 32, 2, 2, class_token=False)
    vitfast.accelerate(model.eval())
    assert not {entry.part for entry in vitfast.acceleration_report(model).left} & {"MLP", "norm"}
    model.attn_pool.mlp.fc1 = nn.Sequential(model.attn_pool.mlp.fc1)
    model.norm = vitfast.accelerate(nn.Sequential(nn.LayerNorm(32, elementwise_affine=False)))[0]
    for _ in range(2):  # before a call, and after it
        found = {entry.name: entry.why for entry in vitfast.acceleration_report(vitfast.accelerate(model)).left}
        assert "Sequential" in found["attn_pool.mlp"] and "no weight per channel" in found["norm"], found
        model(torch.randn(1, 3, 32, 32))


def test_modules_added_to_a_sequence_are_called():
    """torchvision's MLP calls all that it holds; in another order, or with an adapter behind, it is another."""
    for change in (lambda mlp: mlp.append(nn.Linear(32, 32)), lambda mlp: mlp.insert(3, nn.LayerNorm(64))):
        for first in (True, False):  # before accelerate, and after
            model = randomize(tv_vit()).eval()
            original = copy.deepcopy(model)
            if not first:
                vitfast.accelerate(model)
            for each in (model, original):
                torch.manual_seed(1)
                change(each.encoder.layers[0].mlp)
            vitfast.accelerate(model)
            assert_close(model(IMAGES), original(IMAGES), atol=1e-5)
            left = str(vitfast.acceleration_report(model))
            assert "is not known to vitfast" in left if first else "mlp holds other modules than it did" in left


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_layer_scale_of_one_number(shape):
    model, original = accelerated_pair(functools.partial(timm_vit, init_values=0.5))
    for each in (model, original):
        each.blocks[0].ls1.gamma = nn.Parameter(torch.full(shape, 0.3))
    assert_close(model(IMAGES), original(IMAGES), atol=1e-5)
    assert "attention block: its layer scale is no tensor per channel" in str(vitfast.acceleration_report(model))


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_records_the_librarys_code():
    model, original = accelerated_pair(timm_vit)
    traced = torch.jit.trace(model.eval(), IMAGES)
    assert_close(traced(IMAGES), original.eval()(IMAGES), atol=1e-5)
    assert calls(model, IMAGES)  # and afterwards the operations
    with pytest.raises(NotImplementedError, match="torch.jit.trace cannot record it; torch.export.export"):
        torch.jit.trace(vitfast.ViT(32, 16, embed_dim=32, num_heads=2, depth=1), torch.randn(1, 3, 32, 32))


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
