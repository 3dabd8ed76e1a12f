"""The controller in trouble: it ignores facts that come late or twice, and goes on from a checkpoint."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.commands import Command
from rlsched.controller import Controller
from rlsched.facts import AnyFact, Done, End, Fact, Scored, Segment
from rlsched.history import Event, Line
from rlsched.ledger import Ledger
from rlsched.policy import Policy
from rlsched.sim.scenario import Scenario
from rlsched.slots.admit import Cap
from rlsched.slots.place import Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.testing import Tally, policies, run, scenarios, seeds, workloads

from .test_policies import Eased
from .test_properties import examples
from .test_world import busy, eager

REPEATED = Segment | Scored | Done

encode = msgspec.json.Encoder().encode


def turns(events: Iterable[Event]) -> Iterator[tuple[AnyFact, list[Event]]]:
    """Each fact of a history but its end, with what the controller answered."""
    fact: Any = None
    answers: list[Event] = []
    for event in events:
        if isinstance(event, Fact):
            if fact is not None:
                yield fact, answers
            fact, answers = event, []
        else:
            answers.append(event)
    assert isinstance(fact, End)


def ahead() -> st.SearchStrategy[Policy]:
    """Policies that run ahead and interrupt: whose rollouts are in every state."""
    fates = st.sampled_from(("resume", "restart", "retract", "keep"))
    return policies(
        admit=st.builds(Cap, st.integers(1, 3), st.integers(4, 16)),
        publish=st.builds(EveryVersion, fate=fates),
        place=st.just(Disaggregated()),
    )


# ---- facts that come twice


def test_a_fact_that_comes_twice_is_counted_and_ignored() -> None:
    """The second time nothing follows from it, and all later answers are the recorded ones."""

    @examples(60)
    @given(scenarios(), policies() | ahead(), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        controller = Controller(policy, scenario.shape, seed)
        for fact, answers in turns(run(scenario, policy, seed).events):
            assert controller.handle(fact) == answers
            if isinstance(fact, REPEATED) and not controller.ledger.stopped:
                ignored = controller.ledger.counters.ignored
                assert controller.handle(fact) == []
                assert controller.ledger.counters.ignored == ignored + 1

    holds()


def test_a_fact_that_comes_late_is_counted_and_ignored() -> None:
    """An old fact comes again after many others, when its rollout may be live a second time on the same engine."""
    seen = Tally()

    @examples(60)
    @given(scenarios(workload=workloads(fixed=False)), ahead(), seeds(), st.integers(1, 40))
    def holds(scenario: Scenario, policy: Policy, seed: int, delay: int) -> None:
        controller = Controller(policy, scenario.shape, seed)
        past: list[Fact] = []
        again = 0
        for fact, answers in turns(run(scenario, policy, seed).events):
            assert controller.handle(fact) == answers
            past.append(fact)
            late = past[-1 - delay] if delay < len(past) else None
            if isinstance(late, REPEATED) and not controller.ledger.stopped:
                rollout = controller.ledger.rollouts.get(getattr(late, "rollout", -1))
                again += isinstance(late, Segment) and rollout is not None and rollout.state == "live"
                assert controller.handle(replace(late, t=fact.t)) == []
        seen.add(live_again=again > 0)

    holds()
    seen.demand(live_again=0.1)


def test_a_failure_that_comes_late_is_ignored() -> None:
    """A command that was answered can't fail afterwards: a timeout that rings after the answer, say."""
    history = run(busy(), eager(), 0)
    controller = Controller(eager(), busy().shape, 0)
    for fact, answers in turns(history.events):
        assert controller.handle(fact) == answers
        if isinstance(fact, Done):
            assert controller.handle(Done(fact.t, fact.cmd, ok=False, why="timeout")) == []


def test_a_slot_with_state_does_not_see_what_is_ignored() -> None:
    """Otherwise its state, and so the schedule, would depend on how often a message was sent."""
    policy = replace(eager(), admit=Eased())
    controller = Controller(policy, busy().shape, 0)
    for fact, answers in turns(run(busy(), policy, 0).events):
        assert controller.handle(fact) == answers
        if isinstance(fact, REPEATED):
            before = controller.ledger.states["admit"]
            controller.handle(fact)
            assert controller.ledger.states["admit"] == before


# ---- checkpoints


def saved(ledger: Ledger) -> Ledger:
    """The ledger after a trip through its encoding."""
    return msgspec.json.decode(encode(ledger), type=Ledger)


def answers_after(controller: Controller, facts: Iterable[AnyFact]) -> list[bytes]:
    lines: list[Line] = [line for fact in facts for line in controller.handle(fact)]
    return [encode(line) for line in lines]


def test_a_checkpoint_goes_on_with_the_same_commands() -> None:
    """The encoded ledger is the checkpoint: a fresh controller with it answers the rest of the facts alike."""
    seen = Tally()

    @examples(60)
    @given(scenarios(), policies() | ahead(), seeds(), st.integers(0, 2**20))
    def holds(scenario: Scenario, policy: Policy, seed: int, where: int) -> None:
        facts = [fact for fact, _ in turns(run(scenario, policy, seed).events)]
        cut = where % len(facts)
        first = Controller(policy, scenario.shape, seed)
        for fact in facts[:cut]:
            first.handle(fact)
        second = Controller(policy, scenario.shape, seed)
        second.ledger = saved(first.ledger)
        assert second.ledger == first.ledger
        middle = len(first.ledger.open) > 0 and 0 < first.ledger.v < scenario.shape.steps
        track = bool(first.ledger.tracks)
        rest = answers_after(first, facts[cut:])
        assert answers_after(second, facts[cut:]) == rest
        seen.add(middle=middle, track=track, commands=bool(rest))

    holds()
    seen.demand(middle=0.15, track=0.1, commands=0.5)


def test_a_checkpoint_holds_the_state_of_slots() -> None:
    policy = replace(eager(), admit=Eased())
    facts = [fact for fact, _ in turns(run(busy(), policy, 0).events)]
    for cut in range(0, len(facts), 97):
        first, second = (Controller(policy, busy().shape, 0) for _ in range(2))
        for fact in facts[:cut]:
            first.handle(fact)
        second.restore(first.checkpoint())
        assert answers_after(second, facts[cut:]) == answers_after(first, facts[cut:])


def test_the_commands_of_a_fact_are_numbered_in_their_order() -> None:
    for _, answers in turns(run(busy(), eager(), 0).events):
        ids = [line.id for line in answers if isinstance(line, Command)]
        assert ids == sorted(ids)
