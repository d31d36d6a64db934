"""LayerNorm kernels against ref in float64: forward, every gradient, masks, strides, compile, the persistent loop."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitfast import ops, ref
from vitfast.kernels import layer_norm as kernels
from vitfast.kernels import rows, tiles
from vitfast.kernels.launch import recording

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Error against float64 at most twice PyTorch's in the same dtype, plus this: PyTorch may round luckily on few elements.
# fp32: some 30 ulp of 1, the noise of sums in another order; fp16: one ulp of values up to 4.
# bf16: one rounding, 2^-8, of the largest value.
TOL = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 4e-3}
DTYPES = list(TOL)
HALVES = DTYPES[1:]
WIDTHS = [192, 384, 768, 1000, 1280]
NAMES = ("x", "residual", "weight", "bias", "layer_scale")


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Kernels on, and what torch.empty hands out is NaN: reading it shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        t = empty(*args, **kwargs)
        return t.fill_(float("nan")) if t.is_floating_point() and t.device.type != "meta" else t

    monkeypatch.setattr(torch, "empty", poisoned)
    with ops.use_kernels("on"):
        yield


@pytest.fixture(autouse=True)
def _few_sums():
    """The interpreter pays per program, not per element: one program for 1024 sums. (A GPU takes the shipped tiles.)"""
    with (
        tiles.override("column_sums", tiles.tile(8, 1, BLOCK_P=256, BLOCK_D=1024))
        if DEVICE == "cpu"
        else contextlib.nullcontext()
    ):
        yield


@pytest.fixture
def few_programs():
    """And blocks of 64 rows."""
    if DEVICE == "cuda":
        yield
        return
    backward = tiles.tile(4, 1, BLOCK_M=64, STAGES=1, PER_SM=1)
    with tiles.override("layer_norm_fwd", tiles.tile(4, 1, BLOCK_M=64)), tiles.override("layer_norm_bwd", backward):
        yield


def rand(*shape, dtype=torch.float32, std=1.0, mean=0.0):
    return (torch.randn(*shape, device=DEVICE) * std + mean).to(dtype)


def inputs(shape, dtype, weight=True, bias=True, layer_scale=False, drop_path=False, residual=True):
    D = shape[-1]
    return dict(
        x=rand(*shape, dtype=dtype),
        residual=rand(*shape, dtype=dtype) if residual else None,
        weight=rand(D, dtype=dtype, std=0.3, mean=1) if weight else None,
        bias=rand(D, dtype=dtype) if bias else None,
        layer_scale=rand(D) if layer_scale else None,
        drop_path=torch.tensor([0.0, 1.25], device=DEVICE)[torch.arange(shape[0], device=DEVICE) % 2]
        if drop_path
        else None,
    )


def run(module, given, upstream, frozen=(), double=False):
    """Outputs and gradients, by name, of add_layer_norm (layer_norm without a residual)."""
    leaves = {}
    for name, t in given.items():
        if t is not None:
            t = t.detach().double() if double else t.detach()
            leaves[name] = t.requires_grad_(name in NAMES and name not in frozen) if name in NAMES else t
    arguments = {name: leaves.get(name) for name in given}
    x, residual, weight, bias = (arguments.pop(name) for name in NAMES[:4])
    if residual is None:
        outputs = (module.layer_norm(x, weight, bias, 1e-5),)
    else:
        outputs = module.add_layer_norm(x, residual, weight, bias, 1e-5, **arguments)
    pairs = [(out, g.to(out.dtype)) for out, g in zip(outputs, upstream) if out.requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])
    results = {f"out{i}": out.detach() for i, out in enumerate(outputs)}
    return results | {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}


def check(given, upstream, dtype, frozen=()):
    actual = run(ops, given, upstream, frozen)
    pytorch = run(ref, given, upstream, frozen)
    truth = run(ref, given, upstream, frozen, double=True)
    assert actual.keys() == truth.keys()
    compare(actual, pytorch, truth, dtype)


def compare(actual, pytorch, truth, dtype):
    for name, expected in truth.items():
        assert actual[name].dtype == pytorch[name].dtype and actual[name].shape == expected.shape, name
        assert actual[name].is_contiguous() or not name.startswith("out"), name
        if expected.numel() == 0:
            continue
        error, allowed = ((t[name].double() - expected).abs().max() for t in (actual, pytorch))
        # A column sum's error grows with its terms; so does what the atol is to cover.
        scale = max(1.0, expected.abs().max().item())
        # On a CPU PyTorch sums columns in 16 bit: what that costs, up to 4% in bf16, excuses nothing.
        if dtype != torch.float32:
            allowed = min(allowed, torch.finfo(dtype).eps * scale)
        assert error <= 2 * allowed + TOL[dtype] * scale, f"{name}: error {error:.2e}, PyTorch's {allowed:.2e}"


def upstream_of(shape, dtype):
    return rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows_", [0, 1, 5, 50, 197])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_matches_ref(width, rows_, dtype, few_programs):
    check(inputs((rows_, width), dtype, residual=False), upstream_of((rows_, width), dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows_", [0, 5, 50])
@pytest.mark.parametrize("width", WIDTHS)
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


FROZEN = [
    ("weight", "bias"),
    ("bias",),
    ("weight",),
    ("x",),
    ("residual",),
    ("layer_scale",),
    ("x", "residual"),
    ("x", "residual", "layer_scale"),
    NAMES,
]


@pytest.mark.parametrize("factors", [True, False], ids=["factors", "plain"])
@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_frozen_arguments_match_ref(frozen, factors):
    shape = (2, 4, 48)
    check(
        inputs(shape, torch.float32, layer_scale=factors, drop_path=factors),
        upstream_of(shape, torch.float32),
        torch.float32,
        frozen,
    )
    if not factors:
        check(inputs(shape, torch.float32, residual=False), upstream_of(shape, torch.float32), torch.float32, frozen)


def written(frozen, residual):
    """How many kernels backward launches, and what the first is asked to write."""
    given = inputs((2, 4, 48), torch.float32, residual=residual, layer_scale=residual)
    leaves = {name: None if t is None else t.requires_grad_(name not in frozen) for name, t in given.items()}
    if residual:
        y, _ = ops.add_layer_norm(*(leaves[n] for n in NAMES[:4]), layer_scale=leaves["layer_scale"])
    else:
        y = ops.layer_norm(leaves["x"], leaves["weight"], leaves["bias"])
    with recording() as launches:
        y.backward(torch.ones_like(y))
    names = dict(out_ptrs=("dres", "dx", "y"), ws_ptrs=("dweight", "dbias", "dlayer_scale", "dz_sum"))
    return len(launches), {
        n
        for tuple_, of in names.items()
        for n, t in zip(of, launches[0].arguments[tuple_], strict=True)
        if t is not None
    }


def test_frozen_arguments_cost_nothing():
    assert written((), False) == (2, {"dres", "dweight", "dbias"})
    assert written(("weight", "bias"), False) == (1, {"dres"})
    assert written(("bias",), False) == (2, {"dres", "dweight"})
    assert written(("x",), False) == (2, {"dweight", "dbias"})
    assert written((), True) == (2, {"dres", "dx", "dweight", "dbias", "dlayer_scale"})
    assert written(("weight", "bias", "layer_scale"), True) == (1, {"dres", "dx"})
    assert written(("x", "residual", "weight", "bias"), True) == (2, {"dlayer_scale"})


def test_layer_scale_alone_keeps_the_branch():
    given = {
        name: None if t is None else t.requires_grad_()
        for name, t in inputs((2, 4, 48), torch.float32, layer_scale=True).items()
    }
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.add_layer_norm(*(given[n] for n in NAMES[:4]), layer_scale=given["layer_scale"].detach())
        assert not any(t is given["x"] or (t.shape == given["x"].shape and torch.equal(t, given["x"])) for t in kept)
        ops.add_layer_norm(*(given[n] for n in NAMES[:4]), layer_scale=given["layer_scale"])
        assert any(t.shape == given["x"].shape and torch.equal(t, given["x"]) for t in kept)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(used):
    given = inputs((2, 5, 48), torch.float32, layer_scale=True, drop_path=True)
    g = rand(2, 5, 48)

    def grads(module, double=False):
        leaves = {n: (t.double() if double else t).detach().requires_grad_(n in NAMES) for n, t in given.items()}
        out = module.add_layer_norm(
            *(leaves[n] for n in NAMES[:4]), layer_scale=leaves["layer_scale"], drop_path=leaves["drop_path"]
        )
        out[used].backward(g.to(out[used].dtype))
        return {n: leaves[n].grad for n in NAMES}

    actual, pytorch, truth = grads(ops), grads(ref), grads(ref, True)
    for name, value in list(pytorch.items()):  # what nobody used has no gradient, or zeros
        if value is None:
            assert actual[name] is None or not actual[name].any()
            for grads_ in (actual, pytorch, truth):
                grads_.pop(name)
    compare(actual, pytorch, truth, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided(dtype):
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
    """layer_norm_bwd with all it can write, on a 16-bit branch and a stream in fp32 or like it; fp32 parameters."""
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


def test_opcheck():
    x, r, w, b, ls = (t.requires_grad_() for t in (rand(2, 3, 24), rand(2, 3, 24), rand(24), rand(24), rand(24)))
    dp, mean, rstd = torch.tensor([0.0, 2.0], device=DEVICE), rand(6), rand(6).abs()
    check_op = torch.library.opcheck
    check_op(torch.ops.vitfast.layer_norm, (x, w, b, 1e-6))
    check_op(torch.ops.vitfast.layer_norm, (x, None, None, 1e-6))
    check_op(torch.ops.vitfast.add_layer_norm, (x, r, w, b, 1e-6, ls, dp))
    check_op(torch.ops.vitfast.add_layer_norm, (x, r, w, None, 1e-6, None, None))
    d = [t.detach() for t in (x, r, w, b, ls)]
    check_op(torch.ops.vitfast.layer_norm_backward, (d[0], d[1], d[2], d[3], mean, rstd, [True, True, True]))
    check_op(torch.ops.vitfast.layer_norm_backward, (d[0], d[1], d[2], d[3], mean, rstd, [True, False, False]))
    check_op(
        torch.ops.vitfast.add_layer_norm_backward,
        (d[0], d[1], d[0], mean, rstd, d[1], d[2], d[3], d[4], dp, [True] * 5),
    )
    check_op(
        torch.ops.vitfast.add_layer_norm_backward,
        (d[0], None, d[0], mean, rstd, None, d[2], d[3], None, None, [False, True, True, False, False]),
    )


def test_compile_equals_eager():
    given, upstream = (
        inputs((2, 5, 48), torch.float32, layer_scale=True, drop_path=True),
        upstream_of((2, 5, 48), torch.float32),
    )

    class Compiled:
        layer_norm = staticmethod(torch.compile(ops.layer_norm, fullgraph=True))
        add_layer_norm = staticmethod(torch.compile(ops.add_layer_norm, fullgraph=True))

    for case in (
        given,
        dict(given, residual=None, layer_scale=None, drop_path=None),
        dict(given, layer_scale=None, drop_path=None),
    ):
        eager, compiled = run(ops, case, upstream), run(Compiled, case, upstream)
        assert eager.keys() == compiled.keys() and all(torch.equal(eager[name], compiled[name]) for name in eager)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_returns_gradients_in_the_parameters_dtype(dtype):
    x, w, b = rand(2, 3, 32).requires_grad_(), rand(32).requires_grad_(), rand(32).requires_grad_()
    with torch.autocast(DEVICE, dtype):
        y = ops.layer_norm(x, w, b)
    y.backward(rand(2, 3, 32, dtype=dtype))
    assert y.dtype == dtype
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32


def test_twice_differentiated_says_so():
    x, w = rand(3, 24).requires_grad_(), rand(24).requires_grad_()
    for op, out in (
        ("layer_norm", ops.layer_norm(x, w, None)),
        ("add_layer_norm", ops.add_layer_norm(x, x, w, None)[0]),
    ):
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        with pytest.raises(RuntimeError, match=f"{op}: cannot be differentiated twice"):
            g.sum().backward()


def test_what_no_kernel_covers_says_so():
    with pytest.raises(RuntimeError, match="layer_norm: kernels are switched on, but width above 8192"):
        ops.layer_norm(rand(1, 8200), None, None)
    with pytest.raises(RuntimeError, match="add_layer_norm: kernels are switched on, but drop_path needs a gradient"):
        ops.add_layer_norm(
            rand(1, 8), rand(1, 8), None, None, drop_path=torch.ones(1, device=DEVICE, requires_grad=True)
        )
    with pytest.raises(RuntimeError, match="no kernel computes in torch.float64"):
        ops.layer_norm(rand(1, 8).double(), None, None)


@settings(max_examples=18, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(0, 6), st.integers(1, 300), st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_any_shape(B, N, D, dtype, layer_scale, drop_path):
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
