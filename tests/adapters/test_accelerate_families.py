"""accelerate on a small model of every family: the same numbers, and the operations that the report claims."""

import copy

import pytest
import torch
from adapter_models import assert_same, classes, snapshot
from checks import assert_close, gradients, randomize
from operation_calls import calls, claimed
from torch import nn

import vitfast
from vitfast import ops
from vitfast.adapters import fallbacks
from vitfast.adapters.families import FAMILIES
from vitfast.kernels.launch import launches_made

NAMES = {f"{family.library} {family.name}": family for family in FAMILIES}


def tokens(output) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


def pair_of(name: str, dtype=torch.float32):
    """(accelerated, original, a batch)."""
    family = NAMES[name]
    pytest.importorskip(family.library)
    model = randomize(family.make()).to(dtype)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in family.batch().items()}
    return vitfast.accelerate(copy.deepcopy(model)), model, batch


def both(name, model, original, batch):
    results = []
    for each in (model, original):
        torch.manual_seed(1)
        out = NAMES[name].counted(tokens(each(**batch)), batch)
        upstream = torch.randn(out.shape, generator=torch.manual_seed(2), dtype=out.dtype)
        results.append((out, gradients(each, out, upstream)))
    return results


@pytest.mark.parametrize("name", NAMES)
def test_numbers_gradients_and_operations(name, caplog):
    model, original, batch = pair_of(name)
    fallbacks._said.clear()
    assert list(model.state_dict()) == list(original.state_dict())
    assert_same(both(name, model.train(), original.train(), batch), atol=2e-5, rtol=1e-4)
    assert_same(both(name, model.eval(), original.eval(), batch), atol=2e-5, rtol=1e-4)
    report, left = vitfast.acceleration_report(model), NAMES[name].left
    assert [why for e, why in zip(report.left, left) if why not in e.why] == [], report
    assert len(report.left) == len(left), report
    assert not caplog.records, "nothing runs the library's code that accelerate has not said"
    assert calls(model, **batch) == claimed(report), report
    assert sum(claimed(report).values()) >= 5


ON_KERNELS = {
    "timm EVA-02": 9,
    "timm q and k norm": 9,
    "transformers AIMv2": 9,
    "transformers SigLIP 2, padded": 9,
    "timm NaFlexViT, padded": 9,
    "transformers Qwen2.5-VL": 9,
    "transformers Pixtral": 9,
}


@pytest.mark.slow(6)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_accelerate_gpu.py has the GPU's")
@pytest.mark.parametrize("name", ON_KERNELS)
def test_on_kernels(name):
    model, original, batch = pair_of(name)
    before = launches_made()
    with torch.no_grad():
        expected = NAMES[name].counted(tokens(original(**batch)), batch)
        with ops.use_kernels("on"):
            out = NAMES[name].counted(tokens(model(**batch)), batch)
    assert launches_made() - before >= ON_KERNELS[name]
    assert_close(out, expected, atol=1e-5)


DOUBLE = ("timm EVA-02", "timm BEiT", "timm NaFlexViT, padded", "transformers DINOv3 H+", "timm AIMv2")


@pytest.mark.parametrize("name", DOUBLE)
def test_in_double_precision(name):
    assert_same(both(name, *pair_of(name, torch.float64)), atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize(
    "name", ["timm EVA-02", "transformers Qwen2.5-VL", "transformers SAM", "torch nn.TransformerEncoder"]
)
def test_restore(name):
    family = NAMES[name]
    pytest.importorskip(family.library)
    model = family.make()
    before, types = snapshot(model), classes(model)
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    vitfast.accelerate(model)
    assert classes(model) != types and snapshot(model) == before
    vitfast.restore(model)
    assert classes(model) == types and snapshot(model) == before
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == implementation


def mlp_layer(model: nn.Module) -> tuple[nn.Module, str]:
    """The parent and the name of the first MLP's first linear layer."""
    for path in dict(model.named_modules()):
        if path.endswith((".fc1", ".fc1_g", ".up_proj", ".linear1")):
            parent, _, name = path.rpartition(".")
            return model.get_submodule(parent), name
    raise AssertionError("no MLP")


CHANGED = ("timm EVA-02", "timm BEiT", "transformers DINOv3 H+", "transformers CLIP", "torch nn.TransformerEncoder")


@pytest.mark.parametrize("name", CHANGED)
def test_a_replaced_layer_a_hook_and_active_dropout(name):
    """As LoRA, quantisation and probes have it."""
    model, original, batch = pair_of(name)
    parts = len(vitfast.acceleration_report(model).replaced)
    for each in (model, original):
        parent, path = mlp_layer(each)
        setattr(parent, path, nn.Sequential(getattr(parent, path)))
    assert_same(both(name, model, original, batch), atol=2e-5, rtol=1e-4)
    report = vitfast.acceleration_report(model)
    assert len(report.replaced) == parts - 1 and f"{path} is torch.nn.modules.container.Sequential" in str(report)
    seen = []
    attentions = [m for m in model.modules() if "ttention" in type(m).__name__ and not hasattr(m, "vitfast_layer")]
    attentions[0].register_forward_hook(lambda *_: seen.append(1))
    assert_same(both(name, model, original, batch), atol=2e-5, rtol=1e-4)
    assert seen and len(vitfast.acceleration_report(model).replaced) == parts - 2
    assert calls(model, **batch) == claimed(vitfast.acceleration_report(model))


@pytest.mark.parametrize("name, targets", [("timm EVA-02", ["q_proj", "v_proj"]), ("transformers CLIP", ["v_proj"])])
def test_lora(name, targets):
    peft = pytest.importorskip("peft")
    adapted = []
    for model in pair_of(name)[:2]:
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        adapted.append(peft.get_peft_model(model, config))
    batch = NAMES[name].batch()
    assert_same(both(name, *adapted, batch), atol=2e-5, rtol=1e-4)
    left = [entry.why for entry in vitfast.acceleration_report(adapted[0]).left]
    assert len(left) == 2 and all("peft.tuners.lora" in why for why in left)
    after = vitfast.accelerate(adapted[1])
    assert_close(tokens(after(**batch)), tokens(adapted[0](**batch)), atol=1e-5)
    merged = vitfast.accelerate(after.merge_and_unload())
    assert not vitfast.acceleration_report(merged).left


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per")
@pytest.mark.parametrize("name", ["timm EVA-02", "timm AIMv2", "transformers CLIP"])
def test_quantised_linear_layers_run_the_librarys_code(name):
    model, original, batch = pair_of(name)
    quantised = [
        torch.ao.quantization.quantize_dynamic(m.eval(), {nn.Linear}, dtype=torch.qint8) for m in (model, original)
    ]
    report = vitfast.acceleration_report(quantised[0])
    assert {entry.part for entry in report.replaced} == {"patch projection", "norm"}, report
    assert len(vitfast.acceleration_report(model).left) == 0
    assert_close(tokens(quantised[0](**batch)), tokens(quantised[1](**batch)), atol=1e-6)


@pytest.mark.parametrize("name", ["timm EVA-02", "timm q and k norm", "transformers AIMv2", "transformers BEiT"])
def test_autocast_has_the_originals_dtype_and_accuracy(name):
    model, original, batch = pair_of(name)
    truth = tokens(copy.deepcopy(original).double()(**{k: v.double() for k, v in batch.items()}))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        mine, theirs = tokens(model(**batch)), tokens(original(**batch))
    assert mine.dtype == theirs.dtype
    error = [((out.double() - truth).norm() / truth.norm()).item() for out in (mine, theirs)]
    assert error[0] < 2 * error[1] + 1e-3 and error[1] < 0.05, error


@pytest.mark.slow(8)
@pytest.mark.parametrize("name", ["timm EVA-02", "transformers SigLIP 2, padded", "torch nn.TransformerEncoder"])
def test_compiled(name):
    model, original, batch = pair_of(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph="SigLIP" not in name, backend="eager")  # whose positions break the graph
    out, expected = tokens(compiled(**batch)), tokens(original(**batch))
    assert_close(out, expected, atol=1e-5)
    upstream = torch.randn_like(expected)
    mine, theirs = gradients(model, out, upstream), gradients(original, expected, upstream)
    for key, grad in theirs.items():
        assert_close(mine[key], grad, atol=2e-5, rtol=1e-4, name=key)


def test_drop_path_draws_what_the_library_draws():
    from timm.models.eva import EvaBlock

    original = randomize(EvaBlock(32, 2, init_values=0.5, drop_path=0.5)).train()
    block = vitfast.accelerate(copy.deepcopy(original))
    x = torch.randn(16, 5, 32)
    outs = []
    for each in (block, original):
        torch.manual_seed(3)
        outs.append(each(x))
    assert_close(*outs, atol=1e-5)
    assert calls(block, x) == {"attention block": 1, "MLP block": 1}


@pytest.mark.parametrize("name", ["timm EVA-02", "timm BEiT"])
def test_a_bias_in_a_layer_that_should_have_none(name):
    """timm adds it where there is no bias of q beside it, and leaves it out where there is."""
    model, original, batch = pair_of(name)
    for has_own in (True, False):
        for each in (model, original):
            attention = each.blocks[0].attn
            layer = attention.qkv if attention.qkv is not None else attention.q_proj
            torch.manual_seed(1)
            layer.bias = nn.Parameter(torch.randn(layer.out_features))
            if not has_own and attention.qkv is not None:
                attention.q_bias = attention.v_bias = None
        assert_same(both(name, model, original, batch), atol=2e-5, rtol=1e-4)
    if model.blocks[0].attn.qkv is not None:
        assert "attn.qkv has a bias beside q_bias" in str(vitfast.acceleration_report(model))


def test_one_layer_beside_three():
    """timm's Eva takes q, k and v from `qkv` where there is one."""
    from timm.models.eva import Eva

    original = randomize(Eva(32, 16, embed_dim=32, depth=1, num_heads=2, num_classes=3, qkv_fused=False)).eval()
    model = vitfast.accelerate(copy.deepcopy(original))
    for each in (model, original):
        torch.manual_seed(1)
        each.blocks[0].attn.qkv = nn.Linear(32, 96, bias=False)
    images = torch.randn(2, 3, 32, 32)
    assert_close(model(images), original(images), atol=1e-5)
    assert len(vitfast.acceleration_report(model).replaced) == 4
