"""Bookkeeping: how facts and decisions change a ledger. What it appends to ``out`` goes to the history."""

from typing import Literal

from msgspec.structs import replace

from .commands import Abort, AbortFate, Command, Generate, Stop, Train
from .decisions import Start, Verdict
from .facts import (
    AnyFact,
    Begin,
    Bucket,
    Done,
    Down,
    Installed,
    Observed,
    Phase,
    Resident,
    Scored,
    Segment,
    Trained,
    Up,
    Updating,
)
from .ledger import Engine, Group, Ledger, Prompt, Rollout, Span
from .notes import Accept, Admit, Cancel, Drop, Go, Note, Reject, Wait
from .stages import Drain, Reopen, Track, without

Out = list[Command | Note]

Heard = Literal["ignored", "progress", "change"]
"""What a fact changed: nothing, only how far running groups are, or more."""


def fold(ledger: Ledger, fact: AnyFact, out: Out) -> Heard:
    """Take ``fact`` into the ledger; what it changed. Late and repeated facts are counted and ignored."""
    ledger.now = fact.t
    match fact:
        case Segment():
            return _segment(ledger, fact, out)
        case Scored():
            return _scored(ledger, fact, out)
        case Done():
            return _done(ledger, fact, out)
        case Phase() | Bucket() | Resident() | Observed():
            return "progress"
        case Begin():
            ledger.begun = True
        case Updating() if fact.engine in ledger.engines:
            ledger.engines[fact.engine].installed = -1
        case Installed() if fact.ok and fact.engine in ledger.engines:
            ledger.engines[fact.engine].installed = fact.version
            ledger.engines[fact.engine].joining = False
        case Trained():
            ledger.u = fact.u
        case Down():
            _down(ledger, fact, out)
        case Up():
            _up(ledger, fact)
        case _:
            pass
    return "change"


def issue(ledger: Ledger, command: Command, out: Out) -> int:
    """Put ``command`` out and remember that it wants an answer."""
    ledger.open[command.id] = command  # type: ignore[assignment]
    out.append(command)
    return command.id


def refresh(ledger: Ledger) -> None:
    """See anew which engines take requests, after one of them changed."""
    ledger.ready = [e.id for e in ledger.engines.values() if e.takes_requests]


def next_id(ledger: Ledger) -> int:
    """A fresh command id."""
    ledger.commands += 1
    return ledger.commands


def stop(ledger: Ledger, why: str, out: Out) -> None:
    """Close the run; every later fact is only recorded."""
    issue(ledger, Stop(next_id(ledger), why), out)
    ledger.stopped = True


def admit(ledger: Ledger, start: Start, out: Out) -> None:
    """Admit a group and queue its rollouts. The prompt must be one that ``upcoming`` offers."""
    attempt = _take(ledger, start.prompt, start.queue)
    group = Group(
        ledger.next_group,
        start.prompt,
        attempt,
        ledger.v,
        start.need_n,
        start.launch_n,
        ledger.next_rollout,
        list(start.tags),
        start.kind,
    )
    ledger.groups[group.id] = group
    ledger.running[group.id] = None
    ledger.counters.admitted += 1
    ledger.next_group += 1
    ledger.next_rollout += start.launch_n
    for sample, rollout in enumerate(group.rollouts):
        ledger.rollouts[rollout] = Rollout(rollout, group.id, sample)
        ledger.waiting.append(rollout)
    out.append(
        Admit(
            group.id,
            group.prompt,
            group.version,
            group.need_n,
            group.launch_n,
            group.first,
            attempt,
            group.tags,
            group.kind,
        )
    )


def expire(ledger: Ledger, verdict: Verdict, out: Out) -> None:
    """Carry out what the expire slot said of one group, running or accepted."""
    group = ledger.groups[verdict.group]
    if verdict.fate == "park":
        group.parked = ledger.v
        abort_live(ledger, list(group.rollouts), "resume", out)
        for r in group.rollouts:
            if ledger.rollouts[r].state == "waiting":
                ledger.rollouts[r].state = "interrupted"
                ledger.waiting.remove(r)
                ledger.interrupted.append(r)
        return
    again = verdict.fate == "requeue"
    if group.state == "accepted":
        del ledger.buffer[group.id]
        ledger.counters.dropped += 1
        if verdict.refund:
            ledger.counters.accepted -= 1
        out.append(Drop(group.id, verdict.why, again))
    else:
        cancel(ledger, group, verdict.why, again, out)
    if again:
        ledger.again.setdefault(verdict.queue, []).append(Prompt(group.prompt, group.attempt + 1))
    close(ledger, group, out)


def cancel(ledger: Ledger, group: Group, why: str, requeue: bool, out: Out) -> None:
    """Give a running group up."""
    del ledger.running[group.id]
    ledger.counters.cancelled += 1
    out.append(Cancel(group.id, why, requeue))


def consume(ledger: Ledger, groups: list[int]) -> list[int]:
    """Take ``groups`` out of the buffer for training; the rollouts to train on."""
    rollouts: list[int] = []
    for g in groups:
        del ledger.buffer[g]
        group = ledger.groups[g]
        group.state = "consumed"
        rollouts += group.scored[: group.need_n]
    ledger.unpublished += len(groups)
    ledger.counters.consumed += len(groups)
    return rollouts


def close(ledger: Ledger, group: Group, out: Out) -> None:
    """End a group's life: call back what still runs, and forget the rest."""
    abort_live(ledger, list(group.rollouts), "cancel", out)
    group.state = "closed"
    for r in group.rollouts:
        rollout = ledger.rollouts.get(r)
        if rollout is not None and rollout.state != "live":
            _forget(ledger, rollout)


def abort_live(ledger: Ledger, rollouts: list[int], fate: AbortFate, out: Out) -> set[int]:
    """Abort those of ``rollouts`` that are inside an engine and not called back yet; the ids of the commands."""
    by_engine: dict[int, list[int]] = {}
    for r in rollouts:
        record = ledger.rollouts.get(r)
        if record is None or record.state != "live" or record.engine is None:
            continue
        if r not in ledger.recalled:
            by_engine.setdefault(record.engine, []).append(r)
        if r not in ledger.recalled or fate == "cancel":
            ledger.recalled[r] = fate  # a cancel outdoes the fate of an abort under way
    return {issue(ledger, Abort(next_id(ledger), engine, sorted(ids), fate), out) for engine, ids in by_engine.items()}


def wait(ledger: Ledger, who: str, on: str, out: Out) -> None:
    """Note that ``who`` waits on ``on``, once."""
    if ledger.waits.get(who) != on:
        go(ledger, who, out)
        ledger.waits[who] = on
        ledger.wait_since[who] = ledger.now
        out.append(Wait(who, on))


def go(ledger: Ledger, who: str, out: Out) -> None:
    """Note that ``who`` goes on, if it waited."""
    if ledger.waits.pop(who, None) is not None:
        waited = ledger.now - ledger.wait_since.pop(who)
        ledger.waited[who] = ledger.waited.get(who, 0) + waited
        out.append(Go(who))


def _take(ledger: Ledger, prompt: int, queue: str) -> int:
    """Take ``prompt`` off the queues; its attempt number."""
    for waiting in ledger.again.get(queue, ()):
        if waiting.id == prompt:
            ledger.again[queue].remove(waiting)
            return waiting.attempt
    ledger.taken.add(prompt)
    while ledger.cursor in ledger.taken:
        ledger.taken.remove(ledger.cursor)
        ledger.cursor += 1
    return 0


def _segment(ledger: Ledger, fact: Segment, out: Out) -> Heard:
    rollout = ledger.rollouts.get(fact.rollout)
    if rollout is None or rollout.state != "live" or (rollout.by, rollout.engine) != (fact.by, fact.engine):
        ledger.counters.ignored += 1
        return "ignored"
    if fact.end == "install":
        if fact.version <= rollout.told:  # a request is paused once under a version: it was told before
            ledger.counters.ignored += 1
            return "ignored"
        rollout.told = fact.version
    if fact.n:
        if rollout.spans and rollout.spans[-1].version == fact.version:
            rollout.spans[-1].n += fact.n
        else:
            rollout.spans.append(Span(fact.version, fact.n))
    if fact.end == "install":
        return "progress"
    ledger.engines[fact.engine].live.discard(rollout.id)
    if fact.by in ledger.pending:
        ledger.pending[fact.by] -= 1
    group = ledger.groups[rollout.group]
    rollout.state = "finished"
    fate = ledger.recalled.pop(rollout.id, "resume")
    if group.state == "closed":
        _forget(ledger, rollout)
    elif fact.end == "error":
        _reject(ledger, group, f"rollout {rollout.id} failed", out)
    elif fact.end == "abort" and fate != "cancel":
        if fate == "restart":
            rollout.spans = []
        rollout.state = "interrupted"
        rollout.cause = "restart" if fate == "restart" else "resume"
        rollout.interrupts += 1
        ledger.interrupted.append(rollout.id)
    else:
        return "progress"
    return "change"


def _scored(ledger: Ledger, fact: Scored, out: Out) -> Heard:
    rollout = ledger.rollouts.get(fact.rollout)
    if rollout is None or rollout.state != "finished":
        ledger.counters.ignored += 1
        return "ignored"
    group = ledger.groups[rollout.group]
    rollout.state = "scored"
    if group.state != "running":
        return "progress"
    if not fact.keep:
        _reject(ledger, group, "filtered", out)
        return "change"
    group.scored.append(rollout.id)
    if len(group.scored) < group.need_n:
        return "progress"
    del ledger.running[group.id]
    group.state = "accepted"
    ledger.buffer[group.id] = ledger.now
    ledger.counters.accepted += 1
    out.append(Accept(group.id))
    _spare(ledger, group, out)
    return "change"


def _spare(ledger: Ledger, group: Group, out: Out) -> None:
    """Call back the samples that a whole group no longer needs."""
    rest = [r for r in group.rollouts if r not in group.scored]
    abort_live(ledger, rest, "cancel", out)
    for r in rest:
        if r in ledger.rollouts and ledger.rollouts[r].state in ("waiting", "interrupted"):
            _forget(ledger, ledger.rollouts[r])


def _reject(ledger: Ledger, group: Group, why: str, out: Out) -> None:
    if group.state == "running":
        del ledger.running[group.id]
        ledger.counters.rejected += 1
        out.append(Reject(group.id, why))
        close(ledger, group, out)


def _shorten(rollout: Rollout, n: int) -> None:
    """Leave a rollout its first ``n`` tokens."""
    spans: list[Span] = []
    for span in rollout.spans:
        if n > 0:
            spans.append(Span(span.version, min(n, span.n)))
        n -= span.n
    rollout.spans = spans


def _forget(ledger: Ledger, rollout: Rollout) -> None:
    """Drop a rollout that nothing can ask for any more, and its group with the last one."""
    del ledger.rollouts[rollout.id]
    if rollout.state == "waiting":
        ledger.waiting.remove(rollout.id)
    elif rollout.state == "interrupted":
        ledger.interrupted.remove(rollout.id)
    group = ledger.groups[rollout.group]
    if not any(r in ledger.rollouts for r in group.rollouts):
        del ledger.groups[group.id]


def _done(ledger: Ledger, fact: Done, out: Out) -> Heard:
    command = ledger.open.pop(fact.cmd, None)
    if command is None:
        ledger.counters.ignored += 1
        return "ignored"
    for track in ledger.tracks.values():
        track.awaiting.discard(fact.cmd)
    match command:
        case Generate():
            ledger.pending.pop(command.id, None)
            return "progress"
        case Train() if fact.ok:
            if command.last:
                ledger.x += 1
                ledger.index = 0
            else:
                ledger.index += 1
            ledger.batch = None
            for g in command.groups:
                close(ledger, ledger.groups[g], out)
        case _:
            pass
    return "change"


def _down(ledger: Ledger, fact: Down, out: Out) -> None:
    """What was inside the engine is lost: its rollouts go on from the tokens that they were sent with.

    An engine may come up again; without a trainer nothing goes on.
    """
    if fact.engine is None:
        stop(ledger, fact.why or "the trainer is down", out)
        return
    if fact.engine not in ledger.engines:
        return
    engine = ledger.engines[fact.engine]
    engine.serving = engine.open = False
    for track in ledger.tracks.values():
        track.stages[:] = [without(stage, engine.id) for stage in track.stages]
    if ledger.update is not None:
        ledger.update = replace(ledger.update, engines=[e for e in ledger.update.engines if e != engine.id])
    engine.installed = -1
    training = ledger.tracks.get("trainer")
    if engine.live and training is not None and isinstance(stage := training.stages[0], Drain):
        ledger.tracks["trainer"] = Track([Reopen(stage.engines)])  # the others have to make what is lost
    for r in sorted(engine.live):
        ledger.recalled.pop(r, None)
        rollout = ledger.rollouts[r]
        rollout.state, rollout.cause, rollout.engine = "interrupted", "retry", None
        _shorten(rollout, rollout.sent)
        ledger.interrupted.append(r)
        if ledger.groups[rollout.group].state != "running":
            _forget(ledger, rollout)
    engine.live.clear()
    refresh(ledger)
    for command in [c for c in ledger.open.values() if getattr(c, "engine", None) == fact.engine]:
        del ledger.open[command.id]
        for track in ledger.tracks.values():
            track.awaiting.discard(command.id)


def _up(ledger: Ledger, fact: Up) -> None:
    """The engine waits for a version; the publish slot sees it among those behind."""
    engine = ledger.engines.get(fact.engine)
    if engine is not None and not engine.serving:
        ledger.engines[fact.engine] = Engine(fact.engine, joining=True, open=False, awake=set())
