"""Learning, measured through the engine: held-out scores of installed versions, and two controls that must not learn.

A score is the mean reward of the held-out prompts, sampled at temperature 1 by an engine that has it; nothing
is forced: rollouts stop by themselves or at the longest answer. The exam is held before anything is generated under
the version, so that it neither shares a step with training rollouts nor meets an install.
"""

from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct

from rlsched.errors import InputError, WorldError
from rlsched.policy import Policy
from rlsched.shape import Shape

from . import answers, commands
from .client import TrainerClient
from .config import EngineConfig, TrainerConfig
from .job import engines, perform
from .model import ModelSpec
from .rig import Rig
from .setup import Setup
from .task import grade

Control = Literal["withheld", "shuffled"]
SAMPLES = 4
"""Samples of each held-out prompt."""


class Point(Struct, frozen=True):
    """What ``version`` scored, and the digest of the weights that the engine had: bytes, not a label."""

    version: int
    score: float
    checksum: str


class Curve(Struct, frozen=True):
    """One run's scores, version 0 first and the last version last."""

    policy: str
    seed: int
    control: Control | None
    points: list[Point]

    @property
    def start(self) -> float:
        """Score of version 0."""
        return self.points[0].score

    @property
    def final(self) -> float:
        """Score of the last version."""
        return self.points[-1].score


def good(curves: list[Curve]) -> bool:
    """Whether runs of one kind did what they should: learn, or, as a control, not learn."""
    if curves[0].control is not None:
        return all(c.final <= c.start + 0.1 for c in curves)
    return fmean(c.start for c in curves) <= 0.3 and fmean(c.final for c in curves) >= 0.7


def setup(seed: int, steps: int) -> Setup:
    """The job: 32 groups of 16 and four optimizer steps a version, answers of at most 8 tokens.

    ``seed`` is also that of version 0.
    Saying any of the prompt's symbols scores 0.42, and a policy that has settled on some of them never finds their
    order: a KL term keeps it trying. The clip is wide because data are a version old under η = 1.
    """
    model = ModelSpec(vocab=16, heads=2, head_dim=32, seed=seed)
    return Setup(
        shape=Shape(b=32, samples=16, steps=steps, budget=8),
        engine=EngineConfig(model=model, max_requests=256),
        trainer=TrainerConfig(model=model, minibatches=4, clip_low=0.9, clip_high=3.0, ref_weight=0.05),
        forced=False,
    )


class Exam:
    """Scores version 0, every ``every``-th and the last one; the points so far are in ``points``."""

    def __init__(self, rig: Rig, every: int) -> None:
        self.points: list[Point] = []
        self._rig = rig
        self._every = every

    async def __call__(self, version: int, engine: int) -> float | None:
        """The score of ``version`` on ``engine``; None when it isn't due. WorldError if the engine holds another."""
        shape, task = self._rig.setup.shape, self._rig.setup.task
        if version % self._every and version != shape.steps:
            return None
        prompts = task.evaluation_prompts() * SAMPLES
        told = await self._rig.ask(engine, prompts, shape.budget)
        versions = {end.version for end in told}
        if versions != {version}:
            found = sorted(versions)
            raise WorldError(f"version {version} was to be scored, but engine {engine} answered under {found}")
        score = fmean(grade(p, end.tokens, shape.budget).total for p, end in zip(prompts, told, strict=True))
        digest = await self._rig.engines[engine].checksum()
        self.points.append(Point(version, score, digest.checksum))
        return score


class Shuffled(TrainerClient):
    """A trainer whose rewards are shuffled within each group: no sample is told from its siblings."""

    label = "control: rewards shuffled within groups"

    async def train(self, batch: list[commands.Sample], version: int) -> answers.Trained:
        """Train on the same tokens with the rewards of siblings."""
        random = Random(f"shuffled/{version}")
        rewards: dict[int, list[float]] = {}
        for sample in batch:
            rewards.setdefault(sample.group, []).append(sample.reward)
        for own in rewards.values():
            random.shuffle(own)
        mixed = [msgspec.structs.replace(sample, reward=rewards[sample.group].pop()) for sample in batch]
        return await super().train(mixed, version)


class Withheld(TrainerClient):
    """A trainer that trains, but of which every install gets the bytes of version 0: a second one, never trained,
    sends them. Versions advance as ever."""

    label = "control: every install sends version 0"
    _source: TrainerClient

    @classmethod
    async def start(cls, name: str, config: TrainerConfig, run_dir: Path, **options: Any) -> Self:
        """Start both."""
        both = await super().start(name, config, run_dir, **options)
        both._source = await TrainerClient.start(f"{name}-0", config, run_dir)
        return both

    async def host(self) -> str:
        return await self._source.host()

    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        await self._source.join(address, rank, world_size, timeout_s)

    async def leave(self) -> None:
        await self._source.leave()

    async def offer(self, version: int, bucket_bytes: int) -> answers.Offered:
        await super().offer(version, bucket_bytes)
        return await self._source.offer(0, bucket_bytes)

    async def pack(self, path: str, size: int, index: int, version: int) -> answers.Packed:
        return await self._source.pack(path, size, index, 0)

    async def send(self, bucket_bytes: int, index: int, version: int, ahead: bool = False) -> answers.Moved:
        return await self._source.send(bucket_bytes, index, 0, ahead)

    async def save(self, path: str, version: int) -> answers.Moved:
        return await self._source.save(path, 0)

    async def close(self, timeout: float = 5.0) -> None:
        await self._source.close(timeout)
        await super().close(timeout)


TRAINERS: dict[Control | None, type[TrainerClient]] = {None: TrainerClient, "shuffled": Shuffled, "withheld": Withheld}


async def learn(policy: Policy, seed: int, steps: int, every: int, control: Control | None, history: Path) -> Curve:
    """Run ``policy`` for ``steps`` versions on children of its own; the history goes to a file, rollouts beside it."""
    if every < 1:
        raise InputError(f"every {every} versions: it must be at least 1")
    job = setup(seed, steps)
    rig = await Rig.start(job, engines(policy, job), TRAINERS[control])
    try:
        exam = Exam(rig, every)
        _, end = await perform(rig, policy, seed, history, look=exam)
    finally:
        await rig.close()
    if not end.ok:
        raise WorldError(f"{policy.name}, seed {seed}: {end.why} (history: {history})")
    return Curve(policy.name, seed, control, exam.points)
