"""The parts of a model that run on vitfast's operations now, and those that do not and why."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from .fused_blocks import find
from .registry import Known, known_classes, replaceable_modules, replacement_class, unsupported_reason


class Entry(NamedTuple):
    """One module, or one fused block of it.

    name: the module's in the model. kind: its class. part: what of it. why: the unsupported reason, None where vitfast
    runs it.
    """

    name: str
    kind: str
    part: str
    why: str | None


class Report(tuple):
    """A tuple of entries that prints as a summary."""

    model = ""

    @property
    def replaced(self) -> list[Entry]:
        return [e for e in self if e.why is None]

    @property
    def left(self) -> list[Entry]:
        return [e for e in self if e.why is not None]

    def __str__(self) -> str:
        groups: dict[tuple, list[str]] = {}
        for e in self:
            groups.setdefault((e.why is not None, e.kind, e.part, e.why), []).append(e.name)
        lines = [f"{self.model}: {len(self.replaced)} parts on vitfast, {len(self.left)} left"]
        for (left, kind, part, why), names in sorted(groups.items(), key=lambda item: item[0][0]):
            where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            what = " ".join(w for w in (where, kind and f"({kind})") if w) + (f", {part}" if part else "")
            lines.append(f"  {'left    ' if left else 'replaced'}  {what}" + (f": {why}" if left else ""))
        return "\n".join(lines)

    __repr__ = __str__

    def summary(self) -> str:
        """One line."""
        done = ", ".join(f"{n} x {part}" for part, n in Counter(e.part for e in self.replaced).items()) or "nothing"
        why = [f"{n} x {why}" for why, n in Counter(e.why for e in self.left).items()]
        rest = "; left: " + ", ".join(why[:3]) + (", ..." if len(why) > 3 else "") if why else ""
        return f"{self.model}: {done} on vitfast{rest}"


def describe(model: nn.Module) -> Report:
    """The report on a model as it is now."""
    known = known_classes(model)
    replaceable = replaceable_modules(model, known)
    # Names without a dot are libraries that could not be imported.
    entries = [Entry("", "", "", why) for name, why in known.left.items() if "." not in name]
    covered: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(above) for above in covered):
            continue
        kind = type(module).__name__
        if name in replaceable:
            covered.append(f"{name}.")
            entries += _entries_of(name, module, known)
        elif type(module).__module__.startswith("vitfast.") and type(module) not in known.originals:
            covered.append(f"{name}." if name else "")
            entries.append(Entry(name, kind, "", "vitfast's own"))
        elif "Attention" in kind or "Attn" in kind:
            covered.append(f"{name}.")
            entries.append(Entry(name, kind, "", "an attention layer that vitfast does not know"))
    if not entries:
        entries.append(Entry("", "", "", "nothing in it that vitfast replaces"))
    report = Report(entries)
    report.model = type(model).__name__
    return report


def _entries_of(name: str, module: nn.Module, known: Known) -> list[Entry]:
    """Entries of a replaceable module: one, or one for each of its fused blocks."""
    kind = type(module).__name__
    if replacement_class(type(module), known.originals) is None:
        return [Entry(name, kind, "", unsupported_reason(module, known) or "vitfast.accelerate(model) was not called")]
    if not hasattr(module, "fused_blocks"):
        return [Entry(name, kind, "patch projection" if isinstance(module, nn.Conv2d) else "norm", None)]
    entries = []
    for block in module.fused_blocks:
        found = find(block, module)
        # Between calls fully_shard keeps shards, which no operation can read; in the call they are whole.
        sharded = isinstance(found, str) and "DTensor" in found and getattr(module, "_is_fsdp_managed_module", False)
        entries.append(Entry(name, kind, block.name, found if isinstance(found, str) and not sharded else None))
    return entries
