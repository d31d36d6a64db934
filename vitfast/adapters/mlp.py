"""MLPs of libraries: the half of an encoder layer on one operation, or the module alone."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops.fusable import Modules, full_name, own_forward
from .fused_blocks import ABSENT, Found, FusedBlock, add_projection, attribute, dtypes_fit, has_hooks, parameter, under
from .known_classes import ACTIVATIONS, LAYER_NORMS, activation, loaded, norm_eps
from .patch_and_norm import DTYPES, leaf_class, normalized
from .specs import Layer, Mlp

ROWS = ("first", "last")  # where the gate is among the rows of fc1


class MlpBlock(FusedBlock):
    """x + behind(fc2(act(fc1(h)))) with h = norm(x), or x + behind(fc2(act(gate(h)) * fc1(h))).

    Its tensors: those of the norm, of fc1, of the gate where it is a layer, and of fc2.
    """

    name = "MLP block"
    half = 1
    part: Mlp

    def build(self) -> None:
        part = self.part
        self.linear(under(part.path, part.fc1))
        if part.gate is not None and part.gate not in ROWS:
            self.linear(under(part.path, part.gate))
        self.act = None if part.activation else under(part.path, part.act)
        if self.act is not None and isinstance(attribute(self.example, self.act), nn.Module):
            self.stand_in(self.act, loaded(ACTIVATIONS))
        self.linear(under(part.path, part.fc2))
        self.called = (under(part.path, part.inner_norm),) if part.inner_norm else ()

    def activation(self, modules: Modules) -> str | None:
        """The operations' name of the activation; None if they do not have it."""
        if self.part.activation is not None:
            return self.part.activation
        return activation(attribute(modules[""], self.act))

    def unsupported_reason(self, modules: Modules, wrapped: tuple[str, ...] = ()) -> str | None:
        if self.activation(modules) is not None:
            return None
        name = full_name(type(attribute(modules[""], self.act)))
        return f"{self.act} is {'written out in Python' if name in ACTIVATIONS else name}"

    def _gated(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """The weights and biases of up, gate and down."""
        *first, fc2_weight, fc2_bias = tensors
        if self.part.gate not in ROWS:
            return tensors
        halves = [(None, None) if tensor is None else tensor.chunk(2) for tensor in first]
        up, gate = (1, 0) if self.part.gate == "first" else (0, 1)
        return [*(half[up] for half in halves), *(half[gate] for half in halves), fc2_weight, fc2_bias]

    def _inner_norm(self, modules: Modules) -> dict | None:
        """The inner norm as an operation takes it; None where it must be called."""
        norm = attribute(modules[self.part.path], self.part.inner_norm) if self.part.inner_norm else None
        if type(norm) in ABSENT:
            return {}
        if type(norm) not in loaded(LAYER_NORMS) or has_hooks(norm) or own_forward(norm) or norm.weight is None:
            return None
        tensors = {name: parameter(norm, name) for name in ("weight", "bias")}
        return dict(inner_eps=norm_eps(norm), **{f"inner_norm_{name}": value for name, value in tensors.items()})

    def around(self, layer: nn.Module, modules: Modules) -> str | None:
        takes = self.part.gate is not None and self._inner_norm(modules) is not None
        return None if takes else super().around(layer, modules)

    def run(self, found: Found, x: Tensor, options: dict, factors: Callable[[], dict]) -> Tensor:
        modules, act = found.modules, dict(activation=self.activation(found.modules))
        norm, tensors = found.tensors[:2], found.tensors[2:]
        if self.part.gate is None and found.around is None:
            options = self.norm_options(modules)
            return ops.mlp_block(x, *norm, *tensors, **act, **options, **factors(), keep=found.keep)
        if self.part.gate is not None:
            tensors = self._gated(tensors)
        if found.around is None:
            options = {**self.norm_options(modules), **self._inner_norm(modules)}
            return ops.gated_mlp_block(x, *norm, *tensors, **act, **options, **factors(), keep=found.keep)
        *first, fc2_weight, fc2_bias = tensors
        h = normalized(modules[self.norm], x)
        y = ops.linear_gelu(h, *first[-2:], **act)
        y = y if self.part.gate is None else y * F.linear(h, *first[:2])
        y = attribute(modules[self.part.path], self.part.inner_norm)(y)
        return add_projection(y, fc2_weight, fc2_bias, x, **factors())


class MlpModule(MlpBlock):
    """An MLP alone, as in a head or in a layer that is left."""

    name = "MLP"

    def unsupported_reason(self, modules: Modules, wrapped: tuple[str, ...] = ()) -> str | None:
        around = self.around(modules[""], modules)
        return super().unsupported_reason(modules) or (f"{around} is called inside" if around else None)

    def leaf_unsupported(self, module: nn.Module) -> str | None:
        """Why no call of this module runs an operation; None where one may."""
        found = self.find(module)
        return found if isinstance(found, str) else None

    def operation(self, module: nn.Module, x: Tensor) -> Tensor | str:
        """module(x) by an operation, or in words why the library must run. Call `leaf_unsupported` before."""
        found = self.find(module)
        if not dtypes_fit(x, found.tensors[0]):
            return DTYPES
        act = dict(activation=self.activation(found.modules))
        if self.part.gate is None:
            return ops.mlp(x, *found.tensors, **act)
        return ops.gated_mlp(x, *self._gated(found.tensors), **act, **self._inner_norm(found.modules))


def mlp_and_class(description: Layer, cls: type) -> tuple[nn.Module, type]:
    """A small MLP of a class, and our subclass that runs the operation.

    Raises ValueError if no operation can run it.
    """
    example = description.make(cls).float().eval()
    block = MlpModule(description, description.mlp, example)
    reason = block.leaf_unsupported(example)
    if reason is not None:
        raise ValueError(reason)
    return example, leaf_class(cls, block.name, block.operation, block.leaf_unsupported)
