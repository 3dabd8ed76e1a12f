"""Training: what a batch holds and when it may be trained (SYNC, ORDER, AGE, PARTIAL, MONO, ONCE, GROUP)."""

from ..commands import Train
from ..facts import Phase, Trained
from ..staleness import age
from .causes import cause
from .report import Seen
from .state import Group, Making, Order, Rollout, State


def train(state: State, order: Order, event: Train) -> None:
    """A batch goes to the trainer."""
    order.steps = {"update", "trained"}
    _place(state, order, event)
    batch = _groups(state, order, event)
    samples = _samples(state, order, event, batch)
    order.tokens = sum(r.tokens for r in samples)
    for rollout in samples:
        _versions(state, order, event, rollout)
    if state.manifest.promises.in_order and batch:
        head, tail = next(iter(state.line.values()), None), max(batch, key=lambda g: g.id)
        if head is not None and head.id < tail.id:
            text = f"batch takes group {tail.id} before group {head.id}, which is {head.state}"
            state.broken("ORDER", text, head.admit, order.seen)
    for part, offload in state.away.items():
        state.broken("MEM", f"training while the trainer's {part} is offloaded", offload, order.seen)
    if "trainer" in state.waits:
        state.broken("LIVE", "training while the trainer waits", state.waits["trainer"], order.seen)


def phase(state: State, line: int, event: Phase) -> None:
    """The trainer finished a phase."""
    order = cause(state, line, event, Train)
    if order is not None and event.name == "update":
        order.steps.discard("update")


def trained(state: State, line: int, event: Trained) -> None:
    """A batch was trained on."""
    order = cause(state, line, event, Train)
    seen = Seen(line, event)
    if event.u <= state.u:
        state.broken("MONO", f"{event.u} optimizer steps in all, after {state.u}", seen)
    state.u = max(state.u, event.u)
    if order is None:
        return
    if "trained" not in order.steps:
        state.broken("ONCE", f"command {order.event.id} was trained twice", order.seen, seen)
    if event.tokens > order.tokens:
        text = f"{event.tokens} tokens trained, but the rollouts have {order.tokens}"
        state.broken("GROUP", text, order.seen, seen)
    order.steps.discard("trained")


def ended(state: State, order: Order, event: Train, done: Seen) -> None:
    """A Train was answered: its groups are terminal, and with its last batch a version is trained."""
    if order.steps:
        missing = "update phase" if "update" in order.steps else "Trained"
        state.broken("MONO", f"command {event.id} was done without its {missing}", order.seen, done)
    for g in event.groups:
        group = state.groups.get(g)
        if group is not None and group.state == "consumed":
            state.finish(group, order.seen)
    if event.last:
        state.trained, state.index = max(state.trained, event.version), 0
    else:
        state.index += 1


def _place(state: State, order: Order, event: Train) -> None:
    """MONO of the command, and what SYNC says of a version as a whole."""
    shape, promises = state.manifest.shape, state.manifest.promises
    for other in state.open.values():
        if isinstance(other.event, Train) and other is not order:
            text = f"command {event.id} trains while {other.event.id} is unanswered"
            state.broken("MONO", text, other.seen, order.seen)
    if event.version != state.trained + 1:
        state.broken("MONO", f"batch of version {event.version}, trained are {state.trained}", order.seen)
    if event.index != state.index or event.last != (event.index == shape.k - 1):
        last = "the last" if event.last else "not the last"
        text = f"batch {event.index}, {last}, of version {event.version}, where {state.index} of {shape.k} is due"
        state.broken("MONO", text, order.seen)
    making = state.unpublished.setdefault(event.version, Making())
    making.trainings = [*making.trainings, order.seen]
    making.groups += len(event.groups)
    if promises.quiet and state.live:
        rollout = state.rollouts[min(state.live)]
        request = rollout.order.seen if rollout.order else None
        state.broken("SYNC", f"training while rollout {rollout.id} is live", request, order.seen)
    if promises.quiet and promises.on_policy and event.last and making.groups != shape.B:
        text = f"version {event.version} is made from {making.groups} groups, not from all {shape.B}"
        state.broken("SYNC", text, *making.trainings)


def _groups(state: State, order: Order, event: Train) -> list[Group]:
    """Take the groups of a batch out of the line."""
    batch: list[Group] = []
    for g in event.groups:
        group = state.groups.get(g)
        if group is None:
            why, last = state.fate(g)
            id = "ONCE" if last is not None and isinstance(last.event, Train) else "CONS"
            state.broken(id, f"training on group {g}, which {why}", last, order.seen)
        elif group.state == "consumed":
            state.broken("ONCE", f"training on group {g} again", group.last, order.seen)
        elif group.state != "accepted" or group.kind != "train":
            what = group.state if group.kind == "train" else "for evaluation"
            state.broken("GROUP", f"training on group {g}, which is {what}", group.last, order.seen)
        else:
            group.state, group.last = "consumed", order.seen
            state.line.pop(g, None)
            batch.append(group)
    return batch


def _samples(state: State, order: Order, event: Train, batch: list[Group]) -> list[Rollout]:
    """The rollouts of a batch, which must be what makes its groups whole."""
    samples: dict[int, Rollout] = {}
    counts = dict.fromkeys((group.id for group in batch), 0)
    for r in event.rollouts:
        rollout = state.rollouts.get(r)
        if r in samples:
            state.broken("ONCE", f"the batch names rollout {r} twice", order.seen)
        elif rollout is None or rollout.group.id not in counts:
            state.broken("GROUP", f"training on rollout {r}, which is of none of the batch's groups", order.seen)
        else:
            samples[r] = rollout
            counts[rollout.group.id] += 1
            if rollout.state != "scored":
                text = f"training on rollout {r}, which is {rollout.state}, not scored and kept"
                state.broken("GROUP", text, rollout.group.admit, order.seen)
    for group in batch:
        if counts[group.id] != group.need_n:
            text = f"training on {counts[group.id]} rollouts of group {group.id}, which is whole with {group.need_n}"
            state.broken("GROUP", text, group.admit, order.seen)
    return list(samples.values())


def _versions(state: State, order: Order, event: Train, rollout: Rollout) -> None:
    """What the versions of a trained rollout's tokens may be."""
    promises = state.manifest.promises
    if rollout.oldest is None:
        return
    if promises.on_policy:
        due = event.version - 1
        wrong = rollout.oldest if rollout.low != due else rollout.newest
        if rollout.low != due or rollout.high != due:
            off = rollout.low if rollout.low != due else rollout.high
            text = f"version {event.version} is trained on rollout {rollout.id} with tokens of version {off}, not {due}"
            state.broken("SYNC", text, wrong, order.seen)
    old = age(state.trained, rollout.low)
    if promises.age is not None and old > promises.age:
        text = f"rollout {rollout.id} is trained at age {old}, over the bound of {promises.age}"
        state.broken("AGE", text, rollout.oldest, order.seen)
    if promises.partial in ("restart", "drain") and rollout.low != rollout.high:
        text = f"trained rollout {rollout.id} has tokens of versions {rollout.low} and {rollout.high}"
        state.broken("PARTIAL", text, rollout.oldest, rollout.newest, order.seen)
