"""A simulated engine behind its control channel: commands become its inputs, its outcomes facts."""

from collections.abc import Callable
from typing import Protocol

from rlsched.commands import Abort, Command, Flush, Generate, Pause, Resume, Sleep, Wake, Work
from rlsched.facts import AnyFact, Done, Down, Resident, Segment, Up

from . import engine as core
from .batching import Limits
from .clock import NANOSECOND, Clock, ps
from .costs import StepCosts
from .memory import engine_bytes
from .scenario import GB, Scenario


class Host(Protocol):
    """What a server needs of its world."""

    clock: Clock
    scenario: Scenario
    engine: Callable[[Limits, StepCosts], core.Engine]

    def post(self, fact: AnyFact) -> None:
        """Record a fact and act on what follows."""

    def lengths(self, work: Work) -> tuple[int, int]:
        """Prompt tokens and new tokens of a rollout."""

    def finished(self, rollout: int) -> None:
        """A rollout made its last token: score it."""


class Server:
    """One engine. Commands act ``latency`` after they were issued, in the order of issue."""

    def __init__(self, world: Host, id: int, device: int) -> None:
        costs = world.scenario.engine
        self.id = id
        self.version = 0
        """Version installed; -1 while an update is under way, or after the weights were discarded."""
        self._old = 0
        """The last version that was installed."""
        self.life = 0
        """Counts crashes: what an earlier life began never ends."""
        self.up = True
        self._world = world
        self._device = device
        self._name = f"engine-{id}"
        self._costs = StepCosts.from_seconds(step=costs.step_s, seq=costs.seq_s, kv=costs.kv_s, prompt=costs.prompt_s)
        self._limits = Limits(
            max_num_seqs=costs.max_num_seqs,
            max_batch_tokens=costs.max_batch_tokens,
            num_blocks=costs.kv_blocks,
            block_size=costs.block_size,
        )
        self._fresh()
        self._latency = max(NANOSECOND, ps(world.scenario.control.latency_s))
        self._submit = ps(world.scenario.control.submit_s)
        self._clear = 0

    def _fresh(self) -> None:
        """Nothing inside."""
        self._engine = self._world.engine(self._limits, self._costs)
        self._due: int | None = None
        self._cause: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._have: dict[int, int] = {}
        self._acks: dict[int, int] = {}
        self._pauses: set[int] = set()
        self._told: dict[int, int] = {}
        """New tokens told so far, of requests that were inside a pause."""
        self._stale: dict[int, int] = {}
        """Version that computed the first KV of requests that live through an install with it."""

    def crash(self, down: int) -> None:
        """Lose everything, and come back empty after ``down`` picoseconds. One that is down stays so."""
        if not self.up:
            return
        self.up, self.version = False, -1
        self.life += 1
        self._fresh()
        world = self._world
        world.post(Down(world.clock.stamp, self.id, "crashed"))

        def rise() -> None:
            self.up = True
            world.post(Up(world.clock.stamp, self.id))

        world.clock.call(down, self._name, rise)

    def _call(self, delay: int, function: Callable[[], object]) -> None:
        """Call ``function`` after ``delay`` picoseconds, if the engine is still in this life."""
        life = self.life
        self._world.clock.call(delay, self._name, lambda: function() if life == self.life else None)

    @property
    def preemptions(self) -> int:
        """Requests that lost their KV for want of blocks, in this life."""
        return self._engine.counters.preemptions

    def begin_update(self) -> None:
        """The weights are torn from here on."""
        self.version = -1

    def end_update(self, version: int) -> None:
        """``version`` is installed. Who stands on KV goes on with it."""
        for request in self._engine.running:
            self._stale.setdefault(request, self._old)
        self.version = self._old = version

    def take(self, command: Command) -> None:
        """Send ``command`` down the channel. None overtakes another."""
        now = self._world.clock.now
        self._clear = max(self._clear, now + self._latency + (self._submit if isinstance(command, Generate) else 0))
        self._call(self._clear - now, lambda: self._act(command))

    def _act(self, command: Command) -> None:
        now, control = self._world.clock.now, self._world.scenario.control
        match command:
            case Generate():
                self._left[command.id] = len(command.work)
                for work in command.work:
                    prompt, new = self._world.lengths(work)
                    self._cause[work.rollout] = command.id
                    self._have[work.rollout] = work.have
                    self._engine.submit(now, core.Request(work.rollout, prompt, new - work.have, work.have))
            case Abort():
                self._control(core.Abort(command.id, tuple(command.rollouts)), control.abort_s)
            case Pause():
                self._pauses.add(command.id)
                self._control(core.Pause(command.id), control.pause_s)
            case Resume():
                self._control(core.Resume(command.id), control.resume_s)
            case Flush(recompute=True):
                self._control(core.Retract(command.id), control.flush_s)
            case Flush():
                why = "requests hold KV blocks" if self._engine.used_blocks else ""
                self._later(ps(control.flush_s), Done(0, command.id, not why, why))
            case Sleep():
                self._engine.drop_kv()
                memory = self._world.scenario.memory
                kept = engine_bytes(self._world.scenario, "weights") if command.level == 1 else 0
                if command.level == 2:
                    self.version = -1
                self._resident(command.id, ["weights", "kv"], memory.sleep_s + kept / GB / memory.offload_gbps, 0)
            case Wake():
                memory = self._world.scenario.memory
                seconds = sum(memory.wake_weights_s if t == "weights" else memory.wake_kv_s for t in command.tags)
                self._resident(command.id, list(command.tags), seconds, 1)
        self._schedule()

    def _control(self, control: core.Control, seconds: float) -> None:
        self._acks[control.control] = ps(seconds)
        self._engine.control(self._world.clock.now, control)

    def _resident(self, by: int, parts: list[str], seconds: float, times: int) -> None:
        def tell() -> None:
            world = self._world
            for part in parts:
                size = engine_bytes(world.scenario, "weights" if part == "weights" else "kv") * times
                world.post(Resident(world.clock.stamp, by, self._device, "engine", part, size))  # type: ignore[arg-type]
            world.post(Done(world.clock.stamp, by))

        self._call(ps(seconds), tell)

    def _later(self, delay: int, done: Done) -> None:
        world = self._world
        self._call(delay, lambda: world.post(Done(world.clock.stamp, done.cmd, done.ok, done.why)))

    def _schedule(self) -> None:
        """Have the engine's next boundary fired, unless it already will be."""
        due = self._engine.next_t
        if due is not None and due != self._due:
            self._due = due
            engine = self._engine
            self._world.clock.call_last(due - self._world.clock.now, self._name, lambda: self._fire(engine, due))

    def _fire(self, engine: core.Engine, due: int) -> None:
        if engine is not self._engine or engine.next_t != due or self._due != due:
            return
        self._due = None
        outcomes = self._engine.boundary(due)
        self._schedule()
        stands = False
        for outcome in outcomes:
            match outcome:
                case core.Finished():
                    self._end(outcome.id, outcome.tokens, "stop")
                case core.Aborted():
                    self._end(outcome.id, outcome.tokens, "abort")
                case core.Preempted():
                    self._stale.pop(outcome.id, None)
                case core.Acked():
                    stands |= outcome.control in self._pauses
                    self._pauses.discard(outcome.control)
                    self._later(self._acks.pop(outcome.control), Done(0, outcome.control))
        if stands:
            self._tell()

    def _tell(self) -> None:
        """The engine stands still: tell what live requests have made of this version."""
        world = self._world
        for request in sorted(self._cause):
            made = self._engine.tokens(request)
            n = made - self._told.get(request, 0)
            if n:
                self._told[request] = made
                kv = self._stale.get(request, self.version)
                by = self._cause[request]
                world.post(Segment(world.clock.stamp, by, request, self.id, self.version, n, "install", kv))

    def _end(self, rollout: int, n: int, end: str) -> None:
        world = self._world
        by = self._cause.pop(rollout)
        have = self._have.pop(rollout) + n
        n -= self._told.pop(rollout, 0)
        version = self._old if self.version < 0 else self.version
        kv = self._stale.pop(rollout, version)
        if end == "stop" and have >= world.scenario.shape.budget:
            end = "length"
        stamp = world.clock.stamp
        world.post(Segment(stamp, by, rollout, self.id, version, n, end, kv))  # type: ignore[arg-type]
        self._left[by] -= 1
        if not self._left[by]:
            del self._left[by]
            world.post(Done(stamp, by))
        if end != "abort":
            world.finished(rollout)
