"""The trainer child: phases, memory parts, versions, and that it learns."""

from __future__ import annotations

import asyncio

import pytest

from rlsched.real.channel import CommandFailed
from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.pacing import EnginePace, StepCost, TrainerPace, WorkCost
from rlsched.real.task import Task, grade
from rlsched.real.trainer import collate, minibatches
from rlsched.real.transport import SharedBuckets
from rlsched.real.wire import Refused

pytestmark = pytest.mark.real

LENGTH = 8


@pytest.fixture(scope="module")
def trainer(rig):
    return rig.trainer("trainer", TrainerConfig(minibatches=2, ref_weight=0.01, lr=3e-3))


@pytest.fixture(autouse=True)
def afresh(rig, trainer):
    rig.run(trainer.load(["parameters", "optimizer"]))
    rig.run(trainer.reset(0))
    rig.phases.clear()


def right_and_wrong(task: Task, groups: int) -> list[Sample]:
    """A fixed batch: in each group one right answer and three wrong ones, as if drawn uniformly."""
    batch = []
    for group in range(groups):
        prompt = task.prompt(group)
        outputs = [[prompt[1 + i % 3] for i in range(LENGTH)]]
        outputs += [[8 + (i + shift) % 8 for i in range(LENGTH)] for shift in range(3)]
        batch += [
            Sample(prompt, output, [-3.5] * LENGTH, grade(prompt, output, LENGTH).total, group) for output in outputs
        ]
    return batch


def test_steps_make_right_answers_likelier(rig, trainer):
    task = Task()
    batch = right_and_wrong(task, 8)
    rewarded = [s for s in batch if s.reward == 1.0]

    async def likelihood():
        own = await trainer.evaluate(rewarded)
        return sum(map(sum, own)) / len(own)

    async def learn():
        before = await likelihood()
        for version in range(1, 9):
            trained = await trainer.train(batch, version)
        return before, await likelihood(), trained

    before, after, trained = rig.run(learn())
    assert after > before + 1.0
    assert trained.optimizer_steps == 16
    assert trained.version == 8
    assert trained.reward == pytest.approx(sum(s.reward for s in batch) / len(batch))


def test_phases_are_announced_in_order(rig, trainer):
    trained = rig.run(trainer.train(right_and_wrong(Task(), 2), 1))
    assert [(p.phase, p.edge) for p in rig.phases] == [
        (phase, edge) for phase in ("old_logprob", "ref", "update") for edge in ("begin", "end")
    ]
    stamps = [p.at_ns for p in rig.phases]
    assert stamps == sorted(stamps)
    assert trained.phase_ns == {
        begin.phase: end.at_ns - begin.at_ns for begin, end in zip(rig.phases[::2], rig.phases[1::2], strict=True)
    }


def test_masked_tokens_teach_nothing(rig, trainer):
    async def train(garbage, mask):
        await trainer.reset(0)
        batch = [
            Sample([1, 8, 9, 10], [8, 9, 10, garbage], [-3.5] * 4, 1.0, 0, mask),
            Sample([1, 8, 9, 10], [11, 9, 10, garbage], [-3.5] * 4, 0.0, 0, mask),
        ]
        trained = await trainer.train(batch, 1)
        return trained, (await trainer.checksum()).checksum

    masked = [rig.run(train(garbage, [1, 1, 1, 0])) for garbage in (5, 6)]
    full = [rig.run(train(garbage, None)) for garbage in (5, 6)]
    assert [m[0].tokens for m in masked] == [6, 6]
    assert full[0][0].tokens == 8
    assert masked[0][1] == masked[1][1]
    assert full[0][1] != full[1][1]


def test_training_is_deterministic_and_reset_is_complete(rig, trainer):
    batch = right_and_wrong(Task(), 4)

    async def twice():
        digests = []
        for _ in range(2):
            await trainer.reset(0)
            digests.append(await trainer.checksum())
            for version in (1, 2):
                await trainer.train(batch, version)
            digests.append(await trainer.checksum())
        return digests

    first, second, third, fourth = rig.run(twice())
    assert first == third
    assert second == fourth
    assert first.checksum == trainer.initial_checksum != second.checksum
    assert (first.version, second.version) == (0, 2)


def test_offloaded_parts_are_missed(rig, trainer):
    batch = right_and_wrong(Task(), 2)

    async def without():
        moved = await trainer.offload(["parameters", "optimizer"])
        with pytest.raises(Refused, match="optimizer, parameters"):
            await trainer.train(batch, 1)
        await trainer.load(["parameters"])
        with pytest.raises(Refused, match="offloaded: optimizer"):
            await trainer.train(batch, 1)
        back = await trainer.load(["optimizer"])
        with pytest.raises(Refused, match="no such part"):
            await trainer.offload(["gradients"])
        await trainer.train(batch, 1)
        return moved, back

    moved, back = rig.run(without())
    assert (moved.moved, back.moved) == (0, 0)  # on a CPU there is no other place


def test_a_failed_command_does_not_end_the_trainer(rig, trainer):
    async def bad():
        with pytest.raises(CommandFailed, match="IndexError"):
            await trainer.pack(transport.path, transport.bucket_bytes, 999, 0)
        with pytest.raises(Refused, match="empty"):
            await trainer.train([], 1)
        await transport.close()
        return await trainer.checksum()

    transport = SharedBuckets()
    assert rig.run(bad()).version == 0


def test_calls_are_answered_in_order_and_a_stale_export_is_refused(rig, trainer):
    batch = right_and_wrong(Task(), 8)

    async def overtaken():
        training = asyncio.ensure_future(trainer.train(batch, 1))
        offer = asyncio.ensure_future(trainer.offer(0, 4096))
        with pytest.raises(Refused, match="version 1, not 0"):
            await offer
        assert training.done()
        return await trainer.offer(1, 4096)

    assert rig.run(overtaken()).buckets > 1


def test_paced_phases_and_steps_last_as_long_as_declared(rig, prompt):
    ms = 1_000_000
    pace = TrainerPace(old_logprob=WorkCost(fixed=60 * ms), update=WorkCost(fixed=50 * ms, each=ms))
    trainer = rig.trainer("paced trainer", TrainerConfig(pace=pace))
    engine = rig.engine("paced engine", EngineConfig(pace=EnginePace(step=StepCost(a=5 * ms, b=ms, p=100_000))))
    batch = right_and_wrong(Task(), 1)

    async def paced():
        trained = await trainer.train(batch, 1)
        await engine.trace(True)
        await asyncio.gather(*(engine.submit(f"paced {i}", prompt(i), 20) for i in range(4)))
        await rig.end_of(*(f"paced {i}" for i in range(4)))
        return trained, await engine.trace(False), await engine.count(), await trainer.count()

    trained, steps, engine_count, trainer_count = rig.run(paced())
    assert trained.phase_ns["old_logprob"] >= 60 * ms
    assert trained.phase_ns["update"] >= 82 * ms
    declared = sum(5 * ms + s.decoding * ms + s.prompt_tokens * 100_000 for s in steps)
    assert engine_count.declared_ns == declared
    assert engine_count.held == len(steps)
    # A lower bound that no machine is too slow for; the chain never gives a run less than was declared.
    assert sum(s.elapsed_ns for s in steps) >= declared
    assert (trainer_count.held, trainer_count.declared_ns) == (2, 142 * ms)
    rig.run(trainer.close())


def test_minibatches_hold_whole_groups():
    samples = [Sample([1], [8], [0.0], 0.0, group) for group in (5, 3, 5, 9, 3, 9, 1)]
    assert minibatches(samples, 1) == [[0, 2, 1, 4, 3, 5, 6]]
    assert minibatches(samples, 2) == [[0, 2, 1, 4], [3, 5, 6]]
    assert minibatches(samples, 99) == [[0, 2], [1, 4], [3, 5], [6]]


def test_collate_lines_up_outputs_with_their_predictions():
    batch = collate([Sample([1, 8], [9, 10, 11], [-1.0, -2.0, -3.0], 1.0, 0), Sample([1], [9], [-4.0], 0.0, 0)], "cpu")
    assert batch.ids.tolist() == [[1, 8, 9, 10, 11], [1, 9, 0, 0, 0]]
    assert batch.engine.tolist() == [[0, -1, -2, -3], [-4, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.present.sum().item() == 7
    assert batch.advantages.tolist() == pytest.approx([1.0, -1.0], rel=1e-4)
