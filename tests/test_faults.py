"""Engines that crash and come back, and facts that are told twice: the same tracks lead through all of it.

Whole simulated worlds. A crash is put at an instant at which something else happens, so that it strikes before, amid
and after every command and effect; which of the two comes first is the seed's to say.
"""

from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.commands import Generate
from rlsched.facts import Done, Down, Fact, Scored, Segment
from rlsched.history import Event
from rlsched.policy import Policy
from rlsched.sim.scenario import Crash, Faults, Scenario
from rlsched.slots.admit import Cap
from rlsched.slots.place import Colocated, Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.testing import Tally, assert_clean, policies, run, scenarios, seeds

from .account import Account
from .test_properties import examples

NS = 1e9

# ---- the account of a history with crashes


class Survivors(Account):
    """An account that outlives crashes: what an engine had not told when it went down was never made."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self.on: dict[int, set[int]] = {}
        """Live rollouts, by engine."""
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
                self.on.setdefault(event.engine, set()).update(work.rollout for work in event.work)
            case Segment():
                self.on[event.engine].remove(event.rollout)
            case Down():
                for rollout in self.on.pop(event.engine, set()):
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
    return st.builds(Trouble, st.lists(strike, max_size=most), share, later)


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


def rolling() -> st.SearchStrategy[Policy]:
    """Policies that run ahead and install engine by engine."""
    fates = st.sampled_from(("resume", "restart", "drain"))
    return policies(
        admit=st.builds(Cap, st.integers(1, 3), st.integers(4, 16)),
        publish=st.builds(EveryVersion, fate=fates, rolling=st.just(True)),
        place=st.just(Disaggregated()),
    )


def ties(events: Iterable[Event]) -> bool:
    """Whether an engine went down at an instant at which something else happened."""
    facts = [e for e in events if isinstance(e, Fact)]
    down = {e.t for e in facts if isinstance(e, Down)}
    return any(e.t in down for e in facts if not isinstance(e, Down))


# ---- the property


def survives(n: int) -> None:
    seen = Tally()

    @examples(n)
    @given(scenarios(), policies() | rolling(), seeds(), troubles())
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
            repeated=closed.seen["repeated"] > 0,
            rolled=isinstance(policy.publish, EveryVersion) and policy.publish.rolling,
            colocated=isinstance(policy.place, Colocated),
        )

    holds()
    seen.demand(crashed=0.5, often=0.1, tied=0.3, lost=0.2, repeated=0.3, rolled=0.2, colocated=0.05)


def test_a_run_survives_crashes_and_repeated_facts() -> None:
    """No stall, an exact replay, no violation; each group ends once, and every trained token was made."""
    survives(150)
