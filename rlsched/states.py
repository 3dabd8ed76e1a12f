"""States: a history as cycles of steps, each step with six labels.

A cycle is what leads from ``v`` to the version ``v+1`` that it produces. Its steps begin at
milestones, in the order in which the run reached them:

    dispatch  the first new request under v
    accept    the first group that is whole after that
    sleep     the engines that make way for the trainer have acknowledged their sleep
    train     the first batch of v+1 is issued
    pause     the engines that v+1 is for have acknowledged their pause
    update    an engine begins to take v+1 in; the labels are those at the end of the transfer
    wake      an engine that had slept has its KV cache again
    resume    paused engines go on, or rollouts that came back are sent again

Cycles are cut by what causes what, not by time: the requests that v+1's update interrupted are
resumed in its cycle, at the instant at which the next one begins. Where engines are updated one by
one, a step shows the first of them.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from .commands import Abort, AbortFate, Command, Flush, Generate, Pause, Resume, Sleep, Train, Transfer, Wake
from .errors import InputError
from .facts import Done, Down, Fact, Installed, Segment, Updating
from .history import Event
from .labels import Course, Kind, Labeller, Labels
from .manifest import Manifest
from .notes import Accept, Publish
from .scene import Scene

AWAITS: dict[Kind, type[Command]] = {
    "dispatch": Resume,
    "sleep": Sleep,
    "pause": Pause,
    "update": Transfer,
    "wake": Wake,
    "resume": Resume,
}
"""Commands that must all be answered before the labels of a step hold."""


class Step(Struct, frozen=True):
    """A step of a cycle. ``line`` of the history (1: the manifest) and ``t`` are those of its milestone."""

    kind: Kind
    title: str
    line: int
    t: int
    state: Labels


class Cycle(Struct, frozen=True):
    """The steps that led to ``version``, as far as the history goes."""

    version: int
    steps: list[Step]
    interrupted: bool
    """The update made rollouts come back unfinished."""
    resent: bool
    """Rollouts that had come back were sent again."""
    within: bool
    """Requests with tokens lived through the update inside their engine."""


class Open(Struct):
    """A cycle under way."""

    course: Course
    steps: dict[Kind, Step] = {}


class Back(Struct, frozen=True):
    """A rollout that was called back, to go on later."""

    cycle: int
    fate: AbortFate
    update: bool
    """An update called it back."""
    newest: int = -1
    """Version of its newest tokens; -1: it has none."""


class Fold:
    """Folds events into cycles: ``feed`` each with its line, then take ``cycles``."""

    def __init__(self, manifest: Manifest) -> None:
        self.labeller = Labeller(manifest)
        self._scene = Scene(manifest)
        self._cycles: dict[int, Open] = {}
        self._due: dict[tuple[int, Kind], tuple[int, int]] = {}
        """Line and time of milestones whose labels don't hold yet."""
        self._newest: dict[int, int] = {}
        """Version of the newest tokens of live rollouts."""
        self._recalled: dict[int, Back] = {}
        """Live rollouts that an abort is on its way to."""
        self._back: dict[int, Back] = {}
        """Rollouts that came back."""
        self._line = self._now = self._v = 0

    def feed(self, line: int, event: Event) -> None:
        """Take the event at ``line`` in."""
        self._line = line
        self._now = event.t if isinstance(event, Fact) else self._now
        answered = self._scene.feed(event)
        match event:
            case Generate():
                self._generate(event)
            case Abort() if event.fate != "cancel":
                engine = self._scene.engines.get(event.engine)
                behind = engine is not None and engine.version < self._scene.x
                back = Back(self._scene.x + (not behind), event.fate, behind)
                self._recalled |= dict.fromkeys(event.rollouts, back)
            case Train():
                self._reach(event.version, "train")
            case Segment():
                self._segment(event)
            case Updating():
                self._updating(event)
            case Installed() if event.ok:
                for rollout in [r for r, e in self._scene.live.items() if e == event.engine]:
                    self._mix(event.version, self._newest.get(rollout, -1), event.version)
            case Done() if answered is not None:
                self._answered(answered)
            case Down():
                self._newest = {r: v for r, v in self._newest.items() if r in self._scene.live}
                self._recalled = {r: b for r, b in self._recalled.items() if r in self._scene.live}
            case Publish():
                self._v = event.version
            case Accept() if "dispatch" in self._cycle(self._v + 1).steps:
                self._reach(self._v + 1, "accept")
            case _:
                pass
        if self._due:
            self._settle()

    def cycles(self) -> list[Cycle]:
        """The cycles so far, in the order of their versions."""
        return [
            Cycle(
                version=n,
                steps=sorted(c.steps.values(), key=lambda s: s.line),
                interrupted=c.course.interrupted,
                resent=c.course.resent != "",
                within=c.course.within != "",
            )
            for n, c in sorted(self._cycles.items())
            if c.steps
        ]

    def _cycle(self, version: int) -> Open:
        return self._cycles.setdefault(version, Open(Course(version)))

    def _reach(self, version: int, kind: Kind) -> None:
        """A milestone, unless its cycle has it already."""
        if version > 0 and kind not in self._cycle(version).steps:
            self._due.setdefault((version, kind), (self._line, self._now))

    def _settle(self) -> None:
        """Make steps of the milestones whose labels hold now."""
        for (version, kind), (line, t) in [*self._due.items()]:
            awaited = AWAITS.get(kind, ())
            if any(isinstance(c, awaited) for c in self._scene.open.values()):
                continue
            del self._due[version, kind]
            cycle = self._cycle(version)
            title = self.labeller.title(kind, self._scene, cycle.course)
            labels = self.labeller.labels(self._scene, cycle.course)
            cycle.steps[kind] = Step(kind, title, line, t, labels)

    def _answered(self, command: Command) -> None:
        x = self._scene.x
        match command:
            case Sleep():
                self._reach(x + 1, "sleep")
            case Pause():
                self._reach(x, "pause")
            case Wake() if "kv" in command.tags:
                self._reach(x, "wake")
            case Resume():
                self._reach(x, "resume")
            case Flush(recompute=True) if self._cycle(x).course.within:
                self._cycle(x).course.within = "retracted"
            case _:
                pass

    def _updating(self, event: Updating) -> None:
        command = self._scene.open.get(event.by)
        if isinstance(command, Transfer):
            self._cycle(event.version).course.transport = command.transport
            self._reach(event.version, "update")

    def _segment(self, event: Segment) -> None:
        if event.n:
            self._newest[event.rollout] = event.version
        if event.end == "install":
            engine = self._scene.engines.get(event.engine)
            if engine is not None and engine.version < self._scene.x:
                self._cycle(self._scene.x).course.within = "kept"
            return
        newest = self._newest.pop(event.rollout, -1)
        recalled = self._recalled.pop(event.rollout, None)
        if recalled is not None and event.end == "abort":
            self._back[event.rollout] = replace(recalled, newest=newest)
            self._cycle(recalled.cycle).course.interrupted |= recalled.update

    def _generate(self, event: Generate) -> None:
        for work in event.work:
            if work.rollout in self._back:
                self._resend(work.rollout, event.engine)
            elif not work.have:
                self._reach(self._v + 1, "dispatch")

    def _resend(self, rollout: int, engine: int) -> None:
        """A rollout that had come back is sent again: it resumes once its cycle's update has begun."""
        back = self._back.pop(rollout)
        cycle = self._cycle(back.cycle)
        kept = back.fate == "resume" and back.newest >= 0
        if kept:
            self._newest[rollout] = back.newest
        if not cycle.course.transport:
            return
        if not cycle.course.resent:
            cycle.steps.pop("resume", None)
        self._reach(back.cycle, "resume")
        cycle.course.resent = "resumed" if back.fate == "resume" else "restarted"
        if kept and engine in self._scene.engines:
            self._mix(back.cycle, back.newest, self._scene.engines[engine].version)

    def _mix(self, version: int, old: int, new: int) -> None:
        """A rollout with tokens of ``old`` goes on under ``new``; the newest of several is told."""
        course = self._cycle(version).course
        if -1 < old != new and (course.mixed is None or course.mixed[0] < old):
            course.mixed = (old, new)


def states(manifest: Manifest, events: Iterable[Event]) -> list[Cycle]:
    """The cycles of a history, whole or open."""
    fold = Fold(manifest)
    for line, event in enumerate(events, start=2):
        fold.feed(line, event)
    return fold.cycles()


def pick(cycles: list[Cycle], version: int | None = None) -> Cycle:
    """The cycle that produced ``version``; without one, the first of those that show the most.

    Interruptions, and requests that live through the update, count before steps, then a batch that
    the trainer waited for; and the first cycle, which begins from nothing, comes last among its
    equals. Raises InputError when there is none.
    """
    if version is not None:
        for cycle in cycles:
            if cycle.version == version:
                return cycle
        there = f"{cycles[0].version} to {cycles[-1].version}" if cycles else "none"
        raise InputError(f"no cycle leads to version {version}; there are {there}")
    if not cycles:
        raise InputError("the history has no cycle: nothing was dispatched")
    return max(cycles, key=_shows)


def _shows(cycle: Cycle) -> tuple[int, int, bool, bool]:
    kinds = [s.kind for s in cycle.steps]
    waited = "accept" in kinds and "train" in kinds and kinds.index("accept") < kinds.index("train")
    return max(cycle.interrupted + cycle.resent, 2 * cycle.within), len(kinds), waited, cycle.version > 1
