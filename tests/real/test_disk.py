"""Weights through a checkpoint on disk: bit-exact, whole or not at all, written once, and no old file stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsched.checker import check
from rlsched.commands import Transfer
from rlsched.facts import Bucket, Installed, Updating
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.real.channel import CommandFailed
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.job import perform
from rlsched.real.model import ModelSpec, build
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.real.transport import Checkpoints, TornWeights, digest
from rlsched.real.weights import WeightSet
from rlsched.real.wire import Refused
from rlsched.replay import replay
from rlsched.shape import Shape

pytestmark = pytest.mark.real

#: Far smaller than the largest tensor, and no multiple of anything.
SMALL = 5_001


def weights(seed=0):
    return WeightSet(build(ModelSpec(seed=seed)))


@pytest.mark.parametrize("bucket_bytes", [100, SMALL, 1 << 20])
def test_a_file_holds_every_bit_whatever_the_buckets(tmp_path, bucket_bytes):
    source, target = weights(1), weights(2)
    path = tmp_path / "w.safetensors"
    assert source.save(path) == source.nbytes
    read = sum(target.read(path, pieces) for pieces in target.buckets(bucket_bytes))
    assert read == source.nbytes
    assert target.checksum() == source.checksum()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_could_not_be_written_whole_does_not_appear(tmp_path, monkeypatch):
    def half(tensors, path):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("rlsched.real.weights.save_file", half)
    with pytest.raises(OSError, match="no space"):
        weights().save(tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


@pytest.fixture(scope="module")
def engines(rig):
    return [rig.engine(name, EngineConfig(temperature=0.0)) for name in ("one", "two")]


@pytest.fixture(scope="module")
def trainer(rig):
    return rig.trainer("trainer", TrainerConfig(lr=1e-2))


@pytest.fixture(autouse=True)
def afresh(request):
    if "engines" not in request.fixturenames:
        return
    rig = request.getfixturevalue("rig")
    for child in (*request.getfixturevalue("engines"), request.getfixturevalue("trainer")):
        rig.run(child.reset(0))


def batch(prompt):
    from rlsched.real.commands import Sample

    return [
        Sample(prompt(i), [8 + (i + j) % 8 for j in range(10)], [-3.0] * 10, float(i % 2), i // 4) for i in range(8)
    ]


def test_versions_reach_both_engines_and_old_files_go(rig, engines, trainer, prompt, tmp_path):
    transport = Checkpoints(tmp_path, SMALL)
    buckets: list[tuple[str, int, int]] = []

    async def push():
        seen = []
        await asyncio.gather(*(e.pause() for e in engines))
        for version in (1, 2, 3):
            await trainer.train(batch(prompt), version)
            buckets.clear()
            pushed = await transport.push(trainer, engines, version, lambda *moved: buckets.append(moved[:3]))
            seen.append((pushed, [await m.checksum() for m in (trainer, *engines)], sorted(tmp_path.iterdir())))
        await asyncio.gather(*(e.resume() for e in engines))
        await transport.close()
        return seen

    for version, (pushed, digests, files) in enumerate(rig.run(push()), 1):
        assert not pushed.failed
        assert {(d.checksum, d.version) for d in digests} == {(pushed.checksum, version)}
        assert [f.name for f in files] == [f"version-{version}-{pushed.checksum}.safetensors"]
        assert sum(pushed.bytes) == trainer.parameter_bytes
    for engine in engines:
        mine = [(index, size) for name, index, size in buckets if name == engine.name]
        assert [index for index, _ in mine] == list(range(len(mine)))
        assert len(mine) > 10
        assert sum(size for _, size in mine) == trainer.parameter_bytes
    assert not list(tmp_path.iterdir())


def test_a_version_is_written_once_however_many_pushes_it_takes(rig, engines, trainer, tmp_path):
    transport = Checkpoints(tmp_path)

    async def rolling():
        inodes = []
        for engine in engines:
            await engine.pause()
            await transport.push(trainer, [engine], 0)
            inodes.append([f.stat().st_ino for f in tmp_path.iterdir()])
            await engine.resume()
        await transport.close()
        return inodes

    first, second = rig.run(rolling())
    assert first == second
    assert len(first) == 1


class Damaged(Checkpoints):
    """Checkpoints that are harmed between their writing and their reading."""

    harm: Any = staticmethod(lambda data: data)

    async def _stage(self, source, version, checksum):
        await super()._stage(source, version, checksum)
        self.path.write_bytes(self.harm(bytearray(self.path.read_bytes())))


def flip(data):
    data[-7] ^= 1
    return data


def test_a_damaged_file_is_never_taken_for_the_version(rig, engines, trainer, tmp_path):
    """Bits that changed on disk are seen by checksum, a cut file by the reader; the engine refuses to go on."""
    transport = Damaged(tmp_path)

    async def damaged(harm):
        transport.harm = harm
        await engines[0].pause()
        pushed = await transport.push(trainer, engines[:1], 0)
        await transport.close()
        return pushed

    flipped = rig.run(damaged(flip))
    assert isinstance(flipped.failed["one"], TornWeights)
    cut = rig.run(damaged(lambda data: data[:-1000]))
    assert isinstance(cut.failed["one"], CommandFailed)
    with pytest.raises(Refused, match="not whole"):
        rig.run(engines[0].resume())


@pytest.mark.parametrize("harm", [flip, lambda data: data[:-1000], lambda data: b"", lambda data: b"x" * 100])
def test_a_file_that_was_damaged_is_written_anew(rig, engines, trainer, tmp_path, harm):
    transport = Checkpoints(tmp_path)

    async def again():
        await engines[0].pause()
        await transport.push(trainer, engines[:1], 0)
        whole = transport.path.read_bytes()
        transport.path.write_bytes(harm(bytearray(whole)))
        pushed = await transport.push(trainer, engines[:1], 0)
        same = transport.path.read_bytes() == whole
        await engines[0].resume()
        await transport.close()
        return pushed, same

    pushed, same = rig.run(again())
    assert not pushed.failed
    assert same


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_is_known_by_the_weights_checksum(tmp_path, dtype):
    source = WeightSet(build(ModelSpec(dtype=dtype)))
    source.save(tmp_path / "w.safetensors")
    assert digest(tmp_path / "w.safetensors") == source.checksum()
    assert digest(tmp_path / "none") == ""


def test_a_bucket_is_read_only_inside_an_update(rig, engines, trainer, tmp_path):
    path = tmp_path / "w.safetensors"

    async def early():
        await trainer.save(str(path), 0)
        with pytest.raises(Refused, match="no update"):
            await engines[0].read_bucket(str(path), 1 << 20, 0)
        with pytest.raises(Refused, match="version 0, not 7"):
            await trainer.save(str(path), 7)

    rig.run(early())


def test_both_presets_publish_through_disk(tmp_path):
    setup = Setup(shape=Shape(b=3, samples=2, steps=4, budget=96))
    names = ("areal-async,admit.eta=1,publish.transport=disk", "verl-hybrid,publish.transport=disk")
    paths = [tmp_path / f"{i}.jsonl" for i in range(len(names))]

    async def run():
        rig = await Rig.start(setup, 1)
        try:
            for name, path in zip(names, paths, strict=True):
                _, end = await perform(rig, parse(name, ()), 3, path)
                assert end.ok, end.why
                digests = [await m.checksum() for m in (rig.trainer, rig.engines[0])]
                assert {d.version for d in digests} == {4}
                assert len({d.checksum for d in digests}) == 1
        finally:
            await rig.close()

    asyncio.run(run())
    for path in paths:
        assert check(Reader(path)).counts == {}
        assert replay(Reader(path)).divergence is None
        events = list(Reader(path).events())
        transfers = [e for e in events if isinstance(e, Transfer)]
        assert [t.version for t in transfers] == [1, 2, 3, 4]
        assert {t.transport for t in transfers} == {"disk"}
        for kind in (Updating, Bucket, Installed):
            assert sum(isinstance(e, kind) and e.by > 0 for e in events) == 4
