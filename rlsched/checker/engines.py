"""Engines: standing still, flushing, and going down (PAUSE, FLUSH)."""

from ..commands import Flush, Load, Offload, Pause, Resume, Train, Transfer
from ..facts import Down, Up
from .causes import about
from .generation import lost
from .report import Seen
from .state import Order, State


def pause(state: State, order: Order, event: Pause) -> None:
    """An engine is to stand still."""
    engine = about(state, order, event.engine)
    if engine is not None:
        if engine.pause is not None:
            state.broken("PAUSE", f"engine {engine.id} is paused again", engine.pause, order.seen)
        engine.pause = order.seen


def paused(state: State, order: Order, event: Pause, done: Seen) -> None:
    """A Pause was answered: the engine stands still."""
    engine = state.engines.get(event.engine)
    if engine is not None:
        engine.still = engine.pause is order.seen


def resume(state: State, order: Order, event: Resume) -> None:
    """An engine may step again."""
    engine = about(state, order, event.engine)
    if engine is not None:
        if engine.pause is None:
            state.broken("PAUSE", f"engine {engine.id} is resumed, but it was not paused", order.seen)
        engine.pause, engine.still = None, False


def flush(state: State, order: Order, event: Flush) -> None:
    """An engine is to forget its cached KV."""
    about(state, order, event.engine)


def flushed(state: State, order: Order, event: Flush, done: Seen) -> None:
    """A Flush was answered: unless it was refused, the cache is empty and nobody stands on it."""
    engine = state.engines.get(event.engine)
    if engine is None:
        return
    engine.stale = None
    for r in engine.live:
        rollout = state.rollouts[r]
        if rollout.standing is not None and not event.recompute:
            text = f"engine {engine.id} was flushed while rollout {r} stood on KV, which is to be refused"
            state.broken("FLUSH", text, rollout.standing, done)
        rollout.standing = None


def down(state: State, line: int, event: Down) -> None:
    """An engine, or the trainer, is gone; that answers all the commands that are about it."""
    seen = Seen(line, event)
    if event.engine is None:
        closed = [o for o in state.open.values() if isinstance(o.event, Train | Transfer | Load | Offload)]
    else:
        engine = state.engines.get(event.engine)
        if engine is None or not engine.up:
            what = "isn't there" if engine is None else "is down already"
            state.broken("CAUSE", f"engine {event.engine} is down, but it {what}", seen)
            return
        lost(state, engine)
        engine.up, engine.version, engine.updating = False, -1, None
        engine.pause, engine.still, engine.stale = None, False, None
        for device in engine.devices:
            for part in ("weights", "kv"):
                state.memory.get(device, {}).pop(part, None)
        closed = [o for o in state.open.values() if getattr(o.event, "engine", None) == event.engine]
    for order in state.open.values():
        if isinstance(order.event, Transfer):
            order.left.discard(-1 if event.engine is None else event.engine)
    state.fallen = seen
    for order in closed:
        del state.open[order.event.id]


def up(state: State, line: int, event: Up) -> None:
    """An engine is back, with nothing allocated and no version."""
    seen = Seen(line, event)
    engine = state.engines.get(event.engine)
    if engine is None or engine.up:
        what = "isn't there" if engine is None else "was not down"
        state.broken("CAUSE", f"engine {event.engine} is up, but it {what}", seen)
        return
    engine.up, engine.discarded, engine.installed = True, seen, None
    engine.asleep = {"weights": seen, "kv": seen}
