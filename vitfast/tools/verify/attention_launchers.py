"""Launchers of attention: plain, rotary, with a bias, with lengths of keys, packed; and its parts."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.attention import launchers as attention
from ...kernels.attention.options import PLAIN, Logits
from ...ops import reference as ref
from .draw import Draw, Sizes
from .launcher import Launcher, gradients, wide

PREFIX = 1  # tokens that rotary positions leave


def attention_formula(q: Tensor, k: Tensor, v: Tensor, scale: float, **options) -> tuple[Tensor, Tensor]:
    """(o, lse); +inf for a query that sees no key, as the kernels have it."""
    if "offsets" in options:
        return _each_sample(q, k, v, scale, **options)
    lse = ref.attention_logits(q.to(wide(q)), k.to(wide(k)), scale=scale, **options).logsumexp(-1)
    return ref.attention(q, k, v, scale=scale, **options), lse.where(lse > -torch.inf, torch.inf)


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    return gradients(lambda *t: attention_formula(*t, scale, **options)[0], (q, k, v), do)


def _each_sample(q, k, v, scale: float, offsets: Tensor, longest: int, rope=None, **options) -> tuple[Tensor, Tensor]:
    """`attention_formula` of packed samples, one after the other; q, k, v (1, tokens, H, Dh)."""
    if offsets.is_meta:  # shapes alone
        return torch.empty_like(q), q.new_empty(1, q.shape[2], q.shape[1], dtype=wide(q))
    found, ends = [], offsets.tolist()
    for first, end in zip(ends, ends[1:]):
        own = {} if rope is None else dict(rope=tuple(table[first:end] for table in rope), **options)
        found.append(attention_formula(*(x[:, first:end] for x in (q, k, v)), scale, **own))
    o, lse = zip(*found)
    return torch.cat(o, 1), torch.cat(lse, 2)


def qkv(t: Draw, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each (B, N, H, Dh), of one tensor."""
    return t.values(s.batch, s.tokens, 3, s.heads, s.head).unbind(2)


def for_attention_backward(t: Draw, q: Tensor, k: Tensor, v: Tensor, scale: float, **options) -> tuple[Tensor, ...]:
    """q, k, v, o, lse, do."""
    return q, k, v, *attention_formula(q, k, v, scale, **options), t.values(*q.shape)


def _rope(t: Draw, s: Sizes, *lead: int) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, one for both columns of a pair, in fp32."""
    angles = t.values(*lead, s.tokens - PREFIX, s.head // 2, dtype=torch.float32, scale=3.0)
    return angles.cos(), angles.sin()


def _bias(t: Draw, s: Sizes) -> tuple[Tensor]:
    return (t.values(s.heads, s.tokens, s.tokens),)


def _lengths(t: Draw, s: Sizes) -> tuple[Tensor]:
    return (t.lengths(s.batch, s.tokens),)


def _pair(
    s: Sizes,
    draw: Callable[[Draw, Sizes], tuple],
    logits: Callable[..., Logits],
    variant: bool = False,
    qkv: Callable[[Draw, Sizes], tuple] = qkv,
) -> tuple[Launcher, Launcher]:
    """Forward and backward, of a packed qkv.

    draw: the tensors that act on the logits; logits: the options with them.
    """
    scale = s.head**-0.5

    def make_backward(t: Draw) -> tuple:
        acting = draw(t, s)
        return *for_attention_backward(t, *qkv(t, s), scale, **logits(*acting).options), *acting

    def backward(q, k, v, o, lse, do, *acting):
        dqkv = torch.stack(attention_gradients(q, k, v, do, scale, **logits(*acting).options), 2)
        return dqkv, dqkv.sum((0, 1), dtype=wide(dqkv)).flatten()

    forward = Launcher(
        lambda t: (*qkv(t, s), *draw(t, s)),
        lambda q, k, v, *acting: attention.attention_fwd(q, k, v, scale, logits(*acting)),
        lambda q, k, v, *acting: attention_formula(q, k, v, scale, **logits(*acting).options),
        variant,
    )
    call = lambda q, k, v, o, lse, do, *acting: attention.attention_bwd(  # noqa: E731
        q, k, v, o, lse, do, scale, True, logits(*acting)
    )
    return forward, Launcher(make_backward, call, backward, variant)


def attentions(s: Sizes) -> dict[str, Launcher]:
    """Forward and backward."""
    forward, backward = _pair(s, lambda t, s: (), lambda: PLAIN)
    return {"attention": forward, "attention backward": backward}


def acting_attentions(s: Sizes) -> dict[str, Launcher]:
    """Forward and backward with rotary positions, a bias, lengths of keys."""
    found = {}
    for name, draw, logits, variant in (
        ("rotary", _rope, _turning, False),
        ("bias", _bias, lambda bias: Logits(bias=bias), True),
        ("key lengths", _lengths, lambda lengths: Logits(key_lengths=lengths), True),
    ):
        found[f"attention, {name}"], found[f"attention backward, {name}"] = _pair(s, draw, logits, variant)
    return found


def packed_attentions(s: Sizes) -> dict[str, Launcher]:
    """Forward and backward of samples of many sizes, and with rotary positions."""
    options = dict(longest=s.rows)

    def together(t: Draw, s: Sizes) -> tuple[Tensor, ...]:
        return t.values(1, s.rows, 3, s.heads, s.head).unbind(2)

    def offsets(t: Draw, s: Sizes) -> tuple[Tensor]:
        return (t.offsets(2 * s.batch, s.rows),)

    def with_rope(t: Draw, s: Sizes) -> tuple[Tensor, ...]:
        angles = t.values(s.rows, s.head // 2, dtype=torch.float32, scale=3.0)
        return *offsets(t, s), angles.cos(), angles.sin()

    found = {}
    for name, draw, logits in (
        ("packed", offsets, lambda offsets: Logits(offsets=offsets, **options)),
        ("packed, rotary", with_rope, lambda offsets, cos, sin: Logits(cos, sin, offsets=offsets, **options)),
    ):
        found[f"attention, {name}"], found[f"attention backward, {name}"] = _pair(s, draw, logits, qkv=together)
    return found


def _turning(cos: Tensor, sin: Tensor) -> Logits:
    return Logits(cos, sin, num_prefix=PREFIX)


def attention_parts(s: Sizes) -> dict[str, Launcher]:
    """The tiled backward's two kernels, and the gradients of a bias and of tables that are learned."""
    scale = s.head**-0.5

    def with_delta(t: Draw) -> tuple:
        q, k, v, o, lse, do = for_attention_backward(t, *qkv(t, s), scale)
        delta = (o.to(wide(o)) * do.to(wide(o))).sum(-1).transpose(1, 2).contiguous()
        return q, k, v, lse, delta, do

    def for_bias(t: Draw) -> tuple:
        (bias,) = _bias(t, s)
        return *for_attention_backward(t, *qkv(t, s), scale, bias=bias), bias

    def bias_formula(q, k, v, o, lse, do, bias):
        return gradients(lambda bias: ref.attention(q, k, v, scale=scale, bias=bias), (bias,), do)[0]

    def turned_back(q, k, dq, dk, cos, sin):
        dq, dk = dq.clone(), dk.clone()
        return dq, dk, *attention.rope_bwd(q, k, dq, dk, _turning(cos, sin))

    def turned_back_formula(q, k, dq, dk, cos, sin):
        turn = lambda x, cos, sin: ref.rotate(x, cos, sin, num_prefix=PREFIX)  # noqa: E731
        (dq, *of_q), (dk, *of_k) = (gradients(turn, (x, cos, sin), dx) for x, dx in ((q, dq), (k, dk)))
        return dq, dk, *(a + b for a, b in zip(of_q, of_k))

    return {
        "attention backward, dq": Launcher(
            lambda t: for_attention_backward(t, *qkv(t, s), scale),
            lambda *t: attention.attention_bwd_dq(*t, scale),
            lambda q, k, v, o, lse, do: attention_gradients(q, k, v, do, scale)[0],
        ),
        "attention backward, dk and dv": Launcher(
            with_delta,
            lambda *t: attention.attention_bwd_dkdv(*t, scale),
            lambda q, k, v, lse, delta, do: attention_gradients(q, k, v, do, scale)[1:],
        ),
        "attention backward, of a bias": Launcher(
            for_bias,
            lambda q, k, v, o, lse, do, bias: attention.bias_bwd(q, k, v, o, lse, do, scale, Logits(bias=bias)),
            bias_formula,
        ),
        "attention backward, of rotary tables": Launcher(
            lambda t: (*qkv(t, s)[:2], *qkv(t, s)[:2], *_rope(t, s)), turned_back, turned_back_formula
        ),
    }
