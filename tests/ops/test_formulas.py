"""Plain PyTorch in float64 against timm's, transformers' and PyTorch's own modules; how raw images are normalised.

The formulas of all operations are in tests/helpers/operations.py, for test_operations.py.
"""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_cases import MODES, interpreted
from checks import assert_close
from operations import attend
from timm.layers import GluMlp, Mlp, QuickGELU, RmsNorm, SwiGLU
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import nn

from vitfast import ops
from vitfast.ops import reference as ref

B, N, D, FF, H, DH, PREFIX = 2, 9, 24, 40, 3, 8, 2
TOL = dict(atol=1e-10)
TIMM = {"gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU(approximate="tanh"), "quick_gelu": QuickGELU, "silu": nn.SiLU}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def leaf(*shape: int) -> torch.Tensor:
    return rand(*shape).requires_grad_()


def same(ours, theirs, *leaves: torch.Tensor | None) -> None:
    """Outputs and the gradients of every leaf agree, of a random upstream gradient."""
    leaves = [leaf for leaf in leaves if leaf is not None]
    upstream = torch.randn_like(theirs)
    assert_close(ours, theirs, **TOL)
    found = (torch.autograd.grad(out, leaves, upstream, retain_graph=True) for out in (ours, theirs))
    for mine, truth in zip(*found, strict=True):
        assert_close(mine, truth, **TOL)


def shaken(module: nn.Module) -> nn.Module:
    """float64, no parameter at its start."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


# Activations, gated layers, norms


@pytest.mark.parametrize("activation", TIMM)
def test_mlps_have_timms_activations(activation):
    mlp, x = shaken(Mlp(D, FF, act_layer=TIMM[activation])), leaf(B, N, D)
    w1, b1, w2, b2 = mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias
    same(ops.linear_gelu(x, w1, b1, activation=activation), mlp.act(mlp.fc1(x)), x, w1, b1)
    same(ops.mlp(x, w1, b1, w2, b2, activation=activation), mlp(x), x, w1, b1, w2, b2)
    w, b = leaf(D), leaf(D)
    theirs = x + mlp(F.layer_norm(x, (D,), w, b, 1e-6))
    same(ops.mlp_block(x, w, b, w1, b1, w2, b2, activation=activation), theirs, x, w, b, w1, b1, w2, b2)


@pytest.mark.parametrize("activation, inner", [(name, name == "silu") for name in TIMM] + [("silu", False)])
def test_gated_mlps_are_timms(activation, inner):
    """EVA-02's SwiGLU of two weights, with an inner norm and without, and GluMlp, of one packed weight."""
    inner_norm = dict(norm_layer=functools.partial(nn.LayerNorm, eps=1e-5)) if inner else {}
    theirs, x = shaken(SwiGLU(D, FF, act_layer=TIMM[activation], **inner_norm)), leaf(B, N, D)
    layers = [t for layer in (theirs.fc1_x, theirs.fc1_g, theirs.fc2) for t in (layer.weight, layer.bias)]
    inner_norm = [theirs.norm.weight, theirs.norm.bias] if inner else [None, None]
    options = dict(inner_norm_weight=inner_norm[0], inner_norm_bias=inner_norm[1], inner_eps=1e-5)
    options["activation"] = activation
    same(ops.gated_mlp(x, *layers, **options), theirs(x), x, *layers, *inner_norm)
    w, b = leaf(D), leaf(D)
    block = ops.gated_mlp_block(x, w, b, *layers, eps=1e-4, **options)
    same(block, x + theirs(F.layer_norm(x, (D,), w, b, 1e-4)), x, w, b, *layers, *inner_norm)
    packed = shaken(GluMlp(D, 2 * FF, act_layer=TIMM[activation], gate_last=False))
    (gate, up), (gate_bias, up_bias) = packed.fc1.weight.chunk(2), packed.fc1.bias.chunk(2)
    down = packed.fc2.weight, packed.fc2.bias
    ours = ops.gated_mlp(x, up, up_bias, gate, gate_bias, *down, activation=activation)
    same(ours, packed(x), x, packed.fc1.weight, packed.fc1.bias, *down)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_is_timms_and_pytorchs(eps):
    x, w = leaf(B, N, D), leaf(D)
    theirs = RmsNorm(D, eps=eps).double()
    theirs.weight = nn.Parameter(w.detach().clone())
    assert_close(ops.rms_norm(x, w, eps), theirs(x), **TOL)
    for weight in (w, None):
        same(ops.rms_norm(x, weight, eps), F.rms_norm(x, (D,), weight, eps), x, weight)


def test_drop_path_factor_is_not_rounded_to_bf16():
    x, factor = torch.randn(1, 1, 512).bfloat16(), torch.tensor([1 / 0.9])
    out = ref.residual_add(x, torch.zeros_like(x), drop_path=factor)
    assert_close(out, (x.double() / 0.9).bfloat16(), atol=0)
    assert not torch.equal(out, x * factor.bfloat16())


# Attention: rotary positions, an additive bias, lengths of keys


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", [None, (H, N, N), (1, H, N, N), (B, H, N, N)])
def test_attentions_scale_bias_and_probabilities(scale, shape):
    q, k, v, bias = rand(B, N, H, DH), rand(B, N, H, DH), rand(B, N, H, DH), None if shape is None else rand(*shape)
    expected = attend(q if scale is None else q * scale * DH**0.5, k, v, bias=bias)
    assert_close(ops.attention(q, k, v, scale=scale, bias=bias), expected, **TOL)
    weights = ref.attention_probabilities(q, k, scale=scale, bias=bias)
    assert_close(torch.einsum("bhnm,bmhd->bnhd", weights, v), expected, **TOL)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_is_timms(layout):
    """After the first PREFIX tokens, by tables of every form: of pairs and of columns, for heads and for images."""
    q, k, v, angle = rand(B, N, H, DH), rand(B, N, H, DH), rand(B, N, H, DH), rand(N - PREFIX, DH // 2) * 3
    wide = torch.cat([angle, angle], -1) if layout == "half" else angle.repeat_interleave(2, -1)
    table = torch.cat([wide.sin(), wide.cos()], -1)

    def rotated(x):
        still, x = x[:, :PREFIX], x[:, PREFIX:].transpose(1, 2)
        return torch.cat([still, apply_rot_embed_cat(x, table, half=layout == "half").transpose(1, 2)], 1)

    expected = ops.attention(rotated(q), rotated(k), v, scale=0.3)
    options = dict(scale=0.3, rope_layout=layout, num_prefix=PREFIX)
    assert_close(ops.attention(q, k, v, rope=(angle.cos(), angle.sin()), **options), expected, **TOL)
    packed = torch.stack([q, k, v], 2)
    for lead in ((), (H,), (B, 1), (B, H), (1, H)):
        tables = tuple(t.expand(*lead, *t.shape) for t in (wide.cos(), wide.sin()))
        assert_close(ops.attention(packed, rope=tables, **options), expected, **TOL)


def test_logits_of_packed_samples_have_a_bias_and_no_unknown_options():
    q, bias, offsets = rand(N, H, DH), rand(H, N, N), torch.tensor([0, 4, N], dtype=torch.int32)
    found = ref.attention_logits(q, q, offsets=offsets, bias=bias)
    expected = torch.einsum("qhd,khd->hqk", q, q) * DH**-0.5 + bias
    assert_close(found[:, :4, :4], expected[:, :4, :4], **TOL)
    assert_close(found[:, 4:, 4:], expected[:, 4:, 4:], **TOL)
    with pytest.raises(TypeError, match="num_prefixes"):
        ref.attention_logits(q[None], q[None], num_prefixes=1)


def test_key_lengths_hide_keys_and_no_query():
    q, k, v, bias = rand(3, N, H, DH), rand(3, N, H, DH), rand(3, N, H, DH), rand(H, N, N)
    lengths = torch.tensor([4, 0, N])
    out, biased = (ops.attention(q, k, v, key_lengths=lengths, bias=added) for added in (None, bias))
    for b, length in enumerate(lengths.tolist()):
        shown = attend(q[b], k[b, :length], v[b, :length])
        assert_close(out[b], shown if length else torch.zeros(N, H, DH, dtype=q.dtype), **TOL)
    assert_close(biased[0], attend(q[0], k[0, :4], v[0, :4], bias=bias[..., :4]), **TOL)


# Raw images


RAW = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.manual_seed(3))
KERNEL, MEAN, STD = torch.randn(D, 3, 4, 4, generator=torch.manual_seed(4)), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
GIVEN = {
    "tuple": tuple,
    "numpy": np.array,
    "float32 array": lambda v: np.array(v, dtype=np.float32),
    "float64": lambda v: torch.tensor(v, dtype=torch.float64),
    "(C, 1, 1)": lambda v: torch.tensor(v).view(-1, 1, 1),
    "(1, C, 1, 1)": lambda v: torch.tensor(v).view(1, -1, 1, 1),
    "numpy numbers": lambda v: [np.float32(n) for n in v],
}
ONE = {"number": 0.5, "list of one": [0.5], "0-d tensor": torch.tensor(0.5), "numpy number": np.float32(0.5)}


def expected(mean, std):
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
    return F.conv2d((RAW.double() / 255 - mean) / std, KERNEL.double(), stride=4).flatten(2).mT


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", MODES)
def test_mean_and_std_in_any_clothes(mode):
    """Those of one channel each, and one for all; none are 0 and 1; positions of the prefix tokens too."""
    with ops.use_kernels(mode):
        for name, wrap in GIVEN.items():
            out = ops.patch_embed(RAW, KERNEL, None, mean=wrap(MEAN), std=wrap(STD))
            assert_close(out.double(), expected(MEAN, STD), atol=1e-4, name=name)
        for name, value in ONE.items():
            out = ops.patch_embed(RAW, KERNEL, None, mean=value, std=value)
            assert_close(out.double(), expected([0.5], [0.5]), atol=1e-4, name=name)
        prefix, positions = torch.randn(1, 2, D), torch.randn(1, 6, D)
        out = ops.patch_embed(RAW, KERNEL, None, prefix, positions)
        plain = torch.cat([prefix.expand(2, -1, -1).double(), expected([0.0], [1.0])], 1)
        assert_close(out.double(), plain + positions, atol=1e-4)


@pytest.mark.slow
@interpreted
def test_a_tensor_of_means_where_no_kernel_can_take_it():
    """Differentiated, or compiled, plain PyTorch runs; switched on, an error says why not."""
    mean = torch.tensor(MEAN, requires_grad=True)
    out = ops.patch_embed(RAW, KERNEL, None, mean=mean, std=torch.tensor(STD))
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, mean, weight)
    exact = torch.tensor(MEAN, dtype=torch.float64, requires_grad=True)
    images = (RAW.double() / 255 - exact.view(3, 1, 1)) / torch.tensor(STD, dtype=torch.float64).view(3, 1, 1)
    truth = F.conv2d(images, KERNEL.double(), stride=4).flatten(2).mT
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
