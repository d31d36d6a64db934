"""What runs on vitfast's operations in a model, and what does not and why: read from the model as it is now, nothing is stored."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from .halves import look
from .registry import candidates, exchanged, known, refusal


class Entry(NamedTuple):
    """name: the module's in the model. kind: its class. part: what of it. why: None where vitfast runs it, else what stands against it."""

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


def _looks_like_attention(module: nn.Module) -> bool:
    return any(word in type(module).__name__ for word in ("Attention", "Attn"))


def describe(model: nn.Module) -> Report:
    """The report on a model as it is now."""
    found = known(model)
    theirs = {own: cls for cls, own in found.ours.items()}
    chosen = candidates(model, found)
    entries = [
        Entry("", "", "", why) for name, why in found.left.items() if "." not in name
    ]  # of a library that could not be served
    covered: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(above) for above in covered):
            continue
        kind = type(module).__name__
        if name in chosen:
            covered.append(f"{name}.")
            entries += _of_candidate(name, module, found, theirs)
        elif type(module).__module__.startswith("vitfast.") and type(module) not in theirs:
            covered.append(f"{name}." if name else "")
            entries.append(Entry(name, kind, "", "vitfast's own"))
        elif _looks_like_attention(module):
            covered.append(f"{name}.")
            entries.append(Entry(name, kind, "", "an attention layer that vitfast does not know"))
    if not entries:
        entries.append(Entry("", "", "", "nothing in it that vitfast replaces"))
    report = Report(entries)
    report.model = type(model).__name__
    return report


def _of_candidate(name: str, module: nn.Module, found, theirs) -> list[Entry]:
    kind = type(module).__name__
    if exchanged(type(module), theirs) is None:
        return [Entry(name, kind, "", refusal(module, found) or "vitfast.accelerate(model) was not called")]
    if hasattr(module, "halves"):
        looks = [(half.name, look(half, module)) for half in module.halves]
        # Between calls fully_shard keeps shards, which a half cannot read; in the call they are whole.
        sharded = getattr(module, "_is_fsdp_managed_module", False)
        return [
            Entry(name, kind, part, why if isinstance(why, str) and not (sharded and "DTensor" in why) else None)
            for part, why in looks
        ]
    return [Entry(name, kind, "patch projection" if isinstance(module, nn.Conv2d) else "norm", None)]
