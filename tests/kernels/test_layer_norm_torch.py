"""PyTorch as a provider of LayerNorm, against float64."""

from types import SimpleNamespace

import pytest
import torch
from library_cases import ATOL, DTYPES, HALVES, compare, interpreted, providers

from vitfast import ops, ref
from vitfast.kernels import launch, rows, tiles
from vitfast.kernels import layer_norm as norm

FACTORS = [(False, False), (True, False), (False, True), (True, True)]


def norm_inputs(M, D, dtype, parameters, stream, layer_scale=False, drop_path=False, device="cpu"):
    """x, residual, weight, bias, layer scale and drop path; three rows to a sample."""

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, device=device).to(dtype)

    return SimpleNamespace(
        x=draw(M, D + 8)[:, 4:-4],  # rows with a stride
        residual=draw(M, D, dtype=stream),
        weight=draw(D, dtype=parameters) * 0.3 + 1,
        bias=draw(D, dtype=parameters),
        layer_scale=draw(D, dtype=parameters) if layer_scale else None,
        drop_path=torch.tensor([0.0, 1.25, 1.25], device=device)[torch.arange(M // 3, device=device) % 3]
        if drop_path
        else None,
    )


def norm_truth(t, z, dy, dz, work=None):
    """Everything the backward returns, by autograd: in float64, or as PyTorch does it in these dtypes."""

    def leaf(x):
        return None if x is None else (x.detach() if work is None else x.detach().to(work)).requires_grad_()

    def factor(x):
        return x if work is None or x is None else x.to(work)

    x, stream, weight, bias, scale = map(leaf, (t.x, z, t.weight, t.bias, t.layer_scale))
    drop = None if t.drop_path is None else factor(t.drop_path).repeat_interleave(3)[:, None]
    branch = x
    for f in (scale, drop):
        branch = branch if f is None else branch * f
    normed = stream + (branch - branch.detach()).to(stream.dtype)  # z itself; its gradient reaches the branch too
    y = ref.layer_norm(normed, weight, bias, 1e-5)
    leaves = [leaf for leaf in (stream, x, weight, bias, scale) if leaf is not None]
    gradient = torch.autograd.grad((y, normed), leaves, (dy.to(y.dtype), dz.to(normed.dtype)))
    names = ("dres", "dx", "dweight", "dbias", "dlayer_scale")
    found = dict(zip(names, gradient)) | {"dz_sum": dz.to(normed.dtype).sum(0), "y": y.detach()}
    return found if scale is not None or drop is not None else {name: v for name, v in found.items() if name != "dx"}


def torch_norm(t, z, dy, dz, mean, rstd, **options):
    wants = dict(want_dz_sum=dz is not None, want_y=True, want_layer_scale=t.layer_scale is not None) | options
    factors = dict(branch=t.x, layer_scale=t.layer_scale, drop_path=t.drop_path, rows_per_sample=3)
    return norm.layer_norm_bwd(dy, z, t.weight, t.bias, mean, rstd, dz=dz, **factors, **wants)


def check_norm(M, D, dtype, parameters, stream, layer_scale, drop_path, device="cpu"):
    t = norm_inputs(M, D, dtype, parameters, stream, layer_scale, drop_path, device)
    work = torch.float64
    double = SimpleNamespace(**{name: None if v is None else v.to(work) for name, v in vars(t).items()})
    factors = dict(layer_scale=t.layer_scale, drop_path=t.drop_path)
    with providers(layer_norm_fwd="torch", layer_norm_bwd="torch"):
        y, z, mean, rstd = norm.add_layer_norm_fwd(t.x, t.residual, t.weight, t.bias, 1e-5, *factors.values(), 3, dtype)
        dy, dz = torch.randn(M, D, device=device).to(dtype), torch.randn(M, D, device=device).to(stream)
        grads = torch_norm(t, z, dy, dz, mean, rstd)
    assert (
        y.dtype == grads.y.dtype == dtype
        and z.dtype == grads.dres.dtype == stream
        and mean.dtype == rstd.dtype == torch.float32
    )
    assert all(g is None or g.is_contiguous() for g in grads)
    for name, parameter in (("dweight", t.weight), ("dbias", t.bias), ("dlayer_scale", t.layer_scale)):
        grad = getattr(grads, name)
        assert (grad is None and parameter is None) or grad.dtype == parameter.dtype
    assert (grads.dx is None) == (t.layer_scale is None and t.drop_path is None)

    def add(s):
        shape = (lambda x: x.unflatten(0, (-1, 3))) if s.drop_path is not None else (lambda x: x)
        return ref.residual_add(
            shape(s.x), shape(s.residual), layer_scale=s.layer_scale, drop_path=s.drop_path
        ).reshape(M, D)

    exact = add(double)
    compare({"z": z}, {"z": add(t)}, {"z": exact}, stream)
    exact = z.to(work)
    forward = {"y": ref.layer_norm(exact, double.weight, double.bias, 1e-5), "mean": exact.mean(1)}
    forward["rstd"] = ((exact - forward["mean"][:, None]).square().mean(1) + 1e-5).rsqrt()
    theirs = {"y": ref.layer_norm(z, t.weight, t.bias, 1e-5).to(dtype)}
    compare({"y": y}, theirs, {"y": forward.pop("y")}, dtype)
    torch.testing.assert_close(
        torch.stack([mean, rstd]).double(), torch.stack(list(forward.values())), atol=1e-5, rtol=1e-5
    )
    truth = norm_truth(t, z, dy, dz, work)
    judge = norm_truth(t, z, dy, dz)
    # what leaves in 16 bit is judged as such, whatever it was computed in
    compare(grads._asdict(), judge, truth, max(dtype, stream, parameters, key=ATOL.get))


MIXES = [
    pytest.param(torch.float32, torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.float16, torch.float16, torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, torch.float32, torch.float16, id="fp16, fp32 parameters"),
    pytest.param(torch.bfloat16, torch.float32, torch.bfloat16, id="bf16, fp32 parameters"),
    pytest.param(torch.bfloat16, torch.float32, torch.float32, id="bf16, fp32 parameters and stream"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.float32, id="bf16, fp32 stream"),
]


@interpreted
@pytest.mark.parametrize("layer_scale, drop_path", FACTORS)
@pytest.mark.parametrize("dtype, parameters, stream", MIXES)
def test_torch_layer_norm_matches_ref(dtype, parameters, stream, layer_scale, drop_path):
    check_norm(150, 192, dtype, parameters, stream, layer_scale, drop_path)


@interpreted
@pytest.mark.parametrize("M, D", [(0, 64), (3, 1000)])
def test_torch_layer_norm_at_other_sizes(M, D):
    check_norm(M, D, torch.float32, torch.float32, torch.float32, True, True)


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wanted", ["want_dx", "want_dparams", "want_layer_scale", "want_dz_sum", "want_y"])
def test_torch_layer_norm_returns_what_our_kernel_returns(wanted, dtype):
    """Each result alone, with and without the residual's gradient; without weight or bias, too."""
    t = norm_inputs(6, 64, dtype, dtype, dtype, layer_scale=wanted == "want_layer_scale")
    off = dict(want_dx=False, want_dparams=False, want_layer_scale=False, want_dz_sum=False, want_y=False)
    tol = 4 * torch.finfo(dtype).eps  # PyTorch's sums are of six terms that were rounded to dtype
    dy, dz = (torch.randn(6, 64).to(dtype) for _ in range(2))
    for parameters in ((t.weight, t.bias), (t.weight, None), (None, t.bias), (None, None)):
        t.weight, t.bias = parameters
        with providers():
            z = t.residual
            _, mean, rstd = norm.layer_norm_fwd(z, t.weight, t.bias, 1e-5)
            for residual in (dz,) if wanted == "want_dz_sum" else (dz, None):
                ours = torch_norm(t, z, dy, residual, mean, rstd, **(off | {wanted: True}))
                with providers(layer_norm_bwd="torch"):
                    theirs = torch_norm(t, z, dy, residual, mean, rstd, **(off | {wanted: True}))
                for name, a, b in zip(ours._fields, ours, theirs):
                    assert (a is None) == (b is None), name
                    if a is not None:
                        assert a.dtype == b.dtype, name
                        torch.testing.assert_close(a, b, atol=tol, rtol=tol, msg=lambda m, n=name: f"{n}: {m}")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_on_torch_layer_norm(dtype):
    B, N, D = 3, 5, 48
    x, residual = (torch.randn(B, N, D).to(dtype) for _ in range(2))
    weight, bias, scale, drop = torch.rand(D) + 0.5, torch.randn(D), torch.randn(D), torch.tensor([0.0, 1.25, 1.25])
    upstream = torch.randn(B, N, D).to(dtype), torch.randn(B, N, D).to(dtype)

    def run(module, add, work=None):
        leaves = [
            (t if work is None else t.to(work)).detach().requires_grad_() for t in (x, residual, weight, bias, scale)
        ]
        if add:
            outputs = module.add_layer_norm(*leaves[:4], 1e-5, layer_scale=leaves[4], drop_path=drop)
        else:
            outputs = (module.layer_norm(leaves[0], *leaves[2:4], 1e-5),)
            leaves = [leaves[0], *leaves[2:4]]
        grads = torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(upstream, outputs)])
        return dict(enumerate((*(o.detach() for o in outputs), *grads)))

    for add in (False, True):
        with providers(layer_norm_fwd="torch", layer_norm_bwd="torch"), ops.use_kernels("on"):
            before = launch.launches_made()
            actual = run(ops, add)
            assert launch.launches_made() == before
        compare(actual, run(ref, add), run(ref, add, torch.float64), dtype)


@interpreted
def test_a_residual_has_a_shape_class_of_its_own():
    """So that a choice for one is not forced on the other; shipped, they have the same tiles."""
    t, torchs = (
        norm_inputs(3, 384, torch.float32, torch.float32, torch.float32, layer_scale=True),
        tiles.tile(provider="torch"),
    )
    z, dy = t.residual, torch.randn(3, 384)
    with (
        tiles.override("layer_norm_fwd", torchs, "3x128a"),
        tiles.override("layer_norm_bwd", torchs, "3x128as"),
        tiles.watching() as used,
    ):
        _, mean, rstd = norm.layer_norm_fwd(t.x, t.weight, t.bias, 1e-5)
        norm.add_layer_norm_fwd(t.x, z, t.weight, t.bias, 1e-5, None, None, 1)
        for residual in (None, dy):
            torch_norm(t, z, dy, residual, mean, rstd)
            torch_norm(t, z, dy, residual, mean, rstd, want_layer_scale=False)
    by_torch = {
        (op, shape): tile.provider == "torch" for (op, _, shape), tile in used.items() if op.startswith("layer_norm")
    }
    expected = {("layer_norm_fwd", "3x128"): False, ("layer_norm_fwd", "3x128a"): True}
    assert by_torch == expected | {("layer_norm_bwd", f"3x128{end}"): end == "as" for end in ("", "s", "a", "as")}
    for width in (192, 384, 768, 1000, 1024, 1280, 4096):
        for dtype in ATOL:
            like, shape = torch.empty(0, dtype=dtype), rows.layer_norm_class(width)
            assert tiles.lookup("layer_norm_fwd", like, shape) == tiles.lookup("layer_norm_fwd", like, shape + "a")
            for scaled in ("", "s"):
                assert tiles.lookup("layer_norm_bwd", like, shape + scaled) == tiles.lookup(
                    "layer_norm_bwd", like, shape + "a" + scaled
                )


@pytest.mark.gpu
@pytest.mark.parametrize("layer_scale, drop_path", FACTORS)
@pytest.mark.parametrize("dtype, parameters, stream", MIXES)
def test_torch_layer_norm_on_a_gpu(dtype, parameters, stream, layer_scale, drop_path):
    check_norm(591, 768, dtype, parameters, stream, layer_scale, drop_path, "cuda")
