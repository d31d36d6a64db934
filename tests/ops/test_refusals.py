"""What operations refuse: each error's type, and the operation and the argument that it names."""

import inspect
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_cases import MODES, interpreted
from operations import HIDDEN, OPERATIONS, B, D, H, N

from vitfast import InputError, ViT, ops
from vitfast.ops import dispatch
from vitfast.tools.verify.draw import Draw

# Each public operation once, with all its tensors.
NAMES = {name.partition(",")[0]: name for name in OPERATIONS if "packed" not in name}
WRONG = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
PACKED = dict(offsets=torch.tensor([0, 2, N]), longest=3)


def tensors(op: str) -> dict:
    return OPERATIONS[NAMES[op]].draw(Draw(torch.float32, torch.device("cpu")))


def call(op: str, **changed):
    """The operation with all its tensors but for what is changed."""
    return OPERATIONS[NAMES[op]].function(**tensors(op) | changed)


@pytest.fixture(params=MODES)
def mode(request):
    with ops.use_kernels(request.param):
        yield request.param


@pytest.mark.parametrize("op", NAMES)
def test_a_tensor_of_another_kind_is_named(op, mode):
    """Of another dtype, on another device, of another shape; no tensor at all."""
    good = tensors(op)
    call(op)
    optional = [key for key, p in inspect.signature(getattr(ops, op)).parameters.items() if "None" in str(p.annotation)]
    for key, tensor in good.items():
        for dtype in WRONG:
            if key != "images" or dtype != torch.float8_e4m3fn:  # images are converted
                with pytest.raises(TypeError, match=rf"^{op}: {key} must be .*, got {dtype}$"):
                    call(op, **{key: tensor.to(dtype)})
        for value in (tensor.numpy(), tensor.tolist(), None):
            if value is not None or key not in (*optional, "cos", "sin", "k", "v"):
                with pytest.raises(TypeError, match=rf"^{op}: {key} must be a tensor, got |^{op}: rope must be"):
                    call(op, **{key: value})
        first = key == next(iter(good))
        if not first and key not in ("cos", "sin"):
            with pytest.raises(ValueError, match=rf"^{op}: {key} must be .*, got "):
                call(op, **{key: tensor[None, None, None]})
            with pytest.raises(ValueError, match=rf"^{op}: \w+ must be on (cpu .*, got meta|meta .*, got cpu)"):
                call(op, **{key: tensor.to("meta")})
    with pytest.raises(TypeError):
        getattr(ops, op)()


BLOCKS = ("attention_block", "mlp_block", "gated_mlp_block")
IMAGES = dict(images=torch.zeros(B, 3, 8, 6).byte())
OF_MEANS = [  # what is wrong with a mean or a standard deviation
    ((0.4, 0.5), ValueError, "must be one number or 3, one for each of the 3 channels, got 2"),
    (torch.ones(3, 2), ValueError, r"must be one number or 3.*, got shape \(3, 2\)"),
    ("imagenet", TypeError, "must be one number or 3.*, got 'imagenet'"),
    (torch.ones(3, dtype=torch.complex64), TypeError, "must be one number or 3.*, got torch.complex64"),
    ([True, True, True], TypeError, "must be one number or 3.*, got torch.bool"),
    (float("nan"), ValueError, "must be from -?1e.06 to 1e.06, got"),
    ((0.1, 10**400, 0.1), ValueError, "must be from -?1e.06 to 1e.06, got"),
]
OF_ATTENTION = [
    (dict(k=None), ValueError, "give qkv alone, or q, k and v"),
    (dict(k=None, v=None), ValueError, r"qkv must be \(B, N, 3, H, Dh\), got \(2, 5, 3, 16\)"),
    (dict.fromkeys("qkv", torch.zeros(B, N, H, 0)), ValueError, "the head size must be at least 1"),
    (dict.fromkeys("qkv", torch.zeros(B, N, H, 7)), ValueError, "the head size must be even, got 7"),
    (dict(sin=torch.zeros(N - 1, 15)), ValueError, "cos and sin must be alike"),
    (dict(num_prefix=2), ValueError, r"cos and sin must be \(3, 16\), \(3, 3, 16\) or"),
    (dict.fromkeys(("cos", "sin"), torch.zeros(4, 16).half()), TypeError, "cos must be torch.float32"),
    (dict(rope_layout="full"), ValueError, "rope_layout must be 'half' or 'interleaved'"),
    (dict(num_prefix=N + 1), ValueError, "num_prefix must be a whole number from 0 to the 5 tokens, got 6"),
    (dict(num_prefix=True), ValueError, "num_prefix must be a whole number"),
    (dict(bias=torch.zeros(N, N)), ValueError, r"bias must be \(3, 5, 5\) or \(2 or 1, 3, 5, 5\), got \(5, 5\)"),
    (dict(key_lengths=torch.ones(B)), TypeError, "key_lengths must be int32 or int64"),
    (dict(key_lengths=torch.ones(3).int()), ValueError, r"key_lengths must be \(2,\), got \(3,\)"),
    (dict(key_lengths=[1, 2]), TypeError, "key_lengths must be a tensor, got list"),
    (dict(longest=3), ValueError, "longest is for packed samples, and there are no offsets"),
    (PACKED, ValueError, r"q must be \(tokens, H, Dh\), got \(2, 5, 3, 16\)"),
    *(
        (dict(scale=scale), ValueError, "scale must be None or a number that float32 holds, got ")
        for scale in (float("nan"), -1e300, 10**400, True, "1", torch.tensor(1.0))
    ),
]
OF_BLOCKS = [
    (dict(norm="rms"), ValueError, "norm_bias must be None where norm is 'rms'"),
    (dict(norm="batch"), ValueError, "norm must be 'layer' or 'rms', got 'batch'"),
    (dict(keep="auto"), ValueError, "keep must be 'least' or 'all', got 'auto'"),
    (dict(residual_in_fp32=1), TypeError, "residual_in_fp32 must be True or False, got 1"),
    (dict(residual_in_fp32=None), TypeError, "residual_in_fp32 must be True or False, got None"),
]
TOO_MANY = torch.zeros(HIDDEN, 12)
TABLE = [
    *(
        (op, dict(eps=eps), ValueError, r"eps must be a number from 0 to 3.4e\+38, got ")
        for op in ("layer_norm", "add_layer_norm", "rms_norm", *BLOCKS)
        for eps in (-1.0, float("nan"), 1e300, True, np.True_, "1e-6", None, torch.tensor(1e-6))
    ),
    *((op, dict(inner_eps=-1.0), ValueError, "inner_eps must") for op in ("gated_mlp", "gated_mlp_block")),
    *(("attention_block", dict(num_heads=n), TypeError, "num_heads must be an integer") for n in (1.0, True, None)),
    ("attention_block", dict(num_heads=5), ValueError, "qkv_weight must"),
    *((op, *row) for op in BLOCKS for row in OF_BLOCKS),
    *(
        (op, dict(activation=wrong), ValueError, "activation must be one of 'gelu', ")
        for op in ("linear_gelu", "mlp", "mlp_block", "gated_mlp", "gated_mlp_block")
        for wrong in ("relu", "GELU", 1, ["gelu"])
    ),
    *(
        (op, dict(activation=a, approximate=b), ValueError, f"approximate='{b}' means .*activation='{a}' is given too")
        for op in ("linear_gelu", "mlp", "mlp_block")
        for a, b in (("gelu", "tanh"), ("gelu_tanh", "none"), ("silu", "tanh"))
    ),
    ("linear_gelu", dict(approximate="erf"), ValueError, "approximate must be 'none'"),
    ("gated_mlp", dict(inner_norm_weight=None), ValueError, "inner_norm_bias needs an inner_norm_weight"),
    ("linear_gelu", dict(weight=TOO_MANY), ValueError, rf"weight must be \(\*, {D}\), got \(40, 12\)"),
    ("mlp", dict(fc2_weight=torch.zeros(D, 7)), ValueError, r"fc2_weight must be \(\*, 40\)"),
    ("gated_mlp", dict(gate_weight=TOO_MANY), ValueError, r"gate_weight must be \(40, 48\), got \(40, 12\)"),
    ("gated_mlp_block", dict(gate_weight=torch.zeros(HIDDEN, D).half()), TypeError, "gate_weight must be torch.fl"),
    ("layer_norm", dict(weight=torch.zeros(D).half()), TypeError, "weight must be torch.float32 like x, got torch.fl"),
    ("layer_norm", dict(x=torch.tensor(1.0)), ValueError, r"x must be \(\.\.\., D\), got \(\)"),
    ("mlp_block", dict(x=torch.zeros(D), drop_path=None), ValueError, r"x must be \(B, N, D\) or \(tokens, D\), got"),
    ("attention_block", dict(x=torch.zeros(N, D)), ValueError, r"x must be \(B, N, D\), or packed with offsets"),
    ("patch_embed", dict(images=torch.zeros(B, 3, 9, 6)), ValueError, "multiples of the patch 4 x 2, got 9 x 6"),
    ("patch_embed", dict(images=torch.zeros(B, 1, 8, 6)), ValueError, r"images must be \(\*, 3, \*, \*\)"),
    ("patch_embed", dict(images=torch.zeros(B, 3, 8, 6).int()), TypeError, "floating point or uint8, got torch.int32"),
    ("patch_embed", dict(pos_embed=torch.zeros(1, 7, D)), ValueError, "must have 8 or 6 positions, got 7"),
    ("patch_embed", dict(weight=torch.zeros(D, 3, 0, 0)), ValueError, "weight must have patches of at least 1 x 1"),
    *(("attention", *row) for row in OF_ATTENTION),
    *(("patch_embed", IMAGES | {key: v}, e, f"{key} {text}") for key in ("mean", "std") for v, e, text in OF_MEANS),
    *(
        ("patch_embed", IMAGES | dict(std=std), ValueError, "std must be from 1e-06 to 1e.06, got")
        for std in ((0.1, 0.0, 0.1), -0.1, 1e-40)
    ),
]


@pytest.mark.quick(96)
@pytest.mark.parametrize("op, change, error, message", TABLE, ids=[f"{row[0]}-{row[3][:30]}" for row in TABLE])
def test_what_means_nothing_is_refused(op, change, error, message, mode):
    with pytest.raises(error, match=f"^{op}: .*{message}"):
        call(op, **change)
    if op == "patch_embed" and ("mean" in change or "std" in change):
        sizes = dict(img_size=8, patch_size=4, embed_dim=D, depth=1, num_heads=1)
        wrong = {key: value for key, value in change.items() if key != "images"}
        with pytest.raises(InputError, match=f"^ViT: {next(iter(wrong))} must be "):
            ViT(**sizes, **wrong)


OF_PACKED = [
    (dict(offsets=PACKED["offsets"].float()), TypeError, "offsets must be int32 or int64, got torch.float32"),
    (dict(offsets=PACKED["offsets"][None]), ValueError, r"offsets must be \(S \+ 1,\), got \(1, 3\)"),
    (dict(offsets=PACKED["offsets"] - 1), ValueError, r"offsets must rise from 0 to the 5 tokens, got \[-1, 1"),
    (dict(offsets=PACKED["offsets"][:-1]), ValueError, "offsets must rise from 0 to the 5 tokens"),
    (dict(offsets=torch.tensor([0, 3, 2, 5])), ValueError, "offsets must rise from 0"),
    (dict(offsets=[0, N]), TypeError, "offsets must be a tensor, got list"),
    (dict(longest=1.5), ValueError, "longest must be None or a whole number"),
    (dict(longest=-1), ValueError, "longest must be None or a whole number"),
    (dict(longest=2), ValueError, "longest must be at least the tokens of the longest sample, 3, got 2"),
    (dict(num_prefix=1), ValueError, "num_prefix is not for packed samples"),
    (dict(key_lengths=torch.tensor([3])), ValueError, "key_lengths is not for packed samples"),
    (dict(bias=torch.zeros(H, N, N)), ValueError, "bias is not for packed samples"),
    (dict(rope=(torch.zeros(4, 8), torch.zeros(4, 8))), ValueError, r"cos and sin must be \(5, 16\)"),
    (dict(x=torch.zeros(1, N, D)), ValueError, r"must be \(tokens, "),
    (dict(drop_path=torch.ones(3)), ValueError, r"drop_path must be \(5,\), got \(3,\)"),
]


@pytest.mark.parametrize("change, error, message", OF_PACKED, ids=[row[2][:40] for row in OF_PACKED])
@pytest.mark.parametrize("op", ["attention", "attention_block"])
def test_packed_samples_that_do_not_fit_are_refused(op, change, error, message):
    given = dict(qkv=torch.zeros(N, 3, H, 16))
    if op == "attention_block":
        acting = ("cos", "sin", "bias", "drop_path")
        given = {key: t for key, t in tensors(op).items() if key not in acting} | dict(x=torch.zeros(N, D), num_heads=H)
    elif "drop_path" in change:
        change, message = dict(qkv=torch.zeros(1, N, 3, H, 16)), r"qkv must be \(tokens, 3, H, Dh\), got \(1, 5"
    elif "x" in change:
        change, message = dict(qkv=given["qkv"][:, 0]), r"qkv must be \(tokens, 3, H, Dh\), got \(5, 3, 16"
    with pytest.raises(error, match=f"^{op}: .*{message}"):
        getattr(ops, op)(**given | PACKED | change)


def test_packed_images_and_jagged_tensors_that_do_not_fit_are_refused():
    images, weight = torch.zeros(N, 3, 4, 4), torch.zeros(8, 3, 2, 2)
    with pytest.raises(ValueError, match=r"with offsets images must be \(N, 3, 2, 2\), got \(5, 3, 4, 4\)"):
        ops.patch_embed(images, weight, None, offsets=PACKED["offsets"])
    with pytest.raises(ValueError, match=r"pos_embed must be \(5, 8\), got \(1, 5, 8\)"):
        ops.patch_embed(images[..., :2, :2], weight, None, None, torch.zeros(1, N, 8), offsets=PACKED["offsets"])
    nested = partial(torch.nested.nested_tensor, layout=torch.jagged)
    jagged = lambda *sizes: nested([torch.zeros(n, H, 16) for n in sizes])  # noqa: E731
    with pytest.raises(ValueError, match="jagged q, k and v must be alike"):
        ops.attention(jagged(3, 4), jagged(4, 3), jagged(4, 3))
    with pytest.raises(ValueError, match="bias is not for packed samples"):
        ops.attention(*[jagged(3, 4)] * 3, bias=torch.zeros(H, 4, 4))
    with pytest.raises(ValueError, match="must be jagged, all of them"):
        ops.attention(jagged(3, 4), jagged(3, 4).values(), jagged(3, 4).values())


def test_numbers_of_numpy_are_numbers(mode):
    """As eps, scale, num_heads and num_prefix, with the result of Python's numbers; an activation has one name."""
    attended = dict(cos=None, sin=None, bias=None)
    for op, given, ours, theirs in (
        *((op, {}, dict(eps=np.float32(0.5)), dict(eps=0.5)) for op in ("layer_norm", "rms_norm", "mlp_block")),
        ("gated_mlp_block", {}, dict(eps=np.int64(1)), dict(eps=1)),
        ("attention", attended, dict(scale=np.float32(0.25)), dict(scale=0.25)),
        ("attention", {}, dict(num_prefix=np.int64(1)), dict(num_prefix=1)),
        ("attention_block", attended, dict(num_heads=np.int64(H)), dict(num_heads=H)),
        *((op, {}, dict(approximate="none"), dict(activation="gelu")) for op in ("linear_gelu", "mlp", "mlp_block")),
        *((op, {}, dict(approximate="tanh"), dict(activation="gelu_tanh")) for op in ("linear_gelu", "mlp_block")),
    ):
        torch.manual_seed(0)
        given = tensors(op) | given
        assert torch.equal(*(OPERATIONS[NAMES[op]].function(**given | options) for options in (ours, theirs))), op


# Where no kernel runs


NO_PARAMETERS, NEEDS = dict(weight=None, bias=None), dict(drop_path=torch.ones(B, requires_grad=True))
UNCOVERED = [
    ("layer_norm", dict(x=torch.zeros(2, D).double()) | NO_PARAMETERS, "no kernel computes in torch.float64"),
    ("layer_norm", dict(x=torch.zeros(1, 8200)) | NO_PARAMETERS, "width above 8192"),
    *((op, NEEDS, "drop_path .*requires? a gradient|drop_path needs a") for op in ("linear_residual", *BLOCKS)),
    ("add_layer_norm", NEEDS, "drop_path .*requires? a gradient|drop_path needs a"),
    ("attention", dict.fromkeys("qkv", torch.zeros(1, 3, 1, 20)), "head size 20 is not one of 16, 24, ..., 128"),
    ("attention", dict(scale=-1.0), "scale -1.0 is not positive"),
    ("attention_block", dict(num_heads=4), "head size"),
    ("patch_embed", dict(images=torch.zeros(B, 3, 8, 6).double()), "no kernel reads torch.float64"),
]


@pytest.mark.parametrize("op, change, reason", UNCOVERED)
@interpreted
def test_what_no_kernel_covers_runs_unless_kernels_are_switched_on(op, change, reason):
    given = tensors(op) | change
    if op in ("attention", "attention_block"):
        given |= dict(cos=None, sin=None, bias=None)
    with ops.use_kernels("on"), pytest.raises(RuntimeError, match=f"^{op}: kernels are switched on, but .*{reason}"):
        OPERATIONS[NAMES[op]].function(**given)
    OPERATIONS[NAMES[op]].function(**given)


def test_kernels_on_raises_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    says = "layer_norm: kernels are switched on, but tensors on cpu need TRITON_INTERPRET=1"
    with ops.use_kernels("on"), pytest.raises(RuntimeError, match=says):
        ops.layer_norm(torch.randn(2, 8), None, None)


def test_an_uncovered_case_on_a_gpu_warns_once_and_raises_in_mode_on(monkeypatch):
    def on_gpu(dtype):
        return SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=dtype)

    wanted = dispatch.kernels_wanted
    monkeypatch.setattr(dispatch.tiles, "generation", lambda device: 90)
    monkeypatch.setattr(dispatch, "_warned", set())
    assert wanted("attention", on_gpu(torch.bfloat16))
    says = "vitfast attention: head size 20 is odd; plain PyTorch runs in its place"
    with pytest.warns(UserWarning, match=says) as seen:
        for _ in range(3):
            assert not wanted("attention", on_gpu(torch.bfloat16), "head size 20 is odd")
    assert len(seen) == 1
    with pytest.warns(UserWarning, match="no kernel computes in torch.float64"):
        assert not wanted("attention", on_gpu(torch.float64))
    says = "attention: kernels are switched on, but head size 20"
    with ops.use_kernels("on"), pytest.raises(RuntimeError, match=says):
        wanted("attention", on_gpu(torch.bfloat16), "head size 20 is odd")
    with ops.use_kernels("off"):
        assert not wanted("attention", on_gpu(torch.bfloat16))
    monkeypatch.setattr(dispatch.tiles, "generation", lambda device: 0)
    with pytest.warns(UserWarning, match="older than compute capability 8.0"):
        assert not wanted("layer_norm", on_gpu(torch.bfloat16))
