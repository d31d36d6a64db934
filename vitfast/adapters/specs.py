"""How an encoder layer of a library is built, as data: where norms, attention and MLP are.

A new kind of layer is a `Layer`; from it come the subclass that runs the operations (layers.py), and the check that it
does what the library's class does (check.py). The tables are in timm.py, hugging_face.py and libraries.py.

A path is a module's name in the layer, such as "attn.proj", or in the attention or MLP that the path is a field of.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from .small import small_layer

# Keyword arguments of ops.attention that a call of a layer brings (rope, rope_layout, num_prefix, bias), and `mask`,
# boolean (True: seen) or added to the logits, of any shape that broadcasts to (B, H, N, N); for packed samples, offsets
# and longest. A str says in words why the operation cannot run.
Logits = dict | str


class Attention(NamedTuple):
    """Self-attention: q, k and v from linear layers, and a projection.

    `path` is the module that is called, "" if it is the layer itself; the other paths and attributes are relative to
    it. qkv: one linear layer for q, k and v, a parameter like nn.MultiheadAttention's, or three layers. biases: the
    parameters that are the biases of q, k and v, if the layers have none; a missing one counts as zeros. bias_mask: the
    attribute of the layer at `qkv` by which its bias is multiplied, if it has one. heads: the attribute that is the
    number of heads. scale: the attribute that must be 1 / sqrt(head size). dropout: the attribute that is the rate of
    dropout on the probabilities. idle: modules that must do nothing now, such as dropout. qk_norms: the norms of q and
    k, over each head or over all heads (`norms_over_heads`). inner_norm: the norm before the projection. expects:
    attributes and the values that they must have.
    """

    path: str = "attn"
    qkv: str | tuple[str, str, str] = "qkv"
    proj: str = "proj"
    biases: tuple[str, str, str] | None = None
    bias_mask: str | None = None
    heads: str = "num_heads"
    scale: str | None = None
    dropout: str | None = None
    idle: tuple[str, ...] = ()
    qk_norms: tuple[str, str] | None = None
    norms_over_heads: bool = False
    inner_norm: str | None = None
    expects: tuple[tuple[str, tuple], ...] = ()


class Mlp(NamedTuple):
    """fc2(act(fc1(x))), or with a gate fc2(act(gate(x)) * fc1(x)).

    path: as in Attention. gate: the path of its own linear layer, or "first" or "last" for that half of the rows of
    fc1. act: the path of a module or a function; if the forward writes it out, act is None and `activation` its name in
    ops.mlp. inner_norm: the norm before fc2. idle, expects: as in Attention.
    """

    path: str = "mlp"
    fc1: str = "fc1"
    fc2: str = "fc2"
    gate: str | None = None
    act: str | None = "act"
    activation: str | None = None
    inner_norm: str | None = None
    idle: tuple[str, ...] = ()
    expects: tuple[tuple[str, tuple], ...] = ()


class Layer(NamedTuple):
    """A pre-norm encoder layer: x + behind(attention(norm(x))), then x + behind(mlp(norm(x))).

    make(cls) returns a small layer, of width 32 with two heads, that has everything optional (layer scale, drop path);
    the description is checked on it, with the arguments of example(tokens). norms: paths of the norms before attention
    and MLP. behind: for either branch, paths of what follows it: dropout, layer scale (a module or parameter of the
    layer) and drop path, in any order.

    takes: arguments of the layer's forward, beside its tokens, that `logits(layer, arguments, x)` reads. harmless:
    arguments that change nothing. If a call gives others, the library's code runs. extras: paths of further modules and
    parameters, which `logits` reads or nothing uses. The small layer shows whether a layer returns its tokens or a
    tuple of its tokens and None.

    tokens_first(layer): whether tokens are (N, B, D). packed: tokens are (tokens, D), and `logits` gives offsets.
    unsupported(layer): why the library's forward must run, or None. idle_hooks(module): whether all hooks on a module
    do nothing now. attention_half(layer, x, arguments), mlp_half(layer, x): the library's own code of a half, if that
    is not a call of the module at `path` between norm and `behind`.
    """

    make: Callable[[type], nn.Module]
    norms: tuple[str, str] = ("norm1", "norm2")
    attention: Attention = Attention()
    mlp: Mlp = Mlp()
    behind: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    takes: tuple[str, ...] = ()
    logits: Callable[[nn.Module, dict, Tensor], Logits] = lambda layer, arguments, x: {}
    extras: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    tokens_first: Callable[[nn.Module], bool] = lambda layer: False
    packed: bool = False
    unsupported: Callable[[nn.Module], str | None] = lambda layer: None
    idle_hooks: Callable[[nn.Module], bool] = lambda module: False
    attention_half: Callable[[nn.Module, Tensor, dict], Tensor] | None = None
    mlp_half: Callable[[nn.Module, Tensor], Tensor] | None = None
    example: Callable[[int], dict] = lambda tokens: {}


class Known(NamedTuple):
    """A class of a library, as vitfast knows it.

    layers: the ways in which it is built, if it is a layer. mlp: if it is an MLP that is replaced alone, a layer with
    nothing else. places: its children that are replaced alone: patch projections, norms, MLPs. left: why it is left.
    """

    layers: tuple[Layer, ...] = ()
    places: tuple[str, ...] = ()
    left: str | None = None
    mlp: Layer | None = None


def mlp_alone(mlp: Mlp, **options) -> Known:
    """A class of MLPs that are replaced alone; options: those of a small one."""
    return Known(mlp=Layer(partial(small_layer, **options), norms=("", ""), mlp=mlp._replace(path="")))
