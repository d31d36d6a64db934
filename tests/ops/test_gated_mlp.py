"""Activations, gated MLPs and RMSNorm against timm's modules and PyTorch's own, in float64, with every gradient."""

import functools

import pytest
import torch
import torch.nn.functional as F
from checks import assert_close
from timm.layers import GluMlp, Mlp, QuickGELU, RmsNorm, SwiGLU
from torch import nn

from vitfast import ops

B, N, D, FF, H = 2, 5, 24, 40, 3
TOL = dict(atol=1e-10)
TIMM = {"gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU(approximate="tanh"), "quick_gelu": QuickGELU, "silu": nn.SiLU}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def same(ours, theirs, *leaves: torch.Tensor | None) -> None:
    """Outputs and the gradients of every leaf agree, of a random upstream gradient."""
    leaves = [leaf for leaf in leaves if leaf is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = torch.randn_like(theirs)
    assert_close(ours, theirs, **TOL)
    for mine, truth in zip(
        *(torch.autograd.grad(out, leaves, upstream, retain_graph=True) for out in (ours, theirs)), strict=True
    ):
        assert_close(mine, truth, **TOL)


def shaken(module: nn.Module) -> nn.Module:
    """float64, no parameter at its start."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def leaf(*shape: int) -> torch.Tensor:
    return rand(*shape).requires_grad_()


@pytest.mark.parametrize("activation", TIMM)
def test_mlps_have_timms_activations(activation):
    mlp, x = shaken(Mlp(D, FF, act_layer=TIMM[activation])), leaf(B, N, D)
    w1, b1, w2, b2 = mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias
    same(ops.linear_gelu(x, w1, b1, activation=activation), mlp.act(mlp.fc1(x)), x, w1, b1)
    same(ops.mlp(x, w1, b1, w2, b2, activation=activation), mlp(x), x, w1, b1, w2, b2)
    w, b = leaf(D), leaf(D)
    theirs = x + mlp(F.layer_norm(x, (D,), w, b, 1e-6))
    same(ops.mlp_block(x, w, b, w1, b1, w2, b2, activation=activation), theirs, x, w, b, w1, b1, w2, b2)


@pytest.mark.parametrize("function", [ops.linear_gelu, ops.mlp, ops.mlp_block])
def test_an_activation_has_one_name(function):
    tensors = {
        ops.linear_gelu: (rand(B, N, D), rand(FF, D), rand(FF)),
        ops.mlp: (rand(B, N, D), rand(FF, D), rand(FF), rand(D, FF), rand(D)),
        ops.mlp_block: (rand(B, N, D), rand(D), rand(D), rand(FF, D), rand(FF), rand(D, FF), rand(D)),
    }[function]
    for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        named = function(*tensors, activation=activation)
        for options in (dict(approximate=approximate), dict(activation=activation, approximate=approximate)):
            assert_close(function(*tensors, **options), named, 0)
    assert_close(function(*tensors), function(*tensors, activation="gelu"), 0)
    assert not torch.equal(function(*tensors), function(*tensors, activation="gelu_tanh"))
    name = function.__name__
    for activation, approximate in (("gelu", "tanh"), ("gelu_tanh", "none"), ("silu", "tanh"), ("quick_gelu", "none")):
        said = (
            f"^{name}: approximate='{approximate}' means activation='gelu.*activation='{activation}' is given too; give"
        )
        with pytest.raises(ValueError, match=said):
            function(*tensors, activation=activation, approximate=approximate)
    for wrong in ("relu", "GELU", 1, ["gelu"]):
        with pytest.raises(ValueError, match=f"^{name}: activation must be one of 'gelu', 'gelu_tanh', 'quick_gelu', "):
            function(*tensors, activation=wrong)


@pytest.mark.parametrize("activation", TIMM)
@pytest.mark.parametrize("inner", [False, True], ids=["", "inner norm"])
def test_gated_mlps_are_timms(activation, inner):
    """EVA-02's SwiGLU of two weights, with an inner norm and without, and GluMlp, of one packed weight."""
    norm = dict(norm_layer=functools.partial(nn.LayerNorm, eps=1e-5)) if inner else {}
    theirs, x = shaken(SwiGLU(D, FF, act_layer=TIMM[activation], **norm)), leaf(B, N, D)
    layers = [theirs.fc1_x.weight, theirs.fc1_x.bias, theirs.fc1_g.weight, theirs.fc1_g.bias]
    layers += [theirs.fc2.weight, theirs.fc2.bias]
    inner_norm = [theirs.norm.weight, theirs.norm.bias] if inner else [None, None]
    options = dict(inner_norm_weight=inner_norm[0], inner_norm_bias=inner_norm[1], inner_eps=1e-5)
    options["activation"] = activation
    same(ops.gated_mlp(x, *layers, **options), theirs(x), x, *layers, *inner_norm)

    w, b, scale, drop = leaf(D), leaf(D), leaf(D), torch.tensor([0.0, 1.25], dtype=torch.float64)
    block = ops.gated_mlp_block(x, w, b, *layers, eps=1e-4, layer_scale=scale, drop_path=drop, **options)
    expected = x + drop[:, None, None] * scale * theirs(F.layer_norm(x, (D,), w, b, 1e-4))
    same(block, expected, x, w, b, *layers, *inner_norm, scale)

    packed = shaken(GluMlp(D, 2 * FF, act_layer=TIMM[activation], gate_last=False))
    (gate, up), (gate_bias, up_bias) = packed.fc1.weight.chunk(2), packed.fc1.bias.chunk(2)
    down = packed.fc2.weight, packed.fc2.bias
    ours = ops.gated_mlp(x, up, up_bias, gate, gate_bias, *down, activation=activation)
    same(ours, packed(x), x, packed.fc1.weight, packed.fc1.bias, *down)


def test_gated_mlps_without_biases():
    x, up, gate, down = leaf(B, D), leaf(FF, D), leaf(FF, D), leaf(7, FF)
    theirs = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    same(ops.gated_mlp(x, up, None, gate, None, down, None), theirs, x, up, gate, down)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_is_timms_and_pytorchs(eps):
    x, w = leaf(B, N, D), leaf(D)
    theirs = RmsNorm(D, eps=eps).double()
    theirs.weight = nn.Parameter(w.detach().clone())
    assert_close(ops.rms_norm(x, w, eps), theirs(x), **TOL)
    same(ops.rms_norm(x, w, eps), F.rms_norm(x, (D,), w, eps), x, w)
    same(ops.rms_norm(x, None, eps), x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps), x)
    half = x.detach().bfloat16()
    assert ops.rms_norm(half, w.detach().float()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.rms_norm(x.detach().float(), w.detach().float()).dtype == torch.bfloat16


def test_blocks_have_rms_norm():
    x, w = leaf(B, N, D), leaf(D)
    h = F.rms_norm(x, (D,), w, 1e-3)
    up, gate, down = leaf(FF, D), leaf(FF, D), leaf(D, FF)
    theirs = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    same(ops.gated_mlp_block(x, w, None, up, None, gate, None, down, None, eps=1e-3, norm="rms"), theirs, x, w, up)
    theirs = x + F.gelu(h @ up.T) @ down.T
    same(ops.mlp_block(x, w, None, up, None, down, None, eps=1e-3, norm="rms"), theirs, x, w, up, down)
    qkv, proj = leaf(3 * D, D), leaf(D, D)
    attended = ops.attention((h @ qkv.T).view(B, N, 3, H, D // H)).flatten(2)
    ours = ops.attention_block(x, w, None, qkv, None, proj, None, num_heads=H, eps=1e-3, norm="rms")
    same(ours, x + attended @ proj.T, x, w, qkv, proj)


def test_what_contradicts_itself_is_refused():
    x, w, b, up, gate, down = rand(B, N, D), rand(D), rand(D), rand(FF, D), rand(FF, D), rand(D, FF)
    qkv, proj = rand(3 * D, D), rand(D, D)
    blocks = {
        "attention_block": lambda b, **o: ops.attention_block(x, w, b, qkv, None, proj, None, num_heads=H, **o),
        "mlp_block": lambda b, **o: ops.mlp_block(x, w, b, up, None, down, None, **o),
        "gated_mlp_block": lambda b, **o: ops.gated_mlp_block(x, w, b, up, None, gate, None, down, None, **o),
    }
    for name, block in blocks.items():
        with pytest.raises(ValueError, match=f"^{name}: norm_bias must be None where norm is 'rms'"):
            block(b, norm="rms")
        with pytest.raises(ValueError, match=f"^{name}: norm must be 'layer' or 'rms', got 'batch'"):
            block(b, norm="batch")
    given = x, up, None, gate, None, down, None
    with pytest.raises(ValueError, match="^gated_mlp: inner_norm_bias needs an inner_norm_weight"):
        ops.gated_mlp(*given, inner_norm_bias=rand(FF))
    for wrong in (dict(inner_norm_weight=rand(D)), dict(inner_norm_weight=rand(FF), inner_norm_bias=rand(D))):
        with pytest.raises(ValueError, match=r"^gated_mlp: inner_norm_\w+ must be \(40,\), got \(24,\)"):
            ops.gated_mlp(*given, **wrong)
    for activation in ("swiglu", None):
        with pytest.raises(ValueError, match="^gated_mlp: activation must be one of 'gelu', "):
            ops.gated_mlp(*given, activation=activation)
    with pytest.raises(ValueError, match=r"^gated_mlp: gate_weight must be \(40, 24\), got \(24, 40\)"):
        ops.gated_mlp(x, up, None, gate.T, None, down, None)
    with pytest.raises(TypeError, match="^gated_mlp_block: gate_weight must be torch.float64 like up_weight"):
        ops.gated_mlp_block(x, w, b, up, None, gate.float(), None, down, None)


def test_they_are_exported_as_plain_pytorch_and_cast_by_autocast():
    """Also with kernels on; autocast leaves the parameters of both norms as they are."""

    class Layer(nn.Module):
        def forward(self, x, w, up, gate, down, inner):
            h = ops.gated_mlp(ops.rms_norm(x, w), up, None, gate, None, down, None, activation="quick_gelu")
            options = dict(norm="rms", inner_norm_weight=inner)
            return ops.gated_mlp_block(h, w, None, up, None, gate, None, down, None, **options)

    x, w, up, gate, down, inner = (
        t.float() for t in (rand(B, N, D), rand(D), rand(FF, D), rand(FF, D), rand(D, FF), rand(FF))
    )
    given, layer = (x, w, up, gate, down, inner), Layer()
    for mode in ("on", "off"):
        with ops.use_kernels(mode):
            exported = torch.export.export(layer, given)
        names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert names and not any("vitfast" in name for name in names)
        assert_close(exported.module()(*given), layer(*given), atol=1e-4, rtol=1e-4)
    half = [t.bfloat16() for t in (up, gate, down)]
    with torch.autocast("cpu", torch.bfloat16):
        ours = ops.gated_mlp_block(x, w, None, up, None, gate, None, down, None, norm="rms", inner_norm_weight=inner)
    theirs = ops.gated_mlp_block(
        x.bfloat16(), w, None, half[0], None, half[1], None, half[2], None, norm="rms", inner_norm_weight=inner
    )
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)
