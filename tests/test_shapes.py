"""The shape of the slots: four policies of the field, each one file in ``shapes/``, run as they are.

Each runs 50 versions, breaks no promise and replays exactly, and the thing that it is about really happens. What they
need of controller and worlds is there for every policy.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from rlsched.checker import Checker
from rlsched.commands import Abort, Generate, Offload, Resume, Sleep, Timer, Train, Transfer, Wake
from rlsched.controller import Controller
from rlsched.facts import Done, End, Fact, Installed, Segment
from rlsched.naming import build, parse
from rlsched.notes import Accept, Admit, Cancel, Go, Publish, Wait
from rlsched.policy import Policy
from rlsched.replay import compare
from rlsched.shape import Shape
from rlsched.sim.scenario import Control, EngineCosts, MemoryCosts, Scenario, TrainerCosts, TransportCosts
from rlsched.testing import Run, assert_clean, batches, run, scenarios, seeds
from rlsched.workload import Length, Workload

from .test_faults import Trouble, account, troubled, troubles
from .test_properties import examples

SHAPES = Path(__file__).parent / "shapes"
NAMES = ("early_stop", "lending", "parking", "skewed")


def world(**shape: int) -> Scenario:
    """Long and short answers on engines with few seats; a device holds an engine or the trainer, never both."""
    return Scenario(
        shape=Shape(**{"b": 4, "samples": 2, "steps": 50, "engines": 3, "budget": 256, **shape}),
        workload=Workload(Length(mean=16), Length("lognormal", mean=40, sigma=1.0), reward_s=0.01),
        engine=EngineCosts(step_s=1e-2, seq_s=1e-4, kv_s=1e-7, prompt_s=1e-5, kv_blocks=512, max_num_seqs=4),
        trainer=TrainerCosts(update_s=0.2, update_token_s=1e-5, parameters_gb=2.0, optimizer_gb=4.0),
        transport=TransportCosts(version_gb=1.0, ipc_gbps=50.0, broadcast_gbps=20.0),
        memory=MemoryCosts(
            device_gb=8.0, kv_gb=6.0, offload_gbps=50.0, sleep_s=0.02, wake_weights_s=0.01, wake_kv_s=0.01
        ),
        control=Control(latency_s=1e-3),
    )


def shape(name: str, *settings: str) -> Policy:
    """The policy of ``shapes/name.py``, as a user names it."""
    return parse(f"{SHAPES / name}.py:policy", settings)


@cache
def history(name: str, *settings: str) -> Run:
    """A run of 50 versions."""
    return run(world(), shape(name, *settings), seed=1)


def steps(events: list[Any]) -> list[float]:
    """Seconds from publish to publish, the first from Begin."""
    times = [0.0]
    now = 0
    for event in events:
        if isinstance(event, Fact):
            now = event.t
        if isinstance(event, Publish):
            times.append(now / 1e9)
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("name", NAMES)
def test_fifty_versions_run_clean(name: str) -> None:
    """Clean by the shape's own promises, exact in replay by the policy of the manifest, and all accounted for."""
    done = history(name)
    assert_clean(done)
    account(world(), 1, done.events)
    assert sum(isinstance(e, Publish) for e in done.events) == 50
    again = compare(Controller(build(done.manifest.policy), done.manifest.shape, 1), done.events)
    assert again.divergence is None


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_survives_any_world(name: str) -> None:
    """The same in random worlds with crashes and repeated facts: ties, queues, preemption, rejected groups."""

    @examples(40)
    @given(scenarios(), seeds(), troubles())
    def holds(scenario: Scenario, seed: int, trouble: Trouble) -> None:
        policy = shape(name)
        troubled_world = troubled(scenario, policy, seed, trouble)
        done = run(troubled_world, policy, seed)
        assert_clean(done)
        account(troubled_world, seed, done.events)

    holds()


# ---- early stop


def test_early_stop_cancels_the_rest_and_makes_long_rounds_of_it() -> None:
    events = history("early_stop").events
    b, spare = 4, 4
    rounds: dict[int, list[Admit]] = {}
    tail: list[tuple[int, int]] = []
    published, cancelled = 0, Counter[int]()
    for event in events:
        match event:
            case Admit():
                rounds.setdefault(event.version, []).append(event)
                if event.attempt:
                    assert (event.prompt, event.attempt) == tail.pop(0)
            case Cancel() if event.requeue:
                group = next(a for round in rounds.values() for a in round if a.group == event.group)
                tail.append((group.prompt, group.attempt + 1))
                cancelled[published] += 1
            case Publish():
                published = event.version
            case _:
                pass
    for version, admits in rounds.items():
        if version % 4 == 3:
            assert [(a.launch_n - a.need_n, a.attempt > 0) for a in admits] == [(0, True)] * b
            assert not cancelled[version]
        else:
            assert [(a.launch_n - a.need_n, a.attempt) for a in admits] == [(1, 0)] * (b + spare)
            assert cancelled[version] == spare
    assert len(rounds) == 50


def test_early_stop_saves_time() -> None:
    """A short round ends before a whole round of as many groups does, and a long one doesn't."""
    early, late = (history("early_stop", *more) for more in ((), ("admit.groups=0", "admit.samples=0")))
    rounds, barrier = steps(early.events), steps(late.events)
    short = [s for v, s in enumerate(rounds) if v % 4 != 3]
    assert mean(short) < 0.6 * mean(barrier)
    assert mean(rounds[3::4]) > 1.5 * mean(short)


# ---- parking


@pytest.mark.parametrize("place", ["Colocated", "Disaggregated"])
def test_parked_rollouts_go_on_under_the_next_version(place: str) -> None:
    """What runs when a version is full is called back with its tokens, and is sent again after the publish."""
    done = history("parking", f"place={place}")
    assert_clean(done)
    parked: dict[int, int] = {}
    tokens = Counter[int]()
    published = resumed = 0
    waiting = False
    for event in done.events:
        match event:
            case Abort(fate="resume"):
                parked |= dict.fromkeys(event.rollouts, published)
            case Segment():
                tokens[event.rollout] += event.n
            case Train():
                waiting = True
            case Publish():
                published, waiting = event.version, False
            case Generate():
                assert not waiting
                for work in event.work:
                    assert work.have == tokens[work.rollout]
                    assert parked.pop(work.rollout, -1) < published or not work.have
                    resumed += work.have > 0
            case _:
                pass
    versions = Counter(len(s) for batch in batches(done.events) for g in batch.groups for s in g.samples.values())
    assert resumed > 100
    assert sum(n for made_by, n in versions.items() if made_by > 1) > 100
    assert max(versions) > 3


def test_parking_saves_time() -> None:
    """Nothing is thrown away, so that even counting the rest of the tail it is faster than to wait for it."""
    assert mean(steps(history("parking").events)) < 0.6 * mean(steps(history("parking", "admit.groups=0").events))


# ---- skewed installs


def test_engines_generate_under_different_versions() -> None:
    """Each install is on one engine: some as little runs there, some since it would lag too far behind."""
    done = history("skewed")
    holds = dict.fromkeys(range(3), 0)
    live: dict[int, set[int]] = {e: set() for e in holds}
    published, apart, lags = 0, 0, Counter[int]()
    for event in done.events:
        match event:
            case Generate():
                live[event.engine] |= {work.rollout for work in event.work}
                assert holds[event.engine] >= published - 2
            case Transfer():
                (engine,) = event.engines
                lags[event.version - holds[engine]] += 1
            case Installed() if event.by:
                holds[event.engine] = event.version
            case Publish():
                assert holds[event.engines[0]] == event.version
                published = event.version
            case Segment():
                live[event.engine].discard(event.rollout)
                apart += event.n > 0 and len({holds[e] for e in holds if live[e]}) > 1
            case _:
                pass
    assert apart > 100
    assert {*lags} == {1, 2, 3}
    assert min(lags[1], lags[3]) > 5
    groups = [g for batch in batches(done.events) for g in batch.groups]
    assert max(g.age for g in groups) == 2 + 2  # P2 under skew: in order, no older than η + skew
    assert all(len(s) == 1 for g in groups for s in g.samples.values())


def test_a_lie_about_the_skew_is_found() -> None:
    """The policy lags by two versions: who promises less breaks REPLICA and PUBLISH."""
    done = history("skewed")
    for skew, found in ((3, set()), (2, set()), (1, {"PUBLISH", "REPLICA"}), (0, {"PUBLISH", "REPLICA"})):
        checker = Checker(replace(done.manifest, promises=replace(done.manifest.promises, skew=skew)))
        for line, event in enumerate(done.events, start=2):
            checker.feed(line, event)
        assert {*checker.close(False).counts} == found


# ---- hybrid lending


def switches(events: list[Any]) -> Iterator[tuple[str, int, int]]:
    """Each switch of the hybrid engines 1 and 2, with the nanoseconds from its decision to its end."""
    now = since = 0
    where, resumed = "lent", 0
    for event in events:
        if isinstance(event, Fact):
            now = event.t
        match event:
            case Offload():
                where, since, resumed = "lending", now, 0
            case Resume() if event.engine > 0 and where == "lending":
                resumed += 1
                if resumed == 2:
                    where = "lent"
                    yield "there", since, now
            case Go() if event.who == "trainer" and where == "lent":
                since = now
            case Train() if where == "lent":
                where = "kept"
                yield "back", since, now
            case _:
                pass


def test_devices_are_lent_while_the_trainer_waits() -> None:
    """Lent engines generate, after an install of the published version, and the trainer trains on its own devices."""
    done = history("lending")
    moved = [*switches(done.events)]
    assert sum(kind == "there" for kind, _, _ in moved) > 15
    assert all(a != b for (a, _, _), (b, _, _) in pairwise(moved))
    asleep: set[int] = set()
    tokens = Counter[int]()
    holds, published = dict.fromkeys(range(3), 0), 0
    for event in done.events:
        match event:
            case Generate():
                assert holds[event.engine] == published
            case Installed():
                holds[event.engine] = event.version
            case Publish():
                published = event.version
            case Sleep():
                asleep.add(event.engine)
                holds[event.engine] = -1
            case Wake():
                asleep.discard(event.engine)
            case Segment():
                tokens[event.engine] += event.n
            case Train():
                assert asleep == {1, 2}
            case _:
                pass
    assert min(tokens[1], tokens[2]) > 0.05 * tokens.total()


def test_a_lent_engine_that_kept_its_weights_does_not_use_them() -> None:
    """At sleep level 1 it holds an older version when it is lent again: it is closed until it has the published one."""
    done = history("lending", "place.sleep=1")
    assert_clean(done)
    assert sum(kind == "there" for kind, _, _ in switches(done.events)) > 15


def test_no_rollout_waits_for_an_engine_whose_device_the_trainer_has() -> None:
    """A rollout goes back to its engine where it can, and to another one where that sleeps."""
    done = history("lending", "route=RoundRobin")
    assert_clean(done)
    home: dict[int, int] = {}
    asleep: set[int] = set()
    changed = 0
    for event in done.events:
        match event:
            case Sleep():
                asleep.add(event.engine)
            case Wake():
                asleep.discard(event.engine)
            case Generate():
                for work in event.work:
                    changed += home.get(work.rollout) in asleep
                    home[work.rollout] = event.engine
            case _:
                pass
    assert changed
    assert max(g.age for batch in batches(done.events) for g in batch.groups) < 10


def test_lending_is_timed_and_measured() -> None:
    """It waits for its patience to end, which no fact but its timer tells; its state is what the history shows."""
    done = history("lending")
    fact: Any = None
    timers: set[int] = set()
    rung = waited = 0
    for event in done.events:
        match event:
            case Wait() if event.who == "trainer":
                waited = fact.t
            case Timer():
                timers.add(event.id)
            case Offload():
                assert fact.t - waited >= 0.1 * 1e9
                rung += isinstance(fact, Done) and fact.cmd in timers
            case _:
                pass
        if isinstance(event, Fact):
            fact = event
    assert rung > 10

    controller = Controller(build(done.manifest.policy), done.manifest.shape, 1)
    groups, waits = 0, False
    for event in done.events:
        if isinstance(event, Fact) and not isinstance(event, End):
            controller.handle(event)
        waits = waits or (isinstance(event, Wait) and event.who == "trainer")
        groups += isinstance(event, Accept) and waits
        waits = waits and not (isinstance(event, Go) and event.who == "trainer")
    seen = controller.ledger.states["place"]
    moved = [*switches(done.events)]
    assert seen.groups == groups
    assert [*seen.there] == [end - start for kind, start, end in moved if kind == "there"][-3:]
    assert [*seen.back] == [end - start for kind, start, end in moved if kind == "back"][-3:]


def test_lending_pays_or_is_left() -> None:
    """It saves time; where a switch costs more than it gains, devices are lent once, to learn that, and no more."""
    assert mean(steps(history("lending").events)) < 0.95 * mean(
        steps(history("lending", "place.patience_s=1e6").events)
    )
    slow = replace(world(), memory=replace(world().memory, wake_weights_s=5.0))
    done = run(slow, shape("lending"), seed=1)
    assert_clean(done)
    assert [kind for kind, _, _ in switches(done.events)] == ["back", "there", "back"]
