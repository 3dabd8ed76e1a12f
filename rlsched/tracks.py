"""Tracks: the longer sequences, as lists of stages, and what each stage does when it is entered."""

from copy import copy

from .books import Out, abort_live, consume, issue, next_id, refresh, stop
from .commands import (
    Flush,
    Load,
    Offload,
    Pause,
    Resume,
    Sleep,
    Timer,
    Train,
    Transfer,
    Wake,
)
from .decisions import Install, Move
from .ledger import Ledger
from .notes import Publish
from .stages import (
    Announce,
    AnyStage,
    Bring,
    Drain,
    Farewell,
    FlushCaches,
    Hand,
    Interrupt,
    PutAway,
    PutToSleep,
    Reopen,
    Send,
    Settle,
    Still,
    Track,
    TrainBatch,
    WakeUp,
)


def training(moves: list[Move], ledger: Ledger) -> list[AnyStage]:
    """Get the devices that the trainer lacks, then train the selected batch."""
    return [*(_taking(moves, ledger) if moves else []), TrainBatch()]


def installing(update: Install, moves: list[Move], ledger: Ledger) -> list[AnyStage]:
    """Bring an update to engines that are awake, and to sleeping ones that get their devices back."""
    asleep = [e for e in update.engines if "weights" not in ledger.engines[e].awake]
    awake = [e for e in update.engines if e not in asleep]
    leaving = list(moves[0].offload) if moves else []
    stages: list[AnyStage] = []
    if awake:
        within = update.fate in ("retract", "keep")  # requests stay inside, and a pause lets no new ones begin
        stages += [Still(awake)] if within else [_quiet(awake, update.fate), Still(awake)]
    if asleep:
        stages += [PutAway(leaving[:1]), WakeUp(asleep, ["weights"])]
    stages.append(Send())
    if awake and update.flush and update.fate != "keep":
        stages.append(FlushCaches(awake, update.fate == "retract"))
    stages.append(Announce())
    if asleep:
        stages += [PutAway(leaving[1:]), WakeUp(asleep, ["kv"]), Hand([m.device for m in moves], False)]
    return [*stages, Reopen(update.engines)]


def switching(moves: list[Move], ledger: Ledger) -> list[AnyStage]:
    """Change the holder of devices while neither a batch nor an update asks for it.

    An engine whose weights were discarded stays closed until the publish slot installs a version.
    """
    if moves[0].holder == "trainer":
        return _taking(moves, ledger)
    engines = _engines(moves, ledger)
    return [
        PutAway(list(moves[0].offload)),
        WakeUp(engines, ["weights", "kv"]),
        Hand([m.device for m in moves], False),
        Reopen(engines),
    ]


def _taking(moves: list[Move], ledger: Ledger) -> list[AnyStage]:
    """Bring devices to the trainer."""
    first, engines = moves[0], _engines(moves, ledger)
    return [
        _quiet(engines, first.fate),
        PutToSleep(engines, first.sleep),
        Bring(list(first.load)),
        Hand([m.device for m in moves], True),
    ]


def closing(ledger: Ledger) -> list[AnyStage]:
    """Call every request back, then stop."""
    return [Interrupt(ledger.serving(), "cancel"), Settle(), Farewell()]


def _engines(moves: list[Move], ledger: Ledger) -> list[int]:
    on = {d.id: d.engine for d in ledger.devices}
    return sorted({e for m in moves if (e := on[m.device]) is not None})


def _quiet(engines: list[int], fate: str) -> AnyStage:
    if fate == "drain":
        return Drain(engines)
    return Interrupt(engines, "restart" if fate == "restart" else "resume")


def announce(ledger: Ledger, quorum: int | None, out: Out) -> None:
    """Publish the trained version if enough engines hold it: ``quorum`` of them, or all that don't just join."""
    holders = [e for e in ledger.serving() if ledger.engines[e].installed == ledger.x]
    members = [e for e in ledger.serving() if not ledger.engines[e].joining]
    if ledger.v < ledger.x and len(holders) >= max(1, len(members) if quorum is None else quorum):
        ledger.v = ledger.x
        ledger.unpublished = 0
        ledger.at_publish = copy(ledger.counters)
        out.append(Publish(ledger.v, holders))


def enter(stage: AnyStage, ledger: Ledger, out: Out) -> set[int]:
    """Issue the commands of ``stage``; their ids, which must be answered before it is over."""
    engines = [ledger.engines[e] for e in getattr(stage, "engines", ()) if ledger.engines[e].serving]
    ids: set[int] = set()
    match stage:
        case Interrupt() | Drain():
            for e in engines:
                e.open = False
            if isinstance(stage, Interrupt):
                live = sorted(r for e in engines for r in e.live)
                ids = abort_live(ledger, live, stage.fate, out)
        case Still():
            for e in engines:
                e.paused = True
                ids.add(issue(ledger, Pause(next_id(ledger), e.id), out))
        case Reopen():
            for e in engines:
                e.open = e.installed >= ledger.v  # one that is older waits for the publish slot
                if e.paused:
                    e.paused = False
                    ids.add(issue(ledger, Resume(next_id(ledger), e.id), out))
        case PutToSleep():
            for e in engines:
                e.awake = set()
                if stage.level == 2:
                    e.installed = -1
                ids.add(issue(ledger, Sleep(next_id(ledger), e.id, stage.level), out))
        case WakeUp():
            for e in engines:
                e.awake |= set(stage.tags)
                ids.add(issue(ledger, Wake(next_id(ledger), e.id, stage.tags), out))
        case FlushCaches():
            for e in engines:
                ids.add(issue(ledger, Flush(next_id(ledger), e.id, stage.recompute), out))
        case Bring() if stage.parts:
            ids.add(issue(ledger, Load(next_id(ledger), stage.parts), out))
        case PutAway() if stage.parts:
            ids.add(issue(ledger, Offload(next_id(ledger), stage.parts), out))
        case Hand():
            for device in stage.devices:
                ledger.holders[device] = "trainer" if stage.to_trainer else "engine"
        case TrainBatch():
            assert ledger.batch is not None
            groups = ledger.batch.groups
            rollouts = consume(ledger, groups)
            batch = ledger.batch
            ids.add(
                issue(
                    ledger,
                    Train(next_id(ledger), ledger.x + 1, batch.index, batch.last, groups, rollouts),
                    out,
                )
            )
        case Send():
            assert ledger.update is not None
            u = ledger.update
            if u.engines:
                ids.add(issue(ledger, Transfer(next_id(ledger), u.version, u.engines, u.transport, u.bucket), out))
        case Announce():
            assert ledger.update is not None
            announce(ledger, ledger.update.quorum, out)
        case Farewell():
            stop(ledger, "", out)
        case _:
            pass
    if engines:
        refresh(ledger)
    return ids


def over(stage: AnyStage, ledger: Ledger) -> bool:
    """The condition, besides its answers, that lets ``stage`` end."""
    match stage:
        case Drain() | Interrupt():
            return not any(ledger.engines[e].live for e in stage.engines)
        case Settle():
            return all(isinstance(c, Timer) for c in ledger.open.values())
        case _:
            return True


def advance(ledger: Ledger, name: str, out: Out) -> bool:
    """Move track ``name`` on as far as it goes; whether it moved."""
    track: Track = ledger.tracks[name]
    moved = False
    while track.stages:
        stage = track.stages[0]
        if not track.entered:
            track.awaiting = enter(stage, ledger, out)
            track.entered = moved = True
        if track.awaiting or not over(stage, ledger):
            return moved
        track.stages.pop(0)
        track.entered = False
        moved = True
    del ledger.tracks[name]
    if name == "weights":
        ledger.update = None
    return True
