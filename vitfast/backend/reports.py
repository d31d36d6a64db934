"""The report on compiled graphs: parts replaced, parts left with the reason, and the time."""

from collections import Counter
from typing import NamedTuple

ALREADY = "an operation of vitfast already"


class Entry(NamedTuple):
    """One part of a graph.

    kind: the operation that it is or would be. name: the module that it was captured in. why: the reason why it was
    left, None where an operation replaces it, ALREADY where the model called the operation itself.
    """

    kind: str
    name: str
    why: str | None


class Report(tuple[Entry, ...]):
    """A tuple of entries that prints as a summary; `recognition` and `proof` are the seconds they took."""

    recognition = 0.0
    proof = 0.0

    @property
    def replaced(self) -> list[Entry]:
        return [entry for entry in self if entry.why is None]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self if entry.why not in (None, ALREADY)]

    @property
    def already(self) -> list[Entry]:
        """The operations that the model called itself: it is a ViT of vitfast, or was accelerated."""
        return [entry for entry in self if entry.why == ALREADY]

    def __str__(self) -> str:
        lines = [self.summary()]
        for (kind, why), count in Counter((e.kind, e.why) for e in self).items():
            names = [e.name for e in self if (e.kind, e.why) == (kind, why)]
            where = names[0] if len(set(names)) == 1 else f"{names[0]} ... {names[-1]}"
            what = f"{count} x {kind}" + (f" ({where})" if where.strip(" .") else "")
            what += f": {why}" if why not in (None, ALREADY) else ""
            lines.append(f"  {'replaced' if why is None else 'already ' if why == ALREADY else 'left    '}  {what}")
        return "\n".join(lines)

    __repr__ = __str__

    def summary(self) -> str:
        """Returns the first line of the report: what was replaced, how many parts were left, the time."""
        done = ", ".join(f"{n} x {kind}" for kind, n in Counter(e.kind for e in self.replaced).items()) or "nothing"
        before = f", {len(self.already)} vitfast's already" if self.already else ""
        seconds = f"{self.recognition:.2f} s of recognition, {self.proof:.2f} s of proof"
        return f"{done} replaced, {len(self.left)} left{before} ({seconds})"


def joined(reports: list[Report]) -> Report:
    """Several reports as one, with the sums of their seconds."""
    whole = Report(entry for report in reports for entry in report)
    whole.recognition = sum(report.recognition for report in reports)
    whole.proof = sum(report.proof for report in reports)
    return whole
