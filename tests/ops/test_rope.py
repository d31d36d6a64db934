"""Rotary positions, an additive bias and lengths of keys: plain PyTorch against timm, transformers and formulas."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import assert_close

from vitfast import ops, ref

B, N, PREFIX, H, DH = 2, 9, 2, 3, 8
TOL = dict(atol=1e-10)  # float64 through and through


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def angles(*lead):
    """cos and sin of random angles, those of both columns of a pair alike: (..., N - PREFIX, Dh / 2)."""
    angle = rand(*lead, N - PREFIX, DH // 2) * 3
    return angle.cos(), angle.sin()


def complex_turned(x, cos, sin, layout):
    """x times exp(i angle) after the first PREFIX tokens; cos and sin (N, Dh / 2)."""
    if layout == "half":
        pairs = torch.stack(x.chunk(2, -1), -1)
    else:
        pairs = x.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
    turned = torch.view_as_real(turned)
    turned = torch.cat(turned.unbind(-1), -1) if layout == "half" else turned.flatten(-2)
    return torch.cat([x[:, :PREFIX], turned[:, PREFIX:]], 1)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_is_multiplication_by_complex_numbers(layout):
    q, k, v = rand(B, N, H, DH), rand(B, N, H, DH), rand(B, N, H, DH)
    cos, sin = angles()
    still = torch.ones(PREFIX, DH // 2, dtype=torch.float64)
    everywhere = torch.cat([still, cos]), torch.cat([0 * still, sin])
    turned = [complex_turned(x, *everywhere, layout) for x in (q, k)]
    expected = ops.attention(*turned, v, scale=0.3)
    options = dict(scale=0.3, rope_layout=layout, num_prefix=PREFIX)
    assert_close(ops.attention(q, k, v, rope=(cos, sin), **options), expected, **TOL)
    wide = [torch.cat([t, t], -1) if layout == "half" else t.repeat_interleave(2, -1) for t in (cos, sin)]
    assert_close(ops.attention(q, k, v, rope=tuple(wide), **options), expected, **TOL)
    packed = torch.stack([q, k, v], 2)
    for lead in ((H,), (B, 1), (B, H), (1, H)):
        tables = tuple(t.expand(*lead, *t.shape) for t in wide)
        assert_close(ops.attention(packed, rope=tables, **options), expected, **TOL)


@pytest.mark.parametrize("half", [False, True])
def test_rope_is_timms(half):
    from timm.layers.pos_embed_sincos import apply_rot_embed_cat

    x, angle = rand(B, H, N - PREFIX, DH), rand(N - PREFIX, DH)  # of both columns of a pair its own
    theirs = apply_rot_embed_cat(x, torch.cat([angle.sin(), angle.cos()], -1), half=half)
    layout = "half" if half else "interleaved"
    ours = ref.rotate(x.transpose(1, 2), angle.cos(), angle.sin(), rope_layout=layout)
    assert_close(ours.transpose(1, 2), theirs, **TOL)


def test_rope_is_transformers():
    from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb

    q, k, angle = rand(B, H, N, DH), rand(B, H, N, DH), rand(N - PREFIX, DH)
    theirs = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    for x, expected in zip((q, k), theirs):
        ours = ref.rotate(x.transpose(1, 2), angle.cos(), angle.sin(), num_prefix=PREFIX)
        assert_close(ours.transpose(1, 2), expected, **TOL)


@pytest.mark.parametrize("shape", [(H, N, N), (1, H, N, N), (B, H, N, N)])
def test_bias_is_added_to_the_logits(shape):
    q, k, v, bias = rand(B, N, H, DH), rand(B, N, H, DH), rand(B, N, H, DH), rand(*shape)
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * 0.3 + bias
    expected = torch.einsum("bhnm,bmhd->bnhd", logits.softmax(-1), v)
    assert_close(ops.attention(q, k, v, scale=0.3, bias=bias), expected, **TOL)


def test_key_lengths_hide_keys_and_no_query():
    q, k, v = rand(3, N, H, DH), rand(3, N, H, DH), rand(3, N, H, DH)
    lengths = torch.tensor([4, 0, N])
    out = ops.attention(q, k, v, key_lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        one = q[b], k[b, :length], v[b, :length]
        shown = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in one))
        assert_close(out[b], shown.transpose(0, 1) if length else torch.zeros(N, H, DH, dtype=q.dtype), **TOL)
    bias = rand(H, N, N)
    out = ops.attention(q, k, v, key_lengths=lengths, bias=bias)
    assert_close(out[0], _biased(q[0], k[0, :4], v[0, :4], bias), **TOL)


def _biased(q, k, v, bias):
    logits = torch.einsum("nhd,mhd->hnm", q, k) * DH**-0.5 + bias[:, :, : k.shape[0]]
    return torch.einsum("hnm,mhd->nhd", logits.softmax(-1), v)


@pytest.mark.parametrize(
    "mode", [dict(rope=True), dict(bias=True), dict(lengths=True), dict(rope=1, bias=1, lengths=1)]
)
def test_attention_block_takes_what_attention_takes(mode):
    width = H * DH
    x, norm = rand(B, N, width), (rand(width), rand(width))
    qkv, proj = (rand(3 * width, width) * 0.2, rand(3 * width)), (rand(width, width), rand(width))
    options = dict(rope=angles(H), num_prefix=PREFIX, rope_layout="interleaved") if mode.get("rope") else {}
    options |= dict(bias=rand(1, H, N, N)) if mode.get("bias") else {}
    options |= dict(key_lengths=torch.tensor([3, 7], dtype=torch.int32)) if mode.get("lengths") else {}
    h = F.linear(F.layer_norm(x, (width,), *norm, 1e-5), *qkv).view(B, N, 3, H, DH)
    expected = x + F.linear(ops.attention(h, **options).flatten(2), *proj)
    assert_close(ops.attention_block(x, *norm, *qkv, *proj, num_heads=H, eps=1e-5, **options), expected, **TOL)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rope=torch.ones(N, DH)), "rope must be \\(cos, sin\\), got Tensor"),
        (dict(rope=(torch.ones(N, DH), torch.ones(N, DH - 1))), "cos and sin must be alike"),
        (dict(rope=(torch.ones(N, 3), torch.ones(N, 3))), "cos and sin must be \\(9, 8\\), \\(3, 9, 8\\) or"),
        (dict(rope=(torch.ones(N, DH),) * 2, num_prefix=1), "cos and sin must be \\(8, 8\\)"),
        (dict(rope=(torch.ones(N, DH).half(),) * 2), "cos must be torch.float64 like its input, or torch.float32"),
        (dict(rope=(torch.ones(N, DH),) * 2, rope_layout="full"), "rope_layout must be 'half' or 'interleaved'"),
        (dict(num_prefix=N + 1), "num_prefix must be a whole number from 0 to the 9 tokens, got 10"),
        (dict(num_prefix=True), "num_prefix must be a whole number"),
        (dict(bias=torch.ones(N, N)), "bias must be \\(3, 9, 9\\) or \\(2 or 1, 3, 9, 9\\), got \\(9, 9\\)"),
        (dict(bias=torch.ones(H, N, N).bool()), "bias must be floating point"),
        (dict(key_lengths=torch.ones(B)), "key_lengths must be int32 or int64"),
        (dict(key_lengths=torch.ones(3, dtype=torch.int32)), "key_lengths must be \\(2,\\), got \\(3,\\)"),
        (dict(key_lengths=[1, 2]), "key_lengths must be a tensor, got list"),
    ],
)
def test_errors_name_what_does_not_fit(options, message):
    with pytest.raises((TypeError, ValueError), match=f"attention: {message}"):
        ops.attention(rand(B, N, 3, H, DH), **options)


def test_numbers_of_numpy_and_a_type_named_once():
    qkv, tables = rand(B, N, 3, H, DH), angles()
    expected = ops.attention(qkv, rope=tables, num_prefix=PREFIX)
    assert torch.equal(ops.attention(qkv, rope=tables, num_prefix=np.int64(PREFIX)), expected)
    with pytest.raises(TypeError, match="^attention: bias must be torch.float32 like its input, got torch.float64$"):
        ops.attention(qkv.float(), bias=rand(H, N, N))


def test_rope_needs_pairs():
    with pytest.raises(ValueError, match="the head size must be even, got 7"):
        ops.attention(rand(B, N, 3, H, 7), rope=(torch.ones(N, 7),) * 2)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_what_acts_on_logits_is_exported_as_plain_pytorch(layout):
    """With a batch of any size, whether kernels are on or off."""

    class Attend(torch.nn.Module):
        def forward(self, qkv, cos, sin, bias, lengths):
            options = dict(rope=(cos, sin), rope_layout=layout, num_prefix=PREFIX, bias=bias, key_lengths=lengths)
            return ops.attention(qkv, **options)

    given = tuple(t.float() for t in (rand(B, N, 3, H, DH), *angles(H), rand(H, N, N))) + (torch.tensor([3, 7]),)
    batch = torch.export.Dim("batch", min=1, max=64)
    dynamic = ({0: batch}, None, None, None, {0: batch})
    for mode in ("on", "off"):
        with ops.use_kernels(mode):
            exported = torch.export.export(Attend(), given, dynamic_shapes=dynamic)
        names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert names and not any("vitfast" in name for name in names)
        for inputs in (given, (rand(5, N, 3, H, DH).float(), *given[1:4], torch.tensor([1, 2, 9, 4, 5]))):
            assert_close(exported.module()(*inputs), Attend()(*inputs), atol=1e-5)
