"""Histories to check: simulated ones of whole runs, and scripts that say in few lines what happens."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args

from msgspec.structs import replace

from rlsched.checker import Checker, Report
from rlsched.commands import (
    Flush,
    Generate,
    Stop,
    Train,
    Transfer,
    Wake,
    Work,
)
from rlsched.decisions import Batch, Start
from rlsched.decisions import Wait as Later
from rlsched.facts import (
    Begin,
    Bucket,
    Done,
    Down,
    End,
    Installed,
    Observed,
    Phase,
    Resident,
    Scored,
    Segment,
    Trained,
    Up,
    Updating,
)
from rlsched.history import Event
from rlsched.ledger import Ledger
from rlsched.manifest import Manifest, manifest
from rlsched.notes import Accept, Admit, Publish
from rlsched.policy import Policy, areal_async, verl_hybrid
from rlsched.shape import Promises, Shape
from rlsched.sim.scenario import load
from rlsched.sim.world import World
from rlsched.slots.admit import Cap, starts
from rlsched.slots.expire import AgeBound
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import LeastLoaded
from rlsched.slots.select import FirstFinished, InOrder

History = tuple[Manifest, list[Event]]

KINDS: tuple[type, ...] = get_args(Event)
"""Every kind of event."""


def report(history: History, open: bool | None = None) -> Report:
    """What the checker says of ``history``; it is open when it has no End, unless told otherwise."""
    checker = Checker(history[0])
    for line, event in enumerate(history[1], start=2):
        checker.feed(line, event)
    return checker.close(not isinstance(history[1][-1], End) if open is None else open)


# ---- whole runs


class Surplus(Cap, frozen=True):
    """Starts a sample more than a group needs."""

    def decide(self, state: None, ledger: Ledger) -> list[Start]:
        return starts(ledger, len(super().decide(state, ledger)), 1)


class Patient(FirstFinished, frozen=True):
    """Lets finished groups lie for a second, and so needs timers."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Later:
        choice = super().decide(state, ledger)
        if isinstance(choice, Later):
            return choice
        ripe = max(ledger.buffer[g] for g in choice.groups) + 10**9
        return choice if ledger.now >= ripe else Later("the groups are not ripe", ripe)


def _runs() -> dict[str, tuple[Policy, list[str]]]:
    areal = areal_async()
    small = ["shape.b=2", "shape.samples=2", "shape.engines=2", "shape.budget=600", "shape.steps=4"]
    tight = ["transport.version_gb=15.2", "memory.kv_gb=20.0", "memory.device_gb=100"]
    return {
        "verl": (verl_hybrid(), [*small, "shape.k=2", *tight]),
        "areal": (areal, [*small, "workload.reward_s=0.5"]),
        "ahead": (replace(areal, admit=Cap(eta=1), publish=EveryVersion(bucket_mb=4096)), small),
        "in order": (replace(areal, admit=Cap(eta=2), select=InOrder()), [*small, "shape.k=2"]),
        "restart": (replace(areal, admit=Cap(eta=1, C=3), publish=EveryVersion(fate="restart")), small),
        "keep": (replace(areal, admit=Cap(eta=1, C=3), publish=EveryVersion(fate="keep")), small),
        "retract": (replace(areal, admit=Cap(eta=1, C=3), publish=EveryVersion(fate="retract")), small),
        "surplus": (
            replace(areal, admit=Surplus(eta=2), expire=AgeBound(bound=0, requeue=True), route=LeastLoaded()),
            [*small, "workload.reject=0.2", "shape.steps=6"],
        ),
        "patient": (replace(areal, admit=Cap(eta=1), select=Patient()), small),
    }


RUNS = tuple(_runs())
"""Names of the simulated histories."""


@cache
def simulated(name: str, seed: int = 0) -> History:
    """A simulated run's whole history."""
    policy, changes = _runs()[name]
    events: list[Any] = []
    world = World(load(None, changes), policy, seed, events.append)
    world.run()
    return world.manifest, events


# ---- scripts


class Script:
    """A history told in words. A fact comes a nanosecond after the one before; ids count up by themselves.

    The defaults make a run of one version from one group of one sample, on engines with 10 bytes of
    weights and 20 of KV on devices of 100.
    """

    def __init__(self, engines: int = 1, steps: int = 1, promises: Promises | None = None, **shape: int) -> None:
        numbers = {"b": 1, "k": 1, "samples": 1, "budget": 8, **shape}
        plan = Shape(engines=engines, steps=steps, **numbers)
        facts = manifest("sim", areal_async(), plan, 0, version_bytes=10, capacity=[100] * (engines + 1))
        self.manifest = replace(facts, promises=promises or Promises())
        self.events: list[Any] = []
        self.ids = self.now = self.groups = self.rollouts = self.u = 0
        self.home: dict[int, tuple[int, int]] = {}
        """Command and engine of each live rollout."""

    @property
    def history(self) -> History:
        return self.manifest, self.events

    def fact(self, kind: Callable[..., Any], *fields: Any, **more: Any) -> None:
        self.now += 1
        self.events.append(kind(self.now, *fields, **more))

    def ask(self, kind: Callable[..., Any], *fields: Any) -> int:
        self.ids += 1
        self.events.append(kind(self.ids, *fields))
        return self.ids

    def note(self, note: Any) -> None:
        self.events.append(note)

    def do(self, kind: Callable[..., Any], *fields: Any) -> int:
        """Ask, and have it done at once."""
        id = self.ask(kind, *fields)
        self.fact(Done, id)
        return id

    def begin(self) -> "Script":
        for device in self.manifest.devices:
            if device.engine is not None:
                self.fact(Resident, 0, device.id, "engine", "weights", 10)
                self.fact(Resident, 0, device.id, "engine", "kv", 20)
                self.fact(Installed, 0, device.engine, 0, 10)
            else:
                self.fact(Resident, 0, device.id, "trainer", "parameters", 10)
                self.fact(Resident, 0, device.id, "trainer", "optimizer", 30)
        self.fact(Begin)
        return self

    def admit(self, samples: int = 1, need: int | None = None, version: int = 0, **more: Any) -> int:
        """Admit the next group; its id."""
        id, first = self.groups, self.rollouts
        self.groups += 1
        self.rollouts += samples
        self.note(Admit(id, more.pop("prompt", id), version, need or samples, samples, first, **more))
        return id

    def send(self, *rollouts: int, engine: int = 0, have: int = 0, prompt: int = 0, attempt: int = 0) -> int:
        """Dispatch rollouts of ``prompt``, whose first rollout has its number, in one command."""
        work = [Work(r, prompt, r - prompt, attempt, have) for r in rollouts]
        id = self.ask(Generate, engine, work)
        self.home |= dict.fromkeys(rollouts, (id, engine))
        return id

    def tokens(self, rollout: int, n: int = 4, version: int = 0, end: str = "stop", kv: int | None = None) -> None:
        """A segment of a live rollout."""
        by, engine = self.home[rollout]
        self.fact(Segment, by, rollout, engine, version, n, end, version if kv is None else kv)

    def finish(self, rollout: int, n: int = 4, version: int = 0) -> None:
        """The one segment of a rollout that was sent alone, its command's answer and its score."""
        self.tokens(rollout, n, version)
        self.fact(Done, self.home[rollout][0])
        self.fact(Scored, rollout)

    def make(self, version: int = 0, engine: int = 0) -> int:
        """Admit, generate and accept the next group, of one sample; its id."""
        group = self.admit(version=version)
        self.send(group, engine=engine, prompt=group)
        self.finish(group, version=version)
        self.note(Accept(group))
        return group

    def train(self, version: int, *groups: int, tokens: int = 4, index: int = 0, last: bool = True) -> None:
        """Train groups of one sample whose rollouts have their numbers."""
        id = self.ask(Train, version, index, last, list(groups), list(groups))
        self.fact(Phase, id, "update", 5)
        self.u += 1
        self.fact(Trained, id, self.u, tokens)
        self.fact(Done, id)

    def install(self, version: int, *engines: int, flush: bool = True) -> None:
        """Transfer a version in two buckets, and flush."""
        id = self.ask(Transfer, version, list(engines), "broadcast", 6)
        for e in engines:
            self.fact(Updating, id, e, version)
        for index, size in ((0, 6), (1, 4)):
            for e in engines:
                self.fact(Bucket, id, e, index, size)
        for e in engines:
            self.fact(Installed, id, e, version, 10)
        self.fact(Done, id)
        for e in engines if flush else ():
            self.do(Flush, e)

    def out(self, version: int, *engines: int) -> None:
        """Install and publish."""
        self.install(version, *engines)
        self.note(Publish(version, list(engines)))

    def end(self) -> History:
        """Stop and end well."""
        id = self.ask(Stop)
        self.fact(End, id)
        return self.history


def crash() -> History:
    """An engine goes down amid a rollout, which is sent to the other one, and comes back; something is measured."""
    s = Script(engines=2).begin()
    s.admit()
    s.send(0, engine=1)
    s.fact(Observed, 1, "rss", 1.0)
    s.fact(Down, 1, "it died")
    s.send(0, engine=0)
    s.fact(Up, 1)
    for tag, size in (("weights", 10), ("kv", 20)):
        id = s.ask(Wake, 1, [tag])
        s.fact(Resident, id, 1, "engine", tag, size)
        s.fact(Done, id)
        if tag == "weights":
            s.install(0, 1, flush=False)
    s.finish(0)
    s.note(Accept(0))
    s.train(1, 0)
    s.out(1, 0, 1)
    return s.end()


def histories() -> Iterator[tuple[str, History]]:
    """Every whole history, by name."""
    for name in RUNS:
        yield name, simulated(name)
    yield "crash", crash()
