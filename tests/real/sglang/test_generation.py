"""What a real SGLang server generates, and what it tells of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlsched.real.canary import BOS
from rlsched.real.commands import Sample
from rlsched.real.wire import Refused

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def test_greedy_tokens_equal_plain_transformers(rig, engine, model, greedy, prompt):
    async def all_at_once():
        await asyncio.gather(*(engine.submit(f"r{i}", prompt(i), 10 + 7 * i) for i in range(8)))
        return await rig.end_of(*(f"r{i}" for i in range(8)))

    for i, end in enumerate(rig.run(all_at_once())):
        assert end.tokens == greedy(model, prompt(i), 10 + 7 * i)
        assert (end.reason, end.version) == ("length", 0)
        assert len(end.logprobs) == len(end.tokens)
        assert end.labels == [(0, len(end.tokens))]  # SGLang's own word


def test_it_says_what_it_can_do_here(engine):
    able = engine.capabilities
    assert (able.engine, able.version, able.device) == ("sglang", "0.5.23", "cpu")
    assert able.kv_tokens == 128 * 16
    assert able.max_batch_tokens == 64
    assert able.pause_modes == ("keep", "retract", "abort")
    assert able.sleep_frees == ()  # on a CPU nothing is given back, and nothing is said to be


def test_logprobs_are_the_trainers_own(rig, engine, trainer, prompt):
    rig.run(trainer.reset(0))
    assert engine.initial_checksum == trainer.initial_checksum

    async def compare():
        await asyncio.gather(*(engine.submit(f"s{i}", prompt(i), 20 + i) for i in range(16)))
        ends = await rig.end_of(*(f"s{i}" for i in range(16)))
        batch = [Sample(prompt(i), e.tokens, e.logprobs, float(i % 2), i // 4) for i, e in enumerate(ends)]
        own = await trainer.evaluate(batch)
        return max(abs(a - b) for s, row in zip(batch, own, strict=True) for a, b in zip(s.logprobs, row, strict=True))

    assert rig.run(compare()) <= 5e-5


def test_a_request_that_is_not_forced_stops_at_eos(rig, engine, model):
    # EOS is token 2; a prompt is looked for whose greedy continuation begins with it.
    import torch

    prompts = [[BOS, a, b] for a in range(3, 103) for b in range(3, 103)]
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


def test_what_it_would_shorten_or_die_of_is_refused(rig, engine, prompt):
    most = engine.capabilities.max_request_tokens

    async def refused():
        for tokens, length in (([1] * most, 1), ([], 5), ([1], 0), ([1, 528], 5), ([1, -1], 5)):
            with pytest.raises(Refused):
                await engine.submit("bad", tokens, length)
        return await rig.generate(engine, "largest", prompt(0) * ((most - 4) // 4), most - 4 * ((most - 4) // 4))

    assert len(rig.run(refused()).tokens) == most - 4 * ((most - 4) // 4)


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
    assert sum(s.prompt_tokens for s in steps) == 84
    assert max(s.prompt_tokens for s in steps) <= 64
    # The first token comes with the prompt; the rest are decoded, each on one token more than the last.
    assert sum(s.decoding for s in steps) == 3 + 2
    assert sum(s.kv_tokens for s in steps) == (4 + 5 + 6) + (80 + 81)
    assert not any(s.decoding and s.prompt_tokens for s in steps)  # SGLang mixes none for which logprobs are asked
    assert all(s.elapsed_ns >= s.worked_ns > 0 for s in steps)


def test_the_stand_ins_are_loud():
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
