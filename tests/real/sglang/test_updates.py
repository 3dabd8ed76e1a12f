"""Weight updates and sleep of a real SGLang server: by each of SGLang's own ways, and what the tokens say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlsched.real.canary import BOS, Claim, mismatches
from rlsched.real.canary_forger import Forger
from rlsched.real.channel import CommandFailed
from rlsched.real.client import EngineClient
from rlsched.real.commands import Sample
from rlsched.real.model import build
from rlsched.real.transport import BroadcastBuckets, Buckets, Checkpoints, SharedBuckets
from rlsched.real.wire import Refused
from tests.real.sglang.conftest import SPEC, said

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
PATIENCE_S = 60.0
PROMPT = [BOS, *(8 + i % 8 for i in range(39))]


@pytest.fixture
def transports(tmp_path, rig) -> Iterator[dict[str, Buckets]]:
    """By the way that they take into the server. The buckets of the first cut tensors in two."""
    made = {
        "update_weights_from_tensor": SharedBuckets(50_001),
        "update_weights_from_distributed": BroadcastBuckets(100_000, PATIENCE_S),
        "update_weights_from_disk": Checkpoints(tmp_path, 100_000),
    }
    yield made
    for transport in made.values():
        rig.run(transport.close())


def test_each_transport_has_its_own_way_into_the_server_and_is_bit_exact(
    rig, engine, trainer, greedy, prompt, tmp_path, transports
):
    async def update():
        found = []
        await trainer.reset(0)
        # The second time round the process group is there already.
        for version, (way, transport) in enumerate([*transports.items(), *transports.items()], 1):
            batch = [
                Sample(prompt(i), [8 + (i + j) % 8 for j in range(10)], [-3.0] * 10, float(i % 2), i // 4)
                for i in range(8)
            ]
            await trainer.train(batch, version)
            await engine.pause()
            pushed = await transport.push(trainer, [engine], version)
            assert not pushed.failed, pushed.failed
            assert pushed.updated[engine.name].way == way
            await engine.resume()
            end = await rig.generate(engine, f"r{version}", prompt(0), 40)
            assert (end.version, end.labels) == (version, [(version, 40)])
            source, sink = await trainer.checksum(), await engine.checksum()
            assert (sink.checksum, sink.version) == (source.checksum, version)
            await trainer.save(str(tmp_path / f"saved-{version}"), version)
            found.append(end)
        return found

    from safetensors.torch import load_file

    ends = rig.run(update(), 600)
    for version, end in enumerate(ends, 1):
        trained = build(SPEC)
        trained.load_state_dict(load_file(tmp_path / f"saved-{version}"))
        assert end.tokens == greedy(trained, prompt(0), 40)
    assert len({tuple(end.logprobs) for end in ends}) == len(ends)


def test_a_torn_update_is_refused_and_so_is_generation(rig, engine, trainer, greedy, model, prompt):
    small = SharedBuckets(50_001)

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


def test_a_checkpoint_that_changes_under_the_server_is_noticed(rig, engine, trainer, tmp_path):
    """SGLang calls it a success: only the comparison sees that the server read something else."""
    import torch
    from safetensors.torch import load_file, save_file

    file = tmp_path / "checkpoint"

    async def changed():
        await trainer.reset(0)
        offered = await trainer.offer(0, 1 << 20)
        await trainer.save(str(file), 0)
        await engine.pause()
        await engine.begin_update(1)
        for index in range(offered.buckets):
            await engine.read_bucket(str(file), 1 << 20, index)
        tensors = load_file(file)
        tensors["model.layers.1.mlp.up_proj.weight"] += torch.tensor(1e-3)
        save_file(tensors, file)
        with pytest.raises(CommandFailed, match=r"not what it was given: model\.layers\.1\.mlp\.gate_up_proj\.weight"):
            await engine.end_update(1)
        with pytest.raises(Refused, match="not whole"):
            await engine.resume()

    rig.run(changed())


# ---------------------------------------------------------------- memory


def test_sleep_is_asked_for_and_frees_nothing(rig, engine, trainer, model, greedy, prompt):
    shared = SharedBuckets()

    async def nap():
        await trainer.reset(0)
        with pytest.raises(Refused, match="pause"):
            await engine.sleep(2)
        await rig.begin(engine, 3, r=(prompt(0), 400))
        # Of this the server would die.
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


def test_a_wake_without_a_sleep_does_not_reach_the_server(rig, engine, model, greedy, prompt):
    """It would die of it."""

    async def woken():
        await engine.pause()
        told = await engine.wake(["weights", "kv"])
        await engine.resume()
        return told, await rig.generate(engine, "r", prompt(0), 5)

    told, end = rig.run(woken())
    assert (told.awake, told.weights_usable) == (["kv", "weights"], True)
    assert end.tokens == greedy(model, prompt(0), 5)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_sleep_is_possible_in_each_pause_that_frees_the_kv(rig, engine, model, greedy, prompt, mode):
    """What was retracted waits in the server's queue meanwhile, and goes on."""

    async def nap():
        await rig.begin(engine, 3, r=(prompt(0), 150))
        await engine.pause(mode)
        await engine.sleep(1)
        await engine.wake(["kv"])
        await engine.resume()
        return (await rig.end_of("r"))[0]

    end = rig.run(nap())
    assert end.reason == ("length" if mode == "retract" else "abort")
    assert end.tokens == greedy(model, prompt(0), len(end.tokens))


# ---------------------------------------------------------------- what canary weights say


@pytest.fixture
def forger(rig) -> Iterator[tuple[Forger, Buckets]]:
    transport = SharedBuckets()
    yield Forger(), transport
    rig.run(transport.close())


async def bring(engine: EngineClient, forger: tuple[Forger, Buckets], version: int) -> dict[str, int]:
    source, transport = forger
    source.hold(version)
    pushed = await transport.push(source, [engine], version)
    assert not pushed.failed, pushed.failed
    return pushed.updated[engine.name].live


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_tokens_say_their_version_across_an_update(rig, engine, forger, recompute):
    async def held():
        await engine.pause()
        await bring(engine, forger, 1)
        await engine.resume()
        await rig.begin(engine, 10, held=(PROMPT, 150))
        if recompute:
            await engine.pause("retract")
        cut = (await bring(engine, forger, 2))["held"]
        await engine.resume()
        return cut, (await rig.end_of("held"))[0], await rig.generate(engine, "fresh", PROMPT, 10)

    cut, held, fresh = rig.run(held())
    claims = [Claim(cut, 1, 1), Claim(150 - cut, 2, 2 if recompute else 1)]
    assert mismatches(held.tokens, claims) == []
    assert mismatches(fresh.tokens, [Claim(10, 2, 2)]) == []
    assert (held.version, fresh.version) == (1, 2)
    assert held.labels == [(1, cut), (2, 150 - cut)]  # without overlapped steps SGLang's own word is true
    assert not said(engine, "SGLang says")


def test_an_aborted_request_goes_on_under_the_new_version(rig, engine, forger):
    async def interrupted():
        await engine.pause()
        await bring(engine, forger, 1)
        await engine.resume()
        await rig.begin(engine, 5, part=(PROMPT, 400))
        await asyncio.gather(engine.resume(), engine.pause("abort"))
        await bring(engine, forger, 2)
        await engine.resume()
        part = rig.ended["part"]
        return part, await rig.generate(engine, "rest", PROMPT + part.tokens, 20)

    part, rest = rig.run(interrupted())
    assert len(part.tokens) >= 5
    assert part.labels == [(1, len(part.tokens))]
    assert mismatches(part.tokens, [Claim(len(part.tokens), 1, 1)]) == []
    assert mismatches(rest.tokens, [Claim(20, 2, 2)]) == []


def test_counting_asks_the_scheduler(rig, engine):
    async def often():
        await engine.submit("r", PROMPT, 300)
        counted = await asyncio.gather(*(engine.count() for _ in range(20)))
        await engine.pause()
        return [*counted, await engine.count()]

    counted = rig.run(often())
    assert all(c.rss > 1 << 29 for c in counted)
