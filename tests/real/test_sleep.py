"""Sleeping engines give memory back, by the operating system's count, and are whole again after wake and update."""

from __future__ import annotations

import pytest

from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.model import WIDE, build
from rlsched.real.transport import SharedBuckets
from rlsched.real.wire import Refused

pytestmark = pytest.mark.real

WEIGHT_BYTES = 4 * WIDE.parameters()
KV_TOKENS = 64 * 16
KV_BYTES = KV_TOKENS * WIDE.layers * 2 * WIDE.kv_heads * WIDE.head_dim * 4


@pytest.fixture(scope="module")
def engine(rig):
    # 4 layers x 16 heads x 64 x 2 (K, V) x 4 bytes = 32 KiB a token: 32 MiB of KV.
    return rig.engine("engine", EngineConfig(model=WIDE, temperature=0.0, kv_blocks=64, page_size=16))


@pytest.fixture(scope="module")
def trainer(rig):
    return rig.trainer("trainer", TrainerConfig(model=WIDE))


def test_the_spec_knows_its_size(engine, trainer):
    assert engine.parameter_bytes == trainer.parameter_bytes == WEIGHT_BYTES >= 256 << 20


def test_level_2_frees_weights_and_kv_and_wakes_whole(rig, engine, trainer, greedy, prompt):
    wanted = greedy(build(WIDE), prompt(0), 12)

    async def cycle(index):
        transport = SharedBuckets(16 << 20)
        before = await rig.generate(engine, f"before {index}", prompt(0), 12)
        await engine.pause()
        slept = await engine.sleep(2)
        with pytest.raises(Refused, match="asleep"):
            await engine.resume()
        with pytest.raises(Refused, match="asleep"):
            await engine.begin_update(0)
        woken = await engine.wake(["weights"])
        assert woken.awake == ["weights"]
        assert not woken.weights_usable
        garbage = await engine.checksum()
        pushed = await transport.push(trainer, [engine], 0)
        with pytest.raises(Refused, match="kv"):
            await engine.resume()
        await engine.wake(["kv"])
        await engine.resume()
        after = await rig.generate(engine, f"after {index}", prompt(0), 12)
        await transport.close()
        return before, slept, garbage, pushed, after

    footprint = WEIGHT_BYTES + KV_BYTES
    assert footprint >= 256 << 20
    for index in range(10):
        before, slept, garbage, pushed, after = rig.run(cycle(index))
        assert slept.freed == slept.rss_before - slept.rss_after
        assert slept.freed >= 0.8 * footprint
        assert garbage.checksum != engine.initial_checksum
        assert pushed.updated["engine"].checksum == engine.initial_checksum
        assert before.tokens == after.tokens == wanted


def test_level_2_without_update_refuses_to_generate(rig, engine, trainer):
    async def without():
        await engine.pause()
        await engine.sleep(2)
        await engine.wake()
        with pytest.raises(Refused, match="not whole"):
            await engine.resume()
        await engine.reset(0)
        return await engine.checksum()

    assert rig.run(without()).checksum == engine.initial_checksum


def test_level_1_keeps_the_weights(rig, engine, prompt):
    async def cycle():
        before = await rig.generate(engine, "before level 1", prompt(0), 12)
        await engine.pause()
        slept = await engine.sleep(1)
        await engine.wake()
        await engine.resume()
        return before, slept, await rig.generate(engine, "after level 1", prompt(0), 12)

    before, slept, after = rig.run(cycle())
    assert slept.freed < 0.5 * WEIGHT_BYTES
    assert before.tokens == after.tokens


def test_sleep_is_refused_outside_a_pause_and_under_live_requests(rig, engine, prompt):
    async def refused():
        with pytest.raises(Refused, match="pause"):
            await engine.sleep(2)
        await engine.submit("live", prompt(0), 200)
        await rig.until_generated(engine, 1)
        with pytest.raises(Refused, match="live requests"):
            await engine.sleep(2)
        # Retracted requests wait in the queue, without KV, through the sleep.
        await engine.flush(recompute=True)
        await engine.sleep(1)
        await engine.wake()
        await engine.resume()
        return await rig.end_of("live")

    assert len(rig.run(refused())[0].tokens) == 200
