"""SGLang as an engine: a real server, driven through the commands that every engine has."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlsched.checker import check
from rlsched.commands import Abort, Generate
from rlsched.facts import End, Segment
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.real import installs
from rlsched.real.canary import BOS, Claim, Reading, mismatches, runs
from rlsched.real.canary_forger import Forger
from rlsched.real.canary_run import audit, canary, logged
from rlsched.real.client import EngineClient
from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.job import perform
from rlsched.real.model import CANARY, ModelSpec, build
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.real.transport import BroadcastBuckets, Checkpoints, SharedBuckets
from rlsched.real.wire import Refused
from rlsched.replay import replay
from rlsched.shape import Shape
from rlsched.workload import Length, Workload

MODULE = "rlsched.real.engines.sglang"
SHARING = "rlsched.real.engines.sglang_sharing"
START_S = 400.0
"""Longest start of an engine on a machine that others use, too."""


INSTALLED = installs.engine("sglang")
pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(1800)]  # needs `make engines`
if not INSTALLED.ok and not os.environ.get("RLSCHED_REQUIRE_ENGINES"):
    pytest.skip(f"engine sglang: {INSTALLED.why}", allow_module_level=True)


def start(rig: Any, name: str, config: EngineConfig, module: str = MODULE) -> EngineClient:
    """An engine of the tests' rig."""
    assert INSTALLED.ok, INSTALLED.why

    async def made() -> EngineClient:
        return await EngineClient.start(
            name,
            config,
            rig.folder,
            module=module,
            interpreter=INSTALLED.interpreter,
            on_ended=lambda e: rig.ended.__setitem__(e.rollout, e),
            on_down=rig.deaths.append,
        )

    client = rig.run(made(), START_S)
    rig.clients.append(client)
    return client


@pytest.fixture(scope="module")
def engine(rig: Any) -> EngineClient:
    return start(rig, "sglang", EngineConfig(temperature=0.0, kv_blocks=128, page_size=16, max_batch_tokens=64))


@pytest.fixture(scope="module")
def model() -> Any:
    return build(ModelSpec())


@pytest.fixture
def afresh(rig: Any, engine: EngineClient) -> None:
    """An idle engine at version 0."""
    rig.run(engine.abort())
    rig.run(engine.reset(0))
    rig.ended.clear()


@pytest.fixture(scope="module")
def trainer(rig: Any) -> Any:
    return rig.trainer("trainer", TrainerConfig(lr=1e-2))


@pytest.fixture(scope="module")
def apart(rig: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A second rig, for engines that don't survive their tests."""
    made = type(rig)(tmp_path_factory.mktemp("apart"))
    yield made
    made.close()


def said(client: EngineClient, what: str) -> list[str]:
    """Lines of the child's stderr."""
    return [line for line in client.child.stderr.read_text().splitlines() if what in line]


# ---------------------------------------------------------------- what it generates


def test_greedy_tokens_equal_plain_transformers(rig, engine, afresh, model, greedy, prompt):
    async def all_at_once():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 10 + 7 * i) for i in range(8)))
        return await rig.end_of(*(f"r{i}" for i in range(8)))

    for i, end in enumerate(rig.run(all_at_once())):
        assert end.tokens == greedy(model, prompt(i), 10 + 7 * i)
        assert (end.reason, end.version) == ("length", 0)
        assert len(end.logprobs) == len(end.tokens)


def test_it_says_what_it_can_do_here(engine):
    able = engine.capabilities
    assert (able.engine, able.version, able.device) == ("sglang", "0.5.23", "cpu")
    assert able.kv_tokens == 128 * 16
    assert able.max_batch_tokens == 64
    assert able.sleep_frees == ()  # on a CPU nothing is given back, and nothing is said to be


def test_logprobs_are_the_trainers_own(rig, trainer, prompt, engine, afresh):
    assert engine.initial_checksum == trainer.initial_checksum

    async def compare():
        await asyncio.gather(*(engine.submit(f"s{i}", prompt(i), 20 + i) for i in range(16)))
        ends = await rig.end_of(*(f"s{i}" for i in range(16)))
        batch = [Sample(prompt(i), e.tokens, e.logprobs, float(i % 2), i // 4) for i, e in enumerate(ends)]
        own = await trainer.evaluate(batch)
        return max(abs(a - b) for s, row in zip(batch, own, strict=True) for a, b in zip(s.logprobs, row, strict=True))

    assert rig.run(compare()) <= 5e-5


def test_a_request_that_is_not_forced_stops_at_eos(rig, engine, afresh, model, prompt):
    # EOS is token 2; a prompt is looked for whose greedy continuation begins with it.
    import torch

    prompts = [[BOS, a, b] for a in range(3, 32) for b in range(3, 32)]
    with torch.no_grad():
        next_tokens = model(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
    first = prompts[next_tokens.index(2)]

    async def both():
        await engine.submit("forced", first, 20)
        await engine.submit("free", first, 20, forced=False)
        return await rig.end_of("forced", "free")

    forced, free = rig.run(both())
    assert (len(forced.tokens), forced.reason) == (20, "length")
    assert (free.tokens, free.reason) == ([2], "stop")


def test_what_it_would_shorten_or_die_of_is_refused(rig, engine, afresh, prompt):
    most = engine.capabilities.max_request_tokens

    async def refused():
        for tokens, length in (([1] * most, 1), ([], 5), ([1], 0), ([1, 32], 5), ([1, -1], 5)):
            with pytest.raises(Refused):
                await engine.submit("bad", tokens, length)
        return await rig.generate(engine, "largest", prompt(0), most - 4)

    assert len(rig.run(refused()).tokens) == most - 4


def test_steps_are_told(rig, engine, afresh, prompt):
    async def traced():
        await engine.trace(True)
        await engine.pause()
        await engine.submit("a", prompt(0), 4)
        await engine.submit("b", prompt(1) * 20, 3)  # 80 tokens: two chunks
        await engine.resume()
        await rig.end_of("a", "b")
        return await engine.trace(False)

    steps = rig.run(traced())
    assert sum(s.prompt_tokens for s in steps) == 84
    assert max(s.prompt_tokens for s in steps) <= 64
    # The first token comes with the prompt; the rest are decoded, each on one token more than the last.
    assert sum(s.decoding for s in steps) == 3 + 2
    assert sum(s.kv_tokens for s in steps) == (4 + 5 + 6) + (80 + 81)
    assert all(s.elapsed_ns >= s.worked_ns > 0 for s in steps)


# ---------------------------------------------------------------- interruptions


def test_abort_delivers_partials_and_resubmission_continues_them(rig, engine, afresh, model, greedy, prompt):
    async def interrupted():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 120) for i in range(4)))
        await asyncio.sleep(0.15)
        aborted = await engine.abort()
        partial = {r: rig.ended[r] for r in aborted.rollouts}  # told before the answer: no waiting
        for i in range(4):
            tokens = partial[f"r{i}"].tokens
            await engine.submit(f"again{i}", prompt(i) + tokens, 120 - len(tokens))
        return partial, await rig.end_of(*(f"again{i}" for i in range(4)))

    partial, rest = rig.run(interrupted())
    for i in range(4):
        part = partial[f"r{i}"]
        assert part.reason == "abort"
        assert 0 < len(part.tokens) < 120
        assert len(part.logprobs) == len(part.tokens)
        assert part.tokens + rest[i].tokens == greedy(model, prompt(i), 120)
    assert not said(engine, " made, ")


def test_aborts_at_any_moment_are_exact(rig, engine, afresh, model, greedy, prompt):
    async def often():
        for i in range(25):
            await engine.submit(f"r{i}", prompt(0), 900)
            await asyncio.sleep(0.004 * (i % 5))
            assert (await engine.abort([f"r{i}", "unknown"])).rollouts == [f"r{i}"]
        return await engine.pause()

    assert rig.run(often()).live == {}
    rig.run(engine.resume())
    longest = greedy(model, prompt(0), 60)
    for end in rig.ended.values():
        assert end.tokens[:60] == longest[: len(end.tokens)]
    assert any(end.tokens for end in rig.ended.values())


def test_a_request_whose_last_step_an_abort_lets_happen_is_complete(rig, engine, afresh, prompt):
    """Every moment of a short request is met by some abort: what has all its tokens is told as finished."""

    async def often():
        for i in range(40):
            await engine.submit(f"r{i}", prompt(i), 6)
            await asyncio.sleep(0.001 * i)
            aborted = (await engine.abort([f"r{i}"])).rollouts
            assert aborted == ([f"r{i}"] if rig.ended[f"r{i}"].reason == "abort" else [])

    rig.run(often())
    assert {e.reason for e in rig.ended.values()} == {"abort", "length"}
    assert all((e.reason == "length") == (len(e.tokens) == 6) for e in rig.ended.values())


def test_a_pause_stands_still_and_an_abort_inside_gives_back_all(rig, engine, afresh, model, greedy, prompt):
    async def still():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 150) for i in range(3)))
        first = await rig.until_generated(engine, 7)
        await engine.submit("queued", prompt(3), 10)
        await asyncio.sleep(0.2)
        second = (await engine.pause()).live
        aborted = await engine.abort(["r0", "queued"])
        ends = {name: rig.ended[name] for name in ("r0", "queued")}
        await engine.resume()
        return first, second, aborted, ends, await rig.end_of("r1", "r2")

    first, second, aborted, ends, rest = rig.run(still())
    assert second == {**first, "queued": 0}
    assert sorted(aborted.rollouts) == ["queued", "r0"]
    assert (ends["queued"].tokens, ends["queued"].reason) == ([], "abort")
    assert ends["r0"].tokens == greedy(model, prompt(0), first["r0"])
    assert len(ends["r0"].logprobs) == first["r0"]
    for i, end in enumerate(rest, 1):
        assert end.tokens == greedy(model, prompt(i), 150)


def test_a_name_that_begins_with_another_is_not_aborted_with_it(rig, engine, afresh, prompt):
    async def prefixes():
        await asyncio.gather(*(engine.submit(name, prompt(0), 400) for name in ("x-1", "x-10", "x-100")))
        await asyncio.sleep(0.05)
        aborted = await engine.abort(["x-1"])
        return aborted.rollouts, await rig.end_of("x-10", "x-100")

    aborted, others = rig.run(prefixes())
    assert aborted == ["x-1"]
    assert all(len(end.tokens) == 400 and end.reason == "length" for end in others)


def test_flush_is_refused_while_requests_hold_kv_and_recomputes_when_told(rig, engine, afresh, model, greedy, prompt):
    async def flushed():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 60) for i in range(3)))
        await rig.until_generated(engine, 3)
        refused = await engine.flush()
        done = await engine.flush(recompute=True)
        await engine.trace(True)
        await engine.resume()
        ends = await rig.end_of("r0", "r1", "r2")
        return refused, done, ends, await engine.trace(False), await engine.flush()

    refused, done, ends, steps, idle = rig.run(flushed())
    assert (refused.ok, done.ok, idle.ok) == (False, True, True)
    assert steps[0].prompt_tokens >= 3 * (4 + 3)
    for i, end in enumerate(ends):
        assert end.tokens == greedy(model, prompt(i), 60)


def test_sleep_is_asked_for_and_frees_nothing(rig, engine, afresh, trainer, model, greedy, prompt):
    shared = SharedBuckets()

    async def nap():
        await trainer.reset(0)
        with pytest.raises(Refused, match="pause"):
            await engine.sleep(2)
        await engine.submit("r", prompt(0), 400)
        await rig.until_generated(engine, 3)
        with pytest.raises(Refused, match="stand on the KV"):
            await engine.sleep(2)
        await engine.abort()
        slept = await engine.sleep(2)
        with pytest.raises(Refused, match="asleep"):
            await engine.resume()
        assert (await engine.wake(["weights"])).awake == ["weights"]
        assert not (await shared.push(trainer, [engine], 0)).failed
        assert (await engine.wake(["kv", "weights"])).weights_usable  # the weights are awake already
        await engine.resume()
        return slept, await rig.generate(engine, "after", prompt(0), 20)

    slept, after = rig.run(nap())
    rig.run(shared.close())
    assert abs(slept.freed) < 2 << 20
    assert after.tokens == greedy(model, prompt(0), 20)


# ---------------------------------------------------------------- updates


def test_updates_by_every_transport_are_bit_exact(rig, engine, afresh, trainer, greedy, prompt, tmp_path):
    transports = [SharedBuckets(5_001), BroadcastBuckets(), Checkpoints(tmp_path)]

    async def update():
        found = []
        await trainer.reset(0)
        for version, transport in enumerate(transports, 1):
            batch = [
                Sample(prompt(i), [8 + (i + j) % 8 for j in range(10)], [-3.0] * 10, float(i % 2), i // 4)
                for i in range(8)
            ]
            await trainer.train(batch, version)
            await engine.pause()
            pushed = await transport.push(trainer, [engine], version)
            await engine.resume()
            end = await rig.generate(engine, f"r{version}", prompt(0), 40)
            found.append((pushed, end, await trainer.checksum(), await engine.checksum()))
        path = tmp_path / "last.safetensors"
        await trainer.save(str(path), len(transports))
        return found, path

    found, path = rig.run(update())
    rig.run(asyncio.sleep(0))
    for version, (pushed, end, source, sink) in enumerate(found, 1):
        assert not pushed.failed
        assert (sink.checksum, sink.version) == (source.checksum, version)
        assert end.version == version
    from safetensors.torch import load_file

    trained = build(ModelSpec())
    trained.load_state_dict(load_file(path))
    assert found[-1][1].tokens == greedy(trained, prompt(0), 40)
    assert found[0][1].tokens != found[-1][1].tokens or found[0][1].logprobs != found[-1][1].logprobs
    for transport in transports:
        rig.run(transport.close())


def test_a_torn_update_is_refused_and_so_is_generation(rig, engine, afresh, trainer, greedy, model, prompt):
    small = SharedBuckets(5_001)

    async def torn():
        await trainer.reset(0)
        with pytest.raises(Refused, match="pause"):
            await engine.begin_update(1)
        await engine.pause()
        await engine.begin_update(1)
        packed = await trainer.pack(small.path, small.bucket_bytes, 0, 0)
        await engine.copy_bucket(small.path, small.bucket_bytes, packed.pieces)
        with pytest.raises(Refused, match="bytes arrived"):
            await engine.end_update(1)
        with pytest.raises(Refused, match="not whole"):
            await engine.resume()
        assert not (await small.push(trainer, [engine], 0)).failed
        await engine.resume()
        return await rig.generate(engine, "whole", prompt(0), 8)

    assert rig.run(torn()).tokens == greedy(model, prompt(0), 8)
    rig.run(small.close())


# ---------------------------------------------------------------- what canary weights say

PROMPT = [BOS, *(8 + i % 8 for i in range(39))]


@pytest.fixture(scope="module")
def speaking(rig: Any) -> EngineClient:
    return start(rig, "speaking", EngineConfig(model=CANARY, temperature=0.0, kv_blocks=256))


@pytest.fixture(scope="module")
def forger() -> Iterator[tuple[Forger, SharedBuckets]]:
    yield Forger(), SharedBuckets()


async def bring(engine: EngineClient, forger: tuple[Forger, SharedBuckets], version: int) -> dict[str, int]:
    source, transport = forger
    source.hold(version)
    pushed = await transport.push(source, [engine], version)
    assert not pushed.failed
    return pushed.updated[engine.name].live


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_tokens_say_their_version_across_an_update(rig, speaking, forger, recompute):
    async def held():
        await speaking.abort()
        await speaking.reset(0)
        rig.ended.clear()
        await speaking.submit("held", PROMPT, 60)
        await rig.until_generated(speaking, 10)
        cut = (await bring(speaking, forger, 1))["held"]
        if recompute:
            assert (await speaking.flush(recompute=True)).ok
        await speaking.resume()
        held = (await rig.end_of("held"))[0]
        return cut, held, await rig.generate(speaking, "fresh", PROMPT, 10)

    cut, held, fresh = rig.run(held())
    claims = [Claim(cut, 0, 0), Claim(60 - cut, 1, 1 if recompute else 0)]
    assert mismatches(held.tokens, claims) == []
    assert mismatches(fresh.tokens, [Claim(10, 1, 1)]) == []
    assert (held.version, fresh.version) == (0, 1)
    assert not said(speaking, "SGLang says")  # its own labels agree


def test_an_aborted_request_goes_on_under_the_new_version(rig, speaking, forger):
    async def interrupted():
        await speaking.abort()
        await speaking.reset(0)
        rig.ended.clear()
        await speaking.submit("part", PROMPT, 400)
        await asyncio.sleep(0.2)
        await speaking.abort()
        await speaking.pause()
        await bring(speaking, forger, 1)
        await speaking.resume()
        part = rig.ended["part"]
        return part, await rig.generate(speaking, "rest", PROMPT + part.tokens, 20)

    part, rest = rig.run(interrupted())
    assert part.tokens
    assert mismatches(part.tokens, [Claim(len(part.tokens), 0, 0)]) == []
    assert mismatches(rest.tokens, [Claim(20, 1, 1)]) == []


@pytest.fixture(scope="module")
def sharing(apart: Any) -> EngineClient:
    return start(apart, "sharing", EngineConfig(model=CANARY, temperature=0.0, kv_blocks=256), SHARING)


def test_a_prefix_cache_that_is_not_flushed_is_seen(apart, sharing, forger):
    """A seeded wrong handling: with SGLang's prefix cache on, and no flush, new weights stand on old KV."""

    async def twice():
        told = []
        for version, flush in ((1, True), (2, False)):
            await apart.generate(sharing, f"before {version}", PROMPT, 10)
            await sharing.pause()
            await bring(sharing, forger, version)
            if flush:
                assert (await sharing.flush()).ok
            await sharing.resume()
            told.append(runs((await apart.generate(sharing, f"after {version}", PROMPT, 10)).tokens, version))
        return told

    flushed, stale = apart.run(twice())
    assert [r.said for r in flushed] == [Reading(1, 1)]
    assert stale[0].said == Reading(2, 1, ("kv",))


# ---------------------------------------------------------------- pacing and processes


def server_of(client: EngineClient) -> list[int]:
    """Processes below an engine child."""
    found = [client.child.pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found[1:]


def running(pid: int) -> bool:
    """Whether a process runs: a zombie of another parent's doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def paced(apart: Any) -> EngineClient:
    return start(apart, "paced", Setup().paced().engine)


def test_steps_are_held_to_their_minima(apart, paced, prompt):
    pace = Setup().paced().engine.pace

    async def traced():
        await paced.trace(True)
        await asyncio.gather(*(paced.submit(f"r{i}", prompt(i), 40) for i in range(8)))
        await apart.end_of(*(f"r{i}" for i in range(8)))
        return await paced.trace(False), await paced.count()

    steps, counted = apart.run(traced())
    declared = [pace.step.of(s.decoding, s.kv_tokens, s.prompt_tokens) for s in steps]
    assert counted.held == len(steps)
    assert counted.declared_ns == sum(declared)
    assert sum(s.elapsed_ns for s in steps) >= sum(declared) - 1_000_000
    assert sum(s.worked_ns for s in steps) < sum(declared)


def test_the_server_follows_to_the_cores(apart, paced):
    core = {min(os.sched_getaffinity(0))}
    paced.set_cpus(core)
    apart.run(paced.count())
    assert all(os.sched_getaffinity(pid) == core for pid in server_of(paced))


def test_a_killed_scheduler_is_the_engines_death(apart, paced):
    server = server_of(paced)
    scheduler = next(p for p in server if b"scheduler" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(scheduler, signal.SIGKILL)

    async def dies():
        while not apart.deaths:
            await asyncio.sleep(0.05)

    apart.run(dies(), 60)
    assert not [pid for pid in server if running(pid)]
    apart.deaths.clear()


def test_a_killed_child_takes_the_server_along(apart, sharing):
    server = server_of(sharing)
    assert len(server) >= 3
    sharing.child.kill()
    deadline = time.monotonic() + 20
    while left := [pid for pid in server if running(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


# ---------------------------------------------------------------- whole runs

SETUP = Setup(
    engine_kind="sglang",
    shape=Shape(b=2, samples=2, steps=4, budget=120),
    workload=Workload(prompt=Length(mean=4.0), output=Length(kind="lognormal", mean=60.0, sigma=0.8)),
)


class Bench:
    """One rig and the loop that it lives in."""

    def __init__(self, setup: Setup) -> None:
        self.runner = asyncio.Runner()
        self.rig = self.runner.run(Rig.start(setup, 1))

    def run(self, policy: str, path: Path, seed: int = 3) -> End:
        return self.runner.run(perform(self.rig, parse(policy), seed, path))[1]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(canary(SETUP))
    yield made
    made.runner.run(made.rig.close())
    made.runner.close()


@pytest.mark.parametrize("policy", ["verl-hybrid", "areal-async", "areal-async,admit.eta=1,admit.C=6"])
def test_a_run_is_clean_replays_and_its_tokens_agree(bench: Bench, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.jsonl"
    end = bench.run(policy, path)
    assert end.ok, end.why
    report = check(Reader(path))
    assert report.ok, report.violations[:2]
    assert replay(Reader(path)).divergence is None
    events = list(Reader(path).events())
    found = audit(events, logged(path))
    assert found.good, (found.labels, found.installs)
    if "eta=1" in policy:
        called = {r for e in events if isinstance(e, Abort) and e.fate == "resume" for r in e.rollouts}
        resumed = {w.rollout for e in events if isinstance(e, Generate) for w in e.work if w.have}
        assert called & resumed
        assert found.mixed
    assert not any(isinstance(e, Segment) and e.end == "error" for e in events)
    assert Reader(path).manifest.versions["sglang"] == "0.5.23"


def test_the_stand_ins_are_loud(tmp_path):
    """What is missing can be imported; calling it is an error."""
    code = (
        "import rlsched.real.engines.sglang_shim as shim, sys\n"
        "shim.STOOD_IN\n"
        "sys.modules.pop('sgl_kernel', None)\n"
        "from sgl_kernel import silu_and_mul\n"
        "try: silu_and_mul(1, 2)\n"
        "except NotImplementedError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sgl_kernel.silu_and_mul is not installed" in told.stdout
