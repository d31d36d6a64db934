"""Libraries as providers of attention and LayerNorm, against float64: their own forward and backward, mixed with ours.

On the CPU PyTorch's flash attention and LayerNorm run as they are. In the place of the operations that only a GPU has
there are functions of the same schema and conventions, written in plain PyTorch: they show that the calls are right.
"""

import contextlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from vitfast import ops, ref
from vitfast.kernels import attention_libraries as libraries
from vitfast.kernels import launch, mlp, rows, tiles, weight_grad
from vitfast.kernels import layer_norm as norm
from vitfast.kernels.attention import (
    attention_bwd,
    attention_bwd_dkdv,
    attention_bwd_dq,
    attention_bwd_separate,
    attention_fwd,
)

interpreted = pytest.mark.skipif(
    not launch.INTERPRETED, reason="our kernels run interpreted here; the gpu tests run the real ones"
)

# Added to twice PyTorch's own error, relative to the largest value where that is above 1: some ulp of sums in another
# order (fp32), one rounding of values up to 4 (fp16) or 2 (bf16), which PyTorch may do luckily on few elements.
ATOL = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
DTYPES = [pytest.param(d, id=str(d)[6:]) for d in ATOL]
HALVES = [pytest.param(d, id=str(d)[6:]) for d in (torch.float16, torch.bfloat16)]
SHAPES = [(1, 64), (50, 32), (50, 64), (50, 72), (50, 80), (197, 64), (197, 80)]
SCALE = 0.19  # not the one that a library would take by itself
OURS = {
    "attention_fwd": tiles.tile(4, 1, "tiled", BLOCK_M=64, BLOCK_N=64),
    "attention_bwd": tiles.tile(4, 1, "tiled"),
    "attention_bwd_dq": tiles.tile(4, 1, BLOCK_M=64, BLOCK_N=64),
    "attention_bwd_dkdv": tiles.tile(4, 1, BLOCK_M=64, BLOCK_N=64),
    "column_sums": tiles.tile(8, 1, BLOCK_P=256, BLOCK_D=1024),  # the interpreter pays per program
}


@contextlib.contextmanager
def providers(**chosen):
    """Ours for what is not named: providers(attention_fwd="flash")."""
    with contextlib.ExitStack() as stack:
        for op, tile in OURS.items():
            stack.enter_context(tiles.override(op, tile))
        for op, provider in chosen.items():
            stack.enter_context(tiles.override(op, OURS[op] if provider == "ours" else tiles.tile(provider=provider)))
        yield


def random(B, N, H, D, dtype, device="cpu"):
    return torch.randn(B, N, 3, H, D, device=device).to(dtype), torch.randn(B, N, H, D, device=device).to(dtype)


def by_autograd(qkv, do):
    """o, dqkv and the bias gradient in qkv's dtype, by plain PyTorch."""
    qkv = qkv.detach().requires_grad_()
    o = ref.attention(*qkv.unbind(2), scale=SCALE)
    (dqkv,) = torch.autograd.grad(o, qkv, do)
    return {"o": o.detach(), "dqkv": dqkv, "bias gradient": dqkv.sum((0, 1)).flatten()}


def by_launchers(qkv, do):
    """The same, and lse."""
    o, lse = attention_fwd(*qkv.unbind(2), SCALE)
    dqkv, total = attention_bwd(*qkv.unbind(2), o, lse, do, SCALE, want_bias_grad=True)
    for t in (o, lse, dqkv):
        assert t.is_contiguous()
        assert all(t.untyped_storage().data_ptr() != given.untyped_storage().data_ptr() for given in (qkv, do))
    assert lse.dtype == total.dtype == torch.float32 and o.dtype == dqkv.dtype == qkv.dtype
    return {"o": o, "dqkv": dqkv, "bias gradient": total, "lse": lse}


def compare(actual, theirs, truth, dtype):
    """Every result's error against float64 is at most twice PyTorch's, and an atol."""
    assert truth and actual.keys() >= truth.keys()
    for name, exact in truth.items():
        assert actual[name].shape == exact.shape, name
        if exact.numel() == 0:
            continue
        error, judge = ((t[name].double() - exact).abs().max().item() for t in (actual, theirs))
        scale = max(1.0, exact.abs().max().item())
        # On a CPU PyTorch's LayerNorm sums columns in 16 bit: what that costs excuses nothing.
        if dtype != torch.float32:
            judge = min(judge, torch.finfo(dtype).eps * scale)
        allowed = 2 * judge + ATOL[dtype] * scale
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"  # a NaN fails too


def check_attention(qkv, do, run=by_launchers):
    actual, theirs, truth = run(qkv, do), by_autograd(qkv, do), by_autograd(qkv.double(), do.double())
    compare(actual, theirs, truth, qkv.dtype)
    q, k, _ = qkv.double().unbind(2)
    exact = (torch.einsum("bnhd,bmhd->bhnm", q, k) * SCALE).logsumexp(-1)
    torch.testing.assert_close(actual["lse"].double(), exact, atol=1e-4, rtol=1e-5)


# ---- attention, on the CPU


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, D", SHAPES)
def test_flash_matches_ref(N, D, dtype):
    with providers(attention_fwd="flash", attention_bwd="flash"):
        check_attention(*random(2, N, 2, D, dtype))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, D", [(1, 64), (50, 32), (50, 72), (197, 80)])
@pytest.mark.parametrize("forward, backward", [("ours", "flash"), ("flash", "ours")])
def test_ours_and_flash_mix(forward, backward, N, D, dtype):
    with providers(attention_fwd=forward, attention_bwd=backward):
        check_attention(*random(1, N, 2, D, dtype))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(dtype):
    B, N, H, D = 2, 21, 2, 32
    wide, do = torch.randn(B, N + 3, 3, H + 1, D + 8, dtype=dtype), torch.randn(B, H, N, D, dtype=dtype).transpose(1, 2)
    with providers(attention_fwd="flash", attention_bwd="flash"):
        check_attention(wide[:, 2:-1, :, 1:, 8:], do)
        check_attention(torch.randn(N, B, 3, H, D, dtype=dtype).transpose(0, 1), do)
        check_attention(torch.randn(B, N, H, 3, D, dtype=dtype).transpose(2, 3), do)
        check_attention(torch.randn(B, N, 3, H, D + 3, dtype=dtype)[..., 3:], do)
        check_attention(
            torch.randn(B, N, 3, H, D, dtype=dtype), torch.randn(B, 1, 1, D, dtype=dtype).expand(B, N, H, D)
        )


def test_only_what_libraries_cannot_load_is_copied():
    half = torch.randn(2, 9, 3, 2, 72).half()
    fits = [half[:, :, 0], half[:, 1:, 1], half[..., 8:][:, :, 2]]
    assert all(libraries._aligned(x) is x for x in fits)
    odd = torch.randn(2, 9, 2, 75).half()  # rows start anywhere, whether the first one does or not
    for x in (half[..., 4:][:, :, 0], half[:, :1, 0].expand(2, 9, 2, 72), odd[..., :72], odd[..., 3:]):
        copy = libraries._aligned(x)
        assert torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() % 16 == 0


@interpreted
def test_separate_gradients_equal_packed_ones():
    B, N, H, D = 2, 40, 2, 48
    q, k, v = torch.randn(B, N, H, D), torch.randn(B, H, N, D).transpose(1, 2), torch.randn(B, N, 3, H, D)[:, :, 1]
    do = torch.randn(B, N, H, D)
    with providers(attention_fwd="flash", attention_bwd="flash"):
        o, lse = attention_fwd(q, k, v, SCALE)
        separate = attention_bwd_separate(q, k, v, o, lse, do, SCALE)
        packed, none = attention_bwd(q, k, v, o, lse, do, SCALE)
    assert none is None and len(separate) == 3
    for grad, part in zip(separate, packed.unbind(2)):
        assert grad.is_contiguous() and torch.equal(grad, part)
    truth = by_autograd(torch.stack([q, k, v], 2).double(), do.double())["dqkv"]
    torch.testing.assert_close(packed.double(), truth, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_operation_on_a_library(packed):
    """Through ops, and what torch.library asks of an operation: no aliases, strides as the fake says."""
    qkv, do = random(1, 50, 2, 72, torch.float32)
    inputs = [x.detach().requires_grad_() for x in ([qkv] if packed else qkv.unbind(2))]
    with providers(attention_fwd="flash", attention_bwd="flash"), ops.use_kernels("on"):
        before = launch.launches_made()
        o = ops.attention(*inputs, scale=SCALE)
        grads = torch.autograd.grad(o, inputs, do)
        assert launch.launches_made() == before  # no kernel of ours
        name = "attention_packed" if packed else "attention_separate"
        forward, backward = (
            getattr(torch.ops.vitfast, name).default,
            getattr(torch.ops.vitfast, name + "_backward").default,
        )
        detached = [x.detach() for x in inputs]
        asked = ("test_schema", "test_faketensor")
        torch.library.opcheck(forward, (*inputs, SCALE), test_utils=asked)
        torch.library.opcheck(backward, (*detached, *forward(*detached, SCALE), do, SCALE), test_utils=asked)
    truth = by_autograd(qkv.double(), do.double())
    torch.testing.assert_close(o.double(), truth["o"], atol=1e-5, rtol=1e-5)
    dqkv = grads[0] if packed else torch.stack(grads, 2)
    torch.testing.assert_close(dqkv.double(), truth["dqkv"], atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_block_on_libraries(dtype):
    """Everything in the block that a library can do, done by one."""
    B, N, H, D = 2, 10, 2, 64
    tensors = [
        torch.randn(B, N, D),
        torch.rand(D) + 0.5,
        torch.randn(D),
        torch.randn(3 * D, D) / 8,
        torch.randn(3 * D),
        torch.randn(D, D) / 8,
        torch.randn(D),
    ]
    scale, drop, dout = torch.randn(D), torch.tensor([0.0, 1.25]), torch.randn(B, N, D).to(dtype)

    def run(module, work):
        leaves = [t.to(dtype).to(work).requires_grad_() for t in (*tensors, scale)]
        *parameters, layer_scale = leaves
        factors = dict(layer_scale=layer_scale, drop_path=drop.to(torch.promote_types(work, torch.float32)))
        out = module.attention_block(*parameters, num_heads=H, **factors)
        grads = torch.autograd.grad(out, leaves, dout.to(work))
        return dict(enumerate((out.detach(), *grads)))

    chosen = dict.fromkeys(("attention_fwd", "attention_bwd"), "flash") | dict.fromkeys(
        ("layer_norm_fwd", "layer_norm_bwd"), "torch"
    )
    with providers(**chosen), ops.use_kernels("on"), tiles.watching() as used:
        actual = run(ops, dtype)
    assert {op: tile.provider for (op, _, _), tile in used.items() if op in chosen} == chosen
    compare(actual, run(ref, dtype), run(ref, torch.float64), dtype)


# ---- which provider runs


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


def test_rivals_are_those_that_can_run(without_packages):
    half = torch.empty(0, dtype=torch.float16)
    for op, shape, here in [
        ("attention_fwd", "d64n256", ["tiled", "flash"]),
        ("attention_bwd", "d80n320", ["tiled", "flash"]),
    ]:
        assert [t.provider for t in tiles.rivals(op, half, shape)] == here
        absent = tiles.absent(op, half, shape)
        assert absent.keys() == set(libraries.PROVIDERS) - {"flash"}
        assert absent["flash_attn_4"] == "not installed" and "needs an NVIDIA GPU" in absent["efficient"]
    assert [t.provider for t in tiles.rivals("layer_norm_fwd", half, "3x256a")] == ["torch"]
    assert tiles.absent("layer_norm_fwd", half, "3x256a") == tiles.absent("linear_fwd", half, "768x768") == {}


def test_offline_compilation_knows_no_library():
    meta = torch.empty(0, dtype=torch.bfloat16, device="meta")
    with tiles.targeting(90):
        assert [t.provider for t in tiles.rivals("attention_bwd", meta, "d64n256")] == [
            "head",
            "head",
            "phases",
            "tiled",
        ]
        assert tiles.rivals("layer_norm_bwd", meta, "3x256as") == []
        assert set(tiles.absent("attention_fwd", meta, "d64n256")) == set(libraries.PROVIDERS)
        with (
            pytest.raises(RuntimeError, match="layer_norm_fwd: torch cannot run here"),
            tiles.override("layer_norm_fwd", tiles.tile(provider="torch")),
        ):
            norm.layer_norm_fwd(torch.empty(2, 64, device="meta"), None, None, 1e-6)


def test_what_the_table_ships_is_a_rival_of_what_a_user_chose(monkeypatch):
    flash, half = tiles.tile(provider="flash"), torch.empty(0, dtype=torch.float16)
    monkeypatch.setattr(tiles, "_find", lambda *_: flash)
    assert [t.provider for t in tiles.rivals("attention_fwd", half, "d64n256")] == ["rows", "tiled"]


def test_deterministic_algorithms_and_empty_batches_are_ours():
    q = torch.empty(2, 9, 2, 32)
    assert libraries.unsupported_reason("flash", q, backward=True) is None
    assert libraries.unsupported_reason("flash", q[:0], backward=False) == "the batch is empty"
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in libraries.unsupported_reason("flash", q, backward=True)
        assert libraries.unsupported_reason("flash", q, backward=False) is None
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


# ---- stand-ins for what only a GPU has: real signatures, plain PyTorch inside

# Parameters of flash-attn-3 (hopper/flash_attn_interface.py, custom operations since September 2025) and flash-attn-4
# (flash_attn/cute/interface.py, 4.0.0b36); "name=" has a default.
SIGNATURES = {
    "_flash_attn_forward": (
        "q k v k_new= v_new= qv= out_= cu_seqlens_q= cu_seqlens_k= cu_seqlens_k_new= seqused_q= seqused_k= "
        "max_seqlen_q= max_seqlen_k= page_table= kv_batch_idx= leftpad_k= rotary_cos= rotary_sin= "
        "seqlens_rotary= q_descale= k_descale= v_descale= softmax_scale= causal= window_size_left= "
        "window_size_right= attention_chunk= softcap= rotary_interleaved= scheduler_metadata= num_splits= "
        "pack_gqa= sm_margin="
    ),
    "_flash_attn_backward": (
        "dout q k v out softmax_lse cu_seqlens_q= cu_seqlens_k= sequed_q= sequed_k= max_seqlen_q= "
        "max_seqlen_k= dq= dk= dv= softmax_scale= is_causal= window_size_left= window_size_right= softcap= "
        "deterministic= sm_margin="
    ),
    "_flash_attn_fwd": (
        "q k v qv= cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= "
        "min_seqlen_k= page_table= softmax_scale= causal= softcap= window_size_left= window_size_right= "
        "learnable_sink= tile_mn= mma_pv_is_rs= intra_wg_overlap= num_threads= num_splits= pack_gqa= _arch= "
        "score_mod= mask_mod= block_sparse_tensors= return_lse= out= lse= aux_tensors= aux_scalars= "
        "q_descale= k_descale= v_descale= gather_kv_indices= scheduler_metadata= seqlen_k_per_split= "
        "disable_scheduler_metadata= gather_bwd_recompute_p="
    ),
    "_flash_attn_bwd": (
        "q k v out dout lse softmax_scale= causal= softcap= window_size_left= window_size_right= "
        "m_block_size= n_block_size= num_threads= pack_gqa= num_stages_Q= num_stages_dO= SdP_swapAB= "
        "dKV_swapAB= dQ_swapAB= AtomLayoutMSdP= AtomLayoutNdKV= AtomLayoutMdQ= V_in_regs= cu_seqlens_q= "
        "cu_seqlens_k= seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= deterministic= dq= dk= dv= "
        "score_mod= score_mod_bwd= mask_mod= aux_tensors= aux_scalars= block_sparse_tensors= dlse= "
        "learnable_sink="
    ),
}


def signature_of(name):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    words = [
        (word.rstrip("="), None if word.endswith("=") else inspect.Parameter.empty) for word in SIGNATURES[name].split()
    ]
    return inspect.Signature([inspect.Parameter(word, kind, default=default) for word, default in words])


def plain_forward(q, k, v, scale):
    """(B, H, N, Dh) -> o in q's dtype and lse (B, H, N), natural logarithm."""
    s = q.double() @ k.double().mT * scale
    return (s.softmax(-1) @ v.double()).to(q.dtype), s.logsumexp(-1).float()


def plain_backward(q, k, v, o, lse, do, scale):
    """dq, dk, dv (B, H, N, Dh) as a flash backward makes them: from o and lse, which must be right."""
    q, k, v, o, lse, do = (t.double() for t in (q, k, v, o, lse, do))
    p = (q @ k.mT * scale - lse[..., None]).exp()
    ds = p * (do @ v.mT - (o * do).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


def stand_in(name, given):
    """The package's function of that name; it notes the arguments that it was given."""
    signature = signature_of(name)

    def function(*args, **kwargs):
        call = signature.bind(*args, **kwargs).arguments
        given.append((name, call))
        q, k, v = (call[x].transpose(1, 2) for x in "qkv")
        if "dout" not in call:
            o, lse = plain_forward(q, k, v, call["softmax_scale"])
            wanted = name == "_flash_attn_forward" or call.get("return_lse")
            return (o.transpose(1, 2), lse if wanted else None, None, None)
        lse = call["softmax_lse" if name == "_flash_attn_backward" else "lse"]
        grads = plain_backward(
            q, k, v, call["out"].transpose(1, 2), lse, call["dout"].transpose(1, 2), call["softmax_scale"]
        )
        for x, grad in zip(("dq", "dk", "dv"), grads):
            call[x].copy_(grad.transpose(1, 2))

    function.__signature__ = signature
    # flash-attn-3's are custom operations, which hide the function that they were made from
    return (
        type("CustomOpDef", (), {"_init_fn": staticmethod(function), "__call__": staticmethod(function)})()
        if "ward" in name
        else function
    )


@pytest.fixture
def packages(monkeypatch):
    """Both packages, as stand-ins that can run here; yields their calls."""
    given = []
    for package in libraries.PACKAGES.values():
        parts = package.module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name in (package.forward, package.backward):
            setattr(sys.modules[package.module], name, stand_in(name, given))
    libraries._load.cache_clear()
    yield given
    libraries._load.cache_clear()


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("forward, backward", [("it", "it"), ("ours", "it"), ("it", "ours"), ("flash", "it")])
@pytest.mark.parametrize("provider", libraries.PACKAGES)
def test_packages_are_called_as_they_are_written(provider, forward, backward, dtype, packages, monkeypatch):
    assert "needs an NVIDIA GPU" in libraries.unsupported_reason(provider, torch.empty(0), False)  # installed, but
    monkeypatch.setattr(libraries, "unsupported_reason", lambda *_: None)
    chosen = {"it": provider, "ours": "ours", "flash": "flash"}
    qkv, do = random(2, 50, 2, 72, dtype)
    with providers(attention_fwd=chosen[forward], attention_bwd=chosen[backward]):
        check_attention(qkv, do)
        assert len(packages) == (forward, backward).count("it")
        q, k, v = (torch.randn(2, 9, 2, 32) for _ in range(3))
        o, lse = attention_fwd(q, k, v, SCALE)
        grads = attention_bwd_separate(q, k, v, o, lse, o, SCALE)
    truth = by_autograd(torch.stack([q, k, v], 2).double(), o.double())["dqkv"]
    torch.testing.assert_close(torch.stack(grads, 2).double(), truth, atol=1e-5, rtol=1e-5)
    for name, call in packages:
        assert call["softmax_scale"] == SCALE and not call.get("causal", False), name


@pytest.mark.parametrize(
    "breakage, reason",
    [
        ("signature", "this version's flash_attn_interface._flash_attn_backward is another than vitfast calls"),
        ("missing", "this version's flash_attn_interface._flash_attn_forward is another than vitfast calls"),
        ("import", r"import flash_attn_interface fails \(ImportError: undefined symbol\)"),
        ("dependency", r"import flash_attn_interface fails \(ModuleNotFoundError: No module named 'flash_attn_3'\)"),
    ],
)
def test_package_that_does_not_fit_is_named(breakage, reason, packages, monkeypatch):
    module = sys.modules["flash_attn_interface"]
    if breakage == "signature":
        module._flash_attn_backward = lambda dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal: None
    elif breakage == "missing":
        del module._flash_attn_forward
    else:
        error = (
            ImportError("undefined symbol")
            if breakage == "import"
            else ModuleNotFoundError("No module named 'flash_attn_3'", name="flash_attn_3")
        )

        def fail(name):
            raise error

        monkeypatch.setattr(libraries.importlib, "import_module", fail)
    with (
        pytest.raises(RuntimeError, match=reason),
        tiles.override("attention_fwd", tiles.tile(provider="flash_attn_3")),
    ):
        attention_fwd(*(torch.empty(1, 4, 1, 16),) * 3, 1.0)


class FakeAten:
    """PyTorch's GPU operations on CPU tensors: the schema checked by a call on meta tensors, the conventions kept."""

    def __init__(self, lse_axes):
        self.lse_axes, self.called = lse_axes, []

    def __getattr__(self, name):
        real = getattr(torch.ops.aten, name).default

        def operation(*args, **kwargs):
            names = [a.name for a in real._schema.arguments]
            assert len(args) <= sum(not a.kwarg_only for a in real._schema.arguments)
            call = dict(zip(names, args)) | kwargs
            real(
                *(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args), **kwargs
            )  # what the dispatcher takes
            self.called.append(name)
            assert not call["dropout_p"] and not call["is_causal"] and call.get("attn_bias") is None
            q, k, v = (call[x] for x in ("query", "key", "value"))
            if not name.endswith("backward"):
                assert call.get("compute_log_sumexp", True)
                o, lse = plain_forward(q, k, v, call["scale"])
                return (o, self.theirs(name, lse), *[None] * 7)
            lse, do = call["logsumexp"], call.get("grad_out", call.get("grad_out_"))
            expected = self.theirs(name, lse.flatten(2)[:, :, : q.shape[2]])
            assert torch.equal(lse, expected) and lse.shape == expected.shape
            assert call.get("max_q", q.shape[2]) == call.get("max_k", k.shape[2]) == q.shape[2]
            assert call.get("cum_seq_q") is None and call.get("grad_input_mask", [True] * 3)[:3] == [True] * 3
            grads = plain_backward(q, k, v, call["out"], lse.flatten(2)[:, :, : q.shape[2]], do, call["scale"])
            return (*(g.to(q.dtype) for g in grads), None)[: len(real._schema.returns)]

        return operation

    def theirs(self, name, lse):
        """lse as the operation has it: padded to multiples of 32 with infinities, or with one more axis."""
        if "efficient" in name:
            return F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        return lse[..., None] if "cudnn" in name and self.lse_axes == 4 else lse


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("forward, backward", [("it", "it"), ("ours", "it"), ("it", "ours")])
@pytest.mark.parametrize("provider, lse_axes", [("cudnn", 4), ("cudnn", 3), ("efficient", 3)])
def test_gpu_operations_are_called_as_their_schema_says(provider, lse_axes, forward, backward, dtype, monkeypatch):
    fake = FakeAten(lse_axes)
    monkeypatch.setattr(libraries, "aten", fake)
    monkeypatch.setattr(libraries, "unsupported_reason", lambda *_: None)
    libraries._cudnn_lse_axes.cache_clear()
    chosen = {"it": provider, "ours": "ours"}
    try:
        with providers(attention_fwd=chosen[forward], attention_bwd=chosen[backward]):
            for N, D in ((50, 72), (64, 32)):
                check_attention(*random(2, N, 2, D, dtype))
    finally:
        libraries._cudnn_lse_axes.cache_clear()
    assert any(provider in name for name in fake.called)


def test_flash_on_a_gpu_is_called_as_its_schema_says():
    """On meta tensors, which take the way of a GPU's; the shapes alone come back."""
    q, k, v, o, do = (torch.empty(2, 50, 3, 80, dtype=torch.bfloat16, device="meta") for _ in range(5))
    lse = torch.empty(2, 3, 50, device="meta")
    out, theirs = libraries._forward_pytorch("flash", q, k, v, SCALE)
    assert out.shape == (2, 3, 50, 80) and theirs.shape == lse.shape and theirs.dtype == torch.float32
    grads = libraries._backward_pytorch("flash", q, k, v, o, lse, do, SCALE)
    assert [g.shape for g in grads] == [out.shape] * 3


# ---- LayerNorm by PyTorch

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
            like, shape = torch.empty(0, dtype=dtype), rows.shape_class(width)
            assert tiles.lookup("layer_norm_fwd", like, shape) == tiles.lookup("layer_norm_fwd", like, shape + "a")
            for scaled in ("", "s"):
                assert tiles.lookup("layer_norm_bwd", like, shape + scaled) == tiles.lookup(
                    "layer_norm_bwd", like, shape + "a" + scaled
                )


# ---- launchers that the tuner times alone


@interpreted
def test_halves_of_the_tiled_backward_alone():
    qkv, do = random(2, 70, 2, 32, torch.float32)
    q, k, v = qkv.unbind(2)
    with providers():
        o, lse = attention_fwd(q, k, v, SCALE)
        whole, total = attention_bwd(q, k, v, o, lse, do, SCALE, want_bias_grad=True)
        delta = torch.full_like(lse, float("nan"))
        dq, q_sums = attention_bwd_dq(q, k, v, o, lse, do, SCALE, delta=delta, want_sums=True)
        dk, dv, kv_sums = attention_bwd_dkdv(q, k, v, lse, delta, do, SCALE, want_sums=True)
        assert (
            attention_bwd_dq(q, k, v, o, lse, do, SCALE)[1]
            is attention_bwd_dkdv(q, k, v, lse, delta, do, SCALE)[2]
            is None
        )
    assert torch.equal(torch.stack([dq, dk, dv], 2), whole) and torch.equal(torch.cat([q_sums, kv_sums]), total)
    torch.testing.assert_close(delta, (o * do).sum(-1).transpose(1, 2), atol=1e-5, rtol=1e-5)


@interpreted
def test_small_sums_alone():
    part, out = torch.randn(4, 24, 16), torch.empty(16)
    with providers():
        assert (weight_grad.sum_products(part, None, torch.float32)[0] - part.sum(0)).abs().max() < 1e-5
        rows.column_sums([(part[0], out)], 24, 16, part)
        torch.testing.assert_close(out, part[0].sum(0))
        pre, dy = torch.randn(24, 16, requires_grad=True), torch.randn(24, 16)
        (exact,) = torch.autograd.grad(F.gelu(pre), pre, dy)
        dpre, dbias = mlp.gelu_bwd(dy, pre.detach(), "none", True)
    torch.testing.assert_close(dpre, exact, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dbias, exact.sum(0), atol=1e-5, rtol=1e-5)


# ---- on a GPU


def skip_if_absent(provider, dtype):
    like = torch.empty(0, dtype=dtype, device="cuda")
    for op in ("attention_fwd", "attention_bwd"):
        reason = tiles.absent(op, like, "d64n256").get(provider)
        if reason:
            pytest.skip(f"{provider}: {reason}")


@contextlib.contextmanager
def on_gpu(**chosen):
    """The shipped tiles for what is not named."""
    with contextlib.ExitStack() as stack:
        for op, provider in chosen.items():
            if provider != "ours":
                stack.enter_context(tiles.override(op, tiles.tile(provider=provider)))
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("forward, backward", [("it", "it"), ("ours", "it"), ("it", "ours")])
@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("N", [197, 257, 577])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("provider", libraries.PROVIDERS)
def test_libraries_match_ref_on_a_gpu(provider, dtype, N, D, forward, backward):
    skip_if_absent(provider, dtype)
    chosen = {"it": provider, "ours": "ours"}
    with on_gpu(attention_fwd=chosen[forward], attention_bwd=chosen[backward]):
        check_attention(*random(2, N, 3, D, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("provider", libraries.PROVIDERS)
def test_libraries_take_any_strides_on_a_gpu(provider):
    skip_if_absent(provider, torch.bfloat16)
    B, N, H, D = 2, 50, 2, 64
    kind = dict(dtype=torch.bfloat16, device="cuda")
    with on_gpu(attention_fwd=provider, attention_bwd=provider):
        do = torch.randn(B, H, N, D, **kind).transpose(1, 2)
        check_attention(torch.randn(B, N + 3, 3, H + 1, D + 8, **kind)[:, 2:-1, :, 1:, 8:], do)
        check_attention(torch.randn(N, B, 3, H, D, **kind).transpose(0, 1), do)
        check_attention(torch.randn(B, N, 3, H, D + 3, **kind)[..., 3:], do)
        check_attention(torch.randn(B, N, 3, H, D, **kind), torch.randn(B, 1, 1, D, **kind).expand(B, N, H, D))


@pytest.mark.gpu
def test_efficient_in_fp32_on_a_gpu():
    skip_if_absent("efficient", torch.float32)
    with on_gpu(attention_fwd="efficient", attention_bwd="efficient"):
        check_attention(*random(2, 197, 3, 64, torch.float32, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("layer_scale, drop_path", FACTORS)
@pytest.mark.parametrize("dtype, parameters, stream", MIXES)
def test_torch_layer_norm_on_a_gpu(dtype, parameters, stream, layer_scale, drop_path):
    check_norm(591, 768, dtype, parameters, stream, layer_scale, drop_path, "cuda")
