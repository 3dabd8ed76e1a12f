"""Virtual time: SimPy's environment in integer picoseconds, with declared ties.

Events of one instant fire in the order of a hash of the seed and their entity, those of one entity
in the order in which they were scheduled; engine boundaries come last. Another seed is another
interleaving, and none depends on the order in which Python happened to schedule things.
"""

from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any

import simpy

from rlsched.keyed import bits

SECOND = 10**12
"""Picoseconds in a second."""

NANOSECOND = 1000
"""Picoseconds in a nanosecond, the unit of a fact's stamp."""

_LAST = 1 << 64

Process = Generator[simpy.Event, Any, None]


def ps(seconds: float) -> int:
    """Seconds in integer picoseconds."""
    return round(seconds * SECOND)


class Clock:
    """The one clock of a simulated world."""

    def __init__(self, seed: int) -> None:
        self.env = simpy.Environment()
        # Few entities come again and again; rewards come once, and must not be remembered for ever.
        self._tie = lru_cache(maxsize=4096)(lambda entity: 2 + (bits(seed, "tie", entity) >> 1))

    @property
    def now(self) -> int:
        """Picoseconds since the run began."""
        return int(self.env.now)

    @property
    def stamp(self) -> int:
        """Nanoseconds since the run began, rounded down: what a fact shows."""
        return int(self.env.now) // NANOSECOND

    def wait(self, delay: int, entity: str) -> simpy.Event:
        """An event that fires after ``delay`` picoseconds, for a process of ``entity`` to yield."""
        return self._schedule(delay, self._tie(entity))

    def call(self, delay: int, entity: str, function: Callable[[], object]) -> None:
        """Call ``function`` after ``delay`` picoseconds, as ``entity``."""
        _then(self.wait(delay, entity), function)

    def call_last(self, delay: int, entity: str, function: Callable[[], object]) -> None:
        """Call ``function`` after ``delay`` picoseconds, after everything of that instant that is not called last."""
        _then(self._schedule(delay, _LAST + self._tie(entity)), function)

    def process(self, process: Process) -> None:
        """Run a generator as a SimPy process."""
        self.env.process(process)

    def _schedule(self, delay: int, priority: int) -> simpy.Event:
        event = simpy.Event(self.env)
        event._ok = True
        event._value = None
        self.env.schedule(event, priority, delay)  # type: ignore[arg-type]
        return event


def _then(event: simpy.Event, function: Callable[[], object]) -> None:
    def fire(_: simpy.Event) -> None:
        function()

    assert event.callbacks is not None
    event.callbacks.append(fire)
