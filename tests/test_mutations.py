"""Whether the checker sees a history that was tampered with: one event taken out, or one field altered.

``SEEN`` and ``UNSEEN`` are the two tables of ``docs/invariants.md``, word for word: what an alteration trips,
and which alterations nothing can trip. An alteration reads ``field: how, condition``; ``HOW`` and ``WHERE``
say what the words mean. Every field of every event stands in one table or the other.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields, replace

from rlsched.checker import INVARIANTS
from rlsched.commands import Command, Flush, Generate, Pause, Timer, Train
from rlsched.facts import Bucket, Down, Fact, Installed, Resident, Segment
from rlsched.notes import Accept, Admit, Cancel, Drop, Reject

from .histories import KINDS, History, histories, report

PAGE = Path(__file__).parent.parent / "docs" / "invariants.md"
SAMPLE = 6
"""Events of a kind that are tampered with in each history, spread over its length."""

SEEN: dict[tuple[str, str], str] = {
    ("any fact", "t: before the fact above"): "CAUSE",
    ("any command", "removed"): "CAUSE",
    ("any command", "id: another"): "CAUSE",
    ("Begin", "removed"): "CAUSE",
    ("Segment", "removed, of one that came back"): "CONS",
    ("Segment", "removed, at an install, of tokens that are trained"): "GROUP",
    ("Segment", "by: another"): "CAUSE",
    ("Segment", "rollout: another, of one that came back"): "CONS, CAUSE",
    ("Segment", "rollout: another, at an install, of tokens that are trained"): "CONS, CAUSE, GROUP",
    ("Segment", "engine: another"): "CAUSE",
    ("Segment", "version: another, with tokens"): "LABEL",
    ("Segment", "n: lowered, of tokens that are trained"): "GROUP, BUDGET, PARTIAL",
    ("Segment", "n: raised by the budget"): "BUDGET",
    ("Segment", "end: abort, of one that finished"): "ABORT, CONS",
    ("Segment", "end: stop, of a rollout that goes on"): "CONS",
    ("Segment", "end: error, of a trained rollout"): "CONS, GROUP",
    ("Segment", "end: install, of one that came back"): "CONS, PARTIAL, PAUSE",
    ("Segment", "end: stop, at an install"): "CONS",
    ("Segment", "kv_from: another, unless under keep"): "LABEL",
    ("Segment", "kv_from: newer than its tokens"): "LABEL",
    ("Segment", "kv_from: older than its request, under keep"): "LABEL",
    ("Scored", "removed, of an accepted group"): "GROUP",
    ("Scored", "rollout: another, of an accepted group"): "GROUP",
    ("Scored", "keep: flipped, of an accepted group"): "GROUP",
    ("Phase", "removed, the update"): "MONO",
    ("Phase", "by: another"): "CAUSE",
    ("Phase", "name: another, the update"): "MONO",
    ("Trained", "removed"): "MONO",
    ("Trained", "by: another"): "CAUSE",
    ("Trained", "u: raised, unless the last"): "MONO",
    ("Trained", "u: lowered"): "MONO",
    ("Trained", "tokens: raised"): "GROUP",
    ("Updating", "removed"): "ATOMIC",
    ("Updating", "by: another"): "CAUSE",
    ("Updating", "engine: another"): "ATOMIC, CAUSE",
    ("Updating", "version: another"): "CAUSE",
    ("Bucket", "removed"): "ATOMIC",
    ("Bucket", "by: another"): "CAUSE",
    ("Bucket", "engine: another"): "ATOMIC, CAUSE",
    ("Bucket", "index: another"): "ATOMIC",
    ("Bucket", "bytes: raised"): "ATOMIC",
    ("Bucket", "bytes: lowered"): "ATOMIC",
    ("Installed", "removed"): "PUBLISH, ATOMIC",
    ("Installed", "by: another"): "CAUSE",
    ("Installed", "engine: another"): "PUBLISH, ATOMIC, CAUSE",
    ("Installed", "version: another"): "CAUSE",
    ("Installed", "bytes: raised, by a transfer"): "ATOMIC",
    ("Installed", "bytes: lowered, by a transfer"): "ATOMIC",
    ("Installed", "ok: flipped"): "PUBLISH, ATOMIC",
    ("Resident", "removed"): "MEM",
    ("Resident", "by: another"): "CAUSE",
    ("Resident", "device: another"): "MEM, CAUSE",
    ("Resident", "owner: another"): "CAUSE",
    ("Resident", "part: another"): "MEM, CAUSE",
    ("Resident", "bytes: raised, of a part that comes and goes"): "MEM",
    ("Resident", "bytes: raised to a terabyte, on a device of known size"): "MEM",
    ("Resident", "bytes: negative"): "MEM",
    ("Done", "removed, unless of a timer"): "LIVE",
    ("Done", "cmd: another"): "CAUSE, LIVE",
    ("Done", "ok: flipped"): "LIVE",
    ("Down", "removed"): "ONCE, PUBLISH",
    ("Down", "engine: another"): "CAUSE, ONCE",
    ("Up", "removed"): "CAUSE",
    ("Up", "engine: another"): "CAUSE",
    ("End", "removed"): "LIVE",
    ("End", "by: another"): "CAUSE",
    ("End", "ok: flipped"): "LIVE",
    ("End", "stalled: flipped"): "LIVE",
    ("Generate", "engine: another"): "CAUSE",
    ("Generate", "work: another rollout"): "CONS, ONCE",
    ("Generate", "work: another prompt"): "CONS",
    ("Generate", "work: another sample"): "CONS",
    ("Generate", "work: another attempt"): "CONS",
    ("Generate", "work: more tokens"): "BUDGET",
    ("Generate", "work: one left out, that comes back"): "CONS",
    ("Abort", "engine: another"): "ABORT",
    ("Abort", "rollouts: one left out, that comes back aborted"): "ABORT",
    ("Abort", "rollouts: one too many"): "ABORT",
    ("Abort", "fate: restart, under the resume promise"): "PARTIAL",
    ("Abort", "fate: cancel, of rollouts that are needed"): "ABORT",
    ("Abort", "fate: resume, of rollouts that are not needed"): "ABORT",
    ("Pause", "engine: another"): "PAUSE, CAUSE",
    ("Resume", "engine: another"): "PAUSE, CAUSE",
    ("Flush", "engine: another, unless the engine's last"): "FLUSH",
    ("Flush", "recompute: cleared, under requests"): "FLUSH",
    ("Sleep", "engine: another"): "CAUSE",
    ("Sleep", "level: raised"): "MEM, WEIGHTS",
    ("Wake", "engine: another"): "CAUSE",
    ("Wake", "tags: one left out"): "CAUSE, MEM",
    ("Load", "parts: one left out"): "CAUSE, MEM",
    ("Offload", "parts: one left out"): "CAUSE, MEM",
    ("Train", "version: raised"): "MONO",
    ("Train", "version: lowered"): "MONO",
    ("Train", "index: another"): "MONO",
    ("Train", "last: flipped"): "MONO",
    ("Train", "groups: one left out"): "GROUP",
    ("Train", "groups: one too many"): "CONS",
    ("Train", "rollouts: one left out"): "GROUP",
    ("Train", "rollouts: one too many"): "GROUP",
    ("Transfer", "version: raised"): "MONO",
    ("Transfer", "version: lowered"): "CAUSE",
    ("Transfer", "engines: one left out"): "CAUSE, PUBLISH",
    ("Transfer", "engines: one too many"): "CAUSE",
    ("Transfer", "bucket: smaller than one that came"): "ATOMIC",
    ("Timer", "at: raised"): "CAUSE",
    ("Stop", "why: another"): "LIVE",
    ("Admit", "removed"): "CONS",
    ("Admit", "group: another"): "ONCE",
    ("Admit", "prompt: another"): "CONS",
    ("Admit", "version: another"): "PUBLISH",
    ("Admit", "need_n: raised, of a trained group"): "GROUP",
    ("Admit", "need_n: lowered, of a trained group"): "GROUP",
    ("Admit", "launch_n: raised, unless the last"): "ONCE",
    ("Admit", "launch_n: lowered"): "CONS, GROUP",
    ("Admit", "first: another"): "ONCE",
    ("Admit", "attempt: another"): "CONS",
    ("Admit", "kind: another, of a trained group"): "GROUP",
    ("Accept", "removed"): "CONS, GROUP",
    ("Accept", "group: another"): "CONS, GROUP",
    ("Reject", "removed"): "CONS",
    ("Reject", "group: another"): "CONS, GROUP",
    ("Drop", "removed"): "CONS",
    ("Drop", "group: another"): "CONS",
    ("Drop", "requeue: flipped, and the prompt came again"): "CONS",
    ("Cancel", "removed"): "CONS",
    ("Cancel", "group: another"): "CONS",
    ("Publish", "removed"): "MONO, PUBLISH, LIVE",
    ("Publish", "version: raised"): "MONO",
    ("Publish", "version: lowered"): "MONO",
    ("Publish", "engines: one left out"): "PUBLISH",
    ("Publish", "engines: one too many"): "PUBLISH",
    ("Wait", "removed"): "LIVE",
    ("Wait", "who: another"): "LIVE",
    ("Go", "removed"): "LIVE",
    ("Go", "who: another"): "LIVE",
}
"""What an alteration trips: at least one of these."""

UNSEEN: dict[tuple[str, str], str] = {
    ("any fact", "t: between its neighbours, unless of a timer"): "The order is what invariants speak of; how long"
    " things take is for measures and for comparison.",
    ("Segment", "n: raised, of one that finished within the budget"): "Nothing else says how much an engine made. The"
    " trainer may count fewer tokens (masks), so that only more than there are is a fault.",
    ("Segment", "end: length, of one that stopped"): "Why a rollout finished is the engine's word; either finishes it.",
    (
        "Segment",
        "kv_from: newer, of one that stands on older KV",
    ): "It may have been computed anew, for want of blocks.",
    ("Segment", "end: stop, of a rollout that is over"): "A rollout that nobody waits for may as well have finished.",
    ("Scored", "reward: another"): "A number of the grader's; no schedule depends on it.",
    ("Scored", "parts: another"): "As the reward.",
    ("Phase", "removed, not the update"): "Which phases there are besides the update is the run's to choose.",
    ("Phase", "name: another, not the update"): "As its removal.",
    ("Phase", "ns: another"): "A measure of its own; Trained and Done may come any time later.",
    (
        "Trained",
        "u: raised, the last",
    ): "How many steps a batch makes is the trainer's to choose; only their order binds.",
    ("Trained", "tokens: lowered"): "Masks may take any number of tokens out.",
    ("Trained", "stats: another"): "Numbers of the trainer's.",
    ("Bucket", "ns: another"): "A measure of its own.",
    ("Installed", "bytes: another, of the set-up"): "Version 0 comes with the engine, not in buckets.",
    (
        "Resident",
        "bytes: raised, of a part that never moves",
    ): "Sizes are the world's to know; only a second report of the"
    " same part, or a device that is too small, contradicts one.",
    ("Done", "removed, of a timer"): "A timer that never rings keeps nobody from the end.",
    ("Done", "why: another"): "Words for people.",
    ("Observed", "removed"): "A measurement beside the schedule.",
    ("Observed", "by: another"): "As its removal.",
    ("Observed", "name: another"): "As its removal.",
    ("Observed", "value: another"): "As its removal.",
    ("Down", "why: another"): "Words for people.",
    ("End", "why: another"): "Words for people, as long as the run ended well.",
    ("Sleep", "level: lowered, from 2"): "Level 1 keeps what level 2 throws away: it forbids less.",
    ("Transfer", "transport: another"): "All transports have the same effects; it shows in durations.",
    ("Transfer", "bucket: raised"): "Smaller buckets than were asked for are no fault.",
    ("Timer", "at: lowered"): "A timer may ring late.",
    ("Flush", "engine: the other that serves, the engine's last"): "No token came after it.",
    ("Flush", "recompute: set, of an empty engine"): "Nobody is there to compute anything anew.",
    ("Scored", "removed, of a group given up"): "A group that was given up did not need its scores.",
    ("Admit", "need_n: lowered, of a group given up"): "A group that was given up never had to be whole.",
    ("Admit", "launch_n: raised, the last"): "The surplus never came to be used, and no later id shows it.",
    ("Admit", "kind: another, of a group given up"): "It is training on it that tells the kinds apart.",
    ("Admit", "tags: another"): "For the policy's own use.",
    ("Reject", "why: another"): "Words for people.",
    ("Drop", "why: another"): "Words for people.",
    (
        "Drop",
        "requeue: flipped, and the prompt did not come again",
    ): "A queued prompt may still wait when the run ends.",
    ("Cancel", "why: another"): "Words for people.",
    ("Cancel", "requeue: flipped"): "As for Drop; at the end of a run nothing comes again.",
    ("Wait", "on: another"): "Words for people.",
}
"""Alterations that leave a history which could be true, with the reason."""


class Place:
    """An event of a history, with what conditions ask about."""

    def __init__(self, history: History, at: int) -> None:
        self.manifest, self.events = history
        self.at = at
        self.event: Any = self.events[at]

    def after(self, *kinds: type) -> list[Any]:
        return [e for e in self.events[self.at + 1 :] if isinstance(e, kinds)]

    def all(self, *kinds: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kinds)]

    def group(self, rollout: int) -> int:
        """The group of ``rollout``."""
        return next(a.group for a in self.all(Admit) if a.first <= rollout < a.first + a.launch_n)

    def trained(self, rollout: int) -> bool:
        return any(rollout in train.rollouts for train in self.all(Train))

    def gone(self, group: int) -> bool:
        """The group ended before this event."""
        ends = (e for e in self.events[: self.at] if isinstance(e, Reject | Drop | Cancel))
        return any(e.group == group for e in ends)

    def given_up(self, group: int) -> bool:
        return any(e.group == group for e in self.all(Cancel)) and not any(e.group == group for e in self.all(Accept))

    def needed(self, rollout: int) -> bool:
        ends = (e for e in self.events[: self.at] if isinstance(e, Accept | Reject | Drop | Cancel))
        return not any(e.group == self.group(rollout) for e in ends)

    def live(self) -> set[int]:
        """Rollouts inside the engine of this event."""
        found: set[int] = set()
        for event in self.events[: self.at]:
            if isinstance(event, Generate) and event.engine == self.event.engine:
                found |= {work.rollout for work in event.work}
            elif isinstance(event, Segment) and event.end != "install":
                found.discard(event.rollout)
        return found

    def stood_on(self) -> bool:
        """Whether any of them has told of tokens since its request was sent, which is since the last pause."""
        pause = max((i for i, e in enumerate(self.events[: self.at]) if isinstance(e, Pause)), default=self.at)
        told = {e.rollout for e in self.events[pause : self.at] if isinstance(e, Segment) and e.end == "install"}
        return bool(told & self.live())

    def sent_under(self) -> int:
        """The version that was installed on the engine when this segment's request was sent."""
        sent = next(i for i, e in enumerate(self.events) if getattr(e, "id", 0) == self.event.by)
        held = [e for e in self.events[:sent] if isinstance(e, Installed) and e.engine == self.event.engine]
        return held[-1].version

    def answered(self) -> Command:
        return next(c for c in self.all(Command) if c.id == self.event.cmd)

    def goes_on(self) -> bool:
        """The rollout of this segment is dispatched again."""
        return any(w.rollout == self.event.rollout for g in self.after(Generate) for w in g.work)

    def thrown_away(self) -> bool:
        """The rollout starts anew after this segment."""
        sent = (w for g in self.after(Generate) for w in g.work if w.rollout == self.event.rollout)
        return any(w.have == 0 for w in sent)

    def times(self) -> tuple[int, int]:
        """Of the facts before and after."""
        before = [e.t for e in self.events[: self.at] if isinstance(e, Fact)]
        after = [e.t for e in self.events[self.at + 1 :] if isinstance(e, Fact)]
        return (before or [0])[-1], (after or [self.event.t + 2])[0]

    def moves(self) -> bool:
        """The part of this Resident is reported again on its device, with its size."""
        same = [r for r in self.all(Resident) if (r.device, r.part) == (self.event.device, self.event.part)]
        return self.event.bytes > 0 and sum(r.bytes > 0 for r in same) > 1


WHERE: dict[str, Callable[[Place], bool]] = {
    "with tokens": lambda p: p.event.n > 0,
    "of one that came back": lambda p: p.event.end != "install",
    "at an install": lambda p: p.event.end == "install",
    "at an install, of tokens that are trained": lambda p: p.event.end == "install" and p.trained(p.event.rollout),
    "unless under keep": lambda p: p.event.n > 0 and p.manifest.promises.partial != "keep",
    "under keep": lambda p: p.event.n > 0 and p.manifest.promises.partial == "keep",
    "of one that stands on older KV": lambda p: p.event.n > 0 and p.event.kv_from < p.event.version,
    "under requests": lambda p: p.stood_on(),
    "of an empty engine": lambda p: not p.live(),
    "of tokens that are trained": lambda p: p.event.n > 0 and p.trained(p.event.rollout) and not p.thrown_away(),
    "of a trained rollout": lambda p: p.event.n > 0 and p.trained(p.event.rollout),
    "of one that finished": lambda p: p.event.end in ("stop", "length"),
    "of one that finished within the budget": lambda p: (
        p.event.end == "stop"
        and p.event.n + 1 < p.manifest.shape.budget
        and not any(s.end == "abort" for s in p.all(Segment) if s.rollout == p.event.rollout)
    ),
    "of one that stopped": lambda p: p.event.end == "stop",
    "of a rollout that goes on": lambda p: p.goes_on(),
    "of a rollout that is over": lambda p: p.event.end == "abort" and p.gone(p.group(p.event.rollout)),
    "of an accepted group": lambda p: (
        p.needed(p.event.rollout) and any(a.group == p.group(p.event.rollout) for a in p.after(Accept))
    ),
    "of a trained group": lambda p: any(p.event.group in t.groups for t in p.all(Train)),
    "of a group given up": lambda p: p.given_up(
        p.group(p.event.rollout) if hasattr(p.event, "rollout") else p.event.group
    ),
    "the update": lambda p: p.event.name == "update",
    "not the update": lambda p: p.event.name != "update",
    "the last": lambda p: not p.after(type(p.event)),
    "unless the last": lambda p: bool(p.after(type(p.event))),
    "by a transfer": lambda p: p.event.by > 0,
    "of the set-up": lambda p: p.event.by == 0,
    "of a part that comes and goes": lambda p: p.moves(),
    "of a part that never moves": lambda p: p.event.bytes > 0 and not p.moves() and p.manifest.capacity[0] == 0,
    "on a device of known size": lambda p: p.manifest.capacity[0] > 0,
    "of a timer": lambda p: isinstance(p.answered(), Timer),
    "unless of a timer": lambda p: not hasattr(p.event, "cmd") or not isinstance(p.answered(), Timer),
    "that comes back": lambda p: any(s.by == p.event.id for s in p.after(Segment)),
    "that comes back aborted": lambda p: any(
        s.rollout == p.event.rollouts[0] and s.end == "abort" for s in p.after(Segment)[: len(p.event.rollouts) + 40]
    ),
    "under the resume promise": lambda p: p.manifest.promises.partial == "resume",
    "of rollouts that are needed": lambda p: p.needed(p.event.rollouts[0]),
    "of rollouts that are not needed": lambda p: not p.needed(p.event.rollouts[0]),
    "the engine's last": lambda p: not any(f.engine == p.event.engine for f in p.after(Flush)),
    "unless the engine's last": lambda p: any(f.engine == p.event.engine for f in p.after(Flush)),
    "from 2": lambda p: p.event.level == 2,
    "and the prompt came again": lambda p: p.event.requeue and _again(p),
    "and the prompt did not come again": lambda p: not p.event.requeue and not _again(p),
}
"""Which events an alteration is for."""

HOW: dict[str, Callable[[Place, Any], Any]] = {
    "before the fact above": lambda p, v: p.times()[0] - 1,
    "between its neighbours": lambda p, v: sum(p.times()) // 2,
    "another": lambda p, v: _other(p, v),
    "the other that serves": lambda p, v: v if p.all(Down) else 1 - v,
    "raised": lambda p, v: v + 1,
    "lowered": lambda p, v: v - 1,
    "smaller than one that came": lambda p, v: max(b.bytes for b in p.after(Bucket) if b.by == p.event.id) - 1,
    "flipped": lambda p, v: not v,
    "negative": lambda p, v: -1,
    "newer than its tokens": lambda p, v: p.event.version + (p.event.n > 0),
    "newer": lambda p, v: p.event.version,
    "older than its request": lambda p, v: p.sent_under() - 1,
    "cleared": lambda p, v: False,
    "set": lambda p, v: True,
    "raised by the budget": lambda p, v: v + p.manifest.shape.budget + 1,
    "raised to a terabyte": lambda p, v: 10**12,
    "one left out": lambda p, v: v[1:],
    "one too many": lambda p, v: [*v, 999],
    "another rollout": lambda p, v: [replace(v[0], rollout=v[0].rollout + 1), *v[1:]],
    "another prompt": lambda p, v: [replace(v[0], prompt=v[0].prompt + 1), *v[1:]],
    "another sample": lambda p, v: [replace(v[0], sample=v[0].sample + 1), *v[1:]],
    "another attempt": lambda p, v: [replace(v[0], attempt=v[0].attempt + 1), *v[1:]],
    "more tokens": lambda p, v: [replace(v[0], have=v[0].have + 1), *v[1:]],
    **{word: lambda p, v, word=word: word for word in ("abort", "stop", "length", "error", "install")},
    **{word: lambda p, v, word=word: word for word in ("restart", "resume", "cancel")},
}
"""What an alteration makes of a field."""


def _again(place: Place) -> bool:
    prompt = next(a.prompt for a in place.all(Admit) if a.group == place.event.group)
    return any(a.prompt == prompt for a in place.after(Admit))


def _other(place: Place, value: Any) -> Any:
    match value:
        case "engine" | "trainer":
            return "trainer" if value == "engine" else "engine"
        case "weights" | "kv" | "parameters" | "optimizer":
            return {"weights": "kv", "kv": "weights", "parameters": "optimizer", "optimizer": "parameters"}[value]
        case "train":
            return "eval"
        case "ipc" | "broadcast":
            return "ipc" if value == "broadcast" else "broadcast"
        case str():
            return value + "!"
        case int() | float():
            return value + 1
        case dict():
            return {**value, "more": 1.0}
        case list():
            return [*value, "more"]
    raise AssertionError(value)


def _kinds(name: str) -> tuple[type, ...]:
    base = {"any fact": Fact, "any command": Command}.get(name)
    return tuple(k for k in KINDS if (issubclass(k, base) if base else k.__name__ == name))


def _altered(place: Place, alteration: str) -> list[Any] | None:
    """The events with ``alteration`` made at ``place``; None where it is not for this event or changes nothing."""
    what, _, condition = alteration.partition(", ")
    if condition and not WHERE[condition](place):
        return None
    events = place.events
    if what == "removed":
        return [*events[: place.at], *events[place.at + 1 :]]
    field, how = what.split(": ")
    new = replace(place.event, **{field: HOW[how](place, getattr(place.event, field))})
    return None if new == place.event else [*events[: place.at], new, *events[place.at + 1 :]]


@cache
def _histories() -> tuple[tuple[str, History], ...]:
    return tuple(histories())


def _tampered(kind: str, alteration: str) -> Iterator[tuple[str, History]]:
    """Histories that were tampered with so, each with the words that name it."""
    for name, history in _histories():
        for k in _kinds(kind):
            places = [i for i, e in enumerate(history[1]) if type(e) is k]
            found = 0
            for step in range(max(1, len(places) // SAMPLE)):
                for at in places[step :: max(1, len(places) // SAMPLE)]:
                    events = _altered(Place(history, at), alteration) if found < SAMPLE else None
                    if events is not None:
                        found += 1
                        yield f"{name}, line {at + 2}: {history[1][at]}", (history[0], events)


@pytest.mark.parametrize(("kind", "alteration"), SEEN, ids=map(": ".join, SEEN))
def test_an_alteration_is_seen(kind: str, alteration: str) -> None:
    ids = SEEN[kind, alteration].split(", ")
    tried = 0
    for where, history in _tampered(kind, alteration):
        found = report(history, open=False)
        assert found.counts.keys() & {*ids}, f"{where}: found {found.counts}"
        tried += 1
    assert tried


@pytest.mark.parametrize(("kind", "alteration"), UNSEEN, ids=map(": ".join, UNSEEN))
def test_what_can_not_be_seen_is_not(kind: str, alteration: str) -> None:
    tried = 0
    for where, history in _tampered(kind, alteration):
        found = report(history, open=False)
        assert found.ok, f"{where}: {found.violations[0]}"
        tried += 1
    assert tried


def test_every_field_stands_in_a_table() -> None:
    told = {(k, a.partition(", ")[0].partition(":")[0]) for name, a in [*SEEN, *UNSEEN] for k in _kinds(name)}
    wanted = {(k, name) for k in KINDS for name in ("removed", *(f.name for f in fields(k)))}
    assert wanted == told


def test_every_kind_of_event_happens() -> None:
    happened = {type(e) for _, history in _histories() for e in history[1]}
    assert happened == {*KINDS}


def test_the_page_says_the_same() -> None:
    assert [((k, a), ids) for k, a, ids in _table("What an alteration trips")] == [*SEEN.items()]
    assert [((k, a), why) for k, a, why in _table("What can't be seen")] == [*UNSEEN.items()]


def test_the_page_states_every_invariant() -> None:
    assert {id: statement for id, statement, *_ in _table("The invariants")} == INVARIANTS
    assert {id for ids in SEEN.values() for id in ids.split(", ")} <= INVARIANTS.keys()


def _table(heading: str) -> list[list[str]]:
    """The rows of the table under ``heading``, without its head."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]
