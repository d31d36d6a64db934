"""accelerate on a GPU: autocast, bfloat16 on the kernels, drop path, compiled by inductor.

CUDA's autocast keeps LayerNorm in fp32. pytest tests -m gpu
"""

import copy

import pytest
import torch
from adapter_models import dtypes, hf_vit, tensor, timm_vit
from checks import gradients, randomize
from vision_families import hugging_face_model, torchvision_model

import vitfast
from vitfast import ops
from vitfast.kernels.launch import launches_made

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TIMM = dict(img_size=64, patch_size=16, embed_dim=384, num_heads=6)
HF = dict(image_size=64, patch_size=16, hidden_size=384, num_attention_heads=6)
MODELS = {
    "timm": lambda: timm_vit(**TIMM),
    "timm layer scale": lambda: timm_vit(**TIMM, init_values=0.5),
    "HF ViT": lambda: hf_vit(**HF, intermediate_size=1536),
    "HF DINOv2": hugging_face_model("Dinov2Model", **HF, mlp_ratio=2),
    "torchvision": torchvision_model(image_size=64, patch_size=16, hidden_dim=384, num_heads=6, mlp_dim=1536),
}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_dtypes_numbers_and_gradients(name, autocast, weights):
    original = randomize(MODELS[name](), std=0.05).to(DEVICE, weights).train()
    model = vitfast.accelerate(copy.deepcopy(original))
    double = copy.deepcopy(original).double()
    images = torch.randn(5, 3, 64, 64, device=DEVICE).to(weights)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        assert dtypes(model, images, norms=True) == dtypes(original, images, norms=True)
    truth = tensor(double(images.double()))
    upstream = torch.randn_like(truth)
    wanted = gradients(double, truth, upstream)
    errors = []
    for candidate in (model, original):
        before = launches_made()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast), ops.use_kernels("on"):
            out = tensor(candidate(images))
            grads = gradients(candidate, out, upstream.to(out.dtype))
        assert (launches_made() - before > 10) == (candidate is model)  # libraries' kernels are not counted
        assert all(grads[key].dtype == weights for key in wanted)
        missed = sum((grads[key] - wanted[key]).norm() for key in wanted) / sum(g.norm() for g in wanted.values())
        errors.append(((out - truth).norm() / truth.norm(), missed))
    # "At most twice PyTorch's error"; fp32 matrix products may be TF32 in neither.
    floor = 1e-5 if weights == torch.float32 and not autocast else 2e-3
    assert all(mine < 2 * theirs + floor for mine, theirs in zip(*errors)), errors


@pytest.mark.parametrize("autocast", [True, False])
def test_drop_path_draws_what_the_original_draws(autocast):
    original = randomize(timm_vit(**TIMM, drop_path_rate=0.5), std=0.05).to(DEVICE).train()
    model = vitfast.accelerate(copy.deepcopy(original))
    images = torch.randn(64, 3, 64, 64, device=DEVICE)
    outs = []
    for candidate in (model, original):
        torch.manual_seed(1)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            outs.append(tensor(candidate(images)).float())
    torch.testing.assert_close(*outs, atol=0.05 * outs[1].abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", ["timm", "HF ViT", "torchvision"])
def test_compiled_by_inductor(name):
    model = vitfast.accelerate(randomize(MODELS[name](), std=0.05).to(DEVICE))
    images = torch.randn(5, 3, 64, 64, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    out = tensor(model(images))
    upstream = torch.randn_like(out)
    wanted = gradients(model, out, upstream)
    before = launches_made()
    out = tensor(compiled(images))
    grads = gradients(model, out, upstream)
    assert launches_made() - before > 30
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, atol=1e-4, rtol=1e-3)
