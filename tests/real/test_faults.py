"""Faults on real engines, in scheduled runs: each once on every engine that is installed, ten times in a row nightly.

After each: no rollout lost or trained twice, no stale replica served, the run goes on or ends with one line, and no
process, shared memory or folder is left. A rig of two engines serves a module's faults; it starts again what died.

The daily ones took four minutes and a half for all three engines, on two idle cores, most of it the start of servers.
Ten times in a row: hours.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from rlsched.checker import check
from rlsched.commands import Flush, Generate, Train, Transfer
from rlsched.decisions import Install
from rlsched.facts import Bucket, Done, Down, Installed, Scored, Segment, Updating
from rlsched.history import Reader
from rlsched.ledger import Ledger
from rlsched.naming import parse
from rlsched.notes import Admit, Cancel, Drop, Publish, Reject
from rlsched.policy import Policy
from rlsched.real import installs, processes
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.faults import Delay, FailBucket, Faults, FaultyEngine, Freeze, Kill, RefuseFlush, Slow
from rlsched.real.job import perform
from rlsched.real.limits import Limits
from rlsched.real.pacing import EnginePace, StepCost, WorkCost
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.replay import replay
from rlsched.shape import Promises, Shape
from rlsched.slots.publish import EveryVersion

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

MS = 1_000_000
STEPS = 3
SHAPE = Shape(b=3, samples=2, steps=STEPS, budget=64)
#: Steps of 8 ms, buckets of 40: time enough for a fault to strike in the midst of either.
PACE = EnginePace(step=StepCost(a=8 * MS), bucket=WorkCost(fixed=40 * MS))
BUCKET = 80_000
#: A machine that is busy with other things may let an engine wait for seconds.
CONTROL_S = 10.0


class Small(EveryVersion, frozen=True):
    """Small buckets, so that a version takes several; ``first``: published as soon as one engine has it."""

    first: bool = False

    def decide(self, state: None, ledger: Ledger) -> Install | None:
        update = super().decide(state, ledger)
        return None if update is None else replace(update, bucket=BUCKET, quorum=1 if self.first else None)

    def promises(self, shape: Shape) -> Promises:
        return replace(super().promises(shape), skew=1 if self.first else 0)


def policy(transport: str = "ipc", rolling: bool = False) -> Policy:
    base = parse("areal-async,admit.eta=1,place.engines=2", ())
    return replace(base, publish=Small(transport=transport, rolling=rolling, first=rolling))


class Runs:
    """One rig with two engines in an event loop of its own, for all of an engine's faults."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.setup = Setup(
            shape=SHAPE,
            engine_kind=kind,
            engine=EngineConfig(pace=PACE),
            trainer=TrainerConfig(),
            limits=Limits(control_s=CONTROL_S, beat_s=1.0),
        )
        self._runner = asyncio.Runner()
        self.rig: Rig = self.do(Rig.start(self.setup, 2, engine=FaultyEngine))
        self.sessions: set[int] = set()
        self.segments: set[Path] = set()
        self.folder = Path(self.rig.trainer.child.stderr).parent
        assert self.folder.is_dir()

    def do(self, work: Any, timeout: float = 900.0) -> Any:
        """The timeout only turns a hang into a failure."""

        async def bounded() -> Any:
            async with asyncio.timeout(timeout):
                return await work

        return self._runner.run(bounded())

    def run(self, policy: Policy, path: Path, *plan: Any) -> tuple[Any, list[Any]]:
        faults = Faults(self.rig, plan)

        async def go() -> Any:
            try:
                return await perform(self.rig, policy, 5, path, watch=watch)
            finally:
                await faults.heal()

        def watch(line: Any) -> None:
            if not faults.struck:
                self.look()
            faults(line)

        _, end = self.do(go())
        assert len(faults.struck) == len(plan), "a fault did not strike"
        for client in self.rig.engines.values():
            if not client.child.alive:
                assert not processes.members(client.child.pid)
        return end, list(Reader(path).events())

    def look(self) -> None:
        """Note what there is now, once for each process."""
        for client in (*self.rig.engines.values(), self.rig.trainer):
            if client.child.pid not in self.sessions:
                self.sessions.add(client.child.pid)
                self.segments |= processes.segments(client.child.pid, set())

    def close(self) -> None:
        self.look()
        self.do(self.rig.close())
        self._runner.close()
        assert not [pid for session in self.sessions for pid in processes.members(session)]
        assert not [path for path in self.segments if path.exists()]
        assert not self.folder.exists()


def required(kind: str) -> None:
    found = installs.engine(kind)
    if not found.ok and not os.environ.get("RLSCHED_REQUIRE_ENGINES"):
        pytest.skip(f"engine {kind}: {found.why}")
    assert found.ok, found.why


@pytest.fixture(scope="module")
def rigs() -> Iterator[dict[str, Runs]]:
    made: dict[str, Runs] = {}
    yield made
    for runs in made.values():
        runs.close()


@pytest.fixture
def runs(request: pytest.FixtureRequest, rigs: dict[str, Runs]) -> Runs:
    """One engine's rig at a time, for all of its faults. (A module's fixture with this parameter is made for each.)"""
    kind = request.param
    required(kind)
    for other in [k for k in rigs if k != kind]:
        rigs.pop(other).close()
    if kind not in rigs:
        rigs[kind] = Runs(kind)
    return rigs[kind]


def of(events: list[Any], *kinds: type) -> list[Any]:
    return [e for e in events if isinstance(e, kinds)]


def generating(events: int = 4) -> Any:
    """The moment at which engine 1 has got so many requests under version 1 or a later one."""
    seen: list[Any] = []

    def moment(line: Any) -> bool:
        if isinstance(line, Publish) or (seen and isinstance(line, Generate) and line.engine == 1):
            seen.append(line)
        return len(seen) > events and isinstance(line, Generate) and line.engine == 1

    return moment


def updating(version: int) -> Any:
    return lambda line: isinstance(line, Updating) and line.engine == 1 and line.version == version


def examine(path: Path, failed: str = "") -> None:
    report = check(Reader(path))
    assert report.counts == {}
    assert report.failed == failed
    assert replay(Reader(path)).divergence is None


def nothing_lost_nor_trained_twice(events: list[Any], load: Any, whole: bool = True) -> None:
    trained = Counter(r for t in of(events, Train) for r in t.rollouts)
    assert set(trained.values()) <= {1}
    if whole:
        assert len(trained) == STEPS * SHAPE.b * SHAPE.samples
    finished = Counter(s.rollout for s in of(events, Segment) if s.end in ("stop", "length"))
    assert set(finished.values()) <= {1}
    admits = of(events, Admit)
    admitted = {r for a in admits for r in range(a.first, a.first + a.launch_n)}
    assert set(trained) <= admitted & set(finished) & {s.rollout for s in of(events, Scored)}
    if whole:
        # Each group that was admitted was trained, or its end is told.
        fates = Counter(g for t in of(events, Train) for g in t.groups)
        fates.update(e.group for e in of(events, Drop, Cancel, Reject))
        assert {a.group for a in admits} <= set(fates)
    sizes = Counter[int]()
    for s in of(events, Segment):
        sizes[s.rollout] += s.n
    for a in admits:
        for sample, r in enumerate(range(a.first, a.first + a.launch_n)):
            if r in finished:
                assert sizes[r] == load.output_tokens(5, a.prompt, sample, a.attempt, SHAPE.budget)


def survived(runs: Runs, path: Path, end: Any, events: list[Any], why: str) -> None:
    """Engine 1 died of ``why``, and the run went on without it to its end."""
    assert end.ok, end.why
    examine(path)
    nothing_lost_nor_trained_twice(events, runs.setup.workload)
    (down,) = of(events, Down)
    assert down.engine == 1
    assert why in down.why
    assert "\n" not in down.why
    after = events[events.index(down) + 1 :]
    assert {e.engine for e in of(after, Generate)} <= {0}
    assert not [e for e in of(after, Segment, Updating, Bucket, Installed) if e.engine == 1]
    assert [p.version for p in of(events, Publish)] == list(range(1, STEPS + 1))
    assert of(events, Publish)[-1].engines == [0]


# ---------------------------------------------------------------- the faults, each as one run


def kill(runs: Runs, path: Path, part: str = "") -> None:
    end, events = runs.run(policy(), path, (generating(), Kill(1, part)))
    survived(runs, path, end, events, "exit code 3" if part else "signal SIGKILL")


def stop_in_generation(runs: Runs, path: Path, part: str = "") -> None:
    """For good: found out by the next order to it, or by its silence."""
    end, events = runs.run(policy(), path, (generating(), Freeze(1, part)))
    survived(runs, path, end, events, f"{CONTROL_S:g} s")


def stop_in_transfer(runs: Runs, path: Path) -> None:
    end, events = runs.run(policy("broadcast"), path, (updating(2), Freeze(1)))
    survived(runs, path, end, events, f"{CONTROL_S:g} s")


def stop_for_a_while(runs: Runs, path: Path) -> None:
    """A pause that is shorter than the limits costs nothing but time."""
    end, events = runs.run(policy(), path, (generating(), Freeze(1, seconds=2.0)))
    unharmed(runs, path, end, events)


def slow(runs: Runs, path: Path) -> None:
    end, events = runs.run(policy(), path, (generating(1), Slow(1)))
    unharmed(runs, path, end, events)


def delay(runs: Runs, path: Path) -> None:
    """A version is published on engine 0 while engine 1's words about the one before are on their way."""
    first = lambda e: isinstance(e, Transfer) and e.engines == [0] and e.version == 2  # noqa: E731
    end, events = runs.run(policy(rolling=True), path, (first, Delay(1, most_s=30.0)))
    unharmed(runs, path, end, events)
    (second,) = [p for p in of(events, Publish) if p.version == 2]
    late = [s for s in of(events[events.index(second) :], Segment) if s.engine == 1 and s.version < 2]
    assert late


def delay_that_holds_up_a_publish(runs: Runs, path: Path) -> None:
    """Where the publish waits for every answer, a late one makes it late."""
    end, events = runs.run(policy(), path, (generating(), Delay(1, most_s=1.0)))
    unharmed(runs, path, end, events)


def unharmed(runs: Runs, path: Path, end: Any, events: list[Any]) -> None:
    assert end.ok, end.why
    examine(path)
    nothing_lost_nor_trained_twice(events, runs.setup.workload)
    assert not of(events, Down)
    assert {e for p in of(events, Publish) for e in p.engines} >= {0}
    assert [p.version for p in of(events, Publish)] == list(range(1, STEPS + 1))


def refuse_flush(runs: Runs, path: Path) -> None:
    end, events = runs.run(policy(), path, (generating(1), RefuseFlush(1)))
    failed(runs, path, end, events)
    assert end.why == "engine 1 refused to flush: requests hold KV"
    (refused,) = [d for d in of(events, Done) if not d.ok]
    (flush,) = [f for f in of(events, Flush) if f.id == refused.cmd]
    assert flush.engine == 1


def fail_bucket(runs: Runs, path: Path, transport: str) -> None:
    """The others get the version whole, but by broadcast; nobody is served by who hasn't got it."""
    end, events = runs.run(policy(transport), path, (updating(2), FailBucket(1, 1)))
    failed(runs, path, end, events)
    assert end.why.startswith("engine ")
    told = {i.engine: i.ok for i in of(events, Installed) if i.version == 2}
    assert told == {0: transport != "broadcast", 1: False}
    (transfer,) = [t for t in of(events, Transfer) if t.version == 2]
    counts = Counter(b.engine for b in of(events, Bucket) if b.by == transfer.id)
    assert counts[1] == 1
    assert (counts[0] > 2) == (transport != "broadcast")
    hit = next(i for i, e in enumerate(events) if isinstance(e, Installed) and not e.ok)
    assert not of(events[hit:], Generate)

    async def refused() -> None:
        with pytest.raises(Exception, match="whole"):
            await runs.rig.engines[1].resume()

    runs.do(refused())


def failed(runs: Runs, path: Path, end: Any, events: list[Any]) -> None:
    """The run ended early, with one line."""
    assert not end.ok
    assert end.why
    assert "\n" not in end.why
    examine(path, end.why)
    nothing_lost_nor_trained_twice(events, runs.setup.workload, whole=False)


ALL = ("transformers", "vllm", "sglang")
EMBEDDED = ("transformers",)


class Case(Struct, frozen=True):
    """A fault. ``only``: engines that it is for; ``daily``: those that it is tried on outside the nightly runs, too.
    An engine that died takes half a minute to start again, so that few die daily."""

    run: Any
    arguments: tuple[str, ...] = ()
    only: tuple[str, ...] = ALL
    daily: tuple[str, ...] = ALL


CASES = {
    "slow replica": Case(slow),
    "stopped for a while": Case(stop_for_a_while),
    "response past a publish": Case(delay),
    "response that a publish waits for": Case(delay_that_holds_up_a_publish, daily=EMBEDDED),
    "flush refused": Case(refuse_flush),
    "bucket fails, shared memory": Case(fail_bucket, ("ipc",)),
    "bucket fails, disk": Case(fail_bucket, ("disk",), daily=EMBEDDED),
    "bucket fails, broadcast": Case(fail_bucket, ("broadcast",)),
    "killed": Case(kill, daily=("transformers", "vllm")),
    "server killed": Case(kill, ("sglang_server",), only=("sglang",)),
    "scheduler killed": Case(kill, ("sglang::scheduler",), only=("sglang",), daily=()),
    "stopped in a transfer": Case(stop_in_transfer, daily=EMBEDDED),
    "stopped in generation": Case(stop_in_generation, daily=("transformers", "vllm")),
    "scheduler stopped": Case(stop_in_generation, ("sglang::scheduler",), only=("sglang",)),
}


def cases(nightly: bool) -> list[Any]:
    """Engine by engine, so that each rig is started once."""
    chosen = [(kind, name) for kind in ALL for name, case in CASES.items() if kind in case.only]
    return [c for c in chosen if nightly or c[0] in CASES[c[1]].daily]


@pytest.mark.parametrize(("runs", "name"), cases(nightly=False), indirect=["runs"])
def test_fault(runs, tmp_path, name):
    once(runs, tmp_path, name)


@pytest.mark.nightly
@pytest.mark.parametrize(("runs", "name"), cases(nightly=True), indirect=["runs"])
def test_fault_ten_times_in_a_row(runs, tmp_path, name):
    for i in range(10):
        once(runs, tmp_path / str(i), name)


def once(runs: Runs, folder: Path, name: str) -> None:
    case = CASES[name]
    folder.mkdir(exist_ok=True)
    case.run(runs, folder / "history.jsonl", *case.arguments)
