"""Libraries as providers, against float64: alone, and mixed with our kernels.

On the CPU PyTorch's flash attention and LayerNorm run as they are. In the place of what needs a GPU there are functions
of the same schema and conventions, written in plain PyTorch: they show that the calls are right.
"""

import sys

import pytest
import torch
from attention_cases import (
    DTYPES,
    HALVES,
    SCALE,
    any_strides,
    by_launchers,
    check_attention,
    interpreted,
    providers,
    random,
)

from vitfast import ops
from vitfast.kernels import launch
from vitfast.kernels.attention.launchers import attention_bwd, attention_bwd_separate, attention_fwd
from vitfast.kernels.configs import tiles
from vitfast.kernels.layer_norm import forward as norm
from vitfast.kernels.libraries import attention as libraries


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, D", [(1, 64), (197, 80)])
@pytest.mark.parametrize("forward, backward", [("flash", "flash"), ("ours", "flash"), ("flash", "ours")])
def test_flash_matches_float64(forward, backward, N, D, dtype):
    with providers(attention_fwd=forward, attention_bwd=backward):
        check_attention(*random(1, N, 2, D, dtype))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flash_takes_any_strides(dtype):
    """And separate tensors, with the gradients of packed ones."""
    with providers(attention_fwd="flash", attention_bwd="flash"):
        for qkv, do in any_strides(dict(dtype=dtype)):
            check_attention(qkv, do)
        q, k, v = qkv.unbind(2)
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        o, lse = attention_fwd(q, k, v, SCALE)
        separate = attention_bwd_separate(q, k, v, o, lse, do, SCALE)
        packed, none = attention_bwd(q, k, v, o, lse, do, SCALE)
    assert none is None and len(separate) == 3
    assert all(g.is_contiguous() and torch.equal(g, part) for g, part in zip(separate, packed.unbind(2)))


def test_only_what_libraries_cannot_load_is_copied():
    half = torch.randn(2, 9, 3, 2, 72).half()
    fits = [half[:, :, 0], half[:, 1:, 1], half[..., 8:][:, :, 2]]
    assert all(libraries._aligned(x) is x for x in fits)
    odd = torch.randn(2, 9, 2, 75).half()  # rows start anywhere, whether the first one does or not
    for x in (half[..., 4:][:, :, 0], half[:, :1, 0].expand(2, 9, 2, 72), odd[..., :72], odd[..., 3:]):
        copy = libraries._aligned(x)
        assert torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() % 16 == 0


@interpreted
def test_an_operation_on_libraries_launches_nothing_of_ours():
    x, qkv = torch.randn(2, 10, 64, requires_grad=True), torch.randn(2, 10, 3, 2, 32, requires_grad=True)
    chosen = dict.fromkeys(("attention_fwd", "attention_bwd"), "flash")
    chosen |= dict.fromkeys(("layer_norm_fwd", "layer_norm_bwd"), "torch")
    before = launch.launches_made()
    with providers(**chosen), ops.use_kernels("on"), tiles.watching() as used:
        (ops.layer_norm(x, None, None).sum() + ops.attention(qkv).sum()).backward()
    assert launch.launches_made() == before and {op for op, _, _ in used} == set(chosen)


@pytest.fixture
def without_packages(monkeypatch):
    """Neither package is installed, whatever is."""
    for package in libraries.PACKAGES.values():
        monkeypatch.setitem(sys.modules, package.module, None)
    libraries._load.cache_clear()
    yield
    libraries._load.cache_clear()


@interpreted
@pytest.mark.parametrize("provider, reason", [("flash_attn_3", "not installed"), ("cudnn", "needs an NVIDIA GPU")])
def test_library_that_cannot_run(provider, reason, without_packages, monkeypatch):
    """A table that names it gets our first rule; a test or a measurement gets an error."""
    qkv, do = random(1, 20, 1, 32, torch.float32)
    shipped = by_launchers(qkv, do)
    for op in ("attention_fwd", "attention_bwd"):
        with tiles.override(op, tiles.tile(provider=provider)):
            with pytest.raises(RuntimeError, match=f"{op}: {provider} cannot run here: {reason}"):
                by_launchers(qkv, do)
    find, asked = tiles._find, ("attention_fwd", "attention_bwd")
    in_table = tiles.tile(provider=provider)
    monkeypatch.setattr(tiles, "_find", lambda op, *args: in_table if op in asked else find(op, *args))
    with tiles.watching() as used:
        fallen_back = by_launchers(qkv, do)
    assert [tile.provider for (op, _, _), tile in used.items() if op in asked] == ["tiled", "tiled"]
    for name, value in shipped.items():
        assert torch.equal(fallen_back[name], value), name


def test_candidates_are_those_that_can_run(without_packages):
    half = torch.empty(0, dtype=torch.float16)
    for op, shape in (("attention_fwd", "d64n256"), ("attention_bwd", "d80n320")):
        assert [t.provider for t in tiles.candidates(op, half, shape)] == ["tiled", "flash"]
        absent = tiles.absent(op, half, shape)
        assert absent.keys() == set(libraries.PROVIDERS) - {"flash"}
        assert absent["flash_attn_4"] == "not installed" and "needs an NVIDIA GPU" in absent["efficient"]
    assert [t.provider for t in tiles.candidates("layer_norm_fwd", half, "3x256a")] == ["torch"]
    assert tiles.absent("layer_norm_fwd", half, "3x256a") == tiles.absent("linear_fwd", half, "768x768") == {}


def test_offline_compilation_knows_no_library():
    meta = torch.empty(0, dtype=torch.bfloat16, device="meta")
    with tiles.targeting(90):
        here = [t.provider for t in tiles.candidates("attention_bwd", meta, "d64n256")]
        assert here == ["head", "head", "phases", "tiled"]
        assert tiles.candidates("layer_norm_bwd", meta, "3x256as") == []
        assert set(tiles.absent("attention_fwd", meta, "d64n256")) == set(libraries.PROVIDERS)
        with (
            pytest.raises(RuntimeError, match="layer_norm_fwd: torch cannot run here"),
            tiles.override("layer_norm_fwd", tiles.tile(provider="torch")),
        ):
            norm.layer_norm_fwd(torch.empty(2, 64, device="meta"), None, None, 1e-6)


def test_deterministic_algorithms_and_empty_batches_are_ours():
    q = torch.empty(2, 9, 2, 32)
    assert libraries.unsupported_reason(q, "flash", backward=True) is None
    assert libraries.unsupported_reason(q[:0], "flash", backward=False) == "the batch is empty"
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in libraries.unsupported_reason(q, "flash", backward=True)
        assert libraries.unsupported_reason(q, "flash", backward=False) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_a_gpu_cannot_run(monkeypatch):
    """Dtype, generation and PyTorch's own rules, as they would be asked on a GPU."""
    half, single, reason = torch.empty(2, 9, 2, 32).half(), torch.empty(2, 9, 2, 32), libraries._unsupported_on_gpu
    asked = []

    def can_use(params):
        asked.append(tuple(params.query.shape))
        return len(asked) != 2

    can_use.__name__ = "can_use_cudnn_attention"
    monkeypatch.setattr(libraries, "PYTORCH", dict.fromkeys(libraries.PYTORCH, can_use))
    assert reason("cudnn", half, False) is None and asked == [(2, 2, 9, 32)]
    assert "can_use_cudnn_attention says no to (2, 9, 2, 32) of torch.float16" in reason("cudnn", half, False)
    assert reason("efficient", single, True) is None
    assert reason("flash", single, False) == "does not compute in torch.float32"
    assert reason("flash", torch.empty(0, dtype=torch.bfloat16), False) is None and asked[-1] == (1, 1, 64, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 8.0" in reason("flash_attn_3", half, False)
    assert reason("flash_attn_4", half, False) is None
    assert "compute capability 8.0" in reason("flash_attn_4", half, True)


# LayerNorm by PyTorch


@interpreted
@pytest.mark.parametrize("wanted", ["want_dx", "want_dparams", "want_layer_scale", "want_dz_sum", "want_y"])
def test_torchs_layer_norm_returns_what_our_kernel_returns(wanted, dtype=torch.bfloat16):
    """Each result alone, with and without the residual's gradient; without weight or bias, too."""
    z, x, dy, dz = (torch.randn(6, 64).to(dtype) for _ in range(4))
    weight, bias, scale = (torch.randn(64).to(dtype) for _ in range(3))
    off = dict.fromkeys(("want_dx", "want_dparams", "want_layer_scale", "want_dz_sum", "want_y"), False)
    given = dict(branch=x, layer_scale=scale if wanted == "want_layer_scale" else None, rows_per_sample=3)
    tol = 4 * torch.finfo(dtype).eps  # PyTorch's sums are of six terms that were rounded to dtype
    for parameters in ((weight, bias), (weight, None), (None, bias), (None, None)):
        _, mean, rstd = norm.layer_norm_fwd(z, *parameters, 1e-5)
        for residual in (dz,) if wanted == "want_dz_sum" else (dz, None):
            both = []
            for chosen in ({}, dict(layer_norm_bwd="torch")):
                with providers(**chosen):
                    options = given | off | {wanted: True}
                    both.append(norm.layer_norm_bwd(dy, z, *parameters, mean, rstd, dz=residual, **options))
            for name, a, b in zip(both[0]._fields, *both):
                assert (a is None) == (b is None), name
                if a is not None:
                    assert a.dtype == b.dtype, name
                    torch.testing.assert_close(a, b, atol=tol, rtol=tol, msg=lambda m, n=name: f"{n}: {m}")


@interpreted
def test_a_residual_has_a_shape_class_of_its_own():
    """So that a choice for one is not forced on the other."""
    x, z, dy, weight = torch.randn(3, 384), torch.randn(3, 384), torch.randn(3, 384), torch.randn(384)
    torchs = tiles.tile(provider="torch")
    with (
        tiles.override("layer_norm_fwd", torchs, "3x128a"),
        tiles.override("layer_norm_bwd", torchs, "3x128as"),
        tiles.watching() as used,
    ):
        _, mean, rstd = norm.layer_norm_fwd(x, weight, None, 1e-5)
        norm.add_layer_norm_fwd(x, z, weight, None, 1e-5, None, None, 1)
        for dz in (None, dy):
            for scale in (weight, None):
                wanted = dict(branch=x, layer_scale=weight, rows_per_sample=3, want_layer_scale=scale is not None)
                norm.layer_norm_bwd(dy, z, weight, None, mean, rstd, dz=dz, **wanted)
    by_torch = {(op, s): t.provider == "torch" for (op, _, s), t in used.items() if op.startswith("layer_norm")}
    expected = {("layer_norm_fwd", "3x128"): False, ("layer_norm_fwd", "3x128a"): True}
    assert by_torch == expected | {("layer_norm_bwd", f"3x128{end}"): end == "as" for end in ("", "s", "a", "as")}


# On a GPU


def skip_if_absent(provider, dtype):
    like = torch.empty(0, dtype=dtype, device="cuda")
    for op in ("attention_fwd", "attention_bwd"):
        reason = tiles.absent(op, like, "d64n256").get(provider)
        if reason:
            pytest.skip(f"{provider}: {reason}")


@pytest.mark.gpu
@pytest.mark.parametrize("forward, backward", [("it", "it"), ("ours", "it"), ("it", "ours")])
@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("N", [197, 257, 577])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("provider", libraries.PROVIDERS)
def test_libraries_match_ref_on_a_gpu(provider, dtype, N, D, forward, backward):
    skip_if_absent(provider, dtype)
    chosen = {"it": provider, "ours": "ours"}
    with providers(attention_fwd=chosen[forward], attention_bwd=chosen[backward]):
        check_attention(*random(2, N, 3, D, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("provider", libraries.PROVIDERS)
def test_libraries_take_any_strides_on_a_gpu(provider):
    skip_if_absent(provider, torch.bfloat16)
    with providers(attention_fwd=provider, attention_bwd=provider):
        for qkv, do in any_strides(dict(dtype=torch.bfloat16, device="cuda"), N=50, D=64):
            check_attention(qkv, do)
