"""Libraries as providers: their calls, their numbers against float64, alone and mixed with ours; refusals.

On the CPU PyTorch's flash attention and LayerNorm run as they are. In the place of what needs a GPU there are functions
of the same schema and conventions (tests/helpers/attention_libraries.py): they show that the calls are right.
"""

import contextlib
import functools
import sys

import pytest
import torch
from attention_cases import HALVES, SCALE, any_strides, by_launchers, check_attention, interpreted, providers, random
from attention_libraries import FakeAten, install_packages

from vitfast import ops
from vitfast.kernels import launch
from vitfast.kernels.attention.launchers import attention_bwd, attention_fwd
from vitfast.kernels.configs import tiles
from vitfast.kernels.layer_norm import forward as norm
from vitfast.kernels.libraries import attention as libraries
from vitfast.kernels.libraries import cublaslt

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NO = "torch.backends.cuda.can_use says no to"
EMPTY = {dtype: torch.empty(0, dtype=dtype) for dtype in (FP32, BF16, FP16)}


@pytest.fixture
def unknown(monkeypatch):
    """Nothing is known of the libraries."""
    for name in ("_load", "_cudnn_lse_axes"):
        monkeypatch.setattr(libraries, name, functools.cache(getattr(libraries, name).__wrapped__))


@pytest.fixture
def without_packages(unknown, monkeypatch):
    """Neither package is installed, whatever is."""
    for package in libraries.PACKAGES.values():
        monkeypatch.setitem(sys.modules, package.module, None)


@interpreted
@pytest.mark.parametrize("forward, backward", [("it", "it"), ("ours", "it"), ("it", "ours")])
@pytest.mark.parametrize("provider, axes", [*((p, 3) for p in libraries.PROVIDERS), ("cudnn", 4)])
def test_attention_by_libraries_matches_float64(provider, axes, forward, backward, unknown, monkeypatch):
    """With any strides too; separate gradients are those of packed tensors."""
    fake, called = FakeAten(axes), install_packages(monkeypatch)
    if provider != "flash":
        monkeypatch.setattr(libraries, "aten", fake)
        monkeypatch.setattr(libraries, "unsupported_reason", lambda *_: None)
    chosen = {"it": provider, "ours": "ours"}
    with providers(attention_fwd=chosen[forward], attention_bwd=chosen[backward]):
        check_attention(*random(1, 50, 2, 72, BF16))
        assert len(called + fake.called) >= (forward, backward).count("it") or provider == "flash"
        for N, D, dtype in ((1, 64, FP32), (64, 32, FP16), (197, 80, BF16)):
            check_attention(*random(1, N, 2, D, dtype))
        if "ours" in (forward, backward):
            return
        for qkv, do in any_strides(dict(dtype=BF16)):
            check_attention(qkv, do)
        q, k, v = qkv.unbind(2)
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        o, lse = attention_fwd(q, k, v, SCALE)
        separate, _ = attention_bwd(q, k, v, o, lse, do, SCALE, as_qkv=False)
        packed, none = attention_bwd(q, k, v, o, lse, do, SCALE)
    assert none is None and len(separate) == 3
    assert all(g.is_contiguous() and torch.equal(g, part) for g, part in zip(separate, packed.unbind(2)))


def test_flash_on_a_gpu_is_called_as_its_schema_says():
    """On meta tensors, which take the way of a GPU's; the shapes alone come back."""
    q, k, v, o, do = (torch.empty(2, 50, 3, 80, dtype=BF16, device="meta") for _ in range(5))
    lse = torch.empty(2, 3, 50, device="meta")
    out, theirs = libraries._forward_pytorch("flash", q, k, v, SCALE)
    assert out.shape == (2, 3, 50, 80) and theirs.shape == lse.shape and theirs.dtype == FP32
    grads = libraries._backward_pytorch("flash", q, k, v, o, lse, do, SCALE)
    assert [g.shape for g in grads] == [out.shape] * 3


def test_only_what_libraries_cannot_load_is_copied():
    half = torch.randn(2, 9, 3, 2, 72).half()
    assert all(libraries._aligned(x) is x for x in (half[:, :, 0], half[:, 1:, 1], half[..., 8:][:, :, 2]))
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
    with providers(**chosen), ops.use_kernels("on"), tiles.using() as used:
        (ops.layer_norm(x, None, None).sum() + ops.attention(qkv).sum()).backward()
    assert launch.launches_made() == before and {op for op, _, _ in used} == set(chosen)


# What is refused, and who is a candidate


@pytest.mark.parametrize(
    "provider, x, backward, reason",
    [
        ("flash", torch.empty(2, 9, 2, 32), True, None),
        ("flash", torch.empty(0, 9, 2, 32), False, "the batch is empty"),
        ("cudnn", EMPTY[FP16], False, "needs an NVIDIA GPU, the tensors are on cpu"),
        ("flash_attn_3", EMPTY[FP16], False, "not installed"),
        ("flash, deterministic", EMPTY[FP16], True, "its backward may add in any order"),
        ("flash, deterministic", EMPTY[FP16], False, None),
        # as they would be asked on a GPU
        ("cudnn, sm_80", torch.empty(2, 9, 2, 32).half(), False, None),
        ("cudnn, sm_80", torch.empty(2, 9, 2, 33).half(), False, f"{NO} (2, 9, 2, 33) of torch.float16"),
        ("flash, sm_80", EMPTY[BF16], False, None),
        ("flash, sm_80", EMPTY[FP32], False, "does not compute in torch.float32"),
        ("efficient, sm_80", torch.empty(2, 9, 2, 32), True, None),
        ("flash_attn_3, sm_80", EMPTY[FP16], False, "does not run on a GPU of compute capability 8.0"),
        ("flash_attn_4, sm_80", EMPTY[FP16], False, None),
        ("flash_attn_4, sm_80", EMPTY[FP16], True, "does not run on a GPU of compute capability 8.0"),
    ],
)
def test_what_a_library_cannot_run_is_said(provider, x, backward, reason, without_packages, monkeypatch):
    def can_use(params):
        assert params.query.dim() == 4 and params.query.shape[-2:] in ((9, 32), (9, 33), (64, 64))  # heads come first
        return params.query.shape[-1] % 8 == 0

    name, _, where = provider.partition(", ")
    ask = libraries._unsupported_on_gpu if where == "sm_80" else libraries.unsupported_reason
    monkeypatch.setattr(libraries, "PYTORCH", dict.fromkeys(libraries.PYTORCH, can_use))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: where == "deterministic")
    said = ask(name, x, backward) if where == "sm_80" else ask(x, name, backward)
    assert (said is None) == (reason is None) and (said or "").startswith(reason or "")


@pytest.mark.parametrize("breakage", ["signature", "missing", "import"])
def test_package_that_does_not_fit_is_named(breakage, unknown, monkeypatch):
    install_packages(monkeypatch)
    module = sys.modules["flash_attn_interface"]
    reason = "this version's flash_attn_interface._flash_attn_backward is another than vitfast calls"
    if breakage == "signature":
        module._flash_attn_backward = lambda dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal: None
    elif breakage == "missing":
        del module._flash_attn_backward
    else:
        reason = r"import flash_attn_interface fails \(ImportError: undefined symbol\)"

        def fail(name):
            raise ImportError("undefined symbol")

        monkeypatch.setattr(libraries.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match=reason):
        libraries._function("flash_attn_3", "forward")


@interpreted
@pytest.mark.parametrize("provider, reason", [("flash_attn_3", "not installed"), ("cudnn", "needs an NVIDIA GPU")])
def test_library_that_cannot_run(provider, reason, without_packages, monkeypatch):
    """A table that names it gets our first rule; a test or a measurement gets an error."""
    qkv, do = random(1, 20, 1, 32, FP32)
    shipped = by_launchers(qkv, do)
    for op in ("attention_fwd", "attention_bwd"):
        with tiles.using(op, tiles.config(provider=provider)):
            with pytest.raises(RuntimeError, match=f"{op}: {provider} cannot run here: {reason}"):
                by_launchers(qkv, do)
    find, asked = tiles._find, ("attention_fwd", "attention_bwd")
    in_table = tiles.config(provider=provider)
    monkeypatch.setattr(tiles, "_find", lambda op, *args: in_table if op in asked else find(op, *args))
    with tiles.using() as used:
        fallen_back = by_launchers(qkv, do)
    assert [config.provider for (op, _, _), config in used.items() if op in asked] == ["tiled", "tiled"]
    for name, value in shipped.items():
        assert torch.equal(fallen_back[name], value), name


ATTENTION = set(libraries.PROVIDERS)


@pytest.mark.parametrize(
    "op, shape, dtype, where, wanted, absent",
    [
        ("attention_fwd", "d64n256", FP16, "here", "tiled flash", ATTENTION - {"flash"}),
        ("attention_fwd", "d64nlong", FP16, "here", "flash", ATTENTION - {"flash"}),
        ("attention_bwd", "d64n256", FP16, "here", "tiled flash", ATTENTION - {"flash"}),
        ("attention_bwd", "d80n320", FP16, "here", "flash", ATTENTION - {"flash"}),
        ("layer_norm_fwd", "3x256a", FP16, "here", "torch", set()),
        ("layer_norm_bwd", "3x256as", FP16, "here", "torch", set()),
        ("linear_fwd", "768x2304", FP16, "here", "triton persistent tma triton tma", set()),  # wide ones too
        ("linear_gelu_fwd", "768x3072", FP16, "here", "cublas triton tma triton tma", set()),
        ("weight_grad", "768x3072", FP16, "here", "triton tma triton tma", set()),
        ("linear_residual_fwd", "768x768", BF16, "here", "cublas triton tma triton tma", {"cublaslt"}),
        ("linear_residual_fwd", "768x768", BF16, "built", "cublas cublaslt triton tma triton tma", set()),
        ("linear_residual_fwd", "768x768", FP32, "built", "cublas", set()),
        # libraries are not compiled offline; there are no tensor descriptors before sm_90
        ("attention_bwd", "d64n256", BF16, 90, "tiled", ATTENTION),
        ("layer_norm_bwd", "3x256as", BF16, 90, "", {"torch"}),
        ("linear_fwd", "768x2304", FP16, 80, "triton", set()),
    ],
)
def test_candidates_are_those_that_can_run(op, shape, dtype, where, wanted, absent, without_packages, monkeypatch):
    if where == "built":
        monkeypatch.setattr(cublaslt, "unsupported_reason", lambda *_: None)
    offline = isinstance(where, int)
    with tiles.using(sm=where) if offline else contextlib.nullcontext():
        x = EMPTY[dtype].to("meta") if offline else EMPTY[dtype]
        assert [t.provider for t in tiles.candidates(op, x, shape)] == wanted.split()
        assert tiles.absent(op, x, shape).keys() == absent


def test_offline_compilation_knows_no_library():
    torchs = tiles.using("layer_norm_fwd", tiles.config(provider="torch"))
    with tiles.using(sm=90), torchs, pytest.raises(RuntimeError, match="layer_norm_fwd: torch cannot run here"):
        norm.layer_norm_fwd(torch.empty(2, 64, device="meta"), None, None, 1e-6)


def test_cublaslt_is_for_gpus_and_16_bit():
    assert cublaslt.unsupported_reason(EMPTY[BF16]) == "needs an NVIDIA GPU, the tensors are on cpu"
    on_gpu = type("OnGpu", (), dict(device=torch.device("cuda", 0), dtype=FP32))
    assert cublaslt.unsupported_reason(on_gpu) == "does not compute in torch.float32"


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
    torchs = tiles.config(provider="torch")
    with (
        tiles.using("layer_norm_fwd", torchs, "3x128a"),
        tiles.using("layer_norm_bwd", torchs, "3x128as"),
        tiles.using() as used,
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
