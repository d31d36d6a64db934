"""A stand-in for CUDA graphs on a CPU: a run is recorded and computed again into the very same memory."""

import copy

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vitfast.kernels import launch
from vitfast.model import graphs
from vitfast.ops import checks, dispatch
from vitfast.ops.operation import Registered

READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # a GPU's host would wait for such calls


def kept(value):
    """A tensor, or a descriptor of one, that keeps the memory which it has now."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value).__name__ == "TensorDescriptor":
        value = copy.copy(value)
        value.base = value.base.detach()
    return value


def memory(values) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tree_leaves(values) if isinstance(t, Tensor)}


class Tape(TorchDispatchMode):
    """Records the calls of aten, the copies and the launches of interpreted kernels; `replay` makes them again.

    Python runs once, as at a capture: what it has read of tensors (`read`) stays in the arguments. An operation of
    vitfast is recorded as what it does inside, without its plans.
    """

    def __init__(self, pool: tuple[int, int]):
        super().__init__()
        self.pool = lambda: pool
        self.steps, self.read, self.launches, self.replays = [], [], 0, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # so that it also sees what the code does that Dynamo has compiled

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "vitfast":
            with self:
                return Registered.all[function._schema.name.split("::")[1]].run(*args, **kwargs)
        given = tree_map_only(Tensor, kept, (args, kwargs))
        outputs = function(*args, **kwargs)
        masks = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:]))
        if READS & set(function.tags) and (masks or function is not torch.ops.aten.index.Tensor):
            self.read.append(str(function))
        if not all(isinstance(x, Tensor) for x in tree_leaves(outputs)):
            pass
        elif function._schema.is_mutable:
            self.steps.append(lambda: function(*given[0], **given[1]))
        elif not memory(outputs) & memory(given) and "empty" not in str(function):  # views need no computing
            places = [x.detach() for x in tree_leaves(outputs)]

            def again():
                for place, value in zip(places, tree_leaves(function(*given[0], **given[1]))):
                    place.copy_(value)

            self.steps.append(again)
        return outputs

    def launched(self, each: launch.Launch, compiled: object) -> None:
        arguments = {name: kept(value) for name, value in each.arguments.items()}
        self.launches += 1
        self.steps.append(lambda: each.kernel[each.grid](**arguments))

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for step in self.steps:
            step()


def tapes(monkeypatch) -> list[Tape]:
    """A fixture, by which each capture records a Tape on the CPU; as on a GPU, no operation looks at offsets."""
    found = []

    def capture(run, device, pool):
        for _ in range(2):
            run()
        tape = Tape(pool or (0, len(found)))
        with tape, launch.taped(tape):
            outputs = run()
        found.append(tape)
        return tape, outputs

    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "_capture", capture)
    for module in (checks, dispatch):
        monkeypatch.setattr(module, "at_hand", lambda offsets: False)
    return found
