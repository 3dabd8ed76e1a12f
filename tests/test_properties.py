"""Properties of every history, over random worlds and policies.

Each test recounts from the events what it claims, in other words than controller and checker do, and
ends with shares of its examples in which the claim was put to the test.
"""

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.commands import Abort, Generate, Train
from rlsched.facts import Installed, Segment
from rlsched.history import Event
from rlsched.notes import Accept, Admit, Cancel, Drop, Publish, Reject
from rlsched.policy import Policy, areal_async, verl_hybrid
from rlsched.shape import Shape
from rlsched.sim.scenario import EngineCosts, Scenario, TrainerCosts, TransportCosts
from rlsched.slot import SelectSlot
from rlsched.slots.admit import Cap
from rlsched.slots.expire import AgeBound, Never
from rlsched.slots.place import Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.select import FirstFinished, InOrder, OldestFinished
from rlsched.testing import (
    Tally,
    assert_clean,
    batches,
    colocations,
    policies,
    run,
    scenarios,
    seeds,
    shapes,
    workloads,
)
from rlsched.workload import Length, Workload

NIGHTLY = bool(os.environ.get("RLSCHED_NIGHTLY"))


def examples(n: int) -> settings:
    """``n`` examples, the same ones each time; fresh and many more of them at night."""
    return settings(
        max_examples=20 * n if NIGHTLY else n,
        deadline=None,
        derandomize=not NIGHTLY,
        suppress_health_check=[HealthCheck.too_slow],
    )


def caps(eta: st.SearchStrategy[int], c: st.SearchStrategy[int | None]) -> st.SearchStrategy[Cap]:
    return st.builds(Cap, eta, c)


def hurried(scenario: Scenario) -> Scenario:
    """The same world with a trainer so slow that admission runs as far ahead as it may."""
    return replace(scenario, trainer=replace(scenario.trainer, update_s=0.4))


# ---- P1: how many groups are out


class Out(NamedTuple):
    """Groups that are out as one is admitted, itself included."""

    unpublished: int
    buffered: int
    running: int
    accepted: int
    """Cumulative, without those that were dropped."""
    published: int
    drops: int

    @property
    def all(self) -> int:
        return self.unpublished + self.buffered + self.running


def admissions(events: Iterable[Event]) -> Iterator[Out]:
    """What is out at every admission."""
    running: set[int] = set()
    buffered: set[int] = set()
    consumed: dict[int, int] = {}
    published = accepted = drops = 0
    for event in events:
        match event:
            case Admit():
                running.add(event.group)
                unpublished = sum(n for version, n in consumed.items() if version > published)
                yield Out(unpublished, len(buffered), len(running), accepted, published, drops)
            case Accept():
                running.remove(event.group)
                buffered.add(event.group)
                accepted += 1
            case Reject() | Cancel():
                running.remove(event.group)
            case Drop():
                buffered.remove(event.group)
                accepted -= 1
                drops += 1
            case Train():
                buffered -= {*event.groups}
                consumed[event.version] = consumed.get(event.version, 0) + len(event.groups)
            case Publish():
                published = event.version
            case _:
                pass


def test_admission_never_exceeds_the_cap() -> None:
    """P1, in rlsched's form and in AReaL's, for every selection, expiry, fate and placement."""
    seen = Tally()

    @examples(150)
    @given(
        scenarios() | scenarios().map(hurried),
        policies(admit=caps(st.integers(0, 3), st.none() | st.integers(1, 12))),
        seeds(),
    )
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        assert isinstance(policy.admit, Cap)
        b, eta = scenario.shape.B, policy.admit.eta
        c = b if policy.admit.C is None else policy.admit.C
        out = list(admissions(run(scenario, policy, seed).events))
        for o in out:
            assert o.all <= (eta + 1) * b
            assert o.running <= c
            assert o.accepted + o.running <= (eta + o.published + 1) * b
            # The two forms are the same while each version consumes exactly B and drops leave ``accepted``.
            assert o.accepted + o.running - o.all == o.published * b
        seen.add(
            count=any(o.all == (eta + 1) * b for o in out),
            concurrency=any(o.running == c for o in out),
            c_over_b=c > b,
            c_under_b=c < b,
        )

    holds()
    seen.demand(count=0.6, concurrency=0.8, c_over_b=0.1, c_under_b=0.06)


def test_a_dropped_group_gives_its_place_back() -> None:
    """P1 is reached after drops as before them: a cap that leaks with every drop would be η = 0 in the end."""
    seen = Tally()
    ages = st.builds(AgeBound, st.just(0), st.booleans())
    drawn = policies(admit=caps(st.integers(1, 3), st.just(64)), expire=ages, select=st.just(FirstFinished()))

    @examples(60)
    @given(scenarios(shape=shapes(k=1, steps=6)).map(hurried), drawn, seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        history = run(scenario, policy, seed)
        assert_clean(history)
        assert isinstance(policy.admit, Cap)
        limit = (policy.admit.eta + 1) * scenario.shape.B
        late = [o for o in admissions(history.events) if o.drops > scenario.shape.B]
        seen.add(
            drops=bool(late),
            reached=any(o.all == limit for o in late),
        )

    holds()
    seen.demand(drops=0.8, reached=0.8)


# ---- P2: how old a trained group is


def test_batches_in_order_bound_the_age() -> None:
    """P2: every version consumes B, batches take the lowest ordinals: no trained group is older than η."""
    seen = Tally()
    drawn = policies(
        admit=caps(st.integers(0, 3), st.none() | st.integers(1, 16)),
        select=st.just(InOrder()),
        expire=st.just(Never()),
    )

    @examples(120)
    @given(scenarios() | scenarios().map(hurried), drawn, seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        assert isinstance(policy.admit, Cap)
        eta = policy.admit.eta
        groups = [g for batch in batches(run(scenario, policy, seed).events) for g in batch.groups]
        assert len(groups) == scenario.shape.steps * scenario.shape.B
        assert [g.admit.group for g in groups] == sorted(g.admit.group for g in groups)
        for group in groups:
            assert 0 <= group.age <= eta
            assert 0 <= group.admission_age <= eta
        seen.add(
            ahead=eta > 0,
            age=eta > 0 and any(g.age == eta for g in groups),
            admission_age=eta > 0 and any(g.admission_age == eta for g in groups),
        )

    holds()
    seen.demand(ahead=0.5, age=0.35, admission_age=0.35)


@pytest.mark.parametrize(("select", "oldest"), [(FirstFinished(), 2), (OldestFinished(), 2), (InOrder(), 1)])
def test_other_orders_exceed_the_bound(select: SelectSlot, oldest: int) -> None:
    """The smallest counterexample to P2 without its premise: b = k = 1, η = 1, one engine, a long and two short."""
    ms = 1e-3
    world = Scenario(
        shape=Shape(b=1, samples=1, steps=3, engines=1),
        workload=Workload(Length(mean=1), Length("lognormal", mean=4, sigma=1.6)),
        engine=EngineCosts(step_s=ms, seq_s=0.0, kv_s=0.0, prompt_s=0.0),
        trainer=TrainerCosts(old_logprob_token_s=0.0, update_s=ms, update_token_s=0.0),
        transport=TransportCosts(version_gb=0.001, broadcast_bucket_s=0.0),
    )
    assert [world.workload.output_tokens(1, prompt, 0, 0, 256) for prompt in range(3)] == [20, 1, 1]
    history = run(world, replace(areal_async(), admit=Cap(eta=1, C=2), select=select), seed=1)
    assert_clean(history)
    assert max(group.age for batch in batches(history.events) for group in batch.groups) == oldest


# ---- on-policy


def on_policy(events: Iterable[Event]) -> int:
    """Demand that every trained token comes from the version that it updates; the batches."""
    trained = list(batches(events))
    for batch in trained:
        for group in batch.groups:
            assert group.age == group.admission_age == 0
            for rollout, tokens in group.samples.items():
                assert {*tokens} == {batch.version - 1}, (batch.version, rollout)
    return len(trained)


def test_without_look_ahead_every_token_is_on_policy() -> None:
    """η = 0 with static B, under any selection, expiry, fate, C and filter."""
    seen = Tally()

    @examples(100)
    @given(scenarios(), policies(admit=caps(st.just(0), st.none() | st.integers(1, 12))), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        history = run(scenario, policy, seed)
        assert_clean(history)
        assert on_policy(history.events) == scenario.shape.steps * scenario.shape.k
        seen.add(
            out_of_order=isinstance(policy.select, FirstFinished | OldestFinished),
            several_batches=scenario.shape.k > 1,
            rejected=any(isinstance(e, Reject) for e in history.events),
            called_back=any(isinstance(e, Abort) for e in history.events),
        )

    holds()
    seen.demand(out_of_order=0.15, several_batches=0.3, rejected=0.1, called_back=0.02)


def test_verl_hybrid_is_on_policy_and_quiet() -> None:
    """P3: besides, nothing generates from a version's first batch to its publication."""
    seen = Tally()

    @examples(60)
    @given(scenarios(), colocations(), seeds())
    def holds(scenario: Scenario, place: object, seed: int) -> None:
        history = run(scenario, replace(verl_hybrid(), place=place), seed)
        assert_clean(history)
        assert on_policy(history.events) == scenario.shape.steps * scenario.shape.k
        live: set[int] = set()
        training = False
        for event in history.events:
            match event:
                case Generate():
                    assert not training
                    live |= {work.rollout for work in event.work}
                case Segment():
                    live.discard(event.rollout)
                case Train():
                    training = True
                    assert not live
                case Publish():
                    training = False
                case _:
                    pass
        seen.add(
            several_batches=scenario.shape.k > 1,
            rejected=any(isinstance(e, Reject) for e in history.events),
        )

    holds()
    seen.demand(several_batches=0.15, rejected=0.1)


# ---- P4: which versions a rollout is made of


SEVERAL = ("resume", "retract", "keep")
"""Fates under which a rollout may be of several versions."""


@pytest.mark.parametrize("fate", ["resume", "restart", "drain", "retract", "keep"])
def test_which_rollouts_are_of_several_versions_and_on_which_kv(fate: str) -> None:
    seen = Tally()
    drawn = policies(
        admit=caps(st.integers(1, 2), st.integers(4, 16)),
        publish=st.just(EveryVersion(fate=fate)),  # type: ignore[arg-type]
        place=st.just(Disaggregated()),
    )

    @examples(60)
    @given(scenarios(shape=shapes(budget=48), workload=workloads(fixed=False)), drawn, seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        history = run(scenario, policy, seed)
        assert_clean(history)
        samples = [s for batch in batches(history.events) for g in batch.groups for s in g.samples.values()]
        mixed = sum(len(tokens) > 1 for tokens in samples)
        assert fate in SEVERAL or not mixed
        through = [e for e in history.events if isinstance(e, Segment) and e.end == "install"]
        older = [e for e in history.events if isinstance(e, Segment) and e.n and e.kv_from < e.version]
        assert fate in ("retract", "keep") or not through
        assert fate == "keep" or not older
        assert {(e.rollout, e.by) for e in older} <= {(e.rollout, e.by) for e in begun(history.events)}
        seen.add(
            mixed=mixed > 0,
            through=bool(through),
            older=bool(older),
            interrupted=any(isinstance(e, Segment) and e.end == "abort" and e.n > 0 for e in history.events),
        )

    holds()
    demands: dict[str, dict[str, float]] = {
        "resume": {"mixed": 0.2},
        "restart": {"interrupted": 0.3},
        "drain": {"interrupted": 0.1},
        "retract": {"mixed": 0.2, "through": 0.3},
        "keep": {"mixed": 0.2, "through": 0.3, "older": 0.2},
    }
    seen.demand(**demands[fate])


def begun(events: Iterable[Event]) -> Iterator[Segment]:
    """A segment for each request that was inside an engine, sent before, when a version was installed there."""
    inside: dict[int, dict[int, int]] = {}
    for event in events:
        match event:
            case Generate():
                inside.setdefault(event.engine, {}).update({work.rollout: event.id for work in event.work})
            case Segment() if event.end != "install":
                inside[event.engine].pop(event.rollout)
            case Installed():
                for rollout, by in inside.get(event.engine, {}).items():
                    yield Segment(event.t, by, rollout, event.engine, event.version, 0, "install", 0)
            case _:
                pass
