"""vLLM behind the same protocol: what it generates, what it says when interrupted, updates, KV, and whole runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsched.checker import check
from rlsched.commands import Generate
from rlsched.facts import Installed, Segment
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.real.canary import Claim, Reading, Run, mismatches, runs
from rlsched.real.canary_forger import Forger
from rlsched.real.client import EngineClient
from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.installs import RECIPES
from rlsched.real.installs import engine as look
from rlsched.real.job import engines, perform
from rlsched.real.model import CANARY, ModelSpec, build
from rlsched.real.processes import descendants
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.real.transport import BroadcastBuckets, Buckets, Checkpoints, SharedBuckets
from rlsched.real.wire import Refused
from rlsched.replay import replay
from rlsched.shape import Shape

pytestmark = pytest.mark.real  # needs `make engines`

BOS = 1
LONG = [BOS, *(8 + i % 8 for i in range(69))]
"""Two whole KV pages of 32 tokens and a rest: enough for a prefix to be shared."""
SMALL = 5_001
"""Bytes of a bucket: far smaller than the largest tensor, and no multiple of anything."""


@pytest.fixture(scope="module")
def start(rig: Any) -> Callable[..., EngineClient]:
    """Starts a vLLM child; skips, or fails where engines are required, if there is none."""
    found = look("vllm")
    if not found.ok:
        say = pytest.fail if os.environ.get("RLSCHED_REQUIRE_ENGINES") == "1" else pytest.skip
        say(f"vLLM: {found.why}")
    recipe = RECIPES["vllm"]

    def go(name: str, config: EngineConfig, home: Any = rig, module: str = recipe.module) -> EngineClient:
        return home.engine(name, config, module=module, interpreter=found.interpreter, environment=recipe.environment)

    return go


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)  # two on two shared cores are far slower
    return build(ModelSpec())


@pytest.fixture(scope="module")
def engine(start: Callable[..., EngineClient], model: Any, greedy: Any) -> EngineClient:
    # Its end-of-sequence is what an untrained model says first.
    eos = greedy(model, [BOS, 8, 9, 8], 1)[0]
    return start("engine", EngineConfig(temperature=0.0, kv_blocks=64, page_size=16, max_batch_tokens=64, eos=eos))


@pytest.fixture(scope="module")
def trainer(rig: Any, engine: EngineClient) -> Any:
    return rig.trainer("trainer", TrainerConfig(lr=1e-2))


@pytest.fixture
def idle(rig: Any, engine: EngineClient) -> EngineClient:
    """The engine, idle at version 0."""
    rig.run(engine.abort())
    rig.run(engine.reset(0))
    rig.ended.clear()
    return engine


# ---------------------------------------------------------------- generation and control


def test_it_says_what_it_can_do_here(engine):
    able = engine.capabilities
    assert (able.engine, able.device, able.version) == ("vllm", "cpu", look("vllm").version)
    # Pages of 16 are too small for vLLM on CPU: it has as many tokens in pages of 32.
    assert (able.page_size, able.kv_tokens, able.max_request_tokens) == (32, 1024, 1024)
    assert able.sleep_levels == (1, 2) and able.sleep_frees == ()
    assert engine.parameter_bytes == 4 * ModelSpec().parameters()


def test_greedy_tokens_equal_plain_transformers(rig, idle, model, greedy, prompt):
    async def all_at_once():
        await asyncio.gather(*(idle.submit(f"r{i}", prompt(i), 10 + 7 * i) for i in range(8)))
        return await rig.end_of(*(f"r{i}" for i in range(8)))

    for i, end in enumerate(rig.run(all_at_once())):
        assert end.tokens == greedy(model, prompt(i), 10 + 7 * i)
        assert (end.reason, end.version, len(end.logprobs)) == ("length", 0, len(end.tokens))
        assert (end.labels, end.cached) == ([(0, len(end.tokens))], 0)


def test_logprobs_are_the_trainers_after_temperature(rig, start, trainer, prompt):

    warm = start("warm", EngineConfig(temperature=0.7, kv_blocks=64, max_batch_tokens=64))
    judge = rig.trainer("judge", TrainerConfig(temperature=0.7))

    async def sampled():
        await asyncio.gather(*(warm.submit(f"warm{i}", prompt(i), 40) for i in range(8)))
        ends = await rig.end_of(*(f"warm{i}" for i in range(8)))
        batch = [Sample(prompt(i), end.tokens, end.logprobs, 0.0, i) for i, end in enumerate(ends)]
        return ends, await judge.evaluate(batch)

    ends, own = rig.run(sampled())
    rig.run(warm.close())
    pairs = [pair for end, theirs in zip(ends, own, strict=True) for pair in zip(end.logprobs, theirs, strict=True)]
    gaps = [abs(a - b) for a, b in pairs]
    assert len(gaps) == 320 and max(gaps) < 5e-4
    assert len({tuple(end.tokens) for end in ends}) == 8


def test_end_of_sequence_ends_only_what_is_not_forced(rig, idle, prompt):
    assert prompt(0) == [BOS, 8, 9, 8]

    async def both():
        await idle.submit("forced", prompt(0), 20)
        await idle.submit("free", prompt(0), 20, forced=False)
        return await rig.end_of("forced", "free")

    forced, free = rig.run(both())
    assert (len(forced.tokens), forced.reason) == (20, "length")
    assert (free.tokens, free.reason, len(free.logprobs)) == (forced.tokens[:1], "stop", 1)


def test_abort_delivers_partials_and_resubmission_continues_them(rig, idle, model, greedy, prompt):
    async def interrupted():
        await asyncio.gather(*(idle.submit(f"r{i}", prompt(i), 900) for i in range(4)))
        await rig.until_generated(idle, 5)
        aborted = await idle.abort()
        partial = {r: rig.ended[r] for r in aborted.rollouts}  # told before the answer: no waiting
        await idle.resume()
        for i in range(4):
            tokens = partial[f"r{i}"].tokens
            await idle.submit(f"again{i}", prompt(i) + tokens, 20)
        return partial, await rig.end_of(*(f"again{i}" for i in range(4)))

    partial, rest = rig.run(interrupted())
    for i in range(4):
        part = partial[f"r{i}"]
        assert part.reason == "abort" and 5 <= len(part.tokens) < 900
        assert len(part.logprobs) == len(part.tokens)
        assert part.labels == [(0, len(part.tokens))]
        assert part.tokens + rest[i].tokens == greedy(model, prompt(i), len(part.tokens) + 20)


def test_abort_reaches_running_and_queued_requests(rig, idle, prompt):
    async def queued():
        for i in range(20):
            await idle.submit(f"r{i}", prompt(i), 900)
            await asyncio.sleep(0.003 * (i % 5))
            assert (await idle.abort([f"r{i}", "unknown"])).rollouts == [f"r{i}"]
        await idle.pause()
        await idle.submit("q0", prompt(0), 10)
        await idle.submit("q1", prompt(1), 10)
        progress = await idle.pause()
        aborted = await idle.abort(["q1"])
        await idle.resume()
        await rig.end_of("q0")
        return progress.live, aborted.rollouts

    assert rig.run(queued()) == ({"q0": 0, "q1": 0}, ["q1"])
    assert (rig.ended["q1"].tokens, rig.ended["q1"].reason) == ([], "abort")
    assert len(rig.ended["q0"].tokens) == 10
    assert any(rig.ended[f"r{i}"].tokens for i in range(20))


def test_pause_stands_still(rig, idle, prompt):
    async def still():
        await idle.submit("r", prompt(0), 500)
        first = await rig.until_generated(idle, 1)
        await asyncio.sleep(0.1)
        return first, (await idle.pause()).live

    first, second = rig.run(still())
    assert first == second


def test_what_can_never_fit_is_refused_and_the_engine_lives(rig, idle, prompt):
    async def refused():
        for tokens, length in ((prompt(0), 1021), ([], 5), (prompt(0), 0), ([99], 5)):
            with pytest.raises(Refused):
                await idle.submit("odd", tokens, length)
        return await rig.generate(idle, "fits", prompt(0), 1020)

    assert len(rig.run(refused()).tokens) == 1020


def test_preempted_requests_report_whole(rig, idle, model, greedy, prompt):
    # Six requests of 250 tokens in a cache of 1,024: some lose their KV and begin again.
    async def crowded():
        await idle.trace(True)
        await asyncio.gather(*(idle.submit(f"r{i}", prompt(i), 250) for i in range(6)))
        return await rig.end_of(*(f"r{i}" for i in range(6))), await idle.trace(False)

    ends, steps = rig.run(crowded())
    for i, end in enumerate(ends):
        assert end.tokens == greedy(model, prompt(i), 250) and len(end.logprobs) == 250
    assert sum(s.prompt_tokens for s in steps) > 6 * 4 + 100


def test_the_trace_says_what_each_step_computed(rig, idle, prompt):
    async def traced():
        await idle.pause()
        await idle.trace(True)
        await idle.submit("short", prompt(0), 5)
        await idle.submit("long", LONG, 3)
        await idle.resume()
        await rig.end_of("short", "long")
        return await idle.trace(False)

    steps = [(s.decoding, s.kv_tokens, s.prompt_tokens) for s in rig.run(traced())]
    # 64 tokens a step: the long prompt is chunked.
    assert steps == [(0, 0, 64), (1, 4, 10), (2, 5 + 70, 0), (2, 6 + 71, 0), (1, 7, 0)]


# ---------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def transports(tmp_path_factory: pytest.TempPathFactory, rig: Any) -> Iterator[dict[str, Buckets]]:
    made = {
        "shared": SharedBuckets(),
        "small": SharedBuckets(SMALL),
        "broadcast": BroadcastBuckets(SMALL),
        "disk": Checkpoints(tmp_path_factory.mktemp("checkpoints")),
    }
    yield made
    for transport in made.values():
        rig.run(transport.close())


def batch(prompt: Callable[[int], list[int]]) -> list[Sample]:
    return [
        Sample(prompt(i), [8 + (i + j) % 8 for j in range(10)], [-3.0] * 10, float(i % 2), i // 4) for i in range(8)
    ]


@pytest.mark.parametrize("kind", ["shared", "small", "broadcast", "disk"])
def test_an_update_is_bit_exact_and_decoded_from_then_on(
    rig, idle, trainer, transports, greedy, prompt, tmp_path, kind
):
    from safetensors.torch import load_file

    async def update():
        await trainer.reset(0)
        await trainer.train(batch(prompt), 1)
        before = await rig.generate(idle, "before", LONG, 40)
        await idle.submit("interrupted", prompt(1), 900)
        await rig.until_generated(idle, 10)
        await idle.abort()
        pushed = await transports[kind].push(trainer, [idle], 1)
        await idle.resume()
        after = await rig.generate(idle, "after", LONG, 40)
        part = rig.ended["interrupted"].tokens
        rest = await rig.generate(idle, "rest", prompt(1) + part, 20)
        await trainer.save(str(tmp_path / "trained.safetensors"), 1)
        return before, pushed, after, part, rest, [await trainer.checksum(), await idle.checksum()]

    before, pushed, after, part, rest, digests = rig.run(update())
    assert not pushed.failed
    assert pushed.updated["engine"].bytes == trainer.parameter_bytes
    assert digests[0] == digests[1] and digests[0].version == 1
    assert digests[0].checksum != trainer.initial_checksum
    old, new = build(ModelSpec()), build(ModelSpec())
    new.load_state_dict(load_file(tmp_path / "trained.safetensors"))
    # The same prompt before and after: its first two pages must not be met again.
    assert before.tokens == greedy(old, LONG, 40) != after.tokens == greedy(new, LONG, 40)
    assert (before.version, after.version) == (0, 1)
    assert (before.labels, after.labels, after.cached) == ([(0, 40)], [(1, 40)], 0)
    assert part == greedy(old, prompt(1), len(part))
    assert rest.tokens == greedy(new, prompt(1) + part, 20)


def test_a_torn_update_is_refused_and_so_is_generation(rig, idle, trainer, transports, greedy, model, prompt):
    small = transports["small"]

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
        return pushed, await rig.generate(idle, "whole", prompt(0), 8)

    pushed, end = rig.run(torn())
    assert pushed.updated["engine"].checksum == idle.initial_checksum
    assert end.tokens == greedy(model, prompt(0), 8)


def test_flush_is_refused_under_live_requests_unless_they_recompute(rig, idle, model, greedy, prompt):
    async def flushed():
        await idle.submit("live", prompt(0), 400)
        await rig.until_generated(idle, 5)
        first = await idle.flush()
        again = await idle.flush(recompute=True)
        await idle.resume()
        (end,) = await rig.end_of("live")
        return first.ok, again.ok, end, (await idle.flush()).ok

    first, again, end, last = rig.run(flushed())
    assert (first, again, last) == (False, True, True)
    assert end.tokens == greedy(model, prompt(0), 400)


def test_sleep_is_control_only_on_a_cpu_and_its_rules_hold(rig, idle, trainer, transports, greedy, model, prompt):
    async def cycle():
        await trainer.reset(0)
        with pytest.raises(Refused, match="pause"):
            await idle.sleep(2)
        await idle.pause()
        slept = await idle.sleep(2)
        with pytest.raises(Refused, match="asleep"):
            await idle.resume()
        woken = await idle.wake(["weights"])
        with pytest.raises(Refused, match="kv"):
            await idle.resume()
        pushed = await transports["shared"].push(trainer, [idle], 0)
        await idle.wake(["kv"])
        await idle.resume()
        again = await rig.generate(idle, "after 2", prompt(0), 12)
        await idle.submit("waits", prompt(1), 12)
        await idle.pause()
        await idle.flush(recompute=True)
        await idle.sleep(1)
        await idle.wake()
        await idle.resume()
        return slept, woken, pushed, [again, *await rig.end_of("waits")]

    slept, woken, pushed, ends = rig.run(cycle())
    assert slept.freed == slept.rss_before - slept.rss_after < trainer.parameter_bytes + (1 << 24)
    assert (woken.awake, woken.weights_usable) == (["weights"], False)
    assert not pushed.failed
    assert [end.tokens for end in ends] == [greedy(model, prompt(i), 12) for i in range(2)]


# ---------------------------------------------------------------- canary weights


def test_canary_tokens_say_the_version_and_the_kv_across_updates(rig, start):
    """Held requests go on with old KV, or recompute it; a fresh one never meets it, with or without a flush."""
    engine = start("canary", EngineConfig(model=CANARY, temperature=0.0, kv_blocks=128, max_batch_tokens=128))

    async def story():
        source, transport, said = Forger(), SharedBuckets(1 << 16), {}
        for version, flush in ((1, False), (2, True)):
            source.hold(version - 1)
            await engine.pause()
            await transport.push(source, [engine], version - 1)
            await engine.resume()
            await engine.submit(f"held {version}", LONG, 600)
            await rig.until_generated(engine, 4)
            await engine.submit(f"queued {version}", LONG, 4)
            source.hold(version)
            pushed = await transport.push(source, [engine], version)
            cut = pushed.updated["canary"].live[f"held {version}"]
            assert (await engine.flush(recompute=flush)).ok == flush
            await engine.resume()
            await engine.submit(f"fresh {version}", LONG, 4)
            told = await rig.end_of(*(f"{name} {version}" for name in ("held", "queued", "fresh")))
            said[version] = cut, [end.tokens for end in told], [end.version for end in told]
        await transport.close()
        return said

    for version, (cut, (held, queued, fresh), labels) in rig.run(story()).items():
        kv = version if version == 2 else version - 1
        rest = Reading(version, kv, () if kv == version else ("kv",))
        assert runs(held, version) == [Run(cut, Reading(version - 1, version - 1)), Run(600 - cut, rest)]
        assert runs(queued, version) == runs(fresh, version) == [Run(4, Reading(version, version))]
        assert labels == [version - 1, version, version]
    rig.run(engine.close())


@pytest.fixture(scope="module")
def careless(rig: Any, start: Callable[..., EngineClient], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A careless engine and its home; it doesn't survive the module's last test."""
    home = type(rig)(tmp_path_factory.mktemp("careless"))
    config = EngineConfig(model=CANARY, temperature=0.0, kv_blocks=128, max_batch_tokens=128)
    try:
        yield start("bare", config, home, "rlsched.real.engines.vllm_bare"), home
    finally:
        home.close()


def test_a_skipped_flush_shows_as_stale_kv_on_a_careless_engine(careless):
    """The wrong handling, seeded: vLLM's prefix cache outlives an update that nobody follows with a flush."""
    bare, home = careless

    async def skipped():
        source, transport, said = Forger(), SharedBuckets(1 << 16), []
        await home.generate(bare, "old", LONG, 4)
        source.hold(1)
        await bare.pause()
        await transport.push(source, [bare], 1)
        await bare.resume()
        said.append((await home.generate(bare, "stale", LONG, 4)).tokens)
        assert (await bare.flush()).ok
        said.append((await home.generate(bare, "flushed", LONG, 4)).tokens)
        await transport.close()
        return said

    stale, flushed = home.run(skipped())
    assert runs(stale, 1) == [Run(4, Reading(1, 0, ("kv",)))]
    assert mismatches(stale, [Claim(4, 1, 1)]) and not mismatches(flushed, [Claim(4, 1, 1)])


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def histories(start: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both presets on one paced rig."""
    folder = tmp_path_factory.mktemp("runs")
    setup = Setup(engine_kind="vllm", shape=Shape(b=2, samples=4, steps=4, budget=96)).paced()
    policies = {name: parse(name) for name in ("verl-hybrid", "areal-async,admit.eta=1")}

    async def all_of_them() -> dict[str, Path]:
        rig = await Rig.start(setup, max(engines(p, setup) for p in policies.values()))
        try:
            for name, policy in policies.items():
                _, end = await perform(rig, policy, 3, folder / f"{name}.jsonl.zst")
                assert end.ok, end.why
        finally:
            await rig.close()
        return {name: folder / f"{name}.jsonl.zst" for name in policies}

    return asyncio.run(all_of_them())


@pytest.mark.nightly
def test_whole_runs_are_clean_and_replay(histories):
    for path in histories.values():
        report = check(Reader(path))
        assert report.ok, report.violations[:2]
        assert replay(Reader(path)).divergence is None
        head = Reader(path).manifest
        assert head.versions["vllm"] == look("vllm").version and head.paced
        assert head.labels["sleep_frees"] == "nothing"
        installed = [e.version for e in Reader(path).events() if isinstance(e, Installed)]
        assert installed == [0, 1, 2, 3, 4]


@pytest.mark.nightly
def test_an_asynchronous_run_aborts_and_resumes(histories):
    events = list(Reader(histories["areal-async,admit.eta=1"]).events())
    segments: dict[int, list[Segment]] = {}
    for event in events:
        if isinstance(event, Segment):
            segments.setdefault(event.rollout, []).append(event)
    aborted = {r for r, own in segments.items() if any(s.end == "abort" for s in own)}
    resumed = {work.rollout for e in events if isinstance(e, Generate) for work in e.work if work.have}
    assert aborted and resumed and resumed <= aborted
    mixed = [own for own in segments.values() if len({s.version for s in own if s.n}) > 1]
    assert mixed
    assert all(a.version < b.version for own in mixed for a, b in pairwise([s for s in own if s.n]))
    hybrid = [e for e in Reader(histories["verl-hybrid"]).events() if isinstance(e, Segment)]
    assert not any(e.end == "abort" for e in hybrid)


# ---------------------------------------------------------------- processes


def test_a_killed_child_leaves_no_process(careless, prompt):
    bare, home = careless

    async def killed():
        await bare.submit("r", prompt(0), 900)
        await home.until_generated(bare, 1)
        family = set(descendants(bare.child.pid))
        bare.child.kill()
        while not home.deaths:
            await asyncio.sleep(0.01)
        return family

    family = home.run(killed())
    assert "SIGKILL" in str(home.deaths[0])
    assert len(family) == 1  # the engine core is in the child itself
    assert not any(Path(f"/proc/{pid}").exists() for pid in family)
