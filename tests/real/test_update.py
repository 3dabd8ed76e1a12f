"""Weight updates through both transports: bit-exact, in place, and never half."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rlsched.real.answers import Moved, Updated
from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.model import ModelSpec, build
from rlsched.real.transport import BroadcastBuckets, SharedBuckets
from rlsched.real.weights import Group, Staging, WeightSet
from rlsched.real.wire import Refused

pytestmark = pytest.mark.real

#: Far smaller than the largest tensor (8,192 bytes and more), and no multiple of anything.
SMALL = 5_001


class LocalSink:
    """The test itself as an engine: what arrives here is what the engines must have."""

    name = "test"

    def __init__(self, model):
        self.weights = WeightSet(model)
        self.staging = Staging()
        self.received = 0

    async def begin_update(self, version):
        self.received = 0

    async def copy_bucket(self, path, size, pieces):
        copied = self.weights.copy(self.staging.at(path, size), pieces)
        self.received += copied
        return Moved(copied, 0)

    async def end_update(self, version):
        return Updated(version, self.received, self.weights.checksum(), {})


@pytest.fixture(scope="module")
def engines(rig):
    config = EngineConfig(temperature=0.0)
    return [rig.engine(name, config) for name in ("one", "two")]


@pytest.fixture(scope="module")
def trainer(rig):
    return rig.trainer("trainer", TrainerConfig(lr=1e-2))


@pytest.fixture(scope="module")
def transports(rig):
    made = {
        "shared": SharedBuckets(),
        "shared, small": SharedBuckets(SMALL),
        "broadcast": BroadcastBuckets(),
        "broadcast, small": BroadcastBuckets(SMALL),
        "broadcast, overlapped": BroadcastBuckets(SMALL, overlap=True),
    }
    yield made
    for transport in made.values():
        rig.run(transport.close())


@pytest.fixture(autouse=True)
def afresh(rig, engines, trainer):
    for engine in engines:
        rig.run(engine.abort())
        rig.run(engine.reset(0))
    rig.run(trainer.reset(0))
    rig.ended.clear()


def batch(prompt):
    return [
        Sample(prompt(i), [8 + (i + j) % 8 for j in range(10)], [-3.0] * 10, float(i % 2), i // 4) for i in range(8)
    ]


@pytest.fixture
def trained_model(rig, trainer, prompt):
    """Train one version and return its weights in this process."""
    rig.run(trainer.train(batch(prompt), 1))
    model = build(ModelSpec())
    transport = SharedBuckets()
    pushed = rig.run(transport.push(trainer, [LocalSink(model)], 1))
    rig.run(transport.close())
    assert not pushed.failed
    assert pushed.updated["test"].bytes == trainer.parameter_bytes
    return model


def test_a_new_buffer_under_the_old_path_is_not_mistaken_for_the_old_one(rig, engines, trainer, prompt):
    async def one_after_the_other():
        paths = []
        await engines[0].pause()
        for version in (1, 2, 3):
            await trainer.train(batch(prompt), version)
            transport = SharedBuckets(SMALL)
            paths.append(transport.path)
            assert not (await transport.push(trainer, engines[:1], version)).failed
            await transport.close()
        return paths

    assert len(set(rig.run(one_after_the_other()))) == 1


@pytest.mark.parametrize("name", ["shared", "shared, small", "broadcast", "broadcast, small", "broadcast, overlapped"])
def test_update_is_bit_exact_and_no_kv_is_stale(rig, engines, trainer, transports, trained_model, greedy, prompt, name):
    async def update():
        # The same prompt before the update: its KV must not be met again after it.
        before = [await rig.generate(engine, f"before {engine.name}", prompt(0), 40) for engine in engines]
        await asyncio.gather(*(engine.pause() for engine in engines))
        pushed = await transports[name].push(trainer, engines, 1)
        await asyncio.gather(*(engine.resume() for engine in engines))
        after = [await rig.generate(engine, f"after {engine.name}", prompt(0), 40) for engine in engines]
        digests = [await member.checksum() for member in (trainer, *engines)]
        return before, pushed, after, digests

    before, pushed, after, digests = rig.run(update())
    assert not pushed.failed
    assert sorted(pushed.updated) == ["one", "two"]
    assert all(update.bytes == trainer.parameter_bytes for update in pushed.updated.values())
    assert len({digest.checksum for digest in digests}) == 1
    assert {digest.version for digest in digests} == {1}
    assert digests[0].checksum != trainer.initial_checksum
    assert sum(pushed.bytes) >= trainer.parameter_bytes
    assert len(pushed.bytes) == len(pushed.ns)
    assert (len(pushed.bytes) > 1) == (transports[name].bucket_bytes == SMALL)
    assert all(size <= transports[name].bucket_bytes for size in pushed.bytes)
    for old, new in zip(before, after, strict=True):
        assert old.tokens == greedy(build(ModelSpec()), prompt(0), 40)
        assert new.tokens == greedy(trained_model, prompt(0), 40)
        assert (old.version, new.version) == (0, 1)


def test_abort_and_resume_changes_weights_exactly_at_the_cut(
    rig, engines, trainer, transports, trained_model, greedy, prompt
):
    engine = engines[0]

    async def interrupted():
        await engine.submit("r", prompt(0), 60)
        await rig.until_generated(engine, 10)
        await engine.abort()
        await transports["shared"].push(trainer, [engine], 1)
        await engine.resume()
        part = rig.ended["r"].tokens
        return part, (await rig.generate(engine, "rest", prompt(0) + part, 60 - len(part))).tokens

    part, rest = rig.run(interrupted())
    assert part == greedy(build(ModelSpec()), prompt(0), len(part))
    assert rest == greedy(trained_model, prompt(0) + part, 60 - len(part))


def test_kept_requests_go_on_under_new_weights(rig, engines, trainer, transports, trained_model, greedy, prompt):
    engine = engines[0]

    async def kept(name, recompute):
        await engine.submit(name, prompt(0), 60)
        await rig.until_generated(engine, 10)
        pushed = await transports["shared"].push(trainer, [engine], 1)
        if recompute:
            await engine.flush(recompute=True)
        await engine.resume()
        (end,) = await rig.end_of(name)
        return pushed.updated["one"].live[name], end

    cut, end = rig.run(kept("recomputed", True))
    assert len(end.tokens) == 60
    assert end.version == 0
    assert end.tokens[:cut] == greedy(build(ModelSpec()), prompt(0), cut)
    assert end.tokens[cut:] == greedy(trained_model, prompt(0) + end.tokens[:cut], 60 - cut)


def test_update_needs_a_pause_and_the_right_version(rig, engines, trainer, transports, prompt):
    async def wrong():
        with pytest.raises(Refused, match="pause"):
            await engines[0].begin_update(1)
        with pytest.raises(Refused, match="version 0, not 7"):
            await transports["shared"].push(trainer, engines, 7)
        # The offer was refused before any engine was touched.
        await engines[0].pause()
        await engines[0].resume()

    rig.run(wrong())


def test_a_torn_update_is_refused_and_so_is_generation(rig, engines, trainer, transports, greedy, prompt):
    engine = engines[0]
    small = transports["shared, small"]

    async def torn():
        await engine.submit("waiting", prompt(0), 8)
        await engine.pause()
        await engine.abort()
        await engine.begin_update(1)
        packed = await trainer.pack(small.path, small.bucket_bytes, 0, 0)
        await engine.copy_bucket(small.path, small.bucket_bytes, packed.pieces)
        with pytest.raises(Refused, match="bytes arrived"):
            await engine.end_update(1)
        with pytest.raises(Refused, match="not whole"):
            await engine.resume()
        pushed = await small.push(trainer, [engine], 0)
        await engine.resume()
        return pushed, await rig.generate(engine, "whole", prompt(0), 8)

    pushed, end = rig.run(torn())
    assert pushed.updated["one"].checksum == engine.initial_checksum
    assert end.tokens == greedy(build(ModelSpec()), prompt(0), 8)


def test_group_is_formed_anew_when_members_change(rig, engines, trainer):
    transport = BroadcastBuckets(SMALL)

    async def change():
        await asyncio.gather(*(engine.pause() for engine in engines))
        results = [await transport.push(trainer, sinks, 0) for sinks in (engines, engines[:1], engines[1:], engines)]
        await transport.close()
        return results

    for pushed in rig.run(change()):
        assert not pushed.failed


def test_control_is_answered_between_buckets(rig, engines, trainer, transports, prompt):
    """A transfer doesn't starve another engine, nor this one's control."""

    async def meanwhile():
        await engines[1].submit("busy", prompt(0), 600)
        await engines[0].pause()
        push = asyncio.ensure_future(transports["shared, small"].push(trainer, engines[:1], 0))
        answered = 0
        while not push.done():
            await asyncio.gather(engines[0].count(), engines[1].count())
            answered += 1
        return answered, (await push).failed, await rig.end_of("busy")

    answered, failed, _ = rig.run(meanwhile())
    assert answered >= 2
    assert not failed


class Stumbling:
    """An engine that misses one bucket."""

    def __init__(self, engine, misses):
        self._engine = engine
        self._misses = misses

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def receive(self, bucket_bytes, index):
        if index == self._misses:
            raise OSError("missed")
        return await self._engine.receive(bucket_bytes, index)


@pytest.mark.parametrize("misses", [0, 1, 3])
def test_what_was_packed_ahead_for_a_push_that_broke_off_is_not_sent_by_the_next(rig, engines, trainer, prompt, misses):
    transport = BroadcastBuckets(SMALL, timeout_s=2.0, overlap=True)

    async def twice():
        await asyncio.gather(*(engine.pause() for engine in engines))
        broken = await transport.push(trainer, [engines[0], Stumbling(engines[1], misses)], 0)
        await trainer.train(batch(prompt), 1)
        whole = await transport.push(trainer, engines, 1)
        # Other weights under the same number, as a next run has them.
        await trainer.train(batch(prompt)[:4], 1)
        other = await transport.push(trainer, engines, 1)
        await transport.close()
        return broken, whole, other

    broken, whole, other = rig.run(twice())
    assert set(broken.failed) == {"one", "two"}
    assert not whole.failed
    assert not other.failed
    assert whole.checksum != other.checksum
    assert {u.checksum for u in other.updated.values()} == {other.checksum}


def test_the_next_bucket_is_packed_while_the_one_before_is_on_its_way(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    weights, group, order = WeightSet(build(ModelSpec())), Group(), []
    group.join(group.host(), 0, 1, 10.0)
    pack, begin = weights.pack, group._begin

    def sending(buffer):
        work = begin(buffer)
        order.append("begun")
        return SimpleNamespace(wait=lambda: (order.append("awaited"), work.wait()))

    monkeypatch.setattr(weights, "pack", lambda buffer, pieces: order.append("packed") or pack(buffer, pieces))
    monkeypatch.setattr(group, "_begin", sending)
    one, two, *_ = weights.buckets(SMALL)
    group.send(weights, one, two)
    assert order == ["packed", "begun", "packed", "awaited"]
    group.send(weights, two)
    assert order[4:] == ["begun", "awaited"]
    group.leave()
