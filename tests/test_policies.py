"""Policies of a user's own: slots from a file, more samples than needed, state that is folded from facts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from rlsched.commands import Abort, Generate, Train
from rlsched.decisions import Batch, Hold, Start, Wait
from rlsched.errors import PolicyError
from rlsched.facts import AnyFact, Fact, Scored, Segment, Trained
from rlsched.ledger import Ledger, Rollout
from rlsched.naming import build, parse
from rlsched.notes import Accept, Admit, Reject
from rlsched.policy import Policy, areal_async
from rlsched.shape import Promises, Shape
from rlsched.sim.scenario import Scenario
from rlsched.slot import Cause, Slot
from rlsched.slots.admit import Cap, starts
from rlsched.slots.place import Disaggregated
from rlsched.slots.select import batch, short
from rlsched.testing import Run, Tally, assert_clean, batches, policies, run, scenarios, seeds, workloads

from .account import account
from .test_properties import examples
from .test_world import busy

# ---- more samples than a group needs


class Surplus(Cap, frozen=True):
    """Starts ``extra`` samples more than a group needs."""

    extra: int = 1

    def decide(self, state: None, ledger: Ledger) -> list[Start]:
        return starts(ledger, len(super().decide(state, ledger)), self.extra)


def test_surplus_samples_are_called_back() -> None:
    """Exactly ``need_n`` samples are trained, the first that have a reward; the others are given up at once."""
    seen = Tally()
    surplus = st.builds(Surplus, st.integers(0, 2), st.integers(2, 12), st.integers(1, 3))

    @examples(120)
    @given(scenarios(workload=workloads(fixed=False)), policies(admit=surplus), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        history = run(scenario, policy, seed)
        assert_clean(history)
        account(scenario, seed, history.events)
        assert isinstance(policy.admit, Surplus)
        admits: dict[int, Admit] = {}
        live: set[int] = set()
        called: set[int] = set()
        scored: set[int] = set()
        kept: dict[int, set[int]] = {}
        spare: set[int] = set()
        lost = 0
        for event in history.events:
            if isinstance(event, Fact):
                # A spare sample that is inside an engine is called back before anything else can happen.
                assert spare & live <= called
            match event:
                case Admit():
                    assert event.need_n == scenario.shape.samples == event.launch_n - policy.admit.extra
                    admits[event.group] = event
                case Generate():
                    sent = {work.rollout for work in event.work}
                    assert not sent & spare
                    live |= sent
                case Abort():
                    called |= {*event.rollouts}
                case Segment():
                    live.discard(event.rollout)
                    called.discard(event.rollout)
                    lost += event.rollout in spare and event.n > 0
                case Scored():
                    scored.add(event.rollout)
                case Accept():
                    own = {*range(admits[event.group].first, admits[event.group].first + admits[event.group].launch_n)}
                    kept[event.group] = own & scored
                    assert len(kept[event.group]) == scenario.shape.samples
                    spare |= own - scored
                case Train():
                    assert {*event.rollouts} == {r for group in event.groups for r in kept[group]}
                case _:
                    pass
        seen.add(lost=lost > 0, finished=bool(spare & scored))

    holds()
    seen.demand(lost=0.3, finished=0.1)


# ---- state


class Learned(Struct, frozen=True):
    """What ``Eased`` knows: batches trained, and how long the last rollouts were."""

    trained: int = 0
    tokens: int = 0


class Eased(Slot, frozen=True):
    """Admits one group at a time at first, and one more for every batch that was trained."""

    def start(self, shape: Shape, seed: int) -> Learned:
        return Learned()

    def observe(self, state: Learned, event: AnyFact, ledger: Ledger) -> Learned:
        match event:
            case Trained():
                return Learned(state.trained + 1, state.tokens)
            case Segment():
                return Learned(state.trained, state.tokens + event.n)
            case _:
                return state

    def decide(self, state: Learned, ledger: Ledger) -> list[Start]:
        return starts(ledger, 1 + state.trained - len(ledger.running))

    def promises(self, shape: Shape) -> Promises:
        return Promises()


def test_a_slot_with_state_is_folded_from_facts() -> None:
    """Its state is what the events say it is, and a replay, which folds it anew, finds the same answers."""
    seen = Tally()

    @examples(60)
    @given(scenarios(), policies(admit=st.just(Eased())), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        history = run(scenario, policy, seed)
        assert_clean(history)
        trained = running = reached = 0
        for event in history.events:
            trained += isinstance(event, Trained)
            if isinstance(event, Admit):
                running += 1
                assert running <= trained + 1
                reached = max(reached, running)
            running -= isinstance(event, Accept | Reject)
        seen.add(grew=reached > 2)

    holds()
    seen.demand(grew=0.5)


# ---- a slot from a file

HEADER = """
from rlsched.decisions import Batch, Start, Wait
from rlsched.slot import Slot
from rlsched.slots.admit import starts
from rlsched.slots.select import batch, short

"""

FRESHEST = '''
class Freshest(Slot, frozen=True):
    """Take the groups that were admitted last."""

    def decide(self, state, ledger):
        if len(ledger.buffer) < ledger.shape.b:
            return short(ledger)
        return batch(ledger, sorted(ledger.buffer, reverse=True)[: ledger.shape.b])
'''

DEPTH = '''
class Depth(Slot, frozen=True):
    """Keep ``most`` groups running, however many are finished."""

    most: int = 4

    def decide(self, state, ledger):
        return starts(ledger, self.most - len(ledger.running))
'''

PINNED = '''
class Pinned(Slot, frozen=True):
    """Everything goes to one engine."""

    engine: int = 0

    def decide(self, state, ledger, rollout, cause):
        from rlsched.decisions import Hold
        return self.engine if ledger.engines[self.engine].takes_requests else Hold()
'''

PATIENT = '''
class Patient(Slot, frozen=True):
    """Wait until twice as many groups are finished as a batch needs, then take the oldest."""

    def decide(self, state, ledger):
        if len(ledger.buffer) < 2 * ledger.shape.b:
            return Wait("too few to choose from")
        return batch(ledger, sorted(ledger.buffer)[: ledger.shape.b])
'''


def freshest(history: Run) -> bool:
    made = list(batches(history.events))
    picked = [[g.admit.group for g in b.groups] == sorted(b.buffer, reverse=True)[: len(b.groups)] for b in made]
    return all(picked) and any(len(b.buffer) > len(b.groups) for b in made)


def patient(history: Run) -> bool:
    return all(len(b.buffer) >= 2 * len(b.groups) for b in batches(history.events))


def deep(history: Run) -> bool:
    running, most, buffered = 0, 0, 0
    for event in history.events:
        running += isinstance(event, Admit) - isinstance(event, Accept | Reject)
        most = max(most, running)
    buffered = max(len(b.buffer) for b in batches(history.events))
    return most == 7 and buffered > 3 * history.manifest.shape.B


def pinned(history: Run) -> bool:
    return {e.engine for e in history.events if isinstance(e, Generate)} == {1}


@pytest.mark.parametrize(
    ("source", "setting", "does"),
    [
        (FRESHEST, "select={path}:Freshest,admit.eta=2,admit.C=12", freshest),
        (PATIENT, "select={path}:Patient,admit.eta=2,admit.C=12", patient),
        (DEPTH, "admit={path}:Depth,admit.most=7", deep),
        (PINNED, "route={path}:Pinned,route.engine=1,admit.eta=1", pinned),
    ],
    ids=["select", "select that waits", "admit", "route"],
)
def test_a_slot_from_a_file(tmp_path: Path, source: str, setting: str, does: Callable[[Run], bool]) -> None:
    """Named as on the command line, it changes what happens as it says, and the manifest makes it again."""
    path = tmp_path / "mine.py"
    path.write_text(HEADER + source)
    policy = parse(f"areal-async,{setting.format(path=path)}")
    slow = replace(busy(), trainer=replace(busy().trainer, update_s=0.2))
    for seed in range(3):
        history = run(slow, policy, seed)
        assert_clean(history)
        assert does(history)
        assert not does(run(slow, areal_async(), seed))
        assert run(slow, build(history.manifest.policy), seed).lines == history.lines


def test_a_file_is_named_in_the_manifest_of_a_history(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEADER + DEPTH)
    history = run(busy(), parse(f"areal-async,admit={path}:Depth,admit.most=3"), 0)
    slot = history.manifest.policy.slots["admit"]
    assert (slot.type, slot.fields) == (f"{path}:Depth", {"most": 3})


# ---- slots that can't work


class Nowhere(Slot, frozen=True):
    """Holds everything back."""

    def decide(self, state: None, ledger: Ledger, rollout: Rollout, cause: Cause) -> Hold:
        return Hold("not today")


def test_a_policy_that_goes_nowhere_stalls() -> None:
    history = run(busy(), replace(areal_async(), route=Nowhere()), 0)
    assert not history.end.ok
    assert "trainer waits: fewer than 2 groups are finished" in history.end.why
    assert {*history.report.counts} == {"LIVE"}
    assert history.replay.divergence is None


class Closed(Slot, frozen=True):
    """Sends to an engine whether it takes requests or not."""

    def decide(self, state: None, ledger: Ledger, rollout: Rollout, cause: Cause) -> int:
        return 1 if ledger.engines[0].takes_requests and ledger.v else 0


class Greedy(Slot, frozen=True):
    """Takes groups that don't exist."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        return batch(ledger, [*ledger.buffer, 99]) if ledger.buffer else short(ledger)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (replace(areal_async(), select=Greedy()), r"slot select \(Greedy\): groups \[99\] are not in the buffer"),
        (replace(areal_async(), place=Disaggregated(engines=1), route=Closed()), r"slot route \(Closed\): engine 1"),
    ],
    ids=["select", "route"],
)
def test_an_impossible_decision_names_its_slot(policy: Policy, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        run(busy(), policy, 0)
