"""Engines that crash and come back, and facts that are told twice: the same tracks lead through all of it.

Whole simulated worlds. A crash is put at an instant at which something else happens, so that it strikes before, amid
and after every command and effect; which of the two comes first is the seed's to say.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.commands import Abort, Generate, Pause, Resume, Sleep, Stop, Train, Transfer, Wake
from rlsched.decisions import Verdict
from rlsched.facts import Done, Down, Fact, Installed, Scored, Segment, Trained, Up, Updating
from rlsched.history import Event
from rlsched.ledger import Ledger
from rlsched.notes import Cancel, Go, Publish, Wait
from rlsched.policy import Policy, areal_async, verl_hybrid
from rlsched.shape import Shape
from rlsched.sim.scenario import (
    Control,
    Crash,
    EngineCosts,
    Faults,
    MemoryCosts,
    Scenario,
    TrainerCosts,
    TransportCosts,
)
from rlsched.slot import Slot, Trigger
from rlsched.slots.admit import Cap
from rlsched.slots.place import Colocated, Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.select import FirstFinished, InOrder
from rlsched.testing import Tally, assert_clean, colocations, policies, run, scenarios, seeds
from rlsched.workload import Length, Workload

from .account import Account
from .test_properties import examples

NS = 1e9

# ---- the account of a history with crashes


class Survivors(Account):
    """An account that outlives crashes: what had not come back when an engine went down was never made."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self.on: dict[int, dict[int, int]] = {}
        """Live rollouts by engine, with the tokens that they were sent with."""
        self.told: set[tuple[object, ...]] = set()

    def take(self, event: Event) -> None:
        if isinstance(event, Segment | Scored | Done):
            words = (
                type(event),
                *(getattr(event, name) for name in event.__struct_fields__ if name not in ("t", "parts")),
            )
            self.seen["repeated"] += words in self.told
            if words in self.told:
                return
            self.told.add(words)
        match event:
            case Generate():
                self.on.setdefault(event.engine, {}).update({work.rollout: work.have for work in event.work})
            case Segment() if event.end != "install":
                del self.on[event.engine][event.rollout]
            case Down():
                for rollout, have in self.on.pop(event.engine, {}).items():
                    self.seen["told and lost"] += self.tokens[rollout] > have
                    self.tokens[rollout] = have
                    del self.home[rollout]
                    self.fates.pop(rollout, None)
                    self.seen["lost"] += 1
            case _:
                pass
        super().take(event)


def account(scenario: Scenario, seed: int, events: Iterable[Event]) -> Account:
    """The account of a whole history, closed."""
    opened = Survivors(scenario, seed)
    for event in events:
        opened.take(event)
    opened.close()
    return opened


# ---- worlds to draw


class Strike(NamedTuple):
    """A crash, before it is known what happens when."""

    engine: int
    at: int
    back: int
    """Which instant, counted from the crash; 0: a millisecond later."""


class Trouble(NamedTuple):
    """What is to go wrong in a world."""

    strikes: list[Strike]
    repeat: float = 0.0
    repeat_s: float = 0.0


def troubles(most: int = 6) -> st.SearchStrategy[Trouble]:
    """Up to ``most`` crashes, and facts told twice: at once, soon, or long afterwards."""
    strike = st.builds(Strike, st.integers(0, 7), st.integers(0, 2**20), st.just(0) | st.integers(0, 200))
    share, later = st.sampled_from((0.0, 0.1, 0.4)), st.sampled_from((0.0, 0.001, 0.04, 0.5))
    strikes = st.lists(strike, min_size=min(2, most), max_size=most) | st.lists(strike, max_size=most)
    return st.builds(Trouble, strikes, share, later)


def troubled(scenario: Scenario, policy: Policy, seed: int, trouble: Trouble) -> Scenario:
    """The world with its troubles: each crash, and each return, is at an instant of the untroubled history."""
    engines = [d.engine for d in policy.place.layout(scenario.shape) if d.engine is not None]
    instants = sorted({e.t for e in run(scenario, policy, seed).events if isinstance(e, Fact)})
    crashes = []
    for strike in trouble.strikes:
        at = strike.at % len(instants)
        back = instants[min(at + strike.back, len(instants) - 1)] - instants[at]
        crashes.append(Crash(engines[strike.engine % len(engines)], instants[at] / NS, back / NS or 1e-3))
    return replace(scenario, faults=Faults(tuple(crashes), trouble.repeat, trouble.repeat_s))


class Impatient(Slot, frozen=True):
    """At a publish, gives up what still runs after ``bound`` versions, and lets its prompt wait for another attempt."""

    bound: int = 0

    def decide(self, state: None, ledger: Ledger, trigger: Trigger) -> list[Verdict]:
        late = [g for g in ledger.running if ledger.v - ledger.groups[g].version > self.bound]
        return [Verdict(g, "requeue", "too old") for g in late] if trigger == "publish" else []


def rolling() -> st.SearchStrategy[Policy]:
    """Policies that run ahead, install engine by engine, and lose patience."""
    fates = st.sampled_from(("resume", "restart", "drain", "retract", "keep"))
    return policies(
        admit=st.builds(Cap, st.integers(1, 3), st.integers(4, 16)),
        publish=st.builds(EveryVersion, fate=fates, rolling=st.just(True)),
        place=st.just(Disaggregated()),
        expire=st.builds(Impatient, st.integers(0, 1)),
    )


def within() -> st.SearchStrategy[Policy]:
    """Policies that run ahead, and whose requests live through updates."""
    fates = st.sampled_from(("keep", "retract"))
    return policies(
        admit=st.builds(Cap, st.integers(1, 3), st.integers(4, 16)),
        publish=st.builds(EveryVersion, fate=fates, rolling=st.booleans()),
        place=st.just(Disaggregated()),
    )


def shared() -> st.SearchStrategy[Policy]:
    """Policies under which engines and trainer take turns on the same devices."""
    return policies(place=colocations())


def ties(events: Iterable[Event]) -> bool:
    """Whether an engine went down at an instant at which something else happened."""
    facts = [e for e in events if isinstance(e, Fact)]
    down = {e.t for e in facts if isinstance(e, Down)}
    return any(e.t in down for e in facts if not isinstance(e, Down))


# ---- the property


def survives(n: int) -> None:
    seen = Tally()

    @examples(n)
    @given(scenarios(), policies() | rolling() | within() | shared(), seeds(), troubles())
    def holds(scenario: Scenario, policy: Policy, seed: int, trouble: Trouble) -> None:
        world = troubled(scenario, policy, seed, trouble)
        history = run(world, policy, seed)
        assert_clean(history)
        closed = account(world, seed, history.events)
        downs = [e for e in history.events if isinstance(e, Down)]
        seen.add(
            crashed=bool(downs),
            often=len(downs) > 3,
            tied=ties(history.events),
            lost=closed.seen["lost"] > 0,
            told_and_lost=closed.seen["told and lost"] > 0,
            lived_through=closed.seen["lived through"] > 0,
            repeated=closed.seen["repeated"] > 0,
            rolled=isinstance(policy.publish, EveryVersion) and policy.publish.rolling,
            colocated=isinstance(policy.place, Colocated),
            cancelled=any(isinstance(e, Cancel) and e.requeue for e in history.events),
        )

    holds()
    seen.demand(crashed=0.4, often=0.03, tied=0.15, lost=0.2, repeated=0.2)
    seen.demand(rolled=0.2, colocated=0.06, cancelled=0.02, lived_through=0.05, told_and_lost=0.01)


def test_a_run_survives_crashes_and_repeated_facts() -> None:
    """No stall, an exact replay, no violation; each group ends once, and every trained token was made."""
    survives(150)


@pytest.mark.nightly
def test_many_runs_survive_crashes_and_repeated_facts() -> None:
    survives(50)


# ---- by hand: what an engine was about when it went down

MS = 1e-3


def calm(engines: int = 2) -> Scenario:
    """Engines that are always at work, and latencies long enough to strike in."""
    return Scenario(
        shape=Shape(b=2, k=2, samples=2, steps=6, engines=engines, budget=128),
        workload=Workload(Length(mean=8), Length("lognormal", mean=60, sigma=0.6)),
        engine=EngineCosts(step_s=MS, seq_s=0.0, kv_s=0.0, prompt_s=0.0),
        trainer=TrainerCosts(update_s=6 * MS, update_token_s=0.0, parameters_gb=0.002, optimizer_gb=0.012),
        transport=TransportCosts(version_gb=0.003, broadcast_bucket_s=2 * MS),
        memory=MemoryCosts(kv_gb=0.01, offload_gbps=10.0, sleep_s=MS, wake_weights_s=MS, wake_kv_s=MS),
        control=Control(latency_s=2 * MS),
    )


def apart(**publish: Any) -> Policy:
    """Engines beside the trainer, always at work."""
    return replace(areal_async(), admit=Cap(eta=2, C=16), publish=EveryVersion(bucket_mb=1, **publish))


def after(events: Iterable[Event], what: Callable[[Any], bool], nth: int = 0) -> float:
    """Seconds at which the ``nth`` such event happens, and half a millisecond more."""
    now = 0
    for event in events:
        now = getattr(event, "t", now)
        if what(event):
            if not nth:
                return now / NS + MS / 2
            nth -= 1
    raise AssertionError("no such event")


def struck(policy: Policy, *crashes: Crash, engines: int = 2) -> tuple[list[Event], int]:
    """The events of a run with these crashes, which must be clean, and the place of the first ``Down`` in them."""
    scenario = replace(calm(engines), faults=Faults(crashes))
    history = run(scenario, policy, seed=3)
    assert_clean(history)
    account(scenario, 3, history.events)
    assert sum(isinstance(e, Down) for e in history.events) == len(crashes)
    return history.events, next(i for i, e in enumerate(history.events) if isinstance(e, Down))


def unharmed(policy: Policy, engines: int = 2) -> list[Event]:
    """The events of the run without a crash."""
    return run(calm(engines), policy, seed=3).events


def works(events: Iterable[Event], engine: int) -> bool:
    """Whether ``engine`` makes a token."""
    return any(isinstance(e, Segment) and e.engine == engine and e.n for e in events)


def last(events: Iterable[Event], *kinds: type) -> Any:
    """The last event of these kinds."""
    return [e for e in events if isinstance(e, kinds)][-1]


def inside(events: Iterable[Event], engine: int) -> set[int]:
    """The rollouts that are live on ``engine`` after these events."""
    live: set[int] = set()
    for event in events:
        if isinstance(event, Generate) and event.engine == engine:
            live |= {work.rollout for work in event.work}
        elif isinstance(event, Segment) and event.end != "install":
            live.discard(event.rollout)
    return live


def test_every_engine_crashes_at_once() -> None:
    """For a while there is none to generate, to install on, or to publish for."""
    at = after(unharmed(apart()), lambda e: isinstance(e, Train), 2)
    events, _ = struck(apart(), *(Crash(e, at, 0.3) for e in (0, 1)))
    (_, second), (up, _) = [[i for i, e in enumerate(events) if isinstance(e, kind)] for kind in (Down, Up)]
    assert not [e for e in events[second:up] if isinstance(e, Segment | Generate | Publish)]
    assert works(events[up:], 0)
    assert works(events[up:], 1)


@pytest.mark.parametrize("fate", ["keep", "retract"])
@pytest.mark.parametrize("stage", [Pause, Transfer, Updating, Installed, Resume])
def test_an_engine_crashes_while_requests_live_through_its_update(fate: str, stage: type) -> None:
    """What was told of them by then is lost with it: they are sent again with what they had been sent with."""
    at = after(unharmed(apart(fate=fate)), lambda e: isinstance(e, stage) and getattr(e, "by", 1) > 0)
    events, i = struck(apart(fate=fate), Crash(0, at, 0.01))
    had = {work.rollout: work.have for e in events[:i] if isinstance(e, Generate) for work in e.work}
    told = {e.rollout for e in events[:i] if isinstance(e, Segment) and (e.engine, e.end) == (0, "install")}
    lost = inside(events[:i], 0)
    assert lost
    assert stage is Pause or told & lost
    again = {work.rollout: work.have for e in reversed(events[i:]) if isinstance(e, Generate) for work in e.work}
    assert {r: again[r] for r in lost} == {r: had[r] for r in lost}


@pytest.mark.parametrize("fate", ["resume", "restart", "drain", "retract", "keep"])
def test_the_only_engine_crashes_again_and_again(fate: str) -> None:
    """What it was about is sent again, with the tokens that it had come with."""
    events, i = struck(apart(fate=fate), *(Crash(0, at, 0.01) for at in (0.03, 0.11, 0.2)), engines=1)
    lost = inside(events[:i], 0)
    assert lost
    assert lost <= {work.rollout for e in events[i:] if isinstance(e, Generate) for work in e.work}


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("down", [MS, 0.1])
def test_an_engine_crashes_in_mid_transfer(rolling: bool, down: float) -> None:
    """The version is out without it, or waits for it where it is the last; what it took in is lost."""
    policy = apart(rolling=rolling)
    at = after(unharmed(policy), lambda e: isinstance(e, Updating) and e.engine == 1)
    events, i = struck(policy, Crash(1, at, down))
    begun = last(events[:i], Updating)
    assert (begun.engine, begun.version) == (1, 1)
    assert not [e for e in events if isinstance(e, Installed) and (e.by, e.engine) == (begun.by, 1)]
    assert any(isinstance(e, Installed) and e.engine == 1 and e.version >= 1 for e in events[i:])
    assert rolling or last(events[: i + 20], Publish).engines == [0]
    assert works(events[i:], 1)


def test_an_engine_crashes_before_its_transfer_begins() -> None:
    """It comes back before the first bucket; the transfer was meant for the life that it lost."""
    at = after(unharmed(apart()), lambda e: isinstance(e, Transfer))
    events, i = struck(apart(), Crash(1, at, MS / 2))
    sent = last(events[:i], Transfer)
    assert sent.engines == [0, 1]
    assert {e.engine for e in events if isinstance(e, Updating) and e.by == sent.id} == {0}
    assert works(events[i:], 1)


def test_a_paused_engine_crashes() -> None:
    """It needs no resume when it is back."""
    at = after(unharmed(apart()), lambda e: isinstance(e, Pause) and e.engine == 1)
    events, i = struck(apart(), Crash(1, at + 2 * MS, 0.05))
    pause = last((e for e in events[:i] if getattr(e, "engine", None) == 1), Pause, Resume)
    assert isinstance(pause, Pause)
    assert any(isinstance(e, Done) and e.cmd == pause.id for e in events[:i])
    next_up = next(j for j, e in enumerate(events) if isinstance(e, Up))
    assert not [e for e in events[i:next_up] if isinstance(e, Resume) and e.engine == 1]
    assert works(events[next_up:], 1)


@pytest.mark.parametrize("sleep", [1, 2])
@pytest.mark.parametrize("down", [MS, 0.1])
def test_a_sleeping_engine_crashes(sleep: int, down: float) -> None:
    """The trainer has its device; it gets it back with the next version, or when it is up again."""
    policy = replace(verl_hybrid(), place=Colocated(sleep=sleep))
    at = after(unharmed(policy), lambda e: isinstance(e, Train), 2)
    events, i = struck(policy, Crash(1, at, down))
    assert isinstance(last(events[:i], Sleep, Wake), Sleep)
    assert works(events[i:], 1)
    trained = next(e for e in events[i:] if isinstance(e, Trained))
    assert not [e for e in events[i : events.index(trained)] if isinstance(e, Wake)]


def test_the_only_engine_crashes_while_a_batch_waits_for_the_rest_of_its_version() -> None:
    """On shared devices a batch is selected before all of its version is there; the rest has to be made first."""
    policy = replace(verl_hybrid(), select=FirstFinished())
    at = after(unharmed(policy, 1), lambda e: isinstance(e, Go))
    events, i = struck(policy, Crash(0, at, 0.02), engines=1)
    assert isinstance(last(events[:i], Go, Train, Wait), Go)
    trained = next(j for j in range(i, len(events)) if isinstance(events[j], Train))
    assert inside(events[:i], 0)
    assert [e.engines for e in events[i:trained] if isinstance(e, Transfer)] == [[0]]


def test_an_engine_crashes_while_it_is_drained_for_the_trainer() -> None:
    """What it was about is made again by the others before the trainer gets the devices: a batch may need it."""
    policy = replace(verl_hybrid(), admit=Cap(eta=1, C=16), select=InOrder())
    calmly = unharmed(policy)
    asleep = next(i for i, e in enumerate(calmly) if isinstance(e, Sleep))
    drained = last(calmly[:asleep], Segment)
    events, i = struck(policy, Crash(drained.engine, drained.t / NS - MS / 2, 0.02))
    lost = inside(events[:i], drained.engine)
    asleep = next(j for j in range(i, len(events)) if isinstance(events[j], Sleep))
    assert lost == {drained.rollout}
    assert lost <= {e.rollout for e in events[i:asleep] if isinstance(e, Segment) and e.end in ("stop", "length")}


def test_an_engine_crashes_while_the_run_closes() -> None:
    """What was to be called back is gone with it."""
    policy = apart(rolling=True)  # the last install leaves engine 0 at work
    at = after(unharmed(policy), lambda e: isinstance(e, Abort) and e.fate == "cancel")
    events, i = struck(policy, Crash(0, at, 1.0))
    aborts = [e for e in events[:i] if isinstance(e, Abort) and (e.engine, e.fate) == (0, "cancel")]
    assert inside(events[:i], 0) == {r for abort in aborts for r in abort.rollouts} != set()
    assert not [e for e in events if isinstance(e, Done) and e.cmd in {abort.id for abort in aborts}]
    assert isinstance(last(events[i:], Stop, Abort), Stop)


def test_an_engine_comes_back_amid_a_version() -> None:
    """Between a version's batches it gets the published one, and makes tokens of that before the next is out."""
    at = after(unharmed(apart(), 1), lambda e: isinstance(e, Train) and e.version == 2)
    events, i = struck(apart(), Crash(0, at, MS), engines=1)
    again = next(j for j in range(i, len(events)) if isinstance(events[j], Transfer))
    batch = last(events[:again], Train)
    assert (batch.version, batch.index) == (2, 0)
    assert (events[again].version, events[again].engines) == (1, [0])
    published = next(j for j in range(i, len(events)) if isinstance(events[j], Publish))
    assert any(isinstance(e, Train) and (e.version, e.index) == (2, 1) for e in events[again:published])
    assert works(events[again:published], 0)
