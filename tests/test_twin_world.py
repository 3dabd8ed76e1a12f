"""Whole worlds on the token-by-token twin: the history is that of rlsched's engine, byte for byte."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rlsched.facts import Down, Segment
from rlsched.history import Event
from rlsched.policy import Policy
from rlsched.sim.engine import Engine
from rlsched.sim.scenario import Scenario
from rlsched.sim.world import World
from rlsched.slots.admit import Cap
from rlsched.testing import Tally, policies, scenarios, seeds, shapes

from .test_faults import Trouble, troubled, troubles
from .test_properties import examples
from .twin_engine import Twins


def history(scenario: Scenario, policy: Policy, seed: int, engine: Any) -> list[bytes]:
    """The lines of a run on engines that ``engine`` makes."""
    encode = msgspec.json.Encoder().encode
    lines: list[bytes] = []
    World(scenario, policy, seed, lambda line: lines.append(encode(line)), engine).run()
    return lines


def together(segments: list[Segment]) -> bool:
    """Whether two engines ended steps at one instant, in which nothing but the seed says who is first."""
    engines: dict[int, set[int]] = {}
    for segment in segments:
        engines.setdefault(segment.t, set()).add(segment.engine)
    return any(len(at_once) > 1 for at_once in engines.values())


def ahead() -> st.SearchStrategy[Policy]:
    """Policies that run ahead, and so interrupt what runs."""
    return policies(admit=st.builds(Cap, st.integers(1, 3), st.integers(4, 16)))


def test_a_world_can_not_tell_the_engine_from_its_twin() -> None:
    """The steps that a stretch leaps over, and waking up for each, leave no trace, whatever goes wrong meanwhile."""
    seen = Tally()

    @examples(150)
    @given(scenarios(shape=shapes(budget=48)), policies() | ahead(), seeds(), troubles())
    def holds(scenario: Scenario, policy: Policy, seed: int, trouble: Trouble) -> None:
        world = troubled(scenario, policy, seed, trouble)
        twins = Twins()
        lines = history(world, policy, seed, twins)
        assert lines == history(world, policy, seed, Engine)
        events = [msgspec.json.decode(line, type=Event) for line in lines]
        seen.add(
            crashed=any(isinstance(e, Down) for e in events),
            together=together([e for e in events if isinstance(e, Segment)]),
            preempted=twins.total("preemptions") > 0,
            kept=any(e.end == "install" for e in events if isinstance(e, Segment)) and policy.publish.fate == "keep",
            retracted=twins.total("retractions") > 0,
            aborted_midstep=twins.total("midstep_aborts") > 0,
            tied=twins.total("ties") > 0,
            silent=sum(twin.silent for twin in twins.made) > len(lines) / 4,
        )

    holds()
    seen.demand(crashed=0.3, together=0.12, preempted=0.05, aborted_midstep=0.1, tied=0.06, silent=0.35)
    seen.demand(kept=0.03, retracted=0.02)
