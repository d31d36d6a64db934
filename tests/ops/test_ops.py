"""The public operations against formulas written out by hand; argument checks; autocast."""

import math
import os
import subprocess
import sys

import pytest
import torch
from checks import assert_close

from vitfast import ops, ref
from vitfast.kernels.launch import INTERPRETED

B, N, D, H, F = 2, 5, 24, 3, 40
TOL = dict(atol=1e-10)  # float64 through and through
HALVES = [torch.float16, torch.bfloat16]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def norm(x, weight, bias, eps):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps) * weight + bias


def gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def attend(q, k, v, scale):
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            weights = torch.exp(q[b, :, h] @ k[b, :, h].T * scale)
            out[b, :, h] = weights / weights.sum(1, keepdim=True) @ v[b, :, h]
    return out


def test_layer_norm_is_its_formula():
    x, w, b = rand(B, N, D), rand(D), rand(D)
    assert_close(ops.layer_norm(x, w, b, 1e-3), norm(x, w, b, 1e-3), **TOL)
    assert_close(ops.layer_norm(x, None, None), norm(x, 1, 0, 1e-6), **TOL)


def test_add_layer_norm_is_its_formula():
    x, r, w, b, scale, drop = (
        rand(B, N, D),
        rand(B, N, D),
        rand(D),
        rand(D),
        rand(D),
        torch.tensor([0.0, 1.25], dtype=torch.float64),
    )
    y, z = ops.add_layer_norm(x, r, w, b, 1e-5, layer_scale=scale, drop_path=drop)
    assert_close(z, r + drop[:, None, None] * scale * x, **TOL)
    assert_close(y, norm(z, w, b, 1e-5), **TOL)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_its_formula(scale):
    qkv = rand(B, N, 3, H, 8)
    q, k, v = qkv.unbind(2)
    expected = attend(q, k, v, 8**-0.5 if scale is None else scale)
    assert_close(ops.attention(qkv, scale=scale), expected, **TOL)
    assert_close(ops.attention(q, k, v, scale=scale), expected, **TOL)
    assert ops.attention(qkv.transpose(0, 1).contiguous().transpose(0, 1)).is_contiguous()
    weights = ref.attention_probabilities(q, k, scale=scale)
    assert_close(torch.einsum("bhnm,bmhd->bnhd", weights, v), expected, **TOL)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_mlp_operations_are_their_formulas(approximate):
    x, w1, b1, w2, b2 = rand(B, N, D), rand(F, D), rand(F), rand(D, F), rand(D)
    hidden = gelu(x @ w1.T + b1, approximate)
    assert_close(ops.linear_gelu(x, w1, b1, approximate=approximate), hidden, **TOL)
    assert_close(ops.mlp(x, w1, b1, w2, b2, approximate=approximate), hidden @ w2.T + b2, **TOL)
    assert_close(ops.linear_gelu(x, w1, None, approximate=approximate), gelu(x @ w1.T, approximate), **TOL)
    r, scale, drop = rand(B, N, D), rand(D), torch.tensor([0.0, 2.0], dtype=torch.float64)
    out = ops.linear_residual(hidden, w2, b2, r, layer_scale=scale, drop_path=drop)
    assert_close(out, r + drop[:, None, None] * scale * (hidden @ w2.T + b2), **TOL)


def test_blocks_are_their_formulas():
    x, w, b = rand(B, N, D), rand(D), rand(D)
    qkv_w, qkv_b, proj_w, proj_b, scale, drop = (
        rand(3 * D, D),
        rand(3 * D),
        rand(D, D),
        rand(D),
        rand(D),
        torch.tensor([2.0, 0.0], dtype=torch.float64),
    )
    q, k, v = (norm(x, w, b, 1e-6) @ qkv_w.T + qkv_b).view(B, N, 3, H, D // H).unbind(2)
    branch = attend(q, k, v, (D // H) ** -0.5).reshape(B, N, D) @ proj_w.T + proj_b
    out = ops.attention_block(x, w, b, qkv_w, qkv_b, proj_w, proj_b, num_heads=H, layer_scale=scale, drop_path=drop)
    assert_close(out, x + drop[:, None, None] * scale * branch, **TOL)
    w1, b1, w2, b2 = rand(F, D), rand(F), rand(D, F), rand(D)
    expected = x + gelu(norm(x, w, b, 1e-6) @ w1.T + b1, "tanh") @ w2.T + b2
    assert_close(ops.mlp_block(x, w, b, w1, b1, w2, b2, approximate="tanh"), expected, **TOL)


@pytest.mark.parametrize("patch", [(4, 4), (2, 8)], ids=str)
def test_patch_embed_is_its_formula(patch):
    p, q = patch
    images, weight, bias = rand(B, 2, 8, 16), rand(D, 2, p, q), rand(D)
    h, w = 8 // p, 16 // q
    patches = images.view(B, 2, h, p, w, q).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, 2 * p * q)
    tokens = patches @ weight.reshape(D, -1).T + bias
    prefix, pos_all, pos_patches = rand(1, 3, D), rand(1, 3 + h * w, D), rand(1, h * w, D)
    assert_close(ops.patch_embed(images, weight, bias), tokens, **TOL)
    full = torch.cat([prefix.expand(B, -1, -1), tokens], 1)
    assert_close(ops.patch_embed(images, weight, bias, prefix, pos_all), full + pos_all, **TOL)
    assert_close(
        ops.patch_embed(images, weight, bias, prefix, pos_patches),
        torch.cat([prefix.expand(B, -1, -1), tokens + pos_patches], 1),
        **TOL,
    )
    raw = torch.randint(0, 256, images.shape, dtype=torch.uint8)
    mean, std = torch.tensor([0.4, 0.6], dtype=torch.float64), torch.tensor([0.2, 0.3], dtype=torch.float64)
    normalised = (raw.double() / 255 - mean.view(2, 1, 1)) / std.view(2, 1, 1)
    given = ops.patch_embed(raw, weight, bias, mean=mean.tolist(), std=std.tolist())
    assert_close(given, ops.patch_embed(normalised, weight, bias), **TOL)
    assert_close(ops.patch_embed(raw, weight, bias), ops.patch_embed(raw.double() / 255, weight, bias), **TOL)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_upcast_computes_in_float64(dtype):
    x, w, b = (t.to(dtype) for t in (rand(B, N, D), rand(D), rand(D)))
    truth = ref.layer_norm(x, w, b, 1e-6, upcast=True)
    assert truth.dtype == torch.float64
    assert_close(truth, norm(x.double(), w.double(), b.double(), 1e-6), **TOL)


def test_autocast_casts_to_its_dtype_and_gradients_come_back():
    x, w, b = (
        torch.randn(B, N, D, requires_grad=True),
        torch.randn(F, D, requires_grad=True),
        torch.randn(F, requires_grad=True),
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.linear_gelu(x, w, b)
        assert ops.layer_norm(x, None, None).dtype == torch.bfloat16
        y, z = ops.add_layer_norm(x, x, None, None, drop_path=torch.ones(B))
        assert y.dtype == z.dtype == torch.bfloat16
        assert ops.patch_embed(torch.randn(1, 3, 8, 8), torch.randn(D, 3, 4, 4), None).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert out.dtype == torch.bfloat16
    out.backward(torch.randn_like(out))
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "mode", ["off", pytest.param("on", marks=pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels"))]
)
def test_autocast_leaves_layer_norms_parameters_in_fp32(mode, dtype):
    """As torch's own autocast does: one rounding, of the result, and gradients that were never 16 bit."""
    x = torch.randn(9, 64).to(dtype).float()
    w, b = (1 + torch.rand(64) / 100).requires_grad_(), torch.randn(64, requires_grad=True)
    upstream = torch.randn(9, 64).to(dtype)
    exact = [t.detach().double().requires_grad_() for t in (w, b)]
    truth = norm(x.double(), *exact, 1e-6)
    truth.backward(upstream.double())
    with ops.use_kernels(mode), torch.autocast("cpu", dtype):
        y = ops.layer_norm(x, w, b)
        z, _ = ops.add_layer_norm(x, torch.zeros_like(x), w, b)
    y.backward(upstream)
    assert y.dtype == dtype and torch.equal(y, z)
    assert ((y.double() - truth).abs() <= torch.finfo(dtype).eps / 2 * truth.abs() * (1 + 1e-3) + 1e-6).all()
    for mine, theirs in zip((w, b), exact):
        assert_close(mine.grad.double(), theirs.grad, atol=1e-5)
    # and through a block, whose products are 16 bit
    shapes = dict(
        norm_weight=(16,), norm_bias=(16,), fc1_weight=(32, 16), fc1_bias=(32,), fc2_weight=(16, 32), fc2_bias=(16,)
    )
    parameters = {name: (torch.randn(shape) / 4).requires_grad_() for name, shape in shapes.items()}
    with ops.use_kernels(mode), torch.autocast("cpu", dtype):
        ops.mlp_block(torch.randn(2, 3, 16), **parameters).backward(torch.randn(2, 3, 16).to(dtype))
    for name, parameter in parameters.items():
        assert torch.equal(parameter.grad.to(dtype).float(), parameter.grad) == ("norm" not in name), name


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")
@pytest.mark.parametrize("name", ["layer_norm", "linear_gelu", "linear_residual", "mlp", "mlp_block", "patch_embed"])
def test_outputs_may_be_changed_in_place(name):
    """As those of torch's modules may: no output is a view, whose change autograd would refuse."""
    square, wide, vector = torch.randn(D, D), torch.randn(F, D), torch.randn(D)
    arguments = dict(
        layer_norm=[vector, vector],
        linear_gelu=[wide, None],
        linear_residual=[square, vector, torch.randn(B, N, D)],
        mlp=[wide, None, wide.t().contiguous(), vector],
        mlp_block=[vector, vector, wide, None, wide.t().contiguous(), vector],
        patch_embed=[torch.randn(D, 3, 4, 4), vector],
    )[name]
    gradients = []
    for in_place in (True, False):
        torch.manual_seed(1)
        x = (torch.randn(B, 3, 8, 8) if name == "patch_embed" else torch.randn(B, N, D)).requires_grad_()
        with ops.use_kernels("on"):
            out = getattr(ops, name)(x, *arguments)
            assert not out._is_view()
            out = out.mul_(3) if in_place else out * 3
        out.backward(torch.randn(out.shape))
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].abs().max() > 0


def test_drop_path_factor_is_not_rounded_to_bf16():
    x, factor = torch.randn(1, 1, 512).bfloat16(), torch.tensor([1 / 0.9])
    out = ref.residual_add(x, torch.zeros_like(x), drop_path=factor)
    assert_close(out, (x.double() / 0.9).bfloat16(), atol=0)
    assert not torch.equal(out, x * factor.bfloat16())


def bad(call, error, message):
    return pytest.param(call, error, message, id=message[:50])


X, W = torch.randn(B, N, D), torch.randn(D)


@pytest.mark.parametrize(
    "call, error, message",
    [
        bad(
            lambda: ops.layer_norm(X, torch.randn(12), W),
            ValueError,
            r"layer_norm: weight must be \(24,\), got \(12,\)",
        ),
        bad(
            lambda: ops.layer_norm(X, W, torch.randn(2, 24)),
            ValueError,
            r"layer_norm: bias must be \(24,\), got \(2, 24\)",
        ),
        bad(
            lambda: ops.layer_norm(X, W.half(), W),
            TypeError,
            "layer_norm: weight must be torch.float32 like x, got torch.float16",
        ),
        bad(lambda: ops.layer_norm(X.long(), None, None), TypeError, "layer_norm: x must be floating point"),
        bad(
            lambda: ops.layer_norm(X, W.to("meta"), W), ValueError, "layer_norm: weight must be on cpu like x, got meta"
        ),
        bad(
            lambda: ops.add_layer_norm(X, X[:1], W, W),
            ValueError,
            r"add_layer_norm: residual must be \(2, 5, 24\), got \(1, 5, 24\)",
        ),
        bad(
            lambda: ops.add_layer_norm(X, X, W, W, drop_path=torch.ones(3)),
            ValueError,
            r"add_layer_norm: drop_path must be \(2,\), got \(3,\)",
        ),
        bad(lambda: ops.attention(X), ValueError, r"attention: qkv must be \(B, N, 3, H, Dh\), got \(2, 5, 24\)"),
        bad(lambda: ops.attention(X, X), ValueError, "attention: give qkv alone, or q, k and v"),
        bad(
            lambda: ops.attention(*(torch.randn(1, n, 2, 8) for n in (4, 4, 5))),
            ValueError,
            r"attention: v must be \(1, 4, 2, 8\), got \(1, 5, 2, 8\)",
        ),
        bad(
            lambda: ops.linear_gelu(X, torch.randn(F, 12), None),
            ValueError,
            r"linear_gelu: weight must be \(\*, 24\), got \(40, 12\)",
        ),
        bad(
            lambda: ops.linear_gelu(X, torch.randn(F, D), None, approximate="erf"),
            ValueError,
            "linear_gelu: approximate must be 'none'",
        ),
        bad(
            lambda: ops.linear_residual(X, torch.randn(F, D), None, X),
            ValueError,
            r"linear_residual: residual must be \(2, 5, 40\)",
        ),
        bad(
            lambda: ops.linear_residual(X, torch.randn(D, D), None, X, layer_scale=torch.ones(3)),
            ValueError,
            "linear_residual: layer_scale must be",
        ),
        bad(
            lambda: ops.mlp(X, torch.randn(F, D), None, torch.randn(D, 7), None),
            ValueError,
            r"mlp: fc2_weight must be \(\*, 40\)",
        ),
        bad(
            lambda: ops.attention_block(X, W, W, torch.randn(72, D), None, torch.randn(D, D), None, num_heads=5),
            ValueError,
            "attention_block: qkv_weight must",
        ),
        bad(
            lambda: ops.mlp_block(X[0, 0], W, W, torch.randn(F, D), None, torch.randn(D, F), None),
            ValueError,
            r"mlp_block: x must be \(B, N, D\) or \(tokens, D\), got \(\d+,\)",
        ),
        bad(
            lambda: ops.patch_embed(torch.randn(1, 3, 9, 8), torch.randn(D, 3, 4, 4), None),
            ValueError,
            "multiples of the patch 4 x 4, got 9 x 8",
        ),
        bad(
            lambda: ops.patch_embed(torch.randn(1, 1, 8, 8), torch.randn(D, 3, 4, 4), None),
            ValueError,
            r"images must be \(\*, 3, \*, \*\)",
        ),
        bad(
            lambda: ops.patch_embed(torch.ones(1, 3, 8, 8).int(), torch.randn(D, 3, 4, 4), None),
            TypeError,
            "floating point or uint8, got torch.int32",
        ),
        bad(
            lambda: ops.patch_embed(
                torch.randn(1, 3, 8, 8), torch.randn(D, 3, 4, 4), None, pos_embed=torch.randn(1, 5, D)
            ),
            ValueError,
            "must have 4 or 4 positions, got 5",
        ),
        bad(
            lambda: ops.patch_embed(torch.ones(1, 3, 8, 8).byte(), torch.randn(D, 3, 4, 4), None, mean=(1, 2)),
            ValueError,
            "mean must be one number or 3",
        ),
        bad(lambda: ops.use_kernels("yes"), ValueError, "use_kernels: mode must be one of auto, on, off"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_kernels_on_raises_where_none_can_run():
    with (
        ops.use_kernels("on"),
        pytest.raises(
            RuntimeError, match="layer_norm: kernels are switched on, but no kernel computes in torch.float64"
        ),
    ):
        ops.layer_norm(X.double(), None, None)
    ops.layer_norm(X.double(), None, None)
    setter = ops.use_kernels("on")
    with pytest.raises(RuntimeError):
        ops.layer_norm(X.double(), None, None)
    setter.__exit__()
    ops.layer_norm(X.double(), None, None)


def test_kernels_on_raises_outside_the_interpreter():
    script = (
        "import torch; from vitfast import ops; ops.use_kernels('on'); ops.layer_norm(torch.randn(2, 8), None, None)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert "layer_norm: kernels are switched on, but tensors on cpu need TRITON_INTERPRET=1" in run.stderr


def test_an_uncovered_case_on_a_gpu_warns_once_and_raises_in_mode_on(monkeypatch):
    from types import SimpleNamespace

    from vitfast.ops import _dispatch

    def on_gpu(dtype):
        return SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=dtype)

    monkeypatch.setattr(_dispatch.tiles, "generation", lambda device: 90)
    monkeypatch.setattr(_dispatch, "_warned", set())
    assert _dispatch.kernels_wanted("attention", on_gpu(torch.bfloat16))
    with pytest.warns(
        UserWarning, match="vitfast attention: head size 20 is odd; plain PyTorch runs in its place"
    ) as seen:
        for _ in range(3):
            assert not _dispatch.kernels_wanted("attention", on_gpu(torch.bfloat16), "head size 20 is odd")
    assert len(seen) == 1
    with pytest.warns(UserWarning, match="no kernel computes in torch.float64"):
        assert not _dispatch.kernels_wanted("attention", on_gpu(torch.float64))
    with (
        ops.use_kernels("on"),
        pytest.raises(RuntimeError, match="attention: kernels are switched on, but head size 20 is odd"),
    ):
        _dispatch.kernels_wanted("attention", on_gpu(torch.bfloat16), "head size 20 is odd")
    with ops.use_kernels("off"):
        assert not _dispatch.kernels_wanted("attention", on_gpu(torch.bfloat16))
    monkeypatch.setattr(_dispatch.tiles, "generation", lambda device: 0)
    with pytest.warns(UserWarning, match="older than compute capability 8.0"):
        assert not _dispatch.kernels_wanted("layer_norm", on_gpu(torch.bfloat16))
