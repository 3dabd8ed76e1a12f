"""Whole real runs: what they record checks, replays, adds up, and says what was there; and how they end badly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from msgspec.structs import replace

from rlsched.checker import check
from rlsched.commands import Abort, Generate, Pause, Resume, Sleep, Train
from rlsched.errors import PolicyError
from rlsched.facts import Bucket, End, Fact, Installed, Observed, Phase, Resident, Scored, Segment, Trained
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.real.canary_run import audit, canary, logged
from rlsched.real.job import perform
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.replay import replay
from rlsched.shape import Shape
from rlsched.sim.scenario import Scenario
from rlsched.sim.world import World
from rlsched.workload import Length, Workload

pytestmark = pytest.mark.real

SETUP = Setup(
    shape=Shape(b=2, samples=2, steps=4, budget=200),
    workload=Workload(prompt=Length(mean=4.0), output=Length(kind="lognormal", mean=80.0, sigma=0.8)),
)


class Bench:
    """One rig and the loop that it lives in."""

    def __init__(self, setup: Setup) -> None:
        self.runner = asyncio.Runner()
        self.rig: Rig = self.runner.run(Rig.start(setup, 1))

    def run(self, policy: str, path: Path, seed: int = 3) -> End:
        return self.runner.run(perform(self.rig, parse(policy), seed, path))[1]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(SETUP)
    yield made
    made.runner.run(made.rig.close())
    made.runner.close()


def events(path: Path) -> list[Any]:
    return list(Reader(path).events())


def raw(path: Path) -> list[dict[str, Any]]:
    side = path.with_name(path.name.removesuffix(".zst").removesuffix(".jsonl") + ".rollouts.jsonl.zst")
    with zstandard.open(side, "rb") as file:
        return [json.loads(line) for line in file.read().splitlines()]


KEEP, RETRACT = (f"areal-async,admit.eta=1,admit.C=6,publish.fate={fate}" for fate in ("keep", "retract"))


@pytest.mark.parametrize("policy", ["verl-hybrid", "areal-async", "areal-async,admit.eta=1", KEEP, RETRACT])
def test_a_real_run_is_clean_replays_and_adds_up(bench: Bench, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.jsonl.zst"
    assert bench.run(policy, path).ok
    report = check(Reader(path))
    assert report.ok, report.violations[:2]
    assert not report.open
    assert replay(Reader(path)).divergence is None
    seen = events(path)
    made: Counter[int] = Counter()
    for event in seen:
        if isinstance(event, Segment):
            made[event.rollout] += event.n
    trained = {r for event in seen if isinstance(event, Train) for r in event.rollouts}
    kept = {r["rollout"]: r for r in raw(path)}
    assert trained <= set(kept)
    held_out = {tuple(p) for p in SETUP.task.evaluation_prompts()}
    for rollout in trained:
        record = kept[rollout]
        assert len(record["output"]) == len(record["logprobs"]) == made[rollout] == record["length"]
        assert sum(n for _, n in record["spans"]) == made[rollout]
        assert set(record["parts"]) == {"correct", "length"}
        assert record["reward"] == record["parts"]["correct"]
        assert tuple(record["prompt"]) not in held_out
    assert {e.name for e in seen if isinstance(e, Phase)} == {"old_logprob", "update"}
    # The trainer's own log-probabilities of on-policy tokens are the engine's.
    if "eta=1" not in policy:
        assert max(e.stats["max_logprob_gap"] for e in seen if isinstance(e, Trained)) < 5e-5


def test_level_2_sleep_is_measured_and_weights_come_back_in_buckets(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert bench.run("verl-hybrid", path).ok
    seen = events(path)
    naps = [e for e in seen if isinstance(e, Sleep)]
    freed = [e.value for e in seen if isinstance(e, Observed) and e.name == "engine-0/rss_freed"]
    assert len(naps) == len(freed) == SETUP.shape.steps
    gone = [e for e in seen if isinstance(e, Resident) and e.owner == "engine" and e.bytes == 0]
    assert Counter(e.part for e in gone) == {"weights": len(naps), "kv": len(naps)}
    installed = [e for e in seen if isinstance(e, Installed) and e.by]
    assert {e.bytes for e in installed} == {bench.rig.trainer.parameter_bytes}
    assert sum(e.bytes for e in seen if isinstance(e, Bucket)) == sum(e.bytes for e in installed)
    # On a CPU an offloaded part stays where it is, and the history says so.
    assert all(e.bytes for e in seen if isinstance(e, Resident) and e.owner == "trainer")


def test_small_buckets_are_many_and_bit_exact(bench: Bench, tmp_path: Path) -> None:
    shrunk = replace(parse("areal-async"), publish=replace(parse("areal-async").publish, bucket_mb=1))
    path = tmp_path / "run.jsonl"
    # A MiB is more than the tiny model has: the bucket is cut down by a policy that isn't named on a command line.
    policy = replace(shrunk, publish=Tiny())
    assert bench.runner.run(perform(bench.rig, policy, 3, path))[1].ok
    buckets = [e for e in events(path) if isinstance(e, Bucket)]
    assert max(e.index for e in buckets) >= 3
    assert check(Reader(path)).ok


class Tiny(type(parse("areal-async").publish), frozen=True):  # type: ignore[misc]
    """Every version in buckets of 64 KiB."""

    def decide(self, state: None, ledger: Any) -> Any:
        update = super().decide(state, ledger)
        return update and replace(update, bucket=1 << 16)


def test_at_eta_1_rollouts_are_aborted_and_resumed(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert bench.run("areal-async,admit.eta=1,admit.C=6", path).ok
    seen = events(path)
    called = {r for e in seen if isinstance(e, Abort) and e.fate == "resume" for r in e.rollouts}
    resumed = {w.rollout for e in seen if isinstance(e, Generate) for w in e.work if w.have}
    assert called & resumed
    spans = {r["rollout"]: r["spans"] for r in raw(path)}
    mixed = [r for r in resumed if len(spans.get(r, [])) > 1]
    assert mixed
    assert not any(isinstance(e, Segment) and e.end == "error" for e in seen)


@pytest.fixture(scope="module")
def telling() -> Iterator[Bench]:
    """A bench whose tokens say of which version they are, and on whose KV."""
    made = Bench(canary(SETUP))
    yield made
    made.runner.run(made.rig.close())
    made.runner.close()


STAGES = ("told", "Transfer", "Updating", "Installed", "Flush", "Publish")


def installing(events: list[Any]) -> set[tuple[str, ...]]:
    """What happens from a pause to the resume that ends it, each kind of event told once in a row."""
    found, current = set(), list[str]()
    for event in events:
        if isinstance(event, Pause):
            current = ["Pause"]
        name = "told" if isinstance(event, Segment) and event.end == "install" else type(event).__name__
        if current and name != current[-1] and name in STAGES:
            current.append(name)
        if isinstance(event, Resume):
            found.add(tuple(current))
            current = []
    return found


@pytest.mark.parametrize("policy", [KEEP, RETRACT])
def test_requests_live_through_updates_and_their_tokens_say_so(telling: Bench, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.jsonl"
    assert telling.run(policy, path).ok
    report = check(Reader(path))
    assert report.ok, report.violations[:2]
    assert replay(Reader(path)).divergence is None
    seen = events(path)
    through = [e for e in seen if isinstance(e, Segment) and e.end == "install"]
    assert through and all(e.n for e in through)
    assert not [e for e in seen if isinstance(e, Abort) and e.fate != "cancel"]
    heard = audit(seen, logged(path))
    assert heard.good, (heard.labels, heard.installs)
    assert heard.mixed
    older = [e for e in seen if isinstance(e, Segment) and e.n and e.kv_from < e.version]
    assert bool(older) == (policy == KEEP)
    # The log divides a rollout's tokens as the segments do.
    made: dict[int, Counter[int]] = {}
    for event in seen:
        if isinstance(event, Segment) and event.n:
            made.setdefault(event.rollout, Counter())[event.version] += event.n
    for record in raw(path):
        assert dict(record["spans"]) == dict(made[record["rollout"]])
    # A simulated run of the same job goes the same way.
    predicted: list[Any] = []
    World(Scenario(shape=SETUP.shape, workload=SETUP.workload), parse(policy), 3, predicted.append).run()
    assert installing(predicted) >= installing(seen)
    assert any("told" in steps for steps in installing(seen))


def test_a_policy_file_changes_the_real_batches(bench: Bench, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from rlsched.decisions import Batch, Wait\n"
        "from rlsched.slot import Slot\n"
        "class Newest(Slot, frozen=True):\n"
        "    def decide(self, state, ledger):\n"
        "        b = ledger.shape.b\n"
        "        if len(ledger.buffer) < 2 * b:\n"
        "            return Wait('twice the batch')\n"
        "        return Batch(sorted(ledger.buffer)[-b:], ledger.index, True)\n"
    )
    path = tmp_path / "run.jsonl"
    assert bench.run(f"areal-async,admit.eta=2,admit.C=8,select={mine}:Newest", path).ok
    buffer: set[int] = set()
    batches = 0
    for event in events(path):
        if type(event).__name__ == "Accept":
            buffer.add(event.group)
        elif isinstance(event, Train):
            assert event.groups == sorted(buffer)[-SETUP.shape.b :]
            buffer -= set(event.groups)
            batches += 1
    assert batches == SETUP.shape.steps
    assert check(Reader(path)).ok


def test_a_slot_that_answers_nonsense_ends_the_run_and_leaves_its_history(bench: Bench, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from rlsched.slot import Slot\n"
        "class Bad(Slot, frozen=True):\n"
        "    def decide(self, state, ledger):\n"
        "        return None if ledger.buffer else __import__('rlsched.decisions').decisions.Wait('none')\n"
    )
    path = tmp_path / "run.jsonl"
    with pytest.raises(PolicyError, match=r"slot select \(Bad\): decide returned None"):
        bench.run(f"areal-async,select={mine}:Bad", path)
    *_, last = events(path)
    assert isinstance(last, End)
    assert not last.ok
    assert "slot select (Bad)" in last.why
    # The rig is as good as new.
    assert bench.run("areal-async", tmp_path / "after.jsonl").ok


def test_lengths_are_those_of_the_workload(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert bench.run("areal-async", path).ok
    for record in raw(path):
        drawn = SETUP.workload.output_tokens(3, record["prompt_index"], record["sample"], record["attempt"], 200)
        assert record["length"] == drawn == len(record["output"])
    scored = [e for e in events(path) if isinstance(e, Scored)]
    assert {frozenset(e.parts) for e in scored} == {frozenset({"correct", "length"})}


def children(pid: int) -> dict[str, int]:
    """The processes of a run, by module."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"-m" in words:
                found[words[words.index(b"-m") + 1].decode()] = int(child)
    return found


@pytest.mark.parametrize(
    ("module", "name"), [("rlsched.real.engines.transformers", "engine-0"), ("rlsched.real.trainer", "trainer")]
)
def test_a_killed_child_ends_the_run_in_one_line(tmp_path: Path, module: str, name: str) -> None:
    path = tmp_path / "run.jsonl"
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "rlsched", "run", "areal-async,admit.eta=1", "--paced", "--steps", "50"]
    run = subprocess.Popen([*command, "-o", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (path.exists() and b'"ev":"trained"' in path.read_bytes()):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline, "the run did not get going"
            time.sleep(0.05)
        family = children(run.pid)
        os.kill(family[module], signal.SIGKILL)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 1
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("rlsched: ")
    assert f"{name} (pid {family[module]}) died: signal SIGKILL" in line
    assert not any(Path(f"/proc/{pid}").exists() for pid in family.values())
    assert set(Path("/dev/shm").iterdir()) <= before
    report = check(Reader(path))
    assert report.ok, report.violations[:2]
    assert f"{name} (pid {family[module]}) died" in report.failed
    assert replay(Reader(path)).divergence is None


def test_a_killed_parent_leaves_an_open_history_and_no_process(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.zst"
    command = [sys.executable, "-m", "rlsched", "run", "areal-async,admit.eta=1", "--paced", "--steps", "50"]
    run = subprocess.Popen([*command, "-o", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (path.exists() and path.stat().st_size > 2500):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = children(run.pid)
        assert family.keys() == {"rlsched.real.engines.transformers", "rlsched.real.trainer", "rlsched.real.janitor"}
    finally:
        run.kill()
        run.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in family.values()):
        assert time.monotonic() < deadline, "a child outlived its parent"
        time.sleep(0.05)
    report = check(Reader(path))
    assert report.open
    assert report.ok, report.violations[:2]
    assert report.events > 20
    assert replay(Reader(path)).divergence is None


def test_the_manifest_says_what_was_there(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    bench.run("verl-hybrid", path)
    head = Reader(path).manifest
    assert head.world == "real"
    assert head.labels["device"] == "cores"
    assert head.labels["ipc"] == "shared memory"
    assert {"rlsched", "transformers", "torch", "grader", "benchmark"} <= set(head.versions)
    assert not head.paced
    assert all(msgspec.to_builtins(head.definitions).values())
    times = [e.t for e in events(path) if isinstance(e, Fact)]
    assert times == sorted(times)
