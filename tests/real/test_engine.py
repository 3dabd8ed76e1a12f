"""The transformers engine: what it generates, and what it says when it is interrupted."""

from __future__ import annotations

import asyncio

import pytest

from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.model import ModelSpec, build
from rlsched.real.wire import Refused

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine(rig):
    return rig.engine("engine", EngineConfig(temperature=0.0, kv_blocks=64, page_size=16, max_batch_tokens=64))


@pytest.fixture(scope="module")
def model():
    return build(ModelSpec())


@pytest.fixture(autouse=True)
def afresh(rig, engine):
    """Every test begins with an idle engine at version 0."""
    rig.run(engine.abort())
    rig.run(engine.reset(0))
    rig.ended.clear()


def test_greedy_tokens_equal_plain_transformers(rig, engine, model, greedy, prompt):
    async def all_at_once():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 10 + 7 * i) for i in range(8)))
        return await rig.end_of(*(f"r{i}" for i in range(8)))

    for i, end in enumerate(rig.run(all_at_once())):
        assert end.tokens == greedy(model, prompt(i), 10 + 7 * i)
        assert end.reason == "length"
        assert end.version == 0
        assert len(end.logprobs) == len(end.tokens)


def test_length_is_forced_although_eos_comes(fresh_rig, prompt):
    # Greedy decoding of an untrained model soon repeats itself: its own first token serves as EOS.
    spec = ModelSpec()
    first = build(spec)
    import torch

    with torch.no_grad():
        eos = int(first(torch.tensor([prompt(0)])).logits[0, -1].argmax())
    engine = fresh_rig.engine("engine", EngineConfig(temperature=0.0, eos=eos))

    async def both():
        await engine.submit("forced", prompt(0), 20)
        await engine.submit("free", prompt(0), 20, forced=False)
        return await fresh_rig.end_of("forced", "free")

    forced, free = fresh_rig.run(both())
    assert (len(forced.tokens), forced.reason) == (20, "length")
    assert (free.tokens, free.reason) == ([eos], "stop")


def test_abort_delivers_partials_and_resubmission_continues_them(rig, engine, model, greedy, prompt):
    async def interrupted():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 60) for i in range(4)))
        await rig.until_generated(engine, 5)
        aborted = await engine.abort()
        partial = {r: rig.ended[r] for r in aborted.rollouts}  # told before the answer: no waiting
        await engine.resume()
        for i in range(4):
            tokens = partial[f"r{i}"].tokens
            await engine.submit(f"again{i}", prompt(i) + tokens, 60 - len(tokens))
        return partial, await rig.end_of(*(f"again{i}" for i in range(4)))

    partial, rest = rig.run(interrupted())
    for i in range(4):
        part = partial[f"r{i}"]
        assert part.reason == "abort"
        assert 5 <= len(part.tokens) < 60
        assert len(part.logprobs) == len(part.tokens)
        assert part.tokens + rest[i].tokens == greedy(model, prompt(i), 60)


def test_abort_outside_a_pause_is_exact_too(rig, engine, model, greedy, prompt):
    async def often():
        for i in range(20):
            await engine.submit(f"r{i}", prompt(i), 900)
            await asyncio.sleep(0.003 * (i % 5))
            assert (await engine.abort([f"r{i}", "unknown"])).rollouts == [f"r{i}"]
        return await engine.pause()

    assert rig.run(often()).live == {}
    longest = greedy(model, prompt(0), 40)
    tokens = rig.ended["r0"].tokens
    assert tokens[:40] == longest[: len(tokens)]
    assert any(end.tokens for end in rig.ended.values())


def test_abort_reaches_the_queue(rig, engine, prompt):
    async def queued():
        await engine.pause()
        await engine.submit("q0", prompt(0), 10)
        await engine.submit("q1", prompt(1), 10)
        progress = await engine.pause()
        aborted = await engine.abort(["q1"])
        await engine.resume()
        await rig.end_of("q0")
        return progress, aborted

    progress, aborted = rig.run(queued())
    assert progress.live == {"q0": 0, "q1": 0}
    assert aborted.rollouts == ["q1"]
    assert (rig.ended["q1"].tokens, rig.ended["q1"].reason) == ([], "abort")
    assert len(rig.ended["q0"].tokens) == 10


def test_pause_stands_still(rig, engine, prompt):
    async def still():
        await engine.submit("r", prompt(0), 500)
        first = await rig.until_generated(engine, 1)
        await asyncio.sleep(0.1)
        second = (await engine.pause()).live
        await engine.resume()
        return first, second

    first, second = rig.run(still())
    assert first == second


def test_preempted_requests_report_whole(rig, engine, model, greedy, prompt):
    # Six requests of 250 tokens in a cache of 1,024: some lose their KV and begin again.
    async def crowded():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 250) for i in range(6)))
        return await rig.end_of(*(f"r{i}" for i in range(6)))

    for i, end in enumerate(rig.run(crowded())):
        assert end.tokens == greedy(model, prompt(i), 250)
        assert len(end.logprobs) == 250


def test_abort_after_preemption_lets_the_queue_go_on(rig, engine, prompt):
    async def crowded():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 900) for i in range(3)))
        while sum((await engine.pause()).live.values()) < 1000:
            await engine.resume()
            await asyncio.sleep(0.01)
        await engine.abort(["r0", "r1"])
        await engine.resume()
        return await rig.end_of("r2")

    assert len(rig.run(crowded())[0].tokens) == 900


def test_retract_recomputes_and_continues(rig, engine, model, greedy, prompt):
    async def retracted():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 60) for i in range(3)))
        await rig.until_generated(engine, 3)
        refused = await engine.flush()
        done = await engine.flush(recompute=True)
        await engine.trace(True)
        await engine.resume()
        ends = await rig.end_of("r0", "r1", "r2")
        return refused, done, ends, await engine.trace(False)

    refused, done, ends, steps = rig.run(retracted())
    assert not refused.ok
    assert done.ok
    assert steps[0].prompt_tokens >= 3 * (4 + 3)
    for i, end in enumerate(ends):
        assert end.tokens == greedy(model, prompt(i), 60)


def test_each_pause_mode_does_to_live_requests_what_it_says(rig, engine, model, greedy, prompt):
    async def paused(mode):
        await asyncio.gather(*(engine.submit(f"{mode}{i}", prompt(i), 40) for i in range(3)))
        await rig.until_generated(engine, 5)
        await engine.resume()
        live = (await engine.pause(mode)).live
        flushed = (await engine.flush()).ok
        ended = {name for name in rig.ended if name.startswith(mode)}
        await engine.resume()
        return live, flushed, ended, await rig.end_of(*(f"{mode}{i}" for i in range(3)))

    for mode in engine.capabilities.pause_modes:
        live, flushed, ended, ends = rig.run(paused(mode))
        assert (len(live), len(ended)) == ((0, 3) if mode == "abort" else (3, 0))
        assert flushed == (mode != "keep")
        for i, end in enumerate(ends):
            assert end.reason == ("abort" if mode == "abort" else "length")
            assert len(end.tokens) >= 5 and end.tokens == greedy(model, prompt(i), 40)[: len(end.tokens)]


def test_a_pause_mode_that_the_engine_has_not_is_refused(rig, engine):
    with pytest.raises(Refused, match="no pause mode wait here, but keep, retract, abort"):
        rig.run(engine.pause("wait"))
    assert rig.run(engine.resume()).live == {}


@pytest.mark.parametrize(
    ("tokens", "length"),
    [([1] * 1000, 100), ([], 5), ([1], 0), ([1, 32], 5), ([1, -1], 5)],
    ids=["oversized", "no input", "no output", "beyond the vocabulary", "negative"],
)
def test_what_would_kill_the_loop_is_refused(rig, engine, prompt, tokens, length):
    async def refused():
        with pytest.raises(Refused):
            await engine.submit("bad", tokens, length)
        with pytest.raises(Refused, match="live already"):
            await engine.pause()
            await engine.submit("twice", prompt(0), 5)
            await engine.submit("twice", prompt(0), 5)
        await engine.resume()
        await rig.end_of("twice")
        return await rig.generate(engine, "good", prompt(0), 5)

    assert len(rig.run(refused()).tokens) == 5


def test_the_largest_request_fits(rig, engine, prompt):
    size = engine.capabilities.max_request_tokens
    end = rig.run(rig.generate(engine, "large", prompt(0), size - 4))
    assert len(end.tokens) == size - 4 == 1020


def test_steps_are_told(rig, engine, prompt):
    async def traced():
        await engine.trace(True)
        await engine.pause()
        await engine.submit("a", prompt(0), 4)
        await engine.submit("b", prompt(1) * 20, 3)  # 80 tokens: two chunks
        await engine.resume()
        await rig.end_of("a", "b")
        return await engine.trace(False)

    steps = rig.run(traced())
    told = [(s.decoding, s.kv_tokens, s.prompt_tokens) for s in steps]
    assert told == [(0, 0, 64), (1, 4, 20), (2, 5 + 80, 0), (2, 6 + 81, 0)]
    assert all(s.elapsed_ns >= s.worked_ns > 0 for s in steps)


def test_engine_and_trainer_agree_on_logprobs(rig, prompt):
    engine = rig.engine("sampling", EngineConfig(temperature=0.7))
    trainer = rig.trainer("trainer", TrainerConfig(temperature=0.7))
    assert engine.initial_checksum == trainer.initial_checksum

    async def compare():
        await asyncio.gather(*(engine.submit(f"s{i}", prompt(i), 20 + i) for i in range(16)))
        ends = await rig.end_of(*(f"s{i}" for i in range(16)))
        batch = [Sample(prompt(i), e.tokens, e.logprobs, float(i % 2), i // 4) for i, e in enumerate(ends)]
        own = await trainer.evaluate(batch)
        gap = max(abs(a - b) for s, row in zip(batch, own, strict=True) for a, b in zip(s.logprobs, row, strict=True))
        return gap, await trainer.train(batch, 1)

    gap, trained = rig.run(compare())
    assert gap <= 5e-5
    assert trained.max_logprob_gap == pytest.approx(gap, abs=1e-6)
