"""Algorithms for PyTorch's operations in which the bits of a sample do not depend on its batch.

They are registered before PyTorch's kernels for CPU and CUDA while batch_invariant is on in some thread, and act there:

- a product takes its rows in blocks of ROWS, filled up with zeros, or on CUDA runs our kernel of linear layers;
- a convolution of patches is such a product; other convolutions, attention, norms over an image, pooling and
  resampling run sample by sample, each on a fresh copy, so that a library meets one shape and one alignment;
- a sum over a dimension adds its upper half to its lower half until one is left, so zeros at the end change nothing;
- on a CPU, functions that PyTorch computes by vectors, and by other code where elements do not fill one (GELU, SiLU),
  run on whole vectors, in chunks that PyTorch does not divide among threads.

LayerNorm and softmax over the last dimension stay PyTorch's, which compute each row by itself.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from ..kernels.launch import cdiv
from ..kernels.tiles import batch_invariant
from .dispatch import NO_TRITON, unsupported_reason

if NO_TRITON is None:
    from ..kernels.matmul.linear import linear

ROWS = 32  # in a block of a product
TRIALS = 8  # blocks of equal rows
ALIGNMENT = 64  # bytes; rows begin at multiples of it, because elsewhere MKL sums in another order
CHUNK = 1 << 14  # elements; PyTorch divides 2^15 and more among threads
VECTORS = 128  # elements, whole vectors of every CPU and dtype
FUSED = "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"  # PyTorch's attentions


class Call:
    """A call of one of PyTorch's operations: its arguments, by name, and `run`, PyTorch's own kernel."""

    def __init__(self, name: str, theirs, keys, arguments: dict):
        self.name, self.theirs, self.keys, self.arguments = name, theirs, keys, arguments

    def __getitem__(self, name: str):
        return self.arguments[name]

    def run(self, /, **changed):
        return self.theirs.call_boxed(self.keys, **(self.arguments | changed))


def _put_before(library: Library, name: str, key: str, ours: Callable) -> None:
    """Registers ours(call) for aten::name and a key; PyTorch's kernel runs unless batch_invariant().

    Nothing is registered in a PyTorch that has no kernel for the key, as one without CUDA.
    """
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    try:  # the code of a composed operation is the same on every device
        theirs = torch.library.get_kernel(operation, "CPU" if key == "CompositeImplicitAutograd" else key)
    except RuntimeError:
        return
    names = [argument.name for argument in operation._schema.arguments]
    defaults = {a.name: a.default_value for a in operation._schema.arguments if a.has_default_value()}

    def run(keys, *args, **kwargs):
        if not batch_invariant():
            return theirs.call_boxed(keys, *args, **kwargs)
        return ours(Call(name, theirs, keys, defaults | dict(zip(names, args)) | kwargs))

    library.impl(name, run, key, with_keyset=True)


def kernel_runs(a: Tensor, *others: Tensor) -> bool:
    """Whether our kernel computes a product of these tensors."""
    return a.is_cuda and unsupported_reason(a, None) is None and all(x.dtype == a.dtype for x in others)


def _by_kernel(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:  # a b + bias
    a, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b.t()))
    return linear(a, weight, bias)


_alike: dict[tuple, bool] = {}


def _rows_are_alike(name: str, run, b: Tensor) -> bool:
    """Whether run(block, b) gives equal rows for equal rows of a block; tried once for each kind of b."""
    kind = name, b.dtype, b.device, b.shape, b.stride(), torch.get_num_threads()
    if kind not in _alike:
        numbers = torch.arange(b.numel(), dtype=torch.float32, device=b.device).sin_()
        other = torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device=b.device).copy_(numbers.view(b.shape))
        # Sums in two orders may round alike, so several rows are tried.
        blocks = [run(row.to(b.dtype).repeat(ROWS, 1), other) for row in numbers.view(-1, len(b))[:TRIALS]]
        _alike[kind] = all(bool(((block == block[:1]) | block.isnan()).all()) for block in blocks)
    return _alike[kind]


def _product(call: Call, a: Tensor, b: Tensor, run) -> Tensor:
    """a (M, K) b (K, N) by run(block, b) of ROWS rows of a, or of one if equal rows give unequal ones.

    K and N are filled up with zeros, so that every row of the block, of b and of the result is aligned.
    """
    (M, K), N, step = a.shape, b.shape[1], ALIGNMENT // a.element_size()
    rows = a.new_zeros(cdiv(M, ROWS) * ROWS, K + -K % step)
    rows[:M, :K] = a
    if K % step or N % step:
        b = F.pad(b, (0, -N % step, 0, -K % step))
    elif b.data_ptr() % ALIGNMENT or 1 not in b.stride():
        b = b.clone(memory_format=torch.contiguous_format)
    size = ROWS if _rows_are_alike(call.name, run, b) else 1
    return torch.cat([run(block, b) for block in rows.split(size)])[:M, :N].contiguous()


def mm(call: Call) -> Tensor:
    a, b = call["self"], call["mat2"]
    if not a.is_floating_point() or not a.numel() * b.numel():
        return call.run()
    if kernel_runs(a, b):
        return _by_kernel(a, b)
    return _product(call, a, b, lambda block, b: call.run(self=block, mat2=b))


def addmm(call: Call) -> Tensor:
    bias, a, b, plain = call["self"], call["mat1"], call["mat2"], call["beta"] == call["alpha"] == 1
    if not a.is_floating_point() or not a.numel() * b.numel():
        return call.run()
    if bias.dim() > 1 and len(bias) > 1 or not plain:
        product = torch.mm(a, b) * call["alpha"]
        return product if call["beta"] == 0 else product + call["beta"] * bias
    if kernel_runs(a, b, bias):
        return _by_kernel(a, b, bias.flatten().expand(b.shape[1]))
    bias = F.pad(bias.flatten().expand(b.shape[1]), (0, -b.shape[1] % (ALIGNMENT // a.element_size())))
    return _product(call, a, b, lambda block, b: call.run(self=bias, mat1=block, mat2=b))


def bmm(call: Call) -> Tensor:
    pairs = zip(call["self"], call["mat2"].contiguous())
    return torch.stack([torch.mm(a, b) for a, b in pairs]) if len(call["self"]) else call.run()


def baddbmm(call: Call) -> Tensor:
    product = torch.bmm(call["batch1"], call["batch2"]) * call["alpha"]
    return product if call["beta"] == 0 else product + call["beta"] * call["self"]


def contiguous(*names: str):
    """An algorithm that makes `names` contiguous, on whose strides PyTorch's composition depends."""
    return lambda call: call.run(**{name: call[name].contiguous() for name in names if call[name].dim() > 2})


def mv(call: Call) -> Tensor:
    return torch.mm(call["self"], call["vec"][:, None])[:, 0]


def convolution(call: Call) -> Tensor:
    """One product for patches that share no pixels; other convolutions run sample by sample."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    sides, apart = list(weight.shape[2:]), not any(call["padding"]) and not call["transposed"] and call["groups"] == 1
    if not apart or list(call["stride"]) != sides or any(step != 1 for step in call["dilation"]):
        return _sample_by_sample("input")(call)
    grid = [n // side for n, side in zip(x.shape[2:], sides)]
    for i, (n, side) in reversed(list(enumerate(zip(grid, sides), 2))):
        x = x.narrow(i, 0, n * side).unflatten(i, (n, side))
    axes = range(len(sides))  # (B, C, n, p, m, q, ...) -> (B, n, m, ..., C, p, q, ...)
    x = x.permute(0, *(2 + 2 * i for i in axes), 1, *(3 + 2 * i for i in axes)).reshape(-1, weight[0].numel())
    out = F.linear(x, weight.flatten(1), bias).unflatten(0, (len(call["input"]), *grid))
    return out.movedim(-1, 1).contiguous()


def _sample_by_sample(*names: str, outputs: int = 1, **changed):
    """An algorithm that runs by samples, along axis 0 of the arguments `names` and first `outputs`."""

    def by_sample(call: Call):
        tensors = {name: call[name] for name in names if call.arguments.get(name) is not None}
        first = next(iter(tensors.values()))
        count = len(first)
        if not count or call.arguments.get("training"):
            return call.run()

        def copy(x: Tensor, i: int) -> Tensor:
            shared = len(x) != count or x.dim() < first.dim()
            return (x if shared else x[i : i + 1]).clone(memory_format=torch.contiguous_format)

        samples = [call.run(**{name: copy(x, i) for name, x in tensors.items()}, **changed) for i in range(count)]
        if isinstance(samples[0], Tensor):
            return torch.cat(samples)
        each = list(zip(*samples))[:outputs]
        joined = (torch.cat(xs) if xs[0] is not None and xs[0].numel() else xs[0] for xs in each)
        return *joined, *samples[0][outputs:]

    return by_sample


_QKV = "query", "key", "value"
_attention = _sample_by_sample(*_QKV, "attn_mask", "attn_bias", outputs=2)
_encoder = _sample_by_sample("src", *_QKV, outputs=2)
_image = _sample_by_sample("self")


def sdp_choice(call: Call) -> int:
    """PyTorch's choice of an attention kernel, made for the first sample alone."""
    mask = call["attn_mask"]
    mask = mask[:1] if mask is not None and mask.dim() == 4 else mask
    return call.run(**{name: call[name][:1] for name in _QKV}, attn_mask=mask)


def encoder(call: Call):
    """PyTorch's fused kernels of nn.TransformerEncoder and nn.MultiheadAttention, by samples."""
    if call["mask"] is not None:
        what = "nn.MultiheadAttention with a mask in evaluation"
        raise NotImplementedError(f"batch_invariant: {what}; torch.backends.mha.set_fastpath_enabled(False) helps")
    return _encoder(call)


def tree_sum(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """x summed over dims, in fp32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)) + 0.0  # a copy without -0.0, to which an added zero gives 0.0
    for dim in dims:
        while (n := x.shape[dim]) > 1:
            half = 1 << (n - 1).bit_length() - 1
            x.narrow(dim, 0, n - half).add_(x.narrow(dim, half, n - half))
            x = x.narrow(dim, 0, half)
    return (x if keepdim else x.squeeze(dims)).clone()


def _summing(function):
    """The algorithm of an operation that sums: function(call, x, total, count), count elements per sum.

    total(x, keepdim) sums x over the call's dimensions. If these are all, or x is integers, PyTorch's own kernel runs.
    """

    def algorithm(call: Call):
        x, dims = call["self"], call["dim"]
        dims = [dims] if isinstance(dims, int) else dims
        if not dims or len(dims) == x.dim() or not x.is_floating_point() or not x.numel():
            return call.run()
        dims = [dim % x.dim() for dim in dims]
        total = lambda x, keepdim=call["keepdim"]: tree_sum(x, dims, keepdim)  # noqa: E731
        statistics = function(call, x, total, torch.Size(x.shape[dim] for dim in dims).numel())
        dtype = call.arguments.get("dtype") or x.dtype
        return statistics.to(dtype) if isinstance(statistics, Tensor) else tuple(each.to(dtype) for each in statistics)

    return algorithm


def _variance(call: Call, x: Tensor, total, count: int) -> tuple[Tensor, Tensor]:
    """Returns the variance and the mean."""
    middle = total(x, True) / count
    freedom = max(0, count - (1 if call["correction"] is None else call["correction"]))
    var = total((x.to(middle.dtype) - middle).square()) / freedom
    return var, middle.view_as(var)


@_summing
def _euclidean(call: Call, x: Tensor, total, count: int) -> Tensor:
    return total(x.to(torch.promote_types(x.dtype, torch.float32)).square()).sqrt()


def softmax(call: Call) -> Tensor:
    rows = call["self"].movedim(call["dim"], -1).contiguous()
    return call.run(self=rows, dim=-1).movedim(-1, call["dim"])


def on_vectors(call: Call) -> Tensor:
    name = "self" if isinstance(call["self"], Tensor) else "exponent"
    x = call[name]
    filled = F.pad(x.flatten(), (0, -x.numel() % VECTORS), value=1.0)
    return torch.cat([call.run(**{name: chunk}) for chunk in filled.split(CHUNK)])[: x.numel()].view(x.shape)


def glu(call: Call) -> Tensor:
    x, gate = call["self"].chunk(2, call["dim"])
    work = torch.promote_types(x.dtype, torch.float32)
    return (x.to(work) * torch.sigmoid(gate.to(work))).to(x.dtype)


ALGORITHMS = {
    **{function.__name__: function for function in (mm, addmm, bmm, baddbmm, mv, convolution, glu)},
    "_fused_sdp_choice": sdp_choice,
    **{f"_scaled_dot_product_{kind}": _attention for kind in FUSED},
    **dict.fromkeys(("_native_multi_head_attention", "_transformer_encoder_layer_fwd"), encoder),
    "native_group_norm": _sample_by_sample("input", outputs=3, N=1),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), _sample_by_sample("input")),
    **dict.fromkeys(("_adaptive_avg_pool2d", "avg_pool2d"), _image),
    **{f"{aa}upsample_{kind}2d{aa and '_aa'}": _image for aa in ("", "_") for kind in ("bilinear", "bicubic")},
    "sum.dim_IntList": _summing(lambda call, x, total, count: total(x)),
    "mean.dim": _summing(lambda call, x, total, count: total(x) / count),
    "var.correction": _summing(lambda *arguments: _variance(*arguments)[0]),
    "std.correction": _summing(lambda *arguments: _variance(*arguments)[0].sqrt()),
    "var_mean.correction": _summing(_variance),
    "linalg_vector_norm": lambda call: _euclidean(call) if call["ord"] == 2 else call.run(),
    "_softmax": softmax,
}
COMPOSED = {"linear": contiguous("input"), "matmul": contiguous("self", "other")}
ON_CPU = "gelu silu sigmoid mish elu softplus exp2 rsqrt pow.Scalar pow.Tensor_Scalar"


_library: Library | None = None
_stance = None  # of torch.compile; leaving it restores the one before


def install() -> None:
    """Puts the algorithms before PyTorch's kernels, and has compiled functions run in eager mode."""
    global _library, _stance
    if _library is not None:
        return
    _library = Library("aten", "IMPL")
    on_cpu = ALGORITHMS | dict.fromkeys(ON_CPU.split(), on_vectors)
    for key, algorithms in {"CPU": on_cpu, "CUDA": ALGORITHMS, "CompositeImplicitAutograd": COMPOSED}.items():
        for name, algorithm in algorithms.items():
            _put_before(_library, name, key, algorithm)
    _stance = torch.compiler.set_stance("force_eager")


def remove() -> None:
    """Undoes `install`."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
        _stance.__exit__(None, None, None)
