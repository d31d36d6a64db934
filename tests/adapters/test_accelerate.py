"""accelerate: equal numbers in three libraries, the same parameters, kernels really used, dtypes."""

import copy

import pytest
import timm
import torch
from adapter_models import (
    BLOCKS,
    MODELS,
    accelerated_pair,
    assert_same,
    classes,
    hf_dinov2,
    hf_vit,
    run_both,
    snapshot,
    tensor,
    timm_vit,
    tv_vit,
)
from checks import assert_close, gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vitfast
from vitfast import ops
from vitfast.kernels.launch import launches_made

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")


@pytest.mark.parametrize("name", MODELS)
def test_output_and_every_gradient_equal_the_original(name):
    make, size, left = MODELS[name]
    pair = accelerated_pair(make)
    images = torch.randn(3, 3, *size)
    assert_same(run_both([model.train() for model in pair], images))
    report = vitfast.acceleration_report(pair[0])
    reasons = [e.why for e in report.left]
    assert len(reasons) == len(left) and all(word in why for word, why in zip(left, reasons)), report
    with torch.no_grad():
        assert_close(tensor(pair[0].eval()(images)), tensor(pair[1].eval()(images)), atol=1e-5, name="eval")
    in_eval = vitfast.acceleration_report(pair[0]).left
    assert len(in_eval) == sum("active" not in word for word in left), "dropout rests outside training"


KERNELS = {
    "timm": lambda: timm_vit(init_values=0.5, reg_tokens=1, drop_path_rate=0.5, act_layer="gelu_tanh"),
    "Hugging Face": lambda: hf_dinov2(drop_path_rate=0.5),
    "torchvision": tv_vit,
}


@interpreted
@pytest.mark.parametrize("library", KERNELS)
def test_kernels_run_and_equal_the_original(library):
    pair = [model.train() for model in accelerated_pair(KERNELS[library])]
    images = torch.randn(3, 3, 16, 16)
    before = launches_made()
    with ops.use_kernels("on"):
        results = run_both(pair, images)
    made = launches_made() - before
    assert made >= 34, made  # two layers: 4 + 3 launches forward, more backward, patches and the last norm
    assert_same(results)


def test_width_and_tokens_of_full_size():
    model = timm.create_model("vit_base_patch16_224", depth=2, num_classes=10).eval()
    images, upstream = torch.randn(1, 3, 224, 224), torch.randn(1, 10)
    assert_same(run_both([vitfast.accelerate(copy.deepcopy(model)), model], images, upstream))


timm_options = st.fixed_dictionaries(
    {
        "class_token": st.just(True),
        "reg_tokens": st.integers(0, 2),
        "global_pool": st.sampled_from(["token", "avg", "max", "map", ""]),
        "init_values": st.sampled_from([None, 0.1]),
        "qkv_bias": st.booleans(),
        "qk_norm": st.booleans(),
        "pre_norm": st.booleans(),
        "no_embed_class": st.booleans(),
        "dynamic_img_size": st.booleans(),
        "drop_path_rate": st.sampled_from([0.0, 0.2]),
        "depth": st.integers(0, 2),
        "act_layer": st.sampled_from(["gelu", "quick_gelu", "silu"]),
    }
).map(lambda options: (timm_vit, options))


hf_options = st.fixed_dictionaries({"qkv_bias": st.booleans(), "hidden_act": st.sampled_from(["gelu", "relu"])}).map(
    lambda options: (hf_vit, options)
)


dinov2_options = st.fixed_dictionaries(
    {"use_swiglu_ffn": st.booleans(), "drop_path_rate": st.sampled_from([0.0, 0.2])}
).map(lambda options: (hf_dinov2, options))


tv_options = st.fixed_dictionaries(
    {"representation_size": st.sampled_from([None, 8]), "dropout": st.sampled_from([0.0, 0.1])}
).map(lambda options: (tv_vit, options))


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(timm_options, hf_options, dinov2_options, tv_options), st.sampled_from([None, True, False]), st.booleans()
)
def test_parameters_are_never_copied_reordered_or_renamed(chosen, residual_in_fp32, frozen):
    make, options = chosen
    model = make(**options)
    model.requires_grad_(not frozen)
    before, types = snapshot(model), classes(model)
    assert vitfast.accelerate(model, residual_in_fp32) is model
    assert snapshot(model) == before
    once = classes(model)
    assert len(once) == len(types) and (once != types or options.get("depth") == 0)
    vitfast.accelerate(model, residual_in_fp32)
    assert classes(model) == once
    model(torch.randn(1, 3, 16, 16))
    assert snapshot(model) == before
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert all((p == 1).all() for p in model.parameters())
    assert vitfast.restore(model) is model
    assert snapshot(model) == before and classes(model) == types


def test_isinstance_names_and_text_stay():
    original = [timm_vit(), hf_vit(), tv_vit()]
    for model in original:
        text = repr(model)
        kinds = [type(m) for m in model.modules()]
        vitfast.accelerate(model)
        assert repr(model) == text
        assert all(isinstance(m, kind) and type(m).__name__ == kind.__name__ for m, kind in zip(model.modules(), kinds))


def test_a_model_around_a_backbone():
    class Segmenter(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = timm_vit(num_classes=0, global_pool="")
            self.neck = nn.Conv2d(32, 4, 1)

        def forward(self, x):
            return self.neck(self.backbone.forward_intermediates(x, indices=1, intermediates_only=True)[0])

    pair = accelerated_pair(Segmenter)
    assert len(vitfast.acceleration_report(pair[0]).replaced) == 6
    pair[0].neck.weight.data.copy_(pair[1].neck.weight)
    assert_same(run_both(pair, torch.randn(2, 3, 16, 16)))


def block_dtypes(model, run):
    """The dtype that each block puts out, and the output's."""
    seen = []
    hooks = [
        m.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        for m in model.modules()
        if type(m).__name__ in BLOCKS
    ]
    seen.append(tensor(run(model)).dtype)
    for hook in hooks:
        hook.remove()
    return seen


DTYPE_MODELS = {
    "timm": timm_vit,
    "timm without positions": lambda: timm_vit(
        pos_embed="none", class_token=False, global_pool="avg"
    ),  # the stream starts in autocast's dtype
    "timm layer scale without positions": lambda: timm_vit(
        pos_embed="none", class_token=False, global_pool="avg", init_values=0.5
    ),
    "HF ViT": hf_vit,
    "HF DINOv2": hf_dinov2,
    "torchvision": tv_vit,
}


@pytest.mark.parametrize("name", DTYPE_MODELS)
def test_autocast_gives_the_originals_dtypes_and_accuracy(name):
    pair = accelerated_pair(DTYPE_MODELS[name])
    images = torch.randn(3, 3, 16, 16)
    truth = tensor(copy.deepcopy(pair[1]).double()(images.double()))
    upstream = torch.randn_like(truth)
    wanted = gradients(double := copy.deepcopy(pair[1]).double(), tensor(double(images.double())), upstream)

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(images)

    assert block_dtypes(pair[0], run) == block_dtypes(pair[1], run)
    errors, gradient_errors = [], []
    for model in pair:
        out = tensor(run(model))
        errors.append((out.double() - truth).norm() / truth.norm())
        grads = gradients(model, out, upstream.to(out.dtype))
        assert all(grads[key].dtype == torch.float32 for key in wanted)
        gradient_errors.append(
            sum((grads[key] - wanted[key]).norm() for key in wanted) / sum(g.norm() for g in wanted.values())
        )
    # bf16 has 8 bits: both lie at about 1e-2 of the truth.
    assert errors[0] < 2 * errors[1] + 1e-3 and errors[1] < 0.05
    assert gradient_errors[0] < 2 * gradient_errors[1] + 1e-3


def test_residual_dtype_can_be_chosen_under_autocast():
    images = torch.randn(2, 3, 16, 16)

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(images)

    bf16, fp32 = torch.bfloat16, torch.float32
    assert block_dtypes(vitfast.accelerate(timm_vit()), run) == [fp32, fp32, bf16]
    assert block_dtypes(vitfast.accelerate(timm_vit(), residual_in_fp32=False), run) == [bf16, bf16, bf16]
    assert block_dtypes(vitfast.accelerate(DTYPE_MODELS["timm without positions"](), residual_in_fp32=True), run)[
        :2
    ] == [fp32, fp32]
    model = vitfast.accelerate(vitfast.accelerate(timm_vit(), residual_in_fp32=False))
    assert block_dtypes(model, run)[0] == fp32, "the last call decides"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_one_dtype(dtype):
    for make in (timm_vit, hf_vit, tv_vit):
        pair = [model.to(dtype) for model in accelerated_pair(make)]
        images = torch.randn(2, 3, 16, 16, dtype=dtype)

        def run(model, images=images):
            return model(images)

        assert block_dtypes(pair[0], run) == block_dtypes(pair[1], run) == [dtype] * 3
        assert_close(tensor(run(pair[0])), tensor(run(pair[1])), atol=0.05 if dtype == torch.bfloat16 else 1e-12)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_on_kernels(dtype):
    pair = accelerated_pair(lambda: timm_vit(init_values=0.5))
    images = torch.randn(2, 3, 16, 16)
    truth = copy.deepcopy(pair[1]).double()(images.double())
    before = launches_made()
    with ops.use_kernels("on"), torch.autocast("cpu", dtype):
        out, expected = (model(images) for model in pair)
    assert out.dtype == expected.dtype == dtype and launches_made() - before >= 14
    assert (out.double() - truth).norm() < 2 * (expected.double() - truth).norm() + torch.finfo(
        dtype
    ).eps * truth.norm()
