"""The simulated world: nothing is lost in it, and it is deterministic."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.commands import Command, Train, Transfer
from rlsched.facts import Done, Fact, Installed, Segment
from rlsched.naming import build, spec
from rlsched.notes import Publish
from rlsched.policy import Policy, areal_async, verl_hybrid
from rlsched.shape import Shape
from rlsched.sim.clock import Clock
from rlsched.sim.scenario import Control, EngineCosts, Scenario, TrainerCosts, TransportCosts
from rlsched.slots.admit import Cap
from rlsched.slots.expire import AgeBound
from rlsched.slots.place import Colocated, Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import LeastLoaded
from rlsched.slots.select import FirstFinished, InOrder, OldestFinished
from rlsched.testing import Tally, assert_clean, policies, run, scenarios, seeds, workloads
from rlsched.workload import Length, Workload

from .account import account
from .test_properties import NIGHTLY, examples

# ---- conservation


def test_nothing_is_lost_or_made_twice() -> None:
    """Every token, rollout, group and attempt is accounted for, from admission to its one end."""
    seen = Tally()
    ahead = policies(admit=st.builds(Cap, st.integers(1, 3), st.integers(4, 16)), place=st.just(Disaggregated()))

    @examples(200)
    @given(scenarios(), policies() | ahead, seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        closed = account(scenario, seed, run(scenario, policy, seed).events)
        ends = Counter(closed.ends.values())
        seen.add(
            resumed=closed.seen["resumed"] > 0,
            restarted=closed.seen["restarted"] > 0,
            requeued=closed.seen["requeued"] > 0,
            rejected=ends["rejected"] > 0,
            dropped=ends["dropped"] > 0,
            cancelled=ends["cancelled"] > 0,
        )

    holds()
    seen.demand(resumed=0.05, restarted=0.05, requeued=0.03, rejected=0.3, dropped=0.3, cancelled=0.2)


def test_every_effect_comes_after_its_cause() -> None:
    """No command acts in the instant in which it was issued, and each is answered once, but the last."""

    @examples(60)
    @given(scenarios(), policies(), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        now = 0
        issued: dict[int, int] = {}
        answered: set[int] = set()
        for event in run(scenario, policy, seed).events:
            if isinstance(event, Fact):
                assert event.t >= now
                now = event.t
            if isinstance(event, Command):
                issued[event.id] = now
            cause = event.cmd if isinstance(event, Done) else getattr(event, "by", 0)
            if cause:
                assert issued[cause] < now
                assert cause not in answered
            if isinstance(event, Done):
                answered.add(event.cmd)
        assert {*issued} - answered == {max(issued)}

    holds()


def test_every_engine_gets_every_version_once() -> None:
    """A version is sent when its last batch was trained, before the next one's first: in between there is none."""
    seen = Tally()

    @examples(80)
    @given(scenarios(), policies(), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        assert isinstance(policy.publish, EveryVersion)
        trained, begun = 0, 0
        held: dict[int, list[int]] = defaultdict(list)
        for event in run(scenario, policy, seed).events:
            match event:
                case Train():
                    begun = event.version
                    trained += event.last
                case Transfer():
                    assert event.version == trained == begun
                case Installed():
                    held[event.engine].append(event.version)
                case _:
                    pass
        assert held == {engine: [*range(scenario.shape.steps + 1)] for engine in held}
        seen.add(several_batches=scenario.shape.k > 1, asleep=isinstance(policy.place, Colocated))

    holds()
    seen.demand(several_batches=0.3, asleep=0.1)


def test_a_rolling_version_is_published_with_the_last_engine() -> None:
    """Also where the engines sleep while the trainer has their devices."""
    policy = replace(verl_hybrid(), publish=EveryVersion(rolling=True))
    history = run(busy(), policy, 0)
    assert_clean(history)
    assert [event.engines for event in history.events if isinstance(event, Publish)] == [[0, 1]] * 4


# ---- determinism


def test_every_history_is_clean_and_says_how_to_make_its_policy_again() -> None:
    """The checker finds nothing, the replay is exact, the run ends well, and a second run writes the same bytes."""

    @examples(150)
    @given(scenarios(), policies(), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        history = run(scenario, policy, seed)
        assert_clean(history)
        again = build(history.manifest.policy)
        assert (again, spec(again)) == (policy, history.manifest.policy)
        assert run(scenario, again, seed).lines == history.lines

    holds()


def test_ties_are_broken_by_the_seed_alone() -> None:
    """Where everything happens at whole milliseconds, another seed is another interleaving, and as clean."""
    seen = Tally()
    select = st.sampled_from((InOrder(), FirstFinished(), OldestFinished(shuffle=False)))
    world = scenarios(workload=workloads(fixed=True, reject=0.0), even=True)

    @examples(80)
    @given(world, policies(select=select), st.lists(seeds(), min_size=3, max_size=3, unique=True))
    def holds(scenario: Scenario, policy: Policy, some: list[int]) -> None:
        histories = [run(scenario, policy, seed) for seed in some]
        for seed, history in zip(some, histories, strict=True):
            assert_clean(history)
            account(scenario, seed, history.events)
        assert run(scenario, policy, some[0]).lines == histories[0].lines
        instants = Counter(e.t for e in histories[0].events if isinstance(e, Segment))
        seen.add(ties=max(instants.values()) > 1, permuted=len({tuple(h.lines) for h in histories}) > 1)

    holds()
    seen.demand(ties=0.5, permuted=0.3)


def test_boundaries_of_one_instant_are_permuted_too() -> None:
    """Two engines whose boundaries fall together: the seed says which is first, not who was first to plan."""
    orders = set()
    for seed in range(16):
        clock, fired = Clock(seed), []
        clock.call_last(10, "engine-0", lambda fired=fired: fired.append("engine-0"))
        clock.call_last(10, "engine-1", lambda fired=fired: fired.append("engine-1"))
        clock.call(10, "trainer", lambda fired=fired: fired.append("trainer"))
        clock.env.run()
        assert fired[0] == "trainer"
        orders.add(tuple(fired))
    assert len(orders) == 2


def busy() -> Scenario:
    """A world in which most things happen: two engines, long and short rollouts, rejected groups."""
    ms = 1e-3
    return Scenario(
        shape=Shape(b=2, k=2, samples=2, steps=4, engines=2, budget=48),
        workload=Workload(Length(mean=8), Length("lognormal", mean=16, sigma=1.0), reward_s=4 * ms, reject=0.2),
        engine=EngineCosts(step_s=ms, seq_s=1e-5, kv_s=1e-7, prompt_s=1e-5),
        trainer=TrainerCosts(update_s=20 * ms, parameters_gb=0.002, optimizer_gb=0.012),
        transport=TransportCosts(version_gb=0.003),
        control=Control(abort_s=ms, pause_s=ms, flush_s=ms),
    )


def hybrid(sleep: int) -> Policy:
    """Engines and trainer take turns, at this sleep level."""
    return replace(verl_hybrid(), place=Colocated(sleep=sleep))


def eager() -> Policy:
    """Runs ahead, interrupts, drops and tries again."""
    return replace(
        areal_async(),
        admit=Cap(eta=2, C=12),
        select=FirstFinished(),
        expire=AgeBound(bound=1, requeue=True),
        publish=EveryVersion(bucket_mb=1),
        route=LeastLoaded(),
    )


def test_hash_seeds_make_no_difference() -> None:
    """The same seed writes the same bytes in another process, whatever the order of its sets and dicts."""
    expected = run(busy(), eager(), 7)
    assert_clean(expected)
    program = (
        "from hashlib import sha256; from rlsched.testing import run; from tests.test_world import busy, eager;"
        r"print(sha256(b'\n'.join(run(busy(), eager(), 7).lines)).hexdigest())"
    )
    for hash_seed in ("1", "2"):
        child = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        )
        assert child.stdout.strip() == sha256(b"\n".join(expected.lines)).hexdigest()


@pytest.mark.nightly
@pytest.mark.skipif(not NIGHTLY, reason="minutes long: set RLSCHED_NIGHTLY=1")
def test_a_night_of_histories() -> None:
    @examples(1000)
    @given(scenarios(), policies(), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        history = run(scenario, policy, seed)
        assert_clean(history)
        account(scenario, seed, history.events)

    holds()
