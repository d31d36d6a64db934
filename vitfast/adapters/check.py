"""Checks on a small layer whether a description does what a library's class does.

That is needed because versions of a library differ and users describe blocks of their own.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable

import torch
from torch import nn

from ..ops import use_kernels
from ..ops._dispatch import counting
from .attention import AttentionBlock
from .fallback_log import last_call, quiet
from .fused_blocks import attribute, under
from .layers import accelerated_layer, unknown_member_reason
from .mlp import ROWS, MlpBlock
from .small import WIDTH
from .specs import Layer

TOKENS = 5  # of the small layer's input: a prefix token and a grid of 2 x 2


@contextlib.contextmanager
def _plain():
    """On the CPU, without autocast, gradients, kernels or messages; the random state is restored."""
    with contextlib.ExitStack() as stack:
        contexts = torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad(), use_kernels("off")
        for context in (torch.random.fork_rng(devices=[]), *contexts):
            stack.enter_context(context)
        stack.callback(quiet.reset, quiet.set(True))
        yield


def _same(got, expected) -> bool:
    if isinstance(got, tuple) or isinstance(expected, tuple):
        return type(got) is type(expected) and got[1:] == expected[1:] and _same(got[0], expected[0])
    return torch.allclose(got, expected, atol=1e-4, rtol=1e-4)


def _tokens(*samples: int) -> torch.Tensor:
    """Tokens in fp32, as the small modules are, whatever the default dtype is."""
    return torch.randn(*samples, TOKENS, WIDTH, dtype=torch.float32)


def _agrees(module: nn.Module, ours: type, x: torch.Tensor, arguments: dict) -> bool:
    """Whether our class computes the same as a small module: by operations, by modules, and in training."""
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)

    def run(training: bool):
        torch.default_generator.manual_seed(0)  # drop path draws; torch.manual_seed would set the GPUs' state too
        return module.train(training)(x, **arguments)

    expected = run(False), run(True)
    module.__class__ = ours
    same = _same(run(False), expected[0]) and _same(run(True), expected[1])
    for inner in list(module.modules())[1:]:
        inner.register_forward_hook(lambda *_: None)
    return same and _same(run(False), expected[0]) and _same(run(True), expected[1])


def _check(cls: type, description: Layer, of_users: bool) -> tuple[AttentionBlock, MlpBlock, int]:
    """The blocks of one description of a class, and the length of the tuple that its layer returns.

    The length is 0 if the layer returns no tuple. Raises ValueError if the description does not hold. of_users: all
    that the description names must exist, unlike in a library's other versions, and it must name every buffer.
    """
    example = description.make(cls).float().eval()
    if type(example) is not cls:
        raise ValueError(f"make gives a {type(example).__name__}")
    if of_users and (reason := _missing(cls, example, description)) is not None:
        raise ValueError(reason)
    attention = AttentionBlock(description, description.attention, example)
    mlp = MlpBlock(description, description.mlp, example)
    for block in (attention, mlp):
        found = block.find(example)
        if isinstance(found, str):
            raise ValueError(f"{block.name}: {found}")
    blocks = (attention,), (mlp,)
    reason = unknown_member_reason(example, cls, blocks, with_buffers=of_users)
    if reason is not None:
        raise ValueError(reason)
    x = _tokens(*(() if description.packed else (2,)))
    arguments, order = description.example(TOKENS), []
    add = lambda name: lambda *_: order.append(name)  # noqa: E731
    hooks = [module.register_forward_hook(add(name)) for name, module in example.named_modules()]
    returned = example(x, **arguments)  # a tuple or not differs by version too
    for hook in hooks:
        hook.remove()
    attention.allow_calls(order)
    entries = len(returned) if isinstance(returned, tuple) else 0
    if entries and any(other is not None for other in returned[1:]):
        raise ValueError("it returns more than its tokens")
    ours = accelerated_layer(cls, description, blocks, entries, of_users)
    with counting() as ran:
        same = _agrees(example, ours, x, arguments)
    if not same:
        raise ValueError("the operations give other numbers than its forward")
    for block, of_it in ((attention, ("attention",)), (mlp, ("mlp", "linear_gelu"))):
        if not any(word in op for word in of_it for op in ran):
            raise ValueError(f"{block.name}: no operation ran, {last_call(example, block.name) or 'not even once'}")
    if of_users and not arguments and not _scale_follows(description.make(cls).float().eval(), ours, description, x):
        raise ValueError("its attention's scale is not 1 / sqrt(head size): name its attribute in Attention(scale=)")
    return attention, mlp, entries


def _missing(cls: type, example: nn.Module, description: Layer) -> str | None:
    """Which field of a description names something that a layer lacks, in words; None if none does."""
    mlp, parts = description.mlp, dict(attention=description.attention, mlp=description.mlp)
    if len(description.norms) != 2 or len(description.behind) != 2:
        return "norms and behind are pairs, of the attention and of the MLP"
    if mlp.act is None and mlp.activation is None:
        return "mlp: give act or activation"
    paths = [("norms", path) for path in description.norms]
    paths += [("behind", path) for half in description.behind for path in half]
    paths += [(f"{name}.path", part.path) for name, part in parts.items()]
    fields = ["attention.qkv", "attention.heads", "attention.proj", "mlp.fc1", "mlp.fc2"]
    fields += ["mlp.gate"] * (mlp.gate not in (None, *ROWS)) + ["mlp.act"] * (mlp.activation is None)
    for field in fields:
        name, _, inner = field.partition(".")
        found = getattr(parts[name], inner)
        paths += [(field, under(parts[name].path, each)) for each in ((found,) if isinstance(found, str) else found)]
    for field, path in paths:
        if path is None or (path and attribute(example, path) is None):
            return f"{field}: {cls.__name__} has no `{path}`"
    given = inspect.signature(cls.forward).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in given.values()):
        for taken in description.takes:
            if taken not in given:
                return f"takes: {cls.__name__}'s forward has no argument `{taken}`"
    return None


def _scale_follows(example: nn.Module, ours: type, description: Layer, x: torch.Tensor) -> bool:
    """Whether a layer and our class still agree if the layer has one head, and so another head size.

    True if the layer's own forward cannot run with one head.
    """
    attention = description.attention
    owner, _, last = under(attention.path, attention.heads).rpartition(".")
    try:
        setattr(attribute(example, owner), last, 1)
        expected = example(x)
    except Exception:  # the layer depends on more than the number of its heads
        return True
    example.__class__ = ours
    return _same(example(x), expected)


def checked_class(cls: type, descriptions: tuple[Layer, ...], of_users: bool = False) -> type | str:
    """Our subclass of a library's layer class, from those descriptions that hold; or why there is none.

    A class has several descriptions if it is built with several kinds of attention or MLP, or differs by version.
    of_users: all of them must hold, else raises an error; and a call with an argument that no description knows runs
    the class's own forward.
    """
    held, returned, reasons = [], set(), []
    halves: tuple[dict, dict] = ({}, {})
    for description in descriptions:
        try:
            with _plain():
                *blocks, entries = _check(cls, description, of_users)
        except Exception as error:  # the class has another signature or other modules
            if of_users:
                raise
            reasons.append(_another_way(cls, error))
            continue
        held.append(description)
        returned.add(entries)
        for kept, block in zip(halves, blocks):
            kept.setdefault((block.container, block.mark), block)
    if not held:
        return min(reasons, key=lambda reason: "AttributeError" in reason)  # such a description is for another version
    if len(returned) > 1:
        return "some of its layers return another tuple than others"
    return accelerated_layer(cls, held[0], tuple(tuple(kept.values()) for kept in halves), *returned, of_users)


def checked_leaf(cls: type, make: Callable[[type], tuple[nn.Module, type]]) -> type | str:
    """Our subclass of a class whose modules are replaced alone; or why there is none.

    make(cls) returns a small module and our class.
    """
    try:
        with _plain():
            example, ours = make(cls)
            if not _agrees(example.float(), ours, _tokens(2), {}):
                raise ValueError("other numbers")
            return ours
    except Exception as error:
        return _another_way(cls, error)


def message(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _another_way(cls: type, error: Exception) -> str:
    library = cls.__module__.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", None)
    name = f"{library} {version}" if version else library
    return f"{name} computes it in another way than vitfast ({message(error)})"
