"""Arguments that mean nothing, of every operation, each by its name; mean and std of raw images."""

import inspect

import numpy as np
import pytest
import torch
from checks import assert_close

from vitfast import InputError, ViT, ops
from vitfast.kernels.launch import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")
MODES = ["off", pytest.param("on", marks=interpreted)]
B, N, D, F = 2, 3, 16, 24

BLOCK = dict(x=(B, N, D), norm_weight=(D,), norm_bias=(D,), layer_scale=(D,), drop_path=(B,))
GATED = dict(up_weight=(F, D), up_bias=(F,), gate_weight=(F, D), gate_bias=(F,), down_weight=(D, F), down_bias=(D,))
GATED |= dict(inner_norm_weight=(F,), inner_norm_bias=(F,))
SHAPES = {
    "layer_norm": dict(x=(B, N, D), weight=(D,), bias=(D,)),
    "add_layer_norm": dict(x=(B, N, D), residual=(B, N, D), weight=(D,), bias=(D,), layer_scale=(D,), drop_path=(B,)),
    "attention": dict(qkv=(B, N, 1, D), k=(B, N, 1, D), v=(B, N, 1, D)),
    "linear_gelu": dict(x=(B, N, D), weight=(F, D), bias=(F,)),
    "linear_residual": dict(
        x=(B, N, D), weight=(D, D), bias=(D,), residual=(B, N, D), layer_scale=(D,), drop_path=(B,)
    ),
    "mlp": dict(x=(B, N, D), fc1_weight=(F, D), fc1_bias=(F,), fc2_weight=(D, F), fc2_bias=(D,)),
    "attention_block": dict(**BLOCK, qkv_weight=(3 * D, D), qkv_bias=(3 * D,), proj_weight=(D, D), proj_bias=(D,)),
    "mlp_block": dict(**BLOCK, fc1_weight=(F, D), fc1_bias=(F,), fc2_weight=(D, F), fc2_bias=(D,)),
    "gated_mlp": dict(x=(B, N, D), **GATED),
    "gated_mlp_block": dict(**BLOCK, **GATED),
    "rms_norm": dict(x=(B, N, D), weight=(D,)),
    "patch_embed": dict(images=(B, 3, 4, 8), weight=(D, 3, 4, 4), bias=(D,), cls_token=(1, 1, D), pos_embed=(1, 3, D)),
}
OPTIONS = {"attention_block": dict(num_heads=1)}
WRONG = (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


def arguments(name):
    return {key: torch.rand(shape) for key, shape in SHAPES[name].items()} | OPTIONS.get(name, {})


def shown(name, key):
    return "q" if (name, key) == ("attention", "qkv") else key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_of_another_dtype_is_named(name, mode):
    operation, good = getattr(ops, name), arguments(name)
    with ops.use_kernels(mode):
        operation(**good)
        for key in SHAPES[name]:
            for dtype in WRONG:
                if key == "images" and dtype == torch.float8_e4m3fn:
                    continue  # images are converted
                with pytest.raises(TypeError, match=rf"^{name}: {shown(name, key)} must be .*, got {dtype}$"):
                    operation(**{**good, key: good[key].to(dtype)})


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_no_tensor_is_named(name):
    operation, good = getattr(ops, name), arguments(name)
    optional = {key for key, p in inspect.signature(operation).parameters.items() if "None" in str(p.annotation)}
    for key in SHAPES[name]:
        for value in (good[key].numpy(), good[key].tolist(), None):
            if value is None and key in optional:
                continue
            with pytest.raises(TypeError, match=rf"^{name}: {shown(name, key)} must be a tensor, got "):
                operation(**{**good, key: value})
    if "x" in good:
        with pytest.raises(ValueError, match=rf"^{name}: x must be \(\.\.\., D\), got \(\)"):
            operation(**{**good, "x": torch.tensor(1.0)})
    with pytest.raises(TypeError):
        operation()


@pytest.mark.parametrize("mode", MODES)
def test_numbers_that_mean_nothing_are_named(mode):
    with ops.use_kernels(mode):
        for name in ("layer_norm", "add_layer_norm", "rms_norm", "attention_block", "mlp_block", "gated_mlp_block"):
            for eps in (-1.0, float("nan"), float("inf"), 1e300, True, np.True_, "1e-6", None, torch.tensor(1e-6)):
                with pytest.raises(ValueError, match=rf"^{name}: eps must be a number from 0 to 3.4e\+38, got "):
                    getattr(ops, name)(**arguments(name), eps=eps)
        for name in ("gated_mlp", "gated_mlp_block"):
            with pytest.raises(ValueError, match=f"^{name}: inner_eps must be a number from 0 to "):
                getattr(ops, name)(**arguments(name), inner_eps=-1.0)
        for scale in (float("nan"), float("inf"), 1e300, -1e300, 10**400, True, "1", torch.tensor(1.0)):
            with pytest.raises(ValueError, match="^attention: scale must be None or a number that float32 holds, got "):
                ops.attention(torch.rand(B, N, 3, 1, D), scale=scale)
        for heads in (1.0, True, np.float32(1), None):
            with pytest.raises(TypeError, match="^attention_block: num_heads must be an integer, got "):
                ops.attention_block(**{**arguments("attention_block"), "num_heads": heads})
        for name in ("attention_block", "mlp_block"):
            for flag in ("no", 1, None):
                with pytest.raises(TypeError, match=f"^{name}: residual_in_fp32 must be True or False, got {flag!r}"):
                    getattr(ops, name)(**arguments(name), residual_in_fp32=flag)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_of_numpy_are_numbers(mode):
    """As eps, scale and num_heads, with the result of Python's numbers."""
    exact = dict(atol=0, rtol=0)
    with ops.use_kernels(mode):
        for name in ("layer_norm", "add_layer_norm", "attention_block", "mlp_block"):
            operation, given = getattr(ops, name), arguments(name)
            for eps in (np.float32(0.5), np.float64(0.5), np.int64(1)):
                torch.testing.assert_close(operation(**given, eps=eps), operation(**given, eps=float(eps)), **exact)
        qkv = torch.rand(B, N, 3, 1, D)
        truth = torch.nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), scale=0.25)
        for scale in (np.float32(0.25), np.float64(0.25)):
            assert_close(ops.attention(qkv, scale=scale).transpose(1, 2), truth, atol=1e-5)
        given = arguments("attention_block") | {"num_heads": 1}
        heads = ops.attention_block(**given | {"num_heads": np.int64(1)})
        torch.testing.assert_close(heads, ops.attention_block(**given), **exact)


@pytest.mark.parametrize("mode", MODES)
def test_heads_and_patches_of_no_size_are_named(mode):
    with ops.use_kernels(mode):
        for tensors in ([torch.rand(B, N, 3, 1, 0)], [torch.rand(B, N, 1, 0)] * 3):
            with pytest.raises(ValueError, match="^attention: the head size must be at least 1, got "):
                ops.attention(*tensors)
        empty = dict(qkv_weight=torch.rand(0, D), qkv_bias=None, proj_weight=torch.rand(D, 0))
        with pytest.raises(ValueError, match="^attention_block: qkv_weight must have 3 . num_heads . head size rows"):
            ops.attention_block(**arguments("attention_block") | empty)
        with pytest.raises(ValueError, match="^patch_embed: weight must have patches of at least 1 x 1, got "):
            ops.patch_embed(torch.rand(2, 3, 8, 8), torch.rand(D, 3, 0, 0), None)


RAW = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.manual_seed(3))
KERNEL, MEAN, STD = torch.randn(D, 3, 4, 4, generator=torch.manual_seed(4)), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
GIVEN = {
    "tuple": tuple,
    "list": list,
    "numpy": np.array,
    "float32 array": lambda v: np.array(v, dtype=np.float32),
    "tensor": torch.tensor,
    "float64": lambda v: torch.tensor(v, dtype=torch.float64),
    "(C, 1, 1)": lambda v: torch.tensor(v).view(-1, 1, 1),
    "(1, C, 1, 1)": lambda v: torch.tensor(v).view(1, -1, 1, 1),
    "numpy numbers": lambda v: [np.float32(n) for n in v],
}
ONE = {"number": 0.5, "list of one": [0.5], "0-d tensor": torch.tensor(0.5), "numpy number": np.float32(0.5)}


def expected(mean, std):
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
    return torch.nn.functional.conv2d((RAW.double() / 255 - mean) / std, KERNEL.double(), stride=4).flatten(2).mT


@pytest.mark.parametrize("mode", MODES)
def test_mean_and_std_in_any_clothes(mode):
    with ops.use_kernels(mode):
        for name, wrap in GIVEN.items():
            out = ops.patch_embed(RAW, KERNEL, None, mean=wrap(MEAN), std=wrap(STD))
            assert_close(out.double(), expected(MEAN, STD), atol=1e-4, name=name)
        for name, value in ONE.items():
            out = ops.patch_embed(RAW, KERNEL, None, mean=value, std=value)
            assert_close(out.double(), expected([0.5], [0.5]), atol=1e-4, name=name)


def test_a_model_takes_them_too(tmp_path):
    sizes = dict(img_size=8, patch_size=4, embed_dim=D, depth=1, num_heads=1, num_classes=0)
    for wrap in GIVEN.values():
        model = ViT(**sizes, mean=wrap(MEAN), std=wrap(STD))
        assert model.mean == pytest.approx(MEAN) and model.std == pytest.approx(STD)
    for value in ONE.values():
        assert ViT(**sizes, mean=value).mean == (0.5,) * 3
    model.save_pretrained(tmp_path)
    assert ViT.from_pretrained(tmp_path).mean == model.mean


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "value, error, message",
    [
        ((0.4, 0.5), ValueError, "must be one number or 3, one for each of the 3 channels, got 2"),
        (np.ones(2), ValueError, "must be one number or 3.*, got 2"),
        (torch.ones(3, 2), ValueError, r"must be one number or 3.*, got shape \(3, 2\)"),
        (torch.ones(3, 1, 3), ValueError, r"must be one number or 3.*, got shape \(3, 1, 3\)"),
        ([], ValueError, "must be one number or 3.*, got 0"),
        ("imagenet", TypeError, "must be one number or 3.*, got 'imagenet'"),
        (("a", "b", "c"), TypeError, "must be one number or 3.*, got"),
        (torch.ones(3, dtype=torch.complex64), TypeError, "must be one number or 3.*, got torch.complex64"),
        (torch.ones(3, dtype=torch.bool), TypeError, "must be one number or 3.*, got torch.bool"),
        (float("nan"), ValueError, "must be from -?1e.06 to 1e.06, got"),
        (1e300, ValueError, "must be from -?1e.06 to 1e.06, got"),
        ((0.1, 10**400, 0.1), ValueError, "must be from -?1e.06 to 1e.06, got"),
        ((0.1, 0.0, 0.1), ValueError, "must be from 1e-06 to 1e.06, got"),
        ((0.1, -0.1, 0.1), ValueError, "must be from 1e-06 to 1e.06, got"),
        (1e-300, ValueError, "must be from 1e-06 to 1e.06, got"),
        (1e-40, ValueError, "must be from 1e-06 to 1e.06, got"),
        (True, TypeError, "must be one number or 3.*, got torch.bool"),
        ([True, True, True], TypeError, "must be one number or 3.*, got torch.bool"),
        (torch.ones(3, device="meta"), TypeError, "must be one number or 3.*, got a meta tensor"),
        (torch.ones(3).to_sparse(), TypeError, "must be one number or 3.*, got a sparse tensor"),
    ],
    ids=lambda value: " ".join(str(value).split())[:20],
)
def test_a_wrong_mean_or_std_is_named(value, error, message, mode):
    for name in ("std",) if "from 1e" in message else ("mean", "std"):
        with ops.use_kernels(mode), pytest.raises(error, match=f"^patch_embed: {name} {message}"):
            ops.patch_embed(RAW, KERNEL, None, **{name: value})
        with pytest.raises(InputError, match=f"^ViT: {name} must be "):
            ViT(img_size=8, patch_size=4, embed_dim=D, depth=1, num_heads=1, **{name: value})


@interpreted
def test_a_tensor_of_means_where_no_kernel_can_take_it():
    """Differentiated, or compiled, plain PyTorch runs; switched on, an error says why not."""
    mean = torch.tensor(MEAN, requires_grad=True)
    out = ops.patch_embed(RAW, KERNEL, None, mean=mean, std=torch.tensor(STD))
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, mean, weight)
    exact = torch.tensor(MEAN, dtype=torch.float64, requires_grad=True)
    images = (RAW.double() / 255 - exact.view(3, 1, 1)) / torch.tensor(STD, dtype=torch.float64).view(3, 1, 1)
    truth = torch.nn.functional.conv2d(images, KERNEL.double(), stride=4).flatten(2).mT
    assert_close(grad.double(), torch.autograd.grad(truth, exact, weight.double())[0], atol=1e-3)

    def embed(raw, mean):
        return ops.patch_embed(raw, KERNEL, None, mean=mean, std=0.5)

    compiled = torch.compile(embed, fullgraph=True, backend="eager")
    assert_close(compiled(RAW, mean.detach()), embed(RAW, mean.detach()), atol=1e-6)
    with ops.use_kernels("on"):
        with pytest.raises(RuntimeError, match="mean is a constant to the kernel, and it requires a gradient"):
            embed(RAW, mean)
        assert_close(compiled(RAW, MEAN), embed(RAW, MEAN), atol=1e-6)
        with pytest.raises(Exception, match="mean is a tensor, whose numbers compiled code does not know"):
            compiled(RAW, mean.detach())
