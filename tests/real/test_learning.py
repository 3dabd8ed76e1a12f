"""Learning through the engine, and what must not learn: weights withheld, rewards shuffled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
import zstandard

from rlsched import chart, report
from rlsched.checker import check
from rlsched.commands import Generate, Train
from rlsched.errors import InputError, WorldError
from rlsched.facts import Installed, Observed, Scored, Segment
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.notes import Publish
from rlsched.real.commands import Sample
from rlsched.real.learning import SAMPLES, Curve, Exam, Point, good, learn, setup
from rlsched.real.rollouts import Rollout
from rlsched.real.world import HELD_OUT
from rlsched.replay import replay

pytestmark = pytest.mark.real

ASYNC, HYBRID = "areal-async,admit.eta=1", "verl-hybrid"


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., tuple[Curve, list[Any], list[Rollout]]]:
    """Learn for real and examine the run; its curve, events and raw rollouts."""

    def go(name: str, seed: int, steps: int, every: int, control: Any = None) -> tuple[Any, Any, Any]:
        path = tmp_path / f"{control}-{seed}.jsonl.zst"
        curve = asyncio.run(learn(parse(name, ()), seed, steps, every, control, path))
        assert check(Reader(path)).counts == {}
        assert replay(Reader(path)).divergence is None
        with zstandard.open(tmp_path / f"{control}-{seed}.rollouts.jsonl.zst", "rb") as file:
            rollouts = [msgspec.json.decode(line, type=Rollout) for line in file.read().splitlines()]
        return curve, list(Reader(path).events()), rollouts

    return go


def held_out_prompts_never_train(events: list[Any], rollouts: list[Rollout], seed: int, steps: int) -> None:
    """From the raw log, which has every scored rollout with its prompt's own tokens."""
    task = setup(seed, steps).task
    trained = [r for e in events if isinstance(e, Train) for r in e.rollouts]
    raw = {r.rollout: r for r in rollouts}
    assert len(raw) == len(rollouts) == sum(isinstance(e, Scored) for e in events)
    assert len(trained) == len({*trained}) == 32 * 16 * steps
    assert {*trained} <= raw.keys()
    held_out = {tuple(p) for p in task.evaluation_prompts()}
    assert len(held_out) == 64
    assert not held_out & {tuple(r.prompt) for r in rollouts}


def the_curve_is_the_history_s(curve: Curve, events: list[Any]) -> None:
    """A score stands in the history after its version's publish, and before a token is generated under it."""
    published, found = 0, []
    for e in events:
        if isinstance(e, Publish):
            published = e.version
        elif isinstance(e, Observed) and e.name == HELD_OUT:
            found.append((published, e.value))
        elif isinstance(e, Segment) and e.n and published in {p.version for p in curve.points}:
            assert published in {v for v, _ in found}
    assert found == [(p.version, p.score) for p in curve.points]


def test_it_learns_by_itself_and_held_out_prompts_never_train(study):
    """The nightly test's job, as far as the first of its two rises: from a twentieth to a third."""
    steps = 24
    curve, events, rollouts = study(ASYNC, 0, steps, 8)
    assert curve.start <= 0.1
    assert curve.final >= curve.start + 0.25
    assert [p.version for p in curve.points] == [0, 8, 16, 24]
    assert len({p.checksum for p in curve.points}) == 4
    held_out_prompts_never_train(events, rollouts, 0, steps)
    the_curve_is_the_history_s(curve, events)
    # Nothing is forced: some end by themselves, none is longer than asked for, and the reward is the task's.
    assert {s.end for s in events if isinstance(s, Segment)} >= {"stop", "length", "abort"}
    assert {1, 8} <= {len(r.output) for r in rollouts} <= set(range(1, 9))
    task = setup(0, steps).task
    for r in rollouts[:: len(rollouts) // 200]:
        assert (r.output[-1] == task.eos) == (len(r.output) < 8) or r.output[-1] == task.eos
        right = sum(given == r.prompt[1 + i % 3] for i, given in enumerate(r.output))
        assert r.reward == right / 8
    # Some trained rollouts were generated under two versions, and say which token is whose.
    assert any(len({span.version for span in r.spans}) == 2 for r in rollouts)
    assert all(sum(span.n for span in r.spans) == len(r.output) == len(r.logprobs) for r in rollouts)


@pytest.mark.parametrize("name", [ASYNC, f"{HYBRID},publish.transport=disk"])
def test_withheld_weights_are_seen_for_what_they_are(study, name):
    """Versions advance, the history is clean, and the engine has version 0 all the time."""
    curve, events, _ = study(name, 3, 4, 1, "withheld")
    assert [p.version for p in curve.points] == [0, 1, 2, 3, 4]
    assert len({p.checksum for p in curve.points}) == 1
    assert [e.version for e in events if isinstance(e, Installed)] == [0, 1, 2, 3, 4]
    assert all(p.score <= curve.start + 0.1 for p in curve.points)


def test_shuffled_rewards_stay_in_their_group(monkeypatch):
    from rlsched.real.client import TrainerClient
    from rlsched.real.learning import Shuffled

    given: list[list[Sample]] = []

    async def train(self: Any, batch: list[Sample], version: int) -> Any:
        given.append(batch)

    monkeypatch.setattr(TrainerClient, "train", train)
    batch = [Sample([1, 8], [9], [-1.0], float(i), i % 3) for i in range(60)]
    for version in (1, 2):
        asyncio.run(Shuffled.train(object.__new__(Shuffled), batch, version))
    for mixed in given:
        assert [m.output for m in mixed] == [s.output for s in batch]
        for group in range(3):
            own = [[s.reward for s in which if s.group == group] for which in (batch, mixed)]
            assert own[0] != own[1]
            assert own[0] == sorted(own[1])
    assert given[0] != given[1]


class Answering:
    """A rig whose engine answers every request rightly, under a version of its own."""

    def __init__(self, version: int) -> None:
        from types import SimpleNamespace

        self.setup = setup(0, 10)
        self.version, self.asked = version, []  # type: ignore[var-annotated]

        async def checksum() -> Any:
            return SimpleNamespace(checksum="c")

        self.engines = {0: SimpleNamespace(checksum=checksum)}

    async def ask(self, engine: int, requests: list[list[int]], length: int) -> list[Any]:
        from rlsched.real.answers import Ended
        from rlsched.real.task import answer

        self.asked.append(requests)
        return [Ended("r", answer(p, length), [], "length", self.version, 0) for p in requests]


def test_an_exam_asks_all_held_out_prompts_when_it_is_due():
    rig: Any = Answering(4)
    exam = Exam(rig, 4)
    assert asyncio.run(exam(3, 0)) is None
    assert asyncio.run(exam(4, 0)) == 1.0
    assert exam.points == [Point(4, 1.0, "c")]
    assert rig.asked == [rig.setup.task.evaluation_prompts() * SAMPLES]
    rig.version = 10
    assert asyncio.run(exam(10, 0)) == 1.0  # the last one, too


def test_an_answer_under_another_version_is_no_score():
    rig: Any = Answering(3)
    with pytest.raises(WorldError, match=r"version 4 was to be scored, but engine 0 answered under \[3\]"):
        asyncio.run(Exam(rig, 4)(4, 0))


def curves(*ends: tuple[float, float], control: Any = None) -> list[Curve]:
    return [Curve("p", i, control, [Point(0, a, ""), Point(9, z, "")]) for i, (a, z) in enumerate(ends)]


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (curves((0.1, 0.6), (0.1, 0.8)), True),
        (curves((0.1, 0.6), (0.1, 0.7)), False),
        (curves((0.35, 0.9)), False),
        (curves((0.1, 0.2), (0.05, 0.05), control="withheld"), True),
        (curves((0.1, 0.1), (0.05, 0.16), control="shuffled"), False),
    ],
)
def test_what_counts_as_learning(given, verdict):
    assert good(given) is verdict


def test_every_must_be_positive(tmp_path):
    with pytest.raises(InputError, match="every 0 versions"):
        asyncio.run(learn(parse(ASYNC, ()), 0, 1, 0, None, tmp_path / "h.jsonl"))


def test_the_picture_shows_every_curve(tmp_path):
    from xml.etree import ElementTree

    shown = [*curves((0.1, 0.6), (0.1, 0.8)), *curves((0.1, 0.1), control="withheld")]
    root = ElementTree.parse(report.write_learning(shown, tmp_path / "l.svg")).getroot()
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 3
    assert len({e.get("stroke") for e in lines}) == 2
    assert {"p", "withheld"} <= {e.text for e in root.iter() if e.tag.endswith("text")}
    for e in lines:
        for point in (e.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert chart.LEFT <= x <= chart.WIDTH - chart.RIGHT
            assert chart.TOP <= y <= chart.HEIGHT - chart.BOTTOM


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [ASYNC, HYBRID])
def test_it_learns_on_three_seeds(study, name):
    found = [study(name, seed, 100, 20) for seed in range(3)]
    for seed, (_, events, rollouts) in enumerate(found):
        held_out_prompts_never_train(events, rollouts, seed, 100)
    assert fmean(c.start for c, _, _ in found) <= 0.3
    assert fmean(c.final for c, _, _ in found) >= 0.7


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("control", ["withheld", "shuffled"])
def test_a_control_does_not_learn(study, control):
    for seed in range(3):
        curve, events, rollouts = study(ASYNC, seed, 100, 20, control)
        held_out_prompts_never_train(events, rollouts, seed, 100)
        assert curve.final <= curve.start + 0.1
        assert (len({p.checksum for p in curve.points}) == 1) == (control == "withheld")
        assert sum(isinstance(e, Generate) for e in events) > 3000
