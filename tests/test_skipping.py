"""A slot is passed over only where asking it would have changed nothing."""

from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from msgspec.structs import replace

from rlsched.controller import Controller
from rlsched.policy import Policy
from rlsched.sim.scenario import Scenario
from rlsched.sim.world import World
from rlsched.slots.route import LeastLoaded, RoundRobin
from rlsched.testing import Tally, policies, scenarios, seeds

from .test_properties import examples


class Heedful(RoundRobin, frozen=True):
    """The same routes, from a slot that wants to be asked after every fact."""

    heeds_progress: ClassVar[bool] = True


def history(scenario: Scenario, policy: Policy, seed: int) -> tuple[list[bytes], int]:
    """The lines of a run, and how often the controller went through its slots."""
    passes = 0
    settle = Controller._settle

    def counted(self: Controller) -> bool:
        nonlocal passes
        passes += 1
        return settle(self)

    lines: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "_settle", counted)
        World(scenario, policy, seed, lambda line: lines.append(msgspec.json.encode(line))).run()
    return lines, passes


def test_a_policy_that_is_asked_less_says_the_same() -> None:
    seen = Tally()

    @examples(60)
    @given(scenarios(), policies(), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        aloof = replace(policy, route=RoundRobin())
        few, asked = history(scenario, aloof, seed)
        all_of_them, asked_more = history(scenario, replace(policy, route=Heedful()), seed)
        assert few == all_of_them
        seen.add(spared=asked_more > 1.2 * asked)

    holds()
    seen.demand(spared=0.5)


def test_a_slot_of_the_users_is_asked_after_every_fact_until_it_says_otherwise() -> None:
    assert LeastLoaded.heeds_progress
    assert not RoundRobin.heeds_progress
