"""Groups: CAP and the way of a group from admission to its one end (CONS, GROUP, ONCE)."""

from ..notes import Accept, Admit, Cancel, Drop, Reject
from ..staleness import outstanding_limit
from .report import Seen
from .state import Group, Rollout, State


def admit(state: State, line: int, event: Admit) -> None:
    """A group may run."""
    seen = Seen(line, event)
    if event.group != state.next_group:
        state.broken("ONCE", f"group {event.group} was admitted where {state.next_group} is next", seen)
    if event.first != state.next_rollout:
        text = f"group {event.group} starts at rollout {event.first} where {state.next_rollout} is next"
        state.broken("ONCE", text, seen)
    if not 1 <= event.need_n <= event.launch_n:
        text = f"group {event.group} needs {event.need_n} samples and launches {event.launch_n}"
        state.broken("GROUP", text, seen)
    if event.version != state.published:
        text = f"group {event.group} was admitted under version {event.version}, published is {state.published}"
        state.broken("PUBLISH", text, state.published_by, seen)
    if event.attempt != state.requeued.pop(event.prompt, 0):
        text = f"prompt {event.prompt} was admitted as attempt {event.attempt}, for which nothing requeued it"
        state.broken("CONS", text, seen)
    if event.group in state.groups:
        return
    rollouts = range(event.first, event.first + event.launch_n)
    group = Group(event.group, seen, event.prompt, event.attempt, event.need_n, rollouts, event.kind, last=seen)
    state.groups[group.id] = group
    for r in rollouts:
        state.rollouts[r] = Rollout(r, group)
    state.next_group = max(state.next_group, event.group + 1)
    state.next_rollout = max(state.next_rollout, rollouts.stop)
    if event.kind == "train":
        state.line[group.id] = group
        state.running += 1
        _cap(state, group)


def accept(state: State, line: int, event: Accept) -> None:
    """A group is whole."""
    group = _of(state, line, event, "running")
    if group is None:
        return
    seen = Seen(line, event)
    if group.kept < group.need_n:
        text = f"group {group.id} was accepted with {group.kept} scored samples of the {group.need_n} it needs"
        state.broken("GROUP", text, group.admit, seen)
    _left(state, group)
    group.state, group.last = "accepted", seen


def reject(state: State, line: int, event: Reject) -> None:
    """A group failed."""
    group = _of(state, line, event, "running")
    if group is None:
        return
    seen = Seen(line, event)
    if group.failed is None:
        text = f"group {group.id} was rejected, but none of its rollouts failed or was filtered"
        state.broken("GROUP", text, group.admit, seen)
    _left(state, group)
    state.finish(group, seen)


def drop(state: State, line: int, event: Drop) -> None:
    """A whole group won't be trained."""
    group = _of(state, line, event, "accepted")
    if group is not None:
        _again(state, group, event)
        state.finish(group, Seen(line, event))


def cancel(state: State, line: int, event: Cancel) -> None:
    """A running group was given up."""
    group = _of(state, line, event, "running")
    if group is not None:
        _again(state, group, event)
        _left(state, group)
        state.finish(group, Seen(line, event))


def _cap(state: State, group: Group) -> None:
    promises, shape = state.manifest.promises, state.manifest.shape
    if promises.concurrency is not None and state.running > promises.concurrency:
        running = [g.admit for g in state.line.values() if g.state == "running"]
        text = f"admitting group {group.id} makes {state.running} running, over C = {promises.concurrency}"
        state.broken("CAP", text, *running)
    if promises.eta is None:
        return
    unpublished = sum(making.groups for making in state.unpublished.values())
    limit = outstanding_limit(promises.eta, shape.B)
    if unpublished + len(state.line) > limit:
        text = (
            f"admitting group {group.id} makes {unpublished} unpublished + {len(state.line) - state.running} buffered"
            f" + {state.running} running, over (eta+1)B = {limit}"
        )
        trainings = [seen for making in state.unpublished.values() for seen in making.trainings]
        state.broken("CAP", text, *trainings, *(g.admit for g in state.line.values()))


def _of(state: State, line: int, event: Accept | Reject | Drop | Cancel, due: str) -> Group | None:
    """The group of ``event`` in state ``due``; None, and reported, if it is in none or in another."""
    group = state.groups.get(event.group)
    name = type(event).__name__
    if group is None:
        why, last = state.fate(event.group)
        state.broken("CONS", f"{name} of group {event.group}, which {why}", last, Seen(line, event))
        return None
    if group.state != due:
        text = f"{name} of group {group.id}, which is {group.state}, not {due}"
        state.broken("CONS", text, group.last, Seen(line, event))
        return None
    return group


def _left(state: State, group: Group) -> None:
    if group.kind == "train":
        state.running -= 1


def _again(state: State, group: Group, event: Drop | Cancel) -> None:
    if event.requeue:
        state.requeued[group.prompt] = group.attempt + 1
