"""Weights: how a version gets to the engines and is published (ATOMIC, PUBLISH, MONO)."""

from ..commands import Transfer
from ..facts import Bucket, Installed, Updating
from ..notes import Publish
from .causes import about, cause
from .report import Seen
from .state import Engine, Order, State, Update


def transfer(state: State, order: Order, event: Transfer) -> None:
    """A version is sent to engines."""
    if event.version > state.trained:
        text = f"version {event.version} is transferred, trained are {state.trained}"
        state.broken("MONO", text, order.seen)
    for e in event.engines:
        engine = about(state, order, e)
        if engine is not None:
            order.left.add(e)
            if "weights" in engine.asleep:
                text = f"version {event.version} is transferred to engine {e}, whose weights are asleep"
                state.broken("MEM", text, engine.asleep["weights"], order.seen)


def updating(state: State, line: int, event: Updating) -> None:
    """An engine begins to take a version in."""
    target, seen = _target(state, line, event), Seen(line, event)
    if target is None:
        return
    engine, command = target
    if engine.updating is not None:
        text = f"engine {engine.id} begins to take in version {event.version} amid another update"
        state.broken("ATOMIC", text, engine.updating.begun, seen)
    engine.updating = Update(seen, command)
    engine.version = -1


def bucket(state: State, line: int, event: Bucket) -> None:
    """A piece of a version arrived."""
    target, seen = _target(state, line, event), Seen(line, event)
    if target is None:
        return
    engine, command = target
    update = engine.updating
    if update is None or update.command is not command:
        state.broken("ATOMIC", f"bucket {event.index} reached engine {engine.id} outside of its update", seen)
        return
    if event.index != update.buckets:
        text = f"bucket {event.index} reached engine {engine.id} where {update.buckets} is next"
        state.broken("ATOMIC", text, update.begun, seen)
    if not 0 < event.bytes <= command.bucket:
        text = f"bucket {event.index} for engine {engine.id} has {event.bytes} bytes; at most {command.bucket} can be"
        state.broken("ATOMIC", text, state.open[event.by].seen, seen)
    update.buckets += 1
    update.bytes += event.bytes


def installed(state: State, line: int, event: Installed) -> None:
    """An engine ended an update, or was set up with version 0."""
    seen = Seen(line, event)
    if event.by == 0 and state.begun is None:
        engine = state.engines.get(event.engine)
        if engine is None or event.version != 0 or not event.ok:
            text = f"the set-up installs version {event.version} on engine {event.engine}: it must be 0, and whole"
            state.broken("CAUSE", text, seen)
        else:
            engine.version, engine.installed = 0, seen
        return
    target = _target(state, line, event)
    if target is None:
        return
    engine, command = target
    update, engine.updating = engine.updating, None
    if update is None or update.command is not command:
        state.broken("ATOMIC", f"engine {engine.id} ended an update that it had not begun", seen)
        return
    if not event.ok:
        return
    whole = state.manifest.version_bytes or event.bytes
    if not update.bytes == event.bytes == whole:
        text = (
            f"engine {engine.id} installed version {event.version} in {event.bytes} bytes;"
            f" {update.bytes} reached it, and a version has {whole}"
        )
        state.broken("ATOMIC", text, update.begun, seen)
    state.open[event.by].left.discard(engine.id)
    engine.version, engine.installed, engine.discarded = event.version, seen, None
    # Under keep, requests go on with their KV, and there is no other.
    kept = state.manifest.promises.partial == "keep"
    engine.stale = None if kept or "kv" in engine.asleep else seen


def transferred(state: State, order: Order, event: Transfer, done: Seen) -> None:
    """A Transfer was answered."""
    for e in order.left:
        if state.engines[e].up:
            text = f"command {event.id} was done, but engine {e} has not installed its version"
            state.broken("ATOMIC", text, order.seen, done)


def publish(state: State, line: int, event: Publish) -> None:
    """A version is what rollouts start under from now on."""
    seen = Seen(line, event)
    if event.version != state.published + 1:
        text = f"version {event.version} is published after {state.published}"
        state.broken("MONO", text, state.published_by, seen)
    if event.version > state.trained:
        state.broken("PUBLISH", f"version {event.version} is published, trained are {state.trained}", seen)
    skew = state.manifest.promises.skew
    serving = [engine for engine in state.engines.values() if engine.up and "weights" not in engine.asleep]
    holders = [engine.id for engine in serving if engine.version == event.version]
    if sorted(event.engines) != sorted(holders) or not holders:
        text = f"version {event.version} is published for engines {event.engines}; it is held by {holders}"
        state.broken("PUBLISH", text, seen)
    for engine in serving:
        lag = 0 if engine.id in event.engines else skew
        if engine.version < event.version - lag:
            _holds(state, engine, event.version, seen)
    state.published, state.published_by = max(state.published, event.version), seen
    for version in [v for v in state.unpublished if v <= event.version]:
        del state.unpublished[version]


def begin(state: State, seen: Seen) -> None:
    """Version 0 counts as published at Begin: engines that hold their device have it."""
    homes = {d.engine for d in state.manifest.devices if d.holder == "engine"}
    for engine in state.engines.values():
        if engine.id in homes:
            _holds(state, engine, 0, seen)


def _holds(state: State, engine: Engine, version: int, seen: Seen) -> None:
    if engine.version != version:
        held = f"holds {engine.version}" if engine.version >= 0 else "holds none whole"
        text = f"version {version} is out, but engine {engine.id} {held}"
        state.broken("PUBLISH", text, engine.installed, seen)


def _target(state: State, line: int, event: Updating | Bucket | Installed) -> tuple[Engine, Transfer] | None:
    """The engine of an update's event, and the Transfer that brings this version there; None, and reported, if
    there is none."""
    order = cause(state, line, event, Transfer)
    if order is None:
        return None
    command = order.event
    assert isinstance(command, Transfer)
    engine = state.engines.get(event.engine)
    version = command.version if isinstance(event, Bucket) else event.version
    if engine is None or not engine.up or event.engine not in command.engines or version != command.version:
        text = (
            f"{type(event).__name__} by {event.by} of version {version} on engine {event.engine}: the command"
            f" brings {command.version} to {command.engines}"
        )
        state.broken("CAUSE", text, order.seen, Seen(line, event))
        return None
    return engine, command
