"""Linear layers and MLPs, interpreted: our kernels for every product, inputs, float64 as the judge."""

import contextlib

import torch

from vitfast import ops, ref
from vitfast.kernels import tiles

# Added to twice PyTorch's own error. fp32: sums in another order. fp16: PyTorch keeps fp32 between product, GELU and
# residual in places where the kernels round what they store, and the other way round: one rounding (2^-11) of values
# up to about 4. bf16: one rounding (2^-8) of the largest value.
TOL = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-3}


DTYPES = list(TOL)


HALVES = DTYPES[1:]


CUBLAS = ("linear_fwd", "input_grad", "weight_grad")  # left to cuBLAS by default: here their kernels must run


PRODUCTS = (*CUBLAS, "linear_gelu_fwd", "linear_residual_fwd", "dgelu_matmul", "gated_linear_fwd", "dgated_matmul")
BY_NAME = ("layer_scale", "drop_path", "inner_norm_weight", "inner_norm_bias")


@contextlib.contextmanager
def all_triton():
    """Kernels on, also in place of cuBLAS, with 16-bit tiles and fewer programs: each costs time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ops.use_kernels("on"))
        for op in PRODUCTS:
            half = torch.empty(0, dtype=torch.float16)
            choices = [tiles.lookup(op, half, "64x64"), *tiles.candidates(op, half, "64x64")]
            found = next(tile for tile in choices if tile.provider == "triton")
            blocks = dict(found.blocks) | (dict(SPLIT_K=2) if op == "weight_grad" else {})
            stack.enter_context(tiles.override(op, tiles.tile(found.num_warps, found.num_stages, **blocks)))
        stack.enter_context(tiles.override("weight_grad_sum", tiles.tile(BLOCK_N=32, BLOCK_K=128)))
        stack.enter_context(tiles.override("column_sums", tiles.tile(BLOCK_P=16, BLOCK_D=128)))
        yield


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


def run(op, values: dict, dtype: torch.dtype, upstream: torch.Tensor, frozen=(), **kwargs) -> dict:
    """Output and gradients of `op` on leaves of one dtype."""
    leaves = {k: None if v is None else v.detach().to(dtype).requires_grad_(k not in frozen) for k, v in values.items()}
    factors = {k: leaves.pop(k) for k in BY_NAME if k in leaves}
    out = op(*leaves.values(), **factors, **kwargs)
    out.backward(upstream.to(dtype))
    return {"out": out.detach()} | {
        f"d{k}": v.grad for k, v in (leaves | factors).items() if v is not None and k not in frozen
    }


def compare(op, values: dict, dtype: torch.dtype, upstream: torch.Tensor, frozen=(), **kwargs) -> None:
    """Each largest error is at most twice PyTorch's in the same dtype, plus TOL of the result's scale."""
    values = {k: None if v is None else v.to(dtype).double() for k, v in values.items()}
    upstream = upstream.to(dtype).double()
    plain = getattr(ref, op.__name__)
    truth, torch_own = (run(plain, values, d, upstream, frozen, **kwargs) for d in (torch.float64, dtype))
    with all_triton():
        actual = run(op, values, dtype, upstream, frozen, **kwargs)
    assert actual.keys() == truth.keys()
    for name, expected in truth.items():
        value = actual[name]
        assert value.dtype == dtype and value.shape == expected.shape and value.is_contiguous(), name
        if expected.numel():
            error, own = ((v.double() - expected).abs().max().item() for v in (value, torch_own[name]))
            scale = max(1.0, expected.abs().max().item())
            assert error <= 2 * own + TOL[dtype] * scale, f"{name}: error {error:.3g}, PyTorch's own {own:.3g}"


def layer(lead, k, n, bias=True) -> dict:
    return dict(x=rand(*lead, k), weight=rand(n, k, scale=k**-0.5), bias=rand(n) if bias else None)


def two_layers(lead, k, f, d, bias=True) -> dict:
    fc1, fc2 = layer(lead, k, f, bias), layer((1,), f, d, bias)
    return dict(x=fc1["x"], w1=fc1["weight"], b1=fc1["bias"], w2=fc2["weight"], b2=fc2["bias"])
