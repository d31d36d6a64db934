"""The parts of a model that run on vitfast's operations, and those that do not and why."""

from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from ..ops.dispatch import current_mode, unsupported_reason
from ..ops.fusable import has_instance_forward
from .structure import parts_of, require_module

AT_THE_FIRST_CALL = "decided at the first call"


class Entry(NamedTuple):
    """One part of a module.

    name: the module's name in the model. kind: its class's name. part: the part of the module that this is about. why:
    the reason for which it is not replaced, None if an operation runs.
    """

    name: str
    kind: str
    part: str
    why: str | None


class Report(tuple[Entry, ...]):
    """A tuple of entries that prints as a summary.

    plain: why the operations run plain PyTorch on the model's present device, None if they run kernels.
    """

    model = ""
    plain: str | None = None

    @property
    def replaced(self) -> list[Entry]:
        return [entry for entry in self if entry.why is None]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self if entry.why is not None]

    def __str__(self) -> str:
        groups: dict[tuple, list[str]] = {}
        for e in self:
            groups.setdefault((e.why is not None, e.kind, e.part, e.why), []).append(e.name)
        lines = [f"{self.model}: {len(self.replaced)} parts on vitfast, {len(self.left)} left"]
        for (left, kind, part, why), names in sorted(groups.items(), key=lambda item: item[0][0]):
            where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            what = " ".join(w for w in (where, kind and f"({kind})") if w) + (f", {part}" if part else "")
            lines.append(f"  {'left    ' if left else 'replaced'}  {what}" + (f": {why}" if left else ""))
        if self.replaced and self.plain:
            lines.append(f"  the operations run plain PyTorch, not kernels: {self.plain}")
        return "\n".join(lines)

    __repr__ = __str__

    def summary(self) -> str:
        """One line."""
        done = ", ".join(f"{n} x {part}" for part, n in Counter(e.part for e in self.replaced).items()) or "nothing"
        why = [f"{n} x {why}" for why, n in Counter(e.why for e in self.left).items()]
        rest = "; left: " + ", ".join(why[:3]) + (", ..." if len(why) > 3 else "") if why else ""
        return f"{self.model}: {done} on vitfast{rest}"


def _entries(name: str, module: nn.Module) -> list[Entry]:
    """Returns the entries on one part of an accelerated model."""
    kind, call = type(module).__name__, module._compiled_call_impl  # a CompiledCall; to import it takes a second
    if call is not None and not hasattr(call, "entries"):
        return [Entry(name, kind, "", "it was compiled in place; vitfast.backend.report() is on Inductor's graphs")]
    if call is None:
        return [Entry(name, kind, "", "vitfast.accelerate was not called on it; copies run the library's code")]
    entries = call.entries()
    if entries is None:
        return [Entry(name, kind, "", AT_THE_FIRST_CALL)]
    if call.why is not None:
        entries = [*entries, Entry("", "", "", f"in its last call: {call.why}")]
    inside = lambda e: name if e.kind.endswith("block") else f"{name}.{e.name}".strip(".")  # noqa: E731
    entries = [Entry(inside(e), kind, e.kind, e.why) for e in entries]
    return entries or [Entry(name, kind, "", "nothing in it that vitfast replaces")]


def _layer_entries(model: nn.Module) -> list[Entry]:
    """Returns the entries on the layers of a model of vitfast."""
    entries, covered = [], ("\0",)  # no name begins with this
    for name, module in model.named_modules():
        of_layer = getattr(module, "report_entries", None)
        if of_layer is not None and not name.startswith(covered):
            covered += (f"{name}.",)
            wrapped = [("", "has a forward of its own, set on the instance")] if has_instance_forward(module) else None
            entries += [Entry(name, type(module).__name__, *entry) for entry in wrapped or of_layer()]
    return entries


def acceleration_report(model: nn.Module) -> Report:
    """Reports which parts of a model run on vitfast's operations, and which do not, and why.

    Print the result; `.replaced` and `.left` are lists of entries. The report is on each module's last call outside of
    compiled code. Before the first one it is on what a call would do, for layers that take tokens alone; for others it
    says "decided at the first call". `vitfast.backend.report()` has what torch.compile made of a model. The last line
    says if the operations run plain PyTorch, as on a CPU. The report also covers vitfast's own models.
    """
    require_module("acceleration_report", model)
    entries = _layer_entries(model)
    for part in [] if entries else parts_of(model):
        entries += _entries(part.name, part.module)
    for name, module in model.named_modules():
        call: Any = module._compiled_call_impl
        if hasattr(call, "run_packed"):
            entries.append(Entry(name, type(module).__name__, "packing", call.why))
    report = Report(entries or [Entry("", "", "", "nothing in it that vitfast replaces")])
    report.model = type(model).__name__
    report.plain = next((_reason_for_plain(p) for p in model.parameters()), None)
    return report


def _reason_for_plain(weight: nn.Parameter) -> str | None:
    """Why operations with a weight like this run plain PyTorch now; None where they run kernels."""
    mode = current_mode()
    if mode == "off":
        return "use_kernels('off')"
    if mode == "auto" and weight.device.type != "cuda":
        return f"the weights are on {weight.device.type}"
    return unsupported_reason(weight, None)
