"""Two engines: both serve, every version reaches both, and the run outlives either of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from rlsched.checker import check
from rlsched.commands import Generate, Train, Transfer
from rlsched.errors import InputError
from rlsched.facts import Bucket, Done, Down, Installed, Scored, Segment, Updating
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.notes import Accept, Admit, Publish
from rlsched.policy import Policy
from rlsched.real.child import ChildDied
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.job import perform
from rlsched.real.pacing import EnginePace, StepCost, TrainerPace, WorkCost
from rlsched.real.rig import Rig, deal
from rlsched.real.setup import Setup
from rlsched.replay import replay
from rlsched.shape import Shape

pytestmark = pytest.mark.real

MS = 1_000_000
STEPS = 5
#: Steps of 4 ms and buckets of 150 ms: time enough to die in the midst of either.
SETUP = Setup(
    shape=Shape(b=4, samples=4, steps=STEPS, budget=96),
    engine=EngineConfig(pace=EnginePace(step=StepCost(a=4 * MS), bucket=WorkCost(fixed=150 * MS))),
    trainer=TrainerConfig(pace=TrainerPace(update=WorkCost(fixed=60 * MS))),
)
PRESETS = ["areal-async,admit.eta=1,place.engines=2", "verl-hybrid,place.engines=2"]


class Runs:
    """One rig with two engines in an event loop of its own, for all of a module's runs."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.rig: Rig = self.do(Rig.start(SETUP, 2))

    def do(self, work: Any, timeout: float = 120.0) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(timeout):
                return await work

        return self._runner.run(bounded())

    def run(self, policy: Policy, path: Any, kill: Any = None) -> tuple[Any, list[Any]]:
        """Run to the end; ``kill(event)`` says which child (an engine's number, "trainer") dies right after it."""

        def watch(event: Any) -> None:
            for who in (kill(event) or ()) if kill is not None else ():
                client = self.rig.trainer if who == "trainer" else self.rig.engines[who]
                os.kill(client.child.pid, signal.SIGKILL)

        _, end = self.do(perform(self.rig, policy, 5, path, watch))
        return end, list(Reader(path).events())

    def close(self) -> None:
        self.do(self.rig.close())
        self._runner.close()


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.close()


def once(condition: Any, *who: Any) -> Any:
    """Kill ``who`` at the first event for which ``condition`` holds."""
    done: list[Any] = []

    def kill(event: Any) -> Any:
        if done or not condition(event):
            return ()
        done.append(event)
        return who

    return kill


def of(events: list[Any], *kinds: type) -> list[Any]:
    return [e for e in events if isinstance(e, kinds)]


def examine(path: Any) -> None:
    assert check(Reader(path)).counts == {}
    assert replay(Reader(path)).divergence is None


def nothing_lost_nor_trained_twice(events: list[Any]) -> None:
    trained = Counter(r for t in of(events, Train) for r in t.rollouts)
    assert set(trained.values()) == {1}
    assert len(trained) == STEPS * 4 * 4
    admitted = {r for a in of(events, Admit) for r in range(a.first, a.first + a.launch_n)}
    finished = Counter(s.rollout for s in of(events, Segment) if s.end in ("stop", "length"))
    assert set(trained) <= admitted & set(finished) & {s.rollout for s in of(events, Scored)}
    assert set(finished.values()) == {1}
    # Forced lengths: a rollout has all of its tokens, however often it had to begin anew.
    sizes = Counter[int]()
    for s in of(events, Segment):
        sizes[s.rollout] += s.n
    seed, load = 5, SETUP.workload
    for a in of(events, Admit):
        for sample, r in enumerate(range(a.first, a.first + a.launch_n)):
            if r in finished:
                assert sizes[r] == load.output_tokens(seed, a.prompt, sample, a.attempt, 96)


@pytest.mark.parametrize("name", PRESETS)
def test_both_engines_serve_and_get_every_version(runs, tmp_path, name):
    path = tmp_path / "history.jsonl"
    end, events = runs.run(parse(name, ()), path)
    assert end.ok
    examine(path)
    nothing_lost_nor_trained_twice(events)
    assert [p.engines for p in of(events, Publish)] == [[0, 1]] * STEPS
    tokens = Counter[int]()
    for s in of(events, Segment):
        tokens[s.engine] += s.n
    assert min(tokens[0], tokens[1]) > sum(tokens.values()) / 4
    installed = {(i.engine, i.version) for i in of(events, Installed) if i.ok and i.by}
    assert installed == {(e, v) for e in (0, 1) for v in range(1, STEPS + 1)}

    async def digests() -> list[Any]:
        return [await m.checksum() for m in (runs.rig.trainer, *runs.rig.engines.values())]

    found = runs.do(digests())
    assert len({d.checksum for d in found}) == 1
    assert {d.version for d in found} == {STEPS}
    assert found[0].checksum != runs.rig.trainer.initial_checksum


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk"])
def test_a_rolling_install_leaves_one_engine_generating(runs, tmp_path, transport):
    path = tmp_path / "history.jsonl"
    policy = parse(f"areal-async,admit.eta=1,place.engines=2,publish.rolling=true,publish.transport={transport}", ())
    end, events = runs.run(policy, path)
    assert end.ok
    examine(path)
    nothing_lost_nor_trained_twice(events)
    assert all(len(t.engines) == 1 for t in of(events, Transfer))
    # While one takes its weights in, the other brings a rollout to its end.
    amid, overlapped = None, False
    for e in events:
        if isinstance(e, Updating):
            amid = e.engine
        elif isinstance(e, Installed):
            amid = None
        elif isinstance(e, Segment) and amid is not None and e.n:
            assert e.engine != amid
            overlapped = True
    assert overlapped


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_outlives_an_engine_that_dies_amid_generation(runs, tmp_path, name):
    path = tmp_path / "history.jsonl"
    second = lambda e: isinstance(e, Generate) and e.engine == 1 and e.id > 12  # noqa: E731
    end, events = runs.run(parse(name, ()), path, once(second, 1))
    assert end.ok
    examine(path)
    nothing_lost_nor_trained_twice(events)
    (down,) = of(events, Down)
    assert (down.engine, "SIGKILL" in down.why) == (1, True)
    before, after = events[: events.index(down)], events[events.index(down) :]
    # What was inside is generated by the other.
    inside: set[int] = set()
    for e in of(before, Generate, Segment):
        if isinstance(e, Generate) and e.engine == 1:
            inside |= {w.rollout for w in e.work}
        elif isinstance(e, Segment) and e.engine == 1:
            inside.discard(e.rollout)
    assert inside
    retried = {w.rollout for g in of(after, Generate) for w in g.work}
    accepted = {r for a in of(events, Admit) for r in range(a.first, a.first + a.launch_n)}
    assert inside <= retried & accepted
    assert {g.engine for g in of(after, Generate)} == {0}
    assert [p.engines for p in of(after, Publish)][-1] == [0]
    assert [p.version for p in of(events, Publish)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk"])
def test_an_engine_that_dies_amid_a_transfer_does_not_keep_the_version_from_the_other(runs, tmp_path, transport):
    """A broadcast is torn for both; the other gets it again, under the same command."""
    path = tmp_path / "history.jsonl"
    policy = parse(f"areal-async,admit.eta=1,place.engines=2,publish.transport={transport}", ())
    third = lambda e: isinstance(e, Updating) and e.engine == 1 and e.version == 3  # noqa: E731
    end, events = runs.run(policy, path, once(third, 1))
    assert end.ok, end.why
    examine(path)
    nothing_lost_nor_trained_twice(events)
    (down,) = of(events, Down)
    transfers = of(events, Transfer)
    (hit,) = [t for t in transfers if t.version == 3]
    assert events.index(hit) < events.index(down)
    tries = [e for e in of(events, Updating, Bucket, Installed) if e.by == hit.id and e.engine == 0]
    kinds = [type(e).__name__ + ("" if getattr(e, "ok", True) else " torn") for e in tries]
    whole = ["Updating", "Bucket", "Installed"]
    assert kinds == whole or (transport == "broadcast" and kinds == ["Updating", "Installed torn", *whole])
    assert not any(e.engine == 1 for e in of(events[events.index(down) + 1 :], Updating, Bucket, Installed))
    assert next(d for d in of(events, Done) if d.cmd == hit.id).ok
    assert [p.engines for p in of(events, Publish)] == [[0, 1]] * 2 + [[0]] * 3

    async def digests() -> list[Any]:
        return [await m.checksum() for m in (runs.rig.trainer, runs.rig.engines[0])]

    assert len({d.checksum for d in runs.do(digests())}) == 1


def test_a_run_ends_with_one_line_when_no_engine_is_left(runs, tmp_path):
    path = tmp_path / "history.jsonl"
    late = lambda e: isinstance(e, Accept) and e.group >= 6  # noqa: E731
    end, events = runs.run(parse(PRESETS[0], ()), path, once(late, 0, 1))
    assert not end.ok
    assert end.why.startswith("no engine is left: engine-")
    assert "\n" not in end.why
    assert [d.engine for d in of(events, Down)] in ([0, 1], [1, 0])
    report = check(Reader(path))
    assert report.counts == {}
    assert report.failed == end.why


def test_a_rig_starts_a_dead_engine_again_for_the_next_run(runs, tmp_path):
    victim = runs.rig.engines[1]

    async def die() -> None:
        victim.child.kill()
        while victim.child.alive:
            await asyncio.sleep(0.01)
        with pytest.raises(ChildDied):
            await runs.rig.ask(1, [[1, 8, 9, 10]], 4)

    runs.do(die())
    end, events = runs.run(parse(PRESETS[0], ()), tmp_path / "history.jsonl")
    assert end.ok
    assert not of(events, Down)
    assert runs.rig.engines[1].child.pid != victim.child.pid


def test_cores_are_dealt(runs, tmp_path):
    """Same cores in turn under hybrid, pools of their own under async."""
    seen: dict[str, list[set[int]]] = {}
    for name in PRESETS:
        policy = parse(name, ())
        runs.do(perform(runs.rig, policy, 5, None))
        members = (*runs.rig.engines.values(), runs.rig.trainer)
        seen[name] = [os.sched_getaffinity(m.child.pid) for m in members]
    cores = runs.rig.cores
    asynchronous, hybrid = (seen[name] for name in PRESETS)
    assert asynchronous == [set(share) for share in deal(cores, 3)]
    assert hybrid == [*(set(share) for share in deal(cores, 2)), {c for share in deal(cores, 2) for c in share}]


def test_a_layout_needs_as_many_engines_as_are_up(runs):
    with pytest.raises(InputError, match="lays out 3 engines, but 2 are up"):
        runs.do(perform(runs.rig, parse("areal-async,place.engines=3", ()), 5, None))


@pytest.mark.parametrize(
    ("cores", "devices", "shares"),
    [
        ([0, 1], 1, [[0, 1]]),
        ([0, 1], 2, [[0], [1]]),
        ([4, 5], 3, [[4], [5], [4]]),
        (list(range(8)), 3, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_dealing(cores, devices, shares):
    assert deal(cores, devices) == shares
