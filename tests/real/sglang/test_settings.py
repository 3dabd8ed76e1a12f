"""Servers of other settings: a minute each, for every test here starts a server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlsched.real.canary import BOS, Reading, runs
from rlsched.real.canary_forger import Forger
from rlsched.real.client import EngineClient
from rlsched.real.config import EngineConfig
from rlsched.real.model import CANARY
from rlsched.real.setup import Setup
from rlsched.real.transport import SharedBuckets
from tests.real.sglang.conftest import SHARING, server_of

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(1800)]
PROMPT = [BOS, *(8 + i % 8 for i in range(39))]


def test_a_prefix_cache_that_is_not_flushed_is_seen(rig):
    """A seeded wrong handling: with SGLang's prefix cache on, and no flush, new weights stand on old KV."""
    sharing = rig.start("sharing", EngineConfig(model=CANARY, temperature=0.0, kv_blocks=256), SHARING)
    forger, transport = Forger(), SharedBuckets()

    async def twice():
        told = []
        for version, flush in ((1, True), (2, False)):
            await rig.generate(sharing, f"before {version}", PROMPT, 10)
            await sharing.pause()
            forger.hold(version)
            assert not (await transport.push(forger, [sharing], version)).failed
            if flush:
                assert (await sharing.flush()).ok
            await sharing.resume()
            told.append(runs((await rig.generate(sharing, f"after {version}", PROMPT, 10)).tokens, version))
        return told

    flushed, stale = rig.run(twice())
    assert [r.said for r in flushed] == [Reading(1, 1)]
    assert stale[0].said == Reading(2, 1, ("kv",))
    server = server_of(sharing)
    assert len(server) >= 3
    rig.run(transport.close())
    sharing.child.kill()

    async def dies():
        while not rig.deaths or any(Path(f"/proc/{pid}/cmdline").exists() for pid in server):
            await asyncio.sleep(0.05)

    rig.run(dies())
    rig.deaths.clear()


# ---------------------------------------------------------------- pacing and sampling


@pytest.fixture(scope="module")
def paced(rig) -> EngineClient:
    return rig.start("paced", Setup().paced().engine)


def test_steps_are_held_to_their_minima(rig, paced, prompt):
    pace = Setup().paced().engine.pace

    async def traced():
        await paced.trace(True)
        await asyncio.gather(*(paced.submit(f"r{i}", prompt(i), 40) for i in range(8)))
        await rig.end_of(*(f"r{i}" for i in range(8)))
        return await paced.trace(False), await paced.count()

    steps, counted = rig.run(traced())
    declared = [pace.step.of(s.decoding, s.kv_tokens, s.prompt_tokens) for s in steps]
    assert counted.held == len(steps)
    assert counted.declared_ns == sum(declared)
    assert sum(s.elapsed_ns for s in steps) >= sum(declared) - 1_000_000


def test_a_reset_seeds_sampling(rig, paced, prompt):
    async def sampled(seed):
        await paced.reset(seed)
        rig.ended.clear()
        return (await rig.generate(paced, "r", prompt(0), 40)).tokens

    async def often():
        return [await sampled(seed) for seed in (5, 6, 5)]

    first, other, again = rig.run(often())
    assert first == again
    assert first != other


def test_the_server_follows_to_the_cores(rig, paced):
    core = {min(os.sched_getaffinity(0))}
    paced.set_cpus(core)
    rig.run(paced.count())
    assert all(os.sched_getaffinity(pid) == core for pid in server_of(paced))
