"""RMSNorm's kernels, interpreted, against float64: alone, after a residual add, in the blocks; by PyTorch too."""

import pytest
import torch
from layer_norm_cases import DTYPES, TOL, compare, rand
from library_cases import providers

from vitfast import ops, ref
from vitfast.kernels import layer_norm as kernels
from vitfast.kernels import tiles
from vitfast.kernels.launch import record

pytestmark = pytest.mark.usefixtures("kernels_on_nan", "few_sums")


def run(module, x, w, upstream, double=False):
    leaves = [t.detach().double() if double else t.detach() for t in (x, *([] if w is None else [w]))]
    leaves = [t.requires_grad_() for t in leaves]
    out = module.rms_norm(*leaves, *([None] if w is None else []), 1e-5)
    gradients = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    return {"out": out.detach(), **dict(zip(("dx", "dweight"), gradients))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 20), (50, 192), (2, 3, 768), (5, 1000), (3, 1280), (2, 8192)], ids=str)
def test_it_matches_float64(shape, dtype):
    """No wider error than twice PyTorch's own; parameters in x's dtype or in fp32; none."""
    x, upstream = rand(*shape, dtype=dtype, mean=3.0), rand(*shape, dtype=dtype)
    for w in (rand(shape[-1], dtype=dtype, mean=1.0), rand(shape[-1]), None):
        results = [run(ops, x, w, upstream), run(ref, x, w, upstream), run(ref, x, w, upstream, double=True)]
        assert results[0].keys() == results[2].keys()
        compare(*results, dtype)


def test_no_mean_is_written_or_read():
    x = torch.randn(6, 64, requires_grad=True)
    launches = record(lambda: ops.rms_norm(x, torch.ones(64)).backward(torch.ones(6, 64)))
    forward, backward = (launch for launch in launches if launch.kernel.__name__.startswith("layer_norm"))
    assert forward.arguments["mean_ptr"] is backward.arguments["mean_ptr"] is None
    assert forward.arguments["rstd_ptr"].shape == (6,)
    assert backward.arguments["ws_ptrs"] == (None,) * 4, "the weight wants no gradient"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", ["triton", "torch"])
def test_everything_a_block_asks_of_it(by, dtype):
    """After a residual add, with factors; backward with dz, its sum, the layer scale's sum, and y again."""
    m, d = 12, 72
    x, dy = rand(m, d, dtype=dtype), rand(m, d, dtype=dtype)
    res, dz = rand(m, d), rand(m, d)
    w, scale, drop = rand(d, mean=1.0), rand(d), torch.tensor([0.0, 2.0, 1.25])
    with tiles.override("layer_norm_fwd", tiles.tile(provider="torch")) if by == "torch" else providers():
        y, z, mean, rstd = kernels.add_layer_norm_fwd(x, res, w, None, 1e-5, scale, drop, 4, dtype, rms=True)
    assert mean is None and z.dtype == torch.float32 and y.dtype == dtype
    factors = dict(dz=dz, branch=x, layer_scale=scale, drop_path=drop, rows_per_sample=4)
    wanted = dict(want_layer_scale=True, want_dz_sum=True, want_y=True)
    with tiles.override("layer_norm_bwd", tiles.tile(provider="torch")) if by == "torch" else providers():
        found = kernels.layer_norm_bwd(dy, z, w, None, None, rstd, **factors, **wanted)
    assert found.dbias is None
    leaf, weight = z.double().requires_grad_(), w.double().requires_grad_()
    truth_y = ref.rms_norm(leaf, weight, 1e-5)
    dres, dweight = torch.autograd.grad(truth_y, (leaf, weight), dy.double())
    dres = dres + dz.double()
    dropped = dres * drop.double().repeat_interleave(4)[:, None]
    truth = dict(y=truth_y.detach(), dres=dres, dweight=dweight, dx=dropped * scale.double())
    truth |= dict(dlayer_scale=(dropped * x.double()).sum(0), dz_sum=dz.double().sum(0))
    truth_z = res.double() + drop.double().repeat_interleave(4)[:, None] * scale.double() * x.double()
    assert (z - truth_z).abs().max() < 1e-5
    for name, expected in truth.items():
        error = (getattr(found, name).double() - expected).abs().max()
        assert error <= TOL[dtype] * max(1.0, expected.abs().max().item()), f"{name}: {error:.2e}"
    assert torch.equal(found.y, y) or by == "torch"


def test_opcheck_compile_and_a_second_derivative():
    x, w = torch.randn(2, 3, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    operation = torch.ops.vitfast.rms_norm
    for arguments in ((x, w, 1e-6), (x, None, 1e-6)):
        torch.library.opcheck(operation, arguments)
    for needs in ([True, True], [True, False], [False, True]):
        given = torch.randn(2, 3, 40), x.detach(), w.detach(), torch.rand(6), needs
        torch.library.opcheck(torch.ops.vitfast.rms_norm_backward, given, test_utils=("test_schema", "test_faketensor"))
    upstream = torch.randn(2, 3, 40)
    compiled = torch.compile(ops.rms_norm, fullgraph=True, backend="aot_eager")
    ours, eager = (torch.autograd.grad(f(x, w), (x, w), upstream) for f in (compiled, ops.rms_norm))
    assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
    (dx,) = torch.autograd.grad(ops.rms_norm(x, w).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm: cannot be differentiated twice"):
        dx.sum().backward()
