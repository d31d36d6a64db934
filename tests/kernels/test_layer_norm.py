"""LayerNorm kernels against ref in float64: forward, every gradient, strides, the persistent loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_norm_cases import DEVICE, DTYPES, HALVES, TOL, check, inputs, rand, run, upstream_of
from pairs import pairs

from vitfast import ops, ref
from vitfast.kernels import layer_norm as kernels
from vitfast.kernels import rows, tiles

pytestmark = pytest.mark.usefixtures("kernels_on_nan", "few_sums")


WIDTHS = [192, 384, 768, 1000, 1280]


@pytest.mark.parametrize("width, rows_, dtype", pairs(WIDTHS, [0, 1, 5, 50, 197], DTYPES))
def test_layer_norm_matches_ref(width, rows_, dtype, few_programs):
    check(inputs((rows_, width), dtype, residual=False), upstream_of((rows_, width), dtype), dtype)


@pytest.mark.parametrize("width, rows_, dtype", pairs(WIDTHS, [0, 5, 50], DTYPES))
def test_add_layer_norm_matches_ref(width, rows_, dtype, few_programs):
    shape = (2, rows_, width) if rows_ else (0, 4, width)
    check(inputs(shape, dtype, layer_scale=True, drop_path=True), upstream_of(shape, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [20, 64, 384, 768, 1280, 1664, 5000, 8192])
def test_shipped_tiles(width, dtype):
    """Each class of tile as it ships, over an uneven number of rows."""
    shape = (3, 1 if width > 2000 else 3, width)
    check(inputs(shape, dtype, layer_scale=True, drop_path=True), upstream_of(shape, dtype), dtype)


@pytest.mark.parametrize("weight, bias", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("layer_scale, drop_path", [(False, False), (True, False), (False, True)])
def test_optional_arguments(weight, bias, layer_scale, drop_path):
    shape = (3, 5, 40)
    given = inputs(shape, torch.float32, weight, bias, layer_scale, drop_path)
    check(given, upstream_of(shape, torch.float32), torch.float32)
    if not (layer_scale or drop_path):
        check(
            inputs(shape, torch.float32, weight, bias, residual=False), upstream_of(shape, torch.float32), torch.float32
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows_give_the_same(dtype):
    given = inputs((3, 6, 200), dtype, layer_scale=True, drop_path=True)
    strided = dict(
        given, x=rand(3, 200, 6, dtype=dtype).transpose(1, 2), residual=rand(3, 7, 216, dtype=dtype)[:, 1:, 8:208]
    )
    strided["weight"], strided["layer_scale"] = rand(400, dtype=dtype)[::2], rand(1).expand(200)
    upstream = rand(3, 200, 6, dtype=dtype).transpose(1, 2), rand(1, 1, 200, dtype=dtype).expand(3, 6, 200)
    check(strided, upstream, dtype)
    check(
        dict(given, x=rand(5, 203, dtype=dtype)[:, 3:], residual=None, layer_scale=None, drop_path=None),
        upstream_of((5, 200), dtype),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_mean(dtype):
    given = inputs((6, 768), dtype, residual=False)
    given["x"] = (
        rand(6, 768, dtype=dtype, mean=1e4) if dtype == torch.float32 else rand(6, 768, dtype=dtype, std=20, mean=2e3)
    )
    check(given, upstream_of((6, 768), dtype), dtype)
    y = ops.layer_norm(given["x"], None, None)
    assert y.double().mean(-1).abs().max() < 2e-3  # half an fp32 ulp of the mean, 5e-4, is all that may be left
    assert (y.double().std(-1, correction=0) - 1).abs().max() < 1e-3


def test_constant_rows_are_bias():
    x, bias = torch.full((3, 100), 7.0, device=DEVICE), rand(100)
    assert torch.equal(ops.layer_norm(x, rand(100), bias), bias.expand(3, 100))


def test_persistent_loop_gives_the_same(monkeypatch):
    """Two programs run over 50 rows what one program a block did."""
    given, upstream = (
        inputs((2, 25, 192), torch.float32, layer_scale=True, drop_path=True),
        upstream_of((2, 25, 192), torch.float32),
    )
    monkeypatch.setattr(rows, "_multiprocessors", lambda device: 1)
    check(given, upstream, torch.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_same_bits_twice(dtype):
    given, upstream = inputs((2, 25, 192), dtype, layer_scale=True, drop_path=True), upstream_of((2, 25, 192), dtype)
    first, second = run(ops, given, upstream), run(ops, given, upstream)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("fp32_stream", [True, False], ids=["fp32-stream", "16-bit-stream"])
def test_launchers_for_the_blocks(fp32_stream, dtype):
    """layer_norm_bwd with all it can write: a 16-bit branch, a stream in fp32 or 16 bit, fp32 parameters."""
    M, D, n = 12, 200, 4
    half, stream = dict(dtype=dtype), torch.float32 if fp32_stream else dtype
    x, dy, z, dz = rand(M, D, **half), rand(M, D, **half), rand(M, D, dtype=stream), rand(M, D, dtype=stream)
    w, b, ls, dp = rand(D), rand(D), rand(D), torch.tensor([0.0, 2.0, 1.0], device=DEVICE)
    y, mean, rstd = kernels.layer_norm_fwd(z, w, b, 1e-6, out_dtype=dtype)
    leaf = z.double().requires_grad_()
    factor = dp.double().repeat_interleave(n)[:, None] * ls.double()
    truth_y = ref.layer_norm(leaf, w, b, 1e-6, upcast=True)
    (dres,) = torch.autograd.grad(truth_y, leaf, dy.double())
    dres = dres + dz.double()
    truth = dict(y=truth_y.detach(), dres=dres, dx=dres * factor, dbias=dy.double().sum(0), dz_sum=dz.double().sum(0))
    truth["dlayer_scale"] = (dres * dp.double().repeat_interleave(n)[:, None] * x.double()).sum(0)
    truth["dweight"] = (dy.double() * (truth_y.detach() - b) / w).sum(0)
    grads = kernels.layer_norm_bwd(
        dy,
        z,
        w,
        b,
        mean,
        rstd,
        dz=dz,
        branch=x,
        layer_scale=ls,
        drop_path=dp,
        rows_per_sample=n,
        want_layer_scale=True,
        want_dz_sum=True,
        want_y=True,
    )
    assert grads.dres.dtype == stream and grads.dx.dtype == grads.y.dtype == y.dtype == dtype
    assert all(t.dtype == torch.float32 for t in (grads.dweight, grads.dbias, grads.dlayer_scale, grads.dz_sum))
    assert torch.equal(grads.y, y)
    for name, expected in truth.items():
        actual = getattr(grads, name)
        limit = 2e-5 if actual.dtype == torch.float32 else torch.finfo(dtype).eps  # 16 bit: twice their own rounding
        assert (actual.double() - expected).abs().max() <= limit * max(1, expected.abs().max()), name
    plain = kernels.layer_norm_bwd(dy, z, w, b, mean, rstd, dz=dz, want_dx=False, want_dz_sum=True, want_dparams=False)
    assert plain.dres is plain.dx is plain.dweight is plain.dbias is plain.y is None
    assert (plain.dz_sum.double() - truth["dz_sum"]).abs().max() <= 2e-5 * max(1, truth["dz_sum"].abs().max())
    _, added, _, _ = kernels.add_layer_norm_fwd(x, z, w, b, 1e-6, ls, dp, n)
    assert added.dtype == stream
    total = z.double() + factor * x.double()
    assert (added.double() - total).abs().max() < torch.finfo(stream).eps * total.abs().max()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (50, 200), (40, 768), (7, 3000)], ids=str)
def test_scale_rows(shape, dtype, monkeypatch):
    M, D = shape
    n = 10 if M % 10 == 0 else 1
    dout, ls, dp = rand(M, D + 8, dtype=dtype)[:, :D], rand(D), rand(M // n)
    for programs in (132, 1):
        monkeypatch.setattr(rows, "_multiprocessors", lambda device, programs=programs: programs)
        for scale, drop in ((ls, dp), (None, dp), (ls, None), (None, None)):
            expected = dout.double()
            expected = expected if scale is None else expected * scale.double()
            expected = expected if drop is None else expected * drop.double().repeat_interleave(n)[:, None]
            g, total = kernels.scale_rows(dout, scale, drop, n, want_scaled=scale is not None)
            assert (g is None) == (scale is None) and total.dtype == torch.float32
            assert (total.double() - expected.sum(0)).abs().max() < 2e-5 * max(1, M)
            if g is not None:
                assert g.dtype == dtype and torch.equal(g.isnan(), torch.zeros_like(g, dtype=torch.bool))
                assert M == 0 or (g.double() - expected).abs().max() < torch.finfo(dtype).eps * expected.abs().max()
    g, total = kernels.scale_rows(dout, ls, dp, n, want_sum=False, out_dtype=torch.float32)
    assert total is None and g.dtype == torch.float32


def test_column_sums():
    """The shipped tile, four workspaces of more rows than a block has, outputs in their own dtypes."""
    dtypes = (torch.float32, torch.float16, torch.float32, torch.bfloat16)
    pairs = [(rand(300, 40), torch.empty(40, dtype=dtype, device=DEVICE)) for dtype in dtypes]
    with tiles.override("column_sums", tiles.RULES["column_sums"][0].tile):
        rows.column_sums([(None, None), *pairs], 300, 40, pairs[0][0])
    for ws, out in pairs:
        total = ws.double().sum(0)
        limit = 1e-4 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps * total.abs().max()
        assert (out.double() - total).abs().max() < limit


@settings(max_examples=18, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(0, 6), st.integers(1, 300), st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_0_to_18_rows_of_1_to_300_columns(B, N, D, dtype, layer_scale, drop_path):
    check(inputs((B, N, D), dtype, layer_scale=layer_scale, drop_path=drop_path), upstream_of((B, N, D), dtype), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 197, 384), (256, 197, 768), (64, 577, 1024), (64, 257, 1280)], ids=str)
def test_bf16_at_real_shapes(shape, monkeypatch):
    monkeypatch.setitem(TOL, torch.bfloat16, 3e-2)
    given = inputs(shape, torch.bfloat16, layer_scale=True, drop_path=True)
    check(given, upstream_of(shape, torch.bfloat16), torch.bfloat16)
    check(
        dict(given, residual=None, layer_scale=None, drop_path=None), upstream_of(shape, torch.bfloat16), torch.bfloat16
    )


@pytest.mark.gpu
def test_more_than_2_31_elements():
    M, D = 2**31 // 768 + 100, 768
    x = torch.randn(M, D, device=DEVICE, dtype=torch.bfloat16)
    y, mean, rstd = kernels.layer_norm_fwd(x, None, None, 1e-6)
    tail = ref.layer_norm(x[-64:], None, None, 1e-6, upcast=True)
    assert (y[-64:].double() - tail).abs().max() < 0.02
    grads = kernels.layer_norm_bwd(y, x, None, None, mean, rstd, want_y=True)
    assert torch.equal(grads.y[-64:], y[-64:]) and not grads.dres[-64:].isnan().any()
