"""The checker: one pass over a history, each event given to the part that knows its kind.

It reads what happened and nothing else: no world, no controller, no ledger. A policy is held to
``manifest.promises`` and to no more.
"""

from collections.abc import Callable
from typing import Any

from .. import commands, facts, notes
from ..commands import Command
from ..facts import Done
from ..history import Event, Line, Reader
from ..manifest import Manifest
from . import causes, course, engines, generation, groups, memory, training, weights
from .report import Report, Seen
from .state import Order, State, first


def check(reader: Reader) -> Report:
    """Check the whole history behind ``reader``, or the prefix of one that an open history is."""
    checker = Checker(reader.manifest)
    feed = checker.feed
    for line, event in enumerate(reader.events(), start=2):
        feed(line, event)
    return checker.close(reader.open)


class Checker:
    """Checks events as they come: ``feed`` each with its line, then ``close``."""

    def __init__(self, manifest: Manifest) -> None:
        self._state = first(manifest)

    @property
    def report(self) -> Report:
        """What was found so far."""
        return self._state.report

    def feed(self, line: int, event: Event) -> None:
        """Take the event at ``line`` in; the first one is at 2. Raises KeyError for an unknown kind."""
        state, kind = self._state, type(event)
        state.report.events += 1
        if state.ended is not None:
            state.broken("LIVE", "an event after the end", Seen(line, event))
        fact = _FACTS.get(kind)
        if fact is not None:
            now: int = event.t  # type: ignore[union-attr]
            if now < state.now:
                text = f"a fact at {now} ns after one at {state.now} ns"
                state.broken("CAUSE", text, state.newest, Seen(line, event))
            else:
                state.now = now
            fact(state, line, event)
            state.newest = Seen(line, event)
        elif isinstance(event, Command):
            order = causes.issue(state, line, event)
            _alive(state, order.seen, event)
            _ISSUED[kind](state, order, event)
        else:
            _alive(state, Seen(line, event), event)
            _NOTED[kind](state, line, event)

    def close(self, open: bool) -> Report:
        """The report. ``open``: the history may go on, so nothing is said about its end."""
        course.silence(self._state, open)
        self._state.report.open = open
        return self._state.report


def _alive(state: State, seen: Seen, event: Line) -> None:
    """A controller says nothing before Begin, after Stop, or after a failure but Stop."""
    if state.stopped is not None:
        state.broken("LIVE", "the run goes on after Stop", state.stopped, seen)
    elif state.failed is not None and not isinstance(event, commands.Stop):
        state.broken("LIVE", "the run goes on after a command failed", state.failed, seen)
    if state.begun is None and isinstance(event, notes.Note):
        state.broken("CAUSE", "a decision before Begin", seen)


def _done(state: State, line: int, event: Done) -> None:
    """A command is answered."""
    if state.again(event.cmd, event.ok, event.why):
        return
    seen = Seen(line, event)
    order = state.open.pop(event.cmd, None)
    if order is None:
        why = "was answered already" if 0 < event.cmd <= state.commands else "was never issued"
        state.broken("CAUSE", f"Done for command {event.cmd}, which {why}", seen)
    elif event.ok:
        _ANSWERED[type(order.event)](state, order, order.event, seen)
    else:
        course.failed(state, seen)


def _nothing(state: State, *_: object) -> None:
    """Nothing is to be checked."""


_FACTS: dict[type, Callable[[State, int, Any], None]] = {
    facts.Begin: course.begin,
    facts.Segment: generation.segment,
    facts.Scored: generation.scored,
    facts.Phase: training.phase,
    facts.Trained: training.trained,
    facts.Updating: weights.updating,
    facts.Bucket: weights.bucket,
    facts.Installed: weights.installed,
    facts.Resident: memory.resident,
    facts.Done: _done,
    facts.Observed: _nothing,
    facts.Down: engines.down,
    facts.Up: engines.up,
    facts.End: course.end,
}
_NOTED: dict[type, Callable[[State, int, Any], None]] = {
    notes.Admit: groups.admit,
    notes.Accept: groups.accept,
    notes.Reject: groups.reject,
    notes.Drop: groups.drop,
    notes.Cancel: groups.cancel,
    notes.Publish: weights.publish,
    notes.Wait: course.wait,
    notes.Go: course.go,
}
_ISSUED: dict[type, Callable[[State, Order, Any], None]] = {
    commands.Generate: generation.generate,
    commands.Abort: generation.abort,
    commands.Pause: engines.pause,
    commands.Resume: engines.resume,
    commands.Flush: engines.flush,
    commands.Sleep: memory.sleep,
    commands.Wake: memory.wake,
    commands.Load: _nothing,
    commands.Offload: _nothing,
    commands.Train: training.train,
    commands.Transfer: weights.transfer,
    commands.Timer: _nothing,
    commands.Stop: course.stop,
}
_ANSWERED: dict[type, Callable[[State, Order, Any, Seen], None]] = {
    commands.Generate: generation.generated,
    commands.Abort: generation.aborted,
    commands.Pause: engines.paused,
    commands.Resume: _nothing,
    commands.Flush: engines.flushed,
    commands.Sleep: memory.slept,
    commands.Wake: memory.woke,
    commands.Load: memory.loaded,
    commands.Offload: memory.offloaded,
    commands.Train: training.ended,
    commands.Transfer: weights.transferred,
    commands.Timer: course.timed,
    commands.Stop: _nothing,
}
