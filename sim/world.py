"""The simulated world: it stamps facts with virtual time and executes the controller's commands."""

from collections.abc import Callable

import simpy
from msgspec import Struct, to_builtins
from msgspec.structs import astuple, replace

from rlsched.commands import Command, Load, Offload, Stop, Timer, Train, Transfer, Work
from rlsched.controller import Controller
from rlsched.errors import InputError
from rlsched.facts import AnyFact, Begin, Done, End, Installed, Scored, Segment
from rlsched.history import Line
from rlsched.keyed import uniform
from rlsched.manifest import Manifest, manifest
from rlsched.notes import Admit, Cancel, Drop, Note, Reject
from rlsched.policy import Policy
from rlsched.session import Session

from .batching import Limits
from .clock import NANOSECOND, Clock, ps
from .costs import StepCosts
from .engine import Engine
from .memory import at_setup
from .scenario import GB, Crash, Scenario
from .server import Server
from .trainer import Trainer


class Group(Struct):
    """What the world knows of a group: enough to draw its lengths and its score."""

    prompt: int
    attempt: int
    first: int
    launch_n: int


class World:
    """One simulated run. ``record`` gets every line of the history after the manifest."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        seed: int,
        record: Callable[[Line], None],
        engine: Callable[[Limits, StepCosts], Engine] = Engine,
    ) -> None:
        self.scenario = scenario
        self.engine = engine
        self.clock = Clock(seed)
        self.manifest = describe(scenario, policy, seed)
        self.devices = self.manifest.devices
        self._seed = seed
        self._groups: dict[int, Group] = {}
        self._group_of: dict[int, int] = {}
        self._lengths: dict[int, tuple[int, int]] = {}
        self._session = Session(Controller(policy, scenario.shape, seed), record)
        self.servers = {d.engine: Server(self, d.engine, d.id) for d in self.devices if d.engine is not None}
        self._trainer = Trainer(self)
        self._latency = max(NANOSECOND, ps(scenario.control.latency_s))

    def run(self) -> End:
        """Run to the end; how it ended. A run in which nothing can happen any more has stalled."""
        for resident in at_setup(self.scenario, self.devices):
            self.post(resident)
        size = round(self.scenario.transport.version_gb * GB)
        for engine in self.servers:
            self.post(Installed(0, 0, engine, 0, size))
        self.post(Begin(0))
        for crash in self.scenario.faults.crashes:
            if crash.engine not in self.servers:
                raise InputError(f"faults.crashes names engine {crash.engine}; there are {len(self.servers)}")
            self._crash(crash)
        while self._session.ended is None:
            try:
                self.clock.env.step()
            except simpy.core.EmptySchedule:
                self.post(End(self.clock.stamp, ok=False, why=self._stall(), stalled=True))
        return self._session.ended

    def post(self, fact: AnyFact) -> None:
        """Record a fact, and set in motion what the controller answers. Nothing acts in this instant."""
        for line in self._session.post(fact):
            self._take(line)
        faults = self.scenario.faults
        if faults.repeat and isinstance(fact, Segment | Scored | Done) and self._repeats(fact):
            self.clock.call(ps(faults.repeat_s), "repeat", lambda: self._tell_again(fact))

    def _repeats(self, fact: Segment | Scored | Done) -> bool:
        words = tuple(map(str, astuple(fact)[1:]))
        return uniform(self._seed, "repeat", *words) < self.scenario.faults.repeat

    def _tell_again(self, fact: Segment | Scored | Done) -> None:
        for line in self._session.post(replace(fact, t=self.clock.stamp)):
            self._take(line)

    def lengths(self, work: Work) -> tuple[int, int]:
        """Prompt tokens and new tokens of a rollout."""
        lengths = self._lengths.get(work.rollout)
        if lengths is None:
            load, budget = self.scenario.workload, self.scenario.shape.budget
            new = load.output_tokens(self._seed, work.prompt, work.sample, work.attempt, budget)
            lengths = self._lengths[work.rollout] = load.prompt_tokens(self._seed, work.prompt), new
        return lengths

    def tokens(self, rollout: int) -> tuple[int, int]:
        """Prompt and output tokens of a rollout that was generated."""
        return self._lengths[rollout]

    def trained(self, groups: list[int]) -> None:
        """Groups that nothing can ask for any more."""
        for group in groups:
            self._forget(group)

    def finished(self, rollout: int) -> None:
        """Score a rollout after the latency of its reward."""
        group = self._groups.get(self._group_of.get(rollout, -1))
        if group is None:
            return
        keep = self.scenario.workload.kept(self._seed, group.prompt, group.attempt)
        delay = ps(self.scenario.workload.reward_s)
        if delay:
            entity = f"reward-{rollout}"
            self.clock.call(delay, entity, lambda: self.post(Scored(self.clock.stamp, rollout, keep=keep)))
        else:
            self.post(Scored(self.clock.stamp, rollout, keep=keep))

    def _crash(self, crash: Crash) -> None:
        server, down = self.servers[crash.engine], ps(crash.down_s)
        self.clock.call(ps(crash.at_s), f"crash-{crash.engine}", lambda: server.crash(down))

    def _take(self, line: Command | Note) -> None:
        match line:
            case Admit():
                self._groups[line.group] = Group(line.prompt, line.attempt, line.first, line.launch_n)
                for rollout in range(line.first, line.first + line.launch_n):
                    self._group_of[rollout] = line.group
            case Reject() | Drop() | Cancel():
                self._forget(line.group)
            case Load() | Offload() | Transfer():
                self._trainer.take(line)
            case Train():
                self._trainer.take(line)
            case Timer():
                delay = max(NANOSECOND, line.at * NANOSECOND - self.clock.now)
                self.clock.call(delay, "timer", lambda: self.post(Done(self.clock.stamp, line.id)))
            case Stop():
                end = lambda: self.post(End(self.clock.stamp, line.id, not line.why, line.why))  # noqa: E731
                self.clock.call(self._latency, "stop", end)
            case Command():
                self.servers[line.engine].take(line)  # type: ignore[attr-defined]

    def _forget(self, group: int) -> None:
        gone = self._groups.pop(group)
        for rollout in range(gone.first, gone.first + gone.launch_n):
            del self._group_of[rollout]
            self._lengths.pop(rollout, None)

    def _stall(self) -> str:
        ledger = self._session.controller.ledger
        waits = [f"{who} waits: {on}" for who, on in ledger.waits.items()]
        if ledger.shape.prompts is not None and ledger.cursor >= ledger.shape.prompts:
            waits.append(f"all {ledger.shape.prompts} prompts were used")
        waits += [f"{type(c).__name__} {c.id} has no answer" for c in ledger.open.values()]
        return "stalled: " + ("; ".join(waits) or "nothing is left to happen")


def describe(scenario: Scenario, policy: Policy, seed: int) -> Manifest:
    """The manifest of a simulated run."""
    devices = policy.layout(scenario.shape)
    return manifest(
        "sim",
        policy,
        scenario.shape,
        seed,
        capacity=[round(scenario.memory.device_gb * GB)] * len(devices),
        version_bytes=round(scenario.transport.version_gb * GB),
        workload=to_builtins(scenario.workload),
        model={"costs": {t: to_builtins(getattr(scenario, t)) for t in ("engine", "trainer", "transport", "memory")}},
        labels={"device": "GPU", "ipc": "CUDA IPC", "broadcast": "NCCL"},
    )
