"""Holding real work to a declared minimum duration, by sleeping.

A paced run makes a real schedule comparable with a simulated one on a noisy machine: tokens, weights and aborts are
real, only the durations are declared. Deadlines are chained while work is continuous (due = previous due + cost), so
that what is lost between two units of work comes out of the second one's slack and not on top. Work that took longer
than declared is an overrun: counted, summed, and reported, never hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Minimum duration of an engine step: a + b * decoding + c * kv_tokens + p * prompt_tokens, in nanoseconds.

    The four terms are those of the simulator's engine; `answers.Step` says what is counted in each.
    """

    a: int = 0  # ns a step
    b: int = 0  # ns a decoding request
    c: int = 0  # ns a token of context read
    p: int = 0  # ns a prompt token computed

    def of(self, decoding: int, kv_tokens: int, prompt_tokens: int) -> int:
        """Nanoseconds of one step."""
        return self.a + self.b * decoding + self.c * kv_tokens + self.p * prompt_tokens


class WorkCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Minimum duration of any other piece of work: fixed + each * units, in nanoseconds."""

    fixed: int = 0
    each: int = 0  # ns a unit; the field that holds this cost says what its unit is

    def of(self, units: int) -> int:
        """Nanoseconds of work over so many units."""
        return self.fixed + self.each * units


class EnginePace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Minima of an engine."""

    step: StepCost = StepCost()
    bucket: WorkCost = WorkCost()  # a weight bucket; unit: byte
    install: WorkCost = WorkCost()  # taking in what landed, at the end of an update; unit: byte
    sleep: WorkCost = WorkCost()  # unit: level
    wake: WorkCost = WorkCost()  # unit: tag


class TrainerPace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Minima of a trainer. Unit of every phase: token of the batch's outputs."""

    old_logprob: WorkCost = WorkCost()
    ref: WorkCost = WorkCost()
    update: WorkCost = WorkCost()
    shift: WorkCost = WorkCost()  # load or offload; unit: part


class Pacer:
    """Chained deadlines of one thread of work."""

    def __init__(
        self, clock: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._due: int | None = None
        self._late = 0
        self.held = 0
        self.declared_ns = 0
        self.overruns = 0
        self.overrun_ns = 0

    @property
    def chained(self) -> bool:
        """Whether a unit that begins now continues a chain."""
        return self._due is not None

    def start(self) -> None:
        """A unit of work begins. Continues the chain, or begins one after a rest."""
        if self._due is None:
            self._due = self._clock()
            self._late = 0

    def hold(self, cost: int) -> None:
        """The unit's real work is over: sleep until it is due, `cost` ns after the previous one."""
        if self._due is None:
            raise RuntimeError("hold() without start()")
        self.held += 1
        self.declared_ns += cost
        self._due += cost
        late = self._clock() - self._due
        if late <= 0:
            self._late = 0
            self._sleep(-late / 1e9)
            return
        # Lateness carried over from the unit before was counted there.
        if late > self._late:
            self.overruns += 1
            self.overrun_ns += late - self._late
        self._late = late
        # After a long stall a chain would let the next units run with no hold at all until it has caught up.
        if late > cost:
            self._due += late
            self._late = 0

    def rest(self) -> None:
        """Nothing follows directly: the next unit starts a chain of its own."""
        self._due = None
