"""Whole models on interpreted kernels: one toy ViT for each kind of block, autocast, training, processes."""

import copy

import pytest
import torch
from checks import assert_close, gradients, randomize
from kernel_ranks import SMALL, head_start, one_of_two, train
from processes import done, ranks
from speed import first

from vitfast import ViT, ops
from vitfast.kernels.launch import launches_made

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
AVERAGE = dict(class_token=False, global_pool="avg")
KINDS = {  # every block that launches other kernels, or hands them other arguments
    "registers, layer scale": dict(reg_tokens=1, init_values=0.5),
    "DINOv3": dict(rope="dinov3", pos_embed="none", reg_tokens=4, init_values=0.5, qkv_bias=False, norm_eps=1e-5),
    "EVA-02": dict(rope="cat", ref_feat_shape=(3, 5), swiglu_mlp=True, scale_mlp_norm=True, **AVERAGE),
    "CLIP": dict(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5),
    "SigLIP": dict(class_token=False, global_pool="map", act_layer="gelu_tanh"),
    "norms everywhere": dict(qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True, residual_in_fp32=True),
    "DINOv2 giant": dict(swiglu_mlp=True, init_values=0.5),
    "relative": dict(pos_embed="relative", **AVERAGE),  # all but the attention
    "hybrid": dict(patch_size=4, depth=1, backbone=dict(layers=[1], width=0.5)),  # a 1 x 1 patch of many channels
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_follows_float64(kind):
    """Raw pixels to gradients of every parameter, with blocks checkpointed, which changes no bit."""
    options = dict(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    model = randomize(ViT(**{**SMALL, **KINDS[kind], **options}), std=0.2).eval()
    raw, upstream = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), torch.randn(2, 5)
    exact = copy.deepcopy(model).double()
    mean, std = (torch.tensor(options[name], dtype=torch.float64).view(3, 1, 1) for name in ("mean", "std"))
    truth = gradients(exact, exact((raw / 255.0 - mean) / std), upstream.double())
    before, found = launches_made(), []
    with ops.use_kernels("on"):
        for enable in (False, True):
            model.set_grad_checkpointing(enable)
            found.append(gradients(model, model(raw), upstream))
    assert launches_made() > before
    for name, gradient in found[0].items():
        size = truth[name].abs().max().item() + 1
        assert_close(gradient.double(), truth[name], atol=5e-4 * size, name=name)
        if kind != "hybrid":
            assert torch.equal(gradient, found[1][name]), name


@pytest.mark.parametrize("dtype", first(1, [torch.float16, torch.bfloat16]), ids=str)
def test_autocast_gives_outputs_of_its_dtype_and_fp32_gradients(dtype):
    """The error's norm is at most twice PyTorch's under the same autocast, and one rounding.

    Of the output and of the gradients.
    """
    model = randomize(ViT(**SMALL), std=0.2)
    x, upstream = torch.randn(2, 3, 16, 16), torch.randn(2, 5)
    exact = copy.deepcopy(model).double()
    out = exact(x.double())
    truth = gradients(exact, out, upstream.double()) | {"output": out}

    def errors(mode):
        with ops.use_kernels(mode), torch.autocast("cpu", dtype):
            out = model(x)
        results = gradients(model, out, upstream.to(dtype))
        assert out.dtype == dtype and all(grad.dtype == torch.float32 for grad in results.values())
        results["output"] = out
        return {name: ((t.double() - truth[name]).norm() / truth[name].norm()).item() for name, t in results.items()}

    own = errors("off")
    for name, error in errors("on").items():
        assert error <= 2 * own[name] + torch.finfo(dtype).eps / 2, f"{name}: {error:.2e}, PyTorch {own[name]:.2e}"


@pytest.mark.long
def test_compiled_gradients_equal_eager_ones():
    model = randomize(ViT(**SMALL))
    x, upstream = torch.randn(3, 3, 16, 16), torch.randn(3, 5)
    with ops.use_kernels("on"):
        expected = gradients(model, model(x), upstream)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        mine = gradients(model, compiled(x), upstream)
        before = launches_made()
        compiled(torch.randn(5, 3, 16, 16))
        assert launches_made() > before
    for name, theirs in expected.items():
        assert_close(mine[name], theirs, atol=1e-6, rtol=1e-5, name=name)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_equal_one(tmp_path, kind):
    """The trainer's are in tests/train; here the kernels run."""
    torch.manual_seed(3)
    data = [(torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))) for _ in range(2)]
    torch.save(data, tmp_path / "data.pt")
    done(ranks(2, one_of_two, kind, tmp_path))
    model = head_start()
    train(model, data)
    state = torch.load(tmp_path / "state.pt")
    for name, value in model.state_dict().items():
        assert_close(state[name], value, atol=1e-6, rtol=1e-5, name=name)
