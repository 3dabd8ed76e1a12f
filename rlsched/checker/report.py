"""What a check found: violations, each with the events that show it, and the report that holds them."""

from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from ..history import Line

KEPT = 20
"""Violations of one invariant that a report keeps. The others are counted."""


class Seen(Struct, frozen=True):
    """An event of the history and its line, kept in case that it has to bear witness."""

    line: int
    event: Line


class Witness(NamedTuple):
    """A line of the history, from 1 (the manifest), and what it says."""

    line: int
    text: str


class Violation(Struct, frozen=True):
    """One violation of the invariant ``id``: what exactly was violated, and the fewest events that show it."""

    id: str
    statement: str
    witness: list[Witness]
    """In the order of the history; empty when an empty history shows it."""

    def __str__(self) -> str:
        return "\n    ".join([f"{self.id}: {self.statement}", *(f"line {w.line}: {w.text}" for w in self.witness)])


class Report(Struct):
    """The outcome of a check over a whole history, or over the prefix that an open one is."""

    violations: list[Violation] = field(default_factory=list)
    """The first ``KEPT`` of each invariant, in the order in which they came to light."""
    counts: dict[str, int] = field(default_factory=dict)
    """All violations, by invariant; those that were not kept included."""
    events: int = 0
    """Events read, so that a check that passed because it read nothing shows."""
    repeated: int = 0
    """Segments, scores and answers that were told again, word for word but for their time."""
    open: bool = True
    """The history has no ``End``: conditions on its end were not checked."""

    failed: str = ""
    """Why the run failed, if it did: it was cut short, and conditions on its end were not checked."""

    @property
    def ok(self) -> bool:
        """Nothing was violated."""
        return not self.counts

    def add(self, id: str, statement: str, witness: tuple[Seen, ...]) -> None:
        """Count a violation, and keep it unless enough of its kind were kept."""
        count = self.counts.get(id, 0) + 1
        self.counts[id] = count
        if count <= KEPT:
            texts = {seen.line: msgspec.json.encode(seen.event).decode() for seen in witness}
            self.violations.append(Violation(id, statement, [Witness(n, texts[n]) for n in sorted(texts)]))
