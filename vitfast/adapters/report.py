"""The parts of a model that run on vitfast's operations now, and those that do not and why."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from ..ops._dispatch import reason_for_plain
from ..ops.fusable import Replacements
from .fallback_log import ATTENTION_ALONE, DROPOUT, PACKING, last_call, wrapped_away
from .known_classes import attention_layers, attention_name
from .layers import HALVES, find
from .registry import original_class, replaceable_modules, replacement, require_module, transformers_attention


class Entry(NamedTuple):
    """One module, or one part of it.

    name: the module's name in the model. kind: its class's name. part: the part of the module that this is about. why:
    the reason for which it is not supported, None if vitfast runs it.
    """

    name: str
    kind: str
    part: str
    why: str | None


class Report(Replacements[Entry]):
    """A tuple of entries that prints as a summary.

    plain: why the operations run plain PyTorch on the model's present device, None if they run kernels.
    """

    model = ""
    plain: str | None = None

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


def acceleration_report(model: nn.Module) -> Report:
    """Reports which parts of a model run on vitfast's operations now, and which do not, and why.

    Print the result; `.replaced` and `.left` are lists of entries. The report looks at the modules as they are now, in
    training or not, and at each module's last call outside of compiled code. Some reasons appear only in a call, such
    as causal attention. They count from that call on, and the logger "vitfast" gives them once, also for compiled code.
    The last line says if the operations run plain PyTorch, as on a CPU. The report also covers vitfast's own models and
    `set_attn_implementation("vitfast")`.
    """
    require_module("acceleration_report", model)
    transformers_attention()  # registers it, so that the report below can cover it
    replaceable = replaceable_modules(model)
    entries = []
    covered: list[str] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        kind = type(module).__name__
        if hasattr(module, "vitfast_tower") and (why := last_call(module, PACKING)) is not None:
            entries.append(Entry(name, kind, PACKING, why))
        # A layer that is left may hold norms and an MLP that are replaced.
        if any(name.startswith(above) for above in covered) and not hasattr(module, "vitfast_part"):
            continue
        above = tuple(modules[upper] for upper in _names_above(name) if upper in modules)
        if wrapped_away(module) and (name in replaceable or hasattr(module, "report_entries")):
            found = [Entry(name, kind, "", "has a forward of its own, set on the instance, in which no operation ran")]
        elif name in replaceable:
            found = _entries_of(name, module)
        elif hasattr(module, "report_entries"):  # vitfast's own layer
            found = [Entry(name, kind, part, why) for part, why in module.report_entries()]
        elif "Attention" in kind or "Attn" in kind:
            found = _attentions(name, module) or [Entry(name, kind, "", _unknown_attention(module, above))]
        else:
            continue
        covered.append(f"{name}." if name else "")
        entries += found
    if not entries:
        entries.append(Entry("", "", "", "nothing in it that vitfast replaces"))
    report = Report(entries)
    report.model = type(model).__name__
    report.plain = next((reason_for_plain(p) for p in model.parameters()), None)
    return report


def _names_above(name: str) -> list[str]:
    """ "a.b.c" -> "", "a", "a.b": the modules that a module is in."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts))]


def _entries_of(name: str, module: nn.Module) -> list[Entry]:
    """Entries of a replaceable module: one, or one for each of its fused blocks."""
    kind = type(module).__name__
    if original_class(type(module)) is None:
        found = replacement(module)
        why = found if isinstance(found, str) else "vitfast.accelerate(model) was not called"
        return [Entry(name, kind, "", why), *_attentions(name, module)]
    # Between calls fully_shard keeps shards, which no operation can read; in the call they are whole.
    sharded = getattr(module, "_is_fsdp_managed_module", False)
    if not hasattr(module, "vitfast_layer"):
        why = None if sharded else module.vitfast_unsupported()
        return [Entry(name, kind, module.vitfast_part, why or last_call(module, module.vitfast_part))]
    entries = []
    for half, part in enumerate(HALVES):
        found = find(module, half)
        why = found if isinstance(found, str) and not (sharded and "DTensor" in found) else last_call(module, part)
        # The smaller operations run around modules that are called.
        around = "" if isinstance(found, str) or found.around is None else f", around {found.around}"
        entries.append(Entry(name, kind, part + around, why))
        if entries[-1].why is not None and half == 0:
            entries += _attentions(name, module)
    return entries


def _attentions(name: str, module: nn.Module) -> list[Entry]:
    """Entries of the attention layers in a module that take vitfast's from transformers' registry."""
    found = {path: m for path, m in attention_layers(module, name).items() if attention_name(m) == "vitfast"}
    return [
        Entry(path, type(m).__name__, ATTENTION_ALONE, _why_not_attention(m))
        for path, m in found.items()
        if not any(path in _names_above(other) for other in found)
    ]


def _why_not_attention(module: nn.Module) -> str | None:
    """Why an attention layer of transformers does not run ours; None where it does."""
    rate = getattr(module, "attention_dropout", getattr(module, "dropout_prob", 0.0))
    if module.training and isinstance(rate, float) and rate > 0:
        return DROPOUT
    return last_call(module, ATTENTION_ALONE)


def _unknown_attention(module: nn.Module, above: tuple[nn.Module, ...]) -> str:
    """Why an attention layer is left, and what can be done."""
    settable = any(getattr(owner, "_can_set_attn_implementation", bool)() for owner in above)
    inside = any(attention_name(m) not in (None, "vitfast") for m in module.modules())
    hint = '; model.set_attn_implementation("vitfast") runs its attention' if settable and inside else ""
    return f"an attention layer that vitfast does not know{hint}"
