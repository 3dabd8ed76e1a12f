"""Aborts, pauses in each mode, and flushes of a real SGLang server."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlsched.real.wire import Refused
from tests.real.sglang.conftest import said

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def test_abort_delivers_partials_and_resubmission_continues_them(rig, engine, model, greedy, prompt):
    async def interrupted():
        await rig.begin(engine, 5, **{f"r{i}": (prompt(i), 400) for i in range(4)})
        _, aborted = await asyncio.gather(engine.resume(), engine.abort())
        partial = dict(rig.ended)  # told before the answer: no waiting
        reasons = {name: (end.reason, len(end.tokens)) for name, end in partial.items()}
        assert sorted(aborted.rollouts) == ["r0", "r1", "r2", "r3"], reasons
        for i in range(4):
            tokens = partial[f"r{i}"].tokens
            await engine.submit(f"again{i}", prompt(i) + tokens, 400 - len(tokens))
        return partial, await rig.end_of(*(f"again{i}" for i in range(4)))

    partial, rest = rig.run(interrupted())
    for i in range(4):
        part = partial[f"r{i}"]
        assert part.reason == "abort"
        assert 0 < len(part.tokens) < 400
        assert len(part.logprobs) == len(part.tokens)
        assert len(part.tokens + rest[i].tokens) == 400
        assert (part.tokens + rest[i].tokens)[:150] == greedy(model, prompt(i), 150)
    assert not said(engine, " made, ")


@pytest.mark.parametrize("times", [12, pytest.param(100, marks=pytest.mark.nightly)])
def test_aborts_at_any_moment_are_exact(rig, engine, model, greedy, prompt, times):
    async def often():
        for i in range(times):
            await engine.submit(f"r{i}", prompt(0), 900)
            await asyncio.sleep(0.004 * (i % 5))
            assert (await engine.abort([f"r{i}", "unknown"])).rollouts == [f"r{i}"]
        return await engine.pause()

    assert rig.run(often()).live == {}
    longest = greedy(model, prompt(0), 60)
    for end in rig.ended.values():
        assert end.tokens[:60] == longest[: len(end.tokens)]


@pytest.mark.parametrize("times", [24, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_request_whose_last_step_an_abort_lets_happen_is_complete(rig, engine, prompt, times):
    """Every moment of a short request is met by some abort: what has all its tokens is told as finished."""

    async def often():
        for i in range(times):
            await engine.submit(f"r{i}", prompt(i), 6)
            await asyncio.sleep(0.04 * i / times)
            aborted = (await engine.abort([f"r{i}"])).rollouts
            assert aborted == ([f"r{i}"] if rig.ended[f"r{i}"].reason == "abort" else [])

    rig.run(often())
    assert all((e.reason == "length") == (len(e.tokens) == 6) for e in rig.ended.values())
    assert all(e.reason in ("abort", "length") for e in rig.ended.values())


def test_a_request_that_waits_for_kv_in_the_server_is_aborted_with_nothing(rig, engine, model, greedy, prompt):
    async def crowded():
        live = await rig.begin(engine, 0, **{f"r{i}": (prompt(i), 900) for i in range(3)})
        while min(sorted(live.values())[1:]) < 2:
            _, paused = await asyncio.gather(engine.resume(), engine.pause())
            live = paused.live
        waits = min(live, key=lambda name: live[name])
        _, aborted = await asyncio.gather(engine.resume(), engine.abort([waits]))
        return live, waits, aborted, rig.ended[waits]

    live, waits, aborted, end = rig.run(crowded())
    assert live[waits] == 0  # 3 x 904 tokens exceed the KV of 2,048
    assert aborted.rollouts == [waits]
    assert (end.tokens, end.logprobs, end.reason, end.labels) == ([], [], "abort", [])


def test_a_name_that_begins_with_another_is_not_aborted_with_it(rig, engine, prompt):
    async def prefixes():
        await rig.begin(engine, 1, **dict.fromkeys(("x-1", "x-10", "x-100"), (prompt(0), 100)))
        aborted = await engine.abort(["x-1"])
        await engine.resume()
        return aborted.rollouts, await rig.end_of("x-10", "x-100")

    aborted, others = rig.run(prefixes())
    assert aborted == ["x-1"]
    assert all(len(end.tokens) == 100 and end.reason == "length" for end in others)


# ---------------------------------------------------------------- pauses


def test_a_pause_stands_still_and_an_abort_inside_gives_back_all(rig, engine, model, greedy, prompt):
    async def still():
        first = await rig.begin(engine, 7, **{f"r{i}": (prompt(i), 150) for i in range(3)})
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


def test_a_pause_that_keeps_recomputes_nothing_and_one_that_retracts_recomputes_all(rig, engine, model, greedy, prompt):
    async def paused(mode):
        made = await rig.begin(engine, 4, **{f"{mode}{i}": (prompt(i), 150) for i in range(3)})
        _, paused = await asyncio.gather(engine.resume(), engine.pause(mode))
        live = paused.live
        await engine.trace(True)
        await asyncio.sleep(0.2)
        assert await engine.trace(True) == []  # no step after the answer
        assert all(live[name] >= made[name] for name in live)
        await engine.resume()
        ends = await rig.end_of(*(f"{mode}{i}" for i in range(3)))
        return live, ends, await engine.trace(False)

    for mode in ("keep", "retract"):
        live, ends, steps = rig.run(paused(mode))
        again = sum(4 + made for made in live.values())
        assert sum(s.prompt_tokens for s in steps) == (again if mode == "retract" else 0)
        for i, end in enumerate(ends):
            assert end.tokens == greedy(model, prompt(i), 150)


def test_a_pause_that_retracts_inside_another_frees_the_kv(rig, engine, model, greedy, prompt):
    async def twice():
        await rig.begin(engine, 3, r=(prompt(0), 100))
        assert not (await engine.flush()).ok
        await engine.pause("retract")
        assert (await engine.flush()).ok
        await engine.resume()
        return (await rig.end_of("r"))[0]

    assert rig.run(twice()).tokens == greedy(model, prompt(0), 100)


@pytest.mark.parametrize("inside", [False, True], ids=["running", "in a pause"])
def test_a_pause_that_aborts_ends_all_with_what_they_have(rig, engine, model, greedy, prompt, inside):
    async def aborted():
        made = await rig.begin(engine, 4, **{f"r{i}": (prompt(i), 400) for i in range(3)})
        if inside:
            await engine.submit("queued", prompt(3), 10)
            told = await engine.pause("abort")
        else:
            _, told = await asyncio.gather(engine.resume(), engine.pause("abort"))
        assert told.live == {}
        ends = dict(rig.ended)  # told before the answer
        await engine.trace(True)
        await engine.submit("later", prompt(5), 10)
        await asyncio.sleep(0.2)
        assert await engine.trace(False) == []  # no step after the answer
        assert rig.ended == ends
        await engine.resume()
        return made, ends, (await rig.end_of("later"))[0]

    made, ends, later = rig.run(aborted())
    assert sorted(ends) == (["queued", "r0", "r1", "r2"] if inside else ["r0", "r1", "r2"])
    for i in range(3):
        end = ends[f"r{i}"]
        assert end.reason == "abort"
        assert end.tokens[:150] == greedy(model, prompt(i), 150)[: len(end.tokens)]
        assert len(end.logprobs) == len(end.tokens) >= made[f"r{i}"]
        assert not inside or len(end.tokens) == made[f"r{i}"]
    assert later.tokens == greedy(model, prompt(5), 10)


def test_a_pause_mode_that_is_not_sglangs_is_refused(rig, engine):
    with pytest.raises(Refused, match="no pause mode wait here, but keep, retract, abort"):
        rig.run(engine.pause("wait"))


def test_flush_is_refused_while_requests_hold_kv_and_recomputes_when_told(rig, engine, model, greedy, prompt):
    async def flushed():
        await rig.begin(engine, 3, **{f"r{i}": (prompt(i), 150) for i in range(3)})
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
        assert end.tokens == greedy(model, prompt(i), 150)
