"""Generation: requests, their segments, aborts and scores (LABEL, WEIGHTS, ABORT, BUDGET and others)."""

from ..commands import Abort, Generate, Work
from ..facts import Scored, Segment
from .causes import about, cause
from .report import Seen
from .state import NOTHING, Engine, Kept, Order, Rollout, State

KEEPS = ("resume", "retract", "keep")
"""Fates that keep the tokens of what was running."""

WITHIN = ("retract", "keep")
"""Fates that leave it inside the engine."""


def generate(state: State, order: Order, event: Generate) -> None:
    """Rollouts go to an engine."""
    engine = about(state, order, event.engine)
    for work in event.work:
        rollout = state.rollouts.get(work.rollout)
        if rollout is None:
            why = "is over" if 0 <= work.rollout < state.next_rollout else "was never admitted"
            state.broken("CONS", f"rollout {work.rollout} was dispatched, but it {why}", order.seen)
        elif rollout.order is not None:
            text = f"rollout {work.rollout} was dispatched while it was live"
            state.broken("ONCE", text, rollout.order.seen, order.seen)
        elif engine is not None:
            _dispatch(state, order, engine, rollout, work)


def segment(state: State, line: int, event: Segment) -> None:
    """An engine made tokens of a rollout, or gave it back."""
    if state.again(event.by, event.rollout, event.engine, event.version, event.n, event.end):
        return
    order = cause(state, line, event, Generate)
    rollout = state.rollouts.get(event.rollout)
    if rollout is None or rollout.order is None:
        known = 0 <= event.rollout < state.next_rollout
        why = "is not live" if known else "was never admitted"
        state.broken("CONS", f"a segment of rollout {event.rollout}, which {why}", Seen(line, event))
        return
    request = rollout.order
    if order is not None and (order is not request or event.engine != rollout.engine):
        text = f"rollout {event.rollout} is live on engine {rollout.engine} by command {request.event.id}"
        state.broken("CAUSE", f"{text}, not on {event.engine} by {event.by}", request.seen, Seen(line, event))
    engine = state.engines[rollout.engine]
    if event.n > 0:
        _tokens(state, line, event, engine, rollout, request)
    elif event.n < 0:
        state.broken("BUDGET", f"rollout {rollout.id} made {event.n} tokens", Seen(line, event))
    if event.end == "install":
        _through(state, Seen(line, event), engine, rollout)
        return
    engine.live.discard(rollout.id)
    state.live.discard(rollout.id)
    request.left.discard(rollout.id)
    rollout.order = rollout.standing = None
    _ending(state, line, event, rollout)
    if rollout.group.state == "over":
        del state.rollouts[rollout.id]


def generated(state: State, order: Order, event: Generate, done: Seen) -> None:
    """A Generate was answered."""
    if order.left:
        text = f"command {event.id} was done while {_some(order)} had not come back"
        state.broken("CONS", text, order.seen, done)


def abort(state: State, order: Order, event: Abort) -> None:
    """Rollouts are called back."""
    about(state, order, event.engine)
    if event.fate == "restart" and state.manifest.promises.partial in KEEPS:
        state.broken("PARTIAL", f"command {event.id} throws tokens away, which the policy promised to keep", order.seen)
    for r in event.rollouts:
        rollout = state.rollouts.get(r)
        if rollout is None or rollout.order is None or rollout.engine != event.engine:
            state.broken("ABORT", f"command {event.id} aborts rollout {r}, which is not on {event.engine}", order.seen)
            continue
        needed = rollout.group.state == "running"
        if needed != (event.fate != "cancel"):
            group = rollout.group
            text = f"command {event.id} is to {event.fate} rollout {r}, whose group {group.id} is {group.state}"
            state.broken("ABORT", text, group.last, order.seen)
        rollout.aborts = [*rollout.aborts, order]
        order.left.add(r)


def aborted(state: State, order: Order, event: Abort, done: Seen) -> None:
    """An Abort was answered."""
    if order.left:
        text = f"command {event.id} was done while {_some(order)} had not come back"
        state.broken("ABORT", text, order.seen, done)
    for r in order.left:
        rollout = state.rollouts.get(r)
        if rollout is not None:
            rollout.aborts = [other for other in rollout.aborts if other is not order]


def scored(state: State, line: int, event: Scored) -> None:
    """A finished rollout got its reward. One whose group is over may get it late."""
    if state.again(event.rollout, event.reward, event.keep):
        return
    rollout = state.rollouts.get(event.rollout)
    if rollout is None:
        if not 0 <= event.rollout < state.next_rollout:
            state.broken("CONS", f"rollout {event.rollout} was scored, but never admitted", Seen(line, event))
        return
    if rollout.state == "scored":
        state.broken("ONCE", f"rollout {event.rollout} was scored twice", Seen(line, event))
    elif rollout.state != "finished":
        text = f"rollout {event.rollout} was scored, but it is {rollout.state}"
        state.broken("CONS", text, rollout.order.seen if rollout.order else None, Seen(line, event))
    else:
        rollout.state = "scored"
        if event.keep:
            rollout.group.kept += 1
        else:
            rollout.state = "failed"
            rollout.group.failed = Seen(line, event)


def lost(state: State, engine: Engine) -> None:
    """An engine is down: what was inside is to be sent again, with the tokens that were sent before."""
    for r in engine.live:
        rollout = state.rollouts[r]
        rollout.order, rollout.aborts, rollout.state = None, [], "waiting"
        had, rollout.standing = rollout.sent, None
        rollout.tokens, rollout.low, rollout.high = had.tokens, had.low, had.high
        rollout.oldest, rollout.newest = had.oldest, had.newest
        state.live.discard(r)
        if rollout.group.state == "over":
            del state.rollouts[r]
    engine.live.clear()


def _dispatch(state: State, order: Order, engine: Engine, rollout: Rollout, work: Work) -> None:
    group, shape = rollout.group, state.manifest.shape
    if rollout.state != "waiting" or group.state != "running":
        text = f"rollout {rollout.id} was dispatched, but it is {rollout.state} and its group {group.state}"
        state.broken("CONS", text, group.last, order.seen)
    sample = rollout.id - group.rollouts.start
    if (work.prompt, work.sample, work.attempt) != (group.prompt, sample, group.attempt):
        text = (
            f"rollout {rollout.id} was dispatched as sample {work.sample} of prompt {work.prompt}, attempt"
            f" {work.attempt}; admitted is sample {sample} of {group.prompt}, attempt {group.attempt}"
        )
        state.broken("CONS", text, group.admit, order.seen)
    if work.have != rollout.tokens:
        lost = state.manifest.promises.partial in KEEPS and work.have < rollout.tokens
        text = f"rollout {rollout.id} was dispatched with {work.have} tokens, it has {rollout.tokens}"
        state.broken("PARTIAL" if lost else "BUDGET", text, rollout.newest, order.seen)
    if work.have > shape.budget:
        text = f"rollout {rollout.id} was dispatched with {work.have} tokens, over the budget of {shape.budget}"
        state.broken("BUDGET", text, order.seen)
    if engine.version < state.published - state.manifest.promises.skew:
        text = f"rollout {rollout.id} goes to engine {engine.id}, which has version {engine.version}"
        state.broken("REPLICA", f"{text}; published is {state.published}", state.published_by, order.seen)
    if group.kind == "train":
        if state.manifest.promises.quiet and state.unpublished:
            version, making = next(iter(state.unpublished.items()))
            text = f"rollout {rollout.id} was dispatched while version {version} was made"
            state.broken("SYNC", text, making.trainings[0], order.seen)
        state.live.add(rollout.id)
    rollout.state, rollout.order, rollout.engine = "live", order, engine.id
    rollout.sent = NOTHING
    if rollout.tokens:
        rollout.sent = Kept(rollout.tokens, rollout.oldest, rollout.newest, rollout.low, rollout.high)
    rollout.kv = engine.version
    engine.live.add(rollout.id)
    order.left.add(rollout.id)


def _tokens(state: State, line: int, event: Segment, engine: Engine, rollout: Rollout, request: Order) -> None:
    """Check that ``engine`` could make these tokens, and add them to the rollout."""
    seen = Seen(line, event)
    promises, version = state.manifest.promises, event.version
    if engine.updating is not None:
        text = f"{event.n} tokens on engine {engine.id} while it took in version {engine.updating.command.version}"
        state.broken("ATOMIC", text, engine.updating.begun, seen)
    elif engine.discarded is not None:
        text = f"{event.n} tokens on engine {engine.id}, whose weights were thrown away"
        state.broken("WEIGHTS", text, engine.discarded, seen)
    elif version != engine.version:
        truth = f"{engine.version} is installed" if engine.version >= 0 else "none is installed"
        text = f"tokens of version {version} on engine {engine.id}, where {truth}"
        state.broken("LABEL", text, engine.installed, seen)
    if event.kv_from == version:
        rollout.kv = version
    else:
        _stands(state, seen, event, rollout, request)
    if engine.asleep:
        tag, sleep = next(iter(engine.asleep.items()))
        state.broken("MEM", f"{event.n} tokens on engine {engine.id}, whose {tag} is asleep", sleep, seen)
    if promises.flush and engine.stale is not None:
        text = f"{event.n} tokens on engine {engine.id}, whose KV cache was not flushed after the install"
        state.broken("FLUSH", text, engine.stale, seen)
    if engine.still:
        state.broken("PAUSE", f"{event.n} tokens on engine {engine.id}, which stands still", engine.pause, seen)
    rollout.tokens += event.n
    if rollout.tokens > state.manifest.shape.budget:
        text = f"rollout {rollout.id} has {rollout.tokens} tokens, over the budget of {state.manifest.shape.budget}"
        state.broken("BUDGET", text, request.seen, seen)
    if rollout.oldest is None or version < rollout.low:
        rollout.low, rollout.oldest = version, seen
    if version >= rollout.high:
        rollout.high, rollout.newest = version, seen


def _stands(state: State, seen: Seen, event: Segment, rollout: Rollout, request: Order) -> None:
    """The KV of another version under a segment is of no newer one, and of no older one than was promised."""
    promises = state.manifest.promises
    oldest = event.version if promises.flush else 0
    if promises.flush and promises.partial == "keep":
        oldest = min(rollout.kv, event.version)
        rollout.kv = max(rollout.kv, event.kv_from)  # what is computed anew is of no older version
    if not oldest <= event.kv_from <= event.version:
        text = f"tokens of version {event.version} stand on KV of version {event.kv_from}"
        older = request.seen if event.kv_from <= event.version and promises.partial == "keep" else None
        state.broken("LABEL", text, older, seen)


def _through(state: State, seen: Seen, engine: Engine, rollout: Rollout) -> None:
    """A request is to go on under the next version."""
    partial = state.manifest.promises.partial
    if partial is not None and partial not in WITHIN:
        text = f"rollout {rollout.id} goes on under the next version inside engine {engine.id}"
        state.broken("PARTIAL", f"{text}, though the policy promised to {partial}", seen)
    if engine.pause is None:
        text = f"rollout {rollout.id} is to live through an install, but engine {engine.id} is not paused"
        state.broken("PAUSE", text, seen)
    rollout.standing = seen


def _ending(state: State, line: int, event: Segment, rollout: Rollout) -> None:
    """What becomes of a rollout that left its engine."""
    fates = {order.event.fate for order in rollout.aborts if isinstance(order.event, Abort)}
    for order in rollout.aborts:
        order.left.discard(rollout.id)
    rollout.aborts = []
    if event.end == "error":
        rollout.state = "failed"
        rollout.group.failed = Seen(line, event)
    elif event.end != "abort":
        rollout.state = "finished"
    elif not fates:
        rollout.state = "waiting"
        state.broken("ABORT", f"rollout {rollout.id} was aborted, which no command asked for", Seen(line, event))
    elif "cancel" in fates:
        rollout.state = "cancelled"
    else:
        rollout.state = "waiting"
        if "restart" in fates:
            rollout.tokens, rollout.low, rollout.high = 0, -1, -1
            rollout.oldest = rollout.newest = None


def _some(order: Order) -> str:
    more = len(order.left) - 1
    return f"rollout {min(order.left)}" + (f" and {more} more" if more else "")
