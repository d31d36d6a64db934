"""Softmax attention and its backward: o = softmax(scale q k^T) v and lse = log sum exp(scale q k^T).

q, k, v, o are (B, N, H, Dh). The kernels are flash attention (Dao et al., 2022), with the softmax in base 2 and the
logits never in memory, made for the short, odd sequences of vision (50, 197, 257, 577, 1370):

- forward, "single_pass" (forward_rows.py): every key and value of a head in one program, one softmax over whole rows
  without rescaling, several blocks of queries one after the other; "single_pass_tma": q and o by TMA descriptors;
- forward, "tiled" (forward_tiled.py): online softmax over blocks of keys;
- backward, "resident" (backward_resident.py): one program for a head of a short sample, with all of Q, dO and dQ in
  it: 5 matrix products; "specialized" (backward_specialized.py), a candidate: the same by warpgroups with roles;
- backward, "tiled" (backward_tiled.py): one kernel for dQ, which also writes delta = rowsum(o do), and one for dK and
  dV: 7 matrix products.

No atomics are needed, because each sum is computed by one program. A head is one or two power-of-two chunks (80 =
64 + 16), so that it is not padded to the next power of two where that wastes much. configs.py chooses the kernel.
"""

import functools
import importlib
import math
import sys

import torch
import triton
from torch import Tensor

from .. import tiles
from ..dependent import dependent_launch
from ..launch import INTERPRETED, cdiv, fp32_precision, launch
from ..rows import multiprocessors
from ..tiles import batch_invariant
from . import configs  # noqa: F401 (it registers them)
from .backward_resident import launch_resident, serves
from .backward_tiled import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel
from .common import Head, describable, head_box, tiles_of
from .forward_rows import _attention_fwd_short_kernel
from .forward_tiled import _attention_fwd_tiled_kernel
from .options import PLAIN, AttentionOptions, as_packed
from .terms import _bias_bwd_kernel, _rope_bwd_kernel

HEAD_SIZES = tuple(range(16, 129, 8))
WITH_ROLES = range(193, 208)  # tokens that "specialized" takes, with heads of 64
# From this many (batch, head) pairs on, one program takes every query of its head: that fills ~132 multiprocessors,
# with two programs each, twice.
MANY_HEADS = 512


@functools.cache
def head_chunks(head_dim: int) -> tuple[int, int]:
    """The power-of-two chunks of columns of a head: 64 -> (64, 0), 72 and 80 -> (64, 16), 96 -> (64, 32)."""
    size = triton.next_power_of_2(head_dim)
    half, rest = size // 2, max(16, triton.next_power_of_2(head_dim - size // 2))
    return (half, rest) if head_dim < size and half + rest < size else (size, 0)


@functools.cache
def key_blocks(n: int) -> dict[str, int]:
    """Cuts N <= 256 keys into one to three falling powers of two: 197 -> 128, 64, 16; 250 -> 256, 0, 0."""
    blocks, rest = [], n
    while rest > 0:
        size = max(16, triton.next_power_of_2(rest))
        if size > 16 and size != rest and len(blocks) < 2:
            size //= 2
        blocks.append(size)
        rest -= size
    whole = max(16, triton.next_power_of_2(n))
    blocks = [whole] if sum(blocks) >= whole else blocks
    return {f"KEYS{i}": blocks[i] if i < len(blocks) else 0 for i in range(3)}


@functools.cache
def last_block(n: int, block: int) -> int:
    """Size of the masked block after the whole ones: 577 tokens in blocks of 64 -> 16."""
    rest = n % block
    return max(16, triton.next_power_of_2(rest)) if rest else 0


@functools.cache
def attention_class(head_dim: int, tokens: int, suffix: str = "") -> str:
    """ "d80n256": the padded head size, tokens up to 64, 128, 256, 320 or "long"; AttentionOptions.suffix.

    Padded heads have "m" for "n", as in "d80m256", since masks take registers. Packed samples have "d80np", without the
    tokens, so that another number of tokens compiles no new kernel. "s" stands for so few samples that blocks of 64
    queries leave multiprocessors idle.
    """
    padded = sum(head_chunks(head_dim))
    longest = "" if suffix.endswith("p") else next((n for n in (64, 128, 256, 320) if tokens <= n), "long")
    return f"d{padded}{'n' if head_dim == padded else 'm'}{longest}{suffix}"


# Providers without rotary positions, and providers without a bias, key lengths and packed samples.
_NO_ROPE = ("resident", "specialized", "single_pass_tma")
_NO_MASK = ("single_pass", *_NO_ROPE)


def _lookup(
    op: str, q: Tensor, options: AttentionOptions = PLAIN, unfit: tuple[str, ...] = (), few: bool = False
) -> tiles.KernelConfig:
    suffix = options.suffix(q.shape[-1])
    without = unfit if not suffix else _NO_ROPE if suffix in ("r", "f") else _NO_MASK
    whole = op == "attention_fwd" and batch_invariant()  # the tokens of a padded sample depend on its neighbours
    tokens = sys.maxsize if whole else q.shape[1]
    return tiles.lookup(op, q, attention_class(q.shape[-1], tokens, suffix or "s" * few), without)


def _with_steps(table: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """The table, copied where its last stride is not 1, and its strides of B, H and rows.

    It is (rows, columns), (H, ...) or (B or 1, H or 1, ...). B or H has stride 0 where it is missing or of size 1.
    """
    table = table if table.stride(-1) == 1 else table.contiguous()
    shape, strides = ((1,) * (4 - table.dim()) + t for t in (tuple(table.shape), table.stride()))
    return table, (strides[0] if shape[0] > 1 else 0, strides[1] if shape[1] > 1 else 0, strides[2])


def _terms(options: AttentionOptions, HEAD: Head) -> dict:
    """The arguments `terms` and QK of the kernels."""
    rope, bias, QK = None, None, HEAD
    if options.cos is not None:
        cos, sin = options.cos, options.sin
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        (cos, steps), (sin, _) = _with_steps(cos), _with_steps(sin)
        rope, half = (cos, sin, steps, options.num_prefix), max(16, triton.next_power_of_2(HEAD.dim // 2))
        layout = "interleaved" if options.interleaved else "half"
        QK = HEAD._replace(first=half, second=half, rope_layout=layout, shared_pair_angle=cos.shape[-1] < HEAD.dim)
    if options.bias is not None:
        bias = _with_steps(options.bias)
    return dict(terms=(rope, bias, options.key_lengths), QK=QK)


def _arguments(scale: float, *tensors: Tensor, options: AttentionOptions = PLAIN) -> tuple[dict, list[tuple]]:
    """Sizes, scale and head, which every kernel takes; and (B, N, H, Dh) tensors with their strides.

    HEAD tells whether heads start at multiples of 8 elements: Triton itself sees multiples of 16 only, and would load
    heads of 72 or 88 one element at a time. Packed samples have 0 for N and B's stride, which differ between batches.
    """
    _, N, H, D = tensors[0].shape
    packed = options.offsets is not None
    pairs, misaligned, farthest, N = [], 0, 0, 0 if packed else N
    for x in tensors:
        strides = x.stride()[:3]
        strides = (0, *strides[1:]) if packed else strides
        pairs.append((x, strides))
        misaligned |= strides[0] | strides[1] | strides[2]
        farthest = max(farthest, (options.longest if packed else N) * strides[1])
    # Folding holds one more number: with it, kernels of packed samples spill on sm_100 (Triton 3.8 and 3.9).
    folds = tensors[0].element_size() == 2 and options.bias is None and not packed
    head = Head(D, *head_chunks(D), 1 if misaligned % 8 else 8, farthest >= 2**31, fp32_precision(), folds)
    return dict(N=N, H=H, scale=scale, HEAD=head), pairs


def _short_block(q: Tensor, block: int, options: AttentionOptions) -> int:
    """The rows of a short last block: 16 where at most 16 rows follow the whole blocks, else 0.

    For example, 197 tokens in blocks of 64 leave 5.
    With options, and in heads of two chunks, the last block stays whole: a second path makes such kernels spill.
    """
    whole = bool(options.suffix(q.shape[3]) or head_chunks(q.shape[3])[1])
    return 16 if 0 < q.shape[1] % block <= 16 < block and not whole else 0


def _last_keys(n: int, block: int, options: AttentionOptions) -> int:
    """`last_block` of the keys; `block` where the number of keys differs from sample to sample."""
    return last_block(n, block) if options.key_lengths is None and options.offsets is None else block


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    options: AttentionOptions = PLAIN,
    o: Tensor | None = None,
    few_rows: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns o (B, N, H, Dh) and lse (B, H, N), in fp32, of q, k, v (B, N, H, Dh); scale > 0.

    The last stride of each is 1. The result is written into the argument `o` where there is one. few_rows: the kernel
    runs among those of matmul/few_rows.py, in blocks that suit them.
    """
    B, N, H, D = q.shape
    # Packed samples may lie among longer ones, so samples of one size take the kernel of packed ones too.
    if batch_invariant() and q.numel() and options.offsets is None and options.bias is options.key_lengths is None:
        out, lse = attention_fwd(*(x.flatten(0, 1)[None] for x in (q, k, v)), scale, as_packed(options, q))
        out, lse = out.view(q.shape), lse.view(H, B, N).transpose(0, 1).contiguous()
        return out if o is None else o.copy_(out), lse
    o, lse = q.new_empty(q.shape) if o is None else o, q.new_empty(B, H, N, dtype=torch.float32)
    # With few heads a launch is short, and the descriptors cost more of the host's time than they save.
    boxes = B * H >= MANY_HEADS and describable(q) and describable(o) and not head_chunks(D)[1]
    idle = few_rows and B * H * cdiv(N, 64) < multiprocessors(q.device)
    config = _lookup("attention_fwd", q, options, () if boxes else ("single_pass_tma",), idle)
    common, pairs = _arguments(scale, q, k, v, o, options=options)
    common |= dict(zip("qkvo", pairs), lse_ptr=lse, **_terms(options, common["HEAD"]), **config.meta)
    common |= dependent_launch(q) if few_rows else dict(PDL=False)
    if config.provider.startswith("single_pass"):
        box = config["BLOCK_M"], common["HEAD"].first
        boxed = config.provider == "single_pass_tma"
        common["q_box"], common["o_box"] = (head_box(x, H, *box) if boxed else None for x in (q, o))
        blocks = cdiv(N, config["BLOCK_M"])
        per_program = blocks if B * H >= MANY_HEADS else 1
        grid, common["rope"] = (B * H * cdiv(blocks, max(1, per_program)),), common.pop("terms")[0]
        launch(_attention_fwd_short_kernel, grid, **common, **key_blocks(N), query_blocks=per_program)
    else:
        last = _last_keys(N, config["BLOCK_N"], options)
        count, packed = tiles_of(q, options.offsets, config["BLOCK_M"])
        launch(_attention_fwd_tiled_kernel, (count * H,), **common, **packed, LAST_N=last)
    return o, lse


def attention_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    scale: float,
    want_bias_grad: bool = False,
    options: AttentionOptions = PLAIN,
    unrotate: bool = True,
    as_qkv: bool = True,
) -> tuple[Tensor | tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Returns the gradients of q, k and v, contiguous, and the QKV bias's, (3 H Dh,) in fp32, or None.

    as_qkv: the first are one tensor dqkv (B, N, 3, H, Dh), else a tuple (dq, dk, dv). unrotate: False leaves dq and
    dk, and their sums in the bias's gradient, in the rotated frame, for `rope_bwd`.
    """
    B, N, H, D = q.shape
    unfit = () if D == 64 and N in WITH_ROLES and not INTERPRETED else ("specialized",)  # Gluon has no interpreter
    if not (as_qkv and serves(q, k, v, head_chunks(D))):
        unfit = "resident", "specialized"
    config = _lookup("attention_bwd", q, options, unfit)
    grads = q.new_empty(B, N, 3, H, D) if as_qkv else tuple(q.new_empty(q.shape) for _ in range(3))
    dq, dk, dv = grads.unbind(2) if as_qkv else grads
    if config.provider == "tiled":
        delta = torch.empty_like(lse)
        _, q_sums = attention_bwd_dq(q, k, v, o, lse, do, scale, dq, delta, want_bias_grad, options, unrotate)
        *_, kv_sums = attention_bwd_dkdv(q, k, v, lse, delta, do, scale, dk, dv, want_bias_grad, options, unrotate)
        return grads, torch.cat([q_sums, kv_sums]) if want_bias_grad else None
    sums = _sums(q, want_bias_grad, B, 3)
    common, (*inputs, grad) = _arguments(scale, q, k, v, o, do, dq)
    common |= dict(lse_ptr=lse, SUMS=want_bias_grad, **config.meta)
    run = launch_resident
    if config.provider == "specialized":  # imported late, because Gluon takes 0.2 s
        run = importlib.import_module(".backward_specialized", __package__).launch_specialized
    run(common, tuple(inputs), grad, sums)
    return grads, sums.sum(0).flatten() if want_bias_grad else None


def rope_bwd(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Unrotates dq and dk (B, N, H, Dh) in place; returns fp32 gradients of the shapes of cos and sin."""
    B, N, H, _ = q.shape
    config, cos = _lookup("rope_bwd", q), options.cos
    common, pairs = _arguments(1.0, q, k, dq, dk)
    terms = _terms(options, common["HEAD"])
    per_sample, per_head = cos.dim() == 4 and cos.shape[0] > 1, cos.dim() > 2 and cos.shape[-3] > 1
    samples = 1 if per_sample else max(1, cdiv(B, config["GROUPS"]))
    groups, size = cdiv(B, samples), tuple(cos.shape[-2:])
    shares = [torch.empty((groups, H, *size), dtype=torch.float32, device=q.device) for _ in range(2)]
    common = dict(N=N, H=H, inputs=tuple(pairs[:2]), grads=tuple(pairs[2:]), rope=terms["terms"][0], HEAD=terms["QK"])
    common["TABLE"] = terms["QK"]._replace(align=math.gcd(8, size[1]))
    common |= dict(dcos_ptr=shares[0], dsin_ptr=shares[1], B=B, samples=samples)
    meta = {name: value for name, value in config.meta.items() if name != "GROUPS"}
    launch(_rope_bwd_kernel, (cdiv(size[0], config["BLOCK_M"]) * groups * H,), **common, **meta)
    shared = [axis for axis, varies in ((0, per_sample), (1, per_head)) if not varies]
    dcos, dsin = ((share.sum(shared) if shared else share).reshape(cos.shape) for share in shares)
    return dcos, dsin


def bias_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float, options: AttentionOptions
) -> Tensor:
    """The gradient of options.bias, contiguous, shaped and typed like it."""
    (B, N, H, _), bias = q.shape, options.bias
    config = _lookup("attention_bwd_bias", q, options)
    groups = bias.shape[0] if bias.dim() == 4 else 1
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
    common, pairs = _arguments(scale, q, k, v, o, do)
    common |= dict(inputs=tuple(pairs), lse_ptr=lse, dbias_ptr=dbias, samples=B // max(1, groups))
    blocks = cdiv(N, config["BLOCK_M"]) * cdiv(N, config["BLOCK_N"])
    launch(_bias_bwd_kernel, (blocks * groups * H,), **common, **_terms(options, common["HEAD"]), **config.meta)
    return dbias


def _sums(q: Tensor, wanted: bool, *slots: int) -> Tensor:
    """An fp32 workspace (*slots, H, Dh) for the sums of each program; empty (0,) unless wanted."""
    return torch.empty((*slots, *q.shape[2:]) if wanted else (0,), dtype=torch.float32, device=q.device)


def attention_bwd_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    scale: float,
    dq: Tensor | None = None,
    delta: Tensor | None = None,
    want_sums: bool = False,
    options: AttentionOptions = PLAIN,
    unrotate: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """First half of the tiled backward: dq and, where wanted, its sums over B and N, (H Dh,) in fp32.

    It writes into `dq` (B, N, H, Dh) and `delta` (B, H, N) in fp32 where they are given. delta, the row sums of o * do,
    is read by attention_bwd_dkdv.
    """
    B, N, H, _ = q.shape
    dq = q.new_empty(q.shape) if dq is None else dq
    delta = torch.empty_like(lse) if delta is None else delta
    config = _lookup("attention_bwd_dq", q, options)
    count, packed = tiles_of(q, options.offsets, config["BLOCK_M"])
    sums = _sums(q, want_sums, count)
    common, (*inputs, dq_pair) = _arguments(scale, q, k, v, o, do, dq, options=options)
    common |= dict(inputs=tuple(inputs), dq=dq_pair, lse_ptr=lse, delta_ptr=delta, sums_ptr=sums, SUMS=want_sums)
    common |= dict(UNROTATE=unrotate, **packed, **_terms(options, common["HEAD"]))
    last = _last_keys(N, config["BLOCK_N"], options)
    short = _short_block(q, config["BLOCK_M"], options)
    launch(_attention_bwd_dq_kernel, (count * H,), **common, LAST_N=last, SHORT_M=short, **config.meta)
    return dq, sums.sum(0).flatten() if want_sums else None


def attention_bwd_dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    do: Tensor,
    scale: float,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    want_sums: bool = False,
    options: AttentionOptions = PLAIN,
    unrotate: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Second half of the tiled backward: dk, dv and, where wanted, their sums, (2 H Dh,) in fp32.

    delta (B, H, N) is what attention_bwd_dq writes. `dk` and `dv` (B, N, H, Dh; of equal strides) are written if given.
    """
    B, N, H, _ = q.shape
    dk, dv = (q.new_empty(q.shape) if grad is None else grad for grad in (dk, dv))
    config = _lookup("attention_bwd_dkdv", q, options)
    count, packed = tiles_of(q, options.offsets, config["BLOCK_N"])
    sums = _sums(q, want_sums, count, 2)
    common, pairs = _arguments(scale, q, k, v, do, dk, dv, options=options)
    common |= dict(inputs=tuple(pairs[:4]), grads=tuple(pairs[4:]), lse_ptr=lse, delta_ptr=delta, sums_ptr=sums)
    common |= dict(UNROTATE=unrotate, **packed, **_terms(options, common["HEAD"]))
    last = last_block(N, config["BLOCK_M"]) if options.offsets is None else config["BLOCK_M"]
    short = _short_block(q, config["BLOCK_N"], options)
    common |= dict(SUMS=want_sums, LAST_M=last, SHORT_N=short, **config.meta)
    launch(_attention_bwd_dkdv_kernel, (count * H,), **common)
    return dk, dv, sums.sum(0).flatten() if want_sums else None
