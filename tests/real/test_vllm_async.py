"""vLLM with its engine core in another process, by `AsyncLLM` and by its server: both behind the same protocol.

One engine of each kind and one rig serve all tests; the last test of each kind kills its core.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlsched.checker import check
from rlsched.commands import Abort, Generate
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.real import installs
from rlsched.real.canary import Reading, Run, runs
from rlsched.real.canary_forger import Forger
from rlsched.real.canary_run import audit, canary, logged
from rlsched.real.client import EngineClient
from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.installs import RECIPES
from rlsched.real.job import perform
from rlsched.real.model import ModelSpec, build
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.real.transport import BroadcastBuckets, Checkpoints, SharedBuckets
from rlsched.real.wire import Refused
from rlsched.replay import replay
from rlsched.shape import Shape
from rlsched.workload import Length, Workload

INSTALLED = installs.engine("vllm-async")
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]  # needs `make engines`
if not INSTALLED.ok and os.environ.get("RLSCHED_REQUIRE_ENGINES") != "1":
    pytest.skip(f"vLLM: {INSTALLED.why}", allow_module_level=True)

BOS = 1
LONG = [BOS, *(8 + i % 8 for i in range(69))]
"""Two whole KV pages of 32 tokens and a rest: enough for a prefix to be shared."""
START_S = 400.0
"""Longest start of an engine on a machine that others use, too."""


def start(rig: Any, kind: installs.EngineKind, config: EngineConfig) -> EngineClient:
    """An engine of the tests' rig."""
    assert INSTALLED.ok, INSTALLED.why

    async def made() -> EngineClient:
        return await EngineClient.start(
            kind,
            config,
            rig.folder,
            module=RECIPES[kind].module,
            interpreter=INSTALLED.interpreter,
            environment=RECIPES[kind].environment,
            on_ended=lambda e: rig.ended.__setitem__(e.rollout, e),
            on_down=rig.deaths.append,
        )

    client: EngineClient = rig.run(made(), START_S)
    rig.clients.append(client)
    return client


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)  # two on two shared cores are far slower
    return build(ModelSpec())


@pytest.fixture(scope="module", params=["vllm-async", "vllm-server"])
def engine(rig: Any, model: Any, greedy: Any, request: pytest.FixtureRequest) -> EngineClient:
    # Its end-of-sequence is what an untrained model says first.
    eos = greedy(model, [BOS, 8, 9, 8], 1)[0]
    config = EngineConfig(temperature=0.0, kv_blocks=64, page_size=16, max_batch_tokens=64, max_requests=8, eos=eos)
    return start(rig, request.param, config)


@pytest.fixture(scope="module")
def trainer(rig: Any) -> Any:
    return rig.trainer("trainer", TrainerConfig(lr=1e-2))


@pytest.fixture
def idle(rig: Any, engine: EngineClient) -> EngineClient:
    """The engine, idle at version 0."""
    rig.run(engine.abort())
    rig.run(engine.reset(0))
    rig.ended.clear()
    return engine


def said(client: EngineClient, what: str) -> list[str]:
    """Lines of the child's stderr."""
    return [line for line in client.child.stderr.read_text().splitlines() if what in line]


def family_of(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def running(pid: int) -> bool:
    """Whether a process runs: a zombie of another parent's doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def core_of(client: EngineClient) -> int:
    """The engine core's process."""
    below = family_of(client.child.pid)
    (core,) = (p for p in below if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes())
    return core


# ---------------------------------------------------------------- what it generates


def test_three_ways_have_one_installation():
    ways: tuple[installs.EngineKind, ...] = ("vllm", "vllm-async", "vllm-server")
    assert len({installs.interpreter(way) for way in ways}) == 1
    assert len({RECIPES[way].module for way in ways}) == 3


def test_it_says_what_it_can_do_here(engine):
    able = engine.capabilities
    assert (able.engine, able.device, able.version) == (engine.name, "cpu", INSTALLED.version)
    assert (able.page_size, able.kv_tokens, able.max_request_tokens) == (32, 1024, 1024)
    assert able.pause_modes == ("keep", "retract", "abort", "wait")
    assert able.sleep_levels == (1, 2) and able.sleep_frees == ()  # nothing is given back, and nothing is said to be
    assert engine.parameter_bytes == 4 * ModelSpec().parameters()
    assert core_of(engine) != engine.child.pid


def test_greedy_tokens_equal_plain_transformers(rig, idle, trainer, model, greedy, prompt):
    async def all_at_once():
        await asyncio.gather(*(idle.submit(f"r{i}", prompt(i), 10 + 7 * i) for i in range(8)))
        ends = await rig.end_of(*(f"r{i}" for i in range(8)))
        batch = [Sample(prompt(i), e.tokens, e.logprobs, float(i % 2), i // 4) for i, e in enumerate(ends)]
        return ends, await trainer.evaluate(batch)

    ends, own = rig.run(all_at_once())
    for i, end in enumerate(ends):
        assert end.tokens == greedy(model, prompt(i), 10 + 7 * i)
        assert (end.reason, end.version, end.labels) == ("length", 0, [(0, 10 + 7 * i)])
    gaps = [abs(a - b) for e, row in zip(ends, own, strict=True) for a, b in zip(e.logprobs, row, strict=True)]
    assert len(gaps) == sum(10 + 7 * i for i in range(8)) and max(gaps) < 5e-4


def test_end_of_sequence_ends_only_what_is_not_forced(rig, idle, prompt):
    async def both():
        await idle.submit("forced", prompt(0), 20)
        await idle.submit("free", prompt(0), 20, forced=False)
        return await rig.end_of("forced", "free")

    forced, free = rig.run(both())
    assert (len(forced.tokens), forced.reason) == (20, "length")
    assert (free.tokens, free.reason, len(free.logprobs)) == (forced.tokens[:1], "stop", 1)


def test_what_can_never_fit_is_refused_and_the_engine_lives(rig, idle, prompt):
    async def refused():
        for tokens, length in ((prompt(0), 1021), ([], 5), (prompt(0), 0), ([99], 5)):
            with pytest.raises(Refused):
                await idle.submit("odd", tokens, length)
        return await rig.generate(idle, "fits", prompt(0), 1020)

    assert len(rig.run(refused()).tokens) == 1020


def test_the_trace_says_what_each_step_computed(rig, idle, prompt):
    async def traced():
        await idle.pause()
        await idle.trace(True)
        await idle.submit("short", prompt(0), 5)
        await idle.submit("long", LONG, 3)
        await idle.resume()
        await rig.end_of("short", "long")
        return await idle.trace(False)

    told = rig.run(traced())
    # 64 tokens a step: the long prompt is chunked.
    steps = [(0, 0, 64), (1, 4, 10), (2, 5 + 70, 0), (2, 6 + 71, 0), (1, 7, 0)]
    assert [(s.decoding, s.kv_tokens, s.prompt_tokens) for s in told] == steps
    assert all(s.elapsed_ns >= s.worked_ns > 0 for s in told)


def test_an_equal_prefix_is_told_as_cached(rig, idle):
    async def twice():
        return [(await rig.generate(idle, name, LONG, 4)).cached for name in ("first", "second")]

    assert rig.run(twice()) == [0, 64]


# ---------------------------------------------------------------- interruptions


def test_aborts_at_any_moment_are_exact_and_leave_the_others_alone(rig, idle, model, greedy, prompt):
    async def often():
        await idle.submit("other", prompt(1), 800)
        for i in range(15):
            await idle.submit(f"r{i}", prompt(0), 900)
            await asyncio.sleep(0.004 * (i % 5))
            assert (await idle.abort([f"r{i}", "unknown"])).rollouts == [f"r{i}"]
        part = rig.ended["r14"].tokens
        return part, await rig.generate(idle, "again", prompt(0) + part, 20), (await rig.end_of("other"))[0]

    part, again, other = rig.run(often())
    longest = greedy(model, prompt(0), 120)
    ends = [rig.ended[f"r{i}"] for i in range(15)]
    assert {end.reason for end in ends} == {"abort"}
    assert all(end.tokens[:120] == longest[: len(end.tokens)] for end in ends)
    assert all(len(end.logprobs) == len(end.tokens) for end in ends)
    assert any(end.tokens for end in ends)
    assert part + again.tokens == greedy(model, prompt(0), len(part) + 20)
    assert other.tokens == greedy(model, prompt(1), 800)
    assert not said(idle, " made, ") and not said(idle, "vLLM says")


def test_a_pause_stands_still_and_aborts_inside_give_back_all(rig, idle, model, greedy, prompt):
    async def still():
        await asyncio.gather(*(idle.submit(f"r{i}", prompt(i), 300) for i in range(3)))
        first = await rig.until_generated(idle, 7)
        await idle.submit("queued", prompt(3), 10)
        await idle.submit("waits", prompt(4), 10)
        await asyncio.sleep(0.1)
        second = (await idle.pause()).live
        aborted = await idle.abort(["r0", "queued"])
        ends = {name: rig.ended[name] for name in ("r0", "queued")}  # told before the answer: no waiting
        await idle.resume()
        return first, second, aborted, ends, await rig.end_of("r1", "r2", "waits")

    first, second, aborted, ends, rest = rig.run(still())
    assert second == {**first, "queued": 0, "waits": 0}
    assert sorted(aborted.rollouts) == ["queued", "r0"]
    assert (ends["queued"].tokens, ends["queued"].reason) == ([], "abort")
    assert ends["r0"].tokens == greedy(model, prompt(0), first["r0"])
    assert [end.tokens for end in rest] == [greedy(model, prompt(i), n) for i, n in ((1, 300), (2, 300), (4, 10))]


def test_a_retract_has_all_kv_computed_anew(rig, idle, model, greedy, prompt):
    async def retracted():
        await asyncio.gather(*(idle.submit(f"r{i}", prompt(i), 200) for i in range(3)))
        live = await rig.until_generated(idle, 5)
        assert (await idle.pause("retract")).live == live
        await idle.sleep(1)  # refused while any request stands on KV; now none does
        await idle.wake()
        await idle.trace(True)
        await idle.resume()
        ends = await rig.end_of("r0", "r1", "r2")
        return live, ends, await idle.trace(False)

    live, ends, steps = rig.run(retracted())
    assert [end.tokens for end in ends] == [greedy(model, prompt(i), 200) for i in range(3)]
    assert sum(s.prompt_tokens for s in steps) == sum(4 + made for made in live.values())


def test_a_pause_may_abort_or_wait(rig, idle, model, greedy, prompt):
    async def modes():
        await asyncio.gather(*(idle.submit(f"a{i}", prompt(i), 900) for i in range(10)))  # eight run, two are queued
        await asyncio.sleep(0.1)
        aborted = (await idle.pause("abort")).live, {f"a{i}": rig.ended[f"a{i}"] for i in range(10)}
        await asyncio.gather(*(idle.submit(f"w{i}", prompt(i), 100) for i in range(10)))
        await asyncio.sleep(0.1)
        assert set((await idle.pause()).live.values()) == {0}
        await idle.resume()
        while min((await idle.pause()).live.values()) == max((await idle.pause()).live.values()):
            await idle.resume()
            await asyncio.sleep(0.005)
        await idle.resume()
        waited = (await idle.pause("wait")).live, {name for name in rig.ended if name.startswith("w")}
        await idle.resume()
        return aborted, waited, await rig.end_of(*(f"w{i}" for i in range(10)))

    (live, ends), (left, drained), rest = rig.run(modes())
    assert live == {}
    assert {end.reason for end in ends.values()} == {"abort"}
    # Two of them were queued and have none.
    assert sorted(bool(end.tokens) for end in ends.values()) == [False] * 2 + [True] * 8
    for i, end in enumerate(ends.values()):
        assert not end.tokens or end.tokens == greedy(model, prompt(i), len(end.tokens))
    assert len(drained) >= 8 and set(left.values()) <= {0} and set(left) | drained == {f"w{i}" for i in range(10)}
    assert [end.tokens for end in rest] == [greedy(model, prompt(i), 100) for i in range(10)]


def test_flush_is_refused_under_live_requests_unless_they_recompute(rig, idle, model, greedy, prompt):
    async def flushed():
        await idle.submit("live", prompt(0), 400)
        await rig.until_generated(idle, 5)
        with pytest.raises(Refused, match="stand on the KV"):
            await idle.sleep(1)
        first = await idle.flush()
        again = await idle.flush(recompute=True)
        await idle.resume()
        (end,) = await rig.end_of("live")
        return first.ok, again.ok, end, (await idle.flush()).ok

    first, again, end, last = rig.run(flushed())
    assert (first, again, last) == (False, True, True)
    assert end.tokens == greedy(model, prompt(0), 400)


# ---------------------------------------------------------------- weights and memory


def batch(prompt: Callable[[int], list[int]]) -> list[Sample]:
    return [
        Sample(prompt(i), [8 + (i + j) % 8 for j in range(10)], [-3.0] * 10, float(i % 2), i // 4) for i in range(8)
    ]


def test_updates_by_every_transport_are_bit_exact(rig, idle, trainer, greedy, prompt, tmp_path):
    transports = [SharedBuckets(5_001), BroadcastBuckets(), Checkpoints(tmp_path)]
    before = build(ModelSpec())

    async def update():
        found = []
        await trainer.reset(0)
        await rig.generate(idle, "r0", LONG, 20)
        for version, transport in enumerate(transports, 1):
            await trainer.train(batch(prompt), version)
            await idle.pause()
            pushed = await transport.push(trainer, [idle], version)
            await idle.resume()
            # The same prompt as before: its first two pages must not be met again.
            end = await rig.generate(idle, f"r{version}", LONG, 20)
            path = tmp_path / f"{version}.safetensors"
            await trainer.save(str(path), version)
            found.append((pushed, end, await trainer.checksum(), await idle.checksum(), path))
            await transport.close()
        return found

    said_before = greedy(before, LONG, 20)
    found = rig.run(update())
    assert rig.ended["r0"].tokens == said_before
    for version, (pushed, end, source, sink, path) in enumerate(found, 1):
        assert not pushed.failed
        assert (sink.checksum, sink.version) == (source.checksum, version)
        trained = build(ModelSpec())
        trained.load_state_dict(load_file(path))
        assert end.tokens == greedy(trained, LONG, 20)
        assert (end.version, end.labels, end.cached) == (version, [(version, 20)], 0)
    assert found[-1][1].tokens != said_before


def test_a_torn_update_is_refused_and_so_is_generation(rig, idle, trainer, greedy, model, prompt):
    small = SharedBuckets(5_001)

    async def torn():
        await trainer.reset(0)
        with pytest.raises(Refused, match="pause"):
            await idle.begin_update(1)
        await idle.pause()
        await idle.begin_update(1)
        packed = await trainer.pack(small.path, small.bucket_bytes, 0, 0)
        await idle.copy_bucket(small.path, small.bucket_bytes, packed.pieces)
        with pytest.raises(Refused, match="bytes arrived"):
            await idle.end_update(1)
        with pytest.raises(Refused, match="not whole"):
            await idle.resume()
        pushed = await small.push(trainer, [idle], 0)
        await idle.resume()
        await small.close()
        return pushed, await rig.generate(idle, "whole", prompt(0), 8)

    pushed, end = rig.run(torn())
    assert pushed.updated[idle.name].checksum == idle.initial_checksum
    assert end.tokens == greedy(model, prompt(0), 8)


def test_labels_tell_the_versions_of_a_request_that_lives_through_an_update(rig, idle, trainer, prompt):
    shared = SharedBuckets()

    async def through():
        await trainer.reset(0)
        await trainer.train(batch(prompt), 1)
        await idle.submit("held", prompt(0), 500)
        live = await rig.until_generated(idle, 10)
        pushed = await shared.push(trainer, [idle], 1)
        assert pushed.updated[idle.name].live == live
        await idle.resume()
        await shared.close()
        return live["held"], (await rig.end_of("held"))[0]

    cut, end = rig.run(through())
    assert end.labels == [(0, cut), (1, 500 - cut)]
    assert end.version == 0


def test_sleep_is_control_only_on_a_cpu_and_its_rules_hold(rig, idle, trainer, greedy, model, prompt):
    shared = SharedBuckets()

    async def cycle():
        await trainer.reset(0)
        with pytest.raises(Refused, match="pause"):
            await idle.sleep(2)
        await idle.pause()
        slept = await idle.sleep(2)
        with pytest.raises(Refused, match="asleep"):
            await idle.resume()
        await idle.submit("queued", prompt(1), 12)
        woken = await idle.wake(["weights"])
        with pytest.raises(Refused, match="kv"):
            await idle.resume()
        pushed = await shared.push(trainer, [idle], 0)
        await idle.wake(["kv"])
        await asyncio.sleep(0.1)
        still = (await idle.pause()).live  # awake, and nothing goes on before it is told to
        await idle.resume()
        await shared.close()
        return slept, woken, pushed, still, [await rig.generate(idle, "after", prompt(0), 12), rig.ended.get("queued")]

    slept, woken, pushed, still, ends = rig.run(cycle())
    assert slept.freed == slept.rss_before - slept.rss_after < trainer.parameter_bytes + (1 << 24)
    assert (woken.awake, woken.weights_usable) == (["weights"], False)
    assert not pushed.failed and still == {"queued": 0}
    assert [end.tokens for end in ends] == [greedy(model, prompt(i), 12) for i in range(2)]


ALTERED = """
import sys, tempfile, torch
from rlsched.real.config import EngineConfig
from rlsched.real.engines.vllm_arguments import arguments
from rlsched.real.engines.vllm_driver import WORKER
from rlsched.real.engines.vllm_landing import VllmLanding
from vllm import EngineArgs, LLMEngine

landing = VllmLanding(EngineConfig().model)
with tempfile.TemporaryDirectory() as folder:
    landing.model.save_pretrained(folder)
    made = EngineArgs(**arguments(EngineConfig(), folder), worker_extension_cls=WORKER)
    core = LLMEngine.from_engine_args(made).engine_core

def told():
    with landing.handed() as (path, size, places):
        (answer,) = core.collective_rpc("rlsched_load", kwargs={"path": path, "size": size, "places": places})
    return answer["digest"]

whole = landing.digest()
assert told() == whole, "what was given"
for name, parameter in landing.weights.parameters.items():
    kept = parameter.detach().clone()
    parameter.data.view(-1)[-1] += 1e-3
    expected = landing.digest()
    assert expected != whole, name
    assert told() == expected, f"{name}: its last element, changed"
    parameter.data.copy_(kept)
print("checked", len(landing.weights.parameters))
"""


@pytest.mark.nightly
def test_the_workers_digest_is_of_what_it_computes_with(tmp_path):
    """One element of each parameter in turn is changed: the digest that is read back out of vLLM changes with it."""
    command = [INSTALLED.interpreter, "-c", ALTERED]
    environment = {**os.environ, **RECIPES["vllm"].environment, "HF_HUB_OFFLINE": "1"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert told.returncode == 0, told.stderr[-2000:]
    assert f"checked {len(list(build(ModelSpec()).parameters()))}" in told.stdout


# ---------------------------------------------------------------- the end of each kind


def test_a_killed_core_is_the_engines_death(rig, engine, prompt):
    below = family_of(engine.child.pid)
    core = core_of(engine)

    async def dies():
        await engine.abort()
        await engine.submit("lost", prompt(0), 900)
        began = time.monotonic()
        os.kill(core, signal.SIGKILL)
        while not rig.deaths:
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    took = rig.run(dies(), 60)
    assert took < 30  # seconds on any machine, and not the minutes of a timeout
    assert f"engine core (pid {core})" in str(rig.deaths[0])
    deadline = time.monotonic() + 20
    while left := [pid for pid in below if running(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    rig.deaths.clear()


# ---------------------------------------------------------------- whole runs, paced, on canary weights

SETUP = Setup(
    engine_kind="vllm-async",
    shape=Shape(b=2, samples=2, steps=4, budget=120),
    workload=Workload(prompt=Length(mean=4.0), output=Length(kind="lognormal", mean=60.0, sigma=0.8)),
)


@pytest.fixture(scope="module")
def bench() -> Iterator[tuple[asyncio.Runner, Rig]]:
    with asyncio.Runner() as runner:
        rig = runner.run(Rig.start(canary(SETUP.paced()), 1))
        yield runner, rig
        runner.run(rig.close())


@pytest.mark.parametrize("policy", ["verl-hybrid", "areal-async,admit.eta=1,admit.C=6"])
def test_a_run_is_clean_replays_and_its_tokens_agree(bench, tmp_path: Path, policy: str) -> None:
    runner, rig = bench
    path = tmp_path / "run.jsonl"
    _, end = runner.run(perform(rig, parse(policy), 3, path))
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
    assert Reader(path).manifest.versions["vllm-async"] == INSTALLED.version
    assert not said(rig.engines[0], " made, ") and not said(rig.engines[0], "vLLM says")


def test_steps_are_held_to_their_minima(bench, prompt):
    runner, rig = bench
    engine, pace = rig.engines[0], rig.setup.engine.pace

    async def traced():
        await engine.reset(0)
        await engine.trace(True)
        await rig.ask(0, [prompt(i) for i in range(4)], 30)
        return await engine.trace(False), await engine.count()

    steps, counted = runner.run(traced())
    declared = [pace.step.of(s.decoding, s.kv_tokens, s.prompt_tokens) for s in steps]
    # Besides the steps, the install of version 0 in the reset is no step: counters begin after it.
    assert counted.held == len(steps)
    assert counted.declared_ns == sum(declared)
    assert sum(s.elapsed_ns for s in steps) >= sum(declared) - 1_000_000


def test_canary_tokens_say_the_version_and_the_kv_across_updates(bench):
    """Held requests go on with old KV, or recompute it; a fresh one never meets it, with or without a flush."""
    runner, rig = bench
    engine, ended = rig.engines[0], {}

    async def generate(name: str, length: int) -> None:
        await engine.submit(name, LONG, length)

    async def story():
        rig.listen(lambda _, told: ended.__setitem__(told.rollout, told), lambda _: None, lambda _, __: None)
        source, transport, said = Forger(), SharedBuckets(1 << 16), {}
        for version, recompute in ((1, False), (2, True)):
            source.hold(version - 1)
            await engine.pause()
            await transport.push(source, [engine], version - 1)
            await engine.resume()
            await generate(f"held {version}", 100)
            while (await engine.pause()).live[f"held {version}"] < 4:
                await engine.resume()
                await asyncio.sleep(0.01)
            await generate(f"queued {version}", 4)
            source.hold(version)
            pushed = await transport.push(source, [engine], version)
            cut = pushed.updated[engine.name].live[f"held {version}"]
            assert (await engine.flush(recompute=recompute)).ok == recompute
            await engine.resume()
            await generate(f"fresh {version}", 4)
            names = [f"{name} {version}" for name in ("held", "queued", "fresh")]
            while not all(name in ended for name in names):
                await asyncio.sleep(0.01)
            said[version] = cut, [ended[name] for name in names]
        await transport.close()
        return said

    for version, (cut, told) in runner.run(asyncio.wait_for(story(), 120)).items():
        held, queued, fresh = (end.tokens for end in told)
        kv = version if version == 2 else version - 1
        rest = Reading(version, kv, () if kv == version else ("kv",))
        assert runs(held, version) == [Run(cut, Reading(version - 1, version - 1)), Run(100 - cut, rest)]
        assert runs(queued, version) == runs(fresh, version) == [Run(4, Reading(version, version))]
        assert told[0].labels == [(version - 1, cut), (version, 100 - cut)]


def test_a_killed_child_takes_vllm_along(bench):
    _, rig = bench
    client = rig.engines[0]
    below = family_of(client.child.pid)
    assert len(below) >= 2
    client.child.kill()
    deadline = time.monotonic() + 20
    while left := [pid for pid in below if running(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
