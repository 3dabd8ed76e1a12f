"""What a history measures: the same arithmetic for simulated and real runs.

The clock runs from ``Begin`` to the last ``Publish``; what follows is the run's closing. All means
are per published version.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from .commands import Abort, Command, Generate, Pause, Resume, Train, Transfer
from .facts import Begin, Done, Down, Fact, Scored, Segment
from .history import Event
from .notes import Admit, Cancel, Drop, Go, Publish, Reject, Wait
from .shape import Device

NS = 1e9


class Metrics(Struct, frozen=True):
    """Seconds are wall-clock (virtual in a simulation). Shares are of the run's duration."""

    versions: int
    duration_s: float
    step_s: float
    """Mean seconds from publish to publish, the first from ``Begin``."""
    generation_s: float
    """Mean seconds a step in which rollouts were live on an engine that did not stand still."""
    wait_s: float
    """Mean seconds a step in which the trainer waited for groups."""
    train_s: float
    """Mean seconds a step from a ``Train`` command to its answer."""
    sync_s: float
    """Mean seconds a step from the end of training to the publish: interruption, transfer, hand-over."""
    tokens: int
    """Tokens generated, thrown-away ones included."""
    tokens_per_s: float
    engine_idle: float
    """Share of the engines' time without a live rollout, or with those that are there standing still."""
    trainer_idle: float
    """Share of the trainer's time in which it neither trained nor sent weights."""
    interrupted: int
    """Rollouts that an abort returned and that went on later."""
    reward: float
    """Mean reward of scored rollouts."""
    ages: dict[int, int]
    """Trained groups by age, in versions."""


class Meter:
    """Folds events into metrics."""

    def __init__(self, devices: list[Device]) -> None:
        self._engines = sum(d.engine is not None for d in devices)
        self._now = self._begin = self._last = 0
        self._live: dict[int, set[int]] = {}
        self._paused: set[int] = set()
        self._busy_since: dict[int, int] = {}
        self._pool_since = 0
        self._engine_busy = self._generation = self._wait = self._train = self._send = self._sync = 0
        self._issued: dict[int, tuple[int, Command]] = {}
        self._wait_since: int | None = None
        self._trained_at = 0
        self._tokens = self._scored = self._interrupted = self._versions = self._x = 0
        self._reward = 0.0
        self._oldest: dict[int, int] = {}
        self._before: dict[int, tuple[int, int | None]] = {}
        """Of live rollouts that lived through an install: the version of the last tokens told of it, and ``_oldest``
        as it was before their request."""
        self._returning: set[int] = set()
        self._first: dict[int, tuple[int, int]] = {}
        self._ages: Counter[int] = Counter()
        self._closed: Metrics | None = None

    def feed(self, event: Event) -> None:
        """Take the next event in."""
        if isinstance(event, Fact):
            self._now = event.t
        match event:
            case Down() if event.engine is not None:
                self._down(event.engine)
            case Begin():
                self._begin = self._last = event.t
            case Segment():
                self._segment(event)
            case Scored():
                self._scored += 1
                self._reward += event.reward
            case Done():
                self._done(event)
            case Train():
                self._issued[event.id] = (self._now, event)
                self._consume(event)
            case Transfer() | Pause():
                self._issued[event.id] = (self._now, event)
            case Resume():
                self._paused.discard(event.engine)
                self._turn(event.engine)
            case Abort() if event.fate != "cancel":
                self._returning |= {*event.rollouts}
            case Generate():
                self._live.setdefault(event.engine, set()).update(work.rollout for work in event.work)
                self._turn(event.engine)
            case Admit():
                self._first[event.group] = (event.first, event.launch_n)
            case Reject() | Drop() | Cancel():
                self._forget(event.group)
            case Publish():
                self._versions += 1
                self._sync += self._now - self._trained_at
                self._last = self._now
                self._closed = self._metrics()
            case Wait() if event.who == "trainer":
                self._wait_since = self._now
            case Go() if event.who == "trainer" and self._wait_since is not None:
                self._wait += self._now - self._wait_since
                self._wait_since = None
            case _:
                pass

    def result(self) -> Metrics:
        """The metrics up to the last publish."""
        return self._closed or self._metrics()

    def _turn(self, engine: int) -> None:
        """See whether ``engine`` has begun to generate, or has ceased to."""
        busy, was = bool(self._live.get(engine)) and engine not in self._paused, engine in self._busy_since
        if busy and not was:
            self._pool_since = self._pool_since if self._busy_since else self._now
            self._busy_since[engine] = self._now
        elif was and not busy:
            self._engine_busy += self._now - self._busy_since.pop(engine)
            if not self._busy_since:
                self._generation += self._now - self._pool_since

    def _down(self, engine: int) -> None:
        """What was inside is gone, and with it what was told of requests that had lived through an install."""
        for rollout in self._live.pop(engine, ()):
            if rollout in self._before:
                _, oldest = self._before.pop(rollout)
                self._oldest.pop(rollout, None)
                self._oldest |= {} if oldest is None else {rollout: oldest}
        self._paused.discard(engine)
        self._turn(engine)

    def _segment(self, event: Segment) -> None:
        told, before = self._before.get(event.rollout, (-1, self._oldest.get(event.rollout)))
        if event.rollout not in self._live.get(event.engine, ()) or (event.end == "install" and event.version <= told):
            return  # it was told before
        self._tokens += event.n
        if event.end == "install":
            self._before[event.rollout] = event.version, before
        if event.n:
            self._oldest[event.rollout] = min(self._oldest.get(event.rollout, event.version), event.version)
        if event.end == "install":
            return
        self._interrupted += event.end == "abort" and event.rollout in self._returning
        self._returning.discard(event.rollout)
        self._before.pop(event.rollout, None)
        self._live.get(event.engine, set()).discard(event.rollout)
        self._turn(event.engine)

    def _consume(self, event: Train) -> None:
        for group in event.groups:
            used = self._forget(group)
            self._ages[self._x - min(used, default=self._x)] += 1
        self._x += event.last

    def _forget(self, group: int) -> list[int]:
        """The versions of the oldest tokens of a group's rollouts, which are no longer needed."""
        first, n = self._first.pop(group, (0, 0))
        return [self._oldest.pop(r) for r in range(first, first + n) if r in self._oldest]

    def _done(self, event: Done) -> None:
        since, command = self._issued.pop(event.cmd, (0, None))
        if isinstance(command, Train):
            self._train += self._now - since
            self._trained_at = self._now
        elif isinstance(command, Transfer):
            self._send += self._now - since
        elif isinstance(command, Pause) and event.ok:
            self._paused.add(command.engine)
            self._turn(command.engine)

    def _metrics(self) -> Metrics:
        n = max(1, self._versions)
        duration = max(1, (self._last if self._versions else self._now) - self._begin)
        open_engines = sum(self._now - since for since in self._busy_since.values())
        generation = self._generation + (self._now - self._pool_since if self._busy_since else 0)
        return Metrics(
            versions=self._versions,
            duration_s=duration / NS,
            step_s=duration / NS / n,
            generation_s=generation / NS / n,
            wait_s=self._wait / NS / n,
            train_s=self._train / NS / n,
            sync_s=self._sync / NS / n,
            tokens=self._tokens,
            tokens_per_s=self._tokens / (duration / NS),
            engine_idle=1 - (self._engine_busy + open_engines) / (duration * max(1, self._engines)),
            trainer_idle=1 - (self._train + self._send) / duration,
            interrupted=self._interrupted,
            reward=self._reward / max(1, self._scored),
            ages=dict(sorted(self._ages.items())),
        )


def measure(devices: list[Device], events: Iterable[Event]) -> Metrics:
    """Metrics of a whole history."""
    meter = Meter(devices)
    for event in events:
        meter.feed(event)
    return meter.result()


def total_variation(a: dict[int, int], b: dict[int, int]) -> float:
    """Half the sum of the differences of two histograms' shares: 0 (alike) … 1 (disjoint)."""
    na, nb = max(1, sum(a.values())), max(1, sum(b.values()))
    return sum(abs(a.get(k, 0) / na - b.get(k, 0) / nb) for k in {*a, *b}) / 2
