"""The course of a run: its beginning, its waits, its answers and its end (CAUSE, CONS, LIVE)."""

from ..commands import Stop, Timer
from ..facts import Begin, End
from ..notes import Go, Wait
from . import memory, weights
from .report import Seen
from .state import Order, State


def begin(state: State, line: int, event: Begin) -> None:
    """The set-up is over."""
    seen = Seen(line, event)
    if state.begun is not None:
        state.broken("CAUSE", "the run begins a second time", state.begun, seen)
        return
    state.begun = seen
    weights.begin(state, seen)
    memory.begin(state, seen)


def wait(state: State, line: int, event: Wait) -> None:
    """Someone can't go on."""
    seen = Seen(line, event)
    if event.who in state.waits:
        text = f"{event.who} waits on {event.on}, but it was waiting already"
        state.broken("LIVE", text, state.waits[event.who], seen)
    state.waits[event.who] = seen


def go(state: State, line: int, event: Go) -> None:
    """Someone goes on."""
    if state.waits.pop(event.who, None) is None:
        state.broken("LIVE", f"{event.who} goes on, but it did not wait", Seen(line, event))


def stop(state: State, order: Order, event: Stop) -> None:
    """The history is to be closed."""
    state.stopped = order.seen


def timed(state: State, order: Order, event: Timer, done: Seen) -> None:
    """A Timer was answered."""
    if state.now < event.at:
        state.broken("CAUSE", f"the timer for {event.at} rang at {state.now}", order.seen, done)


def failed(state: State, done: Seen) -> None:
    """A command failed, and that ends a run."""
    if state.failed is None:
        state.failed = done


def end(state: State, line: int, event: End) -> None:
    """The history is closed."""
    state.ended = event
    seen = Seen(line, event)
    order = state.open.pop(event.by, None)
    if order is not None and not isinstance(order.event, Stop):
        state.broken("CAUSE", f"End by {event.by}, which is no Stop", order.seen, seen)
        state.open[event.by] = order
    elif order is None and (event.ok or event.by):
        state.broken("CAUSE", f"End by {event.by}, which is no unanswered command", seen)
    stopped = state.stopped
    halted = stopped.event.why if stopped is not None and isinstance(stopped.event, Stop) else ""
    if event.stalled:
        text = f"nothing could happen any more: {event.why}"
        state.broken("LIVE", text, state.failed, state.fallen, *state.waits.values(), seen)
        return
    if not event.ok:
        state.report.failed = event.why or "nothing says why"
        if stopped is not None and not halted:
            state.broken("LIVE", "the run was stopped in good order, yet failed", stopped, seen)
        return
    if halted:
        state.broken("LIVE", f"the run stopped because of {halted!r}, yet ended well", stopped, seen)
    if state.failed is not None:
        state.broken("LIVE", "the run ended well, though a command had failed", state.failed, seen)
    _settled(state, seen)


def silence(state: State, open: bool) -> None:
    """The history is at its end, with or without an End."""
    if state.ended is not None:
        return
    if state.stopped is not None:
        state.broken("LIVE", "the run was stopped, but has no End", state.stopped)
    elif not open:
        state.broken("LIVE", "the history is closed, but has no End", state.newest)


def _settled(state: State, seen: Seen) -> None:
    """What a history that ended well leaves: nothing."""
    if state.begun is None:
        state.broken("CAUSE", "the run ended well without a Begin", seen)
    for order in state.open.values():
        if not isinstance(order.event, Timer | Stop):
            name = type(order.event).__name__
            state.broken("LIVE", f"{name} {order.event.id} was never answered", order.seen, seen)
    for who, waiting in state.waits.items():
        if who != "trainer":
            state.broken("LIVE", f"{who} waits at the end", waiting, seen)
    for group in state.groups.values():
        text = f"group {group.id} is {group.state} at the end: not trained, rejected, dropped or cancelled"
        state.broken("CONS", text, group.last, seen)
    steps = state.manifest.shape.steps
    if state.published != steps:
        text = f"the run ended well with {state.published} versions published, not {steps}"
        state.broken("LIVE", text, state.published_by, seen)
