"""Norms and products beyond the grid of tests/tools/verify/test_edges.py: large means, far logits, what is saved."""

import dataclasses
from functools import partial

import pytest
import torch
from attention_cases import interpreted

from vitfast import ViT, ops
from vitfast.kernels import rows, tiles
from vitfast.kernels.launch import record
from vitfast.kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from vitfast.kernels.matmul import gated, linear, mlp
from vitfast.ops import reference as ref

pytestmark = interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = dict(atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def _kernels():
    with ops.use_kernels("on"):
        yield


def leaves(*shapes):
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_a_large_mean(dtype):
    """Their variance is not the difference of two large numbers."""
    x = torch.randn(6, 768) + 1e4 if dtype == torch.float32 else torch.randn(6, 768) * 20 + 2e3
    y, truth = ops.layer_norm(x.to(dtype), None, None), ref.layer_norm(x.to(dtype), None, None, upcast=True)
    assert y.double().mean(-1).abs().max() < 2e-3  # half an fp32 ulp of the mean, 5e-4, is all that may be left
    assert (y.double().std(-1, correction=0) - 1).abs().max() < 1e-3
    assert (y.double() - truth).abs().max() < (2e-3 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps)


@pytest.mark.quick(1)
@pytest.mark.parametrize("width", [20, 1280, 1664, 5000, 8192])
def test_widths_of_every_class_of_tiles(width, dtype=torch.bfloat16):
    """Beyond the grid's, with every gradient; an uneven number of rows."""
    x, residual, w, b = (torch.randn(shape).to(dtype) for shape in ((3, width), (3, width), width, width))
    upstream, found = [torch.randn(3, width).to(dtype) for _ in range(2)], []
    for module, work in ((ops, dtype), (ref, dtype), (ref, torch.float64)):
        given = [t.detach().to(work).requires_grad_() for t in (x, residual, w, b)]
        out = module.add_layer_norm(*given, 1e-5)
        found.append([*out, *torch.autograd.grad(out, given, [g.to(work) for g in upstream])])
    for mine, theirs, truth in zip(*found, strict=True):
        error, own = ((t.double() - truth).norm() / truth.norm() for t in (mine, theirs))
        assert error <= 2 * own + torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_add_layer_norm_is_used(used):
    """What nobody used has no gradient, or zeros."""
    found, tensors = [], leaves((2, 5, 48), (2, 5, 48), 48, 48, 48)
    for mode in ("on", "off"):
        with ops.use_kernels(mode):
            out = ops.add_layer_norm(*tensors[:4], layer_scale=tensors[4])[used]
        upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
        found.append(torch.autograd.grad(out, tensors, upstream, materialize_grads=True))
    for mine, truth in zip(*found):
        torch.testing.assert_close(mine, truth, **CLOSE)


def test_a_residual_has_a_shape_class_of_its_own():
    """So that a choice for one is not forced on the other."""
    x, z, dy, weight = torch.randn(3, 384), torch.randn(3, 384), torch.randn(3, 384), torch.randn(384)
    ours = [tiles.shipped(op, x, "3x128as") for op in ("layer_norm_fwd", "layer_norm_bwd")]
    forward, backward = (dataclasses.replace(config, num_warps=8) for config in ours)
    assert forward not in ours and backward not in ours
    with (
        tiles.using("layer_norm_fwd", forward, "3x128a"),
        tiles.using("layer_norm_bwd", backward, "3x128as"),
        tiles.using() as used,
    ):
        _, _, mean, rstd = layer_norm_fwd(x, weight, None, 1e-5)
        layer_norm_fwd(x, weight, None, 1e-5, residual=z)
        for dz in (None, dy):
            for scale in (weight, None):
                wanted = dict(branch=x, layer_scale=weight, rows_per_sample=3, want_layer_scale=scale is not None)
                layer_norm_bwd(dy, z, weight, None, mean, rstd, dz=dz, **wanted)
    forced = {(op, s): config in (forward, backward) for (op, _, s), config in used.items() if op != "column_sums"}
    expected = {("layer_norm_fwd", "3x128"): False, ("layer_norm_fwd", "3x128a"): True}
    assert forced == expected | {("layer_norm_bwd", f"3x128{end}"): end == "as" for end in ("", "s", "a", "as")}


def test_no_mean_is_written_or_read_of_rms_norm():
    x = torch.randn(6, 64, requires_grad=True)
    launches = record(lambda: ops.rms_norm(x, torch.ones(64)).backward(torch.ones(6, 64)))
    forward, backward = (launch for launch in launches if launch.kernel.__name__.startswith("layer_norm"))
    assert forward.arguments["mean_ptr"] is backward.arguments["mean_ptr"] is None
    assert backward.arguments["ws_ptrs"] == (None,) * 4, "the weight wants no gradient"


@pytest.mark.parametrize("shapes", [[(5, 40)], [(5, 40), (3, 72)], [(300, 768)] * 2 + [(7, 30)] * 2], ids=str)
def test_workspaces_of_two_shapes_are_added_up_in_one_launch(shapes):
    """Each into its own dtype; None stays None; the same bits twice, and in launches of their own."""
    given = [None, *(torch.randn(shape) for shape in shapes)]
    dtypes = [None, *([torch.float32, torch.float16] * 2)[: len(shapes)]]
    call = lambda: rows.column_sums(given[1], given, dtypes)  # noqa: E731
    assert len(record(call)) == 1
    for ws, dtype, one, again in zip(given, dtypes, call(), call()):
        assert (one is None) == (ws is None)
        if ws is not None:
            torch.testing.assert_close(one, ws.double().sum(0).to(dtype), atol=1e-5, rtol=1e-3)
            assert torch.equal(one, again) and torch.equal(one, *rows.column_sums(ws, [ws], [dtype]))


@pytest.mark.parametrize(
    "options, more", [({}, 0), (dict(swiglu_mlp=True), 0), (dict(swiglu_mlp=True, scale_mlp_norm=True), 1)]
)
def test_a_training_step_adds_up_workspaces_twice_a_layer_and_once_more(options, more):
    """Once for each block, its biases included, once for each inner norm, and once for the last norm."""
    sizes = dict(img_size=16, patch_size=8, embed_dim=48, num_heads=2, num_classes=5)
    model, x, depth = ViT(**sizes, depth=3, **options), torch.randn(2, 3, 16, 16), 3
    names = [each.kernel.__name__ for each in record(lambda: model(x).backward(torch.ones(2, 5)))]
    assert names.count("column_sums_kernel") == (2 + more) * depth + 1


def saved_by(run) -> list[torch.Tensor]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return kept


def test_what_no_gradient_needs_is_not_kept():
    """A branch without a trained layer scale, a pre-activation without a backward, raw pixels without a weight."""
    x, residual, w, b, scale = leaves((2, 4, 48), (2, 4, 48), 48, 48, 48)
    for wanted in (True, False):
        factor = scale if wanted else scale.detach()
        kept = saved_by(lambda: ops.add_layer_norm(x, residual, w, b, layer_scale=factor))  # noqa: B023
        assert any(t.shape == x.shape and torch.equal(t, x) for t in kept) == wanted
    up, up_bias = leaves((64, 48), 64)
    for trained in (True, False):
        with torch.set_grad_enabled(trained):
            (launch,) = record(lambda: ops.linear_gelu(x, up, up_bias))
        assert (launch.arguments["kept_ptr"] is not None) == trained
    raw, bias = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8), torch.randn(8, requires_grad=True)
    for trained in (True, False):
        weight = torch.randn(8, 3, 2, 2, requires_grad=trained)
        saved = saved_by(partial(ops.patch_embed, raw, weight, bias))
        assert any(t.dtype == torch.uint8 for t in saved) == trained


def test_halves_of_one_weight_are_read_where_they_lie():
    """Halves of one weight, and of one bias, give the same bits as two, and no copy is made of either."""
    x, up_gate, bias, down = (torch.randn(shape) for shape in ((9, 40), (144, 40), 144, (24, 72)))
    (up, gate), (up_bias, gate_bias) = up_gate.chunk(2), bias.chunk(2)
    halves = dict(up_weight=up, up_bias=up_bias, gate_weight=gate, gate_bias=gate_bias)
    small = tiles.config(4, 2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=2, SUBTILES=1)
    with tiles.using("gated_linear_fwd", small):
        arguments = record(lambda: ops.gated_mlp(x, **halves, down_weight=down, down_bias=None))[0].arguments
        assert all(arguments[f"{name}_ptr"].data_ptr() == t.data_ptr() for name, t in halves.items())
        apart = {name: t.clone().requires_grad_() for name, t in halves.items()}
        assert torch.equal(*(ops.gated_mlp(x, **t, down_weight=down, down_bias=None) for t in (halves, apart)))
        trained = up_gate.requires_grad_()
        up, gate = trained.chunk(2)
        for given in (apart, halves | dict(up_weight=up, gate_weight=gate)):
            ops.gated_mlp(x, **given, down_weight=down, down_bias=None).sum().backward()
    assert torch.equal(trained.grad, torch.cat([apart["up_weight"].grad, apart["gate_weight"].grad]))


@pytest.mark.parametrize(
    "sm, dtype, few, many",
    [
        (90, torch.bfloat16, "cublas", "persistent"),
        (90, torch.float32, *["triton"] * 2),
        (80, torch.half, *["triton"] * 2),
    ],
)
def test_few_rows_have_their_own_rule(sm, dtype, few, many):
    """linear_residual would leave most multiprocessors idle in our blocks; cuBLAS splits the sum."""
    up, down = torch.empty(3072, 768, dtype=dtype, device="meta"), torch.empty(768, 3072, dtype=dtype, device="meta")

    def both(count):
        act, _ = mlp.linear_gelu(up.new_empty(count, 768), up, None, "gelu", "")
        linear.linear_residual(act, down, None, up.new_empty(count, 768), None, None, 1)

    for count, provider in ((197, few), (197 * 64, many)):
        with tiles.using(sm=sm), tiles.using() as used:
            launches = record(lambda: both(count))  # noqa: B023
        assert [used[key].provider for key in used] == [many, provider]
        assert len(launches) == (1 if provider == "cublas" else 2)


def test_a_gate_that_descriptors_cannot_take_goes_by_pointers():
    x, up, odd = torch.randn(9, 40), torch.randn(72, 40), torch.randn(72, 41)[:, 1:]
    small = tiles.config(4, 2, "tma", BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=2, SUBTILES=1)
    with tiles.using("gated_linear_fwd", small):
        for gate, loads in ((up, "nt"), (odd, "masked")):
            call = lambda gate=gate: gated.gated_linear(x, up, None, gate, None, "silu", False)  # noqa: E731
            assert record(call)[0].arguments["LOADS"] == loads
            exact = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
            torch.testing.assert_close(call()[0], exact, **CLOSE)
