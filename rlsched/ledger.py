"""The books of a controller: all that a policy may read, and all that a checkpoint holds.

Ids only, never object references, so that the encoded ledger is the checkpoint.
"""

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct, field

from .commands import AbortFate, AnyCommand, Tag
from .decisions import Batch, Install
from .notes import Kind
from .shape import Device, Shape
from .stages import Track

GroupState = Literal["running", "accepted", "consumed", "closed"]
RolloutState = Literal["waiting", "live", "interrupted", "finished", "scored"]


class Span(Struct):
    """Tokens ``n`` of one rollout under one installed version."""

    version: int
    n: int


class Rollout(Struct):
    """One sample of a group."""

    id: int
    group: int
    sample: int
    state: RolloutState = "waiting"
    engine: int | None = None
    """Where it is live, or was last."""
    by: int = 0
    """The ``Generate`` under which it is live, or was last."""
    cause: Literal["new", "resume", "restart", "retry"] = "new"
    """Why it waits for an engine."""
    spans: list[Span] = []
    sent: int = 0
    """Tokens that were sent along with the request under which it is live, or was last."""
    told: int = -1
    """Version of the last tokens told of that request as it lived through an install; -1: it didn't."""
    interrupts: int = 0

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(span.n for span in self.spans)

    @property
    def oldest(self) -> int | None:
        """Version of the oldest token; None before the first."""
        return min((span.version for span in self.spans), default=None)


class Group(Struct):
    """One prompt with its samples: the unit of admission and selection."""

    id: int
    """The ordinal: place in admission order."""
    prompt: int
    attempt: int
    version: int
    """Published version at admission."""
    need_n: int
    launch_n: int
    first: int
    tags: list[str]
    kind: Kind
    state: GroupState = "running"
    scored: list[int] = []
    """Rollouts that finished and have a reward, in that order."""
    begun: int = -1
    """Nanosecond of the first dispatch."""
    parked: int = -1
    """Published version under which it was parked; its rollouts go on under a later one."""

    @property
    def rollouts(self) -> range:
        """Ids of its rollouts."""
        return range(self.first, self.first + self.launch_n)


class Engine(Struct):
    """One rollout engine, as the controller knows it."""

    id: int
    installed: int = -1
    """Version it holds whole; -1: none, or torn."""
    serving: bool = True
    """Up; False while it is down."""
    joining: bool = False
    """It came up and holds no version yet."""
    open: bool = True
    """Takes new requests; closed before an interruption, opened when it ends."""
    paused: bool = False
    awake: set[Tag] = field(default_factory=lambda: {"weights", "kv"})
    live: set[int] = field(default_factory=set)
    """Rollouts physically inside, those of rejected groups included."""

    @property
    def takes_requests(self) -> bool:
        """A request sent now would be computed."""
        return self.serving and self.open and not self.paused and len(self.awake) == 2


class Counters(Struct):
    """Counts of training groups since the run began."""

    admitted: int = 0
    accepted: int = 0
    """Finished and kept; drops that refund leave it."""
    rejected: int = 0
    dropped: int = 0
    cancelled: int = 0
    consumed: int = 0
    dispatched: int = 0
    """Rollouts sent to an engine, resumed ones counted again."""
    ignored: int = 0
    """Late and repeated facts."""


class Prompt(Struct):
    """A prompt that waits for another attempt."""

    id: int
    attempt: int


class Ledger(Struct):
    """See the glossary for the terms; every count is of *training* groups unless it says otherwise."""

    shape: Shape
    seed: int
    devices: list[Device]
    engines: dict[int, Engine]
    ready: list[int] = []
    """Engines that take requests."""
    now: int = 0
    begun: bool = False
    closing: bool = False
    """The last version is out: nothing new begins."""
    stopped: bool = False
    """``Stop`` was issued."""

    u: int = 0
    """Optimizer steps made."""
    x: int = 0
    """Versions trained."""
    v: int = 0
    """The published version."""
    index: int = 0
    """Batches that the version in the making has consumed."""

    groups: dict[int, Group] = field(default_factory=dict)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    running: dict[int, None] = field(default_factory=dict)
    """Groups admitted and not yet accepted, rejected or cancelled, in admission order."""
    buffer: dict[int, int] = field(default_factory=dict)
    """Accepted groups not yet consumed, in order of acceptance, with the nanosecond of it."""
    unpublished: int = 0
    """Groups consumed that are in no published version yet."""
    waiting: list[int] = field(default_factory=list)
    """Rollouts that wait for an engine, first come first."""
    interrupted: list[int] = field(default_factory=list)
    recalled: dict[int, AbortFate] = field(default_factory=dict)
    """Live rollouts that an ``Abort`` is on its way to, with their fate."""
    counters: Counters = field(default_factory=Counters)
    at_publish: Counters = field(default_factory=Counters)
    """The counters as they stood at the last publish."""

    cursor: int = 0
    """The lowest prompt that was never admitted."""
    taken: set[int] = field(default_factory=set)
    """Fresh prompts admitted out of turn, above the cursor."""
    again: dict[str, list[Prompt]] = field(default_factory=dict)
    """Prompts that wait for another attempt, by queue."""

    batch: Batch | None = None
    """What the trainer has, or is about to get."""
    update: Install | None = None
    """What is on its way to the engines."""
    holders: dict[int, Literal["engine", "trainer"]] = field(default_factory=dict)
    """Who holds each device."""
    tracks: dict[str, Track] = field(default_factory=dict)
    open: dict[int, AnyCommand] = field(default_factory=dict)
    """Commands without an answer."""
    pending: dict[int, int] = field(default_factory=dict)
    """Rollouts of each ``Generate`` that have not come back."""
    expired: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """The state in which the expire slot was last asked, by trigger."""
    waits: dict[str, str] = field(default_factory=dict)
    wait_since: dict[str, int] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)
    """Nanoseconds that each actor has waited."""
    states: dict[str, Any] = field(default_factory=dict)
    """State of each slot, by name."""
    commands: int = 0
    next_group: int = 0
    next_rollout: int = 0

    @property
    def trainer_free(self) -> bool:
        """No batch is being trained and no update is on its way: another batch may be selected."""
        return self.batch is None and self.update is None and not self.tracks

    @property
    def accepted(self) -> int:
        """Cumulative groups finished and kept."""
        return self.counters.accepted

    def age(self, group: int) -> int:
        """Age that ``group`` would have if training on it began now, in versions."""
        record = self.groups[group]
        oldest = [self.rollouts[r].oldest for r in record.scored[: record.need_n]]
        return self.x - min((o for o in oldest if o is not None), default=self.x)

    def upcoming(self, queue: str = "retry") -> Iterator[Prompt]:
        """Prompts in the order in which they should be admitted: the queue's own, then fresh ones."""
        yield from self.again.get(queue, ())
        for prompt in range(self.cursor, self.shape.prompts or 1 << 62):
            if prompt not in self.taken:
                yield Prompt(prompt, 0)

    def lost(self) -> list[int]:
        """Rollouts that a crash took away and that no engine has got since; those of parked groups have time."""
        back = [self.rollouts[r] for r in (*self.waiting, *self.interrupted)]
        return [r.id for r in back if r.cause == "retry" and self.groups[r.group].parked != self.v]

    def serving(self) -> list[int]:
        """Engines that are up."""
        return [e.id for e in self.engines.values() if e.serving]

    def behind(self) -> list[int]:
        """Engines that should get the trained version: it is new, or they came up, or are awake without it.

        One whose device the trainer holds is in no need of a version that is out already.
        """
        if self.x > self.v:
            return [e.id for e in self.engines.values() if e.serving and e.installed != self.x]
        theirs = {d.engine for d in self.devices if self.holders[d.id] == "engine"}
        return [e.id for e in self.engines.values() if e.serving and e.installed != self.x and e.id in theirs]
