"""The two fused blocks of an encoder layer on interpreted kernels against float64.

Values, every gradient, frozen parameters, torch's machinery.
"""

import pytest
import torch
from checks import assert_close

from vitfast import ops, ref
from vitfast.kernels.launch import record, recording
from vitfast.kernels.logits import PLAIN, Logits
from vitfast.ops.attention_block import _attention_bwd, _attention_fwd
from vitfast.ops.mlp_block import _mlp_bwd, _mlp_fwd

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")

# Rounding of sums of a few hundred products, on top of twice PyTorch's own error; bf16: one rounding, 2^-8, of the
# largest value.
TOL = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 4e-3}
WIDTH, HEADS, HIDDEN = 48, 3, 80


def parameters(block: str, dtype, *, bias: bool = True, scale: bool = True) -> list:
    """Parameters of a block: leaves of one dtype, matrices scaled by their fan-in.

    norm_weight, norm_bias, in_weight, in_bias, out_weight, out_bias, layer_scale.
    """
    rows, inner = (3 * WIDTH, WIDTH) if block == "attention" else (HIDDEN, HIDDEN)
    vector = lambda n: torch.randn(n).to(dtype).requires_grad_()  # noqa: E731
    matrix = lambda n, k: (torch.randn(n, k) * k**-0.5).to(dtype).requires_grad_()  # noqa: E731
    biases = [vector(n) if bias else None for n in (WIDTH, rows, WIDTH)]
    return [
        vector(WIDTH),
        biases[0],
        matrix(rows, WIDTH),
        biases[1],
        matrix(WIDTH, inner),
        biases[2],
        vector(WIDTH) if scale else None,
    ]


def call(block: str, x, p, drop_path=None, **options):
    if block == "attention":
        return ops.attention_block(x, *p[:6], num_heads=HEADS, layer_scale=p[6], drop_path=drop_path, **options)
    return ops.mlp_block(x, *p[:6], layer_scale=p[6], drop_path=drop_path, **options)


def gradients(block, x, p, drop_path, upstream, mode, dtype=None, **options):
    """Output and gradients of x and of each parameter that is there, under a mode.

    dtype: that of fresh leaves.
    """

    def leaf(t):
        return None if t is None else (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_()

    x, p = leaf(x), [leaf(t) for t in p]
    with ops.use_kernels(mode):
        out = (
            call(block, x, p, None if drop_path is None or dtype is None else drop_path.to(dtype), **options)
            if dtype
            else call(block, x, p, drop_path, **options)
        )
        out.backward(upstream.to(out.dtype))
    return [out.detach(), x.grad, *(t.grad for t in p if t is not None)]


CASES = {
    "plain": dict(scale=False),
    "layer scale": dict(),
    "no biases": dict(bias=False, scale=False),
    "drop path": dict(scale=False, drop=True),
    "layer scale, drop path": dict(drop=True),
    "layer scale, no biases": dict(bias=False),
}


@pytest.mark.parametrize("dtype", TOL, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", ["attention", "mlp"])
def test_blocks_match_float64(block, name, dtype):
    options = dict(CASES[name])
    drop_path = torch.tensor([0.0, 1.25, 2.0]) if options.pop("drop", False) else None
    p = parameters(block, dtype, **options)
    x, upstream = torch.randn(3, 7, WIDTH).to(dtype), torch.randn(3, 7, WIDTH).to(dtype)
    truth = gradients(block, x, p, drop_path, upstream, "off", torch.float64)
    peer = gradients(block, x, p, drop_path, upstream, "off")
    mine = gradients(block, x, p, drop_path, upstream, "on")
    for i, (a, b, t) in enumerate(zip(mine, peer, truth, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        error, own, size = (a - t).abs().max(), (b - t).abs().max(), t.abs().max()
        assert error <= 2 * own + TOL[dtype] * size, (
            f"{block} {name}, tensor {i}: {error:.2e}, PyTorch {own:.2e}, size {size:.2e}"
        )


@pytest.mark.parametrize("block", ["attention", "mlp"])
def test_keeping_all_gives_the_same_bits_and_writes_less(block):
    """keep="all": the same bits, and backward writes neither LayerNorm's output nor the activation."""
    p, written = parameters(block, torch.float16), {}
    x, upstream = (torch.randn(3, 7, WIDTH).half() for _ in range(2))
    drop_path = torch.tensor([0.0, 1.25, 2.0])
    for drop in (None, drop_path):
        least, everything = (gradients(block, x, p, drop, upstream, "on", keep=keep) for keep in ("least", "all"))
        assert all(torch.equal(a, b) for a, b in zip(least, everything, strict=True))
    p = parameters(block, torch.float16, scale=False)  # fp16 scales g in a pass of its own
    for keep in ("least", "all"):
        leaves = [t if t is None else t.detach().requires_grad_() for t in (x, *p)]
        with ops.use_kernels("on"):
            out = call(block, leaves[0], leaves[1:], keep=keep)
            launches = {
                launch.kernel.__name__: launch.arguments for launch in record(lambda out=out: out.backward(upstream))
            }
        written[keep] = [launches["layer_norm_bwd_kernel"]["out_ptrs"][2]] + (
            [launches["dgelu_matmul_kernel"]["act_ptr"]] if block == "mlp" else []
        )
        assert launches["layer_norm_bwd_kernel"]["ws_ptrs"][3] is not None and "scale_rows_kernel" not in launches
    assert all(t is not None for t in written["least"]) and all(t is None for t in written["all"])
    with pytest.raises(ValueError, match="_block: keep must be 'least' or 'all', got 'auto'"):
        call(block, x, p, keep="auto")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", ["attention", "mlp"])
def test_fp32_residual_over_16_bit_parameters(block, dtype):
    p = parameters(block, dtype)
    x, upstream = torch.randn(2, 5, WIDTH) * 30, torch.randn(2, 5, WIDTH)
    truth = gradients(block, x, p, None, upstream, "off", torch.float64)
    peer = gradients(block, x, p, None, upstream, "off", residual_in_fp32=True)
    mine = gradients(block, x, p, None, upstream, "on", residual_in_fp32=True)
    assert mine[0].dtype == mine[1].dtype == torch.float32
    for a, b, t in zip(mine, peer, truth, strict=True):
        assert a.dtype == b.dtype
        assert (a - t).abs().max() <= 2 * (b - t).abs().max() + TOL[dtype] * t.abs().max()
    # 16 bit would round a stream of size 100 by 32 eps: what is seen is the branch's own rounding
    assert (mine[0] - truth[0]).abs().max() < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("block", ["attention", "mlp"])
def test_frozen_parameters_cost_nothing(block):
    """Every choice of trainable parameters gives the same gradients as all of them, and fewer launches."""
    p = parameters(block, torch.float32)
    x, upstream = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    whole = gradients(block, x, p, None, upstream, "on")[1:]
    counts = {}
    for trainable in ([0], [7], [3, 4], [5, 6], [1, 2], [3], [0, 3, 5]):
        leaves = [t.detach().clone().requires_grad_(i in trainable) for i, t in enumerate([x, *p])]
        with ops.use_kernels("on"):
            call(block, leaves[0], leaves[1:]).backward(upstream)
        for i, (leaf, expected) in enumerate(zip(leaves, whole, strict=True)):
            assert (leaf.grad is None) == (i not in trainable)
            if i in trainable:
                assert_close(leaf.grad, expected, atol=1e-5, rtol=1e-5, name=f"{trainable} {i}")
        again = [t.detach().clone().requires_grad_(i in trainable) for i, t in enumerate([x, *p])]
        with ops.use_kernels("on"):  # recorded launches compute nothing: what lands in `again` is of no use
            launches = record(lambda again=again: call(block, again[0], again[1:]).backward(upstream))
        counts[tuple(trainable)] = len(launches)
        if trainable == [5, 6]:  # the output layer alone: nothing below it is differentiated
            names = {launch.kernel.__name__ for launch in launches}
            assert not any("bwd" in name or "dgelu" in name for name in names), names
    everything = [t.detach().clone().requires_grad_() for t in (x, *p)]
    with ops.use_kernels("on"):
        most = len(record(lambda: call(block, everything[0], everything[1:]).backward(upstream)))
        assert max(counts.values()) < most, (counts, most)
        with torch.no_grad():
            assert all(t.numel() == 0 for t in forward(block, x, p, keep="none")[1:])


def attend_to(function, **options):
    """The operation, with cos and sin each by its name."""
    return lambda cos, sin, **tensors: function(**tensors, rope=(cos, sin), **options)


PACKED = dict(offsets=torch.tensor([0, 2, 5]), longest=3)
VECTORS = dict(norm_weight=(WIDTH,), norm_bias=(WIDTH,), layer_scale=(WIDTH,))
QKV = dict(qkv_weight=(3 * WIDTH, WIDTH), qkv_bias=(3 * WIDTH,), proj_weight=(WIDTH, WIDTH), proj_bias=(WIDTH,))
ROPE = dict(cos=(5, WIDTH // HEADS), sin=(5, WIDTH // HEADS))
BIAS = dict(bias=(HEADS, 5, 5))
FC = dict(fc1_weight=(HIDDEN, WIDTH), fc1_bias=(HIDDEN,), fc2_weight=(WIDTH, HIDDEN), fc2_bias=(WIDTH,))
GATED = {name.replace("fc1", layer): shape for layer in ("up", "gate") for name, shape in FC.items() if "fc1" in name}
GATED |= dict(inner_norm_weight=(HIDDEN,), inner_norm_bias=(HIDDEN,), down_weight=(WIDTH, HIDDEN), down_bias=(WIDTH,))
HEAD = (2, 5, HEADS, 16)
OPERATIONS = {
    "attention block": (attend_to(ops.attention_block, num_heads=HEADS), dict(**VECTORS, **QKV, **ROPE, **BIAS)),
    "packed attention block": (
        attend_to(ops.attention_block, num_heads=HEADS, **PACKED),
        dict(x=(5, WIDTH), **VECTORS, **QKV, **ROPE),
    ),
    "MLP block": (ops.mlp_block, VECTORS | FC),
    "gated MLP block": (ops.gated_mlp_block, VECTORS | GATED),
    "gated MLP": (ops.gated_mlp, GATED),
    "attention": (attend_to(ops.attention), dict(qkv=HEAD, k=HEAD, v=HEAD, **ROPE, **BIAS)),
    "packed attention": (attend_to(ops.attention, **PACKED), dict(qkv=(5, 3, HEADS, 16), **ROPE)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_input_alone_gets_its_gradient(name):
    """Where one input alone is trained, its gradient is the one that float64 PyTorch computes."""
    function, shapes = OPERATIONS[name]
    shapes = shapes if "qkv" in shapes else dict(x=(2, 5, WIDTH)) | shapes
    values = {key: torch.randn(shape) * (0.1 if "weight" in key else 1) for key, shape in shapes.items()}
    doubles = {key: t.double().requires_grad_() for key, t in values.items()}
    out = function(**doubles)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    for key, double in doubles.items():
        given = {other: t.detach().requires_grad_(other == key) for other, t in values.items()}
        with ops.use_kernels("on"):
            function(**given).backward(upstream.float())
        size = double.grad.abs().max().item()  # cos and sin: small differences of sums, so more than TOL
        assert_close(given[key].grad.double(), double.grad, atol=1e-4 * size, name=key)


def test_deterministic_mode_fills_nothing_that_kernels_write():
    """In PyTorch's deterministic mode, where it writes NaN to each new tensor, no more is filled than outside of it."""

    def ours(event) -> bool:
        return event is not None and (event.name.startswith("vitfast::") or ours(event.cpu_parent))

    def fills(function, values) -> int:
        given, cpu = {key: t.requires_grad_() for key, t in values.items()}, [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu) as profile, recording():
            out = function(**given)
            torch.autograd.grad(out, given.values(), out.detach())
        return sum(event.name == "aten::fill_" and ours(event) for event in profile.events())

    norm = dict(x=(4, WIDTH), weight=(WIDTH,))
    more = [(ops.layer_norm, norm | dict(bias=(WIDTH,))), (ops.rms_norm, norm)]
    more.append((ops.linear_gelu, dict(x=(4, WIDTH), weight=(HIDDEN, WIDTH), bias=(HIDDEN,))))
    with ops.use_kernels("on"):
        for function, shapes in (*OPERATIONS.values(), *more):
            shapes = shapes if "x" in shapes or "qkv" in shapes else dict(x=(2, 5, WIDTH)) | shapes
            values, counts = {key: torch.randn(shape) for key, shape in shapes.items()}, []
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                try:
                    counts.append(fills(function, values))
                    assert torch.utils.deterministic.fill_uninitialized_memory
                finally:
                    torch.use_deterministic_algorithms(False)
            assert counts[0] == counts[1], shapes


def forward(block, x, p, keep):
    tensors = [x, *(t.detach() for t in p)]
    if block == "attention":
        return _attention_fwd(*tensors, None, *PLAIN, HEADS, 1e-6, "layer", keep)
    return _mlp_fwd(*tensors, None, "gelu", 1e-6, "layer", keep)


@pytest.mark.parametrize("kind", ["plain", "acting", "packed"])
def test_opcheck_of_the_attention_block(kind):
    p, acting = parameters("attention", torch.float32), kind == "acting"
    shape = (6, WIDTH) if kind == "packed" else (2, 3, WIDTH)
    x = torch.randn(shape, requires_grad=True)
    tables = (torch.rand(2, WIDTH // HEADS), torch.rand(2, WIDTH // HEADS), torch.randn(1, HEADS, 3, 3))
    logits = PLAIN if kind == "plain" else Logits(offsets=torch.tensor([0, 2, 6]), longest=4)
    logits = Logits(*tables, torch.tensor([2, 3]), num_prefix=1) if acting else logits
    for t in tables:
        t.requires_grad_()
    for drop_path, keep in ((torch.rand(6 if kind == "packed" else 2), "least"), (None, "all")):
        torch.library.opcheck(_attention_fwd, (x, *p, drop_path, *logits, HEADS, 1e-6, "layer", keep))
    bare, *p = (t if t is None else t.detach() for t in (x, *p))
    cos, sin, bias, *rest = (t.detach() if torch.is_tensor(t) else t for t in logits)
    torch.library.opcheck(_attention_fwd, (bare, *p, None, cos, sin, bias, *rest, HEADS, 1e-6, "layer", "none"))
    kept = [t.detach() for t in _attention_fwd(bare, *p, None, cos, sin, bias, *rest, HEADS, 1e-6, "layer", "all")][1:]
    lengths, offsets, *options = rest
    inputs = (torch.randn(shape), bare, *p, cos, sin, bias, None, lengths, offsets)
    for needs in ([True] * 8 + [acting] * 3, [i in (3, 5, 7) for i in range(11)]):
        for h in (kept[5], None):
            arguments = (*inputs, *kept[:5], h, *options, 1e-6, "layer", needs)
            torch.library.opcheck(_attention_bwd, arguments, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_of_the_mlp_block():
    p = parameters("mlp", torch.float32)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    torch.library.opcheck(_mlp_fwd, (x, *p, torch.rand(2), "gelu_tanh", 1e-6, "layer", "least"))
    torch.library.opcheck(_mlp_fwd, (x, *p, None, "gelu_tanh", 1e-6, "layer", "all"))
    torch.library.opcheck(_mlp_fwd, (x.detach(), *(t.detach() for t in p), None, "gelu_tanh", 1e-6, "layer", "none"))
    kept = [t.detach() for t in _mlp_fwd(x, *p, None, "gelu_tanh", 1e-6, "layer", "all")][1:]
    inputs = (torch.randn(2, 3, WIDTH), x.detach(), *(t.detach() for t in p), None)
    for needs in ([True] * 8, [False, False, False, True, False, True, False, True]):
        for more in (kept[3:], [None] * len(kept[3:])):
            arguments = (*inputs, *kept[:3], *more, "gelu_tanh", 1e-6, "layer", needs)
            torch.library.opcheck(_mlp_bwd, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("block", ["attention", "mlp"])
def test_empty_batches_strides_and_second_derivatives(block):
    p = parameters(block, torch.float32)
    with ops.use_kernels("on"):
        empty = torch.randn(0, 4, WIDTH, requires_grad=True)
        out = call(block, empty, p)
        assert out.shape == (0, 4, WIDTH)
        out.backward(torch.randn_like(out))
        assert empty.grad.shape == empty.shape and all((t.grad == 0).all() for t in p)
        x = torch.randn(4, 2, WIDTH).transpose(0, 1).requires_grad_()
        out = call(block, x, p)
        assert out.is_contiguous()
        expected = call(block, x.detach().contiguous(), p)
        assert_close(out, expected, atol=0)
        out.backward(torch.ones(1, 1, WIDTH).expand_as(out))  # an expanded upstream gradient
        grads = torch.autograd.grad(call(block, x, p).sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            grads.sum().backward()
    with ops.use_kernels("off"):
        assert_close(call(block, x, p), expected, atol=1e-4, rtol=1e-4)


def test_head_sizes_without_a_kernel():
    x, w = torch.randn(1, 2, 20), torch.randn(60, 20)
    with (
        ops.use_kernels("on"),
        pytest.raises(RuntimeError, match="attention_block: kernels are switched on, but .*head size"),
    ):
        ops.attention_block(x, torch.ones(20), None, w, None, torch.randn(20, 20), None, num_heads=2)
    assert_close(
        ops.attention_block(x, torch.ones(20), None, w, None, torch.eye(20), None, num_heads=2),
        ref.attention_block(x, torch.ones(20), None, w, None, torch.eye(20), None, num_heads=2),
        atol=0,
    )
