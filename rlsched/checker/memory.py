"""Memory: who sleeps, who is awake, and what is resident where (MEM, WEIGHTS)."""

from collections.abc import Iterable

from ..commands import Load, Offload, Sleep, Wake
from ..facts import Resident
from .causes import about, cause
from .report import Seen
from .state import Order, State

OWNER = {"weights": "engine", "kv": "engine", "parameters": "trainer", "optimizer": "trainer"}
"""Who can hold each part."""


def sleep(state: State, order: Order, event: Sleep) -> None:
    """An engine is put to sleep."""
    engine = about(state, order, event.engine)
    if event.level not in (1, 2):
        state.broken("MEM", f"command {event.id} asks for sleep level {event.level}", order.seen)
    if engine is not None and engine.live:
        rollout = state.rollouts[min(engine.live)]
        request = rollout.order.seen if rollout.order else None
        text = f"engine {engine.id} is put to sleep while rollout {rollout.id} is live in it"
        state.broken("MEM", text, request, order.seen)


def slept(state: State, order: Order, event: Sleep, done: Seen) -> None:
    """A Sleep was answered: the engine computes nothing until it is woken."""
    engine = state.engines.get(event.engine)
    if engine is None:
        return
    engine.asleep = {"weights": order.seen, "kv": order.seen}
    engine.stale = None
    if event.level == 2:
        engine.discarded, engine.version = order.seen, -1
    _told(state, order, done, engine.devices, ("weights", "kv"), full=False)


def wake(state: State, order: Order, event: Wake) -> None:
    """Memory of an engine is wanted again."""
    about(state, order, event.engine)


def woke(state: State, order: Order, event: Wake, done: Seen) -> None:
    """A Wake was answered: its tags are allocated."""
    engine = state.engines.get(event.engine)
    if engine is None:
        return
    for tag in event.tags:
        engine.asleep.pop(tag, None)
    _told(state, order, done, engine.devices, event.tags, full=True)


def loaded(state: State, order: Order, event: Load, done: Seen) -> None:
    """A Load was answered."""
    for part in event.parts:
        state.away.pop(part, None)
    _told(state, order, done, state.trainers, event.parts, full=True)


def offloaded(state: State, order: Order, event: Offload, done: Seen) -> None:
    """An Offload was answered."""
    for part in event.parts:
        state.away[part] = order.seen
    _told(state, order, done, state.trainers, event.parts, full=False)


def resident(state: State, line: int, event: Resident) -> None:
    """Someone holds so much of a device now."""
    seen = Seen(line, event)
    if not _caused(state, line, event):
        return
    held = state.memory.setdefault(event.device, {})
    held[event.part] = seen
    state.reporting.add(event.owner)
    if event.bytes > 0:
        size = state.sizes.setdefault((event.device, event.part), seen)
        if event.bytes != _bytes(size):
            text = f"{event.part} on device {event.device} has {event.bytes} bytes, it had {_bytes(size)}"
            state.broken("MEM", text, size, seen)
    elif event.bytes < 0:
        state.broken("MEM", f"{event.bytes} bytes of {event.part} on device {event.device}", seen)
    capacity = state.capacity.get(event.device, 0)
    total = sum(_bytes(s) for s in held.values())
    if capacity and total > capacity:
        text = f"{total} bytes are resident on device {event.device}, which has {capacity}"
        state.broken("MEM", text, *(s for s in held.values() if _bytes(s)))


def begin(state: State, seen: Seen) -> None:
    """Who reports at all has said by Begin what each of its parts holds, if only nothing."""
    engines = [device for engine in state.engines.values() for device in engine.devices]
    for part, owner in OWNER.items():
        for device in engines if owner == "engine" else state.trainers:
            if owner in state.reporting and part not in state.memory.get(device, {}):
                state.broken("MEM", f"the set-up does not say how much {part} device {device} holds", seen)


def _caused(state: State, line: int, event: Resident) -> bool:
    """Whether the event's command, or the set-up, places this part on this device."""
    seen, right = Seen(line, event), OWNER[event.part] == event.owner
    order: Order | None = None
    if event.by == 0 and state.begun is None:
        engines = [device for engine in state.engines.values() for device in engine.devices]
        right = right and event.device in (engines if event.owner == "engine" else state.trainers)
    else:
        order = cause(state, line, event, Sleep, Wake, Load, Offload)
        if order is None:
            return False
        match order.event:
            case Sleep(engine=e) | Wake(engine=e):
                tags = order.event.tags if isinstance(order.event, Wake) else ["weights", "kv"]
                engine = state.engines.get(e)
                right = right and event.part in tags and engine is not None and event.device in engine.devices
            case Load(parts=parts) | Offload(parts=parts):
                right = right and event.part in parts and event.device in state.trainers
    if not right:
        text = f"{event.owner}'s {event.part} on device {event.device} is nothing that command {event.by} places"
        state.broken("CAUSE", text, order.seen if order else None, seen)
    return right


def _told(state: State, order: Order, done: Seen, devices: list[int], parts: Iterable[str], full: bool) -> None:
    """Who reports at all says what each command left where. A part that can't leave stays, and says so."""
    for part in parts:
        for device in devices if OWNER[part] in state.reporting else ():
            seen = state.memory.get(device, {}).get(part)
            if seen is None or _by(seen) != order.event.id:
                text = f"command {order.event.id} is done, but nothing says how much {part} device {device} holds now"
                state.broken("MEM", text, order.seen, done)
            elif full and not _bytes(seen) and (device, part) in state.sizes:
                text = f"command {order.event.id} is done, yet no {part} is on device {device}"
                state.broken("MEM", text, order.seen, seen, done)


def _bytes(seen: Seen) -> int:
    assert isinstance(seen.event, Resident)
    return seen.event.bytes


def _by(seen: Seen) -> int:
    assert isinstance(seen.event, Resident)
    return seen.event.by
