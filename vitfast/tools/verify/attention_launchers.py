"""Launchers of attention (plain, rotary, packed), and of the parts of its backward."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.attention import launchers as attention
from ...kernels.attention.options import PLAIN, AttentionOptions
from ...ops import reference as ref
from .draw import Draw, Sizes
from .launcher import Launcher, gradients, wide

PREFIX = 1  # tokens that rotary positions do not rotate


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """(o, lse); lse is +inf for a query that sees no key, as in the kernels."""
    if options.offsets is not None:
        return _each_sample(q, k, v, scale, options)
    lse = ref.attention_logits(q.to(wide(q)), k.to(wide(k)), scale=scale, **options.keywords).logsumexp(-1)
    return ref.attention(q, k, v, scale=scale, **options.keywords), lse.where(lse > -torch.inf, torch.inf)


def _each_sample(q, k, v, scale: float, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """`attention_formula` of packed samples, one after the other; q, k, v (1, tokens, H, Dh)."""
    if options.offsets.is_meta:  # only shapes matter
        return torch.empty_like(q), q.new_empty(1, q.shape[2], q.shape[1], dtype=wide(q))
    found, ends = [], options.offsets.tolist()
    for first, end in zip(ends, ends[1:]):
        tables = (None if table is None else table[first:end] for table in options[:2])
        own = AttentionOptions(*tables, interleaved=options.interleaved)
        found.append(attention_formula(*(x[:, first:end] for x in (q, k, v)), scale, own))
    o, lse = zip(*found)
    return torch.cat(o, 1), torch.cat(lse, 2)


def attention_gradients(q, k, v, o, lse, do: Tensor, scale: float, options=PLAIN) -> tuple[Tensor, ...]:
    """dq, dk and dv."""
    return gradients(lambda *t: attention_formula(*t, scale, options)[0], (q, k, v), do)


def _rotary(t: Draw, s: Sizes, tokens: int, **more) -> AttentionOptions:
    """Rotation by random angles, one for both columns of a pair, in fp32; more: the other options."""
    angles = t.values(tokens, s.head // 2, dtype=torch.float32, scale=3.0)
    return AttentionOptions(angles.cos(), angles.sin(), **more)


def for_backward(t: Draw, q: Tensor, k: Tensor, v: Tensor, scale: float, options=PLAIN) -> tuple[Tensor, ...]:
    """The inputs of a backward: q, k, v, o, lse and do."""
    return q, k, v, *attention_formula(q, k, v, scale, options), t.values(*q.shape)


def attentions(s: Sizes) -> dict[str, Launcher]:
    """The launchers of the forward and backward of each kind of attention, and of the backward's parts."""
    scale, found = s.head**-0.5, {}
    packed = lambda t: dict(offsets=t.offsets(2 * s.batch, s.rows), longest=s.rows)  # noqa: E731
    for name, options in {
        "": lambda t: PLAIN,
        ", rotary": lambda t: _rotary(t, s, s.tokens - PREFIX, num_prefix=PREFIX),
        ", packed": lambda t: AttentionOptions(**packed(t)),
        ", packed, rotary": lambda t: _rotary(t, s, s.rows, **packed(t)),
    }.items():
        both = pair(functools.partial(qkv, s=s, packed="packed" in name), scale, options)
        found[f"attention{name}"], found[f"attention backward{name}"] = both
    return found | _parts(s)


def qkv(t: Draw, s: Sizes, packed: bool = False) -> tuple[Tensor, ...]:
    """q, k and v as slices of one tensor, each (B, N, H, Dh), or (1, tokens, H, Dh) for packed samples."""
    lead = (1, s.rows) if packed else (s.batch, s.tokens)
    return t.values(*lead, 3, s.heads, s.head).unbind(2)


def pair(
    qkv: Callable[[Draw], tuple], scale: float, options: Callable[[Draw], AttentionOptions]
) -> tuple[Launcher, Launcher]:
    """(forward, backward), with q, k and v as slices of one tensor, and a gradient of the bias."""

    def make_backward(t: Draw) -> tuple:
        drawn = options(t)
        return *for_backward(t, *qkv(t), scale, drawn), drawn

    def backward_formula(*t):
        dqkv = torch.stack(attention_gradients(*t[:-1], scale, t[-1]), 2)
        return dqkv, dqkv.sum((0, 1), dtype=wide(dqkv)).flatten()

    forward = Launcher(
        lambda t: (*qkv(t), options(t)),
        lambda q, k, v, drawn: attention.attention_fwd(q, k, v, scale, drawn),
        lambda q, k, v, drawn: attention_formula(q, k, v, scale, drawn),
    )
    return forward, Launcher(
        make_backward,
        lambda *t: attention.attention_bwd(*t[:-1], scale, True, t[-1], as_qkv=True),
        backward_formula,
    )


def _parts(s: Sizes) -> dict[str, Launcher]:
    """The tiled backward's two kernels, and the gradients of a bias and of tables that are learned."""
    scale = s.head**-0.5

    def with_delta(t: Draw) -> tuple:
        q, k, v, o, lse, do = for_backward(t, *qkv(t, s), scale)
        delta = (o.to(wide(o)) * do.to(wide(o))).sum(-1).transpose(1, 2).contiguous()
        return q, k, v, lse, delta, do

    def with_bias(t: Draw) -> tuple:
        options = AttentionOptions(bias=t.values(s.heads, s.tokens, s.tokens))
        return *for_backward(t, *qkv(t, s), scale, options), options

    def bias_formula(q, k, v, o, lse, do, options):
        return gradients(lambda bias: ref.attention(q, k, v, scale=scale, bias=bias), (options.bias,), do)[0]

    def rope_bwd(q, k, dq, dk, options):
        dq, dk = dq.clone(), dk.clone()
        return dq, dk, *attention.rope_bwd(q, k, dq, dk, options)

    def rope_formula(q, k, dq, dk, options):
        rotate = lambda x, cos, sin: ref.rotate(x, cos, sin, num_prefix=PREFIX)  # noqa: E731
        (dq, *of_q), (dk, *of_k) = (gradients(rotate, (x, *options[:2]), dx) for x, dx in ((q, dq), (k, dk)))
        return dq, dk, *(a + b for a, b in zip(of_q, of_k))

    return {
        "attention backward, dq": Launcher(
            lambda t: for_backward(t, *qkv(t, s), scale),
            lambda *t: attention.attention_bwd_dq(*t, scale),
            lambda *t: attention_gradients(*t, scale)[0],
        ),
        "attention backward, dk and dv": Launcher(
            with_delta,
            lambda *t: attention.attention_bwd_dkdv(*t, scale),
            lambda *t: attention_gradients(*t, scale)[1:],
        ),
        "attention backward, of a bias": Launcher(
            with_bias, lambda *t: attention.bias_bwd(*t[:-1], scale, t[-1]), bias_formula
        ),
        "attention backward, of rotary tables": Launcher(
            lambda t: (*qkv(t, s)[:2], *qkv(t, s)[:2], _rotary(t, s, s.tokens - PREFIX, num_prefix=PREFIX)),
            rope_bwd,
            rope_formula,
        ),
    }
