"""The options residual_in_fp32 and keep, and the dtypes and accuracy under autocast and in 16 bits."""

import copy

import pytest
import torch
from adapter_models import IMAGES, NAFLEX, NAMED, dtypes, pair, timm_vit
from checks import assert_close, outputs, results, slow_but

import vitfast
from vitfast import ops

WITHOUT = dict(pos_embed="none", class_token=False, global_pool="avg")
LIBRARIES = ["timm ViT", "transformers ViT", "torchvision ViT"]
OTHERS = ["timm EVA-02", "timm q and k norm", "transformers AIMv2", NAFLEX]
STARTS_IN_16_BITS = "timm without positions"  # its stream has autocast's dtype


@pytest.mark.parametrize("name", slow_but(["timm ViT"], [*LIBRARIES, *OTHERS, STARTS_IN_16_BITS]))
def test_autocast_gives_the_originals_dtypes_and_accuracy(name):
    model, original = pair(NAMED[name].make() if name in NAMED else timm_vit(**WITHOUT, init_values=0.5))
    batch = NAMED[name].batch() if name in OTHERS else {"pixel_values" if "transformers" in name else "x": IMAGES}
    double = copy.deepcopy(original).double()
    in_double = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    truth, wanted = results(double, double, in_double)
    if name not in OTHERS:
        with torch.autocast("cpu", torch.bfloat16):
            assert dtypes(model, IMAGES) == dtypes(original, IMAGES)
    errors = []
    for each in (model, original):
        with torch.autocast("cpu", torch.bfloat16):
            outs, grads = results(each, each, batch)
        assert all(grads[key] is None or grads[key].dtype == torch.float32 for key in wanted)
        missed = sum((grads[key] - g).norm() for key, g in wanted.items() if g is not None)
        out = (outs[0].double() - truth[0]).norm() / truth[0].norm()
        errors.append((out, missed / sum(g.norm() for g in wanted.values() if g is not None), outs[0].dtype))
    (mine, my_gradients, dtype), (theirs, their_gradients, their_dtype) = errors
    # bf16 has 8 bits: both lie at about 1e-2 of the truth.
    assert dtype == their_dtype and mine < 2 * theirs + 1e-3 and theirs < 0.05
    assert my_gradients < 2 * their_gradients + 1e-3


@pytest.mark.slow
def test_residual_dtype_can_be_chosen_under_autocast():
    bf16, fp32 = torch.bfloat16, torch.float32

    def stream(model) -> list[torch.dtype]:
        """The dtypes that reach the second layer and the last norm: a hook on a layer's output sees the library's."""
        seen = []
        for module in (model.blocks[1], model.norm):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        with torch.autocast("cpu", bf16):
            model(IMAGES)
        return seen

    assert stream(vitfast.accelerate(timm_vit(), residual_in_fp32=False)) == [bf16, bf16]
    assert stream(vitfast.accelerate(timm_vit(**WITHOUT, fc_norm=False), residual_in_fp32=True)) == [fp32, fp32]
    model = vitfast.accelerate(vitfast.accelerate(timm_vit(), residual_in_fp32=False))
    assert stream(model)[0] == fp32, "the last call decides"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
def test_what_backward_would_compute_again_can_be_kept():
    """Of each layer two norms' outputs and the input of the MLP's last layer."""
    model = timm_vit(depth=1)

    def numbers(**options) -> int:
        kept = {}
        remember = lambda t: kept.update({t.data_ptr(): t.numel()}) or t  # noqa: E731
        with ops.use_kernels("on"):
            outputs(vitfast.accelerate(model, **options), [IMAGES])  # compiled before numbers are counted
            with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
                outputs(model, [IMAGES])
        return sum(kept.values())

    tokens, (block, *_) = 2 * 5, model.blocks
    more = len(model.blocks) * tokens * (2 * block.norm1.weight.numel() + block.mlp.fc1.out_features)
    assert numbers(keep="all") - numbers() == more, "the last call decides"
    with pytest.raises(vitfast.InputError, match="keep must be 'least' or 'all', got 'auto'"):
        vitfast.accelerate(model, keep="auto")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_model_in_one_dtype(name, dtype):
    model, original = (each.to(dtype) for each in pair(NAMED[name].make()))
    images = IMAGES.to(dtype)
    assert dtypes(model, images) == dtypes(original, images) == [dtype] * 3
    atol = 0.05 if dtype == torch.bfloat16 else 1e-12
    assert_close(*(outputs(each, [images])[0] for each in (model, original)), atol=atol)
