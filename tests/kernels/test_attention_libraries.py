"""Libraries as providers of attention, against float64: alone, and mixed with our kernels.

On the CPU PyTorch's flash attention runs as it is; test_library_calls.py shows how the others are called.
"""

import sys

import pytest
import torch
from library_cases import (
    DTYPES,
    HALVES,
    SCALE,
    by_autograd,
    by_launchers,
    check_attention,
    compare,
    interpreted,
    on_gpu,
    providers,
    random,
)

from vitfast import ops, ref
from vitfast.kernels import attention_libraries as libraries
from vitfast.kernels import launch, tiles
from vitfast.kernels import layer_norm as norm
from vitfast.kernels.attention import (
    attention_bwd,
    attention_bwd_separate,
    attention_fwd,
)
from vitfast.kernels.logits import PLAIN

SHAPES = [(1, 64), (50, 32), (50, 64), (50, 72), (50, 80), (197, 64), (197, 80)]


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
        torch.library.opcheck(forward, (*inputs, *PLAIN, SCALE), test_utils=asked)
        made = forward(*detached, *PLAIN, SCALE)
        torch.library.opcheck(backward, (*detached, *PLAIN, *made, do, SCALE, False, False), test_utils=asked)
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
    for op, shape, here in [
        ("attention_fwd", "d64n256", ["tiled", "flash"]),
        ("attention_bwd", "d80n320", ["tiled", "flash"]),
    ]:
        assert [t.provider for t in tiles.candidates(op, half, shape)] == here
        absent = tiles.absent(op, half, shape)
        assert absent.keys() == set(libraries.PROVIDERS) - {"flash"}
        assert absent["flash_attn_4"] == "not installed" and "needs an NVIDIA GPU" in absent["efficient"]
    assert [t.provider for t in tiles.candidates("layer_norm_fwd", half, "3x256a")] == ["torch"]
    assert tiles.absent("layer_norm_fwd", half, "3x256a") == tiles.absent("linear_fwd", half, "768x768") == {}


def test_offline_compilation_knows_no_library():
    meta = torch.empty(0, dtype=torch.bfloat16, device="meta")
    with tiles.targeting(90):
        assert [t.provider for t in tiles.candidates("attention_bwd", meta, "d64n256")] == [
            "head",
            "head",
            "phases",
            "tiled",
        ]
        assert tiles.candidates("layer_norm_bwd", meta, "3x256as") == []
        assert set(tiles.absent("attention_fwd", meta, "d64n256")) == set(libraries.PROVIDERS)
        with (
            pytest.raises(RuntimeError, match="layer_norm_fwd: torch cannot run here"),
            tiles.override("layer_norm_fwd", tiles.tile(provider="torch")),
        ):
            norm.layer_norm_fwd(torch.empty(2, 64, device="meta"), None, None, 1e-6)


def test_what_the_table_ships_is_a_candidate_beside_what_a_user_chose(monkeypatch):
    flash, half = tiles.tile(provider="flash"), torch.empty(0, dtype=torch.float16)
    monkeypatch.setattr(tiles, "_find", lambda *_: flash)
    assert [t.provider for t in tiles.candidates("attention_fwd", half, "d64n256")] == ["rows", "tiled"]


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
