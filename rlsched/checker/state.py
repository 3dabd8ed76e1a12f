"""What the checker remembers of the history so far.

Bounded by what is under way: answered commands, terminal groups and their rollouts are forgotten.
Group and rollout ids count up, so that an id below the next one that isn't here is one that is over.
"""

from typing import Literal

from msgspec import Struct, field

from ..commands import AnyCommand, Transfer
from ..facts import End
from ..manifest import Manifest
from ..notes import Kind
from .report import Report, Seen

REMEMBERED = 4096
"""Terminal groups whose last event is kept to show what came too late for them, and facts that may be repeated."""


class Order(Struct):
    """A command without an answer."""

    seen: Seen
    event: AnyCommand
    left: set[int] = field(default_factory=set)
    """What must be reported before it may be done: rollouts, or engines of a Transfer."""
    steps: set[str] = field(default_factory=set)
    """Train: the same."""
    tokens: int = 0
    """Train: tokens of its rollouts."""


class Group(Struct):
    """An admitted group that is not terminal, or has rollouts inside an engine."""

    id: int
    admit: Seen
    prompt: int
    attempt: int
    need_n: int
    rollouts: range
    kind: Kind
    state: Literal["running", "accepted", "consumed", "over"] = "running"
    kept: int = 0
    """Rollouts that were scored and kept."""
    failed: Seen | None = None
    """What lets it be rejected: an error, or a score that a filter refused."""
    last: Seen | None = None
    """The event that put it in its state."""


class Kept(Struct, frozen=True):
    """The tokens of a rollout at some time; see ``Rollout``."""

    tokens: int = 0
    oldest: Seen | None = None
    newest: Seen | None = None
    low: int = -1
    high: int = -1


NOTHING = Kept()
"""No token."""


class Rollout(Struct):
    """A rollout of a remembered group."""

    id: int
    group: Group
    state: Literal["waiting", "live", "finished", "scored", "failed", "cancelled"] = "waiting"
    order: Order | None = None
    """The Generate under which it is live, …"""
    engine: int = -1
    """… and where."""
    aborts: list[Order] = []
    """Unanswered aborts that target it."""
    tokens: int = 0
    """Tokens kept."""
    oldest: Seen | None = None
    newest: Seen | None = None
    """The segments of its first oldest and last newest token."""
    low: int = -1
    high: int = -1
    """Their versions; -1 before the first token."""
    sent: Kept = NOTHING
    """What it had when its request was sent: should the engine go down, it has that again."""
    kv: int = 0
    """The oldest version that the KV of its request can be of."""
    standing: Seen | None = None
    """The segment that shows that its live request stands on KV."""


class Making(Struct):
    """A version that is trained, or being trained, and not published."""

    trainings: list[Seen] = []
    groups: int = 0
    """Groups consumed by them."""


class Update(Struct):
    """An update that an engine is taking in."""

    begun: Seen
    command: Transfer
    buckets: int = 0
    bytes: int = 0


class Engine(Struct):
    """What is true of an engine."""

    id: int
    devices: list[int]
    up: bool = True
    version: int = -1
    """Installed whole; -1: none."""
    installed: Seen | None = None
    updating: Update | None = None
    stale: Seen | None = None
    """The install after which its KV cache was not flushed."""
    asleep: dict[str, Seen] = field(default_factory=dict)
    """The sleep that took each tag which is not awake."""
    discarded: Seen | None = None
    """The sleep that threw its weights away."""
    pause: Seen | None = None
    """The Pause since the last Resume."""
    still: bool = False
    """That pause was acknowledged."""
    live: set[int] = field(default_factory=set)
    """Rollouts inside."""


class State(Struct):
    """The history so far, as far as any invariant still needs it."""

    manifest: Manifest
    report: Report = field(default_factory=Report)
    now: int = 0
    newest: Seen | None = None
    """The last fact."""
    begun: Seen | None = None
    stopped: Seen | None = None
    failed: Seen | None = None
    """The first Done that wasn't ok."""
    ended: End | None = None
    fallen: Seen | None = None
    """The last Down."""

    told: dict[tuple[object, ...], None] = field(default_factory=dict)
    """The last segments, scores and answers, without their times."""
    commands: int = 0
    """The last command id."""
    open: dict[int, Order] = field(default_factory=dict)
    waits: dict[str, Seen] = field(default_factory=dict)

    engines: dict[int, Engine] = field(default_factory=dict)
    memory: dict[int, dict[str, Seen]] = field(default_factory=dict)
    """The last Resident of each part on each device."""
    capacity: dict[int, int] = field(default_factory=dict)
    trainers: list[int] = field(default_factory=list)
    """Devices that the trainer can have."""
    reporting: set[str] = field(default_factory=set)
    """Owners that report what they hold."""
    sizes: dict[tuple[int, str], Seen] = field(default_factory=dict)
    """The first Resident of each part on each device that was more than nothing: it never has another size."""
    away: dict[str, Seen] = field(default_factory=dict)
    """Trainer parts that were offloaded."""

    groups: dict[int, Group] = field(default_factory=dict)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    over: dict[int, Seen] = field(default_factory=dict)
    """The last event of groups that became terminal lately."""
    line: dict[int, Group] = field(default_factory=dict)
    """Training groups that run or are buffered, by ordinal."""
    running: int = 0
    """How many of them run."""
    next_group: int = 0
    next_rollout: int = 0
    requeued: dict[int, int] = field(default_factory=dict)
    """The attempt that each requeued prompt is waiting for."""
    live: set[int] = field(default_factory=set)
    """Training rollouts inside any engine."""

    u: int = 0
    trained: int = 0
    """Versions trained."""
    index: int = 0
    """Batches that the next version has consumed."""
    published: int = 0
    published_by: Seen | None = None
    unpublished: dict[int, Making] = field(default_factory=dict)
    """Versions that aren't out."""

    def broken(self, id: str, statement: str, *witness: Seen | None) -> None:
        """Report a violation of invariant ``id``."""
        self.report.add(id, statement, tuple(seen for seen in witness if seen is not None))

    def again(self, *words: object) -> bool:
        """Whether a fact of these ``words`` was told lately, and so is a repetition; remembers them."""
        if words in self.told:
            self.report.repeated += 1
            return True
        self.told[words] = None
        if len(self.told) > REMEMBERED:
            del self.told[next(iter(self.told))]
        return False

    def fate(self, group: int) -> tuple[str, Seen | None]:
        """Why ``group`` isn't remembered, in words, and the event that ended it if that is."""
        if not 0 <= group < self.next_group:
            return "was never admitted", None
        return "is over", self.over.get(group)

    def finish(self, group: Group, seen: Seen) -> None:
        """``group`` became terminal: forget it, but for the rollouts that are still inside an engine."""
        group.state, group.last = "over", seen
        self.line.pop(group.id, None)
        self.over[group.id] = seen
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]
        del self.groups[group.id]
        for r in group.rollouts:
            rollout = self.rollouts.get(r)
            if rollout is not None and rollout.order is None:
                del self.rollouts[r]


def first(manifest: Manifest) -> State:
    """The state before the first event."""
    state = State(manifest)
    for device, capacity in zip(manifest.devices, manifest.capacity, strict=False):
        state.capacity[device.id] = capacity
    for device in manifest.devices:
        if device.engine is not None:
            state.engines.setdefault(device.engine, Engine(device.engine, [])).devices.append(device.id)
        if device.trainer:
            state.trainers.append(device.id)
    return state
