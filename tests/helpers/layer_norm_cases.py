"""Inputs of LayerNorm operations, their outputs and gradients, and the judgement by float64."""

import torch

from vitfast import ops, ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Error against float64 at most twice PyTorch's in the same dtype, plus this: PyTorch may round luckily on few elements.
# fp32: some 30 ulp of 1, the noise of sums in another order; fp16: one ulp of values up to 4.
# bf16: one rounding, 2^-8, of the largest value.
TOL = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 4e-3}


DTYPES = list(TOL)


HALVES = DTYPES[1:]


NAMES = ("x", "residual", "weight", "bias", "layer_scale")


def rand(*shape, dtype=torch.float32, std=1.0, mean=0.0):
    return (torch.randn(*shape, device=DEVICE) * std + mean).to(dtype)


def inputs(shape, dtype, weight=True, bias=True, layer_scale=False, drop_path=False, residual=True):
    D = shape[-1]
    return dict(
        x=rand(*shape, dtype=dtype),
        residual=rand(*shape, dtype=dtype) if residual else None,
        weight=rand(D, dtype=dtype, std=0.3, mean=1) if weight else None,
        bias=rand(D, dtype=dtype) if bias else None,
        layer_scale=rand(D) if layer_scale else None,
        drop_path=torch.tensor([0.0, 1.25], device=DEVICE)[torch.arange(shape[0], device=DEVICE) % 2]
        if drop_path
        else None,
    )


def run(module, given, upstream, frozen=(), double=False):
    """Outputs and gradients, by name, of add_layer_norm (layer_norm without a residual)."""
    leaves = {}
    for name, t in given.items():
        if t is not None:
            t = t.detach().double() if double else t.detach()
            leaves[name] = t.requires_grad_(name in NAMES and name not in frozen) if name in NAMES else t
    arguments = {name: leaves.get(name) for name in given}
    x, residual, weight, bias = (arguments.pop(name) for name in NAMES[:4])
    if residual is None:
        outputs = (module.layer_norm(x, weight, bias, 1e-5),)
    else:
        outputs = module.add_layer_norm(x, residual, weight, bias, 1e-5, **arguments)
    pairs = [(out, g.to(out.dtype)) for out, g in zip(outputs, upstream) if out.requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])
    results = {f"out{i}": out.detach() for i, out in enumerate(outputs)}
    return results | {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}


def check(given, upstream, dtype, frozen=()):
    actual = run(ops, given, upstream, frozen)
    pytorch = run(ref, given, upstream, frozen)
    truth = run(ref, given, upstream, frozen, double=True)
    assert actual.keys() == truth.keys()
    compare(actual, pytorch, truth, dtype)


def compare(actual, pytorch, truth, dtype):
    for name, expected in truth.items():
        assert actual[name].dtype == pytorch[name].dtype and actual[name].shape == expected.shape, name
        assert actual[name].is_contiguous() or not name.startswith("out"), name
        if expected.numel() == 0:
            continue
        error, allowed = ((t[name].double() - expected).abs().max() for t in (actual, pytorch))
        # A column sum's error grows with its terms; so does what the atol is to cover.
        scale = max(1.0, expected.abs().max().item())
        # On a CPU PyTorch sums columns in 16 bit: what that costs, up to 4% in bf16, excuses nothing.
        if dtype != torch.float32:
            allowed = min(allowed, torch.finfo(dtype).eps * scale)
        assert error <= 2 * allowed + TOL[dtype] * scale, f"{name}: error {error:.2e}, PyTorch's {allowed:.2e}"


def upstream_of(shape, dtype):
    return rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
