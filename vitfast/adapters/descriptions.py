"""How an encoder layer of a library is built, as data: where norms, attention and MLP are.

A new kind of layer is a `Layer`; from it come the subclass that runs the operations (layers.py), and the check that it
does what the library's class does (check.py). The tables are in timm.py, hugging_face.py and libraries.py.

A path is a module's name in the layer, or in the attention or MLP that it is given with: "attn.proj".
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

# Keyword arguments of ops.attention that a call of a layer brings (rope, rope_layout, num_prefix, bias), and `mask`,
# boolean (True: seen) or added to the logits, of any shape that (B, H, N, N) can be made of; of packed samples offsets
# and longest. In words: why not.
Logits = dict | str


class Attention(NamedTuple):
    """Self-attention: q, k and v from linear layers, and a projection.

    Paths and attributes are those in `path`, the module that is called, "" where it is the layer. qkv: one linear layer
    for q, k and v, or a parameter like nn.MultiheadAttention's, or three layers. biases: parameters that are the biases
    of q, k and v, where the layers have none; a missing one counts as zeros. bias_mask: the attribute of the layer at
    `qkv` that its bias is multiplied by, where it has one. heads: the attribute with their number.
    scale: the attribute that must be 1 / sqrt(head size). dropout: the attribute with the rate of dropout on the
    probabilities. idle: modules that must do nothing now, dropout say. qk_norms: the norms of q and k, over each head,
    or over all of them (`norms_over_heads`); inner_norm: of what goes into the projection. expects: attributes and the
    values that they must have.
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

    path: as in Attention. gate: a linear layer of its own, or "first" or "last", half of the rows of fc1. act: a module
    or a function, or its name in ops.mlp (`activation`) where it is written in the forward. inner_norm: of what goes
    into fc2. idle: modules that must do nothing now. expects: attributes and the values that they must have.
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

    make(cls): a small one, of width 32 with two heads, in which everything that may be there is there (layer scale,
    drop path), on which the description is checked; example(tokens): arguments for that. norms: before attention and
    MLP. behind: what either branch goes through: dropout, layer scale (a module or a parameter of the layer) and drop
    path, in any order.

    takes: arguments of the layer's forward, besides its tokens, that `logits(layer, arguments, x)` reads; harmless:
    arguments that change nothing. Where others are given, the library's code runs. extras: paths of further modules and
    parameters, which `logits` reads or nobody uses. The layer's output is its tokens, or a tuple of them and None, as
    the small layer shows.

    tokens_first(layer): its tokens are (N, B, D). packed: they are (tokens, D), and `logits` gives offsets.
    unsupported(layer): why the library's forward must run, None where not. idle_hooks(module): True where all hooks on
    a module do nothing now. attention_half(layer, x, arguments), mlp_half(layer, x): the library's own code of a half,
    where that is not a call of the module at `path` as above.
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

    layers: it is a layer, built in one of these ways. mlp: it is an MLP that may be replaced alone, as a layer without
    anything else. places: its children that are replaced alone: patch projections, norms, MLPs. left: why it is left.
    """

    layers: tuple[Layer, ...] = ()
    places: tuple[str, ...] = ()
    left: str | None = None
    mlp: Layer | None = None


def mlp_alone(make: Callable[[type], nn.Module], mlp: Mlp) -> Known:
    """An MLP that is replaced alone; make(cls): a small one."""
    return Known(mlp=Layer(make, norms=("", ""), mlp=mlp._replace(path="")))
