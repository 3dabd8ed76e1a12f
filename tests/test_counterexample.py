"""P2 needs its premise: one search over worlds finds nothing for batches in order, and for the others an age over η.

The worlds have no straggler built in: every length is drawn like the others. Hypothesis finds the counterexamples and
makes them small by itself.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.notes import Admit
from rlsched.policy import areal_async
from rlsched.shape import Shape
from rlsched.sim.scenario import EngineCosts, Scenario, TrainerCosts, TransportCosts
from rlsched.slot import SelectSlot
from rlsched.slots.admit import Cap
from rlsched.slots.select import FirstFinished, InOrder, OldestFinished
from rlsched.testing import Run, Tally, assert_clean, batches, run
from rlsched.workload import Length, Workload

SEARCH = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)


class Told(Workload, frozen=True):
    """A workload whose prompts have these lengths, over and over."""

    lengths: tuple[int, ...] = (1,)

    def output_tokens(self, seed: int, prompt: int, sample: int, attempt: int, budget: int) -> int:
        return min(budget, self.lengths[prompt % len(self.lengths)])


class Case(NamedTuple):
    """A world and an admission cap."""

    scenario: Scenario
    cap: Cap

    def run(self, select: SelectSlot) -> Run:
        done = run(self.scenario, replace(areal_async(), admit=self.cap, select=select))
        assert_clean(done)
        return done


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small disaggregated worlds, and caps that let admission run ahead."""
    ms = 1e-3
    lengths = draw(st.lists(st.sampled_from((1, 9, 17, 25)), min_size=12, max_size=12))
    scenario = Scenario(
        shape=Shape(
            b=draw(st.integers(1, 3)),
            k=draw(st.integers(1, 2)),
            samples=1,
            steps=draw(st.integers(2, 8)),
            engines=draw(st.integers(1, 3)),
            budget=32,
        ),
        workload=Told(Length(mean=1), lengths=tuple(reversed(lengths))),
        engine=EngineCosts(step_s=ms, seq_s=0.0, kv_s=0.0, prompt_s=0.0),
        trainer=TrainerCosts(old_logprob_token_s=0.0, update_s=ms * draw(st.integers(1, 8)), update_token_s=0.0),
        transport=TransportCosts(version_gb=0.001, broadcast_bucket_s=0.0),
    )
    return Case(scenario, Cap(draw(st.integers(1, 2)), draw(st.sampled_from((*range(1, 13), None)))))


def ages(done: Run) -> Iterator[int]:
    """The age of every trained group."""
    return (group.age for batch in batches(done.events) for group in batch.groups)


def test_in_order_no_world_exceeds_the_bound() -> None:
    """The search that succeeds below, with no find: although the bound is reached in most worlds."""
    seen = Tally()

    @settings(SEARCH)
    @given(cases())
    def holds(case: Case) -> None:
        oldest = max(ages(case.run(InOrder())))
        assert oldest <= case.cap.eta
        seen.add(reached=oldest == case.cap.eta)

    holds()
    seen.demand(reached=0.5)


@pytest.mark.parametrize("select", [OldestFinished(), OldestFinished(shuffle=False), FirstFinished()])
def test_a_small_world_in_which_others_exceed_the_bound_is_found(select: SelectSlot) -> None:
    case = find(cases(), lambda case: max(ages(case.run(select))) > case.cap.eta, settings=SEARCH)
    done = case.run(select)
    groups = sum(isinstance(event, Admit) for event in done.events)
    assert max(ages(done)) > case.cap.eta
    assert max(ages(case.run(InOrder()))) <= case.cap.eta
    assert groups <= 5, case
    assert (case.scenario.shape.B, case.scenario.shape.engines, case.cap.eta) == (1, 1, 1), case
